"""Optimizers that are one formula each, to be found out by a trial."""

import torch


class Formula(torch.optim.Optimizer):
    """W <- W + step(group, state, W, gradient); its settings are `own`."""

    own: dict = {}

    def __init__(self, params, lr=1e-3, weight_decay=0.0, **more):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **self.own, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.move(group, self.state[p], p, p.grad))


class Lion(Formula):
    own = {"betas": (0.9, 0.99)}

    def move(self, group, state, p, grad):
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        fast, slow = group["betas"]
        sign = (fast * m + (1 - fast) * grad).sign()
        m.lerp_(grad, 1 - slow)
        return -group["lr"] * (sign + group["weight_decay"] * p)


class Lamb(Formula):
    """The trust ratio makes its decay depend on the gradients: no known kind."""

    def move(self, group, state, p, grad):
        direction = grad / (grad.abs() + 1e-8) + group["weight_decay"] * p
        return -group["lr"] * p.norm() / direction.norm() * direction


class HeavyBall(Formula):
    """Decay within a momentum that is a running mean: L2."""

    def move(self, group, state, p, grad):
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(grad + group["weight_decay"] * p, 0.1)
        return -group["lr"] * m


class Algorithm1(Formula):
    """Decay as the paper's Algorithm 1 prints it, without lr."""

    def move(self, group, state, p, grad):
        return -group["lr"] * grad - group["weight_decay"] * p


class Proximal(Formula):
    def move(self, group, state, p, grad):
        return (p - group["lr"] * grad.sign()) / (1 + group["lr"] * group["weight_decay"]) - p


class Cautious(Formula):
    """Decays only where the gradient pulls the same way."""

    def move(self, group, state, p, grad):
        pulled = (grad * p >= 0).to(p.dtype)
        return -group["lr"] * (grad.sign() + group["weight_decay"] * p * pulled)


class Warming(Formula):
    """Its steps grow without end, but the decay stands in the gradient."""

    def move(self, group, state, p, grad):
        state["step"] = state.get("step", 0) + 1
        return -group["lr"] * state["step"] * (grad + group["weight_decay"] * p)


class Clipped(Formula):
    """SGD where gradients are small, and of one length where they are not."""

    def move(self, group, state, p, grad):
        return -group["lr"] * (grad / grad.norm().clamp(min=1) + group["weight_decay"] * p)


class Stable(Formula):
    """Adam whose decay is divided by the size of the gradients: decoupled only where that is 1."""

    def move(self, group, state, p, grad):
        size = grad.square().mean().sqrt()
        return -group["lr"] * (grad / size + group["weight_decay"] / size * p)


class Corrected(Formula):
    """Decay by lr^2: with a constant lr, and the right weight decay, it looks decoupled."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.most = lr

    def move(self, group, state, p, grad):
        lr = group["lr"]
        return -lr * grad.sign() - lr**2 / self.most * group["weight_decay"] * p


class TrustIfDecayed(Formula):
    """As timm's LAMB: the trust ratio is there only if there is a weight decay."""

    def move(self, group, state, p, grad):
        direction = grad.sign()
        trust = p.norm() / direction.norm() if group["weight_decay"] else 1.0
        return -group["lr"] * (trust * direction + group["weight_decay"] * p)


class Noisy(Formula):
    """Moves by itself and does not decay."""

    def move(self, group, state, p, grad):
        return -group["lr"] * (torch.randn_like(p) + grad.sign())


class MatricesOnly(Formula):
    """Vectors do not decay."""

    def move(self, group, state, p, grad):
        return -group["lr"] * (grad.sign() + (p.ndim > 1) * group["weight_decay"] * p)


class ByShape(Formula):
    """Step and decay are over the mean of the weight's sides, as in SPlus."""

    def move(self, group, state, p, grad):
        lr = group["lr"] * 2 / sum(p.shape)
        return -lr * (grad.sign() + group["weight_decay"] * p)


class TensorRate(Lion):
    """Its lr is a tensor, which must not be replaced (torchao)."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64)

    def move(self, group, state, p, grad):
        if not isinstance(group["lr"], torch.Tensor):
            raise TypeError("lr was replaced")
        return super().move(group, state, p, grad)


class RunningMean(Formula):
    """Its momentum is a mean: it does not add up the decay as torch's SGD does."""

    own = {"momentum": 0.9}

    def move(self, group, state, p, grad):
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(grad + group["weight_decay"] * p, 1 - group["momentum"])
        return -group["lr"] * m
