"""The sections of a report: claims, tables, figures and theory, each from what is recorded."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from decaylab.document import Grid, GridCell, Image, Kind, Section, Subsection, Tone, cells
from decaylab.paper import TIERS, Artefact, Cell, FinishedRuns, artefacts
from decaylab.paper import cells as paper_cells
from decaylab.paper.claims import Claim
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
from decaylab.training import RunSpec

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
    chosen = paper_cells(artefact.name, tier, seeds, searched_folder=folder)
    if artefact.kind == "table":
        table = _table(artefact, tier, chosen, finished_runs)
        return Filled(artefact, tier, chosen, table.filled, table)
    done = sum(bool(finished_runs.of_cell(cell)) for cell in chosen)
    return Filled(artefact, tier, chosen, done, panels=panels(artefact, chosen, finished_runs))


def _table(
    artefact: Artefact, tier: str, chosen: Sequence[Cell], finished_runs: FinishedRuns
) -> Table:
    factor = 100.0 if artefact.percent else 1.0
    *columns, last = artefact.keys
    schemes = [str(cell.key.get(last, 0)) for cell in chosen]
    sides = Counter(scheme in UNDECAYED for scheme in set(schemes))

    def over_seeds(specs: Sequence[RunSpec]) -> OverSeeds:
        values = finished_runs.values(specs, artefact.metric)
        return OverSeeds(tuple(factor * value for value in values))

    entries = [
        Entry(
            key=tuple(str(cell.key.get(name, "")) for name in columns),
            decayed=scheme not in UNDECAYED,
            paper=cell.paper,
            ours=over_seeds(cell.runs),
            tier=tier,
            first=over_seeds(cell.runs[:1]).mean,
            comparable=not TIERS[tier].on_digits,
            searched=over_seeds(cell.searched_runs),
            setting=_setting(cell),
            scheme=scheme if max(sides.values()) > 1 else "",
        )
        for cell, scheme in zip(chosen, schemes, strict=True)
    ]
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
    tables = [item for item in filled if item.table is not None]
    blocks = [_table_block(item, finished_runs) for item in tables if item.done]
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
    figures = [item for item in filled if item.table is None]
    blocks = [_figure_block(item, finished_runs, sheets) for item in figures if item.done]
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
    names = [_number(item.artefact) or item.artefact.name for item in filled if not item.done]
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
    still = [panel for panel in filled.drawn if not is_curves(panel)]
    empty = dict.fromkeys(
        f"{panel.title} over {panel.x_label}" if panel.title in titles else panel.title
        for panel in filled.panels
        if panel.empty
    )
    missing = _without_setting(filled)
    if empty:
        missing = f"Nothing recorded yet for {_first(list(empty))}. {missing}".strip()
    pictures = zip(sheets[filled.anchor].alone, still, strict=True) if still else ()
    return Subsection(
        filled.anchor,
        titled(filled.artefact),
        text=_shows(filled.artefact),
        note=_note(filled, finished_runs),
        images=[Image(image, _alternative(panel)) for image, panel in pictures],
        charts=[panel for panel in filled.drawn if is_curves(panel)],
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
        names = "the names are the paper's, but the numbers are from stand-ins on digits"
        parts.append(f"{names}: {nets}")
    elif runs:
        networks_by_data = defaultdict[str, dict[str, None]](dict)
        for run in runs:
            networks_by_data[named(run.spec.data)][named(run.spec.network)] = None
        trained = (f"{data} ({', '.join(nets)})" for data, nets in networks_by_data.items())
        parts.append(", ".join(trained))
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
    header = cells(["", "verdict", "claim", "where", "what was seen"])
    header += cells(["effect", "spread", "runs"], "number")
    rows = []
    for claim in claims:
        link, tone = _evidence(claim, tier, shown), VERDICTS.get(claim.verdict, "plain")
        kind: Kind = "words" if len(claim.parts) > 1 else ""
        numbers = [number(claim.value), number(claim.spread), str(claim.n)]
        rows.append(
            [
                GridCell(claim.id),
                GridCell(claim.status_by_part, kind, tone=tone, link=link),
                GridCell(claim.claim, "words"),
                GridCell(claim.where, link=link),
                GridCell(claim.effect or "—", "words", notes="; ".join(claim.notes)),
                *cells(numbers, "number"),
            ]
        )
    counts = Counter(claim.status for claim in claims)
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    title = f"The paper's claims at tier {tier}: {tally}"
    block = Subsection(f"claims-{tier}", title, grids=[Grid(header, rows)])
    return Section(f"claims-section-{tier}", f"Claims, tier {tier}", blocks=[block])


def _evidence(claim: Claim, tier: str, shown: Collection[str]) -> str:
    """The anchor of the first table or figure that the claim is about; "" if none is shown."""
    places = re.findall(r"(Table|Fig)\D*(\d+)", claim.where)
    names = [f"{kind.lower()}{number}" for kind, number in places]
    return next((f"{name}-{tier}" for name in names if name in shown), "")


def overview(filled: Iterable[Filled]) -> Subsection:
    """How much of each artefact there is, a column a tier."""
    by_artefact = defaultdict[str, list[Filled]](list)
    for item in filled:
        by_artefact[item.artefact.name].append(item)
    tiers = dict.fromkeys(f"tier {item.tier}" for items in by_artefact.values() for item in items)
    header = cells(["table or figure", *tiers, "what the paper shows"])
    rows = []
    for items in by_artefact.values():
        artefact = items[0].artefact
        coverage = [
            GridCell(item.coverage, tone=_fullness(item), link=item.anchor if item.done else "")
            for item in items
        ]
        title, shows = cells([titled(artefact), artefact.shows], "words")
        rows.append([title, *coverage, shows])
    text = ["A cell is one setting of a table or figure, such as a network, optimizer and decay."]
    return Subsection("overview", "How much there is", text=text, grids=[Grid(header, rows)])


def _fullness(filled: Filled) -> Tone:
    return "good" if filled.done == len(filled.cells) else "near" if filled.done else "plain"


def theory_section(checks: Sequence[Check]) -> Section:
    """Both sides of each statement, and how far apart they are; broken conditions too."""
    numbers = cells(["left side", "right side", "relative error", "tolerance"], "number")
    header = [*cells(["", "where", "checked on"]), *numbers, GridCell("")]
    rows = []
    for check in checks:
        if check.kind == "broken":
            verdict = GridCell("broken" + ", but holds" * check.holds, tone="plain")
        elif check.holds:
            verdict = GridCell("holds", tone="good")
        else:
            verdict = GridCell("FAILS", tone="bad")
        sides = [f"{check.left:.4g}", f"{check.right:.4g}", f"{check.error:.1e}"]
        numbers = cells([*sides, f"{check.tolerance:g}"], "number")
        words = cells([check.id, check.where, check.condition])
        rows.append([*words, *numbers, verdict])
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
    return sorted(artefacts().values(), key=lambda a: (a.kind != "table", not _number(a), a.name))
