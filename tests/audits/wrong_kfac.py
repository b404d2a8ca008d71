"""A dense K-FAC for tiny nets with the mistakes that people make, each as an option."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class HookedKFAC(torch.optim.Optimizer):
    """Right by default: T E[aa'] (x) E[gg'] of the Fisher, factored damping with pi.

    `factor(B, T, stride)` multiplies the curvature. `labels="data"`: the empirical Fisher, from the
    gradients that backward hooks see, times B. `bias`: "joint", or "doubled": once in the block's
    homogeneous coordinate and once more beside it. `mixed`: A and S are each inverted in part.
    `noisy`: how much convolutions are off by chance, as an estimate from some positions would be.
    `damping_used`: what is really used beside the `damping` that it shows; `damped`: "pi", or
    "plain" (its root added to A and to T S), or "each" (itself).
    """

    def __init__(
        self,
        model,
        lr=0.1,
        factor=lambda B, T, stride: 1.0,
        labels="model",
        bias="joint",
        mixed=False,
        damping=1e-3,
        damping_used=None,
        damped="pi",
        momentum=0.0,
        noisy=0.0,
    ):
        super().__init__(model.parameters(), {"lr": lr, "momentum": momentum})
        self.damping, self.used, self.damped = damping, damping_used or damping, damped
        self.factor, self.labels, self.bias, self.mixed = factor, labels, bias, mixed
        self.noisy = noisy
        self.layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        self.seen, self.gradients, self.outputs = {}, {}, {}
        for layer in self.layers:
            layer.register_forward_hook(self.forward_hook)
        if labels == "model":
            model.register_forward_hook(self.exact_fisher)

    def forward_hook(self, layer, inputs, output):
        self.seen[layer], self.outputs[layer] = inputs[0].detach(), output
        if self.labels == "data":
            output.register_hook(lambda g: self.backward_hook(layer, g))

    def backward_hook(self, layer, g):
        self.gradients[layer] = [g.detach() * len(g)]  # the loss is a mean over the batch

    def exact_fisher(self, model, _, logits):
        p = logits.detach().softmax(1)
        self.gradients = {layer: [] for layer in self.layers}
        for c in range(p.shape[1]):
            one = F.one_hot(torch.full((len(p),), c), p.shape[1])
            vectors = p[:, c : c + 1].sqrt() * (p - one)
            found = torch.autograd.grad(
                logits, [self.outputs[x] for x in self.layers], vectors, retain_graph=True
            )
            for layer, g in zip(self.layers, found, strict=True):
                self.gradients[layer].append(g)

    @torch.no_grad()
    def step(self):
        for layer in self.layers:
            a = self.seen[layer]
            stride = 1
            if isinstance(layer, nn.Conv2d):
                stride = layer.stride[0]
                a = F.unfold(a, layer.kernel_size, 1, layer.padding, stride).transpose(1, 2)
                gs = [g.flatten(2).transpose(1, 2) for g in self.gradients[layer]]
            else:
                a, gs = a[:, None], [g[:, None] for g in self.gradients[layer]]
            if layer.bias is not None:
                a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2)
            B, T = a.shape[:2]
            A = torch.einsum("bti,btj->ij", a, a) / (B * T)
            G = sum(torch.einsum("bti,btj->ij", g, g) for g in gs) / B * self.factor(B, T, stride)
            if isinstance(layer, nn.Conv2d):
                G = G * torch.exp(self.noisy * torch.randn(()))
            gradient = layer.weight.grad.flatten(1)
            if layer.bias is not None:
                gradient = torch.cat([gradient, layer.bias.grad[:, None]], 1)
            step = self.solve(A, G, gradient, T)
            lr = self.param_groups[0]["lr"]
            if layer.bias is not None:
                twice = 2.0 if self.bias == "doubled" else 1.0
                layer.bias -= lr * twice * step[:, -1]
                step = step[:, :-1]
            layer.weight -= lr * step.reshape(layer.weight.shape)

    def solve(self, A, G, gradient, T):
        pi = math.sqrt(A.trace() / len(A) / (G.trace() / len(G)))
        root = math.sqrt(self.used)
        if self.damped == "plain":  # A and S, without T, have the same
            pi = T**-0.5
        if self.damped == "each":
            pi, root = 1.0, self.used
        A = A + pi * root * torch.eye(len(A), dtype=A.dtype)
        G = G + root / pi * torch.eye(len(G), dtype=G.dtype)
        if self.mixed:  # forgets to invert A
            return torch.linalg.solve(G, gradient) @ A
        return torch.linalg.solve(G, gradient) @ torch.linalg.inv(A)
