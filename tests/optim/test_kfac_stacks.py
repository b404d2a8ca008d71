"""Layers of one shape are stacked, and inverted in parts of a stack: each keeps its own place."""

import copy

import pytest
import torch
from oracle.kfac_runs import cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import nn

from decaylab.optim.kfac_state import curvature_state
from decaylab.optim.options import KFACOptions

ENTRY = (4 * 4 + 3 * 3) * 8  # bytes of the factors of one layer of the stack of three


def net() -> nn.Module:
    equal = [layer for _ in range(3) for layer in (nn.Linear(3, 3), nn.Tanh())]
    return nn.Sequential(nn.Linear(2, 3, bias=False), *equal, nn.Linear(3, 3, bias=False))


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(4, 2, seed=seed), labels_for(4, classes=3, seed=seed)


def in_parts(monkeypatch, entries: int) -> None:
    monkeypatch.setattr("decaylab.curvature.preconditioner.INVERTED_AT_ONCE", entries * ENTRY)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_inverting_part_by_part_is_inverting_at_once(monkeypatch, lag):
    """One by one or by two, spread over the lag; a state dict in between changes nothing."""

    def stepped(reload_at=None):
        model = seeded(net)
        options = KFACOptions(inversion_lag=lag)
        arguments = {"outputs": "exact", "refresh_every": 1, "invert_every": 4, "damping": 0.1}
        opt = KFAC(model, 0.1, options=options, **arguments)
        for step in range(11):
            if step == reload_at:
                state = copy.deepcopy(opt.state_dict())
                opt.detach()
                opt = KFAC(model, 0.1, options=options, **arguments)
                opt.load_state_dict(state)
            train_step(opt, model, *data(step))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    wanted = stepped()
    for entries in (0, 1, 2):
        in_parts(monkeypatch, entries)
        for reload_at in (None, 5, 6, 7, 8):
            torch.testing.assert_close(stepped(reload_at), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entries", [1, 2, 3])
@pytest.mark.parametrize("layer", ["0", "1", "3", "5", "7"])
def test_a_failed_factorisation_is_that_of_one_layer(monkeypatch, layer, entries):
    in_parts(monkeypatch, entries)
    model = seeded(net)
    opt = KFAC(model, 0.1, damping=0.5, refresh_every=1000, invert_every=1)
    train_step(opt, model, *data(0))
    state = opt.state_dict()
    values = curvature_state(state)["layers"][layer]["A"]
    values[..., 0, 0] -= 10 * values.abs().max()
    opt.load_state_dict(state)
    for failures, raised in ((1, 1.0), (2, 2.0)):
        train_step(opt, model, *data(1))
        assert opt.check().failed_inversions == {layer: failures}
        want = {name: raised if name == layer else 0.5 for name in ("0", "1", "3", "5", "7")}
        assert {name: float(value) for name, value in opt.dampings().items()} == want


def test_a_raised_damping_halves_with_every_factorisation_that_works():
    model = seeded(net)
    opt = KFAC(model, 0.1, damping=0.5, refresh_every=1000, invert_every=1)
    train_step(opt, model, *data(0))
    state = opt.state_dict()
    curvature_state(state)["layers"]["3"]["boost"].fill_(4)
    opt.load_state_dict(state)
    found = []
    for step in range(4):
        found.append(float(opt.dampings()["3"]))
        train_step(opt, model, *data(step))
    assert found == [2.0, 1.0, 0.5, 0.5]


def test_the_norms_of_all_layers_go_with_the_state():
    options = {"damping": 0.5, "damping_scaling": "scale-free"}
    options["options"] = KFACOptions(invariant=("1", "5", "7"))
    model, doubled = seeded(net), seeded(net)
    with torch.no_grad():
        for p in doubled.parameters():
            p.mul_(2)
    opt = KFAC(doubled, 0.1, **options)
    opt.load_state_dict(KFAC(model, 0.1, **options).state_dict())
    want = {name: 0.5 / 4 if name in "157" else 0.5 for name in ("0", "1", "3", "5", "7")}
    assert {name: float(value) for name, value in opt.dampings().items()} == pytest.approx(want)


def test_a_gradient_that_is_not_finite_in_one_layer_stops_all():
    for layer in (0, 1, 3, 5, 7):
        model = seeded(net)
        opt = KFAC(model, 0.1)
        train_step(opt, model, *data(0))
        before = [p.detach().clone() for p in model.parameters()]
        cross_entropy(model(data(1)[0]), data(1)[1]).backward()
        model[layer].weight.grad[0, 0] = float("nan")
        opt.step()
        assert opt.check().skipped == 1
        assert all(map(torch.equal, model.parameters(), before))


def test_a_kl_clip_counts_what_is_trained_of_each_layer():
    """The clipped step is the step times sqrt(c / (lr^2 sum g.v)), frozen halves left out."""

    def moved(kl_clip):
        model = seeded(net)
        model[1].bias.requires_grad_(False)
        model[3].weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in trained]
        groups = [{"params": trained[:1]}, {"params": trained[1:]}]
        opt = KFAC(model, 0.1, params=groups, outputs="exact", momentum=0.0, kl_clip=kl_clip)
        cross_entropy(model(data(0)[0]), data(0)[1]).backward()
        gradients = [p.grad.clone() for p in trained]
        opt.step()
        return gradients, [b - p.detach() for b, p in zip(before, trained, strict=True)]

    gradients, steps = moved(None)
    total = 0.1 * sum((g * s).sum() for g, s in zip(gradients, steps, strict=True))
    kl_clip = float(total) / 9
    for whole, clipped in zip(steps, moved(kl_clip)[1], strict=True):
        torch.testing.assert_close(clipped, whole / 3, rtol=1e-9, atol=1e-14)


def test_scale_free_damping_reaches_every_layer_of_a_stack():
    """Weights twice as long: they turn as with a quarter of the damping."""

    def moved(**damping):
        model = seeded(net)
        opt = KFAC(model, 0.1, outputs="exact", **damping)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        train_step(opt, model, *data(0))
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        values = [p.detach() / m.weight.detach().norm() for m in layers for p in m.parameters()]
        return torch.cat([value.flatten() for value in values])

    named = KFACOptions(invariant=("0", "1", "3", "5", "7"))
    scaled = moved(damping=0.4, damping_scaling="scale-free", options=named)
    torch.testing.assert_close(scaled, moved(damping=0.1), rtol=1e-12, atol=1e-12)
