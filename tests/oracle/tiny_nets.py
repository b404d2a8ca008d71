"""Nets of under 200 weights, in float64, on which everything can be computed by plain loops."""

import torch
from torch import Tensor, nn

CLASSES = 3


class Residual(nn.Module):
    """A conv, a residual block with BN, an average pool and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.inner = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.norm(self.inner(x)))
        return self.head(x.mean((2, 3)))


def tiny_net(name: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A net in train mode, a batch of five inputs, and their labels; BN has running statistics."""
    torch.manual_seed(seed)
    image = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    flat = torch.randn(5, 4, dtype=torch.float64)
    nets = {
        "mlp": (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)), flat),
        "conv": (
            nn.Sequential(
                nn.Conv2d(2, 3, 3, stride=2, padding=1),
                nn.ReLU(inplace=True),
                nn.Conv2d(3, 4, 2, bias=False),
                nn.Flatten(),
                nn.Linear(4, CLASSES),
            ),
            image,
        ),
        "bn": (
            nn.Sequential(
                nn.Conv2d(2, 3, 3),
                nn.BatchNorm2d(3, eps=1e-300, affine=False),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(3, CLASSES),
            ),
            image,
        ),
        "residual": (Residual(), image),
    }
    model, inputs = nets[name]
    model = model.double()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn_like(inputs) * 2 + 0.3)
    labels = torch.randint(CLASSES, (len(inputs),))
    assert sum(p.numel() for p in model.parameters()) < 200
    return model, inputs, labels


def train(model: nn.Module, optimizer, inputs: Tensor, labels: Tensor, steps: int) -> None:
    """Steps on one batch."""
    for _ in range(steps):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


NAMES = ["mlp", "conv", "bn", "residual"]
