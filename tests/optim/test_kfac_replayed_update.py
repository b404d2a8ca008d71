"""What KFAC.step() does behind the gather as a replay, on a CPU with recorded work."""

import gc
import weakref

import pytest
import torch
from oracle.kfac_runs import cross_entropy, seeded
from oracle.plain_kfac import KFAC
from oracle.recorded_graphs import Recorded
from oracle.small_conv import data, flat, net

from decaylab.optim.update import PATTERNS

STEPS = 12


def trained(change=lambda step, model, opt: None, *, graphs=None, lr=0.125, **options):
    """The model after some steps; `change` comes between backward and step."""
    model = seeded(lambda: net(norm=True))
    opt = KFAC(model, lr, refresh_every=3, invert_every=6, weight_decay=0.25, **options)
    opt._updater._graphs = graphs
    for step in range(STEPS):
        cross_entropy(model(data(step)[0]), data(step)[1]).backward()
        change(step, model, opt)
        opt.step()
        opt.zero_grad()
    return model, opt


def halve(step, model, opt):
    for group in opt.param_groups:
        group["lr"] *= 0.5


def freeze(step, model, opt):
    """A bias has no gradient for a while, and the gain of the norm for another."""
    if step in (5, 6):
        model[0].bias.grad = None
    if step in (6, 7, 8):
        model[1].weight.grad = None


def redecay(step, model, opt):
    opt.param_groups[0]["weight_decay"] = 0.5 if step > 6 else 0.25


def clip(step, model, opt):
    opt.kl_clip = 1e-3 if step > 6 else 1e-2


def swap(step, model, opt):
    if step == 7:
        weight = model[0].weight
        weight.data = weight.data.clone()


@pytest.mark.parametrize("change", [halve, freeze, redecay, clip, swap])
@pytest.mark.parametrize("others", ["adam", "sgd"])
@pytest.mark.parametrize("decay", ["decoupled", "l2"])
def test_replays_are_what_a_launched_step_is(change, others, decay):
    """Also as rates, settings, gradients and addresses change under way."""
    options = {"others": others, "decay": decay, "kl_clip": 1e-2, "others_lr": 0.125}
    launched, _ = trained(change, **options)
    graphs = Recorded()
    replayed, opt = trained(change, graphs=graphs, **options)
    assert torch.equal(flat(launched), flat(replayed))
    assert graphs.replays > 0
    assert graphs.captures == 1 + (change in (redecay, clip, swap))
    assert opt.check().skipped == 0


def test_gradients_are_put_back_and_a_step_that_is_not_finite_is_left_out():
    def spoil(step, model, opt):
        if step == 9:
            model[0].weight.grad.fill_(torch.nan)

    model, opt = trained(spoil, graphs=Recorded())
    assert opt.check().skipped == 1
    assert all(p.isfinite().all() for p in model.parameters())
    cross_entropy(model(data()[0]), data()[1]).backward()
    own = [p.grad for p in model.parameters()]
    opt.step()
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), own, strict=True))


def test_patterns_are_forgotten_when_there_are_many():
    def vary(step, model, opt):
        opt.param_groups[0]["weight_decay"] = step / 100

    _, opt = trained(vary, graphs=Recorded())
    assert len(opt._updater._patterns) <= PATTERNS
    assert opt._updater._captured.keys() <= set(opt._updater._patterns.values())


def test_numbers_of_forgotten_patterns_stay_where_they_are():
    """A step that was captured as a whole reads them at its next replay."""
    _, opt = trained(step_scaling="rms")
    (pattern,) = opt._updater._patterns.values()
    sizes = weakref.ref(pattern.sizes)
    opt._updater.forget()
    del pattern
    gc.collect()
    assert sizes() is not None


def test_graphs_go_with_the_optimizer():
    model, opt = trained(graphs=Recorded())
    replay = weakref.ref(next(iter(opt._updater._captured.values())))
    gc.disable()
    try:
        del model, opt
        assert replay() is None
    finally:
        gc.enable()
