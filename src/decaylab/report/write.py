"""From a folder of runs to the files of a report."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import decaylab
from decaylab.document import Report, Section, to_markdown
from decaylab.paper import FinishedRuns
from decaylab.paper.claims import Claim, judge
from decaylab.records import RunStore
from decaylab.records.files import disk_errors, replace_file, replace_text
from decaylab.report.beside import beside
from decaylab.report.diagnoses import diagnosed, diagnoses_section
from decaylab.report.drawing import check_extra
from decaylab.report.figures import panels_csv
from decaylab.report.findings import findings_section
from decaylab.report.mechanisms import demo_runs, demo_section
from decaylab.report.page import to_html
from decaylab.report.provenance import provenance, seeds_of, tiers_of
from decaylab.report.sections import (
    Filled,
    all_artefacts,
    claims_section,
    figures_section,
    fill,
    overview,
    tables_section,
    theory_section,
)
from decaylab.report.sheets import Sheet, sheets_beside
from decaylab.report.tables import to_csv
from decaylab.sweeps.run_index import indexed_runs
from decaylab.theory import Check, all_checks


@dataclass(frozen=True)
class Written:
    """Where the report is, and what is in it."""

    page: Path
    files: tuple[Path, ...]
    runs: int
    coverage: dict[str, dict[str, tuple[int, int]]]
    left_out: tuple[str, ...]


def write_report(
    runs: Path,
    out: Path,
    checks: Sequence[Check] | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> Written:
    """Read a folder of runs and write `index.html`, `report.md`, CSVs and `figures/*.png`.

    `checks` are the theory's, where they are computed already; else another process computes them.
    `tell` is called with each stage, in words.
    """
    check_extra()
    if checks is not None:
        return _write_report(runs, out, lambda: checks, tell)
    with beside(all_checks) as computed:
        return _write_report(runs, out, computed, tell)


def _write_report(
    runs: Path, out: Path, checks: Callable[[], Sequence[Check]], tell: Callable[[str], None]
) -> Written:
    """The same; `checks` is called as late as possible, since it may have to wait."""
    store = RunStore(runs)
    finished_runs = FinishedRuns(store)
    tell(f"reading the runs in {runs}")
    indexed, left_out = indexed_runs(store)
    seeds, filled = seeds_of(indexed), []
    for tier in tiers_of(indexed) or ["full"]:
        for artefact in all_artefacts():
            tell(f"filling {artefact.name} at tier {tier}")
            filled.append(fill(artefact, tier, finished_runs, seeds))
    demo = demo_runs(indexed, finished_runs)
    demo_sections = [demo_section(demo)] if demo else []
    figures = {
        **{block.anchor: block.charts for part in demo_sections for block in part.blocks},
        **{figure.anchor: figure.drawn for figure in filled if figure.done},
    }
    with sheets_beside({name: drawn for name, drawn in figures.items() if drawn}) as drawn_sheets:
        tell(f"diagnosing {len(indexed)} runs")
        cases, undiagnosed = diagnosed(indexed)
        tell("judging the claims")
        shown_tiers = dict.fromkeys(item.tier for item in filled if item.done)
        claims = {tier: judge(finished_runs, tier, seeds) for tier in shown_tiers}
        tell("drawing the figures")
        theory, sheets = checks(), drawn_sheets()
    notices = tuple(dict.fromkeys([*left_out, *finished_runs.left_out, *undiagnosed]))
    report = Report(
        "decaylab: what weight decay does",
        f"{len(indexed)} runs in {runs.name or runs}, read on {datetime.now(UTC):%Y-%m-%d %H:%M}"
        f" UTC by decaylab {decaylab.__version__}",
        [
            findings_section(claims, cases, theory),
            *demo_sections,
            *_paper_sections(claims, filled, finished_runs, sheets),
            *([diagnoses_section(cases)] if cases else []),
            Section("overview-section", "Coverage", blocks=[overview(filled)]),
            theory_section(theory),
            provenance(indexed),
        ],
        notices,
        "Every number is from a record; paper: Zhang, Wang, Xu, Grosse, Three Mechanisms of Weight"
        " Decay Regularization, ICLR 2019.",
    )
    tell("writing the files")
    files = _write(report, filled, sheets, out)
    coverage = defaultdict[str, dict[str, tuple[int, int]]](dict)
    for item in filled:
        coverage[item.tier][item.artefact.name] = item.done, len(item.cells)
    return Written(out / "index.html", tuple(files), len(indexed), coverage, notices)


def _paper_sections(
    claims: Mapping[str, Sequence[Claim]],
    filled: Sequence[Filled],
    finished_runs: FinishedRuns,
    sheets: Mapping[str, Sheet],
) -> list[Section]:
    sections = []
    for tier, judged in claims.items():
        at_tier = [item for item in filled if item.tier == tier]
        shown = {item.artefact.name for item in at_tier if item.done}
        sections += [
            claims_section(judged, tier, shown),
            tables_section(at_tier, finished_runs, tier),
            figures_section(at_tier, finished_runs, tier, sheets),
        ]
    return sections


def _write(
    report: Report, filled: Sequence[Filled], sheets: Mapping[str, Sheet], out: Path
) -> list[Path]:
    with disk_errors(out):
        (out / "figures").mkdir(parents=True, exist_ok=True)
    contents = {"index.html": to_html(report), "report.md": to_markdown(report)}
    by_artefact = defaultdict[str, list[Filled]](list)
    for item in filled:
        by_artefact[item.artefact.name].append(item)
    for name, tiers in by_artefact.items():
        tables = [item.table for item in tiers if item.table is not None]
        drawn = ((item.tier, item.panels) for item in tiers)
        contents[f"{name}.csv"] = to_csv(tables) if tables else panels_csv(drawn)
    for name, text in contents.items():
        replace_text(out / name, text)
    pictures = {f"figures/{name}.png": sheet.png for name, sheet in sheets.items()}
    for name, png in pictures.items():
        replace_file(out / name, partial(Path.write_bytes, data=png))
    return [out / name for name in (*contents, *pictures)]
