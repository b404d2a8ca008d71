"""The generalization gap of sequences, padding and losses of one's own."""

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.nn import functional as F

from decaylab import probes
from decaylab.errors import BadValue, Lacks

CLASSES = 4


def tagger():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, CLASSES)).double()


def tokens(rows, length):
    return torch.randint(9, (rows, length)), torch.randint(CLASSES, (rows, length))


def mean_loss(model, batch):
    """By a loop over positions; padding has no loss."""
    x, y = batch
    losses = [
        -model(t[None])[0].log_softmax(0)[target]
        for t, target in zip(x.flatten(), y.flatten(), strict=True)
        if target >= 0
    ]
    return float(torch.stack(losses).mean().detach())


@pytest.mark.parametrize("length", [3, CLASSES])  # as many positions as classes: both fit torch
@pytest.mark.parametrize("padded", [False, True])
def test_sequences(length, padded):
    model = tagger()
    train, test = tokens(6, length), tokens(2, length)
    if padded:
        train[1][:, 1] = -100
    got = probes.generalization_gap(model, [train], [test])
    want = mean_loss(model, test) - mean_loss(model, train)
    assert got.total == pytest.approx(want, rel=1e-10)


def test_targets_that_are_probabilities_or_images():
    model = tagger()
    x, y = tokens(6, CLASSES)
    soft = F.one_hot(y, CLASSES).double()
    got = probes.generalization_gap(model, [(x, soft)], [(x, y)])
    assert got.total == pytest.approx(0.0, abs=1e-12)
    assert got.total_error > 0
    images = nn.Conv2d(2, CLASSES, 1).double()
    x, y = torch.randn(2, 2, 3, 3).double(), torch.randint(CLASSES, (2, 3, 3))
    other = (y + 1) % CLASSES
    want = F.cross_entropy(images(x), other) - F.cross_entropy(images(x), y)
    got = probes.generalization_gap(images, [(x, y)], [(x, other)])
    assert got.total == pytest.approx(float(want.detach()), rel=1e-10)


def test_a_loss_that_is_a_mean_already_and_batches_of_padding_alone():
    model, batch = tagger(), tokens(6, 3)
    with refuses(BadValue, name="the loss of a batch"):
        probes.generalization_gap(
            model, [batch], [batch], loss=lambda z, y: F.cross_entropy(z.mT, y)
        )
    nothing = batch[0], torch.full_like(batch[1], -100)
    with refuses(Lacks, owner="the test set"):
        probes.generalization_gap(model, [batch], [nothing])
