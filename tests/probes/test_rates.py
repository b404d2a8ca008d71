"""Decay exposure and effective learning rates where optimizers have several kinds of groups."""

import math

import pytest
import torch
from oracle.plain_kfac import KFAC
from torch import nn

from decaylab import probes
from decaylab.optim.laws import exposure_rate
from decaylab.probes import NonFiniteWarning
from decaylab.probes.exposure import Exposure


def normalised_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


@pytest.mark.parametrize(
    ("others", "of_others"), [("sgd", 0.1 * 0.02 / (1 - 0.75)), ("adam", 1e-3 * 0.02)]
)
def test_exposure_of_kfac_under_l2(others, of_others):
    """Momentum sums the term up in K-FAC's and SGD's groups; Adam's average does not."""
    opt = KFAC(normalised_net(), 0.1, weight_decay=0.02, decay="l2", momentum=0.75, others=others)
    rates = {g["law"]: exposure_rate(opt, g) for g in opt.param_groups}
    assert rates == pytest.approx({"kfac": 0.1 * 0.02 / 0.25, others: of_others}, rel=1e-12)


def test_exposure_follows_a_learning_rate_that_is_filled_in_place():
    model, lr = normalised_net(), torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    exposure = Exposure(optimizer)
    for value in (0.5, 0.25, 0.25, 0.125):
        lr.fill_(value)
        exposure.add()
    total = exposure.by_layer(probes.layers_of(model))
    assert total == pytest.approx({"0": 0.1125, "2": 0.1125}, rel=1e-12)


def test_a_layer_that_the_optimizer_does_not_move_has_no_rate():
    model = normalised_net()
    model.append(nn.BatchNorm1d(2).double()).append(nn.Linear(2, 2).double())
    optimizer = torch.optim.SGD([model[2].weight], lr=0.1)
    got = probes.effective_learning_rate(model, optimizer)
    square = float(model[2].weight.detach().square().sum())
    assert got.layers == pytest.approx({"2": 0.1 / square}, rel=1e-12)
    assert (got.law, got.unit) == ("sgd", "lr / weight^2")


def test_rates_of_weights_of_length_one_and_zero():
    """lr at length one, whatever the law; infinite at zero, but for K-FAC's, which has no norm."""
    model = normalised_net()
    with torch.no_grad():
        model[0].weight.zero_()[0, 0] = 1.0
    optimizers = {
        "sgd": torch.optim.SGD(model.parameters(), lr=0.1),
        "adam": torch.optim.Adam(model.parameters(), lr=0.1),
        "kfac": KFAC(model, 0.1),
    }
    for optimizer in optimizers.values():
        assert probes.effective_learning_rate(model, optimizer).layers == {"0": 0.1}
    with torch.no_grad():
        model[0].weight.zero_()
    for name in ("sgd", "adam"):
        with pytest.warns(NonFiniteWarning, match="effective_lr is not finite: layer '0'"):
            got = probes.effective_learning_rate(model, optimizers[name])
        assert got.layers == {"0": math.inf}
    assert probes.effective_learning_rate(model, optimizers["kfac"]).layers == {"0": 0.1}


def test_a_weight_that_was_zero_has_no_direction_to_turn_from():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.zero_()
    before = probes.snapshot(model)
    with torch.no_grad():
        model[0].weight[0, 0] = 3.0
        old = model[1].weight.clone()
        model[1].weight.copy_(torch.stack([-old[:, 1], old[:, 0]], 1))  # each row by 90 degrees
    angles = probes.rotations(model, before).layers
    moved = probes.update_norms(model, before).layers
    assert angles == {"1": pytest.approx(math.pi / 2, rel=1e-12)}
    assert moved["0"] == 3.0


def test_the_gap_of_a_single_row_has_no_error():
    model, x, y = normalised_net(), torch.randn(5, 3, dtype=torch.float64), torch.zeros(5).long()
    got = probes.generalization_gap(model, [(x[:4], y[:4])], [(x[4:], y[4:])])
    model.eval()
    losses = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    assert got.total == pytest.approx(float(losses[4] - losses[:4].mean()), rel=1e-12)
    assert math.isnan(got.total_error)


def test_a_method_of_another_library_does_not_decide_the_law():
    model = normalised_net()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "law": "theirs"}], lr=0.1)
    assert probes.effective_learning_rate(model, optimizer).law == "sgd"


def test_exposure_follows_every_setting_that_it_depends_on():
    """Each changed in the middle of a run; the sum is that of `exposure_rate` at each step."""
    model = normalised_net()
    kfac = KFAC(model, 0.5, weight_decay=0.1, momentum=0.5)
    torchs = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1, momentum=0.5)
    adam = torch.optim.Adam(model.parameters(), lr=0.5, weight_decay=0.1)
    changes = [
        (kfac, {"decay": "independent"}, 0.5 * 0.1, 0.1),
        (kfac, {"decay": "none"}, 0.1, 0.0),
        (kfac, {"decay": "l2"}, 0.0, 0.5 * 0.1 / 0.5),
        (torchs, {"momentum": 0.0}, 0.5 * 0.1 / 0.5, 0.5 * 0.1),
        (torchs, {"momentum": 0.75, "dampening": 0.5}, 0.5 * 0.1, 0.5 * 0.1 * 0.5 / 0.25),
        (torchs, {"dampening": 0.0}, 0.1, 0.5 * 0.1 / 0.25),
        (torchs, {"weight_decay": 0.2}, 0.5 * 0.1 / 0.25, 0.5 * 0.2 / 0.25),
        (adam, {"lr": 0.25}, 0.5 * 0.1, 0.25 * 0.1),
    ]
    for optimizer, change, before, after in changes:
        exposure = Exposure(optimizer)
        exposure.add()
        for group in optimizer.param_groups:
            group |= change
        exposure.add()
        found = exposure.by_layer(probes.layers_of(model))
        assert found == pytest.approx({"0": before + after, "2": before + after}, rel=1e-12)


def test_dampening_counts_only_with_a_momentum():
    """Torch's SGD reads it nowhere else."""
    model = normalised_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1, dampening=0.5)
    rate = exposure_rate(optimizer, optimizer.param_groups[0])
    assert rate == pytest.approx(0.05, rel=1e-12)


def test_a_group_without_a_step_has_no_exposure_yet():
    model = normalised_net()
    first, last = (list(model[i].parameters()) for i in (0, 2))
    optimizer = torch.optim.SGD(first, lr=0.5, weight_decay=0.1)
    exposure = Exposure(optimizer)
    assert exposure.by_layer(probes.layers_of(model)) == {}
    exposure.add()
    optimizer.add_param_group({"params": last})
    assert exposure.by_layer(probes.layers_of(model)) == pytest.approx({"0": 0.05}, rel=1e-12)
