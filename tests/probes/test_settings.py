"""What `settings` says of an optimizer, against the numbers that the optimizer was built with."""

import pytest
import torch
from torch import nn

from decaylab.optim.decay import DECAYS, parameter_groups
from decaylab.optim.first_order import adam
from decaylab.optim.kfac import KFAC, KFACOptions
from decaylab.probes.settings import frozen_layers, settings
from decaylab.probes.weights import layers_of


def net() -> nn.Sequential:
    """Layer 0 is scale-invariant, layer 3 is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def of_layer(found: dict[str, float], layer: str) -> dict[str, float]:
    """Without prefix and layer."""
    ends = f"/{layer}"
    assert all(name.startswith("setting_") for name in found)
    return {k.removeprefix("setting_").removesuffix(ends): v for k, v in found.items() if ends in k}


def test_sgd():
    model = net()
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.1, "momentum": 0.5, "dampening": 0.25},
        {"params": model[3].parameters(), "lr": torch.tensor(0.75)},
    ]
    found = settings(torch.optim.SGD(groups, lr=0.5), layers_of(model))
    plain = {"decay": float(DECAYS.index("none")), "weight_decay": 0.0, "momentum": 0.0}
    assert of_layer(found, "3") == {"lr": 0.75, **plain, "power": 2.0, "invariant": 0.0}
    assert of_layer(found, "0") == {
        "lr": 0.5,
        "decay": float(DECAYS.index("l2")),
        "weight_decay": 0.1,
        "momentum": 0.5,
        "dampening": 0.25,
        "power": 2.0,
        "invariant": 1.0,
    }


def test_dampening_without_momentum_is_none():
    """Torch reads it only where there is a momentum."""
    model = net()
    found = settings(torch.optim.SGD(model.parameters(), lr=0.5, dampening=0.5), layers_of(model))
    assert "setting_dampening/0" not in found


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
    assert of_layer(settings(optimizer, layers_of(model)), "0") == {
        "lr": 0.5,
        "decay": float(DECAYS.index(kind)),
        "weight_decay": 0.125,
        "beta1": 0.75,
        "beta2": 0.875,
        "eps": 1e-8,
        "power": 1.0,
        "invariant": 1.0,
    }


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
        refresh_every=3,
        invert_every=6,
        factor_decay=0.875,
        others=others,
        others_lr=0.0625,
        options=KFACOptions(others_betas=(0.5, 0.625)),
    )
    decay = {"decay": float(DECAYS.index("decoupled")), "weight_decay": 0.125}
    kfac = {"lr": 0.5, **decay, "momentum": 0.75, "power": 0.0, "damping": 0.25}
    memory = {"factor_decay": 0.875, "refresh_every": 3.0, "invert_every": 6.0}
    found = settings(optimizer, layers_of(model))
    assert of_layer(found, "0") == {**kfac, **memory, "scale_free": 1.0, "invariant": 1.0}
    assert of_layer(found, "3") == {**kfac, **memory, "scale_free": 0.0, "invariant": 0.0}

    excluded = KFAC(
        model,
        0.5,
        weight_decay=0.125,
        momentum=0.75,
        others=others,
        others_lr=0.0625,
        options=KFACOptions(exclude=("3",), others_betas=(0.5, 0.625)),
    )
    own = {"momentum": 0.75, "power": 2.0}
    if others == "adam":
        own = {"beta1": 0.5, "beta2": 0.625, "eps": 1e-8, "power": 1.0}
    found = of_layer(settings(excluded, layers_of(model)), "3")
    assert found == {"lr": 0.0625, **decay, **own, "invariant": 0.0}


def test_a_law_that_is_not_known_and_a_layer_that_is_not_held():
    model = net()
    optimizer = torch.optim.LBFGS(model[0].parameters(), lr=0.5)  # steps with a closure only
    found = settings(optimizer, layers_of(model))
    assert of_layer(found, "3") == {"moved": 0.0, "invariant": 0.0}
    first = of_layer(found, "0")
    assert (first["lr"], first["momentum"], first["invariant"]) == (0.5, 0.0, 1.0)
    assert not {"power", "moved", "damping"} & first.keys()


def test_a_group_that_says_it_is_kfac_in_another_optimizer():
    """Its law is K-FAC's; a damping is not known."""
    model = net()
    groups = [{"params": list(model.parameters()), "law": "kfac"}]
    found = of_layer(settings(torch.optim.SGD(groups, lr=0.5), layers_of(model)), "0")
    assert found["power"] == 0.0
    assert not {"damping", "scale_free", "refresh_every"} & found.keys()


def test_frozen_layers():
    model = nn.Sequential(net(), nn.Linear(2, 2), nn.LSTM(2, 3))
    assert frozen_layers(model) == {}
    model[0][0].weight.requires_grad_(False)  # its bias still moves: the weight does not
    model[0][1].requires_grad_(False)  # a normalisation is no layer
    model[1].bias.requires_grad_(False)
    model[2].weight_ih_l0.requires_grad_(False)  # one of several weights
    assert frozen_layers(model) == {"setting_frozen/0.0": 1.0}
    model.requires_grad_(False)
    frozen = {f"setting_frozen/{name}": 1.0 for name in ("0.0", "0.3", "1", "2")}
    assert frozen_layers(torch.compile(model, backend="eager")) == frozen


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
        found = of_layer(settings(optimizer, layers_of(model)), "0")
        assert found.get("beta2") == expected
        assert ("eps" in found) is (expected is not None)


def test_a_state_that_is_no_mapping_is_none_of_ours():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = settings(optimizer, layers_of(model))
    for parameter in model.parameters():
        optimizer.state[parameter] = torch.ones(2)
    assert settings(optimizer, layers_of(model)) == before
