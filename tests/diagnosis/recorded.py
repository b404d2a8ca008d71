"""Records as `watch` writes them, by hand: a norm that grows by pushes and shrinks by decay."""

from dataclasses import dataclass, field

from decaylab.diagnosis import Because
from decaylab.optim.decay import DECAYS
from decaylab.records import Row, Rows

ELASTICITY = {2: -1.0, 1: 0.0, 0: 1.0}


@dataclass
class ScriptedLayer:
    """|W|^2 = N follows N' = N (1 - s)^2 + growth N^e from `start`^2; s = lr wd (decoupled)."""

    invariant: bool = True
    weight_decay: float = 0.0
    decay: str = "decoupled"
    power: int | None = 2
    lr: float = 0.1
    start: float = 1.0
    growth: float = 0.0
    e: float | None = None
    damping: float | None = None
    scale_free: bool = False
    share: float | None = None
    settings: dict = field(default_factory=dict)

    def norms(self, steps):
        e = ELASTICITY.get(self.power, 0.0) if self.e is None else self.e
        n, found = self.start**2, []
        for _ in range(steps):
            n = n * (1 - self.lr * self.weight_decay) ** 2 + self.growth * n**e
            found.append(n**0.5)
        return found


def records(layers, totals=None, steps=1000, every=50):
    """`totals`: name -> value, the same at every record."""
    rows = []
    at = [1, *range(every, steps + 1, every)]
    for name, layer in layers.items():
        norms = layer.norms(steps)
        decays = layer.weight_decay > 0
        first = {
            "setting_lr": layer.lr,
            "setting_decay": float(DECAYS.index(layer.decay if decays else "none")),
            "setting_weight_decay": layer.weight_decay,
            "setting_momentum": 0.0,
            "setting_invariant": float(layer.invariant),
            "setting_power": layer.power,
            "setting_damping": layer.damping,
            "setting_scale_free": float(layer.scale_free) if layer.damping else None,
            **layer.settings,
        }
        rows += [Row(1, 0, 0.0, f"{k}/{name}", v) for k, v in first.items() if v is not None]
        for step in at:
            norm = norms[step - 1]
            values = {"weight_norm": norm, "decay_exposure": step * layer.lr * layer.weight_decay}
            if layer.share is not None:
                # the odds of being second-order go with 1/|W|^2
                odds = layer.share / (1 - layer.share) / norm**2
                values["second_order_share"] = odds / (1 + odds)
                values["effective_damping"] = (layer.damping or 0.0) * norm**2
            rows += [Row(step, 0, 0.0, f"{k}/{name}", v) for k, v in values.items()]
    rows += [Row(step, 0, 0.0, k, v) for step in at for k, v in (totals or {}).items()]
    return Rows(tuple(rows))


def reasons(*items):
    """Every `Reason` in findings, rows, reasons and lists of these, nested ones included."""
    found = set()
    for item in items:
        if isinstance(item, Because):
            found |= {item.reason} | reasons(*item.data.get("why", ()))
        elif isinstance(item, list | tuple):
            found |= reasons(*item)
        elif item is not None:
            parts = ("reasons", "remedies", "notes", "why", "follows", "troubles")
            found |= reasons(*(getattr(item, part, None) for part in parts))
    return found


def only(items, reason):
    """The one `Because` of this reason."""
    (found,) = [item for item in items if item.reason is reason]
    return found
