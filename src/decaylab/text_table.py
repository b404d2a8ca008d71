"""Tables as plain text that fit a width: nothing is ever cut.

A table that is too wide first writes what dotted names share once, above them, then wraps its words
and headings, then drops the columns that matter least, then is transposed, and as a last resort is
printed in parts that repeat the first column.
"""

import importlib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from decaylab.errors import printable

GAP = "  "
PROSE = 24, 14  # columns that words are not squeezed below: at first, and before a table is split


@dataclass(frozen=True)
class Column:
    """A heading, and how its cells may be laid out.

    Attributes:
        number: align to the right.
        words: cells are sentences, and wrap between words.
        path: cells are dotted names, whose beginning may stand above them; of the first column.
        drop: in a narrow table, columns go in the order of this number, the highest first; those
            with 0 stay.
    """

    heading: str
    number: bool = False
    words: bool = False
    path: bool = False
    drop: int = 0


class Styled(NamedTuple):
    """The text of a cell, and a style that a terminal may show."""

    text: str
    style: str = ""


Line = list[Styled]
"""A printed line: pieces of text with their styles."""


class _Layout(NamedTuple):
    columns: list[int]
    widths: list[int]


class TextTable:
    """Columns and rows of text.

    >>> table = TextTable([Column("layer"), Column("norm", number=True)])
    >>> table.add("conv1", "12.5")
    >>> print(table)
    layer  norm
    conv1  12.5
    """

    def __init__(
        self, columns: Iterable[Column], rows: Iterable[Sequence[Styled | str]] = ()
    ) -> None:
        self.columns = list(columns)
        self.rows: list[list[Styled]] = []
        self._above: dict[int, str] = {}  # row -> the line above it
        for row in rows:
            self.add(*row)

    def add(self, *cells: Styled | str) -> None:
        """Add a row; cells left out at its end are empty."""
        row = [cell if isinstance(cell, Styled) else Styled(cell) for cell in cells]
        row = [Styled(printable(text), style) for text, style in row]
        self.rows.append(row + [Styled("")] * (len(self.columns) - len(row)))

    def __str__(self) -> str:
        return self.text(80)

    def text(self, width: int) -> str:
        """The table at most `width` columns wide."""
        lines = ("".join(piece.text for piece in line).rstrip() for line in self.lines(width))
        return "\n".join(lines)

    def lines(self, width: int) -> list[Line]:
        """The same with styles, line by line."""
        if self.columns and self.columns[0].path and not self._above:
            nested = self._nested(width)
            if nested._above and nested._fitted_all(width):
                return nested.lines(width)
        shown = self._without_least(width)
        layout = self._fitted(shown, width) or self._fitted(shown, width, PROSE[1])
        turned = None if layout else self._on_its_side(shown)
        if layout:
            lines = list(self._drawn(layout))
        elif turned and (layout := turned._fitted_all(width)):
            lines = list(turned._drawn(layout))
        else:
            parts = [list(self._drawn(part)) for part in self._parts(shown, width)]
            lines = [line for part in parts for line in (*part, [Styled("")])][:-1]
        return lines + self._left_out(shown, width)

    def _nested(self, width: int) -> "TextTable":
        """The same, where names that are too long stand indented under what they share."""
        others = sum(
            len(GAP) + (self._least(i) if column.words else self._natural(i))
            for i, column in enumerate(self.columns)
            if i
        )
        names = [row[0].text for row in self.rows]
        nested = TextTable(self.columns)
        for prefix, first, last in _sections(names, width - others):
            if prefix:
                nested._above[len(nested.rows)] = prefix
            for name, row in zip(names[first:last], self.rows[first:last], strict=True):
                shorter = GAP + name.removeprefix(prefix) if prefix else name
                nested.add(Styled(shorter, row[0].style), *row[1:])
        return nested

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Rich's protocol: the table is as wide as what holds it, such as a panel."""
        text = importlib.import_module("rich.text").Text
        for line in self.lines(options.max_width):
            yield text.assemble(*line, no_wrap=True, overflow="ignore")

    def _fitted_all(self, width: int) -> _Layout | None:
        return self._fitted(list(range(len(self.columns))), width)

    def _without_least(self, width: int) -> list[int]:
        """The columns left when those that may go have gone, one by one, until the rest fits."""
        shown = list(range(len(self.columns)))
        optional = sorted((column.drop, i) for i, column in enumerate(self.columns) if column.drop)
        while optional and self._fitted(shown, width) is None:
            shown.remove(optional.pop()[1])
        return shown

    def _left_out(self, shown: Sequence[int], width: int) -> list[Line]:
        names = [c.heading for i, c in enumerate(self.columns) if i not in shown and c.heading]
        if not names:
            return []
        words = f"not shown at this width: {', '.join(names)}"
        return [[Styled(line, "dim")] for line in wrapped(words, width)]

    def _fitted(self, columns: Sequence[int], width: int, prose: int = PROSE[0]) -> _Layout | None:
        """Widths with which these columns fit, or None. Words take what the others leave."""
        room = width - len(GAP) * (len(columns) - 1)
        natural = [self._natural(i) for i in columns]
        if sum(natural) <= room:
            return _Layout(list(columns), natural)
        least = [self._least(i, prose) for i in columns]
        spare = room - sum(least)
        if spare < 0:
            return None
        widths = list(least)
        for place in sorted(range(len(columns)), key=lambda p: self.columns[columns[p]].words):
            gain = min(spare, natural[place] - least[place])
            if not self.columns[columns[place]].words and gain < natural[place] - least[place]:
                gain = 0  # a heading wraps between words, so that half of the way does not help
            widths[place] += gain
            spare -= gain
        return _Layout(list(columns), widths)

    def _natural(self, column: int) -> int:
        texts = [self.columns[column].heading, *(row[column].text for row in self.rows)]
        return max(len(line) for text in texts for line in text.split("\n"))

    def _least(self, column: int, prose: int = PROSE[0]) -> int:
        heading = max(map(len, self.columns[column].heading.split() or [""]))
        texts = [row[column].text for row in self.rows]
        if not self.columns[column].words:
            lines = [line for text in texts for line in text.split("\n")]
            return max([heading, *map(len, lines)])
        longest = max((len(word) for text in texts for word in text.split()), default=0)
        return max(heading, longest, min(prose, max(map(len, texts), default=0)))

    def _on_its_side(self, columns: Sequence[int]) -> "TextTable | None":
        """Rows as columns, for a table of numbers by name."""
        if not all(self.columns[i].number for i in columns[1:]) or not self.rows:
            return None
        first = columns[0]
        headings = [Column(self.columns[first].heading)]
        headings += [Column(row[first].text, number=True) for row in self.rows]
        rows = [[Styled(self.columns[i].heading), *(row[i] for row in self.rows)] for i in columns]
        return TextTable(headings, rows[1:])

    def _parts(self, columns: Sequence[int], width: int) -> Iterator[_Layout]:
        """The columns in parts that fit, the first one in each."""
        first, *rest = columns
        lead = min(self._least(first), max(width // 2, 12))
        part: list[int] = []
        used = lead
        for column in rest:
            needed = len(GAP) + self._least(column)
            if part and used + needed > width:
                yield self._part(first, lead, part, width)
                part, used = [], lead
            part.append(column)
            used += needed
        yield self._part(first, lead, part, width)

    def _part(self, first: int, lead: int, part: list[int], width: int) -> _Layout:
        widths = [lead, *(self._least(i) for i in part)]
        over = sum(widths) + len(GAP) * len(part) - width
        if over > 0 and len(widths) > 1:  # one cell alone is too long: it is broken at a mark in it
            widths[-1] = max(widths[-1] - over, 8)
        spare = width - sum(widths) - len(GAP) * len(part)
        for place, column in enumerate((first, *part)):
            gain = min(max(spare, 0), self._natural(column) - widths[place])
            if self.columns[column].words or place == 0:
                widths[place] += max(gain, 0)
                spare -= max(gain, 0)
        return _Layout([first, *part], widths)

    def _drawn(self, layout: _Layout) -> Iterator[Line]:
        headings = [Styled(self.columns[i].heading, "dim") for i in layout.columns]
        if any(heading.text for heading in headings):
            yield from self._row(layout, headings)
        width = sum(layout.widths) + len(GAP) * (len(layout.widths) - 1)
        for number, row in enumerate(self.rows):
            if number in self._above:
                yield from ([Styled(line)] for line in wrapped(self._above[number], width))
            yield from self._row(layout, [row[i] for i in layout.columns])

    def _row(self, layout: _Layout, cells: Sequence[Styled]) -> Iterator[Line]:
        blocks = [
            wrapped(cell.text, width) for cell, width in zip(cells, layout.widths, strict=True)
        ]
        for height in range(max(map(len, blocks))):
            line: Line = []
            for place, (cell, block) in enumerate(zip(cells, blocks, strict=True)):
                text = block[height] if height < len(block) else ""
                blanks = " " * (layout.widths[place] - len(text))
                pieces = [Styled(text, cell.style), Styled(blanks)]
                if self.columns[layout.columns[place]].number:
                    pieces.reverse()
                line += [Styled(GAP if place else ""), *pieces]
            yield line


def _sections(names: Sequence[str], room: int) -> Iterator[tuple[str, int, int]]:
    """Neighbours that share a beginning, where some of them are longer than `room`.

    What they share, up to a dot, the first and the one behind the last of them.

    >>> list(_sections(["fc", "net.layer.0.attention", "net.layer.0.norm", "net.head"], 16))
    [('', 0, 1), ('net.layer.', 1, 3), ('', 3, 4)]
    """
    yield from _split(names, room, 0, len(names), 0)


def _split(
    names: Sequence[str], room: int, first: int, last: int, depth: int
) -> Iterator[tuple[str, int, int]]:
    """The sections of `names[first:last]`, which share their first `depth` parts."""
    part = names[first:last]
    prefix = "".join(f"{piece}." for piece in part[0].split(".")[:depth]) if part else ""
    if max(map(len, part), default=0) <= room:
        yield "", first, last
    elif prefix and max(len(GAP) + len(name) - len(prefix) for name in part) <= room:
        yield prefix, first, last
    else:
        for key, group in groupby(range(first, last), lambda i: names[i].split(".")[depth:][:1]):
            numbers = list(group)
            alone = len(numbers) == 1 and names[numbers[0]].count(".") <= depth
            if alone or not key:
                yield "", numbers[0], numbers[-1] + 1
            else:
                yield from _split(names, room, numbers[0], numbers[-1] + 1, depth + 1)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width`: broken between words, and longer words at a mark inside them.

    >>> wrapped("decay removed 0.44 % of the weights", 16)
    ['decay removed', '0.44 % of the', 'weights']
    >>> wrapped("/home/someone/data/cifar10", 12)
    ['/home/', 'someone/', 'data/cifar10']
    """
    if len(text) <= width and "\n" not in text:
        return [text]
    lines: list[str] = []
    for paragraph in text.split("\n"):
        indent = paragraph[: len(paragraph) - len(paragraph.lstrip())]
        pieces = textwrap.wrap(
            paragraph,
            width,
            break_long_words=False,
            break_on_hyphens=False,
            subsequent_indent=indent,
        )
        for piece in pieces or [""]:
            lines += [piece] if len(piece) <= width else _broken(piece, width)
    return lines


def _broken(word: str, width: int) -> list[str]:
    """A word longer than the width, broken after a separator if it has one."""
    lines = [""]
    for piece in re.findall(r"[^/._\-=:,]*[/._\-=:,]+|[^/._\-=:,]+$", word):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return [line[at : at + width] for line in lines for at in range(0, len(line), width)]


def in_words(seconds: float) -> str:
    """A duration for people.

    >>> in_words(42.4), in_words(200), in_words(9000)
    ('42 s', '3.3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
