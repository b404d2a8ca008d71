"""Padded rows: of the positions that count one row per example; layers that have no positions."""

import pytest
import torch
from oracle.plain_kfac import KFAC
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


class Calls(nn.Module):
    """Logits of one layer, or the sum of what two calls of it give."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.layer, self.twice = nn.Linear(3, 5), twice

    def forward(self, x: Tensor) -> Tensor:
        logits = self.layer(x)
        return logits + self.layer(x.square()) if self.twice else logits


@pytest.mark.parametrize("twice", [False, True])
def test_an_example_is_the_mean_of_its_counted_positions(twice):
    """Empirical Fisher of a linear layer: g = p - y is known, and so are A, G and T."""
    torch.manual_seed(0)
    model = Calls(twice).double()
    x = torch.randn(*MASK.shape, 3, dtype=torch.float64)
    labels = torch.randint(5, MASK.shape)
    opt = KFAC(
        model,
        0.1,
        curvature="empirical-fisher",
        reduction="sum",
        sharing="reduce",
        logits="observed",
    )
    logits = model(x)
    opt.observe(logits, mask=MASK)
    cross_entropy(logits[MASK], labels[MASK], reduction="sum").backward()
    opt.step()

    A, G, examples = torch.zeros(4, 4).double(), torch.zeros(5, 5).double(), 0
    for i, kept in enumerate(MASK):
        if not kept.any():
            continue  # nothing of this example is there
        examples += 1
        seen = torch.cat([x[i][kept], x[i][kept].square()]) if twice else x[i][kept]
        a = torch.cat([seen.mean(0), torch.ones(1).double()])
        g = (logits[i][kept].softmax(-1) - one_hot(labels[i][kept], 5)).detach().sum(0)
        g = 2 * g if twice else g
        A += a[:, None] * a
        G += g[:, None] * g
    rows = int(MASK.sum())
    found = opt.factors()["layer"]
    torch.testing.assert_close(found.A, A / examples, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.T * found.S, G / rows, rtol=1e-12, atol=1e-12)
    assert float(found.T) == pytest.approx(examples / rows, rel=1e-12)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_layer_without_positions_sees_every_example(sharing):
    """Its inputs have no axis of positions that the mask could belong to."""

    class Context(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.context, self.token = nn.Linear(3, 5), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.token(x) + self.context(x[:, 0])[:, None]

    torch.manual_seed(0)
    model, x = Context().double(), torch.randn(*MASK.shape, 3, dtype=torch.float64)
    opt = KFAC(model, 0.0, sharing=sharing, logits="observed")
    logits = model(x)
    opt.observe(logits, mask=MASK)
    logits[MASK].square().sum().backward()
    opt.step()
    a = torch.cat([x[:, 0], torch.ones(4, 1).double()], 1)
    found = opt.factors()["context"]
    torch.testing.assert_close(found.A, a.mT @ a / 4, rtol=1e-12, atol=1e-12)
    assert float(found.T) == pytest.approx(4 / int(MASK.sum()))


class Mixed(nn.Module):
    """Each row of the logits is made of the positions that its row of `weights` names."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(3, 5), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.weights @ self.layer(x)


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton", "empirical-fisher"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_positions_that_counted_rows_are_made_of_count_too(sharing, curvature):
    """As tokens whose own label is left out (those not masked in BERT's task, a prompt) do.

    Only the first row counts: it is made of positions 0, 2 and 3. Position 1 is padding.
    """
    torch.manual_seed(0)
    weights = torch.tensor([[1.0, 0, 2, -1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1]]).double()
    model, x = Mixed(weights).double(), torch.randn(2, 4, 3, dtype=torch.float64)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[:, 0] = True
    opt = KFAC(model, 0.0, sharing=sharing, curvature=curvature, logits="observed")
    logits = model(x)
    opt.observe(logits, mask=mask)
    cross_entropy(logits[mask], torch.tensor([1, 2])).backward()
    opt.step()
    taking_part = x[:, [0, 2, 3]]
    vectors = taking_part.mean(1) if sharing == "reduce" else taking_part.flatten(0, 1)
    a = torch.cat([vectors, torch.ones(len(vectors), 1).double()], 1)
    found = opt.factors()["layer"]
    torch.testing.assert_close(found.A, a.mT @ a / len(a), rtol=1e-12, atol=1e-12)
    assert float(found.T) == pytest.approx(len(a) / 2)
