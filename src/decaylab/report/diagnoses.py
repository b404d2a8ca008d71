"""Diagnoses as a part of the report, and one diagnosis as a page of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import decaylab
from decaylab.diagnosis import Diagnosis, Finding, Mechanism, Verdict, diagnose, words
from decaylab.diagnosis.comparable import FREE_TO_DIFFER
from decaylab.diagnosis.runs import Layer, Run, read_run
from decaylab.diagnosis.verdict import LayerRow
from decaylab.errors import DecaylabError
from decaylab.optim.laws.dynamics import Series
from decaylab.records.files import disk_errors, replace_text
from decaylab.records.sources import Source
from decaylab.report.drawing import Line, Panel, check_extra, draw, line
from decaylab.report.names import counted_seeds, differing, named
from decaylab.report.page import Block, Cell, Grid, Image, Report, Section, Tone, to_html
from decaylab.sweeps.survey import Found
from decaylab.training import RunSpec

TONES: dict[str, Tone] = {
    Verdict.ACTS: "good",
    Verdict.DOES_NOT_ACT: "plain",
    Verdict.CANNOT_TELL: "near",
}
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


@dataclass(frozen=True)
class Case:
    """Runs of one setting with decay, by seed, each with its diagnosis."""

    spec: RunSpec
    seeds: tuple[int, ...]
    diagnoses: tuple[Diagnosis, ...]


def diagnosed(found: Sequence[Found]) -> tuple[list[Case], list[str]]:
    """Every run with decay against its baseline, by setting; and what could not be, in words."""
    cases: dict[tuple[object, ...], dict[int, tuple[RunSpec, Diagnosis]]] = {}
    left_out = []
    for run in found:
        if run.spec.decay == "none":
            continue
        baseline = baseline_of(run.spec, found)
        try:
            result = diagnose(run.folder, baseline.folder if baseline is not None else None)
        except DecaylabError as error:
            left_out.append(str(error))
            continue
        of_setting = cases.setdefault(_setting(run.spec, {"seed"}), {})
        of_setting[run.spec.seed] = (run.spec, result)
    return [_case(of) for of in cases.values()], left_out


def _case(of: dict[int, tuple[RunSpec, Diagnosis]]) -> Case:
    seeds = sorted(of)
    return Case(of[seeds[0]][0], tuple(seeds), tuple(of[seed][1] for seed in seeds))


def baseline_of(spec: RunSpec, found: Iterable[Found]) -> Found | None:
    """The finished run without decay that is otherwise the same; of the same seed if possible."""
    free = {*FREE_TO_DIFFER, "seed"}
    ours = _setting(spec, free)
    alike = [
        run
        for run in found
        if run.spec.decay == "none"
        and not run.spec.norm_source
        and run.manifest.status == "finished"
        and _setting(run.spec, free) == ours
    ]
    return min(alike, key=lambda r: (r.spec.seed != spec.seed, r.spec.seed), default=None)


def _setting(spec: RunSpec, without: set[str]) -> tuple[object, ...]:
    return tuple(getattr(spec, item.name) for item in fields(spec) if item.name not in without)


# ---------------------------------------------------------------- in the report


def diagnoses_section(cases: Sequence[Case]) -> Section:
    """A row per setting with the verdict on each mechanism, and what it rests on, folded."""
    header = [Cell("run"), *(Cell(name) for name in Mechanism), Cell("compared with")]
    titles = _titles(cases)
    rows = [
        [Cell(title, "words"), *_verdicts(case), _compared(case)]
        for title, case in zip(titles, cases, strict=True)
    ]
    text = [
        "Which of the three mechanisms decay acts through, for every run with decay, judged from"
        " the records (`decaylab diagnose RUN --against BASE`). The factor in brackets says by how"
        " much decay raises the effective learning rate, or lowers the squared Jacobian norm (or a"
        " Gauss-Newton norm) or the effective damping. With several seeds, it is the smallest and"
        " the largest. A run is judged alone if no run without decay is otherwise the same. This is"
        " often so at the paper's settings, which have another learning rate without decay."
    ]
    overview = Block("diagnoses", "Verdicts", grids=[Grid(header, rows)])
    details = [
        _details(number, title, case)
        for number, (title, case) in enumerate(zip(titles, cases, strict=True), start=1)
    ]
    return Section("diagnosis", "Diagnosis", text, [overview, *details])


def _titles(cases: Sequence[Case]) -> list[str]:
    """The settings in words; of those that read alike, with the fields in which they differ."""
    titles = [_words(case.spec) for case in cases]
    told = []
    for title, case in zip(titles, cases, strict=True):
        alike = [other.spec for words, other in zip(titles, cases, strict=True) if words == title]
        names = [name for name in differing(*alike) if name != "seed"]
        values = {name: getattr(case.spec, name) for name in names}
        more = [
            f"no {name}" if value == "" else f"{name} {value}" for name, value in values.items()
        ]
        told.append(", ".join([title, *more]))
    return told


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


def _verdicts(case: Case) -> Iterable[Cell]:
    for place in range(len(Mechanism)):
        of = [result.findings[place] for result in case.diagnoses]
        kinds = list(dict.fromkeys(finding.verdict for finding in of))
        # seeds that disagree are not told apart by a colour
        verdict = kinds[0] if len(kinds) == 1 else "; ".join(_counted(kinds, of))
        factors = [finding.effect.value for finding in of if finding.effect]
        if factors:
            low, high = words.three_digits(min(factors)), words.three_digits(max(factors))
            verdict += f" ({low})" if low == high else f" ({low} to {high})"
        yield Cell(verdict, tone=TONES[kinds[0]] if len(kinds) == 1 else "near")


def _counted(kinds: Iterable[str], of: Sequence[Finding]) -> Iterable[str]:
    return (f"{kind} {sum(f.verdict == kind for f in of)} of {len(of)}" for kind in kinds)


def _compared(case: Case) -> Cell:
    with_baseline = sum(bool(result.baselines) for result in case.diagnoses)
    seeds = counted_seeds(len(case.seeds))
    if with_baseline == len(case.diagnoses):
        return Cell(f"no decay, {seeds}")
    if not with_baseline:
        return Cell(f"judged alone, {seeds}")
    return Cell(f"no decay in {with_baseline} of {seeds}")


def _details(number: int, title: str, case: Case) -> Block:
    """The evidence of a setting: what to know first, the reasons, factors by layer and seed."""
    first = [words.first_text(*item) for result in case.diagnoses for item in result.first]
    seeds = [str(seed) for seed in case.seeds]
    follows = _by_seed([words.follow_texts(result) for result in case.diagnoses], seeds)
    grids = [_reasons([r.findings for r in case.diagnoses], seeds)]
    for place in range(len(Mechanism)):
        of = [result.findings[place] for result in case.diagnoses]
        if any(row.effect for finding in of for row in finding.layers):
            grids.append(_layers_by_seed(of, seeds))
    left_out = words.left_out(case.diagnoses[0]).items()
    skipped = [f"Left out: {layers} ({why})." for why, layers in left_out]
    return Block(
        f"diagnosis-{number}",
        title,
        text=[*dict.fromkeys(first), *follows, *skipped],
        note="Runs: " + ", ".join(name for result in case.diagnoses for name in result.runs) + ".",
        grids=grids,
        folded=True,
    )


def _by_seed(said: Sequence[Sequence[str]], seeds: Sequence[str]) -> list[str]:
    """What is said of all seeds, and what is said of some, with those.

    >>> _by_seed([["a", "b"], ["a", "c"], ["a", "c"]], ["0", "1", "2"])
    ['a', 'Seed 0: b', 'Seeds 1, 2: c']
    """
    of: dict[str, list[str]] = {}
    for sentences, seed in zip(said, seeds, strict=True):
        for sentence in sentences:
            of.setdefault(sentence, []).append(seed)
    told = []
    for sentence, same in of.items():
        some = f"Seed{'s' * (len(same) > 1)} {', '.join(same)}: "
        told.append(sentence if len(same) == len(seeds) else some + sentence)
    return told


def _reasons(findings: Sequence[Sequence[Finding]], seeds: Sequence[str]) -> Grid:
    """A row per mechanism and seed; seeds of which the same is to be said share one."""
    header = [Cell("mechanism"), Cell("seeds"), Cell("verdict"), Cell("why"), Cell("records")]
    rows = []
    for place, mechanism in enumerate(Mechanism):
        said: dict[tuple[str, str, str], list[str]] = {}
        for of, seed in zip(findings, seeds, strict=True):
            one = of[place]
            said.setdefault((one.verdict, _why(one), words.records_words(one)), []).append(seed)
        rows += [
            [
                Cell(mechanism),
                Cell(", ".join(same)),
                Cell(verdict, tone=TONES[verdict]),
                *(Cell(words, "words") for words in texts),
            ]
            for (verdict, *texts), same in said.items()
        ]
    return Grid(header, rows)


def _why(finding: Finding) -> str:
    text = words.finding_text(finding)
    if finding.remedies:
        return f"{text} To decide it: {words.remedy_text(finding)}."
    return text


def _layers_by_seed(findings: Sequence[Finding], seeds: Sequence[str]) -> Grid:
    """A row per layer, a column per seed; a layer without a factor says why."""
    names = dict.fromkeys(row.layer for finding in findings for row in finding.layers)
    header = [Cell("layer"), *(Cell(f"seed {seed}") for seed in seeds)]
    rows: list[list[Cell]] = []
    for name in names:
        of = [next((x for x in f.layers if x.layer == name), None) for f in findings]
        texts = [_effect(x) for x in of]
        cells = [Cell(text, "words") for text in texts]
        if rows and rows[-1][1:] == cells and not any(x and x.effect for x in of):
            rows[-1][0] = Cell(f"{rows[-1][0].text}, {name}", "words")  # layers for one reason
        else:
            rows.append([Cell(name, "key"), *cells])
    return Grid(header, rows, f"By layer: {words.layer_heading(findings[0])}")


# ---------------------------------------------------------------- a page of its own


def write_diagnosis(
    path: Path, runs: Source | Sequence[Source], baselines: Source | Sequence[Source] = ()
) -> Diagnosis:
    """Diagnose, and write the result with its figures as one offline HTML file; the result."""
    if path.suffix not in (".html", ".htm"):
        raise DecaylabError(f"the report is an HTML file: give {path.with_suffix('.html')}")
    check_extra()
    mine, others = _listed(runs), _listed(baselines)
    one = len(mine) == 1 and len(others) <= 1
    result = diagnose(mine[0], others[0] if others else None) if one else diagnose(mine, others)
    # what is not comparable is not drawn beside it
    other = read_run(others[0]) if others and result.baselines else None
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, to_html(diagnosis_report(result, read_run(mine[0]), other)))
    return result


def _listed(sources: Source | Sequence[Source] | None) -> list[Source]:
    if isinstance(sources, list | tuple):
        return list(sources)
    return [] if sources is None else [sources]


def diagnosis_report(result: Diagnosis, run: Run, baseline: Run | None) -> Report:
    """One diagnosis as a page: the answer, verdicts, what follows, each mechanism's evidence."""
    others = ", ".join(result.baselines)
    against = f"against {others}" if others else "from this run alone"
    header = [Cell(name) for name in ("mechanism", "verdict", "effect")]
    rows = [
        [
            Cell(finding.mechanism, "key"),
            Cell(finding.verdict, tone=TONES[finding.verdict]),
            Cell(words.effect_words(finding) or "—"),
        ]
        for finding in result.findings
    ]
    verdicts = [
        Block("verdicts", "Verdicts", text=[words.headline(result)], grids=[Grid(header, rows)]),
        Block("follows", "What follows", text=words.follow_texts(result)),
    ]
    if result.motions:
        verdicts.append(_motions(result))
    if result.skipped:
        left = words.left_out(result).items()
        cells = [[Cell(layers, "words"), Cell(why, "words")] for why, layers in left]
        grid = Grid([Cell("layers"), Cell("why")], cells)
        verdicts.append(Block("skipped", "Layers left out", grids=[grid]))
    evidence = [
        _evidence(number, finding, run, baseline)
        for number, finding in enumerate(result.findings, start=1)
    ]
    return Report(
        f"What weight decay does in {', '.join(result.runs)}",
        f"Judged {against}, {run.steps} steps, on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by"
        f" decaylab {decaylab.__version__}",
        [
            Section("result", "Result", blocks=verdicts),
            Section("evidence", "Evidence", blocks=evidence),
        ],
        [words.first_text(*item) for item in result.first],
        "Every number is from a record. Factors are means over the second half of the records. The"
        " range is over these records, or over layers for a factor of several layers. In figures,"
        " every line is one layer of one run. Mechanisms: Zhang, Wang, Xu, Grosse, Three Mechanisms"
        " of Weight Decay Regularization, ICLR 2019.",
        notices_title="Know this first",
    )


def _evidence(number: int, finding: Finding, run: Run, baseline: Run | None) -> Block:
    panels = _panels(finding, run, baseline)
    table = [  # a name is not broken, a list of them is
        [Cell(names, "words" if "," in names else "key"), _verdict(verdict), Cell(text, "words")]
        for names, verdict, text in words.layer_table(finding)
    ]
    header = [Cell("layer"), Cell("verdict"), Cell(words.layer_heading(finding))]
    return Block(
        f"mechanism-{number}",
        f"{number}. {_capital(words.verdict_title(finding))}",
        text=[SAYS[finding.mechanism], _why(finding)],
        note=words.records_words(finding),
        images=[
            Image(draw(panel), f"{panel.title}: {panel.y_label} over steps") for panel in panels
        ],
        grids=[Grid(header, table)] if any(row.effect for row in finding.layers) else (),
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _effect(row: LayerRow | None) -> str:
    if row is None:
        return "—"
    if row.effect is not None:
        return words.effect_range(row.effect)
    return words.sentence(row.why) if row.why is not None else ""


def _motions(result: Diagnosis) -> Block:
    header = [Cell(name) for name in words.MOTION_HEADINGS]
    rows = [[Cell(text, "words") for text in row] for row in words.motion_rows(result)]
    text = [*words.insight(result), words.motion_legend(result)]
    return Block("motions", "How far each layer turns", text=text, grids=[Grid(header, rows)])


def _verdict(text: str) -> Cell:
    return Cell(text, tone=TONES[text]) if text in TONES else Cell(text)


def _panels(finding: Finding, run: Run, baseline: Run | None) -> list[Panel]:
    """What is recorded of a mechanism over the steps, a line per layer and run."""
    runs = [(WITH, run), *([(WITHOUT, baseline)] if baseline is not None else [])]
    if finding.mechanism is Mechanism.JACOBIAN:
        row = next(iter(finding.effect.probes if finding.effect else ()), "")
        lines = [line(label, of.totals.get(row, ())) for label, of in runs]
        quantity = words.QUANTITIES.get(row, row)
        found = [Panel("Whole model", "step", quantity, lines, log_y=True)]
    elif finding.mechanism is Mechanism.EFFECTIVE_LR:
        kfac = all(layer.preconditioned for layer in run.layers.values())
        effective = [] if kfac else _of_layers(runs, lambda layer: layer.effective)
        turns = _of_layers(runs, lambda layer: layer.series.get("rotation", ()))
        found = [
            Panel(LAYERS, "step", "effective learning rate", effective, log_y=True),
            Panel(LAYERS, "step", "norm |W|", _of_layers(runs, lambda x: x.norms), log_y=True),
            Panel(LAYERS, "step", "angle per step", turns, log_y=True),
        ]
    else:
        damping = _of_layers(runs, lambda layer: layer.series.get("effective_damping", ()))
        share = _of_layers(runs, lambda layer: layer.series.get("second_order_share", ()))
        found = [
            Panel(LAYERS, "step", "effective damping λ|W|²", damping, log_y=True),
            Panel(LAYERS, "step", "second-order share", share),
        ]
    return [panel for panel in found if not panel.empty]


def _of_layers(runs: Sequence[tuple[str, Run]], what: Callable[[Layer], Series]) -> list[Line]:
    return [
        line(label, what(layer))
        for label, of in runs
        for layer in of.layers.values()
        if layer.size_counts is False and not layer.skipped
    ]
