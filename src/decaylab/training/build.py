"""From a spec to its data, model and optimizer; from a run folder back to a trained model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decaylab import networks
from decaylab.curvature.capture import innermost
from decaylab.curvature.outputs import Curvature
from decaylab.data import Batches, DataSet
from decaylab.data import load as load_data
from decaylab.errors import Lacks, Mismatch, NameTaken, check_name
from decaylab.optim.decay import OPTIMIZERS, LawName, parameter_groups
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.kfac import KFAC
from decaylab.optim.options import KFACOptions
from decaylab.records import RunFolder
from decaylab.training import checkpoint
from decaylab.training.spec import PUBLISHED, RunSpec

CURVATURES: dict[str, Curvature] = {"kfac-f": "fisher", "kfac-g": "gauss-newton"}
Groups = list[dict[str, Any]]
OptimizerBuilder = Callable[[RunSpec, nn.Module, Groups], torch.optim.Optimizer]


def build_data(spec: RunSpec, data_dir: str | Path | None = None) -> DataSet:
    """Load the data set a spec names; its held-out version where the spec asks for it."""
    return chosen_split(spec, load_data(spec.data, data_dir))


def chosen_split(spec: RunSpec, data: DataSet) -> DataSet:
    """The data set as the spec uses it: whole, or with a tenth of the training images as test."""
    if data.name != spec.data:
        raise Mismatch("data", {"the spec": spec.data, "what was loaded": data.name}, "load that")
    return data.held_out() if spec.held_out else data


def build_batches(
    spec: RunSpec, data: DataSet, seed: int | None = None, share: tuple[int, int] = (0, 1)
) -> Batches:
    """The training batches of a spec, on the device of the data; `share` as in `Batches`."""
    return Batches(
        data.train,
        batch_size=spec.batch_size,
        mean=data.mean,
        std=data.std,
        augment=spec.augment,
        seed=spec.seed if seed is None else seed,
        keep_last=spec.keep_last_batch,
        share=share,
    )


def build_network(spec: RunSpec, classes: int, channels: int, size: int) -> nn.Module:
    """The network of a spec, for images with this many channels and pixels per side.

    The weights are drawn on the CPU from the spec's seed, so that every device starts from the same
    ones; torch's global generator is left as it was.
    """
    spec = spec.resolved()
    only_mlp = {"hidden": spec.hidden} if spec.hidden is not None else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)  # manual_seed would reseed the GPUs too
        return networks.build(
            spec.network,
            classes=classes,
            in_channels=channels,
            image_size=size,
            batch_norm=spec.batch_norm,
            batch_norm_eps=spec.batch_norm_eps,
            width=spec.width,
            bias=spec.bias,
            activation=spec.activation,
            **only_mlp,
        )


def build_model(spec: RunSpec, data: DataSet) -> nn.Module:
    """The freshly initialised model of a spec, on the device of the data, in train mode."""
    model = build_network(spec, data.classes, *data.train.images.shape[1:3])
    device = data.train.images.device
    if device.type == "cuda":  # the order that tensor cores want
        return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(device)


# Networks and batch sizes that a process may compile: after eight, torch would leave all others be.
COMPILED_KINDS = 64


def compile_network(model: nn.Module) -> Any:
    """`torch.compile`, each batch size for itself.

    Left alone, torch compiles every network that comes after a second batch size for any size, and
    after eight of them none.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILED_KINDS)
    return torch.compile(model, dynamic=False)


def _sgd(spec: RunSpec, model: nn.Module, groups: Groups) -> torch.optim.Optimizer:
    return sgd(groups, **spec.optimizer_settings())


def _adam(spec: RunSpec, model: nn.Module, groups: Groups) -> torch.optim.Optimizer:
    return adam(groups, **spec.optimizer_settings())


def _kfac(
    spec: RunSpec, model: nn.Module, groups: Groups, process_group: Any = None
) -> torch.optim.Optimizer:
    settings = spec.optimizer_settings()
    settings["kl_clip"] = settings["kl_clip"] or None
    settings["step_scaling"] = spec.step_scaling if spec.step_rms else "none"
    if spec.step_rms:
        settings["step_rms"] = spec.step_rms
    if spec.late_refresh:  # `Steps` refreshes and inverts
        settings |= {"refresh_every": NEVER, "invert_every": NEVER}
    options = KFACOptions(
        seed=spec.seed,
        inversion_lag=settings.pop("inversion_lag"),
        process_group=process_group,
        equal_shares=True,
    )
    return KFAC(
        model, params=groups, curvature=CURVATURES[spec.optimizer], options=options, **settings
    )


NEVER = 10**9  # steps: K-FAC refreshes and inverts at its first step alone
BUILDERS: dict[str, OptimizerBuilder] = {
    "sgd": _sgd,
    "adam": _adam,
    **dict.fromkeys(CURVATURES, _kfac),
}
CAPTURED = tuple(BUILDERS)
"""The optimizers whose steps can be part of a CUDA graph."""


def register_optimizer(
    name: str, build: OptimizerBuilder, *, law: LawName, settings: Mapping[str, Any]
) -> None:
    """Make `name` an optimizer that run specs and the command line know.

    Args:
        name: its name in specs.
        build: called with the resolved spec, the model and its param groups (`parameter_groups`:
            each has `weight_decay` and `decay`); returns the optimizer. Checkpoints hold its
            `state_dict`: tensors, numbers and strings.
        law: which law its effective learning rate follows (`probes.effective_learning_rate`):
            "sgd", "adam" (scaling the gradient changes nothing) or "kfac".
        settings: defaults for the fields of `RunSpec` that it uses: at least lr, epochs and
            lr_drop_every; only fields that a built-in optimizer has (`PUBLISHED`).

    Its steps run eagerly, on CUDA too, not as graphs. Call this wherever its runs are trained or
    read.
    """
    if name in OPTIMIZERS:
        raise NameTaken("optimizer", name)
    check_name("law", law, sorted(set(OPTIMIZERS.values())))
    known = list(dict.fromkeys(key for published in PUBLISHED.values() for key in published))
    for key in settings:
        check_name("setting", key, known)
    for key in ("lr", "epochs", "lr_drop_every"):
        if key not in settings:
            raise Lacks(f"optimizer {name!r}", f"setting {key!r}", "give a default of it")
    OPTIMIZERS[name], PUBLISHED[name], BUILDERS[name] = law, dict(settings), build


def build_optimizer(
    spec: RunSpec, model: nn.Module, process_group: Any = None
) -> torch.optim.Optimizer:
    """The optimizer of a spec: torch's SGD or Adam, or our K-FAC, on the spec's decay groups.

    `process_group`: of processes with equal parts of every batch, whose gradients are averaged.
    """
    spec = spec.resolved()
    groups = decay_groups(spec, innermost(model))
    if spec.optimizer in CURVATURES:
        return _kfac(spec, model, groups, process_group)
    return BUILDERS[spec.optimizer](spec, model, groups)


def decay_groups(spec: RunSpec, model: nn.Module) -> Groups:
    """The model's parameters as the spec has them decay: see `parameter_groups`."""
    return parameter_groups(
        model, weight_decay=spec.weight_decay, decay=spec.decay, scope=spec.decay_scope
    )


def load_run(
    folder: str | Path | RunFolder,
    *,
    data_dir: str | Path | None = None,
    device: str | torch.device = "cpu",
) -> tuple[nn.Module, RunSpec, DataSet]:
    """The model of a run at its last checkpoint, its spec and its data, on `device`."""
    run = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    spec = RunSpec.of_run(run)
    if not run.checkpoint.exists():
        raise Lacks(run.path, "checkpoint", _remedy(run))
    data = build_data(spec, data_dir).to(device)
    model = build_model(spec, data)
    state = checkpoint.load(run.checkpoint, device, only="model")
    with checkpoint.fitting(run.checkpoint):
        model.load_state_dict(state["model"])
    return model, spec, data


def _remedy(run: RunFolder) -> str:
    manifest, spec = run.manifest(), run.path / "spec.toml"
    status = manifest.status if manifest else None
    if status == "diverged":
        return "it diverged; give another run"
    if status == "finished":
        again = f"`decaylab train --config {spec} --runs ANOTHER_FOLDER` trains it again"
        return f"it was not kept; {again} (`reproduce --keep-checkpoints` keeps it)"
    return f"train it with `decaylab train --config {spec} --runs {run.path.parent}`"
