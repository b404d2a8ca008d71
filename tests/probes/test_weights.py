"""Norms, movement, effective learning rate and exposure of the weights."""

import math

import pytest
import torch
from oracle.plain_kfac import KFAC
from oracle.tiny_nets import tiny_net
from torch import nn

from decaylab import probes
from decaylab.errors import DecaylabError
from decaylab.networks import build
from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.laws import exposure_rate


def test_weight_norms_leave_out_biases():
    model, _, _ = tiny_net("residual")
    got = probes.weight_norms(model)
    assert set(got.layers) == {"stem", "inner", "head"}
    squares = 0.0
    for layer in got.layers:
        square = sum(float(w) ** 2 for w in model.get_submodule(layer).weight.detach().flatten())
        assert got.layers[layer] == pytest.approx(math.sqrt(square), rel=1e-12)
        squares += square
    assert got.total == pytest.approx(math.sqrt(squares), rel=1e-12)


def test_update_norm_and_rotation():
    model, _, _ = tiny_net("conv")
    before = probes.snapshot(model)
    old = model[0].weight.detach().clone().flatten()
    with torch.no_grad():
        model[0].weight += 0.3 * torch.randn_like(model[0].weight)
        model[4].weight *= 0.5
    new = model[0].weight.detach().flatten()
    update, rotation = probes.update_norms(model, before), probes.rotations(model, before)
    cosine = float(old @ new) / math.sqrt(float(old @ old) * float(new @ new))
    assert update.layers["0"] == pytest.approx(math.dist(old.tolist(), new.tolist()), rel=1e-12)
    assert rotation.layers["0"] == pytest.approx(math.acos(cosine), rel=1e-10)
    assert update.layers["2"] == rotation.layers["2"] == 0.0  # it did not move
    assert rotation.layers["4"] < 1e-15  # decay alone: shorter, in the same direction
    assert update.layers["4"] == pytest.approx(float(model[4].weight.detach().norm()), rel=1e-12)


def test_a_model_without_layers_has_nothing_to_move():
    model = nn.LayerNorm(4)
    before = probes.snapshot(model)
    assert probes.update_norms(model, before).layers == {}
    assert probes.rotations(model, before).layers == {}


def test_rotation_of_a_tiny_step_is_precise_in_float32():
    model = nn.Linear(1000, 4, bias=False)
    before = probes.snapshot(model)
    u = model.weight.detach().double().flatten()
    with torch.no_grad():
        model.weight += 1e-6 * torch.randn_like(model.weight)
    v = model.weight.detach().double().flatten()
    chord = float((u / u.norm() - v / v.norm()).norm())
    angle = 2 * math.asin(chord / 2)
    assert probes.rotations(model, before).layers[""] == pytest.approx(angle, rel=1e-3)


def test_a_single_number_has_no_direction():
    model = nn.Linear(1, 1, bias=False)
    before = probes.snapshot(model)
    with torch.no_grad():
        model.weight *= 0.9
    assert probes.rotations(model, before).layers == {}
    assert probes.update_norms(model, before).layers.keys() == {""}


class TestEffectiveLearningRate:
    def model(self):
        torch.manual_seed(0)
        return build("vgg11", classes=3, image_size=32, width=0.05)

    @pytest.mark.parametrize(
        ("make", "power"),
        [
            (lambda m: torch.optim.SGD(m.parameters(), lr=0.3), 2),
            (lambda m: torch.optim.Adam(m.parameters(), lr=0.3), 1),
            (lambda m: torch.optim.AdamW(m.parameters(), lr=0.3), 1),
            (lambda m: torch.optim.RMSprop(m.parameters(), lr=0.3), 1),
            (lambda m: KFAC(m, lr=0.3), 0),
        ],
    )
    def test_each_law(self, make, power):
        model = self.model()
        got = probes.effective_learning_rate(model, make(model))
        norms = probes.weight_norms(model).layers
        head = list(norms)[-1]
        assert set(got.layers) == set(norms) - {head}
        for layer, value in got.layers.items():
            assert value == pytest.approx(0.3 / norms[layer] ** power, rel=1e-12)
            assert math.isnan(got.defects[layer])
        assert all(name.startswith("effective_lr/") for name in got.rows())

    def test_with_inputs_the_defect_stands_beside_it(self):
        model = self.model()
        inputs = torch.randn(4, 3, 32, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        got = probes.effective_learning_rate(model, optimizer, inputs)
        assert got.layers
        assert all(0 <= got.defects[layer] < 0.05 for layer in got.layers)
        assert any(name.startswith("invariance/") for name in got.rows())

    def test_layer_and_weight_normalisation(self):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 6, bias=False),
            nn.LayerNorm(6, eps=1e-12),
            nn.ReLU(),
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
            nn.Linear(4, 3),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        got = probes.effective_learning_rate(model, optimizer, torch.randn(8, 5))
        assert set(got.layers) == {"0", "3"}
        direction = model[3].parametrizations.weight.original1
        want = 0.1 / float(direction.detach().square().sum())
        assert got.layers["3"] == pytest.approx(want, rel=1e-6)

    def test_each_layer_has_the_rate_of_its_group(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
        model.append(nn.BatchNorm1d(3).double()).append(nn.Linear(3, 2).double())
        groups = [
            {"params": [model[0].weight], "lr": 0.5},
            {"params": [model[2].weight, model[4].weight]},
        ]
        got = probes.effective_learning_rate(model, torch.optim.SGD(groups, lr=0.1))
        for layer, lr in (("0", 0.5), ("2", 0.1)):
            square = float(model.get_submodule(layer).weight.detach().square().sum())
            assert got.layers[layer] == pytest.approx(lr / square, rel=1e-12)

    def test_an_unknown_optimizer_asks_for_its_law(self):
        model = self.model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3)
        with pytest.raises(DecaylabError, match="LBFGS is not known: say which law"):
            probes.effective_learning_rate(model, optimizer)
        got = probes.effective_learning_rate(model, optimizer, law="kfac")
        assert set(got.layers.values()) == {0.3}

    def test_it_predicts_how_far_one_step_turns(self):
        """Eq. 9: the angle of a small SGD step is effective_lr |W| |grad L(W)| for each layer."""
        model, inputs, labels = tiny_net("bn")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        rate = probes.effective_learning_rate(model, optimizer).layers["0"]
        before, norm = probes.snapshot(model), probes.weight_norms(model).layers["0"]
        nn.functional.cross_entropy(model(inputs), labels).backward()
        gradient = float(model[0].weight.grad.norm())
        optimizer.step()
        angle = probes.rotations(model, before).layers["0"]
        assert angle == pytest.approx(rate * norm * gradient, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02, momentum=0.9), 0.02),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02), 0.002),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02, momentum=0.9, dampening=0.75),
            0.005,
        ),
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.02), 0.002),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
    ],
)
def test_exposure_rate_of_torch_optimizers(make, want):
    optimizer = make(nn.Linear(2, 2).parameters())
    rate = exposure_rate(optimizer, optimizer.param_groups[0])
    assert rate == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("kind", ["decoupled", "independent"])
def test_exposure_rate_is_what_a_step_without_gradient_takes(kind):
    """Measured: weights shrink by exactly that rate where nothing but decay acts."""
    for make in (
        lambda m, g: sgd(g, lr=0.1, momentum=0.9),
        lambda m, g: adam(g, lr=0.1, betas=(0.9, 0.999), eps=1e-8),
        lambda m, g: KFAC(m, lr=0.1, params=g, refresh_every=10**6),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2)).double()
        optimizer = make(model, parameter_groups(model, weight_decay=0.05, decay=kind))
        old = model[0].weight.detach().clone()
        (0 * model(torch.ones(4, 3).double())).sum().backward()
        optimizer.step()
        rate = exposure_rate(optimizer, optimizer.param_groups[0])
        torch.testing.assert_close(model[0].weight, (1 - rate) * old, rtol=1e-12, atol=0)
