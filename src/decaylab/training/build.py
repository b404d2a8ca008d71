"""From a spec to its data, model and optimizer; from a run folder back to a trained model."""

from pathlib import Path

import torch
from torch import nn

from decaylab import networks
from decaylab.curvature.outputs import Curvature
from decaylab.data import Batches, DataSet
from decaylab.data import load as load_data
from decaylab.errors import DecaylabError
from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.kfac import KFAC
from decaylab.optim.kfac_options import KFACOptions
from decaylab.records import RunFolder
from decaylab.training import checkpoint
from decaylab.training.spec import RunSpec

CURVATURES: dict[str, Curvature] = {"kfac-f": "fisher", "kfac-g": "gauss-newton"}


def build_data(spec: RunSpec, data_dir: str | Path | None = None) -> DataSet:
    """Load the data set a spec names; its held-out version where the spec asks for it."""
    return chosen_split(spec, load_data(spec.data, data_dir))


def chosen_split(spec: RunSpec, data: DataSet) -> DataSet:
    """The data set as the spec uses it: whole, or with a tenth of the training images as test."""
    if data.name != spec.data:
        raise DecaylabError(
            f"the spec asks for {spec.data} and was given {data.name}: load that one"
        )
    return data.held_out() if spec.held_out else data


def build_batches(spec: RunSpec, data: DataSet, seed: int | None = None) -> Batches:
    """The training batches of a spec, on the device of the data."""
    return Batches(
        data.train,
        batch_size=spec.batch_size,
        mean=data.mean,
        std=data.std,
        augment=spec.augment,
        seed=spec.seed if seed is None else seed,
    )


def build_model(spec: RunSpec, data: DataSet) -> nn.Module:
    """The freshly initialised model of a spec, on the device of the data, in train mode.

    The weights are drawn on the CPU from the spec's seed, so that every device starts from the same
    ones; torch's global generator is left as it was.
    """
    spec = spec.resolved()
    channels, size = data.train.images.shape[1:3]
    only_mlp = {"hidden": spec.hidden} if spec.hidden is not None else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)  # manual_seed would reseed the GPUs too
        model = networks.build(
            spec.network,
            classes=data.classes,
            in_channels=channels,
            image_size=size,
            batch_norm=spec.batch_norm,
            batch_norm_eps=spec.batch_norm_eps,
            width=spec.width,
            bias=spec.bias,
            activation=spec.activation,
            **only_mlp,
        )
    device = data.train.images.device
    if device.type == "cuda":  # the order that tensor cores want
        return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(device)


def build_optimizer(spec: RunSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a spec: torch's SGD or Adam, or our K-FAC, on the spec's decay groups."""
    spec = spec.resolved()
    groups = parameter_groups(
        model, weight_decay=spec.weight_decay, decay=spec.decay, scope=spec.decay_scope
    )
    own = spec.optimizer_settings()
    if spec.optimizer == "sgd":
        return sgd(groups, **own)
    if spec.optimizer == "adam":
        return adam(groups, **own)
    own["kl_clip"] = own["kl_clip"] or None
    options = KFACOptions(seed=spec.seed, inversion_lag=own.pop("inversion_lag"))
    return KFAC(model, params=groups, curvature=CURVATURES[spec.optimizer], options=options, **own)


def load_run(
    folder: str | Path | RunFolder,
    *,
    data_dir: str | Path | None = None,
    device: str | torch.device = "cpu",
) -> tuple[nn.Module, RunSpec, DataSet]:
    """The model of a run at its last checkpoint, its spec and its data, on `device`."""
    run = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    spec = RunSpec.from_toml(run.spec_text())
    if not run.checkpoint.exists():
        raise DecaylabError(
            f"{run.path} has no checkpoint yet: train it with `decaylab train --config"
            f" {run.path / 'spec.toml'} --runs {run.path.parent}`"
        )
    data = build_data(spec, data_dir).to(device)
    model = build_model(spec, data)
    model.load_state_dict(checkpoint.load(run.checkpoint, device, only="model")["model"])
    return model, spec, data
