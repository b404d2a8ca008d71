"""The paper's quantities by plain loops over rows, classes and weights: slow, and checked by eye.

Each function takes the model in the mode in which it is to be measured and does not change it.
"""

import torch
from torch import Tensor, nn


def in_mode(model: nn.Module, batch_norm: str) -> nn.Module:
    """The oracle's own way to set the mode; statistics are not updated while it runs."""
    model.train(batch_norm == "train")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    return model


def parameter_jacobian(model: nn.Module, inputs: Tensor) -> Tensor:
    """J[row, class, weight]: derivative of each logit with regard to each weight, all in a row."""
    logits = model(inputs)
    J = []
    for row in logits.flatten(0, -2):
        of_row = []
        for logit in row:
            gradients = torch.autograd.grad(logit, list(model.parameters()), retain_graph=True)
            of_row.append(torch.cat([g.flatten() for g in gradients]))
        J.append(torch.stack(of_row))
    return torch.stack(J)


def input_jacobian(model: nn.Module, inputs: Tensor) -> Tensor:
    """J[row, class, pixel]: derivative of each logit with regard to each number in the batch."""
    inputs = inputs.clone().requires_grad_()
    logits = model(inputs)
    return torch.stack(
        [
            torch.stack(
                [torch.autograd.grad(z, inputs, retain_graph=True)[0].flatten() for z in row]
            )
            for row in logits
        ]
    )


def output_hessians(
    logits: Tensor, curvature: str, likelihood: str = "categorical", targets: Tensor | None = None
) -> Tensor:
    """H[row, class, class], each entry from its definition."""
    H = []
    for r, z in enumerate(logits.detach().flatten(0, -2)):
        p = torch.sigmoid(z) if likelihood == "bernoulli" else torch.softmax(z, 0)
        if curvature == "empirical-fisher":
            target = targets.flatten()[r] if likelihood == "categorical" else targets[r]
            g = _gradient_of_loss(z, target, likelihood)
            H.append(torch.outer(g, g))
        elif curvature == "gauss-newton" or likelihood == "gaussian":
            H.append(torch.eye(len(z), dtype=z.dtype))
        elif likelihood == "bernoulli":
            H.append(torch.diag(p * (1 - p)))
        else:
            H.append(torch.diag(p) - torch.outer(p, p))
    return torch.stack(H)


def _gradient_of_loss(z: Tensor, target: Tensor, likelihood: str) -> Tensor:
    z = z.clone().requires_grad_()
    if likelihood == "categorical":
        loss = nn.functional.cross_entropy(z, target)
    elif likelihood == "bernoulli":
        loss = nn.functional.binary_cross_entropy_with_logits(z, target, reduction="sum")
    else:
        loss = 0.5 * (z - target).square().sum()
    return torch.autograd.grad(loss, z)[0]


def curvature_matrix(model: nn.Module, inputs: Tensor, curvature: str, **kind: object) -> Tensor:
    """C = (1/R) sum_r J_r' H_r J_r, over all weights in the order of `parameters()`."""
    J = parameter_jacobian(model, inputs)
    H = output_hessians(model(inputs), curvature, **kind)
    C = torch.zeros(J.shape[2], J.shape[2], dtype=J.dtype)
    for r in range(len(J)):
        C += J[r].T @ H[r] @ J[r]
    return C / len(J)


def flat(model: nn.Module) -> Tensor:
    """All weights in a row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def places(model: nn.Module) -> dict[str, slice]:
    """Where each parameter lies in `flat`."""
    found, start = {}, 0
    for name, p in model.named_parameters():
        found[name] = slice(start, start + p.numel())
        start += p.numel()
    return found


def layers(model: nn.Module) -> dict[str, list[int]]:
    """Which weights of `flat` belong to each module."""
    found: dict[str, list[int]] = {}
    for name, place in places(model).items():
        found.setdefault(name.rpartition(".")[0], []).extend(range(place.start, place.stop))
    return found
