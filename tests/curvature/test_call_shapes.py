"""Layers that are called with one example without a batch axis, or with batches of other sizes."""

import pytest
import torch
from oracle.plain_kfac import KFAC
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from decaylab.curvature.products import curvature_product, exact_traces


class Single(nn.Module):
    """A net over one image [C, H, W], with or without an axis of one example in front."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.conv, self.fc, self.batched = nn.Conv2d(2, 3, 2, padding=1), nn.Linear(3, 4), batched

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image[None] if self.batched else image).tanh()
        return self.fc(x.mean((-2, -1))).view(1, 4)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_one_example_without_a_batch_axis_is_a_batch_of_one(sharing):
    factors = []
    for batched in (False, True):
        torch.manual_seed(0)
        model, image = Single(batched).double(), torch.randn(2, 5, 5, dtype=torch.float64)
        opt = KFAC(model, 0.1, outputs="exact", sharing=sharing)
        cross_entropy(model(image), torch.tensor([2])).backward()
        opt.step()
        factors.append(opt.factors())
    for name, want in factors[1].items():
        for part in ("A", "S", "T"):
            torch.testing.assert_close(getattr(factors[0][name], part), getattr(want, part))


class Prototypes(nn.Module):
    """Embeds the examples and two prototypes with one layer: batches of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.register_buffer("prototypes", torch.randn(2, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) @ self.embed(self.prototypes).mT


def test_calls_with_different_numbers_of_examples():
    """Every row of every call counts: A is their mean, G = T S their sum over the logits' rows."""
    torch.manual_seed(0)
    model = Prototypes().double()
    x, labels = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    opt = KFAC(model, 0.0, curvature="empirical-fisher", reduction="sum")
    logits = model(x)
    cross_entropy(logits, labels, reduction="sum").backward()
    opt.step()
    with torch.no_grad():
        at_logits = logits.softmax(-1) - one_hot(labels, 2)
        g = torch.cat([at_logits @ model.embed(model.prototypes), at_logits.mT @ model.embed(x)])
        rows = torch.cat([x, model.prototypes])
        a = torch.cat([rows, torch.ones(7, 1).double()], 1)
    found = opt.factors()["embed"]
    torch.testing.assert_close(found.A, a.mT @ a / 7, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.T * found.S, g.mT @ g / 5, rtol=1e-12, atol=1e-12)
    assert float(found.T) == pytest.approx(7 / 5)


def test_the_empirical_fisher_of_tokens_as_a_matrix():
    """Logits [examples, tokens, classes]: one outer product for each token, averaged over all."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3, bias=False).double()
    x, labels = torch.randn(2, 4, 2, dtype=torch.float64), torch.randint(3, (2, 4))
    matrix = torch.zeros(6, 6, dtype=torch.float64)
    for row, label in zip(x.flatten(0, 1), labels.flatten(), strict=True):
        loss = cross_entropy(model(row), label)
        gradient = torch.autograd.grad(loss, model.weight)[0].flatten()
        matrix += gradient[:, None] * gradient / 8
    direction = torch.randn(3, 2, dtype=torch.float64)
    kind = {"curvature": "empirical-fisher", "targets": labels}
    got = curvature_product(model, x, {"weight": direction}, **kind)["weight"]
    torch.testing.assert_close(got.flatten(), matrix @ direction.flatten(), rtol=1e-12, atol=1e-14)
    trace = exact_traces(model, x, **kind)["weight"]
    torch.testing.assert_close(trace, matrix.trace(), rtol=1e-12, atol=0)
