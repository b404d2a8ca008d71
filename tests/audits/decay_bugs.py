"""Optimizers with the decay of public ones, and replicas of public bugs."""

import torch


class Decaying(torch.optim.Optimizer):
    """W -= lr sign(g) + decay(lr, group, W, g, state)."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    taken = self.decay(group["lr"], group, p, p.grad, self.state[p])
                    p.sub_(group["lr"] * p.grad.sign() + taken)


class Cautious(Decaying):
    """arXiv:2510.12402: only where the step pulls the same way."""

    def decay(self, lr, group, p, grad, state):
        return lr * group["weight_decay"] * p * (grad * p > 0)


class LrSquared(Decaying):
    """AdamC, arXiv:2506.02285."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.largest = lr

    def decay(self, lr, group, p, grad, state):
        return lr**2 / self.largest * group["weight_decay"] * p


class LrTwice(Decaying):
    """Scaled by lr once too often: next to nothing, which is not nothing."""

    def decay(self, lr, group, p, grad, state):
        return lr**2 * group["weight_decay"] * p


class Twice(Decaying):
    def decay(self, lr, group, p, grad, state):
        return 2 * lr * group["weight_decay"] * p


class Independent(Decaying):
    def decay(self, lr, group, p, grad, state):
        return group["weight_decay"] * p


class TowardsStart(Decaying):
    """L2-SP, arXiv:1802.01483."""

    def decay(self, lr, group, p, grad, state):
        start = state.setdefault("start", p.clone())
        return lr * group["weight_decay"] * (p - start)


class InMomentum(torch.optim.Optimizer):
    """Behind the preconditioner, as in KFAC-Pytorch and NovoGrad."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.8).add_(p.grad.sign() + group["weight_decay"] * p)
                p.sub_(group["lr"] * m)


class TwiceInTheGradient(torch.optim.Adam):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad + group["weight_decay"] * p.detach()
        return super().step(closure)


class Odd(Decaying):
    """No known operator."""

    def decay(self, lr, group, p, grad, state):
        return lr * group["weight_decay"] * p**3


class MasterCopy(torch.optim.Optimizer):
    """Decoupled, on a copy of the weights that nobody else can put back."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.copies = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                copy = self.copies[p]
                copy.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * p.grad.sign())
                p.copy_(copy)


class TimmSGDW(torch.optim.Optimizer):
    """huggingface/pytorch-image-models#2750: all parameters decay once per number format."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for dtype in {p.dtype for p in params}:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                some = [p for p in params if p.dtype == dtype]
                torch._foreach_add_(some, [p.grad for p in some], alpha=-group["lr"])


class BitsandbytesLion(torch.optim.Optimizer):
    """bitsandbytes#1992: Lion's decay goes into the gradient, before the sign."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                grad = p.grad + group["weight_decay"] * p
                p.sub_(group["lr"] * (fast * m + (1 - fast) * grad).sign())
                m.lerp_(grad, 1 - slow)


class DeepSpeedGroups(torch.optim.AdamW):
    """DeepSpeed#8440: the groups that it is given are flattened, and their settings dropped."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        flat = [p for group in params for p in group["params"]]
        super().__init__([{"params": flat}], lr=lr, weight_decay=weight_decay)


class TinygradMuon(torch.optim.Optimizer):
    """tinygrad#17709: the decayed weight is computed, and then not used."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                u, _, v = torch.linalg.svd(m, full_matrices=False)
                _ = p * (1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * u @ v)
