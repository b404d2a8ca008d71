"""Random nets, and the K-FAC of a training loop by dense blocks: whole batches through autograd.

Written apart from `oracle.kfac`, which goes example by example: this one takes patches from
`F.unfold`, one-hot vectors for embeddings, and solves each damped block as one matrix. Freezing and
thawing, accumulated passes, a lag of the inverses and all kinds of steps are in it.

Scaling: A is the mean of a a' over examples and positions, G the sum of g g' over classes and
positions, divided by the rows of the logits. A block is kron(G, A) for [out, in (+ 1)] row by row.
"""

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Layers of one of four kinds of data, with one row of logits for each example."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.classes, self.activation = random.choice([2, 3]), random.choice([nn.Tanh, nn.GELU])()
        self.data = random.choice(["vectors", "images", "tokens", "sequences"])

        def biased() -> bool:
            return random.random() < 0.7

        width = random.randint(2, 4)
        if self.data == "images":
            self.inputs, groups = random.choice([2, 4]), random.choice([1, 2])
            shape = {"stride": random.choice([1, 2]), "dilation": random.choice([1, 2])}
            kernel, padding = random.choice([1, 2, 3]), random.choice([1, 2])
            layers: list[Any] = [
                nn.Conv2d(
                    self.inputs, 4, kernel, padding=padding, groups=groups, bias=biased(), **shape
                ),
                nn.Conv2d(4, width, random.choice([1, 2]), bias=biased()),
            ]
        elif self.data == "tokens":
            self.inputs = random.randint(4, 7)
            padding_idx = random.choice([None, 0])
            layers = [nn.Embedding(self.inputs, width, padding_idx=padding_idx)]
        else:
            self.inputs = random.randint(2, 5)
            layers = [nn.Linear(self.inputs, width, bias=biased())]
        if self.data != "images":
            layers.append(nn.Linear(width, width, bias=biased()))
        self.layers = nn.ModuleList(layers)
        self.twice = self.data != "images" and random.random() < 0.5  # the last one is used again
        self.norm = nn.LayerNorm(width) if random.random() < 0.3 else nn.Identity()
        self.head = nn.Linear(width, self.classes, bias=biased())

    def forward(self, x: Tensor) -> Tensor:
        """Inputs to logits."""
        for layer in [*self.layers, *([self.layers[-1]] if self.twice else [])]:
            x = self.activation(layer(x))
        if self.data == "images":
            x = x.flatten(2).mean(2)
        elif self.data != "vectors":
            x = x.mean(1)
        return self.head(self.norm(x))

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        labels = torch.randint(self.classes, (count,), generator=generator)
        if self.data == "tokens":
            return torch.randint(self.inputs, (count, 5), generator=generator), labels
        sizes = {"vectors": (self.inputs,), "sequences": (3, self.inputs)}
        size = sizes.get(self.data, (self.inputs, 5, 5))
        return torch.randn(count, *size, generator=generator, dtype=torch.float64), labels


@dataclass
class Settings:
    """As the arguments of `decaylab.KFAC`."""

    curvature: str
    damping: float
    damping_scaling: str
    weight_decay: float
    decay: str
    momentum: float
    refresh_every: int
    invert_every: int
    factor_decay: float
    lag: int
    rms: float | None
    kl_clip: float | None
    spectral: bool
    momentum_first: bool
    lr: float = 0.01

    @staticmethod
    def drawn(random: Random) -> "Settings":
        """Random ones that do not diverge."""
        invert_every = random.choice([1, 2, 4])
        rms, kl_clip = random.choice([(0.2, None), (None, 1e-5), (None, 1e-7)])
        spectral = rms is not None and random.random() < 0.6
        return Settings(
            curvature=random.choice(["gauss-newton", "fisher"]),
            damping=random.choice([1e-2, 1.0]),
            damping_scaling=random.choice(["fixed", "trace"]),
            weight_decay=random.choice([0.0, 0.1]),
            decay=random.choice(["l2", "decoupled", "independent"]),
            momentum=random.choice([0.0, 0.9]),
            refresh_every=random.choice([1, 2, 3]),
            invert_every=invert_every,
            factor_decay=random.choice([0.0, 0.5, 0.95]),
            lag=random.choice([0, 1]) if invert_every > 1 else 0,
            rms=rms,
            kl_clip=kl_clip,
            spectral=spectral,
            momentum_first=spectral or random.random() < 0.3,
        )


@dataclass
class Sum:
    """Of one layer in one pass: a a' and g g' [groups, dim, dim], and what they are sums over."""

    A: Tensor
    G: Tensor
    positions: int
    rows: int


@dataclass
class DenseLoop:
    """Steps `net` in place; call `observe` with the inputs of every pass before a refresh."""

    net: Net
    settings: Settings
    steps: int = 0
    passes: list[dict[str, Sum]] = field(default_factory=list)
    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # damped G and A, for each group
    blocks: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    begun: tuple[int, dict[str, list[tuple[Tensor, Tensor]]]] | None = None
    inverted: bool = False

    def __post_init__(self) -> None:
        kinds = (nn.Linear, nn.Conv2d, nn.Embedding)
        self.layers = {n: m for n, m in self.net.named_modules() if isinstance(m, kinds)}
        norm = list(self.net.norm.parameters())
        self.adam = torch.optim.Adam(norm, lr=1e-3) if norm else None
        self.velocity = {p: torch.zeros_like(p) for p in self.net.parameters()}

    def observe(self, inputs: Tensor) -> None:
        """Sums over one pass, by a backward pass for each class."""
        calls: list[tuple[str, Tensor, Tensor]] = []

        def probed(name: str) -> Any:
            def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
                probe = torch.zeros_like(output, requires_grad=True)
                calls.append((name, args[0].detach(), probe))
                return output + probe

            return hook

        trained = {
            n: m for n, m in self.layers.items() if any(p.requires_grad for p in m.parameters())
        }
        handles = [m.register_forward_hook(probed(n)) for n, m in trained.items()]
        logits = self.net(inputs)
        for handle in handles:
            handle.remove()
        if not calls:
            return
        p, sums = logits.softmax(-1).detach(), {}
        for c in range(self.net.classes):
            unit = F.one_hot(torch.tensor(c), self.net.classes).double().expand_as(logits)
            vector = unit
            if self.settings.curvature == "fisher":
                vector = p[:, c : c + 1].sqrt() * (unit - p)
            probes = [probe for _, _, probe in calls]
            gradients = torch.autograd.grad(logits, probes, vector, retain_graph=True)
            for (name, x, _), g in zip(calls, gradients, strict=True):
                a, b, positions = _rows(self.layers[name], x, g)
                total = sums.setdefault(name, Sum(0 * a.mT @ a, 0 * b.mT @ b, 0, len(logits)))
                total.G += b.mT @ b
                if c == 0:
                    total.A += a.mT @ a
                    total.positions += positions
        self.passes.append(sums)

    def step(self) -> None:
        """Refresh and invert where they are due, and move what has a gradient."""
        s = self.settings
        if self.begun is not None and self.steps - self.begun[0] >= s.lag:
            (_, self.blocks), self.begun = self.begun, None
        refreshes = self.steps % s.refresh_every == 0
        early = refreshes and self.begun is None and self.steps + s.lag <= s.invert_every
        due = self.steps % s.invert_every == 0 or early
        if refreshes:
            self._refresh()
        self.passes = []
        at_once = due and not (s.lag and self.inverted)
        if at_once:
            self.blocks, self.inverted, self.begun = self._damped(), True, None
        self._move()
        if due and not at_once:
            self.begun = self.steps, self._damped()
        self.steps += 1

    def _refresh(self) -> None:
        keep = self.settings.factor_decay
        for name in {name for sums in self.passes for name in sums}:
            those = [sums[name] for sums in self.passes if name in sums]
            A = sum(each.A for each in those) / sum(each.positions for each in those)
            G = sum(each.G for each in those) / sum(each.rows for each in those)
            if name in self.factors:
                old = self.factors[name]
                A, G = keep * old[0] + (1 - keep) * A, keep * old[1] + (1 - keep) * G
            self.factors[name] = A, G

    def _damped(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        s, blocks = self.settings, {}
        for name, (As, Gs) in self.factors.items():
            blocks[name] = []
            for A, G in zip(As, Gs, strict=True):
                mean_A, mean_G = A.trace() / len(A), G.trace() / len(G)
                scale = mean_A * mean_G if s.damping_scaling == "trace" else 1.0
                root, pi = (s.damping * scale) ** 0.5, (mean_A / mean_G).sqrt()
                left = G + root / pi * torch.eye(len(G)).double()
                blocks[name].append((left, A + root * pi * torch.eye(len(A)).double()))
        return blocks

    def _move(self) -> None:
        s, quadratic, steps = self.settings, 0.0, {}
        for name, layer in self.layers.items():
            if all(p.grad is None for p in layer.parameters()):
                continue

            def gradient(p: Tensor) -> Tensor:
                if p.grad is None:
                    return torch.zeros_like(p)
                g = p.grad + s.weight_decay * p.detach() * (s.decay == "l2")
                if s.momentum_first:
                    self.velocity[p] = s.momentum * self.velocity[p] + g
                    # Nesterov's, in spectral steps
                    g = g + s.momentum * self.velocity[p] if s.spectral else self.velocity[p]
                return g

            g = _matrices(layer, gradient)
            moves = _matrices(layer, lambda p: torch.full_like(p, p.grad is not None))
            step = torch.zeros(g.shape, dtype=g.dtype)
            for group, sides in enumerate(self.blocks[name]):
                if s.spectral:
                    step[group] = _steepest(g[group], *sides) * moves[group]
                    continue
                block = torch.kron(*sides)
                here = moves[group].flatten() == 1  # a frozen part is a constant
                solved = torch.linalg.solve(block[here][:, here], g[group].flatten()[here])
                step[group].view(-1)[here] = solved
            quadratic += s.lr**2 * (g * step).sum()
            if s.rms is not None:
                norms = step.flatten(1).norm(dim=1) / moves.flatten(1).sum(1).sqrt()
                step *= (s.rms / norms)[:, None, None]
            steps.update(_parts(layer, step))
        clip = 1.0
        if s.kl_clip is not None and steps:
            clip = min(1.0, math.sqrt(s.kl_clip / float(quadratic)))
        decays = {"l2": 0.0, "decoupled": s.weight_decay, "independent": s.weight_decay}[s.decay]
        with torch.no_grad():
            for p, step in steps.items():
                if p.grad is None:
                    continue
                move = clip * step
                if not s.momentum_first:
                    move = self.velocity[p] = s.momentum * self.velocity[p] + move
                p *= 1 - decays * (s.lr if s.decay == "decoupled" else 1.0)
                p -= s.lr * move
            if self.adam is None:
                return
            for p in self.net.norm.parameters():
                if p.grad is not None:
                    p *= 1 - decays * (1e-3 if s.decay == "decoupled" else 1.0)
        self.adam.param_groups[0]["weight_decay"] = s.weight_decay if s.decay == "l2" else 0.0
        self.adam.step()


def _steepest(g: Tensor, G: Tensor, A: Tensor) -> Tensor:
    """By symmetric roots, and Newton-Schulz iterations on the singular values themselves."""

    def inverse_root(matrix: Tensor) -> Tensor:
        eigenvalues, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(eigenvalues**-0.5) @ vectors.mT

    left, right = inverse_root(G), inverse_root(A)
    U, values, V = torch.linalg.svd(left @ g @ right, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ U @ torch.diag(values) @ V @ right


def _rows(layer: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, int]:
    """Input rows and gradient rows [groups, rows, dim] of one use, and how many rows count."""
    if isinstance(layer, nn.Conv2d):
        geometry = layer.kernel_size, layer.dilation, layer.padding, layer.stride
        a = [F.unfold(part, *geometry).mT.flatten(0, 1) for part in x.chunk(layer.groups, 1)]
        b = [part.flatten(2).mT.flatten(0, 1) for part in g.chunk(layer.groups, 1)]
        rows, gradients = torch.stack(a), torch.stack(b)
        counted = torch.ones(rows.shape[1]).double()
    elif isinstance(layer, nn.Embedding):
        tokens = x.flatten()
        counted = (tokens != (-1 if layer.padding_idx is None else layer.padding_idx)).double()
        rows = (F.one_hot(tokens, layer.num_embeddings) * counted[:, None])[None]
        gradients = (g.flatten(0, -2) * counted[:, None])[None]
    else:
        rows, gradients = x.reshape(1, -1, x.shape[-1]), g.reshape(1, -1, g.shape[-1])
        counted = torch.ones(rows.shape[1]).double()
    if getattr(layer, "bias", None) is not None:
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], 2)
    return rows, gradients, int(counted.sum())


def _matrices(layer: Any, value: Any) -> Tensor:
    """A value for each parameter of a layer as [groups, out, in (+ 1)]."""
    weight, groups = value(layer.weight).detach(), getattr(layer, "groups", 1)
    weight = weight.mT if isinstance(layer, nn.Embedding) else weight.flatten(1)
    matrices = weight.reshape(groups, -1, weight.shape[1])
    if getattr(layer, "bias", None) is None:
        return matrices
    return torch.cat([matrices, value(layer.bias).detach().view(groups, -1, 1)], 2)


def _parts(layer: Any, matrices: Tensor) -> dict[Tensor, Tensor]:
    """What undoes `_matrices`."""
    parts = {}
    if getattr(layer, "bias", None) is not None:
        matrices, parts[layer.bias] = matrices[..., :-1], matrices[..., -1].flatten()
    weight = matrices.flatten(0, 1)
    turned = isinstance(layer, nn.Embedding)
    parts[layer.weight] = weight.mT if turned else weight.view(layer.weight.shape)
    return parts
