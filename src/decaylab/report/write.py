"""From a folder of runs to the files of a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import decaylab
from decaylab.paper import Readings
from decaylab.records import RunStore
from decaylab.records.files import disk_errors, replace_file, replace_text
from decaylab.report.diagnoses import Case, diagnosed, diagnoses_section
from decaylab.report.drawing import check_extra, side_by_side
from decaylab.report.figures import panels_csv
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
    theory_checks,
    theory_section,
)
from decaylab.report.tables import to_csv
from decaylab.sweeps.survey import Found, survey
from decaylab.theory import Check


@dataclass(frozen=True)
class Written:
    """Where the report is, and what is in it."""

    page: Path
    files: tuple[Path, ...]
    runs: int
    coverage: dict[str, dict[str, tuple[int, int]]]
    left_out: tuple[str, ...]


def write_report(runs: Path, out: Path, checks: Sequence[Check] | None = None) -> Written:
    """Read a folder of runs and write `index.html`, `report.md`, CSVs and `figures/*.png`.

    `checks` are the theory's, where they are computed already; else they are computed now.
    """
    check_extra()
    store = RunStore(runs)
    readings = Readings(store)
    found, left_out = survey(store)
    filled = _filled(found, readings)
    checks = theory_checks() if checks is None else checks
    cases, undiagnosed = diagnosed(found)
    sections = _sections(found, filled, readings, cases, checks)
    notices = tuple(dict.fromkeys([*left_out, *readings.left_out, *undiagnosed]))
    report = Report(
        "decaylab: what weight decay does",
        f"{len(found)} runs in {runs.name or runs}, read on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        f" by decaylab {decaylab.__version__}",
        sections,
        notices,
        "Every number is from a record; paper: Zhang, Wang, Xu, Grosse, Three Mechanisms of Weight"
        " Decay Regularization, ICLR 2019.",
    )
    files = _write(report, filled, out)
    coverage: dict[str, dict[str, tuple[int, int]]] = {}
    for one in filled:
        coverage.setdefault(one.tier, {})[one.artefact.name] = (one.done, len(one.cells))
    return Written(out / "index.html", tuple(files), len(found), coverage, notices)


def _filled(found: Sequence[Found], readings: Readings) -> list[Filled]:
    """Every artefact at each tier there are runs of; at none, at the paper's own."""
    seeds = seeds_of(found)
    tiers = tiers_of(found) or ["full"]
    return [fill(one, tier, readings, seeds) for tier in tiers for one in all_artefacts()]


def _sections(
    found: Sequence[Found],
    filled: Sequence[Filled],
    readings: Readings,
    cases: Sequence[Case],
    checks: Sequence[Check],
) -> list[Section]:
    demo = demo_runs(found, readings)
    paper = [Section("overview-section", "The paper", blocks=[overview(filled)])]
    for tier in dict.fromkeys(one.tier for one in filled):
        here = [one for one in filled if one.tier == tier]
        if any(one.done for one in here):
            paper += [
                claims_section(judged(readings, tier, seeds_of(found)), tier),
                tables_section(here, readings, tier),
                figures_section(here, readings, tier),
            ]
    own = [diagnoses_section(cases)] if cases else []
    of_the_paper = any(one.done for one in filled)
    return [
        *([demo_section(demo)] if demo else []),
        *((*paper, *own) if of_the_paper else (*own, *paper)),
        *(theory_section(checks), provenance(found)),
    ]


def _write(report: Report, filled: Sequence[Filled], out: Path) -> list[Path]:
    figures = out / "figures"
    with disk_errors(out):
        figures.mkdir(parents=True, exist_ok=True)
    texts = {"index.html": to_html(report), "report.md": to_markdown(report)}
    for name in dict.fromkeys(one.artefact.name for one in filled):
        tiers = [one for one in filled if one.artefact.name == name]
        tables = [one.table for one in tiers if one.table is not None]
        texts[f"{name}.csv"] = (
            to_csv(tables) if tables else panels_csv((one.tier, one.panels) for one in tiers)
        )
    for name, text in texts.items():
        replace_text(out / name, text)
    files = [out / name for name in texts]
    for block in (block for section in report.sections for block in section.blocks):
        if block.images:
            sheet = side_by_side([image.png for image in block.images])
            path = figures / f"{block.anchor}.png"
            replace_file(path, partial(Path.write_bytes, data=sheet))
            files.append(path)
    return files
