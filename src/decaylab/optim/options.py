"""K-FAC's rare options, its defaults, and the optimizer of all other parameters."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decaylab.curvature.estimator import CountedRows
from decaylab.errors import check_name


@dataclass(frozen=True)
class KFACOptions:
    """K-FAC options that are rarely changed.

    Attributes:
        exclude: layers as `named_modules` names them, or blocks as `coverage` does, to leave to the
            first-order method.
        invariant: the scale-invariant layers for `damping_scaling="scale-free"`; None finds those
            followed by a normalisation, in module order. That can be wrong for a layer before a
            residual sum (you are warned): then name the layers, which `roles(model, inputs)`
            measures.
        inversion_lag: an inversion begun at step k is used from step k + lag on; meanwhile, on
            CUDA, it runs on a second stream alongside training. 0 inverts and uses it at once.
        counted_rows: called with the model's keyword arguments and its logits [..., C], returns the
            mask of the rows that count, or None for all; for padded rows, as `observe` takes them.
        seed: seeds the optimizer's own generator; None takes torch's initial seed.
        process_group: the ranks whose rows make up one batch; None takes it from a
            DistributedDataParallel. Needed if KFAC is given the module inside one.
        equal_shares: with several ranks, says that each has an equal part of one batch, in rank
            order. Sampled outputs then equal those of one process with the whole batch.
        replay: on CUDA, replay what `step` does with gathered gradients, and with the factors at a
            refresh and an inversion, as graphs; False launches the kernels one by one, as for
            models with more than 1 GiB of gradients.
        half_inverses: store inverses with sides longer than 640 in float16, with one power-of-two
            scale per matrix: as precise as a TF32 product reads them, in half the memory. None does
            so on CUDA if they would need more than 1 GiB and torch allows TF32 products when KFAC
            is built (`torch.set_float32_matmul_precision("high")`).
        momentum_first: precondition the momentum of the gradients, instead of taking the momentum
            of preconditioned steps. `step_scaling="spectral"` does so in any case.
        others_betas: Adam's coefficients for parameters outside the blocks.
        others_eps: Adam's epsilon for them.
    """

    exclude: tuple[str, ...] = ()
    invariant: tuple[str, ...] | None = None
    inversion_lag: int = 0
    counted_rows: CountedRows | None = None
    seed: int | None = None
    process_group: Any = None
    equal_shares: bool = False
    replay: bool = True
    half_inverses: bool | None = None
    momentum_first: bool = False
    others_betas: tuple[float, float] = (0.9, 0.999)
    others_eps: float = 1e-8


def first_order(
    method: str, lr: float | Tensor, momentum: float, options: KFACOptions, *, cuda: bool
) -> torch.optim.Optimizer:
    """Torch's fused Adam or SGD; each step lends it param groups and state."""
    placeholder = [torch.zeros(())]
    if method == "adam":
        betas, eps = options.others_betas, options.others_eps
        return torch.optim.Adam(
            placeholder, lr=lr, betas=betas, eps=eps, fused=True, capturable=cuda
        )
    check_name("others", method, ("adam", "sgd"))
    return torch.optim.SGD(placeholder, lr=lr, momentum=momentum, fused=True)


STEP_SCALINGS = ("none", "rms", "spectral")
DAMPING_SCALINGS = ("fixed", "scale-free", "trace")
# Where nothing is given: lambda; relative to a block's mean eigenvalue, by kind of steps.
DAMPING = 1e-3
RELATIVE_DAMPINGS = {"none": 1.0, "rms": 1.0, "spectral": 0.1}
# A spectral step is spread over all directions, so that little of its length goes where the loss
# falls: it needs a larger learning rate (docs/kfac.md).
LEARNING_RATES = {"none": 1e-3, "rms": 1e-3, "spectral": 1e-2}


def chosen_steps(
    kl_clip: float | None,
    step_scaling: str | None,
    damping: float | None,
    damping_scaling: str | None,
) -> tuple[str, float, str]:
    """Step scaling, damping and its scaling, with defaults filled in.

    Without a KL clip, steps have a set size, which trains nets of all kinds at one learning rate.
    Damping is then relative to the trace, unless one is given (docs/kfac.md).
    """
    step_scaling = step_scaling or ("rms" if kl_clip is None else "none")
    check_name("step_scaling", step_scaling, STEP_SCALINGS)
    if damping_scaling is None:
        relative = step_scaling != "none" and damping is None
        damping_scaling = "trace" if relative else "fixed"
    check_name("damping_scaling", damping_scaling, DAMPING_SCALINGS)
    if damping is None:
        damping = RELATIVE_DAMPINGS[step_scaling] if damping_scaling == "trace" else DAMPING
    return step_scaling, damping, damping_scaling
