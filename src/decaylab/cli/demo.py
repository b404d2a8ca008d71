"""`decaylab demo`: the three mechanisms, each shown as it is measured, on small networks."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.progress import Left, stages
from decaylab.cli.report import Out
from decaylab.cli.terminal import print_json, say, warn
from decaylab.errors import AT_LEAST_ONE, DecaylabError
from decaylab.paper import FinishedRuns
from decaylab.records import RunStore
from decaylab.report.drawing import check_extra
from decaylab.report.mechanisms import (
    DECAYS,
    MECHANISMS,
    TIER,
    Demo,
    MechanismSection,
    decay_ratios,
    demo_runs,
    ends_by_decay,
    moved_as_expected,
)
from decaylab.report.names import named
from decaylab.report.tables import number
from decaylab.report.write import write_report
from decaylab.sweeps.plan import PlannedRun
from decaylab.sweeps.run_index import indexed_runs
from decaylab.sweeps.worker import Worker, WorkerOptions
from decaylab.theory import all_checks
from decaylab.training import RunSpec, TrainingRun

Seed = Annotated[int, option("--seed", "First seed, for everything random.")]
Seeds = Annotated[int, option("--seeds", "How many seeds to train per setting.")]
Epochs = Annotated[int | None, option("--epochs", "Passes over the training data.")]
All = Annotated[bool, option("--all", "Also train with L2, and every optimizer in every network.")]
WithReport = Annotated[
    bool | None,
    option("--report/--no-report", "Write a page with figures.", show_default="if it can be drawn"),
]

# Per optimizer: learning rate, L2 and decoupled weight decay. Decoupled decay is multiplied by lr
# and not by the preconditioner, so that equal numbers would not be equal decays (recipe line 15).
# Picked by hand from some fifty one-seed runs, seen with their test accuracy. Not everywhere does
# decay raise lr/|W|^2: K-FAC-F at lr 0.003 had a larger |W| with decoupled decay than without.
SETTINGS = {
    "sgd": (0.03, 0.003, 0.03),
    "adam": (0.003, 0.001, 0.3),
    "kfac-f": (0.001, 0.001, 1.0),
    "kfac-g": (0.03, 0.001, 0.02),
}
# K-FAC-G diverges without batch norm at the paper's 1e-3 (recipe line 7 has 1e-2 there too).
WITHOUT_NORM: dict[str, Any] = {"lr": 0.01, "damping": 1e-2}
WITHOUT_NORM_DECAY = {"none": 0.0, "l2": 0.001, "decoupled": 0.06}

EPOCHS = 50


def demo_specs(seed: int = 0, seeds: int = 1, epochs: int | None = None) -> list[RunSpec]:
    """All of `--all`: a small MLP with and without batch norm, four optimizers, three decays."""
    base = RunSpec(
        data="digits",
        network="mlp",
        hidden=(128, 128),
        batch_size=64,
        epochs=epochs or EPOCHS,
        lr_drop_every=epochs or EPOCHS,  # a constant lr: what changes lr/|W|^2 is |W| alone
    )
    specs = []
    for own_seed in range(seed, seed + seeds):
        for batch_norm in (True, False):
            for optimizer, (lr, l2, decoupled) in SETTINGS.items():
                settings: dict[str, Any] = {"lr": lr}
                if optimizer.startswith("kfac"):  # no clip: it would hide what decay does
                    settings |= {"damping": 1e-3, "kl_clip": 0.0}
                strengths = {"none": 0.0, "l2": l2, "decoupled": decoupled}
                if optimizer == "kfac-g" and not batch_norm:
                    settings, strengths = settings | WITHOUT_NORM, WITHOUT_NORM_DECAY
                settings = {**settings, "batch_norm": batch_norm, "optimizer": optimizer}
                specs += [
                    replace(base, seed=own_seed, decay=d, weight_decay=strengths[d], **settings)
                    for d in DECAYS
                ]
    return specs


# What a mechanism needs, without --all: no L2, and two optimizers for the Jacobian.
PAIR = ("none", "decoupled")
SHOWN = {"mechanism2": ("sgd", "kfac-g")}
# Of each: what it is, what its runs show, and that in the summary.
SAYS = {
    "mechanism1": (
        "Batch normalisation cancels the size of the weights W; it only sets how far a step turns"
        " them: by lr / |W|^2 under SGD. Decay keeps |W| small.",
        "with decay, the same learning rate turns the weights further.",
        "Under batch normalisation, weight decay does not make the network simpler: it acts as a"
        " larger learning rate.",
    ),
    "mechanism2": (
        "The Jacobian says how strongly the outputs react to a change of the input. Under K-FAC,"
        " decay is close to a penalty on it.",
        "with decay, the network reacts less to a change of its input.",
        "Without normalisation, it makes the function smoother, above all under K-FAC.",
    ),
    "mechanism3": (
        "K-FAC adds a damping to the curvature, which counts for more as the weights grow: its"
        " steps turn into SGD's. Decay keeps the weights small.",
        "with decay, the damping counts for less against the curvature.",
        "Under K-FAC with normalisation, it keeps the damping from taking over.",
    ),
}
OTHERWISE = "one short run does not show it everywhere; --seeds 3 shows more."
UNSHOWN = "The paper says more than these runs show: {title}."


def measure_epoch(run: TrainingRun) -> dict[str, float]:
    """The quantities of the three mechanisms: all at the start, the end and on the way."""
    if run.spec.batch_norm:
        return run.measured(["effective_lr", "second_order_share"])
    return run.measured(["jacobian_norm"], when="tenth")


def demo_command(
    runs: options.Runs = options.RUNS,
    out: Out = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    epochs: Epochs = None,
    everything: All = False,
    device: options.Device = "cpu",
    report: WithReport = None,
    json_output: options.Json = False,
) -> None:
    """Show what weight decay does, on small networks, in about a minute.

    Trains small networks on handwritten digits with and without weight decay, and prints each of
    the paper's three mechanisms as soon as it is measured. Running it again reuses the runs.
    """
    for name, value in (("epochs", epochs), ("seeds", seeds)):
        if value is not None:
            AT_LEAST_ONE.check(name, value)
    drawn = _can_draw(report)
    store, where = RunStore(runs), options.chosen_device(device)
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    specs = demo_specs(seed, seeds, epochs)
    chosen = specs if everything else [spec for spec in specs if _is_shown(spec)]
    tell: Callable[..., None] = (lambda *sentences: None) if json_output else say
    tell(
        "What does weight decay do to a network? "
        f"{len(chosen)} small networks learn to read digits, without decay and with it (a -> b)."
    )
    with _bar(len(chosen)) as advance:
        shown = [_measure(m, chosen, store, where, advance, tell) for m in MECHANISMS]
    left = [spec for spec in chosen if not store.folder(spec.id).is_finished()]
    _train(left, store, where, lambda: None)
    demo, left_out = _measured(chosen, store)
    with stages(sys.stderr) as stage:
        stage("checking the paper's statements")
        checks = all_checks()
        page = write_report(runs, out or runs / "report", checks, stage).page if drawn else None
    warn(*(f"left out: {note}" for note in left_out))
    holding = [check.holds for check in checks if check.kind == "statement"]
    held, stated = sum(holding), len(holding)
    if json_output:
        print_json(_plain(demo, held, stated, page))
        return
    say("", "What decay did:")
    for mechanism, was_shown in zip(MECHANISMS, shown, strict=True):
        summary = SAYS[mechanism.anchor][2]
        say(f"- {summary if was_shown else UNSHOWN.format(title=mechanism.title)}")
    say("", f"{held} of {stated} checks of the paper's statements hold (`decaylab theory`).")
    if page is not None:
        say(f"A page with the curves: {page}")
    elif report is None:
        say("For a page with the curves: pip install 'decaylab[report]'")
    run, base = (
        next(spec.id for spec in chosen if spec.batch_norm and spec.decay == decay).rpartition("-")[
            2
        ]  # the ends of their ids suffice
        for decay in reversed(PAIR)
    )
    say("", "Next, the full verdict on the first network:")
    print(f"  decaylab diagnose {run} --against {base} --runs {runs}")


def _can_draw(report: bool | None) -> bool:
    """Whether a report is written: where the libraries are there, unless one is asked for."""
    if report is None:
        with suppress(DecaylabError):
            check_extra()
            return True
    elif report:
        check_extra()
    return bool(report)


def _is_shown(spec: RunSpec) -> bool:
    """Whether a run belongs to a mechanism that is shown without `--all`."""
    return spec.decay in PAIR and any(
        spec.batch_norm == mechanism.batch_norm and spec.optimizer in _optimizers(mechanism, False)
        for mechanism in MECHANISMS
    )


def _optimizers(mechanism: MechanismSection, everything: bool) -> tuple[str, ...]:
    return mechanism.optimizers if everything else SHOWN.get(mechanism.anchor, mechanism.optimizers)


def _measure(
    mechanism: MechanismSection,
    specs: Sequence[RunSpec],
    store: RunStore,
    device: torch.device,
    advance: Callable[[], None],
    tell: Callable[..., None],
) -> bool:
    """Train a mechanism's networks, print what decay did in each; whether it did as expected."""
    quantity = mechanism.quantities[0]
    says, learned, _ = SAYS[mechanism.anchor]
    tell("", mechanism.title, says)
    expected = True
    for optimizer in mechanism.optimizers:
        net = (mechanism.batch_norm, optimizer)
        mine = [spec for spec in specs if (spec.batch_norm, spec.optimizer) == net]
        if not mine:
            continue
        _train(mine, store, device, advance)
        ends = ends_by_decay(mechanism, optimizer, quantity, _measured(mine, store)[0])
        ratios = decay_ratios(ends)
        before, after = (fmean(ends[decay].values()) for decay in PAIR)
        tell(
            f"  {named(optimizer)}: {quantity.words}, {number(before)} -> {number(after)},"
            f" {_times(ratios)}"
        )
        expected = expected and all(moved_as_expected(quantity, ratio) for ratio in ratios)
    tell(f"  Learned: {learned if expected else OTHERWISE}")
    return expected


def _times(ratios: Sequence[float]) -> str:
    """By how much decay changed something.

    >>> _times([6.9]), _times([0.25])
    ('6.9x larger', '4.0x smaller')
    """
    ratio = fmean(ratios) if ratios else 1.0
    return f"{ratio:.1f}x larger" if ratio >= 1 else f"{1 / ratio:.1f}x smaller"


def _measured(specs: Sequence[RunSpec], store: RunStore) -> tuple[Demo, list[str]]:
    """The records of some runs, and what could not be read."""
    ids = {spec.id for spec in specs}
    indexed, left_out = indexed_runs(store)
    mine = [run for run in indexed if run.manifest.id in ids]
    return demo_runs(mine, FinishedRuns(store)), left_out


def _train(
    specs: Sequence[RunSpec], store: RunStore, device: torch.device, advance: Callable[[], None]
) -> None:
    """Train what is not finished."""
    planned = [PlannedRun(spec, (), ("demo",), TIER, measure_epoch) for spec in specs]
    done_before = sum(store.folder(spec.id).is_finished() for spec in specs)
    worker = Worker(planned, store, WorkerOptions(device, keep_checkpoints=True))
    for _ in range(done_before):
        advance()
    for event in worker.run():
        if event.kind in ("finished", "failed"):
            advance()
    for reason in worker.outcome.failed.values():
        raise DecaylabError(reason)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """What is called for each network that is trained; a bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("networks"), Left())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.update(task, advance=1)


def _plain(demo: Demo, held: int, stated: int, page: Path | None) -> dict[str, Any]:
    return {
        "runs": [
            {
                "run": run.spec.id,
                "batch_norm": batch_norm,
                "optimizer": optimizer,
                "decay": decay,
                "weight_decay": run.spec.weight_decay,
                "seed": run.spec.seed,
                **{name: run.final(name) for name in run.rows.names()},
            }
            for (batch_norm, optimizer, decay), readings in demo.items()
            for run in readings
        ],
        "theory": {"hold": held, "statements": stated},
        "report": None if page is None else str(page),
    }
