"""Where an optimizer does not follow its law: clipped gradients, and an eps that counts."""

from collections.abc import Mapping
from dataclasses import replace

from decaylab.diagnosis.layers import Setting
from decaylab.optim.laws.dynamics import Series
from decaylab.records import LayerSettings

# Sizes of gradients as near as this, at so many records, are at the bound of a clip.
SAME_GRADIENT, CLIPPED_RECORDS = 1e-4, 3
# Clipping at fewer of the records, or of a smaller part of the gradient, changes little.
SELDOM = 0.1
# From such a part of the root of the second moment on eps counts: there, factors were 12 % off.
EPS = 0.1


def clipped(series: Mapping[str, Series], layer: str, rounding: float = 0.0) -> float:
    """At which part of the records a layer's gradients are clipped; 0 where that changes little.

    The norm of all gradients, or the size of their largest entries, is then the same: of 16 bits,
    as far as the norm that torch divides by, and its quotient, are. Of a clip by value, what counts
    is the part of the layer's gradient that it cuts off.
    """
    norms, largest = series.get("gradient_norm", ()), series.get("gradient_max", ())
    found = len(_at_bound(norms, max(SAME_GRADIENT, 2 * rounding))) / max(len(norms), 1)
    if sum(cut(series, layer).values()) > SELDOM * len(largest):
        found = max(found, len(_at_bound(largest)) / len(largest))
    return found if found > SELDOM else 0.0


def cut(series: Mapping[str, Series], layer: str) -> dict[int, float]:
    """By step, the part of a layer's |g|^2 in entries at the bound of a clip by value."""
    at = set(_at_bound(series.get("gradient_max", ())))
    return {step: cut for step, cut in series.get(f"gradient_at_max/{layer}", ()) if step in at}


def _at_bound(sizes: Series, same: float = SAME_GRADIENT) -> list[int]:
    """The steps at which sizes are the largest one, if they are many enough to be no chance."""
    bound = max((size for _, size in sizes), default=0.0)
    at = [step for step, size in sizes if size > bound * (1 - same)]
    return at if len(at) >= CLIPPED_RECORDS else []


def of_clipped(setting: Setting, clipped: float) -> Setting:
    """Without a law, if it is SGD's: between lr/|W|^2 and, where every step is clipped, lr/|W|."""
    law = None if setting.power == 2 and clipped else setting.power
    return replace(setting, power=law, clipped=bool(clipped))


def eps_counts(series: Mapping[str, Series], layer: str, settings: LayerSettings) -> bool:
    """Whether eps is much beside the root of the second moment, over the half that is judged.

    Then steps lie between Adam's law and, where eps is all that they are divided by, SGD's.
    """
    eps, size = settings.eps, settings.size
    beta1, beta2 = settings.beta1 or 0.0, settings.beta2 or 0.0
    moments = series.get(f"second_moment/{layer}", ())
    late = moments[len(moments) // 2 :]
    if not (eps and size and late):
        return False
    small = [v for step, v in late if v / size < (eps / EPS) ** 2 * _begun(beta1, beta2, step)]
    return len(small) > SELDOM * len(late)


def _begun(beta1: float, beta2: float, step: int) -> float:
    """What Adam divides v by for its beginning; those without beta1 (RMSprop, Adagrad) do not."""
    return 1 - beta2**step if beta1 else 1.0
