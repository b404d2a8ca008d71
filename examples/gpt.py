"""What weight decay does to a small GPT: LayerNorm, tied embedding, the usual AdamW.

    python examples/gpt.py                         # AdamW, half a minute on two cores
    python examples/gpt.py --optimizer kfac-g      # or kfac-f, sgd

It learns to write Python from the sources of the standard library, character by character, once
with and once without decay, both watched; then it says what decay did.
"""

import argparse
import inspect
import math
import textwrap

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decaylab import KFAC, diagnose, watch
from decaylab.probes import Watch

OPTIMIZERS = ("adamw", "sgd", "kfac-f", "kfac-g")
# Learning rate and weight decay, where none is asked for: decay acts over 1 / (lr * wd) steps, and
# a run is short.
DEFAULTS = {
    "adamw": (3e-3, 1.0),
    "sgd": (0.2, 2e-3),
    "kfac-f": (0.03, 0.1),
    "kfac-g": (0.03, 0.1),
}


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
        """[batch, length, width] to the same."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """Tokens [batch, length] to logits [batch, length, characters]."""

    def __init__(self, characters: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next character at each place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))


def standard_library() -> str:
    """Some sources that ship with Python."""
    return "".join(inspect.getsource(module) for module in (argparse, inspect, textwrap))


def optimizer_for(
    name: str, model: nn.Module, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Decay on matrices alone, as is usual."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    curvature = "fisher" if name == "kfac-f" else "gauss-newton"
    return KFAC(
        model,
        lr,
        params=groups,
        curvature=curvature,
        damping=0.1,
        step_scaling="none",
        invert_every=20,
        others_lr=0.01,
    )


def train(args: argparse.Namespace, weight_decay: float) -> tuple[Watch, float]:
    """One training; returns what was watched and the loss on text that was not trained on."""
    torch.manual_seed(args.seed)
    text = standard_library()
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(character) for character in text])
    training, test = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    windows = test[: len(test) // (args.length + 1) * (args.length + 1)].view(-1, args.length + 1)
    windows = windows[:64]

    model = GPT(len(alphabet), args.length, args.width, args.depth)
    optimizer = optimizer_for(args.optimizer, model, args.lr, weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / args.steps))
    )
    if isinstance(optimizer, KFAC) and weight_decay:
        outside = [c for c in optimizer.coverage().values() if c.block is None]
        for reason in sorted({c.explanation for c in outside}):
            print(f"  outside K-FAC's blocks, stepped by Adam: {reason}")
    every = max(1, args.steps // 20)
    inputs = windows[:8, :-1]
    with watch(model, optimizer, every=every, probes="diagnosis", inputs=inputs) as watched:
        for step in range(args.steps):
            starts = torch.randint(len(training) - args.length - 1, (args.batch,))
            batch = torch.stack([training[i : i + args.length + 1] for i in starts.tolist()])
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            watched.log(loss=loss)
            if (step + 1) % max(1, args.steps // 10) == 0:
                print(f"  step {step + 1:4d}  training loss {loss.item():.3f}", flush=True)
        model.eval()
        with torch.no_grad():
            logits = model(windows[:, :-1])
        test_loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        watched.log(test_loss=test_loss)
    return watched, test_loss.item()


def main() -> None:
    """Train with and without decay, and say what it did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lr, weight_decay = DEFAULTS[args.optimizer]
    args.lr = lr if args.lr is None else args.lr
    args.weight_decay = weight_decay if args.weight_decay is None else args.weight_decay

    print(f"GPT, {args.optimizer}, weight decay {args.weight_decay:g}")
    decayed, loss = train(args, args.weight_decay)
    print("the same without decay")
    plain, plain_loss = train(args, 0.0)
    print(f"test loss: {loss:.3f} with decay, {plain_loss:.3f} without\n")
    print(diagnose(decayed, plain))


if __name__ == "__main__":
    main()
