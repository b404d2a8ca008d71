"""README's loop as a whole script: AdamW on the digits that ship with scikit-learn, and a verdict.

A fifth of the training labels are wrong, as labels often are: that is where decay helps. Run it as
`python first_verdict.py`; it takes half a minute on a CPU. To try it on your own network, replace
`digits`, `build` and the loop by yours.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from decaylab import diagnose, watch
from decaylab.probes import Watch


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [N, 64] and labels, a fifth of them wrong; test images and labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train_y = y[360:].clone()
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(train_y), generator=generator) < 0.2
    train_y[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    return x[360:], train_y, x[:360], y[:360]


def build() -> nn.Module:
    """A network with two hidden layers that LayerNorm normalises."""
    torch.manual_seed(0)
    parts = {
        "hidden1": nn.Linear(64, 64),
        "norm1": nn.LayerNorm(64),
        "relu1": nn.ReLU(),
        "hidden2": nn.Linear(64, 64),
        "norm2": nn.LayerNorm(64),
        "relu2": nn.ReLU(),
        "head": nn.Linear(64, 10),
    }
    return nn.Sequential(OrderedDict(parts))


def batches(x: Tensor, y: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Random batches of 64."""
    chosen = [torch.randint(len(x), (64,)) for _ in range(steps)]
    return [(x[places], y[places]) for places in chosen]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The part of the images that the model classifies correctly."""
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def train(weight_decay: float, folder: str, steps: int = 600) -> Watch:
    """Train with some decay; all that is recorded is also written to a folder."""
    train_x, train_y, test_x, test_y = digits()
    model, loader = build(), batches(train_x, train_y, steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    with watch(
        model, optimizer, every=20, probes="diagnosis", inputs=test_x[:64], folder=folder
    ) as watched:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            watched.log(loss=loss)
        watched.log(test_accuracy=accuracy(model, test_x, test_y))
    return watched


if __name__ == "__main__":
    print(diagnose(train(0.5, "records/decayed"), train(0.0, "records/plain")))
