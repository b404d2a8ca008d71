"""The demo's part of a report: the three mechanisms in small nets on digits, from records alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from decaylab.paper import Readings, RunReading
from decaylab.report.drawing import Panel, draw, line
from decaylab.report.names import counted_seeds, named
from decaylab.report.page import Block, Cell, Grid, Image, Section, Tone
from decaylab.report.tables import Measured, number
from decaylab.sweeps.survey import Found

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
class Mechanism:
    """One of the three: the nets it acts in, and what shows it."""

    anchor: str
    title: str
    says: str
    batch_norm: bool
    optimizers: tuple[str, ...]
    quantities: tuple[Quantity, ...]


MECHANISMS = (
    Mechanism(
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
    Mechanism(
        "mechanism2",
        "2. A smaller Jacobian (K-FAC most of all, no batch normalisation)",
        "Weight decay under K-FAC is close to a penalty on the Jacobian, which tells how strongly"
        " the outputs react to a change of the input. The paper finds it 10 to 30 times smaller"
        " with decay under K-FAC-G, and 3 to 4 times under SGD.",
        False,
        OPTIMIZERS,
        (Quantity("jacobian_norm", "squared Jacobian norm", up=False, first_layer=False),),
    ),
    Mechanism(
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
Demo = dict[Key, list[RunReading]]


def demo_runs(found: Iterable[Found], readings: Readings) -> Demo:
    """The finished runs of the demo by batch norm, optimizer and decay; by seed in each.

    Of demos of several lengths (`--epochs`), the longest.
    """
    specs = [run.spec for run in found if run.manifest.tier == TIER]
    specs = [spec for spec in specs if spec.optimizer in OPTIMIZERS and spec.decay in DECAYS]
    done = [reading for spec in specs if (reading := readings.of(spec)) is not None]
    longest = max((reading.spec.epochs or 0 for reading in done), default=0)
    runs: Demo = {}
    for reading in sorted(done, key=lambda one: one.spec.seed):
        spec = reading.spec
        if spec.epochs == longest:
            runs.setdefault((spec.batch_norm, spec.optimizer, spec.decay), []).append(reading)
    return runs


def demo_section(runs: Demo) -> Section:
    """The demo's tables and figures."""
    specs = [run.spec for of in runs.values() for run in of]
    seeds = {spec.seed for spec in specs}
    counted = counted_seeds(len(seeds))
    text = [
        "Small fully connected networks on the 1,797 handwritten digits of scikit-learn,"
        f" {specs[0].epochs} epochs, {counted}, settings picked by hand. They show the mechanisms,"
        " which is what they are for; digits are too easy for a verdict on accuracy."
    ]
    blocks = [
        Block(
            "demo",
            "Test accuracy in % with no decay, L2 and weight decay",
            text=[
                "L2 adds to the gradient, before the optimizer's own scaling; weight decay"
                " shrinks the weights directly. For SGD the two are the same, apart from momentum."
            ],
            note="One seed; one test image is 0.28."
            if len(seeds) == 1
            else f"Mean ± standard deviation of {counted}; one test image is 0.28.",
            grids=[short_accuracy_grid(runs)],
        ),
        *(_block(mechanism, runs) for mechanism in MECHANISMS),
        Block("demo-settings", "Settings and losses", grids=[accuracy_grid(runs)], folded=True),
    ]
    return Section("demo-section", "Demo: three mechanisms on digits", text, blocks)


def accuracy_grid(runs: Demo) -> Grid:
    """Test accuracy and losses of every setting."""
    header = [Cell("network"), Cell("optimizer"), Cell("decay")]
    header += [Cell(n, "number") for n in ("test accuracy (%)", "test loss", "train loss")]
    rows = []
    for key in sorted(runs, key=_order):
        of = runs[key]
        strength = of[0].spec.weight_decay
        decay = Cell(named(key[2]) + (f" {strength:g}" if strength else ""))
        losses = [
            _over_seeds(run.final(name) for run in of) for name in ("test/loss", "train/loss")
        ]
        numbers = [_accuracy(of), *losses]
        rows.append([*_net(key), decay, *(Cell(value.words(), "number") for value in numbers)])
    return Grid(header, rows)


def short_accuracy_grid(runs: Demo) -> Grid:
    """Test accuracy alone, kinds of decay side by side: for a terminal."""
    header = [Cell("network"), Cell("optimizer"), *(Cell(named(d), "number") for d in DECAYS)]
    nets = dict.fromkeys((*key[:2], "none") for key in sorted(runs, key=_order))
    rows = [
        [
            *_net(key),
            *(Cell(_accuracy(runs.get((*key[:2], d), [])).short(), "number") for d in DECAYS),
        ]
        for key in nets
    ]
    return Grid(header, rows)


def mechanism_grid(mechanism: Mechanism, quantity: Quantity, runs: Demo) -> Grid:
    """A quantity at the end of training by kind of decay, and whether it moved as expected."""
    header = [Cell("optimizer"), *(Cell(named(decay), "number") for decay in DECAYS)]
    header += [Cell(RATIO, "number"), Cell("as the paper says")]
    rows = []
    for optimizer in mechanism.optimizers:
        ends = [
            _by_seed(runs.get((mechanism.batch_norm, optimizer, decay), []), quantity)
            for decay in DECAYS
        ]
        numbers = [Cell(Measured(tuple(end.values())).short(), "number") for end in ends]
        rows.append([Cell(named(optimizer)), *numbers, *_verdict(quantity, ends[0], ends[2])])
    return Grid(header, rows, f"At the end: {quantity.words}")


def _block(mechanism: Mechanism, runs: Demo) -> Block:
    panels = mechanism_panels(mechanism, runs)
    images = [Image(draw(p), f"{p.title}: {p.y_label} over epochs") for p in panels if not p.empty]
    return Block(
        mechanism.anchor,
        mechanism.title,
        text=[mechanism.says],
        note=f"Every line is one run. {RATIO_NOTE}" if images else "",
        images=images,
        grids=[mechanism_grid(mechanism, quantity, runs) for quantity in mechanism.quantities],
        missing="" if images else "No runs yet.",
    )


def mechanism_panels(mechanism: Mechanism, runs: Demo) -> list[Panel]:
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


def _name(run: RunReading, quantity: Quantity) -> str:
    found = run.first_layer(quantity.row) if quantity.first_layer else quantity.row
    return found or ""


def _by_seed(runs: Iterable[RunReading], quantity: Quantity) -> dict[int, float]:
    ends = {run.spec.seed: run.final(_name(run, quantity)) for run in runs}
    return {seed: value for seed, value in ends.items() if value is not None}


def _verdict(
    quantity: Quantity, without: dict[int, float], with_decay: dict[int, float]
) -> list[Cell]:
    """The mean ratio, and in how many seeds it went as expected, by more than `LEAST`."""
    ratios = [with_decay[s] / without[s] for s in without if s in with_decay and without[s] > 0]
    if not ratios:
        return [Cell("—", "number"), Cell("no runs yet", tone="plain")]
    shown = Cell(f"× {number(fmean(ratios))}", "number")
    up = sum(ratio > LEAST for ratio in ratios)
    down = sum(ratio < 1 / LEAST for ratio in ratios)
    right, wrong = (up, down) if quantity.up else (down, up)
    if not right and not wrong:
        said = "about equal" + ", one seed" * (len(ratios) == 1)
        return [shown, Cell(said, tone="plain")]
    if len(ratios) == 1:
        return [shown, Cell("yes, one seed" if right else "no, one seed", tone="plain")]
    tone: Tone = "good" if right == len(ratios) else "bad" if wrong == len(ratios) else "near"
    return [shown, Cell(f"{right} of {len(ratios)} seeds", tone=tone)]


def _over_seeds(values: Iterable[float | None]) -> Measured:
    return Measured(tuple(value for value in values if value is not None))


def _accuracy(runs: Iterable[RunReading]) -> Measured:
    found = _over_seeds(run.final("test/accuracy") for run in runs)
    return Measured(tuple(100 * value for value in found.values))


def _net(key: Key) -> list[Cell]:
    return [Cell("with BN" if key[0] else "without BN", "key"), Cell(named(key[1]))]


def _order(key: Key) -> tuple[bool, int, int]:
    return not key[0], OPTIMIZERS.index(key[1]), DECAYS.index(key[2])
