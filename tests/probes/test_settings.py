"""`layer_settings`, against the numbers that the optimizer was built with."""

import pytest
import torch
from oracle.formulas import Lion
from oracle.plain_kfac import KFAC
from torch import nn

import decaylab
from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam
from decaylab.optim.laws import law_for, law_of
from decaylab.optim.options import KFACOptions
from decaylab.probes.layers import layers_of
from decaylab.probes.settings import layer_settings
from decaylab.records import LayerSettings


def net() -> nn.Sequential:
    """Layer 0 is scale-invariant, layer 3 is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def settings(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, LayerSettings]:
    return layer_settings([optimizer], layers_of(model))


FIRST = {"invariant": True, "size": 12}
LAST = {"invariant": False, "role": "head", "size": 8}


def test_sgd():
    model = net()
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.1, "momentum": 0.5, "dampening": 0.25},
        {"params": model[3].parameters(), "lr": torch.tensor(0.75)},
    ]
    found = settings(torch.optim.SGD(groups, lr=0.5), model)
    assert found["3"] == LayerSettings("SGD", "sgd", 0.75, momentum=0.0, **LAST)
    assert found["0"] == LayerSettings(
        "SGD", "sgd", 0.5, "l2", 0.1, momentum=0.5, dampening=0.25, **FIRST
    )
    assert found["1"] == LayerSettings(stepped=False, role="gain", size=4)


def test_dampening_without_momentum_is_none():
    """Torch reads it only where there is a momentum."""
    model = net()
    found = settings(torch.optim.SGD(model.parameters(), lr=0.5, dampening=0.5), model)
    assert found["0"].dampening is None


@pytest.mark.parametrize("outside", [False, True])
def test_adam(outside):
    """Decay by torch's AdamW, and by our own hook."""
    model = net()
    if outside:
        groups = parameter_groups(model, weight_decay=0.125, decay="independent")
        optimizer, kind = adam(groups, lr=0.5, betas=(0.75, 0.875)), "independent"
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.5, betas=(0.75, 0.875), weight_decay=0.125
        )
        kind = "decoupled"
    name = type(optimizer).__name__
    assert settings(optimizer, model)["0"] == LayerSettings(
        name, "adam", 0.5, kind, 0.125, beta1=0.75, beta2=0.875, eps=1e-8, **FIRST
    )


@pytest.mark.parametrize("others", ["adam", "sgd"])
def test_kfac_and_what_it_leaves_to_others(others):
    model = net()
    optimizer = KFAC(
        model,
        0.5,
        weight_decay=0.125,
        momentum=0.75,
        damping=0.25,
        damping_scaling="scale-free",
        kl_clip=0.5,
        refresh_every=3,
        invert_every=6,
        factor_decay=0.875,
        others=others,
        others_lr=0.0625,
        options=KFACOptions(others_betas=(0.5, 0.625)),
    )
    decay = {"decay": "decoupled", "weight_decay": 0.125}
    kfac = {"optimizer": "KFAC", "law": "kfac", "lr": 0.5, **decay, "momentum": 0.75}
    kfac |= {"damping": 0.25, "curvature": "fisher", "kl_clip": 0.5}
    kfac |= {"factor_decay": 0.875, "refresh_every": 3, "invert_every": 6}
    found = settings(optimizer, model)
    assert found["0"] == LayerSettings(**kfac, scale_free=True, **FIRST)
    assert found["3"] == LayerSettings(**kfac, scale_free=False, **LAST)

    excluded = KFAC(
        model,
        0.5,
        weight_decay=0.125,
        momentum=0.75,
        others=others,
        others_lr=0.0625,
        options=KFACOptions(exclude=("3",), others_betas=(0.5, 0.625)),
    )
    own = {"momentum": 0.75, "law": "sgd"}
    if others == "adam":
        own = {"beta1": 0.5, "beta2": 0.625, "eps": 1e-8, "law": "adam"}
    found = settings(excluded, model)["3"]
    assert found == LayerSettings("KFAC", lr=0.0625, **decay, **own, **LAST)


def test_the_steps_of_kfacs_defaults_have_a_set_length():
    """Their length does not depend on the norm, and the damping is relative to the curvature."""
    model = net()
    found = settings(decaylab.KFAC(model), model)["0"]
    assert (found.step_rms, found.scale_free) == (0.2, True)
    assert law_for(found).norm_power == 1
    assert found.nesterov is None


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_spectral_steps_have_nesterovs_momentum(momentum):
    model = net()
    optimizer = decaylab.KFAC(model, step_scaling="spectral", momentum=momentum)
    found = settings(optimizer, model)["0"]
    assert found.nesterov == (True if momentum else None)
    law = law_of(optimizer, optimizer.param_groups[0])
    assert law_for(found).correlation() == law.correlation()


def test_a_law_that_is_not_known_and_a_layer_that_is_not_held():
    model = net()
    optimizer = torch.optim.LBFGS(model[0].parameters(), lr=0.5)  # steps with a closure only
    found = settings(optimizer, model)
    assert found["3"] == LayerSettings(stepped=False, **LAST)
    assert found["0"] == LayerSettings("LBFGS", lr=0.5, momentum=0.0, **FIRST)


def test_both_betas_of_lion():
    model = nn.Sequential(nn.Linear(3, 4))
    found = settings(Lion(model.parameters(), lr=0.1, betas=(0.8, 0.95)), model)["0"]
    assert (found.law, found.beta1, found.beta2) == ("lion", 0.8, 0.95)
    assert law_for(found).beta2 == 0.95


def test_several_optimizers_and_embeddings():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    muon = torch.optim.SGD(model[1].parameters(), lr=0.5)
    rest = torch.optim.AdamW(model[0].parameters(), lr=0.25)
    found = layer_settings([muon, rest], layers_of(model))
    assert {k: (own.optimizer, own.lr, own.role) for k, own in found.items()} == {
        "0": ("AdamW", 0.25, "embedding"),
        "1": ("SGD", 0.5, "head"),
    }


def test_a_group_that_says_it_is_kfac_in_another_optimizer():
    """Its law is K-FAC's; a damping is not known."""
    model = net()
    groups = [{"params": list(model.parameters()), "law": "kfac"}]
    found = settings(torch.optim.SGD(groups, lr=0.5), model)["0"]
    assert found.law == "kfac"
    assert (found.damping, found.scale_free, found.refresh_every) == (None, None, None)


def test_frozen_layers():
    model = nn.Sequential(net(), nn.Linear(2, 2), nn.LSTM(2, 3))

    def frozen(given: nn.Module = model) -> set[str]:
        found = settings(torch.optim.SGD(model.parameters(), lr=0.5), given)
        return {layer for layer, own in found.items() if own.frozen}

    assert frozen() == set()
    model[0][0].weight.requires_grad_(False)  # its bias still moves: the weight does not
    model[0][1].requires_grad_(False)  # a normalisation is no layer
    model[1].bias.requires_grad_(False)
    model[2].weight_ih_l0.requires_grad_(False)  # one of several weights, each a layer
    assert frozen() == {"0.0", "2.weight_ih_l0"}
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    assert frozen(torch.compile(model, backend="eager")) == {"0.0", "0.3", "1", "2.weight_ih_l0"}


def test_what_a_step_keeps_of_the_second_moment():
    for build, more, expected in (
        (torch.optim.RMSprop, {"alpha": 0.75}, 0.75),
        (torch.optim.Adadelta, {"rho": 0.625}, 0.625),
        (torch.optim.Adagrad, {}, 1.0),
        (torch.optim.NAdam, {"betas": (0.5, 0.875)}, 0.875),
        (torch.optim.Adamax, {"betas": (0.5, 0.875)}, None),  # of a maximum
        (torch.optim.SGD, {"momentum": 0.5}, None),
    ):
        model = net()
        optimizer = build(model.parameters(), lr=0.5, **more)
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        found = settings(optimizer, model)["0"]
        assert found.beta2 == expected
        assert (found.eps is not None) is (expected is not None)


def test_a_state_that_is_no_mapping_is_none_of_ours():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = settings(optimizer, model)
    for parameter in model.parameters():
        optimizer.state[parameter] = torch.ones(2)
    assert settings(optimizer, model) == before
