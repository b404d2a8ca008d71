"""Records of older versions in today's form: settings that were rows, or that a spec implies."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from decaylab.records.rows import Row, Rows, SettingsChange
from decaylab.records.settings import LayerSettings

PREFIX = "setting_"
# How settings that were floats are read: the place of a kind, the power of a law.
DECAYS = ("none", "l2", "decoupled", "independent")
LAWS = {2: "sgd", 1: "adam", 0: "kfac"}
SAME_NAME = {
    *("lr", "weight_decay", "momentum", "dampening", "beta1", "beta2", "eps", "damping"),
    *("factor_decay", "floor", "rounding"),
}
WHOLE = {"refresh_every", "invert_every", "size"}
OWN_OPTIMIZERS = {
    "sgd": ("SGD", "sgd", None),
    "adam": ("Adam", "adam", None),
    "kfac-f": ("KFAC", "kfac", "fisher"),
    "kfac-g": ("KFAC", "kfac", "gauss-newton"),
}


def settings_from_rows(rows: Rows) -> tuple[Rows, list[SettingsChange]]:
    """Settings from `setting_*` rows of an older `watch`, and the other rows.

    `decayed_gains`, how many gains decayed, becomes one layer of that name with the role "gain".
    """
    now: dict[str, dict[str, float]] = {}
    steps: dict[int, list[Row]] = {}
    others = []
    for row in rows.rows:
        if row.name.startswith(PREFIX) or row.name == "decayed_gains":
            steps.setdefault(row.step, []).append(row)
        else:
            others.append(row)
    changes = []
    for step in sorted(steps):
        touched = {}
        for row in steps[step]:
            if row.name == "decayed_gains":
                decay = ("decoupled", 1.0) if row.value else ("none", 0.0)
                gains = LayerSettings(role="gain", decay=decay[0], weight_decay=decay[1])
                changes.append(SettingsChange(step, "decayed_gains", gains))
                continue
            key, _, layer = row.name.removeprefix(PREFIX).partition("/")
            now.setdefault(layer, {})[key] = row.value
            touched[layer] = True
        changes += [SettingsChange(step, layer, _from_floats(now[layer])) for layer in touched]
    return replace(rows, rows=tuple(others)), changes


def _from_floats(values: Mapping[str, float]) -> LayerSettings:
    same: dict[str, Any] = {key: v for key, v in values.items() if key in SAME_NAME}
    same |= {key: int(v) for key, v in values.items() if key in WHOLE}
    if "scale_free" in values:
        same["scale_free"] = bool(values["scale_free"])
    return LayerSettings(
        law=LAWS[int(values["power"])] if "power" in values else "unknown",
        decay=DECAYS[int(values.get("decay", 0.0))],
        invariant=bool(values["invariant"]) if "invariant" in values else None,
        frozen=bool(values.get("frozen")),
        stepped=values.get("moved") != 0.0,
        **same,
    )


def settings_from_spec(spec: Mapping[str, Any], rows: Rows) -> list[SettingsChange]:
    """How the layers of a run of ours were stepped, which its spec says.

    The layers are those whose norms were recorded, the last one is the head. In networks with batch
    normalisation all others are followed by it.
    """
    layers = [n.partition("/")[2] for n in rows.names() if n.startswith("weight_norm/")]
    if not layers or spec.get("optimizer") not in OWN_OPTIMIZERS:
        return []
    optimizer, law, curvature = OWN_OPTIMIZERS[spec["optimizer"]]
    beta1, beta2 = spec.get("betas") or (None, None)
    kfac = law == "kfac"
    common = LayerSettings(
        optimizer=optimizer,
        law=law,
        momentum=spec.get("momentum"),
        beta1=beta1,
        beta2=beta2,
        eps=spec.get("eps"),
        damping=spec.get("damping"),
        curvature=curvature,
        scale_free=spec.get("damping_scaling") == "scale-free" if kfac else None,
        kl_clip=spec.get("kl_clip") or None,
        factor_decay=spec.get("factor_decay"),
        refresh_every=spec.get("refresh_every"),
        invert_every=spec.get("invert_every"),
    )
    per_epoch = steps_per_epoch(rows) or 1
    changes = []
    for layer in layers:
        head = layer == layers[-1]
        scope = spec.get("decay_scope", "all")
        decayed = spec.get("weight_decay") and (scope == "all" or (scope == "fc") == head)
        normalised = bool(spec.get("batch_norm")) and not head
        layer_settings = replace(
            common,
            decay=spec["decay"] if decayed else "none",
            weight_decay=spec["weight_decay"] if decayed else 0.0,
            role="head" if head else "weight",
            invariant=normalised,
            scale_free=common.scale_free and normalised,
        )
        for epoch in range(0, spec["epochs"], spec["lr_drop_every"]):
            drops = epoch // spec["lr_drop_every"]
            lr = spec["lr"] / spec.get("lr_drop_factor", 10.0) ** drops
            changes.append(
                SettingsChange(epoch * per_epoch + 1, layer, replace(layer_settings, lr=lr))
            )
    return changes


def steps_per_epoch(rows: Rows) -> int | None:
    """Steps in an epoch, from the rows of complete ones; None if there are none."""
    return next((row.step // row.epoch for row in reversed(rows.rows) if row.epoch), None)
