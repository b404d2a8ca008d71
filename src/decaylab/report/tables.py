"""Tables: the paper's number beside ours, as data, Markdown and CSV.

A row without decay and one with it make a pair, and the pair's difference (or, for norms, ratio) is
the effect of decay. Every number has its spread (sample standard deviation over seeds) and n beside
it; one seed is called one seed.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Effect = Literal["difference", "ratio"]
Agreement = Literal["agrees", "near", "differs", "other setting", "missing"]

# Points of accuracy, and factors of a norm, within which ours agrees with or is near the paper's.
WITHIN: dict[Effect, tuple[float, float]] = {"difference": (0.5, 1.5), "ratio": (1.5, 3.0)}


@dataclass(frozen=True)
class Measured:
    """One number over seeds; `values` is empty where no run has it."""

    values: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        """How many seeds."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None without any."""
        return fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two.

        >>> Measured((1.0, 3.0)).spread, Measured((1.0,)).spread
        (1.4142135623730951, None)
        """
        return stdev(self.values) if self.n > 1 else None

    def words(self) -> str:
        """The number as read by people.

        >>> Measured((90.0, 91.0)).words(), Measured((90.0,)).words(), Measured().words()
        ('90.50 ± 0.71 (n = 2)', '90.00 (one seed)', '—')
        """
        if self.mean is None:
            return "—"
        if self.spread is None:
            return f"{number(self.mean)} (one seed)"
        return f"{number(self.mean)} ± {number(self.spread)} (n = {self.n})"


@dataclass(frozen=True)
class Entry:
    """One cell: its key, the paper's number, ours, and where ours comes from.

    `planned` is how many seeds were asked for. `comparable` is whether data and network are the
    paper's; else the difference says nothing, and is not coloured. `key` excludes the decay.
    """

    key: tuple[str, ...]
    decayed: str
    paper: float | None
    ours: Measured
    tier: str
    device: str = ""
    comparable: bool = False


@dataclass(frozen=True)
class Table:
    """One table of the paper at one tier."""

    name: str
    title: str
    quantity: str
    key_columns: tuple[str, ...]
    entries: tuple[Entry, ...]
    effect: Effect = "difference"
    decay_column: str = "weight_decay"

    @property
    def filled(self) -> int:
        """Cells with at least one run."""
        return sum(entry.ours.n > 0 for entry in self.entries)

    @property
    def coverage(self) -> str:
        """How much of the table there is, in words."""
        return f"{self.filled} of {len(self.entries)} cells"

    @property
    def where(self) -> str:
        """Tiers and devices of the numbers."""
        tiers = dict.fromkeys(entry.tier for entry in self.entries)
        devices = dict.fromkeys(e.device for e in self.entries if e.device)
        return f"tier {', '.join(tiers)}" + (f", on {', '.join(devices)}" if devices else "")


def number(value: float | None) -> str:
    """A number in about four digits.

    >>> [number(x) for x in (93.456, 0.00123, 27650.0, float("nan"), None)]
    ['93.46', '0.00123', '27650', 'nan', '—']
    """
    if value is None:
        return "—"
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 0.01:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def change(one: float | None, other: float | None, effect: Effect) -> float | None:
    """`other` against `one`: the difference, or the ratio; None where one is missing.

    >>> change(90.0, 92.5, "difference"), change(100.0, 25.0, "ratio"), change(None, 1.0, "ratio")
    (2.5, 0.25, None)
    """
    if one is None or other is None or (effect == "ratio" and one == 0):
        return None
    return other - one if effect == "difference" else other / one


def change_words(value: float | None, effect: Effect) -> str:
    """A difference with its sign, a ratio with a cross.

    >>> change_words(2.5, "difference"), change_words(0.25, "ratio"), change_words(None, "ratio")
    ('+2.50', '× 0.25', '—')
    """
    if value is None:
        return "—"
    return f"{value:+.2f}" if effect == "difference" else f"× {number(value)}"


def agreement(entry: Entry, effect: Effect) -> Agreement:
    """How near ours is to the paper's, where they can be compared at all."""
    distance = change(entry.paper, entry.ours.mean, effect)
    if distance is None:
        return "missing"
    if not entry.comparable:
        return "other setting"
    size = abs(distance) if effect == "difference" else max(distance, 1 / max(distance, 1e-300))
    agrees, near = WITHIN[effect]
    return "agrees" if size <= agrees else "near" if size <= near else "differs"


@dataclass(frozen=True)
class Pair:
    """The same cell without and with decay; either may be missing from the paper's table."""

    key: tuple[str, ...]
    sides: tuple[Entry | None, Entry | None]

    def effect(self, kind: Effect, *, paper: bool) -> float | None:
        """What decay changes: in the paper's numbers or in ours."""
        without, with_decay = self.sides
        if without is None or with_decay is None:
            return None
        if paper:
            return change(without.paper, with_decay.paper, kind)
        return change(without.ours.mean, with_decay.ours.mean, kind)


def pairs(table: Table) -> list[Pair]:
    """The entries by key, without and with decay side by side."""
    found: dict[tuple[str, ...], dict[bool, Entry]] = {}
    for entry in table.entries:
        found.setdefault(entry.key, {})[entry.decayed not in ("0", "none")] = entry
    return [Pair(key, (of.get(False), of.get(True))) for key, of in found.items()]


def to_csv(table: Table) -> str:
    """The key columns, then `paper, ours, spread, n, tier`; an empty field where there is none."""
    header = [*table.key_columns, table.decay_column, "paper", "ours", "spread", "n", "tier"]
    rows = ([*entry.key, entry.decayed, *_numbers(entry), entry.tier] for entry in table.entries)
    return csv_text(header, rows)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as CSV with unix line ends."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


def to_markdown(table: Table) -> str:
    """The table of pairs, under a heading that says how much of it there is, where and when."""
    header = [*(_words(column) for column in table.key_columns)]
    for side in ("no decay", "decay"):
        header += [f"{side}: paper", "ours", "ours − paper" if _plus(table) else "ours / paper"]
    header += ["effect: paper", "ours"]
    rows = [_pair_row(pair, table.effect) for pair in pairs(table)]
    head = f"### {table.title}\n\n{table.quantity}; {table.coverage}, {table.where}\n\n"
    return head + markdown_rows(header, rows)


def markdown_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in lines
    )


def _pair_row(pair: Pair, effect: Effect) -> list[str]:
    row = list(pair.key)
    for entry in pair.sides:
        if entry is None:
            row += ["—", "—", "—"]
        else:
            distance = change(entry.paper, entry.ours.mean, effect)
            row += [number(entry.paper), entry.ours.words(), change_words(distance, effect)]
    effects = (pair.effect(effect, paper=True), pair.effect(effect, paper=False))
    return [*row, *(change_words(value, effect) for value in effects)]


def _plus(table: Table) -> bool:
    return table.effect == "difference"


def _numbers(entry: Entry) -> list[str]:
    ours = entry.ours
    return [_plain(entry.paper), _plain(ours.mean), _plain(ours.spread), str(ours.n)]


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _words(column: str) -> str:
    return column.replace("_", " ")
