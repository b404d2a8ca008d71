"""T5 and T6: what scale-invariance does to the curvature and to the steps (Eq. 8, 9, 13, 14)."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn import functional as F

from decaylab.theory import nets
from decaylab.theory.check import Check, Pairs, Statement

SCALES = (0.03, 10.0)

LR, DAMPING = 1e-3, 0.05
LAYER = "0.weight"


def curvature_scaling() -> list[Check]:
    """T5, Eq. 8 and 13: f(a W) = f(W) and C(W) = C(W/|W|) / |W|^2 for a layer under BN."""
    t5 = Statement("T5", "Eq. 8, 13", 1e-6)
    checks = []
    for kind in ("linear", "conv"):
        what = f"{kind} under BN"
        checks += [
            t5.check(f"f(a W) = f(W); {what}, eps = 0", _outputs(kind)),
            t5.check(f"C = Fisher; {what}, eps = 0", _curvatures(kind, "fisher")),
            t5.check(f"C = Gauss-Newton; {what}, eps = 0", _curvatures(kind, "gauss-newton")),
            t5.broken(f"f(a W) = f(W); {what}, eps = 1e-3", _outputs(kind, eps=1e-3)),
            t5.broken(f"C = Fisher; {what}, eps = 1e-3", _curvatures(kind, "fisher", eps=1e-3)),
        ]
    checks.append(t5.broken("f(a W) = f(W); no BN", _outputs("linear", norm=False)))
    checks.append(t5.broken("C = Fisher; no BN", _curvatures("linear", "fisher", norm=False)))
    return checks


def direction_updates() -> list[Check]:
    """T6, Eq. 9 and 14: the direction's update up to O(lr^2): half the lr, a quarter the rest."""
    t6 = Statement("T6", "Eq. 9, 14", 0.05)
    return [
        t6.check("Eq. 9, SGD: rest(lr) / rest(lr/2) = 4", _rests(_sgd)),
        t6.check("Eq. 14, damped Fisher: ... = 4", _rests(_damped("fisher"))),
        t6.check("Eq. 14, damped Gauss-Newton: ... = 4", _rests(_damped("gauss-newton"))),
        t6.broken("Eq. 9 with lr in place of lr / |W|^2", _rests(_sgd_without_norm)),
        t6.broken(
            "Eq. 14 with lambda in place of lambda |W|^2",
            _rests(_damped("fisher", with_norm=False)),
        ),
        t6.broken("Eq. 9, no BN", _rests(_sgd, norm=False)),
    ]


class _FirstLayer:
    """Loss, gradient and curvature of a net as functions of its first layer's weight alone."""

    def __init__(self, width: int, seed: int, kind: str = "linear", **options: object) -> None:
        self.net = nets.normalised_net(width, seed, kind=kind, **options).train()  # type: ignore[arg-type]
        self.inputs = nets.inputs_for(self.net, seed)
        self.labels = nets.labels_for(seed)
        for module in self.net.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.track_running_stats = False  # batch statistics, and no trace of them
        self.weight = self.net.get_parameter(LAYER).detach()

    def logits(self, weight: Tensor) -> Tensor:
        return functional_call(self.net, {LAYER: weight}, (self.inputs,))

    def gradient(self, weight: Tensor) -> Tensor:
        """Gradient of the mean cross entropy, in a row."""
        return grad(lambda w: F.cross_entropy(self.logits(w), self.labels))(weight).flatten()

    def curvature(self, weight: Tensor, kind: str) -> Tensor:
        """The whole matrix C [weights, weights] from the Jacobian written out."""
        J = jacrev(self.logits)(weight).flatten(2)
        p = self.logits(weight).detach().softmax(1)
        H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        if kind == "gauss-newton":
            H = torch.eye(nets.CLASSES, dtype=p.dtype).expand_as(H)
        return torch.einsum("bci,bcd,bdj->ij", J, H, J) / len(J)


def _outputs(kind: str, **options: object) -> Pairs:
    for width, seed, scale in product(nets.WIDTHS, nets.SEEDS, SCALES):
        layer = _FirstLayer(width, seed, kind, **options)
        yield layer.logits(scale * layer.weight), layer.logits(layer.weight)


def _curvatures(kind: str, matrix: str, **options: object) -> Pairs:
    for width, seed, scale in product(nets.WIDTHS, nets.SEEDS, SCALES):
        layer = _FirstLayer(width, seed, kind, **options)
        weight = scale * layer.weight
        square = weight.square().sum()
        right = layer.curvature(weight / square.sqrt(), matrix) / square
        yield layer.curvature(weight, matrix), right


Rule = Callable[[_FirstLayer, Tensor], tuple[Tensor, Tensor]]
"""A layer and its weight to (what lr multiplies in the real step, ... in the formula)."""


def _sgd(layer: _FirstLayer, weight: Tensor) -> tuple[Tensor, Tensor]:
    norm = weight.norm()
    return layer.gradient(weight), layer.gradient(weight / norm) / norm**2


def _sgd_without_norm(layer: _FirstLayer, weight: Tensor) -> tuple[Tensor, Tensor]:
    return layer.gradient(weight), layer.gradient(weight / weight.norm())


def _damped(matrix: str, with_norm: bool = True) -> Rule:
    def step(layer: _FirstLayer, weight: Tensor, damping: Tensor | float) -> Tensor:
        damped = layer.curvature(weight, matrix) + damping * torch.eye(weight.numel()).double()
        return torch.linalg.solve(damped, layer.gradient(weight))

    def rule(layer: _FirstLayer, weight: Tensor) -> tuple[Tensor, Tensor]:
        norm = weight.norm()
        effective = DAMPING * norm**2 if with_norm else DAMPING
        return step(layer, weight, DAMPING), step(layer, weight / norm, effective)

    return rule


def _rests(rule: Rule, norm: bool = True) -> Pairs:
    """Pairs (rest(lr) / rest(lr/2), 4); the rest is real direction minus formula."""
    for width, seed in nets.CASES:
        layer = _FirstLayer(width, seed, norm=norm)
        weight = 2.0 * layer.weight
        step, formula = rule(layer, weight)
        rests = [_rest(rate, weight.flatten(), step, formula) for rate in (LR, LR / 2)]
        yield rests[0] / rests[1], torch.tensor(4.0, dtype=torch.float64)


def _rest(lr: float, weight: Tensor, step: Tensor, formula: Tensor) -> Tensor:
    """|real direction after the step - direction that the formula predicts|."""
    u = weight / weight.norm()
    moved = weight - lr * step
    predicted = u - lr * (formula - u * (u @ formula))
    return torch.linalg.vector_norm(moved / moved.norm() - predicted)
