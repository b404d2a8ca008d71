"""The sections of a report: claims, tables, figures and theory, each from what is recorded."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from decaylab.document import Grid, GridCell, Image, Section, Subsection, Tone
from decaylab.paper import TIERS, Artefact, Cell, FinishedRuns, artefacts, cells
from decaylab.paper.claims import Claim, judge
from decaylab.paper.tiers import stand_ins
from decaylab.report.curves import is_curves
from decaylab.report.drawing import Panel
from decaylab.report.figures import panels
from decaylab.report.names import counted_seeds, named
from decaylab.report.sheets import Sheet
from decaylab.report.tables import (
    Entry,
    OverSeeds,
    Table,
    legend,
    number,
    pairs,
    to_grid,
    with_runs,
)
from decaylab.theory import Check

VERDICTS: dict[str, Tone] = {"supported": "good", "contradicted": "bad"}
UNDECAYED = ("0", "none", "baseline", "undecayed")  # values of a table's last key


@dataclass(frozen=True)
class Filled:
    """One artefact at one tier, with what the records have of it: a table, or panels."""

    artefact: Artefact
    tier: str
    cells: Sequence[Cell]
    done: int
    table: Table | None = None
    panels: Sequence[Panel] = ()

    @property
    def coverage(self) -> str:
        """How much there is, in words."""
        return f"{self.done} of {len(self.cells)} cells"

    @property
    def anchor(self) -> str:
        """Its name on the page, and that of its files."""
        return f"{self.artefact.name}-{self.tier}"

    @property
    def drawn(self) -> list[Panel]:
        """The panels that show something."""
        return [panel for panel in self.panels if not panel.empty]


def fill(artefact: Artefact, tier: str, finished_runs: FinishedRuns, seeds: int) -> Filled:
    """An artefact at a tier, with up to `seeds` finished runs a cell."""
    folder = finished_runs.store.root / "searched"
    artefact_cells = cells(artefact.name, tier, seeds, searched_folder=folder)
    if artefact.kind == "table":
        table = _table(artefact, tier, artefact_cells, finished_runs)
        return Filled(artefact, tier, artefact_cells, table.filled, table)
    done = sum(bool(finished_runs.of_cell(cell)) for cell in artefact_cells)
    return Filled(
        artefact, tier, artefact_cells, done, panels=panels(artefact, artefact_cells, finished_runs)
    )


def _table(
    artefact: Artefact, tier: str, artefact_cells: Sequence[Cell], finished_runs: FinishedRuns
) -> Table:
    factor, metric = 100.0 if artefact.percent else 1.0, artefact.metric
    *columns, last = artefact.keys
    schemes = [str(cell.key.get(last, 0)) for cell in artefact_cells]
    sides = [scheme not in UNDECAYED for scheme in set(schemes)]
    several = sides.count(True) > 1 or sides.count(False) > 1
    entries = []
    for cell, scheme in zip(artefact_cells, schemes, strict=True):
        ours, searched = (
            OverSeeds(tuple(factor * value for value in finished_runs.values(specs, metric)))
            for specs in (cell.runs, cell.searched_runs)
        )
        entries.append(
            Entry(
                key=tuple(str(cell.key.get(name, "")) for name in columns),
                decayed=scheme not in UNDECAYED,
                paper=cell.paper,
                ours=ours,
                tier=tier,
                comparable=not TIERS[tier].on_digits,
                searched=searched,
                setting=_setting(cell),
                scheme=scheme if several else "",
            )
        )
    effect = "difference" if artefact.percent else "ratio"
    return Table(artefact.keys, tuple(entries), effect)  # type: ignore[arg-type]


def _setting(cell: Cell) -> str:
    """What our own search found for a cell, beside what is published."""
    if not cell.searched_runs:
        return ""
    ours, theirs = cell.searched_runs[0], cell.runs[0]
    words = {"lr": "lr", "weight_decay": "decay", "damping": "damping"}
    values = [
        f"{word} {getattr(ours, name):g} instead of {getattr(theirs, name):g}"
        for name, word in words.items()
        if getattr(ours, name) != getattr(theirs, name)
    ]
    edges = " and ".join(words[name] for name in cell.searched_edges)
    return ", ".join(values) + (f", on the edge of what was tried: {edges}" if edges else "")


def tables_section(filled: Sequence[Filled], finished_runs: FinishedRuns, tier: str) -> Section:
    """The paper's tables at one tier."""
    tables = [filled_table for filled_table in filled if filled_table.table is not None]
    blocks = [
        _table_block(filled_table, finished_runs) for filled_table in tables if filled_table.done
    ]
    text = [
        "The colour says how close a number is to the paper's: green within 0.5 points (norms: a"
        " factor of 1.5), yellow within 1.5 points (a factor of 3), red beyond, grey if the two"
        " cannot be compared. The effect of decay is coloured once both sides have two seeds:"
        " green in the paper's direction, red against it, yellow if its 95 % interval includes"
        " zero.",
        *_not_run(tables, tier),
    ]
    return Section(f"tables-{tier}", f"Tables, tier {tier}", text, blocks)


def figures_section(
    filled: Sequence[Filled], finished_runs: FinishedRuns, tier: str, sheets: Mapping[str, Sheet]
) -> Section:
    """The paper's figures at one tier; `sheets`: the pictures of each, by its anchor."""
    figures = [filled_figure for filled_figure in filled if filled_figure.table is None]
    blocks = [
        _figure_block(filled_figure, finished_runs, sheets)
        for filled_figure in figures
        if filled_figure.done
    ]
    text = [
        "Lines and bars are means over seeds; the band goes from the lowest to the highest run."
        " Each point is one network. Dashed lines and marks on bars are the numbers the paper"
        " prints. Point at a curve to read its values, drag to zoom, double-click to reset, click a"
        " name to hide its curves.",
        *_not_run(figures, tier),
    ]
    return Section(f"figures-{tier}", f"Figures, tier {tier}", text, blocks)


def _not_run(filled: Sequence[Filled], tier: str) -> list[str]:
    """Which artefacts have no run at a tier, in a sentence."""
    names = [
        _number(filled_artefact.artefact) or filled_artefact.artefact.name
        for filled_artefact in filled
        if not filled_artefact.done
    ]
    command = f"`decaylab reproduce NAME --tier {tier}`"
    return [f"No runs yet: {', '.join(names)} ({command})."] if names else []


def _table_block(filled: Filled, finished_runs: FinishedRuns) -> Subsection:
    assert filled.table is not None
    shown, rows = with_runs(filled.table), len(pairs(filled.table))
    missing = [_without_setting(filled)]
    if len(shown) < rows:
        command = f"`decaylab reproduce {filled.artefact.name} --tier {filled.tier}`"
        missing.insert(0, f"{rows - len(shown)} of {rows} rows have no run yet: {command}")
    return Subsection(
        filled.anchor,
        titled(filled.artefact),
        text=[*_shows(filled.artefact), *filter(None, [legend(filled.table)])],
        note=_note(filled, finished_runs),
        grids=[to_grid(filled.table, shown)],
        missing=". ".join(filter(None, missing)),
    )


def _figure_block(
    filled: Filled, finished_runs: FinishedRuns, sheets: Mapping[str, Sheet]
) -> Subsection:
    titles = {panel.title for panel in filled.drawn}
    charts = [panel for panel in filled.drawn if is_curves(panel)]
    still = [panel for panel in filled.drawn if not is_curves(panel)]
    empty = dict.fromkeys(
        f"{panel.title} over {panel.x_label}" if panel.title in titles else panel.title
        for panel in filled.panels
        if panel.empty
    )
    missing = _without_setting(filled)
    if empty:
        missing = f"Nothing recorded yet for {_first(list(empty))}. {missing}".strip()
    pictures = sheets[filled.anchor].alone if still else []
    return Subsection(
        filled.anchor,
        titled(filled.artefact),
        text=_shows(filled.artefact),
        note=_note(filled, finished_runs),
        images=[
            Image(image, _alternative(panel)) for image, panel in zip(pictures, still, strict=True)
        ],
        charts=charts,
        missing=missing,
    )


def titled(artefact: Artefact) -> str:
    """`Table 1: ...`, or an artefact of one's own with the name that `reproduce` takes."""
    number = _number(artefact)
    return f"{number}: {artefact.title}" if number else f"{artefact.title} ({artefact.name})"


def _number(artefact: Artefact) -> str:
    """`Table 1` for one of the paper's, "" for one of the user's own."""
    match = re.fullmatch("(table|fig)([0-9]+)", artefact.name)
    return f"{'Table' if match[1] == 'table' else 'Figure'} {match[2]}" if match else ""


def _shows(artefact: Artefact) -> list[str]:
    whose = "The paper: " if artefact.kind == "table" else "The paper's figure: "
    return [f"{whose if _number(artefact) else ''}{artefact.shows}"]


def _alternative(panel: Panel) -> str:
    labels = ", ".join(dict.fromkeys(mark.label for mark in panel.marks))
    over = f" over {panel.x_label}" if panel.x_label else ""
    return f"{panel.title}: {panel.y_label}{over} for {labels}"


def _note(filled: Filled, finished_runs: FinishedRuns) -> str:
    """Coverage, tier, device and data of what is shown; what its runs lack."""
    runs = [run for cell in filled.cells for run in finished_runs.of_cell(cell)]
    devices = ", ".join(dict.fromkeys(run.manifest.device for run in runs))
    seeds = {len(finished_runs.of_cell(cell)) for cell in filled.cells} - {0}
    parts = [f"{filled.coverage}, tier {filled.tier}" + (f", on {devices}" if devices else "")]
    if runs and TIERS[filled.tier].on_digits:
        nets = stand_ins((run.spec for run in runs), named)
        parts.append(
            f"the names are the paper's, but the numbers are from stand-ins on digits: {nets}"
        )
    elif runs:
        networks_by_data: dict[str, dict[str, None]] = {}
        for run in runs:
            networks_by_data.setdefault(named(run.spec.data), {})[named(run.spec.network)] = None
        parts.append(
            ", ".join(
                f"{data} ({', '.join(networks)})" for data, networks in networks_by_data.items()
            )
        )
    if seeds:
        least, most = min(seeds), max(seeds)
        parts.append(counted_seeds(most) if least == most else f"{least} to {most} seeds")
    distinct = len({run.spec.id for run in runs})
    if distinct < len(runs):
        parts.append(f"{distinct} runs serve these cells, some more than one")
    lacking = list(finished_runs.lacking(filled.cells))
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
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + rest


def claims_section(claims: Sequence[Claim], tier: str, shown: Collection[str]) -> Section:
    """E1-E17, judged from the records of one tier; links go to the artefacts that are `shown`."""
    header = [GridCell(name) for name in ("", "verdict", "claim", "where", "what was seen")]
    header += [GridCell(name, "number") for name in ("effect", "spread", "runs")]
    rows = [
        [
            GridCell(claim.id),
            GridCell(
                claim.status_by_part,
                "words" if len(claim.parts) > 1 else "",
                tone=VERDICTS.get(claim.verdict, "plain"),
                link=evidence,
            ),
            GridCell(claim.claim, "words"),
            GridCell(claim.where, link=evidence),
            GridCell(claim.effect or "—", "words", notes="; ".join(claim.notes)),
            GridCell(number(claim.value), "number"),
            GridCell(number(claim.spread), "number"),
            GridCell(str(claim.n), "number"),
        ]
        for claim in claims
        for evidence in [_evidence(claim, tier, shown)]
    ]
    counts: dict[str, int] = {}
    for claim in claims:
        counts[claim.status] = counts.get(claim.status, 0) + 1
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    block = Subsection(
        f"claims-{tier}",
        f"The paper's claims at tier {tier}: {tally}",
        grids=[Grid(header, rows)],
    )
    return Section(f"claims-section-{tier}", f"Claims, tier {tier}", blocks=[block])


def _evidence(claim: Claim, tier: str, shown: Collection[str]) -> str:
    """The anchor of the first table or figure that the claim is about; "" if none is shown."""
    places = re.findall(r"(Table|Fig)\D*(\d+)", claim.where)
    names = [f"{kind.lower()}{number}" for kind, number in places]
    return next((f"{name}-{tier}" for name in names if name in shown), "")


def judged(
    finished_runs: FinishedRuns, tier: str, seeds: int, tell: Callable[[str], None] | None = None
) -> list[Claim]:
    """The claims at a tier; calls `tell` with the one that is judged next."""
    return judge(finished_runs, tier, seeds, finished_runs.store.root / "searched", tell)


def overview(filled: Iterable[Filled]) -> Subsection:
    """How much of each artefact there is, a column a tier."""
    by_artefact: dict[str, dict[str, Filled]] = {}
    for filled_artefact in filled:
        by_artefact.setdefault(filled_artefact.artefact.name, {})[filled_artefact.tier] = (
            filled_artefact
        )
    tiers = dict.fromkeys(tier for by_tier in by_artefact.values() for tier in by_tier)
    header = [GridCell("table or figure"), *(GridCell(f"tier {tier}") for tier in tiers)]
    header.append(GridCell("what the paper shows"))
    rows = []
    for by_tier in by_artefact.values():
        artefact = next(iter(by_tier.values())).artefact
        row = [GridCell(titled(artefact), "words")]
        row += [
            GridCell(
                filled_artefact.coverage,
                tone=_fullness(filled_artefact),
                link=filled_artefact.anchor if filled_artefact.done else "",
            )
            for filled_artefact in by_tier.values()
        ]
        rows.append([*row, GridCell(artefact.shows, "words")])
    text = ["A cell is one setting of a table or figure, such as a network, optimizer and decay."]
    return Subsection("overview", "How much there is", text=text, grids=[Grid(header, rows)])


def _fullness(filled: Filled) -> Tone:
    return "good" if filled.done == len(filled.cells) else "near" if filled.done else "plain"


def theory_section(checks: Sequence[Check]) -> Section:
    """Both sides of each statement, and how far apart they are; broken conditions too."""
    header = [
        GridCell(""),
        GridCell("where"),
        GridCell("checked on"),
        *(
            GridCell(n, "number")
            for n in ("left side", "right side", "relative error", "tolerance")
        ),
        GridCell(""),
    ]
    rows = []
    for check in checks:
        if check.kind == "broken":
            verdict = GridCell("broken" + ", but holds" * check.holds, tone="plain")
        else:
            verdict = (
                GridCell("holds", tone="good") if check.holds else GridCell("FAILS", tone="bad")
            )
        sides = (
            f"{check.left:.4g}",
            f"{check.right:.4g}",
            f"{check.error:.1e}",
            f"{check.tolerance:g}",
        )
        rows.append(
            [
                GridCell(check.id),
                GridCell(check.where),
                GridCell(check.condition),
                *(GridCell(side, "number") for side in sides),
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
    block = Subsection("theory", title, grids=[Grid(header, rows)])
    return Section("theory-section", "Theory", text, [block])


def all_artefacts() -> list[Artefact]:
    """Tables first, then figures, in the paper's order; of each, those not in the paper last."""

    def place(artefact: Artefact) -> tuple[bool, bool, str]:
        return (
            artefact.kind != "table",
            not re.fullmatch(r"(table|fig)\d", artefact.name),
            artefact.name,
        )

    return sorted(artefacts().values(), key=place)
