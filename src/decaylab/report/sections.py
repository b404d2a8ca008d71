"""The sections of a report: claims, tables, figures and theory, each from what is recorded."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from decaylab.paper import TIERS, Artefact, Readings, artefacts, cells
from decaylab.paper import Cell as PaperCell
from decaylab.paper.claims import Claim, judge
from decaylab.paper.tiers import stand_ins
from decaylab.report.drawing import Panel, draw
from decaylab.report.figures import panels
from decaylab.report.names import counted_seeds, named
from decaylab.report.page import Block, Cell, Grid, Image, Section, Tone
from decaylab.report.tables import (
    Entry,
    Measured,
    Table,
    legend,
    number,
    pairs,
    to_grid,
    with_runs,
)
from decaylab.theory import STATEMENTS, Check

VERDICTS: dict[str, Tone] = {"supported": "good", "contradicted": "bad"}
UNDECAYED = ("0", "none", "baseline", "undecayed")  # values of a table's last key


@dataclass(frozen=True)
class Filled:
    """One artefact at one tier, with what the records have of it: a table, or panels."""

    artefact: Artefact
    tier: str
    cells: Sequence[PaperCell]
    done: int
    table: Table | None = None
    panels: Sequence[Panel] = ()

    @property
    def coverage(self) -> str:
        """How much there is, in words."""
        return f"{self.done} of {len(self.cells)} cells"


def fill(artefact: Artefact, tier: str, readings: Readings, seeds: int) -> Filled:
    """An artefact at a tier, with up to `seeds` finished runs a cell."""
    folder = readings.store.root / "searched"
    found = cells(artefact.name, tier, seeds, searched_folder=folder)
    if artefact.kind == "table":
        table = _table(artefact, tier, found, readings)
        return Filled(artefact, tier, found, table.filled, table)
    done = sum(bool(readings.finished(cell)) for cell in found)
    return Filled(artefact, tier, found, done, panels=panels(artefact, found, readings))


def _table(artefact: Artefact, tier: str, found: Sequence[PaperCell], readings: Readings) -> Table:
    factor, metric = 100.0 if artefact.percent else 1.0, artefact.metric
    *columns, last = artefact.keys
    schemes = [str(cell.key.get(last, 0)) for cell in found]
    sides = [scheme not in UNDECAYED for scheme in set(schemes)]
    several = sides.count(True) > 1 or sides.count(False) > 1
    entries = []
    for cell, scheme in zip(found, schemes, strict=True):
        values = tuple(factor * value for value in readings.values(cell.runs, metric))
        entries.append(
            Entry(
                key=tuple(str(cell.key.get(name, "")) for name in columns),
                decayed=scheme not in UNDECAYED,
                paper=cell.paper,
                ours=Measured(values),
                tier=tier,
                comparable=not TIERS[tier].on_digits,
                own=Measured(tuple(factor * v for v in readings.values(cell.own, metric))),
                setting=_setting(cell),
                scheme=scheme if several else "",
            )
        )
    effect = "difference" if artefact.percent else "ratio"
    return Table(artefact.keys, tuple(entries), effect)  # type: ignore[arg-type]


def _setting(cell: PaperCell) -> str:
    """What our own search found for a cell, beside what is published."""
    if not cell.own:
        return ""
    ours, theirs = cell.own[0], cell.runs[0]
    words = {"lr": "lr", "weight_decay": "decay", "damping": "damping"}
    values = [
        f"{word} {getattr(ours, name):g} instead of {getattr(theirs, name):g}"
        for name, word in words.items()
        if getattr(ours, name) != getattr(theirs, name)
    ]
    edges = " and ".join(words[name] for name in cell.own_edges)
    return ", ".join(values) + (f", on the edge of what was tried: {edges}" if edges else "")


def tables_section(filled: Sequence[Filled], readings: Readings, tier: str) -> Section:
    """The paper's tables at one tier."""
    tables = [one for one in filled if one.table is not None]
    blocks = [_table_block(one, readings) for one in tables if one.done]
    text = [
        "Colour tells how near a number is to the paper's: green within 0.5 points (norms:"
        " a factor of 1.5), yellow within 1.5 points (a factor of 3), red beyond; grey where"
        " they are not comparable. The effect of decay is coloured from two seeds a side on:"
        " green in the paper's direction, red against it, yellow where its 95 % interval holds"
        " zero.",
        *_not_run(tables, tier),
    ]
    return Section(f"tables-{tier}", f"Tables, tier {tier}", text, blocks)


def figures_section(filled: Sequence[Filled], readings: Readings, tier: str) -> Section:
    """The paper's figures at one tier."""
    figures = [one for one in filled if one.table is None]
    blocks = [_figure_block(one, readings) for one in figures if one.done]
    text = [
        "Every line is one run, every point one net; bars are means over seeds.",
        *_not_run(figures, tier),
    ]
    return Section(f"figures-{tier}", f"Figures, tier {tier}", text, blocks)


def _not_run(filled: Sequence[Filled], tier: str) -> list[str]:
    """Which artefacts have no run at a tier, in a sentence."""
    names = [_number(one.artefact) or one.artefact.name for one in filled if not one.done]
    command = f"`decaylab reproduce NAME --tier {tier}`"
    return [f"No runs yet: {', '.join(names)} ({command})."] if names else []


def _table_block(filled: Filled, readings: Readings) -> Block:
    assert filled.table is not None
    shown, rows = with_runs(filled.table), len(pairs(filled.table))
    missing = [_without_setting(filled)]
    if len(shown) < rows:
        command = f"`decaylab reproduce {filled.artefact.name} --tier {filled.tier}`"
        missing.insert(0, f"{rows - len(shown)} of {rows} rows have no run yet: {command}")
    return Block(
        f"{filled.artefact.name}-{filled.tier}",
        titled(filled.artefact),
        text=[*_shows(filled.artefact), *filter(None, [legend(filled.table)])],
        note=_note(filled, readings),
        grids=[to_grid(filled.table, shown)],
        missing=". ".join(filter(None, missing)),
    )


def _figure_block(filled: Filled, readings: Readings) -> Block:
    drawn = [panel for panel in filled.panels if not panel.empty]
    titles = {panel.title for panel in drawn}
    empty = dict.fromkeys(
        f"{panel.title} over {panel.x_label}" if panel.title in titles else panel.title
        for panel in filled.panels
        if panel.empty
    )
    missing = _without_setting(filled)
    if empty:
        missing = f"Nothing recorded yet for {_first(list(empty))}. {missing}".strip()
    return Block(
        f"{filled.artefact.name}-{filled.tier}",
        titled(filled.artefact),
        text=_shows(filled.artefact),
        note=_note(filled, readings),
        images=[Image(draw(panel), _alternative(panel)) for panel in drawn],
        missing=missing,
    )


def titled(artefact: Artefact) -> str:
    """`Table 1: ...`."""
    return f"{_number(artefact) or artefact.name}: {artefact.title}"


def _number(artefact: Artefact) -> str:
    """`Table 1` for one of the paper's, "" for one of the user's own."""
    found = re.fullmatch("(table|fig)([0-9]+)", artefact.name)
    return f"{'Table' if found[1] == 'table' else 'Figure'} {found[2]}" if found else ""


def _shows(artefact: Artefact) -> list[str]:
    whose = "The paper: " if artefact.kind == "table" else "The paper's figure: "
    return [f"{whose if _number(artefact) else ''}{artefact.shows}"]


def _alternative(panel: Panel) -> str:
    labels = ", ".join(dict.fromkeys(mark.label for mark in panel.marks))
    over = f" over {panel.x_label}" if panel.x_label else ""
    return f"{panel.title}: {panel.y_label}{over} for {labels}"


def _note(filled: Filled, readings: Readings) -> str:
    """Coverage, tier, device and data of what is shown; what its runs lack."""
    runs = [run for cell in filled.cells for run in readings.finished(cell)]
    devices = ", ".join(dict.fromkeys(run.manifest.device for run in runs))
    seeds = {len(readings.finished(cell)) for cell in filled.cells} - {0}
    parts = [f"{filled.coverage}, tier {filled.tier}" + (f", on {devices}" if devices else "")]
    if runs and TIERS[filled.tier].on_digits:
        nets = stand_ins((run.spec for run in runs), named)
        parts.append(f"names are the paper's, the numbers those of stand-ins on digits: {nets}")
    elif runs:
        on: dict[str, dict[str, None]] = {}
        for run in runs:
            on.setdefault(named(run.spec.data), {})[named(run.spec.network)] = None
        parts.append(", ".join(f"{data} ({', '.join(of)})" for data, of in on.items()))
    if seeds:
        least, most = min(seeds), max(seeds)
        parts.append(counted_seeds(most) if least == most else f"{least} to {most} seeds")
    distinct = len({run.spec.id for run in runs})
    if distinct < len(runs):
        parts.append(f"{distinct} runs serve these cells, some more than one")
    lacking = list(readings.lacking(filled.cells))
    if lacking:
        named_probes = dict.fromkeys(probe for _, probes in lacking for probe in probes)
        counted = "1 run" if len(lacking) == 1 else f"{len(lacking)} runs"
        parts.append(f"{' or '.join(named_probes)} not recorded in {counted}")
    return "; ".join(parts) + "."


def _without_setting(filled: Filled) -> str:
    needs = [cell.missing for cell in filled.cells if cell.missing]
    commands = [f"`{need.removeprefix('needs search: ')}`" for need in dict.fromkeys(needs)]
    first = _first(commands, most=1)
    return f"{len(needs)} cells have no setting yet and need a search: {first}" if needs else ""


def _first(names: Sequence[str], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def claims_section(claims: Sequence[Claim], tier: str) -> Section:
    """E1-E17, judged from the records of one tier."""
    header = [Cell(name) for name in ("", "verdict", "claim", "where", "what was seen")]
    header += [Cell(name, "number") for name in ("effect", "spread", "runs")]
    rows = [
        [
            Cell(claim.id),
            Cell(claim.told, tone=VERDICTS.get(claim.verdict, "plain")),
            Cell(claim.claim, "words"),
            Cell(claim.where),
            Cell(claim.effect or "—", "words", more="; ".join(claim.notes)),
            Cell(number(claim.value), "number"),
            Cell(number(claim.spread), "number"),
            Cell(str(claim.n), "number"),
        ]
        for claim in claims
    ]
    counts: dict[str, int] = {}
    for claim in claims:
        counts[claim.said] = counts.get(claim.said, 0) + 1
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    block = Block(
        f"claims-{tier}",
        f"The paper's claims at tier {tier}: {said}",
        grids=[Grid(header, rows)],
    )
    return Section(f"claims-section-{tier}", f"Claims, tier {tier}", blocks=[block])


def judged(readings: Readings, tier: str, seeds: int) -> list[Claim]:
    """The claims at a tier."""
    return judge(readings, tier, seeds, readings.store.root / "searched")


def overview(filled: Iterable[Filled]) -> Block:
    """How much of each artefact there is, a column a tier."""
    found: dict[str, dict[str, Filled]] = {}
    for one in filled:
        found.setdefault(one.artefact.name, {})[one.tier] = one
    tiers = dict.fromkeys(tier for at in found.values() for tier in at)
    header = [Cell("table or figure"), *(Cell(f"tier {tier}") for tier in tiers)]
    header.append(Cell("what the paper shows"))
    rows = []
    for at in found.values():
        artefact = next(iter(at.values())).artefact
        row = [Cell(titled(artefact), "words")]
        row += [Cell(one.coverage, tone=_fullness(one)) for one in at.values()]
        rows.append([*row, Cell(artefact.shows, "words")])
    text = ["A cell is one setting of a table or figure, such as a network, optimizer and decay."]
    return Block("overview", "How much there is", text=text, grids=[Grid(header, rows)])


def _fullness(one: Filled) -> Tone:
    return "good" if one.done == len(one.cells) else "near" if one.done else "plain"


def theory_checks() -> list[Check]:
    """T1-T8 computed now. The matrices are small: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [check for statement in STATEMENTS.values() for check in statement()]
    finally:
        torch.set_num_threads(threads)


def theory_section(checks: Sequence[Check]) -> Section:
    """Both sides of each statement, and how far apart they are; broken conditions too."""
    header = [
        Cell(""),
        Cell("where"),
        Cell("checked on"),
        *(Cell(n, "number") for n in ("left side", "right side", "relative error", "tolerance")),
        Cell(""),
    ]
    rows = []
    for check in checks:
        if check.kind == "broken":
            verdict = Cell("broken" + ", but holds" * check.holds, tone="plain")
        else:
            verdict = Cell("holds", tone="good") if check.holds else Cell("FAILS", tone="bad")
        sides = (
            f"{check.left:.4g}",
            f"{check.right:.4g}",
            f"{check.error:.1e}",
            f"{check.tolerance:g}",
        )
        rows.append(
            [
                Cell(check.id),
                Cell(check.where),
                Cell(check.condition),
                *(Cell(side, "number") for side in sides),
                verdict,
            ]
        )
    stated = [check for check in checks if check.kind == "statement"]
    title = f"{sum(check.holds for check in stated)} of {len(stated)} checks of the statements hold"
    text = [
        "Each numbered statement of the paper on random networks. Both sides are computed on"
        " their own, in double precision. In the rows marked broken, a condition is violated on"
        " purpose and the sides come apart, which shows that the check can fail."
    ]
    block = Block("theory", title, grids=[Grid(header, rows)])
    return Section("theory-section", "Theory", text, [block])


def all_artefacts() -> list[Artefact]:
    """Tables first, then figures, in the paper's order; of each, those not in the paper last."""

    def place(one: Artefact) -> tuple[bool, bool, str]:
        return one.kind != "table", not re.fullmatch(r"(table|fig)\d", one.name), one.name

    return sorted(artefacts().values(), key=place)
