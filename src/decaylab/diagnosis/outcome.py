"""Whether decay helped: the outcomes of runs with and without it."""

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.runs import Run

# By their names, as words between underscores: on data that was not trained on, the first kind that
# all runs have decides, of its accuracies or else losses the plainest name; which way is better of
# an outcome that says neither is not known.
HELD_OUT = ("test", "val", "eval", "valid", "validation", "dev", "heldout", "holdout")
SMALLER_IS_BETTER = re.compile(
    r"loss|error|perplexity|entropy|regret|distance|brier|[mr]?ms[ed]|mae"
    r"|(^|_)(err|ppl|nll|bpb|bpc|bpd|wer|cer|fid|kl|ce|ece|cost)(_|$)"
)
LARGER_IS_BETTER = re.compile(
    r"acc|score|auc|auroc|bleu|rouge|meteor|precision|recall|iou|reward|return|psnr|ssim|dice|ndcg"
    r"|success|pearson|spearman|kappa|(^|_)(f1|r2|map|mcc|elo|win|em|top\d+)(_|$)"
)


class Helped(StrEnum):
    """What the outcomes say."""

    YES = "helped"
    NO = "hurt"
    UNDECIDED = "no difference shown"
    BETTER = "better in one seed"
    WORSE = "worse in one seed"
    UNKNOWN = "not recorded"
    NOT_COMPARED = "nothing to compare with"


@dataclass(frozen=True)
class Outcome:
    """One outcome with decay and without.

    Attributes:
        name: of the outcome; of an unknown verdict, what was logged without saying which way is
            better. larger_is_better: whether it is an accuracy or the like.
        run, baseline: mean over seeds at the end. seeds: how many with decay, without.
        gain: by how much better with decay. interval: its 95 % interval (Welch), from two seeds
            each on.
        diverged: how many runs did, with decay and without.
        step: up to which they are compared, where some are longer; None: at the end of each.
    """

    verdict: Helped
    name: str = ""
    larger_is_better: bool = False
    run: float = math.nan
    baseline: float = math.nan
    seeds: tuple[int, int] = (0, 0)
    gain: float = math.nan
    interval: tuple[float, float] | None = None
    in_training: bool = False
    diverged: tuple[int, int] = (0, 0)
    step: int | None = None


def outcome_of(runs: Sequence[Run], baselines: Sequence[Run]) -> Outcome:
    """Whether the runs ended better than the baselines.

    The last value of what is measured on other data, by its name; of anything else, logged in
    training, the mean over the last tenth; where some runs are longer, up to the step that all
    have. A run that diverged has ended worse, whatever it logged before: where runs did, that is
    the outcome.
    """
    diverged = (sum(run.diverged for run in runs), sum(run.diverged for run in baselines))
    if any(diverged):
        verdict = Helped.NOT_COMPARED
        if baselines:
            shares = diverged[0] / len(runs), diverged[1] / len(baselines)
            verdict = Helped.WORSE if shares[0] > shares[1] else Helped.BETTER
            verdict = Helped.UNDECIDED if shares[0] == shares[1] else verdict
        return Outcome(verdict, seeds=(len(runs), len(baselines)), diverged=diverged)
    step = _common_end([*runs, *baselines]) if baselines else None
    ends = [end_values(run, step) for run in runs]
    names = [name for name in ends[0] if all(name in end for end in ends)] if ends else []
    if not baselines:
        return Outcome(Helped.NOT_COMPARED if names else Helped.UNKNOWN)
    baseline_ends = [end_values(run, step) for run in baselines]
    names = [name for name in names if all(name in end for end in baseline_ends)]
    directed = [name for name in names if _larger_is_better(name) is not None]
    if not directed:
        return Outcome(Helped.UNKNOWN, min(names, default=""), step=step)
    name = min(directed, key=_preference)
    larger = bool(_larger_is_better(name))
    mine, theirs = [end[name] for end in ends], [end[name] for end in baseline_ends]
    sign = 1.0 if larger else -1.0
    gain = sign * (fmean(mine) - fmean(theirs))
    interval = _interval(mine, theirs, sign)
    if interval is None:
        verdict = Helped.UNDECIDED if gain == 0 else Helped.BETTER if gain > 0 else Helped.WORSE
    elif interval[0] > 0:
        verdict = Helped.YES
    else:
        verdict = Helped.NO if interval[1] < 0 else Helped.UNDECIDED
    seeds = (len(mine), len(theirs))
    training = _held_out(name) is None
    ends_at = fmean(mine), fmean(theirs)
    return Outcome(verdict, name, larger, *ends_at, seeds, gain, interval, training, step=step)


def _common_end(runs: Sequence[Run]) -> int | None:
    """The last step of the shortest run, if others are clearly longer."""
    lengths = [run.steps for run in runs]
    return min(lengths) if min(lengths) < RULES.same_length * max(lengths) else None


def _interval(
    mine: Sequence[float], theirs: Sequence[float], sign: float
) -> tuple[float, float] | None:
    if min(len(mine), len(theirs)) < 2:
        return None
    from scipy import stats  # slow to import

    if len({*mine}) == len({*theirs}) == 1:  # no spread to go by
        return (sign * (mine[0] - theirs[0]),) * 2
    with warnings.catch_warnings():  # scipy's, of seeds that ended nearly alike
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(mine, theirs, equal_var=False)
    low, high = test.confidence_interval(RULES.confidence)
    return (float(low), float(high)) if sign > 0 else (-float(high), -float(low))


def end_values(run: Run, until: int | None = None) -> dict[str, float]:
    """Each outcome at the end of a run, or by a step; those that are not finite are left out."""
    ends = {}
    for name, series in run.recording.outcomes.items():
        values = [
            value
            for step, value in series
            if math.isfinite(value) and (until is None or step <= until)
        ]
        if values:
            tail = max(1, round(RULES.outcome_tail * len(values))) if _held_out(name) is None else 1
            ends[name] = fmean(values[-tail:])
    return ends


def _words(name: str) -> str:
    return re.sub("[^a-z0-9]+", "_", name.lower())


def _held_out(name: str) -> int | None:
    """Which of `HELD_OUT` it is measured on; None: on what is trained on."""
    words = _words(name).split("_")
    return next((place for place, word in enumerate(HELD_OUT) if word in words), None)


def _larger_is_better(name: str) -> bool | None:
    """Whether it is an accuracy or the like, or a loss; None if its name does not say."""
    if SMALLER_IS_BETTER.search(_words(name)):
        return False
    return True if LARGER_IS_BETTER.search(_words(name)) else None


def _preference(name: str) -> tuple[bool, bool, int, bool, int, str]:
    """What sorts the outcome to judge by first: `val_loss`, say, before `ema_val_loss`."""
    place, words = _held_out(name), _words(name).split("_")
    kind = place is None, not _larger_is_better(name), place or 0
    return *kind, "loss" not in words, len(words), name
