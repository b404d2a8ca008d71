"""T7: weight decay as preconditioned descent on |theta|_C^2; L2 for SGD (Sec. 3)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.kfac import KFAC
from decaylab.theory import nets
from decaylab.theory.check import Check, Pairs, Statement

LR, STRENGTH, DAMPING = 0.1, 0.3, 0.5
BETAS, EPS = (0.9, 0.999), 1e-8


def decay_as_descent() -> list[Check]:
    """T7: with C held fixed, weight decay is preconditioned descent on L + wd/2 |theta|_C^2."""
    t7 = Statement("T7", "Sec. 3, Eq. 6, 7", 1e-12)
    return [
        t7.check("SGD: L2 = weight decay", _between(_sgd("l2"), _sgd("decoupled"))),
        t7.check("K-FAC-G: decay = descent on |theta|_C^2, C fixed", _kfac_descent("gauss-newton")),
        t7.check("K-FAC-F: decay = descent on |theta|_C^2, C fixed", _kfac_descent("fisher")),
        t7.check("Adam: decay = descent on |theta|_C^2, C fixed", _adam_descent()),
        t7.broken(
            "SGD with momentum: L2 against weight decay",
            _between(_sgd("l2", 0.9), _sgd("decoupled", 0.9), steps=3),
        ),
        t7.broken("K-FAC: L2 against weight decay", _between(_kfac("l2"), _kfac("decoupled"))),
        t7.broken("Adam: L2 against weight decay", _between(_adam("l2"), _adam("decoupled"))),
        t7.broken("Adam: C differentiated too", _adam_descent(fixed=False)),
    ]


Make = Callable[[nn.Module], torch.optim.Optimizer]


def _groups(net: nn.Module, decay: str) -> list[dict[str, object]]:
    return parameter_groups(net, weight_decay=STRENGTH, decay=decay)


def _sgd(decay: str, momentum: float = 0.0) -> Make:
    return lambda net: sgd(_groups(net, decay), lr=LR, momentum=momentum)


def _adam(decay: str) -> Make:
    return lambda net: adam(_groups(net, decay), lr=LR, betas=BETAS, eps=EPS)


def _kfac(decay: str, curvature: str = "fisher") -> Make:
    return lambda net: nets.kfac(net, curvature, LR, DAMPING, _groups(net, decay))


def _problem(width: int, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    net = nets.mlp(1, width, seed, bias=True)
    return net, nets.inputs_for(net, seed), nets.labels_for(seed)


def _moved(make: Make, width: int, seed: int, steps: int = 1) -> Tensor:
    """How far `steps` steps of a real optimizer move the weights, in a row."""
    net, inputs, labels = _problem(width, seed)
    start, optimizer = _flat(net), make(net)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    if isinstance(optimizer, KFAC):
        optimizer.detach()
    return _flat(net) - start


def _between(left: Make, right: Make, steps: int = 1) -> Pairs:
    for width, seed in nets.CASES:
        yield _moved(left, width, seed, steps), _moved(right, width, seed, steps)


def _kfac_descent(curvature: str) -> Pairs:
    """A real K-FAC step with decay; -lr C^-1 grad(L + wd/2 theta' C theta), C written out."""
    for width, seed in nets.CASES:
        left = _moved(_kfac("decoupled", curvature), width, seed)
        net, inputs, labels = _problem(width, seed)
        kfac = _kfac("none", curvature)(net)
        assert isinstance(kfac, KFAC)
        kfac.initialize([inputs])
        factors = kfac.factors()
        kfac.detach()
        blocks = {}
        for name, factor in factors.items():
            pi = ((factor.A.trace() / len(factor.A)) / (factor.S.trace() / len(factor.S))).sqrt()
            root = (DAMPING / factor.T).sqrt()
            A = factor.A + pi * root * torch.eye(len(factor.A), dtype=factor.A.dtype)
            S = factor.S + root / pi * torch.eye(len(factor.S), dtype=factor.S.dtype)
            blocks[name] = factor.T * torch.kron(S, A)
        loss = F.cross_entropy(net(inputs), labels)
        parts = []
        for name, C in blocks.items():
            layer = net.get_submodule(name)
            weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
            joined = torch.cat([weight.detach(), bias.detach()[:, None]], 1)
            theta = joined.flatten().requires_grad_()
            (of_norm,) = torch.autograd.grad(STRENGTH / 2 * (theta @ C @ theta), theta)
            gradients = torch.autograd.grad(loss, [weight, bias], retain_graph=True)
            of_loss = torch.cat([gradients[0], gradients[1][:, None]], 1).flatten()
            step = (-LR * torch.linalg.solve(C, of_loss + of_norm)).view_as(joined)
            parts += [step[:, :-1].flatten(), step[:, -1]]
        yield left, torch.cat(parts)


def _adam_descent(fixed: bool = True) -> Pairs:
    """A real AdamW step, and descent on L + wd/2 |theta|_C^2 with Adam's C = diag(sqrt(v) + eps).

    At the first step Adam's averages are the gradient g and its square, so C = diag(|g| + eps); it
    depends on theta, and not `fixed` differentiates that as well.
    """
    for width, seed in nets.CASES:
        left = _moved(_adam("decoupled"), width, seed)
        net, inputs, labels = _problem(width, seed)
        parameters = list(net.parameters())
        loss = F.cross_entropy(net(inputs), labels)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        diagonals = [g.abs() + EPS for g in gradients]
        metrics = [C.detach() if fixed else C for C in diagonals]
        squares = [(C * p.square()).sum() for C, p in zip(metrics, parameters, strict=True)]
        of_norm = torch.autograd.grad(STRENGTH / 2 * torch.stack(squares).sum(), parameters)
        steps = [-LR * (g + n) / C for g, n, C in zip(gradients, of_norm, diagonals, strict=True)]
        yield left, torch.cat([step.detach().flatten() for step in steps])


def _flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()
