"""From a folder of runs to the files of a report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import decaylab
from decaylab.paper import FinishedRuns
from decaylab.records import RunStore
from decaylab.records.files import disk_errors, replace_file, replace_text
from decaylab.report.diagnoses import DiagnosedSetting, diagnosed, diagnoses_section
from decaylab.report.drawing import check_extra, side_by_side
from decaylab.report.figures import panels_csv
from decaylab.report.findings import findings_section
from decaylab.report.mechanisms import demo_runs, demo_section
from decaylab.report.page import Report, Section, to_html, to_markdown
from decaylab.report.provenance import provenance, seeds_of, tiers_of
from decaylab.report.sections import (
    Filled,
    all_artefacts,
    claims_section,
    figures_section,
    fill,
    judged,
    overview,
    tables_section,
    theory_section,
)
from decaylab.report.tables import to_csv
from decaylab.report.theory import theory_beside
from decaylab.sweeps.run_index import IndexedRun, indexed_runs
from decaylab.theory import Check


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
    with theory_beside() as computed:
        return _write_report(runs, out, computed, tell)


def _write_report(
    runs: Path, out: Path, checks: Callable[[], Sequence[Check]], tell: Callable[[str], None]
) -> Written:
    """The same; `checks` is called as late as possible, since it may have to wait."""
    store = RunStore(runs)
    finished_runs = FinishedRuns(store)
    tell(f"reading the runs in {runs}")
    indexed, left_out = indexed_runs(store)
    filled = _filled(indexed, finished_runs, tell)
    tell(f"diagnosing {len(indexed)} runs")
    cases, undiagnosed = diagnosed(indexed)
    tell("judging the claims")
    sections = _sections(indexed, filled, finished_runs, cases, checks)
    notices = tuple(dict.fromkeys([*left_out, *finished_runs.left_out, *undiagnosed]))
    report = Report(
        "decaylab: what weight decay does",
        f"{len(indexed)} runs in {runs.name or runs}, read on {datetime.now(UTC):%Y-%m-%d %H:%M}"
        f" UTC by decaylab {decaylab.__version__}",
        sections,
        notices,
        "Every number is from a record; paper: Zhang, Wang, Xu, Grosse, Three Mechanisms of Weight"
        " Decay Regularization, ICLR 2019.",
    )
    tell("drawing the figures and writing the files")
    files = _write(report, filled, out)
    coverage: dict[str, dict[str, tuple[int, int]]] = {}
    for filled_artefact in filled:
        coverage.setdefault(filled_artefact.tier, {})[filled_artefact.artefact.name] = (
            filled_artefact.done,
            len(filled_artefact.cells),
        )
    return Written(out / "index.html", tuple(files), len(indexed), coverage, notices)


def _filled(
    indexed: Sequence[IndexedRun], finished_runs: FinishedRuns, tell: Callable[[str], None]
) -> list[Filled]:
    """Every artefact at each tier there are runs of; at none, at the paper's own."""
    filled = []
    for tier in tiers_of(indexed) or ["full"]:
        for artefact in all_artefacts():
            tell(f"filling {artefact.name} at tier {tier}")
            filled.append(fill(artefact, tier, finished_runs, seeds_of(indexed)))
    return filled


def _sections(
    indexed: Sequence[IndexedRun],
    filled: Sequence[Filled],
    finished_runs: FinishedRuns,
    cases: Sequence[DiagnosedSetting],
    checks: Callable[[], Sequence[Check]],
) -> list[Section]:
    demo = demo_runs(indexed, finished_runs)
    claims, paper = {}, []
    for tier in dict.fromkeys(filled_artefact.tier for filled_artefact in filled):
        at_tier = [filled_artefact for filled_artefact in filled if filled_artefact.tier == tier]
        shown = {
            filled_artefact.artefact.name for filled_artefact in at_tier if filled_artefact.done
        }
        if shown:
            claims[tier] = judged(finished_runs, tier, seeds_of(indexed))
            paper += [
                claims_section(claims[tier], tier, shown),
                tables_section(at_tier, finished_runs, tier),
                figures_section(at_tier, finished_runs, tier),
            ]
    diagnosis = [diagnoses_section(cases)] if cases else []
    theory = checks()
    return [
        findings_section(claims, cases, theory),
        *([demo_section(demo)] if demo else []),
        *((*paper, *diagnosis) if paper else diagnosis),
        Section("overview-section", "Coverage", blocks=[overview(filled)]),
        *(theory_section(theory), provenance(indexed)),
    ]


def _write(report: Report, filled: Sequence[Filled], out: Path) -> list[Path]:
    figures = out / "figures"
    with disk_errors(out):
        figures.mkdir(parents=True, exist_ok=True)
    texts = {"index.html": to_html(report), "report.md": to_markdown(report)}
    for name in dict.fromkeys(filled_artefact.artefact.name for filled_artefact in filled):
        tiers = [
            filled_artefact for filled_artefact in filled if filled_artefact.artefact.name == name
        ]
        tables = [
            filled_artefact.table for filled_artefact in tiers if filled_artefact.table is not None
        ]
        texts[f"{name}.csv"] = (
            to_csv(tables)
            if tables
            else panels_csv(
                (filled_artefact.tier, filled_artefact.panels) for filled_artefact in tiers
            )
        )
    for name, text in texts.items():
        replace_text(out / name, text)
    files = [out / name for name in texts]
    for block in (block for section in report.sections for block in section.blocks):
        if block.images or block.charts:
            sheet = side_by_side([*block.charts, *(image.png for image in block.images)])
            path = figures / f"{block.anchor}.png"
            replace_file(path, partial(Path.write_bytes, data=sheet))
            files.append(path)
    return files
