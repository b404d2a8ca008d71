"""Diagnoses as a part of the report, and one diagnosis as a page of its own."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import decaylab
from decaylab.diagnosis import Diagnosis, Finding, Mechanism, diagnose
from decaylab.diagnosis.comparable import FREE_TO_DIFFER
from decaylab.diagnosis.layers import RecordedLayer
from decaylab.diagnosis.layout import TONES, mechanism, sections, warnings
from decaylab.diagnosis.runs import Comparison, read_run
from decaylab.diagnosis.words.findings import (
    effect_words,
    follow_texts,
    layer_heading,
    layer_text,
    left_out,
)
from decaylab.diagnosis.words.headline import headline
from decaylab.diagnosis.words.phrases import QUANTITIES, three_digits
from decaylab.document import Grid, GridCell, Report, Section, Subsection, cells
from decaylab.errors import DecaylabError, Lacks
from decaylab.optim.laws.dynamics import Series
from decaylab.report.drawing import Line, Panel, figure_of, line
from decaylab.report.names import counted_seeds, differing, named
from decaylab.report.page import check_page, write_html
from decaylab.sweeps.run_index import IndexedRun
from decaylab.training import RunSpec

SAYS = {
    Mechanism.EFFECTIVE_LR: "If a layer is normalised, the scale of its weights W does not change"
    " what the network computes. It only sets how far a step turns them. Decay keeps |W|"
    " small, and so keeps this effective learning rate high.",
    Mechanism.JACOBIAN: "If a layer's norm is part of the function, decay makes the outputs react"
    " less to a change of the inputs.",
    Mechanism.DAMPING: "K-FAC adds a damping λ to the curvature. Compared with the curvature of the"
    " normalised weights it counts as λ|W|²: as the weights grow, K-FAC turns into SGD. Decay keeps"
    " them small.",
}
WITH, WITHOUT = "weight decay", "baseline"
LAYERS = "Layers whose size does not count"
FREE = frozenset({*FREE_TO_DIFFER, "seed"})
Setting = tuple[object, ...]


@dataclass(frozen=True)
class DiagnosedSetting:
    """Runs of one setting with decay, by seed, each with its diagnosis."""

    spec: RunSpec
    seeds: tuple[int, ...]
    diagnoses: tuple[Diagnosis, ...]

    @property
    def by_mechanism(self) -> list[tuple[Finding, ...]]:
        """The findings on each mechanism, by seed."""
        return list(zip(*(result.findings for result in self.diagnoses), strict=True))


def diagnosed(indexed: Sequence[IndexedRun]) -> tuple[list[DiagnosedSetting], list[str]]:
    """Every run with decay against its baseline, by setting; and what could not be, in words."""
    by_setting = defaultdict[Setting, dict[int, tuple[RunSpec, Diagnosis]]](dict)
    left_out, baselines = [], _baselines(indexed)
    read = cache(read_run)  # a baseline serves several runs
    for run in indexed:
        if run.spec.decay == "none":
            continue
        nearest = _nearest(run.spec, baselines[_setting(run.spec, FREE)])
        try:
            result = diagnose(run.folder, nearest and read(nearest.folder))
        except DecaylabError as error:
            left_out.append(str(error))
            continue
        by_setting[_setting(run.spec, {"seed"})][run.spec.seed] = run.spec, result
    cases = []
    for by_seed in by_setting.values():
        seeds = sorted(by_seed)
        specs, results = zip(*(by_seed[seed] for seed in seeds), strict=True)
        cases.append(DiagnosedSetting(specs[0], tuple(seeds), results))
    return cases, left_out


def baseline_of(spec: RunSpec, indexed: Iterable[IndexedRun]) -> IndexedRun | None:
    """The finished run without decay that is otherwise the same; of the same seed if possible."""
    return _nearest(spec, _baselines(indexed)[_setting(spec, FREE)])


def _nearest(spec: RunSpec, alike: Iterable[IndexedRun]) -> IndexedRun | None:
    return min(alike, key=lambda r: (r.spec.seed != spec.seed, r.spec.seed), default=None)


def _baselines(indexed: Iterable[IndexedRun]) -> Mapping[Setting, list[IndexedRun]]:
    """The finished runs without decay, of any seed, by what a run must share with them."""
    baselines = defaultdict[Setting, list[IndexedRun]](list)
    for run in indexed:
        if (run.spec.decay, run.spec.norm_source, run.manifest.status) == ("none", "", "finished"):
            baselines[_setting(run.spec, FREE)].append(run)
    return baselines


def other_seeds(
    chosen: IndexedRun, indexed: Iterable[IndexedRun]
) -> tuple[list[IndexedRun], list[IndexedRun]]:
    """A run with the finished ones that differ in the seed alone; and those without decay."""
    ours = _setting(chosen.spec, {"seed"})
    finished = [run for run in indexed if run.manifest.status == "finished"]
    finished.sort(key=lambda run: run.spec.seed)
    others = [run for run in finished if _setting(run.spec, {"seed"}) == ours and run is not chosen]
    alike = [chosen, *others]
    baselines = _baselines(finished)[_setting(chosen.spec, FREE)]
    return alike, [run for run in baselines if run not in alike]  # of a run without decay, itself


def _setting(spec: RunSpec, without: AbstractSet[str]) -> Setting:
    return tuple(getattr(spec, item.name) for item in fields(spec) if item.name not in without)


# ---------------------------------------------------------------- in the report


def diagnoses_section(cases: Sequence[DiagnosedSetting]) -> Section:
    """A row per setting with the verdict on each mechanism, and what it rests on, folded."""
    named_cases = [
        (f"diagnosis-{number}", title, case)
        for number, (title, case) in enumerate(zip(_titles(cases), cases, strict=True), start=1)
    ]
    rows = [
        [GridCell(title, "words"), *_verdicts(case, anchor), GridCell(_compared(case))]
        for anchor, title, case in named_cases
    ]
    text = [
        "Which of the three mechanisms decay acts through, for every run with decay, judged from"
        " the records (`decaylab diagnose RUN --against BASE`). The factor in brackets says by how"
        " much decay raises the effective learning rate, or lowers the squared Jacobian norm (or a"
        " Gauss-Newton norm) or the effective damping; with several seeds, the smallest and the"
        " largest. A run is judged alone if no run without decay is otherwise the same, which is"
        " common at the paper's settings: without decay they use another learning rate."
    ]
    grid = Grid(cells(["run", *Mechanism, "compared with"]), rows)
    overview = Subsection("diagnoses", "Verdicts", grids=[grid])
    details = [_details(*named_case) for named_case in named_cases]
    return Section("diagnosis", "Diagnosis", text, [overview, *details])


def _titles(cases: Sequence[DiagnosedSetting]) -> list[str]:
    """The settings in words; of those that read alike, with the fields in which they differ."""
    titles = [_words(case.spec) for case in cases]
    distinct = []
    for title, case in zip(titles, cases, strict=True):
        alike = [other.spec for words, other in zip(titles, cases, strict=True) if words == title]
        values = {name: getattr(case.spec, name) for name in differing(*alike) if name != "seed"}
        differences = (f"no {n}" if value == "" else f"{n} {value}" for n, value in values.items())
        distinct.append(", ".join([title, *differences]))
    return distinct


def _words(spec: RunSpec) -> str:
    hidden = "x".join(map(str, spec.hidden or ()))
    network = f"{named(spec.network)} {hidden}".strip()
    net = [named(spec.data), network, "BN" if spec.batch_norm else "no BN"]
    net += ["Aug"] if spec.augment else []
    net += [f"batch {spec.batch_size}", f"{spec.epochs} epochs"]
    scope = "" if spec.decay_scope == "all" else f" of {spec.decay_scope}"
    decay = f"{named(spec.decay)} {spec.weight_decay:g}{scope}"
    stepped = f"{named(spec.optimizer)}, lr {spec.lr:g}"
    if spec.damping is not None:
        stepped += f", damping {spec.damping:g}"
    return f"{stepped}, {decay}; {', '.join(net)}"


def _verdicts(case: DiagnosedSetting, link: str) -> Iterable[GridCell]:
    for findings in case.by_mechanism:
        counts = Counter(finding.verdict for finding in findings)
        verdict, *others = counts
        text, tone = str(verdict), TONES[verdict]
        if others:  # seeds that disagree are not told apart by a colour
            text = "; ".join(f"{kind} {n} of {len(findings)}" for kind, n in counts.items())
            tone = "near"
        factors = [finding.effect.value for finding in findings if finding.effect]
        if factors:
            low, high = three_digits(min(factors)), three_digits(max(factors))
            text += f" ({low}x)" if low == high else f" ({low}x to {high}x)"
        yield GridCell(text, tone=tone, link=link)


def _compared(case: DiagnosedSetting) -> str:
    with_baseline = sum(bool(result.baselines) for result in case.diagnoses)
    seeds = counted_seeds(len(case.seeds))
    if not with_baseline:
        return f"judged alone, {seeds}"
    some = f" in {with_baseline} of" if with_baseline < len(case.seeds) else ","
    return f"no decay{some} {seeds}"


def _details(anchor: str, title: str, case: DiagnosedSetting) -> Subsection:
    """The evidence of a setting: what to know first, the reasons, factors by layer and seed."""
    first = [text for result in case.diagnoses for text in warnings(result)]
    seeds = [str(seed) for seed in case.seeds]
    follows = _by_seed([follow_texts(result) for result in case.diagnoses], seeds)
    by_layer = [
        _layers_by_seed(findings, seeds)
        for findings in case.by_mechanism
        if any(row.effect for finding in findings for row in finding.layers)
    ]
    skipped = [
        f"Left out: {layers} ({why})." for why, layers in left_out(case.diagnoses[0]).items()
    ]
    return Subsection(
        anchor,
        title,
        text=[*dict.fromkeys(first), *follows, *skipped],
        note="Runs: " + ", ".join(name for result in case.diagnoses for name in result.runs) + ".",
        grids=[_reasons(case, seeds), *by_layer],
        folded=True,
    )


def _by_seed(texts: Sequence[Sequence[str]], seeds: Sequence[str]) -> list[str]:
    """What is said of all seeds, and what is said of some, with those.

    >>> _by_seed([["a", "b"], ["a", "c"], ["a", "c"]], ["0", "1", "2"])
    ['a', 'Seed 0: b', 'Seeds 1, 2: c']
    """
    seeds_by_sentence: dict[str, list[str]] = {}
    for sentences, seed in zip(texts, seeds, strict=True):
        for sentence in sentences:
            seeds_by_sentence.setdefault(sentence, []).append(seed)
    lines = []
    for sentence, same in seeds_by_sentence.items():
        prefix = f"Seed{'s' * (len(same) > 1)} {', '.join(same)}: "
        lines.append(sentence if len(same) == len(seeds) else prefix + sentence)
    return lines


def _reasons(case: DiagnosedSetting, seeds: Sequence[str]) -> Grid:
    """A row per mechanism and seed; seeds of which the same is to be said share one."""
    places = case.diagnoses[0].places  # what to do is said of one seed, for all
    rows = []
    for name, findings in zip(Mechanism, case.by_mechanism, strict=True):
        seeds_by_reason = defaultdict[tuple[str, str, str], list[str]](list)
        for finding, seed in zip(findings, seeds, strict=True):
            section = mechanism(finding, places)
            seeds_by_reason[section.badge, " ".join(section.text), section.note].append(seed)
        for (verdict, *texts), same in seeds_by_reason.items():
            badge = GridCell(verdict, tone=TONES[verdict])
            rows.append([*cells([name, ", ".join(same)]), badge, *cells(texts, "words")])
    return Grid(cells(["mechanism", "seeds", "verdict", "why", "records"]), rows)


def _layers_by_seed(findings: Sequence[Finding], seeds: Sequence[str]) -> Grid:
    """A row per layer, a column per seed; a layer without a factor says why."""
    names = dict.fromkeys(row.layer for finding in findings for row in finding.layers)
    rows: list[list[GridCell]] = []
    for name in names:
        layer_rows = [next((x for x in f.layers if x.layer == name), None) for f in findings]
        texts = cells([layer_text(x) if x else "—" for x in layer_rows], "words")
        if rows and rows[-1][1:] == texts and not any(x and x.effect for x in layer_rows):
            rows[-1][0] = GridCell(f"{rows[-1][0].text}, {name}", "words")  # layers for one reason
        else:
            rows.append([GridCell(name, "key"), *texts])
    header = cells(["layer", *(f"seed {seed}" for seed in seeds)])
    return Grid(header, rows, f"By layer: {layer_heading(findings[0])}")


# ---------------------------------------------------------------- a page of its own


def write_page(result: Diagnosis, path: Path) -> Path:
    """Write a result with its figures as one offline HTML file; its path."""
    check_page(path)
    write_html(path, diagnosis_report(result))
    return path


def diagnosis_figure(result: Diagnosis) -> Any:
    """All curves of a result as a matplotlib figure."""
    shown = [panel for finding in result.findings for panel in _panels(finding, result)]
    if not shown:
        remedy = 'record more, say with watch(..., every=10, probes="diagnosis", inputs=batch)'
        raise Lacks("this diagnosis", "curves to draw", remedy)
    return figure_of(shown)


def diagnosis_report(result: Diagnosis) -> Report:
    """One diagnosis as a page: the answer, verdicts, what follows, each mechanism's evidence."""
    others = ", ".join(result.baselines)
    against = f"against {others}" if others else "from this run alone"
    blocks = sections(result)
    evidence = [
        replace(
            block,
            anchor=f"mechanism-{number}",
            title=f"{number}. {block.title}",
            text=[SAYS[finding.mechanism], *block.text],
            charts=_panels(finding, result),
        )
        for number, (block, finding) in enumerate(zip(blocks, result.findings, strict=False), 1)
    ]
    return Report(
        f"What weight decay does in {', '.join(result.runs)}",
        f"Judged {against}, {result.compared[0][0].steps} steps, on"
        f" {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by decaylab {decaylab.__version__}",
        [
            Section("result", "Result", blocks=[_overview(result), *blocks[len(evidence) :]]),
            Section("evidence", "Evidence", blocks=evidence),
        ],
        warnings(result),
        "Every number is from a record. Factors are means over the second half of the records. The"
        " range is over these records, or over layers for a factor of several layers. In figures,"
        " every line is one layer of one run. Mechanisms: Zhang, Wang, Xu, Grosse, Three Mechanisms"
        " of Weight Decay Regularization, ICLR 2019.",
        notices_title="Know this first",
    )


def _overview(result: Diagnosis) -> Subsection:
    """The answer, and a row per mechanism that leads to its evidence."""
    rows = [
        [
            GridCell(finding.mechanism, "key"),
            GridCell(finding.verdict, tone=TONES[finding.verdict], link=f"mechanism-{number}"),
            GridCell(effect_words(finding) or "—", "words"),
        ]
        for number, finding in enumerate(result.findings, start=1)
    ]
    grid = Grid(cells(["mechanism", "verdict", "effect"]), rows)
    return Subsection("verdicts", "Verdicts", [headline(result)], grids=[grid])


def _panels(finding: Finding, result: Diagnosis) -> list[Panel]:
    """What is recorded of a mechanism over the steps, a line per layer and run.

    A baseline that cannot be compared with the runs is not drawn beside them.
    """
    mine = [run for run, _ in result.compared]
    others = {id(other): other for _, other in result.compared if other is not None}
    runs = [*((WITH, run) for run in mine), *((WITHOUT, run) for run in others.values())]
    if finding.mechanism is Mechanism.JACOBIAN:
        row = next(iter(finding.effect.probes if finding.effect else ()), "")
        lines = [line(label, run.totals.get(row, ())) for label, run in runs]
        quantity = QUANTITIES.get(row, row)
        panels = [Panel("Whole model", "step", quantity, lines, log_y=True)]
    elif finding.mechanism is Mechanism.EFFECTIVE_LR:
        kfac = all(layer.preconditioned for run in mine for layer in run.layers.values())
        effective = [] if kfac else _of_layers(result, lambda layer: layer.effective)
        turns = _of_layers(result, lambda layer: layer.series.get("rotation", ()))
        panels = [
            Panel(LAYERS, "step", "effective learning rate", effective, log_y=True),
            Panel(LAYERS, "step", "norm |W|", _of_layers(result, lambda x: x.norms), log_y=True),
            Panel(LAYERS, "step", "angle per step", turns, log_y=True),
        ]
    else:
        damping = _of_layers(result, lambda layer: layer.series.get("effective_damping", ()))
        share = _of_layers(result, lambda layer: layer.series.get("second_order_share", ()))
        panels = [
            Panel(LAYERS, "step", "effective damping λ|W|²", damping, log_y=True),
            Panel(LAYERS, "step", "second-order share", share),
        ]
    return [panel for panel in panels if not panel.empty]


def _of_layers(result: Diagnosis, what: Callable[[RecordedLayer], Series]) -> list[Line]:
    """Of the layers whose size does not count in the runs, and of the same in their baselines."""
    lines: dict[tuple[int, str], Line] = {}
    for compared in (Comparison(*pair) for pair in result.compared):
        for layer in compared.run.layers.values():
            if layer.size_counts is not False or layer.skipped:
                continue
            other = compared.other(layer)
            lines[id(compared.run), layer.name] = line(WITH, what(layer), name=layer.name)
            if other is not None:
                drawn = line(WITHOUT, what(other), name=other.name)
                lines[id(compared.baseline), other.name] = drawn
    return sorted(lines.values(), key=lambda drawn: drawn.label != WITH)
