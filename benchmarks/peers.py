"""Public K-FACs as a training step each, for comparison: their code is theirs, a few lines ours.

All at the recipe's intervals (factors every 10 steps, inverses every 100), on the loop of a
tutorial: a ready batch, no autocast, TF32. One that is not installed is left out.
"""

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

REFRESH_EVERY, INVERT_EVERY = 10, 100
LR, DAMPING = 1e-3, 1e-2
Step = Callable[[], None]


def asdl(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """`asdl`: Fisher by one sample."""
    from asdl.precondition import KfacGradientMaker, PreconditioningConfig

    config = PreconditioningConfig(
        data_size=len(labels),
        damping=DAMPING,
        ema_decay=0.05,
        curvature_upd_interval=REFRESH_EVERY,
        preconditioner_upd_interval=INVERT_EVERY,
        ignore_modules=[nn.BatchNorm2d],  # ours have no parameters
    )
    maker = KfacGradientMaker(model, config, fisher_type="fisher_mc")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        output = maker.setup_model_call(model, images)
        maker.setup_loss_call(F.cross_entropy, output, labels)
        maker.forward_and_backward()
        optimizer.step()

    return step


def kfac_pytorch(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """`kfac-pytorch`: empirical Fisher, eigendecompositions."""
    from kfac.preconditioner import KFACPreconditioner

    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-3)
    preconditioner = KFACPreconditioner(
        model,
        factor_update_steps=REFRESH_EVERY,
        inv_update_steps=INVERT_EVERY,
        damping=DAMPING,
        lr=LR,
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        preconditioner.step()
        optimizer.step()

    return step


def singd(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """`singd`, dense: empirical Fisher, no inverses; its refresh is what costs."""
    from singd.optim.optimizer import SINGD

    optimizer = SINGD(
        model, lr=LR, momentum=0.9, damping=DAMPING, weight_decay=1e-3, T=REFRESH_EVERY
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def curvlinops(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """`curvlinops`' K-FAC operator as an optimizer: Fisher by one sample, no running average."""
    from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=1e-3)
    loss = nn.CrossEntropyLoss()
    state = {"steps": 0, "inverse": None}

    def step() -> None:
        optimizer.zero_grad()
        if state["steps"] % REFRESH_EVERY == 0:
            curvature = KFACLinearOperator(
                model,
                loss,
                parameters,
                [(images, labels)],
                fisher_type="mc",
                check_deterministic=False,
                separate_weight_and_bias=False,
            )
            curvature.compute_kronecker_factors()
            if state["steps"] % INVERT_EVERY == 0:
                state["inverse"] = KFACInverseLinearOperator(
                    curvature, damping=DAMPING, use_heuristic_damping=True
                )
        loss(model(images), labels).backward()
        with torch.no_grad():
            directions = state["inverse"] @ [p.grad for p in parameters]
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.grad.copy_(direction)
        optimizer.step()
        state["steps"] += 1

    return step


PEERS: dict[str, tuple[str, Callable[[nn.Module, Tensor, Tensor], Step]]] = {
    "asdl": ("asdl", asdl),
    "kfac-pytorch": ("kfac", kfac_pytorch),
    "singd": ("singd", singd),
    "curvlinops": ("curvlinops", curvlinops),
}
"""Name -> (the module that must be there, its step)."""


def installed(name: str) -> bool:
    """Whether a peer can be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_spec(PEERS[name][0]) is not None
