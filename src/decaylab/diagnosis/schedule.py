"""The learning-rate schedule that does without decay what a decayed run did with it."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from torch import nn

from decaylab.diagnosis.layers import RecordedLayer, known_rate
from decaylab.diagnosis.reasons import Reason
from decaylab.diagnosis.runs import read_run
from decaylab.diagnosis.words.reasons import sentence
from decaylab.errors import BadValue, Damaged, DecaylabError, Lacks, check_name
from decaylab.networks import roles
from decaylab.optim.laws import Adam, Kfac, ScheduleFree, Sgd
from decaylab.optim.laws.memory import gradient_squares, interpolated
from decaylab.records.files import replace_text
from decaylab.records.settings import LayerSettings
from decaylab.records.sources import Source


@dataclass(frozen=True)
class EquivalentSchedule:
    """Learning rates by step for the scale-invariant `layers`, and for all else, without decay.

    `lr[t]` and `others[t]` are for step t + 1; `damping[t]` (K-FAC) is the lambda of that step.

        groups = schedule.groups(model)               # the layers, then the rest
        optimizer = torch.optim.SGD(groups, lr=schedule.others[0], momentum=0.9)
        scheduler = LambdaLR(optimizer, schedule.lambdas())    # scheduler.step() after each step
    """

    layers: tuple[str, ...]
    lr: tuple[float, ...]
    others: tuple[float, ...]
    damping: tuple[float, ...] = ()

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The parameters of `layers`, with weight decay 0, and the others as they come."""
        parameter_roles = roles(model)
        known = {role.layer for role in parameter_roles.values()}
        for name in self.layers:
            check_name("layer of the model", name, known)
        scheduled: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            # the gain of a normalised weight is a norm that counts
            role = parameter_roles[name]
            in_schedule = role.layer in self.layers and role.role != "norm"
            (scheduled if in_schedule else rest).append(parameter)
        return [{"params": scheduled, "weight_decay": 0.0}, *([{"params": rest}] if rest else [])]

    def lambdas(self) -> list[Callable[[int], float]]:
        """For torch's `LambdaLR` on `groups`: factors on the first learning rate, by step from 0.

        Past the last step the last factor holds.
        """
        base, last = self.others[0], len(self.lr) - 1
        if not base:
            raise DecaylabError(
                "the schedule starts at a learning rate of 0, which no factor can scale: set `lr`"
                " and `others` of each step in the two groups yourself"
            )
        return [
            lambda step: self.lr[min(step, last)] / base,
            lambda step: self.others[min(step, last)] / base,
        ]

    def rows(self) -> Iterator[dict[str, float]]:
        """One row a step."""
        for i, (lr, others) in enumerate(zip(self.lr, self.others, strict=True)):
            row = {"step": i + 1, "lr": lr, "lr_others": others}
            yield row | ({"damping": self.damping[i]} if self.damping else {})

    def to_csv(self) -> str:
        """Columns step, lr, lr_others and, for K-FAC, damping; the layers as a comment above."""
        text = io.StringIO()
        text.write(f"# layers: {json.dumps(list(self.layers))}\n")
        header = ["step", "lr", "lr_others", *(["damping"] if self.damping else [])]
        writer = csv.DictWriter(text, header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return text.getvalue()

    def to_toml(self) -> str:
        """The fields as TOML arrays."""
        values = {"layers": self.layers, "lr": self.lr, "lr_others": self.others}
        values |= {"damping": self.damping} if self.damping else {}
        return "".join(f"{key} = {json.dumps(list(value))}\n" for key, value in values.items())

    def save(self, path: str | Path) -> None:
        """Write it as .csv or .toml."""
        forms = {".csv": self.to_csv, ".toml": self.to_toml}
        path = Path(path)
        if path.suffix not in forms:
            raise BadValue("the file of a schedule", path.name, "a .csv or .toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, forms[path.suffix]())

    @classmethod
    def from_csv(cls, path: str | Path) -> "EquivalentSchedule":
        """What `save` wrote."""
        try:
            first, *lines = Path(path).read_text(encoding="utf-8").splitlines()
            layers = json.loads(first.removeprefix("# layers: "))
            rows = list(csv.DictReader(lines))
            columns = {k: tuple(float(row[k]) for row in rows) for k in rows[0]}
            return cls(
                tuple(layers), columns["lr"], columns["lr_others"], columns.get("damping", ())
            )
        except (OSError, ValueError, KeyError, IndexError) as error:
            remedy = "give one that `decaylab advise schedule` wrote as CSV"
            raise Damaged(path, error, remedy) from error


def equivalent_schedule(run: Source) -> EquivalentSchedule:
    """The schedule without decay under which scale-invariant layers turn as in a decayed run.

    Let r_t be what decay alone leaves of the weights before step t: r_1 = 1, r_{t+1} = r_t (1 -
    s_t), s the shrink per step (L2: with the momentum, from rest). W' = W / r does not decay, and
    has the same direction as W if

    - SGD: lr'_t = lr_t / (r_t r_{t+1}), since grad L(W) = grad L(W') / r. Exact for L2 (inside the
      momentum, any lr) and without momentum; close for L2 in Nesterov's. For decay beside a
      momentum m the buffer's gradients have seen other r: r_t becomes their mean with the weights
      m^k, or Nesterov's 1 + m, m^2, m^3, ...
    - Adam: lr'_t = lr_t / r_{t+1}, times sqrt(b) / a for what its averages remember: a is the
      mean of r with weights beta1^k, b that of r^2 with beta2^k |g|^2. The second matters: with s =
      3e-4 and beta2 = 0.999 it is a factor of 1.6. |g|^2 is read off the probe `second_moment`, a
      number a layer (where it is not recorded, |g| is taken to be constant), and b is the geometric
      mean over layers.
    - K-FAC: lr'_t = lr_t b / (r_t r_{t+1}) and the damping lambda b (Eq. 14), where b is the mean
      of r^2 over what the factors remember, as of the last inversion: r_t^2, and lr hardly changed,
      if every step refreshes and inverts them. Exact if the curvature at W/|W|, which has |W|^2
      times that at W, keeps its size in that time: nearly so for Gauss-Newton, not for the Fisher
      matrix, which vanishes as the data is fitted (docs/diagnosis.md has the numbers). With
      steps of a set length (`step_scaling="rms"`): lr'_t = lr_t / r_{t+1}. If they are made from
      a momentum of gradients ("spectral"), as in Muon, times r_t over the mean of r with the
      momentum's weights, as above.

    It is for these layers only: the others keep lr, and their decay, which acts on the function.
    Needs a decay of one strength on them, and no L2 inside Adam or K-FAC. Where `watch` recorded
    the run, a change of lr is known to within `every` steps.
    """
    read = read_run(run, "the watched run")
    layers = [layer for layer in read.decayed_layers if layer.invariant]
    if not layers:
        what = "scale-invariant layer that decays and is recorded"
        raise Lacks(read.name, what, "there is nothing for a schedule to replace")
    first = layers[0]
    if first.clipped and first.law.norm_power is None:
        raise DecaylabError(
            "the gradients are clipped, and how such steps depend on the norm is not known: train"
            " without clipping"
        )
    if (unknown := first.unknown) is not None:
        rounded = unknown.reason is Reason.ROUNDED_AWAY
        kind = "32-bit weights" if rounded else "a fixed fraction"
        raise DecaylabError(
            f"{sentence(unknown)}: a step removes no fixed fraction of the weights, so no schedule"
            f" can replace it; for decoupled decay of {kind}, one can"
        )
    if first.law.norm_power is None:
        raise DecaylabError(
            "the law of this optimizer is not known: use SGD, K-FAC or Adam without amsgrad"
        )
    if isinstance(first.law, ScheduleFree):
        raise DecaylabError(
            "schedule-free decay acts on an iterate whose average is the weights, and reaches them"
            " over all later steps: no schedule can replace it"
        )
    if any(layer.stepping != first.stepping for layer in layers):
        raise DecaylabError(
            "the scale-invariant layers are stepped differently: a schedule needs one lr and one"
            " weight decay"
        )
    per_step = list(_by_step(first, read.steps))
    remaining = _remaining(first, per_step)
    means = [1.0] * len(per_step)
    if not isinstance(first.law, Sgd):
        squares = [_remembered(layer, per_step, remaining) for layer in layers]
        means = [geometric_mean(values) for values in zip(*squares, strict=True)]
    lr, damping = zip(*_equivalent(first, per_step, remaining, means), strict=True)
    return EquivalentSchedule(
        tuple(name for layer in layers for name in layer.members or (layer.name,)),
        tuple(lr),
        tuple(settings.lr or 0.0 for settings in per_step),
        tuple(damping) if first.first.damping is not None else (),
    )


def _by_step(layer: RecordedLayer, steps: int) -> Iterator[LayerSettings]:
    changes = dict(layer.stepping)
    now = layer.first
    for step in range(1, steps + 1):
        now = changes.get(step, now)
        yield now


def _memory(settings: LayerSettings) -> float:
    """Momentum, or beta1."""
    return settings.momentum if settings.momentum is not None else settings.beta1 or 0.0


def _remaining(layer: RecordedLayer, timeline: list[LayerSettings]) -> list[float]:
    """The r of `equivalent_schedule` before each step, and after the last."""
    r, velocity = [1.0], 0.0
    for step, settings in enumerate(timeline):
        if settings.decay == "l2":  # what decay alone does to a weight of one, from rest
            # torch does not dampen the first step
            intake = 1 - (settings.dampening or 0.0) if step else 1.0
            velocity = _memory(settings) * velocity + intake * settings.weight_decay * r[-1]
            after = r[-1] - (settings.lr or 0.0) * velocity
        else:
            after = r[-1] * (1 - known_rate(settings))
        if after <= 0:
            raise DecaylabError(
                "decay removes the whole weight in a few steps: no schedule can do that"
            )
        r.append(after)
    return r


def _remembered(
    layer: RecordedLayer, timeline: list[LayerSettings], remaining: list[float]
) -> Iterator[float]:
    """The b of each step: the mean of r^2 over what Adam's v or K-FAC's factors remember."""
    law = layer.law
    beta2 = (law.beta2 or 0.0) if isinstance(law, Adam) else 0.0
    kfac = isinstance(law, Kfac)
    sizes = gradient_squares(layer.series.get("second_moment", ()), beta2)
    total = weight = b = 0.0
    for step, (settings, r) in enumerate(zip(timeline, remaining, strict=False)):
        if not kfac:
            keep, size = beta2, sizes(step + 1)
        else:
            keep, size = settings.factor_decay or 0.0, interpolated(layer.norms, step) ** -2
            size /= 1 if step else 1 - keep  # the first refresh is the whole, not a part
        if not kfac or step % (settings.refresh_every or 1) == 0:
            total, weight = keep * total + size * r**2, keep * weight + size
        if not kfac or step % (settings.invert_every or 1) == 0:
            b = total / weight
        yield b


def _equivalent(
    layer: RecordedLayer, timeline: list[LayerSettings], remaining: list[float], means: list[float]
) -> Iterator[tuple[float, float]]:
    """(lr', damping') of each step, as `equivalent_schedule` says; `means`: its b."""
    power = layer.law.norm_power
    total = weight = 0.0  # what the momentum sees of r
    for step, (settings, b) in enumerate(zip(timeline, means, strict=True)):
        r, after = remaining[step : step + 2]
        push, root = r, math.sqrt(b) if power == 1 else 1.0
        if power == 0:
            push = r / b
        elif settings.step_rms is not None:  # a step of a set length, of gradients as of now
            push = root = r if settings.momentum_first else 1.0
        memory = _memory(settings)
        total, weight = memory * total + push, memory * weight + 1
        if settings.decay == "l2":
            mean = push
        elif settings.nesterov:  # the newest gradient once more, beside the buffer
            mean = (push + memory * total) / (1 + memory * weight)
        else:
            mean = total / weight
        # a scale-free damping follows the norms by itself
        damping = (settings.damping or 0.0) * (1.0 if settings.scale_free else b)
        yield (settings.lr or 0.0) * root / (after * mean), damping
