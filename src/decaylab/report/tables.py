"""Tables: the paper's number next to ours, as data, as a grid to show, and as CSV.

A row without decay and one with it make a pair, and the pair's difference (or, for norms, ratio) is
the effect of decay, from two seeds on with its 95 % interval. Every number has its spread (sample
standard deviation over seeds) and n beside it; one seed is called one seed.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from decaylab.document import Grid, GridCell, Tone, cells
from decaylab.report.names import key_title, key_words, named

Effect = Literal["difference", "ratio"]

OWN = "‡"  # marks numbers at the settings of our own search
# Points of accuracy, and factors of a norm, within which ours agrees with or is near the paper's.
WITHIN: dict[Effect, tuple[float, float]] = {"difference": (0.5, 1.5), "ratio": (1.5, 3.0)}


@dataclass(frozen=True)
class OverSeeds:
    """One number over seeds; `values` is empty if no run has it."""

    values: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        """How many seeds."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None without any."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.values) if self.n > 1 else None

    def words(self) -> str:
        """The number as read by people.

        >>> OverSeeds((90.0, 91.0)).words(), OverSeeds((90.0,)).words(), OverSeeds().words()
        ('90.50 ± 0.71 (n = 2)', '90.00 (one seed)', '—')
        """
        counted = "one seed" if self.n == 1 else f"n = {self.n}"
        return f"{self.short()} ({counted})" if self.n else "—"

    def short(self) -> str:
        """The same without n, for where that is said beside it.

        >>> OverSeeds((5056.0, 6476.0)).short()
        '5766 ± 1004'
        """
        if self.spread is None:
            return number(self.mean)
        return f"{number(self.mean)} ± {self.spread:{'.2g' if self.spread < 99.5 else '.0f'}}"


@dataclass(frozen=True)
class Entry:
    """One cell: its key without the decay, the paper's number, ours, and where ours comes from.

    `comparable`: data and network are the paper's; else the difference says nothing. `searched`
    is the number at the settings of our own search, `setting`, where they differ from those of
    `ours`.
    `scheme`: what is done about decay, in a table that has more than one kind of it.
    `first`: ours of seed 0 alone.
    """

    key: tuple[str, ...]
    decayed: bool
    paper: float | None
    ours: OverSeeds
    tier: str
    comparable: bool = False
    searched: OverSeeds = OverSeeds()
    setting: str = ""
    scheme: str = ""
    first: float | None = None


@dataclass(frozen=True)
class Table:
    """One table of the paper at one tier; the last key column is the decay, 0 or 1."""

    key_columns: tuple[str, ...]
    entries: tuple[Entry, ...]
    effect: Effect = "difference"

    def by_column(self, key: Sequence[str]) -> dict[str, str]:
        """The key of an entry or a pair, with the names of its columns."""
        return dict(zip(self.key_columns, key, strict=False))  # mostly without the last

    @property
    def filled(self) -> int:
        """Cells with at least one run."""
        return sum(entry.ours.n > 0 for entry in self.entries)


@dataclass(frozen=True)
class Pair:
    """The same cell without and with decay; either may be missing.

    In a table of several schemes, the key ends with that of the second side.
    """

    key: tuple[str, ...]
    sides: tuple[Entry | None, Entry | None]

    def effect(self, kind: Effect, *, paper: bool) -> float | None:
        """What decay changes: in the paper's numbers or in ours."""
        before, after = (
            None if side is None else side.paper if paper else side.ours.mean for side in self.sides
        )
        return change(before, after, kind)

    def interval(self, kind: Effect) -> tuple[float, float] | None:
        """Where our effect lies with 95 % confidence; None with fewer than two seeds a side.

        Welch's interval for the difference of two means (of logarithms, where it is a ratio).
        """
        values = [side.ours.values for side in self.sides if side is not None and side.ours.n > 1]
        ratio = kind == "ratio"
        if len(values) < 2 or (ratio and min(map(min, values)) <= 0):
            return None
        without, decayed = [[math.log(v) for v in side] if ratio else side for side in values]
        if len({*without}) == len({*decayed}) == 1:  # no spread, which the test refuses
            low = high = decayed[0] - without[0]
        else:
            from scipy import stats  # slow to import, and seldom needed

            test = stats.ttest_ind(decayed, without, equal_var=False)
            low, high = map(float, test.confidence_interval(0.95))
        return (math.exp(low), math.exp(high)) if ratio else (low, high)

    def tone(self) -> Tone:
        """Whether decay acts in the paper's direction: told from two seeds a side on.

        good: the same sign, and so in the whole interval; bad: the other; near: 0 is in it.
        """
        ours = self.effect("difference", paper=False)
        paper = self.effect("difference", paper=True)
        if ours is None or paper is None:
            return ""
        interval = self.interval("difference")
        if interval is None:
            return "plain"
        if interval[0] <= 0 <= interval[1]:
            return "near"
        return "good" if ours * paper > 0 else "bad"

    def words(self, kind: Effect) -> str:
        """Our effect as read by people, with its interval if there is one."""
        effect = change_words(self.effect(kind, paper=False), kind)
        if (interval := self.interval(kind)) is None:
            return effect
        low, high = (change_words(end, kind) for end in interval)
        return f"{effect} ({low} to {high})"


def number(value: float | None) -> str:
    """A number in three to four digits.

    >>> [number(x) for x in (93.456, 0.0012345, 27650.0, 3.05e8, float("nan"), None)]
    ['93.46', '0.00123', '27650', '3.05e+08', 'nan', '—']
    """
    if value is None:
        return "—"
    if not math.isfinite(value):
        return str(value)
    if value and not 1 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def change(before: float | None, after: float | None, effect: Effect) -> float | None:
    """From `before` to `after`: the difference, or the ratio; None if one is missing.

    >>> change(90.0, 92.5, "difference"), change(100.0, 25.0, "ratio"), change(None, 1.0, "ratio")
    (2.5, 0.25, None)
    """
    if before is None or after is None or (effect == "ratio" and before == 0):
        return None
    return after - before if effect == "difference" else after / before


def change_words(value: float | None, effect: Effect) -> str:
    """A difference with its sign, a ratio with a cross.

    >>> change_words(2.5, "difference"), change_words(0.25, "ratio"), change_words(None, "ratio")
    ('+2.50', '× 0.25', '—')
    """
    if value is None:
        return "—"
    return f"{value:+.2f}" if effect == "difference" else f"× {number(value)}"


def agreement(entry: Entry, effect: Effect) -> Tone:
    """How near ours is to the paper's: good, near, bad; plain if they are not comparable."""
    distance = change(entry.paper, entry.ours.mean, effect)
    if distance is None:
        return ""
    if not entry.comparable:
        return "plain"
    size = abs(distance) if effect == "difference" else max(distance, 1 / max(distance, 1e-300))
    agrees, near = WITHIN[effect]
    return "good" if size <= agrees else "near" if size <= near else "bad"


def pairs(table: Table) -> list[Pair]:
    """The entries by key, without and with decay side by side; of several schemes, each."""
    by_key: dict[tuple[str, ...], list[Entry]] = {}
    for entry in table.entries:
        by_key.setdefault(entry.key, []).append(entry)
    paired = []
    for key, entries in by_key.items():
        without = next((entry for entry in entries if not entry.decayed), None)
        others = [entry for entry in entries if entry is not without]
        paired += [
            Pair((*key, *filter(None, [decayed.scheme])), (without, decayed)) for decayed in others
        ]
        if not others:
            paired.append(Pair(key, (without, None)))
    return paired


def with_runs(table: Table) -> list[Pair]:
    """The pairs that have a run of ours."""
    return [pair for pair in pairs(table) if any(side and side.ours.n for side in pair.sides)]


def to_grid(table: Table, shown: Sequence[Pair] | None = None) -> Grid:
    """The pairs side by side: paper, ours, distance without and with decay, and decay's effect.

    Those of `shown`, else all that have a run. A table that is not the paper's has our numbers
    alone.
    """
    distance = "ours − paper" if table.effect == "difference" else "ours / paper"
    header = cells(["network", *map(named, _apart(table))])
    first = len(header)
    names = ["no decay: paper", "ours", distance, "decay: paper", "ours", distance]
    header += cells([*names, "effect of decay: paper", "ours", "seeds"], "number")
    shown = with_runs(table) if shown is None else shown
    rows = [[*_key_cells(pair, table), *_pair_row(pair, table.effect)] for pair in shown]
    if all(entry.paper is None for entry in table.entries):
        columns = [*range(first), first + 1, first + 4, first + 7, len(header) - 1]
        ours = cells(["no decay", "decay", "effect of decay"], "number")
        header = [*header[:first], *ours, header[-1]]
        rows = [[row[i] for i in columns] for row in rows]
    return Grid(header, rows)


def to_csv(tables: Sequence[Table]) -> str:
    """The key columns, then paper, ours, spread, n and tier; an empty field where there is none.

    Then the same of our own search's settings, and these.
    """
    rows = (
        [
            *(*entry.key, entry.scheme or str(int(entry.decayed)), plain(entry.paper)),
            *(*_numbers(entry.ours), entry.tier, *_numbers(entry.searched), entry.setting),
        ]
        for table in tables
        for entry in table.entries
    )
    names = ("paper", "ours", "spread", "n", "tier", "own", "own_spread", "own_n", "own_setting")
    return csv_text([*tables[0].key_columns, *names], rows)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as CSV with unix line ends."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


def plain(value: float | None) -> str:
    """A number for a CSV; empty if there is none."""
    return "" if value is None else f"{value:.6g}"


def _apart(table: Table) -> list[str]:
    """The key columns that are columns of their own; the others tell the network, in one."""
    return [column for column in table.key_columns if column in ("optimizer", "batch_size")]


def _key_cells(pair: Pair, table: Table) -> list[GridCell]:
    key, apart = table.by_column(pair.key), _apart(table)
    network = key_title(key, [column for column in key if column not in apart])
    return [GridCell(network, "key"), *cells(named(key[column]) for column in apart)]


def _pair_row(pair: Pair, effect: Effect) -> list[GridCell]:
    row: list[GridCell] = []
    for entry in pair.sides:
        if entry is None:
            row += cells(["—"] * 3, "number")
            continue
        distance = change_words(change(entry.paper, entry.ours.mean, effect), effect)
        ours = entry.ours.short()
        if entry.searched.n:
            ours = f"{ours}, {OWN} {entry.searched.short()}"
            searched = change_words(change(entry.paper, entry.searched.mean, effect), effect)
            distance = f"{distance}, {OWN} {searched}"
        row += cells([number(entry.paper), ours], "number")
        row.append(GridCell(distance, "number", agreement(entry, effect)))
    counts = dict.fromkeys(entry.ours.n for entry in pair.sides if entry and entry.ours.n)
    return [
        *row,
        GridCell(change_words(pair.effect(effect, paper=True), effect), "number"),
        GridCell(pair.words(effect), "number", pair.tone()),
        GridCell(seeds_words(*counts), "number"),
    ]


def seeds_words(*counts: int) -> str:
    """How many seeds the numbers of a row are from: they may differ.

    >>> seeds_words(), seeds_words(1), seeds_words(3), seeds_words(1, 3)
    ('none', 'one seed', '3', '1 and 3')
    """
    return "one seed" if counts == (1,) else " and ".join(map(str, counts)) or "none"


def _numbers(ours: OverSeeds) -> list[str]:
    return [plain(ours.mean), plain(ours.spread), str(ours.n)]


def legend(table: Table) -> str:
    """What the marked numbers of a table are, with their settings; empty if there are none."""
    searched = [entry for entry in table.entries if entry.searched.n]
    if not searched:
        return ""
    settings = []
    for entry in searched:
        key = table.by_column(entry.key)
        cell = " ".join(key_words(key, [column for column in key if column != "dataset"]))
        decay = "with" if entry.decayed else "without"
        settings.append(f"{cell} {decay} decay: {entry.setting} ({entry.searched.words()})")
    others = "the published ones" if searched[0].comparable else "those chosen for digits"
    return (
        f"{OWN}: at the settings that our own search on held-out training images found, where they"
        f" differ from {others}. {'; '.join(dict.fromkeys(settings))}."
    )
