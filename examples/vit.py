"""What weight decay does to a small vision transformer on scikit-learn's digits.

    python examples/vit.py                         # AdamW, half a minute on two cores
    python examples/vit.py --optimizer kfac-f      # or kfac-g, sgd

It trains once with and once without decay, both watched; then it says what decay did.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from decaylab import KFAC, diagnose, watch
from decaylab.probes.watch import Watch

OPTIMIZERS = ("adamw", "sgd", "kfac-f", "kfac-g")
# Learning rate and weight decay, where none is asked for: decay acts over 1 / (lr * wd) steps, and
# a run is short.
DEFAULTS = {"adamw": (5e-3, 0.5), "sgd": (0.05, 5e-3), "kfac-f": (0.03, 0.1), "kfac-g": (0.03, 0.1)}


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, patches, width] to the same."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.projection(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class ViT(nn.Module):
    """Images [batch, 1, 8, 8], in 16 patches, to logits [batch, 10]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of an image's class."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def optimizer_for(
    name: str, model: nn.Module, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Decay on matrices and kernels alone, as is usual."""
    weights = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    curvature = "fisher" if name == "kfac-f" else "gauss-newton"
    return KFAC(
        model,
        lr,
        params=groups,
        curvature=curvature,
        damping=0.03,
        kl_clip=1e-2,
        invert_every=20,
        others_lr=0.01,
    )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [N, 1, 8, 8] and labels, test images and labels; a fifth is for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    x = (x - x.mean()) / x.std()
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, first = x[order], y[order], len(x) // 5
    return x[first:], y[first:], x[:first], y[:first]


def train(args: argparse.Namespace, weight_decay: float) -> tuple[Watch, float]:
    """One training; returns what was watched, and the accuracy on the test images."""
    torch.manual_seed(args.seed)
    x, y, test_x, test_y = digits()
    model = ViT(args.width, args.depth)
    optimizer = optimizer_for(args.optimizer, model, args.lr, weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / args.steps))
    )
    if isinstance(optimizer, KFAC) and weight_decay:
        outside = [name for name, c in optimizer.coverage().items() if c.block is None]
        print(f"  outside K-FAC's blocks, stepped by Adam: {len(outside)}, as {outside[0]}")
    probes = ["weight_norm", "movement", "effective_lr", "decay_exposure", "jacobian_norm"]
    if isinstance(optimizer, KFAC):
        probes.append("second_order_share")
    every = max(1, args.steps // 10)
    with watch(model, optimizer, every=every, probes=probes, inputs=test_x[:32]) as watched:
        for step in range(args.steps):
            chosen = torch.randint(len(x), (args.batch,))
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if (step + 1) % every == 0:
                print(f"  step {step + 1:4d}  training loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        correct = model(test_x).argmax(1) == test_y
    return watched, correct.float().mean().item()


def main() -> None:
    """Train with and without decay, and say what it did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lr, weight_decay = DEFAULTS[args.optimizer]
    args.lr = lr if args.lr is None else args.lr
    args.weight_decay = weight_decay if args.weight_decay is None else args.weight_decay

    print(f"ViT, {args.optimizer}, weight decay {args.weight_decay:g}")
    decayed, accuracy = train(args, args.weight_decay)
    print("the same without decay")
    plain, plain_accuracy = train(args, 0.0)
    print(f"test accuracy: {accuracy:.1%} with decay, {plain_accuracy:.1%} without\n")
    print(diagnose(decayed, plain))


if __name__ == "__main__":
    main()
