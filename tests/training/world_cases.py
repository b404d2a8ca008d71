"""Runs trained by two processes, each beside the same run by one: `world_cases.py CASE ...`.

In double precision. Prints "CASE ok", or what differs, for each.
"""

import os
import sys
import traceback
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from decaylab.data import load
from decaylab.training import Execution, RunSpec, train_to_end
from decaylab.training.world import joined, leave

TOLERANCE = 1e-9
IN_SINGLE_PRECISION = {".values.test/loss": 1e-6, ".values.train/loss": 1e-6}  # evaluation's sums
MLP = RunSpec(data="digits", network="mlp", hidden=(12,), epochs=1, batch_size=240)
VGG = replace(MLP, network="vgg11", hidden=None, width=0.0625, augment=True)
CURVATURE = {"refresh_every": 2, "invert_every": 4, "initialize_batches": 2}
DECAYED = {"decay": "decoupled", "weight_decay": 0.1}
CASES = {
    "mlp_sgd": replace(MLP, optimizer="sgd", **DECAYED),
    "mlp_adam_batch_norm": replace(MLP, optimizer="adam", batch_norm=True, **DECAYED),
    "mlp_kfac_f": replace(MLP, optimizer="kfac-f", **CURVATURE, **DECAYED),
    "mlp_kfac_g_batch_norm": replace(
        MLP, optimizer="kfac-g", batch_norm=True, inversion_lag=2, **CURVATURE, **DECAYED
    ),
    "vgg_sgd_batch_norm": replace(VGG, optimizer="sgd", batch_norm=True),
    "vgg_adam": replace(VGG, optimizer="adam", **DECAYED),
    "vgg_kfac_g": replace(VGG, optimizer="kfac-g", damping=0.1, **CURVATURE),
    "vgg_kfac_g_batch_norm": replace(VGG, optimizer="kfac-g", batch_norm=True, **CURVATURE),
}


def tensors(state, path=""):
    """The numbers of a nested state, by their place in it."""
    if isinstance(state, Tensor):
        return {path: state.double()}
    if isinstance(state, (int, float)):
        return {path: torch.tensor(float(state), dtype=torch.float64)}
    if isinstance(state, str) or state is None:
        return {}
    entries = state.items() if isinstance(state, dict) else enumerate(state)
    return {k: v for key, part in entries for k, v in tensors(part, f"{path}.{key}").items()}


def differences(found, expected):
    """Of the largest entry of each tensor, or of one."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {
        key: float((found[key] - value).abs().max() / value.abs().max().clamp(min=1))
        for key, value in expected.items()
        if value.numel()
    }


def compared(spec, data, world):
    together = train_to_end(spec, data=data, execution=Execution(world=world))
    if not world.first:
        return {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="there are several processes")
        alone = train_to_end(spec, data=data)
    return differences(*(tensors(everything(progress)) for progress in (together, alone)))


def everything(progress):
    return {
        "model": progress.model.state_dict(),
        "optimizer": progress.optimizer.state_dict(),
        "values": {n: value for n, value in progress.values.items() if "seconds" not in n},
    }


def tell(line):
    """In one write: `print` may take several, and the other process writes between them."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main(*chosen):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    data = load("digits")
    with joined(torch.device("cpu")) as world:
        for name in chosen or CASES:
            try:
                off = compared(CASES[name], data, world)
                limits = {key: IN_SINGLE_PRECISION.get(key, TOLERANCE) for key in off}
                wrong = {key: value for key, value in off.items() if not value <= limits[key]}
                tell(f"{name} {wrong or 'ok'}")
            except BaseException:
                tell(f"{name} failed {traceback.format_exc()}")
                leave(1)
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
