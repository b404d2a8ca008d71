"""Claims about mechanisms and convergence: E5, E7, E8, E10, E12 and E14-E17."""

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter

from decaylab.paper.evidence import Bench, Comparison, Evidence, Leaning, Sample, named
from decaylab.paper.finished_runs import TRAINED, FinishedRun
from decaylab.paper.pace import TimedCurve, timed
from decaylab.paper.statistics import correlation
from decaylab.paper.suite import SCALED_LR, Cell, search_command

AT_REST = 3.0  # E5: exposure that brings a norm under decay to where it stays
NEAR, FAR = 2.0, 4.0  # E8: times off the paper's factor that agree with it, and that do not
FITTED = 0.99  # E10: below, a short schedule has not come to the point
LEAST_NETS = 10  # E7, E17: a correlation of fewer says nothing
SMALL_LOSS, KFAC_EPOCHS = 1e-4, 10  # E12
PASS_LOSS, RUNNING_LOSS = "train/pass_loss", "train/running_loss"
RUNNING_ACCURACY = "train/running_accuracy"
PRINTED = 0.995  # E14: below, it does not round to the paper's 100 %
NOT_ZERO, ZERO = 1e-2, 1e-3  # E15
EVAL_TRACES = "gn_trace_normalised"  # of runs before traces were taken in train mode
# why runs are left out
IN_EVAL_MODE = "their traces are of batch norm in eval mode, where Eq. 13 does not hold"
WITHOUT_PASS = "they were recorded without a pass over the training set after each epoch"
FISHER_TRACE, NEWTON_TRACE = "fisher_trace_normalised_train", "gn_trace_normalised_train"


def e5(bench: Bench) -> Evidence:
    """Without decay the first layer's effective lr falls in the first stage; with it, not (SGD).

    From the initialisation on, over the first stage.
    """
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
            evidence.lack()
            continue
        fall, flat = _log_median(falls), _log_median(flats)
        rule: Leaning = "for" if fall >= 2 * flat else "against" if fall <= flat else "unclear"
        text = f"{named(key)}: max/min in the first stage {fall:.1f} without decay, {flat:.1f} with"
        spread = statistics.stdev(falls) if len(falls) > 1 else None
        enough = bench.enough(runs, AT_REST)
        evidence.add(Comparison(text, enough, runs, fall / flat, rule=rule, spread=spread))
    evidence.notes.append(
        "supported where the ratio without decay is twice that with it, the initialisation"
        f" included; a shortened schedule needs an exposure of {AT_REST:g}, since the norm must"
        " have come to rest"
    )
    return evidence.summarised()


def e7(bench: Bench) -> Evidence:
    """K-FAC GN norm goes with Jacobian norm and generalization gap, over nets at 100 % (Fig. 5)."""
    return _correlations(bench, {"jacobian": (GN_NORM, JACOBIAN), "gap": (GN_NORM, GAP)})


def e17(bench: Bench) -> Evidence:
    """The Jacobian norm goes with the generalization gap, over nets at 100 % (Sec. 4.2)."""
    return _correlations(bench, {"jacobian and gap": (JACOBIAN, GAP)})


Quantity = Callable[[FinishedRun], float | None]
GN_NORM: Quantity = partial(FinishedRun.final, name="kfac_gn_norm")
JACOBIAN: Quantity = partial(FinishedRun.final, name="jacobian_norm")
GAP: Quantity = attrgetter("generalization_gap")


def _correlations(bench: Bench, pairs: Mapping[str, tuple[Quantity, Quantity]]) -> Evidence:
    """Rank correlations of some quantities over the nets of Fig. 5, a data set at a time."""
    evidence = Evidence(every=True)
    nets: dict[object, list[FinishedRun]] = {}
    for key, pair in bench.groups("fig5"):
        for cell in pair.values():
            nets.setdefault(key["dataset"], []).extend(bench.runs(cell))
    for dataset, runs in nets.items():
        trained = [run for run in runs if run.trained]
        if left_out := len(runs) - len(trained):
            evidence.notes.append(f"{dataset}: {left_out} below {TRAINED:.1%} left out")
        for name, (first, second) in pairs.items():
            evidence.add(_correlated(f"{dataset} {name}", trained, first, second))
    evidence.notes.append(
        "within an optimizer: of the ranks less their optimizer's mean; its share is that of the"
        " ranks' covariance"
    )
    return evidence.summarised()


def _correlated(
    name: str, runs: list[FinishedRun], first: Quantity, second: Quantity
) -> Comparison | None:
    """Rank correlation with its 95 % interval, and what of it is within an optimizer."""
    points = [(x, y, run) for run in runs if None not in (x := first(run), y := second(run))]
    if len(points) < LEAST_NETS:
        return None
    xs, ys, measured = zip(*points, strict=True)
    result = correlation(xs, ys, [run.spec.optimizer for run in measured])
    text = f"{name}: rank correlation {result.rank:.2f} [{result.low:.2f}, {result.high:.2f}]"
    if math.isfinite(result.within):
        text += f", within an optimizer {result.within:.2f} ({100 * result.share_within:.0f} %)"
    text += f", {result.count} nets"
    return Comparison(text, True, measured, result.rank, result.p)


def e8(bench: Bench) -> Evidence:
    """Decay shrinks the Jacobian ~10-30x under K-FAC-G and ~3-4x under SGD (Table 2).

    Each network is judged by itself: K-FAC-G's factor and SGD's against the paper's, in both
    directions, and K-FAC-G's against SGD's.
    """
    evidence = Evidence()
    nets: dict[object, dict[object, dict[object, Cell]]] = {}
    for key, pair in bench.groups("table2"):
        nets.setdefault(key["network"], {})[key["optimizer"]] = pair
    for network, by_optimizer in nets.items():
        part, factors, runs = str(network), dict[str, float](), list[FinishedRun]()
        for optimizer, pair in by_optimizer.items():
            both = bench.pair(pair, "jacobian_norm")
            if both is None:
                evidence.lack(part)
                continue
            pair_runs = tuple(run for sample in both for run in sample.runs)
            factor = factors[str(optimizer)] = _factor(*both)
            runs += pair_runs
            without, decayed = pair[0].paper, pair[1].paper
            if without is None or decayed is None or bench.tier.on_digits:
                continue
            papers = without / decayed
            text = f"{network}: {factor:.1f}x under {optimizer}, the paper's {papers:.1f}x"
            rule = _near(factor, papers)
            enough = bench.enough(pair_runs)
            evidence.add(Comparison(text, enough, pair_runs, factor, rule=rule, part=part))
        if {"kfac-g", "sgd"} <= factors.keys():
            order = factors["kfac-g"] / factors["sgd"]
            rule = "for" if order >= 1.5 else "against" if order <= 1 else "unclear"
            text = f"{network}: K-FAC-G's factor is {order:.1f}x SGD's"
            enough = bench.enough(runs)
            evidence.add(Comparison(text, enough, tuple(runs), order, rule=rule, part=part))
    evidence.notes.append(
        f"a factor agrees with the paper's within {NEAR:g}x of it on either side, and contradicts"
        f" it beyond {FAR:g}x; K-FAC-G's factor must be 1.5x SGD's, and contradicts where it is no"
        " larger than SGD's"
    )
    evidence.notes += _nothing_but_decay(bench)
    return evidence.summarised()


def _near(factor: float, papers: float) -> Leaning:
    distance = max(factor / papers, papers / factor)
    return "for" if distance <= NEAR else "against" if distance >= FAR else "unclear"


def _nothing_but_decay(bench: Bench) -> list[str]:
    """The same factors where both sides have the KL clip and lr that were tuned for decay."""
    factors = []
    for key, pair in bench.groups("jacobian-alone"):
        without, decayed = (
            bench.sample(pair[scheme], "jacobian_norm") for scheme in ("undecayed", "wd")
        )
        if without is not None and decayed is not None:
            factors.append(f"{named(key)} {_factor(without, decayed):.1f}x")
    return [f"where nothing but the decay differs: {', '.join(factors)}"] if factors else []


def e10(bench: Bench) -> Evidence:
    """Tr F of the first layer's normalised weights falls ~1e4, tr G changes by ~2 (Fig. 7).

    Within 50 epochs (of 100: the first half of a schedule), the initialisation included, with batch
    norm in train mode. The paper's network decides; the other is shown. The paper does not say
    whether its run has decay: with and without it are two parts.
    """
    evidence = Evidence()
    for key, pair in bench.groups("fig7"):
        for decay, cell in pair.items():
            part = "with decay" if decay else "without decay"
            finished = bench.runs(cell)
            runs = [run for run in finished if not run.lacking(("traces",))]
            lacking = (run for run in finished if run not in runs)
            bench.leave_out((run for run in lacking if run.first_layer(EVAL_TRACES)), IN_EVAL_MODE)
            papers_own = key["network"] == "resnet32"
            if not runs:
                if papers_own:
                    evidence.lack(part)
                continue
            fisher = _log_median([_fall(run, FISHER_TRACE) for run in runs])
            newton = _log_median([_change(run, NEWTON_TRACE) for run in runs])
            falls = fisher >= max(100, 10 * newton)
            rule: Leaning = "for" if falls else "against" if fisher <= newton else "unclear"
            text = f"{named(key)} {part}: tr F falls {fisher:.3g}x, tr G changes {newton:.2g}x"
            if not papers_own:
                evidence.unjudged.append(f"{text} (not in the paper)")
                continue
            fitted = all((run.final("train/accuracy") or 0.0) >= FITTED for run in runs)
            enough = fitted or bench.tier.whole
            evidence.add(Comparison(text, enough, tuple(runs), fisher, rule=rule, part=part))
    evidence.notes.append(
        "supported where tr F falls 100x within the first half of the schedule, and 10x more than"
        " tr G changes, contradicted where tr G changes as much; a shortened schedule must have"
        f" come to {FITTED:.0%} training accuracy"
    )
    return evidence.summarised()


class _Convergence:
    """Fig. 9's runs of one network: when each optimizer's training loss is first at 1e-4."""

    def __init__(self, bench: Bench, network: str) -> None:
        self.network = network
        self.guessed: dict[str, Cell] = {}  # at a learning rate that is not known to be good
        self._by_epoch: dict[str, FinishedRun] = {}
        self._by_time: dict[str, TimedCurve] = {}
        for key, pair in bench.groups("fig9"):
            if key["network"] != network:
                continue
            (cell,) = pair.values()
            optimizer = str(key["optimizer"])
            if cell.note == SCALED_LR and not bench.tier.on_digits:
                self.guessed[optimizer] = cell
            spec = cell.runs[0]
            stored = [bench.finished_runs.of(spec), bench.finished_runs.repeats.of(spec)]
            runs = [run for run in stored if run is not None and not run.superseded]
            bench.leave_out((run for run in runs if not run.curve(PASS_LOSS)), WITHOUT_PASS)
            measured = [run for run in runs if run.curve(PASS_LOSS)]
            if measured:
                self._by_epoch[optimizer] = measured[0]
            curves = [
                curve for run in measured if (curve := timed(run, PASS_LOSS, bench.finished_runs))
            ]
            if curves:  # its own seconds before those of a pace
                self._by_time[optimizer] = min(curves, key=lambda curve: curve.paced)

    def epochs(self, optimizer: str) -> float | None:
        """The first epoch; infinite where it never gets there, None without a run."""
        run = self._by_epoch.get(optimizer)
        return None if run is None else _first_below(run.curve(PASS_LOSS))

    def seconds(self) -> dict[str, float]:
        """Seconds of training by optimizer, alone on one device; empty unless all are of one."""
        if len({curve.device for curve in self._by_time.values()}) != 1:
            return {}
        return {name: _first_below(curve.points) for name, curve in self._by_time.items()}

    @property
    def paced(self) -> list[str]:
        """The optimizers whose seconds are the epochs times a pace."""
        return [name for name, curve in self._by_time.items() if curve.paced]

    def runs(self) -> tuple[FinishedRun, ...]:
        """All that were used."""
        return tuple(self._by_epoch.values())


NETWORKS = ("vgg16", "resnet32")


def e12(bench: Bench) -> Evidence:
    """K-FAC-G reaches training loss 1e-4 within 10 epochs, and first in time (Fig. 9). Two parts.

    The loss is that of a pass over the training set after each epoch, in train mode.
    """
    evidence = Evidence()
    within, first = f"1e-4 within {KFAC_EPOCHS} epochs", "first in wall-clock time"
    for network in NETWORKS:
        convergence = _Convergence(bench, network)
        _add_within(bench, evidence, convergence, within)
        _add_first(bench, evidence, convergence, ("sgd", "adam"), first)
    evidence.unjudged += _at_other_settings(bench)
    return evidence.summarised()


def _add_within(bench: Bench, evidence: Evidence, convergence: _Convergence, part: str) -> None:
    epochs = convergence.epochs("kfac-g")
    if epochs is None:
        evidence.lack(part)
        return
    when = f"in {epochs:g} epochs" if math.isfinite(epochs) else "never"
    text = f"{convergence.network}: K-FAC-G reaches 1e-4 {when}"
    reached = epochs <= KFAC_EPOCHS
    if not reached and _at_a_guess(bench, evidence, convergence, ("kfac-g",), text, part):
        return
    enough = reached or not bench.tier.on_digits  # an epoch of digits has a tenth of the steps
    rule: Leaning = "for" if reached else "against"
    evidence.add(Comparison(text, enough, convergence.runs(), epochs, rule=rule, part=part))


def _add_first(
    bench: Bench, evidence: Evidence, convergence: _Convergence, others: tuple[str, ...], part: str
) -> None:
    """K-FAC-G against others in seconds to the small loss."""
    seconds = convergence.seconds()
    if not {"kfac-g", *others} <= seconds.keys():
        evidence.lack(part)
        evidence.notes.append(
            f"{convergence.network}: times of {', '.join(['kfac-g', *others])} are needed, alone"
            " on one device: decaylab reproduce fig9-pace, without --at-once and --compiled"
        )
        return
    if convergence.paced:
        evidence.notes.append(
            f"{convergence.network}: seconds of {', '.join(convergence.paced)} are the epochs times"
            " the pace of the same run alone on the device (fig9-pace)"
        )
    kfac_g, best = seconds["kfac-g"], min(seconds[other] for other in others)
    text = f"{convergence.network}: seconds to 1e-4: "
    text += ", ".join(f"{name} {_words(seconds[name])}" for name in ("kfac-g", *others))
    rule = _earlier(kfac_g, best)
    if _at_a_guess(bench, evidence, convergence, _behind(rule, others), text, part):
        return
    enough = rule == "for" or not bench.tier.on_digits
    evidence.add(Comparison(text, enough, convergence.runs(), best / kfac_g, rule=rule, part=part))


def _earlier(mine: float, other: float) -> Leaning:
    """Unclear where both come at once, or neither does."""
    return "for" if mine < other else "against" if mine > other else "unclear"


def _behind(rule: Leaning, others: tuple[str, ...]) -> tuple[str, ...]:
    """Who is not ahead: what their learning rate was is what a verdict hangs on."""
    return others if rule == "for" else ("kfac-g",) if rule == "against" else ("kfac-g", *others)


def _at_a_guess(
    bench: Bench,
    evidence: Evidence,
    convergence: _Convergence,
    behind: tuple[str, ...],
    text: str,
    part: str,
) -> bool:
    """Whether nothing is held against those behind, since the settings of one were not searched."""
    guessed = [convergence.guessed[name] for name in behind if name in convergence.guessed]
    if not guessed:
        return False
    evidence.lack(part)
    evidence.unjudged.append(f"{text} (at a learning rate that was neither published nor searched)")
    for cell in guessed:
        command = search_command(cell, bench.tier.name)
        note = (
            f"{convergence.network}: find {cell.key['optimizer']}'s learning rate first: {command}"
        )
        if note not in evidence.notes:
            evidence.notes.append(note)
    return True


def _at_other_settings(bench: Bench) -> list[str]:
    """Epochs to the small loss by its running mean, where Fig. 9 is not: shown, not judged.

    These are Table 1's settings, with K-FAC too at batch 128, and batch normalisation.
    """
    as_in_fig9 = {"dataset": "cifar10", "batch_norm": 0, "weight_decay": 0}
    table1 = [cell for cell in bench.cells("table1") if as_in_fig9.items() <= cell.key.items()]
    settings = [(cell, "at Table 1's settings") for cell in table1]
    settings += [(cell, "with BN") for cell in bench.cells("fig9-bn")]
    epochs: dict[str, list[str]] = {}
    for cell, setting in settings:
        for run in bench.runs(cell)[:1]:
            words = f"{cell.key['optimizer']} {_words(_first_below(run.curve(RUNNING_LOSS)))}"
            epochs.setdefault(f"{cell.key['network']} {setting}", []).append(words)
    return [
        f"{title}: epochs to a running loss of 1e-4: {', '.join(words)}"
        for title, words in epochs.items()
    ]


def e16(bench: Bench) -> Evidence:
    """K-FAC-G converges ahead of K-FAC-F: in epochs and in time to 1e-4 (App. G.3)."""
    evidence = Evidence()
    in_epochs, in_time = "in epochs", "in wall-clock time"
    for network in NETWORKS:
        convergence = _Convergence(bench, network)
        kfac_g, kfac_f = convergence.epochs("kfac-g"), convergence.epochs("kfac-f")
        if kfac_g is None or kfac_f is None:
            evidence.lack(in_epochs)
        else:
            text = f"{network}: epochs to 1e-4: K-FAC-G {_words(kfac_g)}, K-FAC-F {_words(kfac_f)}"
            rule = _earlier(kfac_g, kfac_f)
            behind = _behind(rule, ("kfac-f",))
            if not _at_a_guess(bench, evidence, convergence, behind, text, in_epochs):
                enough = rule == "for" or not bench.tier.on_digits
                runs = convergence.runs()
                evidence.add(Comparison(text, enough, runs, kfac_f, rule=rule, part=in_epochs))
        _add_first(bench, evidence, convergence, ("kfac-f",), in_time)
    evidence.unjudged += _at_other_settings(bench)
    return evidence.summarised()


def e14(bench: Bench) -> Evidence:
    """All nets of Table 1 end at 100 % training accuracy (Fig. 8).

    As the authors log it, in train mode on the images as they are trained on; ours is the mean over
    the last epoch, theirs a pass after it. What rounds to 100 % and is not within a thousandth of
    it is neither for the claim nor against it.
    """
    evidence = Evidence(every=True)
    for key, pair in bench.groups("table1"):
        for decay, cell in pair.items():
            sample = bench.sample(cell, RUNNING_ACCURACY)
            if sample is None:
                evidence.lack()
                continue
            accuracy = sample.mean
            rule: Leaning = (
                "for" if accuracy >= TRAINED else "against" if accuracy < PRINTED else "unclear"
            )
            text = f"{named(key)} decay={decay}: {100 * accuracy:.2f} %"
            enough = rule == "for" or bench.tier.whole
            evidence.add(Comparison(text, enough, sample.runs, 100 * accuracy, rule=rule))
    comparisons = evidence.comparisons
    below = [c for c in comparisons if c.rule != "for"]
    if comparisons:
        evidence.value = min(c.value for c in comparisons)
        evidence.effect = (
            f"{len(comparisons) - len(below)} of {len(comparisons)} cells end at {TRAINED:.1%} or"
            f" more training accuracy, the lowest at {evidence.value:.2f} %"
        )
    evidence.notes += [f"below: {c.text}" for c in below[:8]]
    evidence.notes += [f"and {len(below) - 8} more"] if len(below) > 8 else []
    return evidence


def e15(bench: Bench) -> Evidence:
    """Large batch, no decay: the training loss does not reach zero (App. G.1).

    In train mode on the images as they are trained on, over the last epoch, as for E14.
    """
    evidence = Evidence()
    for key, pair in bench.groups("table3"):
        if key["batch_size"] != 2000:
            continue
        without, decayed = (bench.sample(pair[d], RUNNING_LOSS) for d in (0, 1))
        if without is None:
            evidence.lack()
            continue
        loss = without.mean
        rule: Leaning = "for" if loss > NOT_ZERO else "against" if loss < ZERO else "unclear"
        with_decay = "" if decayed is None else f", {decayed.mean:.3g} with decay"
        enough = bench.tier.whole or rule == "against"  # short runs never reach zero
        text = f"{named(key)}: training loss {loss:.3g}{with_decay}"
        evidence.add(Comparison(text, enough, without.runs, loss, rule=rule))
    evidence.notes.append(f"not zero is above {NOT_ZERO:g}, zero below {ZERO:g}")
    return evidence.summarised()


def _values(run: FinishedRun, quantity: str, last: float) -> list[float]:
    """A quantity of the first layer from the initialisation to an epoch."""
    return [value for epoch, value in run.first_layer_curve(quantity) if epoch <= last]


def _stage_ratio(run: FinishedRun) -> float | None:
    """Max/min over the first stage of the first layer's effective lr."""
    values = _values(run, "effective_lr", run.spec.resolved().lr_drop_every or 0)
    return max(values) / min(values) if len(values) > 1 and min(values) > 0 else None


def _first_half(run: FinishedRun, quantity: str) -> list[float]:
    """A quantity of the first layer in the first half of the schedule: the paper's 50 of 100."""
    return _values(run, quantity, (run.spec.resolved().epochs or 0) / 2)


def _change(run: FinishedRun, quantity: str) -> float:
    """Max/min over the first half of the epochs."""
    values = _first_half(run, quantity)
    return max(values) / max(min(values), 1e-300)


def _fall(run: FinishedRun, quantity: str) -> float:
    """The largest value in the first half of the epochs over the least one after it."""
    values = _first_half(run, quantity)
    top = values.index(max(values))
    return values[top] / max(min(values[top:]), 1e-300)


def _log_median(ratios: list[float]) -> float:
    """The median over seeds, of logarithms."""
    return math.exp(statistics.median(math.log(ratio) for ratio in ratios))


def _factor(without: Sample, decayed: Sample) -> float:
    """By how much decay shrinks a quantity: means of logarithms over seeds."""
    return without.geometric_mean / decayed.geometric_mean


def _first_below(curve: list[tuple[int, float]] | list[tuple[float, float]]) -> float:
    return next((at for at, value in curve if value <= SMALL_LOSS), math.inf)


def _words(number: float) -> str:
    return f"{number:.3g}" if math.isfinite(number) else "never"
