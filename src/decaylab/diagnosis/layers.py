"""One layer as a recording has it: how it is stepped, and how its norm moved."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean

from decaylab.diagnosis.reasons import Because, Reason, because
from decaylab.diagnosis.rules import RULES
from decaylab.optim.decay import DECAYS
from decaylab.optim.laws import Kfac, Law, Sgd, Unknown, law_for
from decaylab.optim.laws.dynamics import Series, norms_without_decay
from decaylab.optim.laws.memory import by_step, moments_at
from decaylab.records.settings import VECTORS, LayerSettings

Timeline = tuple[tuple[int, LayerSettings], ...]
"""(from step, how it is stepped), by step."""


def shrink_under(settings: LayerSettings, weight_decay: float) -> float:
    """The fraction of the weights that a decay of this strength removes per step."""
    return law_for(settings).shrink(weight_decay, settings.decay, settings.lr or 0.0)


def decay_rate(settings: LayerSettings) -> float | Because:
    """What a step adds to the decay exposure, or why that is not known."""
    if not settings.decays:
        return 0.0
    if settings.decay not in DECAYS:
        return because(Reason.KIND_UNKNOWN, kind=settings.decay)
    if settings.decay == "l2" and not isinstance(law_for(settings), Sgd):
        return because(Reason.L2_RESCALED)
    if settings.lr is None and settings.decay != "independent":
        return because(Reason.OWN_LR)
    rate = shrink_under(settings, settings.weight_decay)
    if 0 < rate < settings.rounding:
        return because(Reason.ROUNDED_AWAY)
    return because(Reason.TAKES_ALL) if rate >= 1 else rate  # weights that change sign grow


def known_rate(settings: LayerSettings) -> float:
    """`decay_rate`; 0 where it is not known."""
    rate = decay_rate(settings)
    return 0.0 if isinstance(rate, Because) else rate


def ratio(numerator: Series, denominator: Series) -> Series:
    """At the steps that both have."""
    below = dict(denominator)
    return tuple((step, value / below[step]) for step, value in numerator if below.get(step))


@dataclass(frozen=True)
class RecordedLayer:
    """One layer in the records, or several that are scale-invariant together (`members`).

    Attributes:
        settings: how it is stepped. frozen: by step, whether it is not trained from there on.
        norms: above zero. exposure: the decay exposure at the steps of `norms`.
        invariant: whether its size is not part of the function; None if that is not known.
        skipped: why it cannot be judged. clipped: whether its gradients are.
        off_law: whether its steps depart from their law, because of an eps or a floor.
        size_limit: per cent of the outputs per per cent of its size, from which on that counts.
        normalised_net: whether normalisations stand somewhere in the network, so that the size of
            a layer may hardly count though it is not scale-invariant.
    """

    name: str
    settings: Timeline = ()
    norms: Series = ()
    exposure: Series = ()
    series: Mapping[str, Series] = field(default_factory=dict)
    invariant: bool | None = False
    skipped: Because | None = None
    clipped: bool = False
    off_law: bool = False
    members: tuple[str, ...] = ()
    role: str = "weight"
    normalised_net: bool = False
    size_limit: float = RULES.size_little
    frozen: tuple[tuple[int, bool], ...] = ()

    # ------------------------------------------------------------ how it is stepped

    @cached_property
    def law(self) -> Law:
        """How its steps depend on its norm."""
        if not self.settings or self.off_law or self.changed_law or self.own_lr:
            return Unknown()
        law = law_for(self.first)
        return law.clipped() if self.clipped else law

    @cached_property
    def changed_law(self) -> bool:
        """Whether it was stepped by another kind of optimizer for a time."""
        return len({type(law_for(settings)) for _, settings in self.settings}) > 1

    @cached_property
    def own_lr(self) -> bool:
        """Whether its optimizer finds its learning rate itself, at least for a time."""
        return any(settings.lr is None for _, settings in self.settings)

    @cached_property
    def stepping(self) -> Timeline:
        """The settings without what says nothing of its steps; the same of layers stepped alike."""
        timeline: list[tuple[int, LayerSettings]] = []
        for step, settings in self.settings:
            now = replace(settings, size=0, role="weight", invariant=None, together=())
            if not timeline or timeline[-1][1] != now:
                timeline.append((step, now))
        return tuple(timeline)

    @property
    def first(self) -> LayerSettings:
        """The first settings: kind of decay, law and momentum, which do not change in a run."""
        return self.settings[0][1]

    @property
    def preconditioned(self) -> bool:
        """Whether K-FAC steps it, which has a damping; others may step by its law without one."""
        return isinstance(self.law, Kfac) and self.first.damping is not None

    @property
    def natural(self) -> bool:
        """Whether steps go with the norm: K-FAC's of natural length (Eq. 13), torch's Adafactor."""
        return isinstance(self.law, Kfac) and self.law.norm_power == 0

    @cached_property
    def decayed(self) -> bool:
        """Whether it ever has a decay term that rounding does not undo."""
        return any(settings.decays for _, settings in self.settings) and not self.lost

    @cached_property
    def lost(self) -> bool:
        """Whether rounding undoes all of its decay."""
        decaying = [
            settings for _, settings in self.settings if settings.decays and settings.lr != 0
        ]
        return bool(decaying) and all(settings.lost for settings in decaying)

    @cached_property
    def unknown(self) -> Because | None:
        """Why it is not known which fraction of it decay takes per step; None if it is."""
        return next((rate for rate in self._rates if isinstance(rate, Because)), None)

    @cached_property
    def _rates(self) -> list[float | Because]:
        return [decay_rate(settings) for _, settings in self.settings]

    def settings_at(self, step: int) -> LayerSettings:
        """Those that step `step` (from 1) was taken with."""
        return self.settings[self._place(step)][1]

    def frozen_at(self, step: int) -> bool:
        """Whether it was not trained at this step."""
        return next((frozen for start, frozen in reversed(self.frozen) if start <= step), False)

    def rate_at(self, step: int) -> float:
        """What this step adds to the decay exposure; 0 where that is not known."""
        rate = self._rates[self._place(step)]
        return 0.0 if isinstance(rate, Because) else rate

    def _place(self, step: int) -> int:
        return max(bisect_right(self._starts, step) - 1, 0)

    @cached_property
    def _starts(self) -> list[int]:
        return [step for step, _ in self.settings]

    # ------------------------------------------------------------ how it moved

    @cached_property
    def moments(self) -> Series:
        """Adam's |v| (`second_moment`), if it counts and is recorded wherever the norm is."""
        recorded = self.series.get("second_moment", ())
        counts = self.law.adam_betas is not None
        return recorded if counts and by_step(self.norms, recorded) else ()

    @cached_property
    def effective_per_lr(self) -> Series:
        """The effective learning rate over lr (Eq. 9) at the recorded norms; Adam's has memory."""
        return self.law.effective_per_lr(self.norms, self.moments)

    @property
    def effective(self) -> Series:
        """The effective learning rate at the recorded norms."""
        return tuple(
            (step, (self.settings_at(step).lr or 0.0) * value)
            for step, value in self.effective_per_lr
        )

    @property
    def total_exposure(self) -> float | None:
        """The decay exposure at the end; None if it is not known."""
        return self.exposure[-1][1] if self.exposure and not self.unknown else None

    @cached_property
    def mean_rate(self) -> float:
        """What decay takes of it a step, in the mean over steps with decay; 0 where not known."""
        grown = [
            (end - begin, after - before)
            for (begin, before), (end, after) in pairwise(self.exposure)
            if after > before
        ]
        if not grown or self.unknown:
            return 0.0
        return sum(taken for _, taken in grown) / sum(steps for steps, _ in grown)

    @property
    def collapsed(self) -> bool:
        """Whether hardly anything is left of its norm."""
        return self.norms[-1][1] < RULES.collapsed * self.norms[0][1]

    def last(self, quantity: str) -> float | None:
        """The last recorded value."""
        recorded = self.series.get(quantity, ())
        return recorded[-1][1] if recorded else None

    @property
    def is_vector(self) -> bool:
        """Whether it is a gain, or a vector that stands alone: no weight."""
        return self.role in VECTORS

    # ------------------------------------------------------------ whether its size counts

    @property
    def size_response(self) -> float | None:
        """Per cent by which the logits change, in size and direction, per per cent of its size.

        None where they do not depend on it at all: a value head, what stands before a gain of zero.
        """
        if self.members:
            return 0.0  # which is how such layers are found
        size, direction = self.last("size_response"), self.last("direction_response")
        if size is None or (self.invariant is None and not (size or direction)):
            return None
        return 100 * math.hypot(size, direction or 0.0)

    @cached_property
    def size_counts(self) -> bool | None:
        """Whether its size is part of what the network computes; None if that is not known.

        Vectors count as such, also gains before a ReLU, a layer and a normalisation, which are
        scale-invariant together with their shifts: the mechanisms are those of weights. Adapters
        count however little they change the outputs: it is all that they do.
        """
        if self.is_vector or self.role == "adapter":
            return True
        if self.invariant:
            return False
        if self.size_response is not None:
            return self.size_response > self.size_limit
        may_hardly = self.normalised_net and self.role == "weight"
        return None if self.invariant is None or may_hardly else True

    @property
    def why_size_counts(self) -> Because:
        """Why its size is part of the function, or that this is not known."""
        if self.size_counts is None:
            return because(Reason.INVARIANCE_UNKNOWN, layers=[self.name])
        kinds = {"gain": Reason.GAIN, "adapter": Reason.ADAPTER}
        kind = kinds.get(self.role, Reason.SIZE_COUNTS)
        return because(kind, response=self.size_response)

    # ------------------------------------------------------------ had it not decayed

    @cached_property
    def without_decay(self) -> Series:
        """The norms that the same motion of the direction would have given without decay.

        Nothing where the decay per step, or how pushes depend on the norm, is not known: the latter
        of layers whose size counts, which the loss itself holds at some size (a GPT's head grew
        0.8x as fast without decay), and where `pushes_unknown`.
        """
        if self.law.norm_power is None or self.unknown or not self.settings or self.size_counts:
            return ()
        if self.pushes_unknown:
            return ()
        if self.natural and (self.clipped or self.too_few_shares or self.old_factors):
            return ()
        exposures = [value for _, value in self.exposure]
        elasticities = self._elasticities()
        others = norms_without_decay(self.norms, exposures, elasticities)
        if self.invariant and self.law.adam_betas is not None:
            for _ in range(RULES.remembered_rounds):
                factors = self._push_factors(others)
                others = norms_without_decay(self.norms, exposures, elasticities, factors)
        return others

    @cached_property
    def turned_further(self) -> Series:
        """By which factor a step turns it further than `without_decay`; at lr 0 nothing turns."""
        ratios = ratio(self.without_decay, self.norms)
        if self.invariant and ratios:
            ratios = ratio(self.effective_per_lr, self.effective_at(self.without_decay))
        return tuple(item for item in ratios if self.settings_at(item[0]).lr)

    @property
    def pushes_unknown(self) -> bool:
        """Whether steps are as long as gradients are, of a layer that is not scale-invariant.

        Its gradient goes with 1/|W| if its scale does not matter at all (Eq. 8); else with whatever
        else decay changes, such as the sizes of the layers that its branch consists of. Adam and
        its kin give their steps a length of their own, in which no size of a gradient is left.
        """
        return not self.invariant and isinstance(self.law, Sgd)

    def _elasticities(self) -> list[float]:
        """The e of G = c N^e at each record."""
        shares = dict(self.series.get("second_order_share", ()))
        share, elasticities = next(iter(shares.values()), None), []
        for step, _ in self.norms:
            share = shares.get(step, share)
            elasticities.append(self.law.elasticity(share) or 0.0)
        return elasticities

    def _push_factors(self, others: Series) -> list[float]:
        """How much more Adam's steps add to |W|^2 at other norms, for what it remembers of them.

        A step's length is |W| times the effective learning rate, lr N_v / N_m (`laws.memory`).
        """
        pairs = zip(
            self.effective_per_lr, self.effective_at(others), self.norms, others, strict=True
        )
        return [(e[1] * n[1] / (e0[1] * n0[1])) ** 2 for e0, e, n0, n in pairs]

    def effective_at(self, others: Series) -> Series:
        """The effective learning rate over lr, had the norms been `others`."""
        betas = self.law.adam_betas
        moments = moments_at(self.norms, others, betas[1], self.moments) if betas else ()
        return self.law.effective_per_lr(others, moments)

    @property
    def too_few_shares(self) -> bool:
        """Whether the second-order share is not recorded, or too seldom to go by."""
        if not self.natural:
            return False
        steps = {step for step, _ in self.norms}
        steps_with_share = steps & {step for step, _ in self.series.get("second_order_share", ())}
        return len(steps_with_share) < max(1.0, RULES.shares_needed * len(steps))

    @property
    def old_factors(self) -> bool:
        """Whether K-FAC divides by the curvature at norms that decay has changed much since."""
        shares = [share for _, share in self.series.get("second_order_share", ())]
        if not self.natural or not shares:
            return False
        shrink = max(self.rate_at(start) for start in self._starts)  # at the highest lr
        return shrink * self.curvature_age * fmean(shares) > RULES.remembered_too_much

    @property
    def curvature_age(self) -> float:
        """How many steps old the curvature is that K-FAC divides by."""
        first = self.first
        refreshed = (first.refresh_every or 1) / (1 - (first.factor_decay or 0.0))
        return refreshed + (first.invert_every or 1) / 2


def joined(group: Sequence[RecordedLayer]) -> RecordedLayer:
    """Several layers as one: their weights are one vector, with one norm and one rotation."""
    first = group[0]
    steps = set.intersection(*({step for step, _ in layer.norms} for layer in group))

    def combined(series: Sequence[Series]) -> Series:
        value_at = [dict(values) for values in series]
        common = sorted(step for step in steps if all(step in values for values in value_at))
        return tuple((step, math.sqrt(sum(v[step] ** 2 for v in value_at))) for step in common)

    norms = combined([layer.norms for layer in group])
    lengths = combined([layer.series.get("update_norm", ()) for layer in group])
    turned = []
    for layer in group:
        norm_at = dict(layer.norms)
        angles = layer.series.get("rotation", ())
        turned.append(tuple((s, angle * norm_at.get(s, 0.0)) for s, angle in angles))
    common_steps = {step for step, _ in norms}
    other = group[1].name if len(group) == 2 else f"{len(group) - 1} more"
    roles = {layer.role for layer in group}
    return replace(
        first,
        name=f"{first.name} + {other}",
        role=first.role if len(roles) == 1 else "weight",
        norms=norms,
        exposure=tuple(item for item in first.exposure if item[0] in common_steps),
        series={"rotation": ratio(combined(turned), norms), "update_norm": lengths},
        invariant=True,
        members=tuple(layer.name for layer in group),
    )
