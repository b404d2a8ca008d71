"""Where an optimizer does not follow its law: clipped gradients, and an eps that counts."""

import math
from collections.abc import Mapping

from decaylab.diagnosis.rules import RULES
from decaylab.optim.laws.dynamics import Series
from decaylab.records.settings import LayerSettings


def clipped(series: Mapping[str, Series], layer: str, rounding: float = 0.0) -> float:
    """At which part of the records a layer's gradients are clipped; 0 where that changes little.

    The norm of all gradients, or of those of the layer's optimizer where there are several, or the
    size of their largest entries, is then the same: of 16 bits, as far as the norm that torch
    divides by, and its quotient, are (`rounding`). Of a clip by value, what counts is the part of
    the layer's gradient that it cuts off.
    """
    largest, same = series.get("gradient_max", ()), max(RULES.same_gradient, 2 * rounding)
    names = ("gradient_norm", f"optimizer_gradient_norm/{layer}")
    norms = [series[name] for name in names if name in series]
    share = max((len(_at_bound(each, same)) / len(each) for each in norms if each), default=0.0)
    if sum(cut_entries(series, layer).values()) > RULES.seldom * len(largest):
        share = max(share, len(_at_bound(largest, RULES.same_gradient)) / len(largest))
    return share if share > RULES.seldom else 0.0


def norm_bound(series: Mapping[str, Series], rounding: float = 0.0) -> float:
    """The norm that all gradients together are clipped to; infinite where none is seen."""
    norms = series.get("gradient_norm", ())
    at = _at_bound(norms, max(RULES.same_gradient, 2 * rounding))
    return max(size for _, size in norms) if len(at) > RULES.seldom * len(norms) else math.inf


def cut_entries(series: Mapping[str, Series], layer: str) -> dict[int, float]:
    """By step, the part of a layer's |g|^2 in entries at the bound of a clip by value."""
    at = set(_at_bound(series.get("gradient_max", ()), RULES.same_gradient))
    return {step: cut for step, cut in series.get(f"gradient_at_max/{layer}", ()) if step in at}


def _at_bound(sizes: Series, same: float) -> list[int]:
    """The steps at which sizes are the largest one, if they are many enough to be no chance."""
    bound = max((size for _, size in sizes), default=0.0)
    at = [step for step, size in sizes if size > bound * (1 - same)]
    return at if len(at) >= RULES.clipped_records else []


def eps_counts(series: Mapping[str, Series], layer: str, settings: LayerSettings) -> bool:
    """Whether eps is much beside the root of the second moment, over the half that is judged.

    Then steps lie between Adam's law and, where eps is all that they are divided by, SGD's.
    """
    moments = series.get(f"second_moment/{layer}", ())
    late = moments[len(moments) // 2 :]
    if not (settings.eps and settings.size and late):
        return False
    bound = (settings.eps / RULES.eps) ** 2
    small = [v for step, v in late if v / settings.size < bound * _begun(settings, step)]
    return len(small) > RULES.seldom * len(late)


def _begun(settings: LayerSettings, step: int) -> float:
    """What Adam divides v by for its beginning; those without beta1 (RMSprop, Adagrad) do not."""
    return 1 - (settings.beta2 or 0.0) ** step if settings.beta1 else 1.0
