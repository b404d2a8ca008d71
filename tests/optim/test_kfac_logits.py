"""Logits: with the classes last, of the last pass, of layers that K-FAC can see."""

import pytest
import torch
import torch.nn.functional as F
from oracle.kfac_runs import labels_for, random, seeded
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.utils.checkpoint import checkpoint

from decaylab.errors import BadValue, Conflict, Lacks, Mismatch

CLASSES = 3


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def batch(seed: int = 0):
    return random(8, 4, seed=seed)


# -- several calls, heads and axes --


def test_reduce_with_calls_of_different_numbers_of_examples_is_refused():
    class Anchored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.head(self.body(x) - self.body(x[:1]))

    model = seeded(Anchored)
    opt = KFAC(model, 0.1, sharing="reduce")
    with refuses(Mismatch, what="number of examples in one forward pass"):
        model(batch())
    opt.detach()


def test_a_mask_is_compared_with_the_rows_of_every_head():
    model = seeded(net)
    opt = KFAC(model, 0.1, logits="observed")
    logits = model(batch())
    heads = [logits, logits[:, None].expand(8, 8, CLASSES)]
    with refuses(Mismatch, values={"the mask": [8], "the rows": [8, 8]}):
        opt.observe(heads, mask=torch.ones(8, dtype=torch.bool))


def test_logits_with_the_classes_where_a_convolution_puts_them():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, CLASSES, 1)))
    x, y = random(2, 2, 5, 5), labels_for(2, 5, 5, classes=CLASSES)
    opt = KFAC(model, 0.1)
    with refuses(BadValue, name="the logits' axis of classes", value=1):
        model(x)
    opt.detach()
    opt = KFAC(model, 0.1, logits="observed")
    logits = model(x)
    opt.observe(logits.movedim(1, -1))
    F.cross_entropy(logits, y).backward()
    opt.step()
    assert float(opt.factors()["2"].T) == 1


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_enlarged_logits_with_the_classes_where_a_convolution_puts_them(mode):
    """As segmentation nets return them."""
    enlarge = nn.Upsample(scale_factor=2, mode=mode)
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, CLASSES, 1), enlarge))
    opt = KFAC(model, 0.1)
    with refuses(BadValue, name="the logits' axis of classes", value=1):
        model(random(2, 2, 5, 5))
    opt.detach()


# -- what is handed to `observe` --


@pytest.mark.parametrize("shape", ["other classes", "several heads"])
def test_logits_handed_over_behind_a_model_that_returned_another_tensor(shape):
    model, head = seeded(net), seeded(lambda: nn.Linear(CLASSES, 2))
    opt = KFAC(model, 0.1)
    features = model(batch())
    logits = head(features) if shape == "other classes" else [features, features * 2]
    with refuses(Mismatch, what="number of classes"):
        opt.observe(logits)


def test_logits_of_several_passes_are_handed_over_one_by_one():
    model = seeded(net)
    opt = KFAC(model, 0.1, logits="observed")
    heads = [model(batch(seed)) for seed in range(2)]
    with refuses(Lacks, owner="the graph of some of the logits"):
        opt.observe(heads)


def test_a_model_that_moved_to_another_device():
    model = seeded(net)
    opt = KFAC(model, 0.1, logits="observed")
    logits = model(batch())
    with refuses(Mismatch, what="device"):
        opt.observe(logits.to("meta"))


@pytest.mark.parametrize("logits", ["output", "observed"])
def test_a_model_all_of_which_is_in_a_reentrant_checkpoint(logits):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=True)

    model = seeded(Checkpointed)
    opt = KFAC(model, 0.1, logits=logits)
    hidden = "reentrant activation checkpointing of layer 'body.0'"
    with refuses(Conflict, settings=["K-FAC", hidden]):
        opt.observe(model(batch().requires_grad_()))


def test_a_single_row_is_handed_over_as_the_error_says():
    model, inputs, label = nn.Linear(4, 3), torch.randn(4), torch.tensor(1)
    optimizer = KFAC(model)
    with refuses(BadValue, name="the logits") as refused:
        model(inputs)
    assert "a single row as logits[None]" in str(refused.value)
    optimizer = KFAC(model, logits="observed")
    logits = model(inputs)
    optimizer.observe(logits[None])
    nn.functional.cross_entropy(logits, label).backward()
    optimizer.step()
    [factors] = optimizer.factors().values()
    assert factors.A.shape == (5, 5)
    assert torch.equal(factors.A[-1, :4], inputs)
