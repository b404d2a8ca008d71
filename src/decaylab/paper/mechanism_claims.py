"""Claims about mechanisms and convergence: E5, E7, E8, E10, E12, E14 and E15."""

import math
import statistics

from decaylab.paper.evidence import Bench, Comparison, Evidence, Leaning, Sample, named
from decaylab.paper.readings import TRAINED, RunReading
from decaylab.paper.suite import SCALED_LR

AT_REST = 3.0  # E5: exposure that brings a norm under decay to where it stays
FITTED = 0.99  # E10: below, a short schedule has not come to the point
LEAST_NETS = 10  # E7: a correlation of fewer says nothing
SMALL_LOSS, KFAC_EPOCHS = 1e-4, 10  # E12
NOT_ZERO, ZERO = 1e-2, 1e-3  # E15


def e5(bench: Bench) -> Evidence:
    """Without decay the first layer's effective lr falls in the first stage; with it, not (SGD)."""
    evidence = Evidence()
    for key, pair in bench.groups("fig3"):
        if key["optimizer"] != "sgd":
            continue
        runs = (*bench.runs(pair[0]), *bench.runs(pair[1]))
        falls, flats = (
            [ratio for run in bench.runs(pair[decay]) if (ratio := _stage_ratio(run)) is not None]
            for decay in (0, 1)
        )
        if not falls or not flats:
            evidence.missing += 1
            continue
        fall, flat = statistics.fmean(falls), statistics.fmean(flats)
        leaning: Leaning = "for" if fall >= 2 * flat else "against" if fall <= flat else "unclear"
        text = f"{named(key)}: max/min in the first stage {fall:.1f} without decay, {flat:.1f} with"
        spread = statistics.stdev(falls) if len(falls) > 1 else None
        enough = bench.enough(runs, AT_REST)
        evidence.add(Comparison(text, leaning, enough, runs, fall / flat, spread=spread))
    evidence.notes.append(
        "supported where the ratio without decay is twice that with it; a shortened schedule needs"
        f" an exposure of {AT_REST:g}, since the norm must have come to rest"
    )
    return evidence.told()


def e7(bench: Bench) -> Evidence:
    """K-FAC GN norm goes with Jacobian norm and generalization gap, over nets at 100 % (Fig. 5)."""
    evidence = Evidence()
    nets: dict[object, list[RunReading]] = {}
    for key, pair in bench.groups("fig5"):
        for cell in pair.values():
            nets.setdefault(key["dataset"], []).extend(bench.runs(cell))
    for dataset, found in nets.items():
        trained = [run for run in found if run.trained]
        if left_out := len(found) - len(trained):
            evidence.notes.append(f"{dataset}: {left_out} below {TRAINED:.1%} left out")
        jacobians = [(run, run.final("jacobian_norm")) for run in trained]
        gaps = [(run, run.generalization_gap) for run in trained]
        for what, values in (("jacobian", jacobians), ("gap", gaps)):
            points = [
                (norm, value, run)
                for run, value in values
                if value is not None and (norm := run.final("kfac_gn_norm")) is not None
            ]
            evidence.add(_correlation(f"{dataset} {what}", points))
    return evidence.told()


def e8(bench: Bench) -> Evidence:
    """Decay shrinks the Jacobian ~10-30x under K-FAC-G and ~3-4x under SGD (Table 2)."""
    evidence = Evidence()
    nets: dict[object, dict[object, tuple[Sample, Sample] | None]] = {}
    for key, pair in bench.groups("table2"):
        both = bench.pair(pair, "jacobian_norm")
        nets.setdefault(key["network"], {})[key["optimizer"]] = both
    for network, found in nets.items():
        kfac, sgd = found["kfac-g"], found["sgd"]
        if kfac is None or sgd is None:
            evidence.missing += 1
            continue
        by_kfac, by_sgd = (_ratio(*pair) for pair in (kfac, sgd))
        leaning: Leaning = "unclear"
        if by_kfac >= 5 and by_sgd >= 1.5 and by_kfac > 1.5 * by_sgd:
            leaning = "for"
        elif by_kfac <= 1 or by_sgd <= 1 or by_kfac <= by_sgd:
            leaning = "against"
        runs = tuple(run for pair in (kfac, sgd) for sample in pair for run in sample.runs)
        text = f"{network}: {by_kfac:.1f}x under K-FAC-G, {by_sgd:.1f}x under SGD"
        evidence.add(Comparison(text, leaning, bench.enough(runs), runs, by_kfac))
    evidence.notes.append("supported from 5x (K-FAC-G) and 1.5x (SGD) on, K-FAC-G's 1.5x SGD's")
    return evidence.told()


def e10(bench: Bench) -> Evidence:
    """Tr F of the first layer's normalised weights falls ~1e4, tr G changes by ~2 (Fig. 7)."""
    evidence = Evidence()
    for key, pair in bench.groups("fig7"):
        for decay, cell in pair.items():
            runs = [run for run in bench.runs(cell) if not run.lacking(("traces",))]
            if not runs:
                evidence.missing += 1
                continue
            fisher = statistics.fmean(_fall(run, "fisher_trace_normalised") for run in runs)
            newton = statistics.fmean(_change(run, "gn_trace_normalised") for run in runs)
            leaning: Leaning = "unclear"
            if fisher >= 100 and fisher >= 10 * newton:
                leaning = "for"
            elif fisher <= newton:
                leaning = "against"
            text = (
                f"{named(key)} decay={decay}: tr F falls {fisher:.3g}x, tr G changes {newton:.2g}x"
            )
            fitted = all((run.final("train/accuracy") or 0.0) >= FITTED for run in runs)
            enough = fitted or bench.tier.name == "full"
            evidence.add(Comparison(text, leaning, enough, tuple(runs), fisher))
    evidence.notes.append(
        "supported where tr F falls 100x, and 10x more than tr G changes; a shortened schedule must"
        f" have come to {FITTED:.0%} training accuracy"
    )
    return evidence.told()


def e12(bench: Bench) -> Evidence:
    """K-FAC-G reaches training loss 1e-4 within 10 epochs, and before the others (Fig. 9)."""
    evidence = Evidence()
    runs: dict[object, dict[object, RunReading]] = {}
    guessed = set()  # networks whose K-FAC-G has a learning rate that is not known to be good
    for key, cells in bench.groups("fig9"):
        found = runs.setdefault(key["network"], {})
        for cell in cells.values():
            if key["optimizer"] == "kfac-g" and cell.note == SCALED_LR:
                guessed.add(key["network"])
            for run in bench.runs(cell)[:1]:
                found[key["optimizer"]] = run
    for network, found in runs.items():
        if not {"kfac-g", "sgd", "adam"} <= set(found):
            evidence.missing += 1
            continue
        name = "train/running_loss"
        devices = {run.manifest.device for run in found.values()}
        if len(devices) > 1 or not all(run.timed_curve(name) for run in found.values()):
            evidence.missing += 1
            evidence.notes.append(
                f"{network}: the times are of different devices, of runs that shared one, or were"
                " compiled; make them again on one device, without --at-once and --compiled"
            )
            continue
        epochs = _first_below(found["kfac-g"].curve(name))
        times = {o: _first_below(run.timed_curve(name)) for o, run in found.items()}
        when = f"in {epochs:g} epochs" if math.isfinite(epochs) else "never"
        text = f"{network}: K-FAC-G reaches 1e-4 {when}; seconds: "
        text += ", ".join(f"{o} {_words(seconds)}" for o, seconds in times.items())
        others = min(times[o] for o in ("sgd", "adam"))
        reached = epochs <= KFAC_EPOCHS
        won: Leaning = "for" if reached and times["kfac-g"] < others else "against"
        if won == "against" and network in guessed and not bench.tier.on_digits:
            evidence.missing += 1
            evidence.unjudged.append(
                f"{text} (at a learning rate that was neither published nor searched)"
            )
            evidence.notes.append(
                f"{network}: find K-FAC-G's learning rate first: decaylab search dataset=cifar10"
                f" network={network} batch_norm=1 augment=0 optimizer=kfac-g batch_size=640"
                f" constant_lr=1 --scheme none --tier {bench.tier.name}"
            )
            continue
        enough = reached or not bench.tier.on_digits  # an epoch of digits has a tenth of the steps
        evidence.add(Comparison(text, won, enough, tuple(found.values()), epochs))
    evidence.notes.append("the training loss is the running mean of its epoch")
    return evidence.told()


def e14(bench: Bench) -> Evidence:
    """All nets of Table 1 end at 100 % training accuracy (Fig. 8)."""
    evidence = Evidence()
    for key, pair in bench.groups("table1"):
        for decay, cell in pair.items():
            sample = bench.sample(cell, "train/accuracy")
            if sample is None:
                evidence.missing += 1
                continue
            reached = sample.mean >= TRAINED
            text = f"{named(key)} decay={decay}: {100 * sample.mean:.2f} %"
            enough = reached or bench.tier.name == "full"
            leaning: Leaning = "for" if reached else "against"
            evidence.add(Comparison(text, leaning, enough, sample.runs, 100 * sample.mean))
    found = evidence.comparisons
    below = [c for c in found if c.leaning == "against"]
    if found:
        evidence.value = min(c.value for c in found)
        evidence.effect = f"{len(found) - len(below)} of {len(found)} cells end at {TRAINED:.1%} or"
        evidence.effect += f" more training accuracy, the lowest at {evidence.value:.2f} %"
    evidence.notes += [f"below: {c.text}" for c in below[:8]]
    evidence.notes += [f"and {len(below) - 8} more"] if len(below) > 8 else []
    return evidence


def e15(bench: Bench) -> Evidence:
    """Large batch, no decay: the training loss does not reach zero (App. G.1)."""
    evidence = Evidence()
    for key, pair in bench.groups("table3"):
        if key["batch_size"] != 2000:
            continue
        without, decayed = (bench.sample(pair[d], "train/loss") for d in (0, 1))
        if without is None:
            evidence.missing += 1
            continue
        loss = without.mean
        leaning: Leaning = "for" if loss > NOT_ZERO else "against" if loss < ZERO else "unclear"
        told = "" if decayed is None else f", {decayed.mean:.3g} with decay"
        enough = bench.tier.name == "full" or leaning == "against"  # short runs never reach zero
        text = f"{named(key)}: training loss {loss:.3g}{told}"
        evidence.add(Comparison(text, leaning, enough, without.runs, loss))
    evidence.notes.append(f"not zero is above {NOT_ZERO:g}, zero below {ZERO:g}")
    return evidence.told()


def _values(run: RunReading, quantity: str, last: float = math.inf) -> list[float]:
    """A quantity of the first layer from epoch 1 to `last`.

    Not from epoch 0: the traces are measured with BN's running statistics, which are only made in
    the first epoch.
    """
    return [value for epoch, value in run.first_layer_curve(quantity) if 1 <= epoch <= last]


def _stage_ratio(run: RunReading) -> float | None:
    """Max/min over the first stage of the first layer's effective lr."""
    values = _values(run, "effective_lr", run.spec.resolved().lr_drop_every or 0)
    return max(values) / min(values) if len(values) > 1 and min(values) > 0 else None


def _change(run: RunReading, quantity: str) -> float:
    """Max/min over the epochs."""
    values = _values(run, quantity)
    return max(values) / max(min(values), 1e-300)


def _fall(run: RunReading, quantity: str) -> float:
    """The largest value over the least one after it."""
    values = _values(run, quantity)
    top = values.index(max(values))
    return values[top] / max(min(values[top:]), 1e-300)


def _ratio(without: Sample, decayed: Sample) -> float:
    return without.mean / max(decayed.mean, 1e-300)


def _first_below(curve: list[tuple[int, float]] | list[tuple[float, float]]) -> float:
    return next((at for at, value in curve if value <= SMALL_LOSS), math.inf)


def _words(number: float) -> str:
    return f"{number:.3g}" if math.isfinite(number) else "never"


def _correlation(name: str, points: list[tuple[float, float, RunReading]]) -> Comparison | None:
    """Rank correlation with its 95 % interval (Fisher's z), and that of the logarithms."""
    if len(points) < LEAST_NETS:
        return None
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    rank = statistics.correlation(_ranks(xs), _ranks(ys))
    half = 1.96 / math.sqrt(len(points) - 3)
    low, high = (math.tanh(math.atanh(min(max(rank, -0.9999), 0.9999)) + s * half) for s in (-1, 1))
    positive = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True) if x > 0 and y > 0]
    logs = ""
    if len(positive) >= LEAST_NETS:
        logs = f", of logarithms {statistics.correlation(*zip(*positive, strict=True)):.2f}"
    text = f"{name}: rank correlation {rank:.2f} [{low:.2f}, {high:.2f}]{logs}, {len(points)} nets"
    leaning: Leaning = "for" if low > 0 else "against" if high < 0 else "unclear"
    runs = tuple(run for _, _, run in points)
    return Comparison(text, leaning, True, runs, rank)


def _ranks(values: list[float]) -> list[float]:
    """Ranks from 1, ties sharing their mean.

    >>> _ranks([3.0, 1.0, 3.0])
    [2.5, 1.0, 2.5]
    """
    ordered = sorted(values)
    return [ordered.index(v) + 1 + (ordered.count(v) - 1) / 2 for v in values]
