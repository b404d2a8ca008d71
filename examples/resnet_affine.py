"""What weight decay does to a ResNet whose batch norm has scales and shifts, on digits.

    python examples/resnet_affine.py                         # SGD, half a minute on two cores
    python examples/resnet_affine.py --optimizer kfac-g      # or kfac-f, adamw

It trains once with and once without decay, both watched; then it says what decay did. The learnt
scales do not matter to invariance: a batch norm's output still does not depend on the scale of the
convolution before it.
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
DEFAULTS = {"adamw": (3e-3, 1.0), "sgd": (0.1, 5e-3), "kfac-f": (0.03, 0.1), "kfac-g": (0.03, 0.1)}


class Block(nn.Module):
    """Two convolutions, each behind it a batch norm, beside a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, 1, 8, 8] to logits [batch, 10]; `depth` blocks at each of two resolutions."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks = [Block(width, width, 1) for _ in range(depth)]
        blocks += [Block(width, 2 * width, 2)]
        blocks += [Block(2 * width, 2 * width, 1) for _ in range(depth - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of an image's class."""
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        return self.head(x.mean((2, 3)))


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
        damping=1e-2,
        kl_clip=1e-2,
        invert_every=20,
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
    model = ResNet(args.width, args.depth)
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
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lr, weight_decay = DEFAULTS[args.optimizer]
    args.lr = lr if args.lr is None else args.lr
    args.weight_decay = weight_decay if args.weight_decay is None else args.weight_decay

    print(f"ResNet, {args.optimizer}, weight decay {args.weight_decay:g}")
    decayed, accuracy = train(args, args.weight_decay)
    print("the same without decay")
    plain, plain_accuracy = train(args, 0.0)
    print(f"test accuracy: {accuracy:.1%} with decay, {plain_accuracy:.1%} without\n")
    print(diagnose(decayed, plain))


if __name__ == "__main__":
    main()
