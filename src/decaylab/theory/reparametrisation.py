"""T8: K-FAC does not see affine reparametrisations of a layer's inputs and outputs (Sec. 4.3).

A layer s = W a + b may be written as s = P s' + d, s' = W' a' + b', a' = M a + c with invertible M
and P: another parametrisation of the same function. With homogeneous inputs (a, 1) the factors
become A' = N A N^T and S' = P^T S P, where N = [[M, c], [0, 1]], and the gradient P^T G N^T. So the
step S'^-1 (P^T G N^T) A'^-1 = P^-1 (S^-1 G A^-1) N^-1 moves the function just as before.

Factored damping breaks that. For a mere scale it is known how: where W' = W / a, damping lambda
acts as lambda / a^2 does on W. (So the damping of a layer under batch normalisation that grows by a
grows by a^2: Eq. 14.)
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.theory import nets
from decaylab.theory.check import Check, Pairs, Statement

LR, DAMPING, EXAMPLES = 0.3, 0.05, 40
SCALES = (0.2, 5.0)

Step = Callable[[nn.Module, Tensor, Tensor], None]
"""Moves a net's weights by one step on images and labels."""


def affine_invariance() -> list[Check]:
    """T8: steps of K-FAC without damping move the function alike in every parametrisation."""
    t8 = Statement("T8", "Sec. 4.3", 1e-8)
    return [
        t8.check("K-FAC-G without damping; affine maps at every layer", _mapped(_undamped())),
        t8.check(
            "K-FAC-F without damping; affine maps, hidden layers step",
            _mapped(_undamped("fisher"), frozen_head=True),
        ),
        t8.check("damping lambda on W / a = lambda / a^2 on W", _scaled(DAMPING)),
        t8.broken("K-FAC-G with damping; affine maps", _mapped(_damped(DAMPING))),
        t8.broken("damping lambda on W / a and on W", _scaled(DAMPING, effective=False)),
        t8.broken("SGD; affine maps", _mapped(_sgd)),
    ]


class _Affine(nn.Module):
    """A fixed map x -> M x + c: no parameters, so that no optimizer sees it."""

    def __init__(self, matrix: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last axis."""
        return x @ self.get_buffer("matrix").T + self.get_buffer("shift")


def _problem(width: int, seed: int, *, bias: bool = True) -> tuple[nn.Sequential, Tensor, Tensor]:
    net = nets.mlp(2, width, seed, activation="tanh", bias=bias)
    assert isinstance(net, nn.Sequential)
    return net, nets.inputs_for(net, seed, EXAMPLES), nets.labels_for(seed, EXAMPLES)


def _reparametrised(net: nn.Sequential, seed: int) -> nn.Sequential:
    """The same function; each layer between two random affine maps, its weights changed to suit."""
    generator = torch.Generator().manual_seed(500 + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    modules: list[nn.Module] = []
    for module in net:
        if not isinstance(module, nn.Linear):
            modules.append(module)
            continue
        inputs, outputs = module.in_features, module.out_features
        M, c = torch.eye(inputs).double() + 0.5 * draw(inputs, inputs), draw(inputs)
        P, d = torch.eye(outputs).double() + 0.5 * draw(outputs, outputs), draw(outputs)
        layer = nn.Linear(inputs, outputs).double()
        with torch.no_grad():
            weight = torch.linalg.solve(P, module.weight) @ torch.linalg.inv(M)
            layer.weight.copy_(weight)
            layer.bias.copy_(torch.linalg.solve(P, module.bias - d) - weight @ c)
        layer.requires_grad_(module.weight.requires_grad)
        modules += [_Affine(M, c), layer, _Affine(P, d)]
    return nn.Sequential(*modules)


def _mapped(step: Step, frozen_head: bool = False) -> Pairs:
    """How a step moves the logits, in the net's own parametrisation and in another."""
    for width, seed in nets.CASES:
        net, inputs, labels = _problem(width, seed)
        if frozen_head:
            net[-1].requires_grad_(False)  # the Fisher matrix at the logits has no inverse
        mapped_net = _reparametrised(net, seed)
        yield _moved(mapped_net, step, inputs, labels), _moved(net, step, inputs, labels)


def _scaled(damping: float, effective: bool = True) -> Pairs:
    """Without biases: W / a on inputs times a under damping, and W under damping / a^2."""
    for width, seed, scale in product(nets.WIDTHS, nets.SEEDS, SCALES):
        net, inputs, labels = _problem(width, seed, bias=False)
        modules: list[nn.Module] = []
        for module in net:
            if not isinstance(module, nn.Linear):
                modules.append(module)
                continue
            layer = nn.Linear(module.in_features, module.out_features, bias=False).double()
            with torch.no_grad():
                layer.weight.copy_(module.weight / scale)
            eye = torch.eye(module.in_features).double()
            modules += [_Affine(scale * eye, torch.zeros(len(eye)).double()), layer]
        scaled_damping = damping / scale**2 if effective else damping
        left = _moved(nn.Sequential(*modules), _damped(damping), inputs, labels)
        yield left, _moved(net, _damped(scaled_damping), inputs, labels)


def _moved(net: nn.Module, step: Step, inputs: Tensor, labels: Tensor) -> Tensor:
    """By how much a step changes the logits."""
    before = net(inputs).detach()
    step(net, inputs, labels)
    return net(inputs).detach() - before


def _damped(damping: float) -> Step:
    """A real step of K-FAC-G."""

    def step(net: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        kfac = nets.kfac(net, "gauss-newton", LR, damping)
        F.cross_entropy(net(inputs), labels).backward()
        kfac.step()
        kfac.detach()

    return step


def _undamped(curvature: str = "gauss-newton") -> Step:
    """-lr S^-1 G A^-1 / T by K-FAC's own factors, which the optimizer would damp."""

    def step(net: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        kfac = nets.kfac(net, curvature, LR, DAMPING)
        kfac.initialize([inputs])
        factors = kfac.factors()
        kfac.detach()
        F.cross_entropy(net(inputs), labels).backward()
        for name, factor in factors.items():
            layer = net.get_submodule(name)
            weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
            assert weight.grad is not None
            assert bias.grad is not None
            joined = torch.cat([weight.grad, bias.grad[:, None]], 1)
            left = torch.linalg.solve(factor.S, joined)
            change = -LR / factor.T * torch.linalg.solve(factor.A, left.T).T
            with torch.no_grad():
                weight.add_(change[:, :-1])
                bias.add_(change[:, -1])

    return step


def _sgd(net: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    F.cross_entropy(net(inputs), labels).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.sub_(LR * parameter.grad)
