"""The demo's part of a report: the three mechanisms in small nets on digits, from records alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from decaylab.document import Grid, GridCell, Section, Subsection, Tone, cells
from decaylab.paper import FinishedRun, FinishedRuns
from decaylab.report.drawing import Panel, line
from decaylab.report.names import counted_seeds, named
from decaylab.report.tables import OverSeeds, number
from decaylab.sweeps.run_index import IndexedRun

TIER = "demo"
OPTIMIZERS = ("sgd", "adam", "kfac-f", "kfac-g")
DECAYS = ("none", "l2", "decoupled")
LEAST = 1.05  # a ratio nearer to one than this is no change
RATIO = "weight decay / no decay"
RATIO_NOTE = f'"{RATIO}" is the mean of the seeds\' ratios.'


@dataclass(frozen=True)
class Quantity:
    """What is recorded (`row`, of the first layer if `first_layer`), and how decay should move it.

    `up`: weight decay is expected to make it larger, by the paper; else smaller.
    """

    row: str
    words: str
    up: bool
    first_layer: bool = True
    log: bool = True


@dataclass(frozen=True)
class MechanismSection:
    """One of the three: the nets it acts in, and what shows it."""

    anchor: str
    title: str
    says: str
    batch_norm: bool
    optimizers: tuple[str, ...]
    quantities: tuple[Quantity, ...]


MECHANISMS = (
    MechanismSection(
        "mechanism1",
        "1. A larger effective learning rate (SGD and Adam, batch normalisation)",
        "Under batch normalisation, the scale of a layer's weights W does not change what the"
        " network computes. It only sets how far a step turns them: lr / |W|² under SGD, lr / |W|"
        " under Adam. Weight decay keeps |W| small, and so keeps this effective learning rate"
        " high.",
        True,
        ("sgd", "adam"),
        (Quantity("effective_lr", "effective learning rate, first layer", up=True),),
    ),
    MechanismSection(
        "mechanism2",
        "2. A smaller Jacobian (K-FAC most of all, no batch normalisation)",
        "Weight decay under K-FAC is close to a penalty on the Jacobian, which tells how strongly"
        " the outputs react to a change of the input. The paper finds it 10 to 30 times smaller"
        " with decay under K-FAC-G, and 3 to 4 times under SGD.",
        False,
        OPTIMIZERS,
        (Quantity("jacobian_norm", "squared Jacobian norm", up=False, first_layer=False),),
    ),
    MechanismSection(
        "mechanism3",
        "3. A smaller effective damping (K-FAC, batch normalisation)",
        "K-FAC adds a damping λ to the curvature. Compared with the curvature of the normalised"
        " weights it counts as λ|W|²: as the weights grow, K-FAC turns into SGD. Decay keeps them"
        " small. The second-order share is 1 if damping does not matter, and 0 if the step is"
        " SGD's. The paper expects a larger effect for K-FAC-F, whose curvature vanishes as the"
        " network fits the training data.",
        True,
        ("kfac-f", "kfac-g"),
        (
            Quantity("effective_damping", "effective damping, first layer", up=False),
            Quantity("second_order_share", "second-order share, first layer", up=True, log=False),
        ),
    ),
)

Key = tuple[bool, str, str]  # batch norm, optimizer, decay
Demo = dict[Key, list[FinishedRun]]


def demo_runs(indexed: Iterable[IndexedRun], finished_runs: FinishedRuns) -> Demo:
    """The finished runs of the demo by batch norm, optimizer and decay; by seed in each.

    Of demos of several lengths (`--epochs`), the longest.
    """
    specs = [run.spec for run in indexed if run.manifest.tier == TIER]
    specs = [spec for spec in specs if spec.optimizer in OPTIMIZERS and spec.decay in DECAYS]
    specs.sort(key=lambda spec: spec.seed)
    done = [(spec, run) for spec in specs if (run := finished_runs.of(spec)) is not None]
    longest = max((spec.epochs or 0 for spec, _ in done), default=0)
    runs: Demo = {}
    for spec, run in done:
        if spec.epochs == longest:
            runs.setdefault((spec.batch_norm, spec.optimizer, spec.decay), []).append(run)
    return runs


def demo_section(runs: Demo) -> Section:
    """The demo's tables and figures."""
    specs = [run.spec for seed_runs in runs.values() for run in seed_runs]
    seeds = {spec.seed for spec in specs}
    counted = counted_seeds(len(seeds))
    text = [
        "Small fully connected networks on the 1,797 handwritten digits of scikit-learn,"
        f" {specs[0].epochs} epochs, {counted}, settings picked by hand. They show the mechanisms,"
        " which is what they are for; digits are too easy for a verdict on accuracy."
    ]
    spread = "One seed" if len(seeds) == 1 else f"Mean ± standard deviation of {counted}"
    accuracies = Subsection(
        "demo",
        "Test accuracy in % with no decay, L2 and weight decay",
        text=[
            "L2 adds to the gradient, before the optimizer's own scaling; weight decay"
            " shrinks the weights directly. For SGD the two are the same, apart from momentum."
        ],
        note=f"{spread}; one test image is 0.28.",
        grids=[short_accuracy_grid(runs)],
    )
    details = Subsection(
        "demo-settings", "Settings and losses", grids=[accuracy_grid(runs)], folded=True
    )
    blocks = [accuracies, *(_block(mechanism, runs) for mechanism in MECHANISMS), details]
    return Section("demo-section", "Demo: three mechanisms on digits", text, blocks)


def accuracy_grid(runs: Demo) -> Grid:
    """Test accuracy and losses of every setting."""
    header = cells(["network", "optimizer", "decay"])
    header += cells(["test accuracy (%)", "test loss", "train loss"], "number")
    rows = []
    for key in sorted(runs, key=_order):
        strength = runs[key][0].spec.weight_decay
        decay = GridCell(named(key[2]) + (f" {strength:g}" if strength else ""))
        losses = [_over_seeds(runs[key], name) for name in ("test/loss", "train/loss")]
        numbers = [_accuracy(runs[key]), *losses]
        rows.append([*_net(key), decay, *cells([n.words() for n in numbers], "number")])
    return Grid(header, rows)


def short_accuracy_grid(runs: Demo) -> Grid:
    """Test accuracy alone, kinds of decay side by side."""
    decays = _decays(runs)
    header = cells(["network", "optimizer"]) + cells(map(named, decays), "number")
    rows = []
    for net in dict.fromkeys(key[:2] for key in sorted(runs, key=_order)):
        accuracies = (_accuracy(runs.get((*net, decay), [])) for decay in decays)
        rows.append([*_net((*net, "")), *cells([a.short() for a in accuracies], "number")])
    return Grid(header, rows)


def mechanism_grid(mechanism: MechanismSection, quantity: Quantity, runs: Demo) -> Grid:
    """A quantity at the end of training by kind of decay, and whether it moved as expected."""
    decays = _decays(runs)
    header = [GridCell("optimizer"), *cells(map(named, decays), "number")]
    header += [GridCell(RATIO, "number"), GridCell("as the paper says")]
    rows = []
    for optimizer in mechanism.optimizers:
        if runs and not any((mechanism.batch_norm, optimizer, decay) in runs for decay in DECAYS):
            continue
        ends = ends_by_decay(mechanism, optimizer, quantity, runs)
        numbers = [OverSeeds(tuple(ends[decay].values())).short() for decay in decays]
        verdict = _verdict(quantity, decay_ratios(ends))
        rows.append([GridCell(named(optimizer)), *cells(numbers, "number"), *verdict])
    return Grid(header, rows, f"At the end: {quantity.words}")


def decay_ratios(ends: Mapping[str, Mapping[int, float]]) -> list[float]:
    """By seed, the quantity at the end with weight decay over that without."""
    without, decayed = ends["none"], ends["decoupled"]
    return [decayed[s] / without[s] for s in without if s in decayed and without[s] > 0]


def moved_as_expected(quantity: Quantity, ratio: float) -> bool:
    """Whether decay moved it as the paper says, by more than `LEAST`."""
    return ratio > LEAST if quantity.up else ratio < 1 / LEAST


def ends_by_decay(
    mechanism: MechanismSection, optimizer: str, quantity: Quantity, runs: Demo
) -> dict[str, dict[int, float]]:
    """By kind of decay and seed, the quantity at the end of training."""
    return {
        decay: _by_seed(runs.get((mechanism.batch_norm, optimizer, decay), []), quantity)
        for decay in DECAYS
    }


def _decays(runs: Demo) -> tuple[str, ...]:
    """The kinds of decay that there are runs of."""
    return tuple(d for d in DECAYS if not runs or any(key[2] == d for key in runs))


def _block(mechanism: MechanismSection, runs: Demo) -> Subsection:
    panels = mechanism_panels(mechanism, runs)
    charts = [panel for panel in panels if not panel.empty]
    return Subsection(
        mechanism.anchor,
        mechanism.title,
        text=[mechanism.says],
        note=f"Every line is one run. {RATIO_NOTE}" if charts else "",
        charts=charts,
        grids=[mechanism_grid(mechanism, quantity, runs) for quantity in mechanism.quantities],
        missing="" if charts else "No runs yet.",
    )


def mechanism_panels(mechanism: MechanismSection, runs: Demo) -> list[Panel]:
    """The quantity over epochs, a panel per optimizer, with every kind of decay."""
    return [
        Panel(
            f"{named(optimizer)}, {'BN' if mechanism.batch_norm else 'no BN'}",
            "epoch",
            quantity.words,
            [
                line(named(decay), curve)
                for decay in DECAYS
                for run in runs.get((mechanism.batch_norm, optimizer, decay), [])
                if (curve := run.curve(_name(run, quantity)))
            ],
            log_y=quantity.log,
        )
        for quantity in mechanism.quantities
        for optimizer in mechanism.optimizers
    ]


def _name(run: FinishedRun, quantity: Quantity) -> str:
    row = run.first_layer(quantity.row) if quantity.first_layer else quantity.row
    return row or ""


def _by_seed(runs: Iterable[FinishedRun], quantity: Quantity) -> dict[int, float]:
    ends = {run.spec.seed: run.final(_name(run, quantity)) for run in runs}
    return {seed: value for seed, value in ends.items() if value is not None}


def _verdict(quantity: Quantity, ratios: list[float]) -> list[GridCell]:
    """The mean ratio, and in how many seeds it went as expected, by more than `LEAST`."""
    if not ratios:
        return [GridCell("—", "number"), GridCell("no runs yet", tone="plain")]
    right = sum(moved_as_expected(quantity, ratio) for ratio in ratios)
    opposite = replace(quantity, up=not quantity.up)
    wrong = sum(moved_as_expected(opposite, ratio) for ratio in ratios)
    tone: Tone = "plain"
    if len(ratios) == 1:
        outcome = "yes" if right else "no" if wrong else "about equal"
        outcome += ", one seed"
    elif not right and not wrong:
        outcome = "about equal"
    else:
        outcome = f"{right} of {len(ratios)} seeds"
        tone = "good" if right == len(ratios) else "bad" if wrong == len(ratios) else "near"
    return [GridCell(f"× {number(fmean(ratios))}", "number"), GridCell(outcome, tone=tone)]


def _over_seeds(runs: Iterable[FinishedRun], name: str, factor: float = 1.0) -> OverSeeds:
    values = (run.final(name) for run in runs)
    return OverSeeds(tuple(factor * value for value in values if value is not None))


def _accuracy(runs: Iterable[FinishedRun]) -> OverSeeds:
    return _over_seeds(runs, "test/accuracy", 100)


def _net(key: Key) -> list[GridCell]:
    return [GridCell("with BN" if key[0] else "without BN", "key"), GridCell(named(key[1]))]


def _order(key: Key) -> tuple[bool, int, int]:
    return not key[0], OPTIMIZERS.index(key[1]), DECAYS.index(key[2])
