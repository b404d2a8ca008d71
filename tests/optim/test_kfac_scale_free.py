"""Scale-free damping behind the normalisations that see a layer's bias: layer and group norm."""

import contextlib
from functools import partial

import pytest
import torch
from oracle.kfac_runs import EXACT, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import nn
from torch.nn.utils import prune

from decaylab.optim.options import KFACOptions
from decaylab.optim.scale_free import ScaleFree

# added to a variance in float64 it is exactly nothing; torch wants a positive one
EPS = 1e-300
NORMS = {
    "layer": lambda: nn.LayerNorm(6, EPS, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 6, EPS, affine=False),
}


def net(norm: str) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), NORMS[norm](), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("norm", list(NORMS))
def test_held_norms_leave_the_function_as_it_is(norm, frozen, monkeypatch):
    """Such a layer is invariant in its weight and bias together: both are put back, or none.

    Momentum, KL clip and decoupled decay included. A frozen bias stays as it is.
    """
    x, y = random(9, 4), labels_for(9, classes=3)
    options = {"damping": 0.1, "kl_clip": 0.1, "weight_decay": 0.3, "factor_decay": 0.0}

    def trained() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = seeded(partial(net, norm))
        model[0].bias.requires_grad_(not frozen)
        layer, before = model[0], model[0].bias.detach().clone()
        opt = KFAC(model, 0.5, damping_scaling="scale-free", **EXACT, **options)
        assert list(opt.scale_free.norms) == ["0"]
        for _ in range(5):
            train_step(opt, model, x, y)
        assert torch.equal(layer.bias, before) == frozen
        return model(x).detach(), layer.weight.detach().norm(), opt.scale_free.norms["0"]

    held, norm_after, norm_before = trained()
    torch.testing.assert_close(norm_after, norm_before, rtol=1e-12, atol=0)
    if not frozen:  # with a bias that stays, the layer is not invariant
        monkeypatch.setattr(ScaleFree, "held", lambda *_: contextlib.nullcontext())
        free, norm_after, _ = trained()
        assert abs(norm_after / norm_before - 1) > 0.05
        torch.testing.assert_close(held, free, rtol=1e-7, atol=1e-7)


def test_a_layer_that_is_pruned_later_keeps_the_norm_of_its_parameter():
    """What the layer multiplies with is then computed from it, and is not what is trained."""
    x, y = random(9, 4), labels_for(9, classes=3)
    model = seeded(partial(net, "layer"))
    opt = KFAC(model, 0.5, damping_scaling="scale-free", damping=0.1, **EXACT)
    prune.random_unstructured(model[0], "weight", 0.3)
    weight = model[0].weight_orig
    before = weight.detach().clone()
    for _ in range(3):
        train_step(opt, model, x, y)
    torch.testing.assert_close(weight.detach().norm(), before.norm(), rtol=1e-12, atol=0)
    assert not torch.equal(weight, before)
    assert float(opt.scale_free.ratios()["0"]) == pytest.approx(1.0, rel=1e-12)


class Residual(nn.Module):
    """x + layer(norm(x)): the scale of the layer is that of its part in the sum."""

    def __init__(self, norm: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = norm, layer

    def forward(self, x):
        return x + self.layer(self.norm(x))


class Basic(nn.Module):
    """As in a ResNet: every convolution is followed by its batch norm, before the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x):
        return x + self.bn(self.conv(x))


class Written(nn.Module):
    """A forward of its own around a layer and a layer norm: it may do anything with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x + self.layer(x))


def blocks(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(*(Residual(norm(4), nn.Linear(4, 4)) for _ in range(2)), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("build", "guessed"),
    [
        (partial(blocks, nn.LayerNorm), "0.layer"),
        (partial(blocks, nn.BatchNorm1d), "0.layer"),
        (lambda: nn.Sequential(Written(), nn.Linear(4, 3)), "0.layer"),
        (lambda: nn.Sequential(Basic(), nn.Flatten(), nn.Linear(8, 3)), None),
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.LayerNorm(4)), None),
    ],
)
def test_layers_that_a_sum_may_part_from_their_normalisation_are_told(build, guessed):
    """The order of modules does not show it; where nothing can stand between, nothing is said."""
    kfac = partial(KFAC, lr=0.1, damping_scaling="scale-free")
    if guessed is None:
        assert len(kfac(build()).scale_free.norms) == 1
        return
    with pytest.warns(UserWarning, match=f"layer '{guessed}' .*KFACOptions"):
        opt = kfac(build())
    assert list(opt.scale_free.norms) == [guessed]
    named = KFACOptions(invariant=(guessed,))
    assert list(kfac(build(), options=named).scale_free.norms) == [guessed]
    KFAC(build(), 0.1)
