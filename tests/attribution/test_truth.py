"""What an attribution must answer where theory leaves no doubt."""

import pytest
import torch
from attribution.loops import Trainer, batch_norm_net, decay_on, far_apart, plain_net
from oracle.plain_kfac import KFAC

import decaylab
from decaylab.attribution import SIZE_FREE_ROTATION
from decaylab.attribution.shares import Estimate

CONVS = ("0.weight", "3.weight")


def sgd_on_convs(momentum, weight_decay=0.05, lr=0.5):
    def build(model):
        groups = decay_on(model, CONVS, weight_decay)
        return torch.optim.SGD(groups, lr=lr, momentum=momentum)

    return build


def arms(result, trainer):
    """Arm -> trajectory of directions, of the first seed."""
    names = [each.arm for each in result.results if each.seed == result.seeds[0]]
    rehearsals = min(len(result.seeds), 2) + 1
    return dict(zip(names, trainer.directions[rehearsals:], strict=False))


def test_under_batch_norm_the_rotation_is_all_there_is():
    trainer = Trainer(batch_norm_net, sgd_on_convs(momentum=0.0))
    result = decaylab.attribute(trainer, seeds=1, steps=200)
    ran = arms(result, trainer)
    assert result.layers == ("0", "3")
    everything = ran["with decay"][0].keys()
    assert far_apart(ran["rotation"], ran["with decay"], everything) < 1e-6
    assert far_apart(ran["size"], ran["without decay"], everything) < 1e-6
    assert far_apart(ran["with decay"], ran["without decay"], everything) > 0.1
    assert max(result.worst_errors().values()) < 1e-9
    shares = result.shares_of("test/loss")
    assert shares.alone_shares["rotation"].value == pytest.approx(1, abs=1e-5)
    assert shares.alone_shares["size"].value == pytest.approx(0, abs=1e-5)
    assert result.shares["interaction"].value == pytest.approx(0, abs=1e-5)


def test_with_momentum_the_rotation_carries_it_within_the_interval():
    trainer = Trainer(batch_norm_net, sgd_on_convs(momentum=0.9, weight_decay=0.01))
    result = decaylab.attribute(trainer, seeds=3, steps=120, metric="turned")
    share = result.shares["rotation"]
    assert isinstance(share, Estimate)
    assert share.seeds == 3
    assert 1.0 in share
    assert abs(share.value - 1) < 0.2
    assert 0.0 in result.shares["size"]


def test_running_statistics_that_lag_show_the_size_in_evaluation_mode_alone():
    def net():
        model = batch_norm_net()
        model[1].momentum = model[4].momentum = 0.01
        return model

    result = decaylab.attribute(Trainer(net, sgd_on_convs(momentum=0.0)), seeds=1, steps=100)
    training, evaluation = map(result.shares_of, ("test/loss", "test/loss in evaluation mode"))
    assert training.alone["size"].value == pytest.approx(0, abs=1e-5)
    assert abs(evaluation.alone["size"].value) > 0.1


class Turning(torch.optim.Optimizer):
    """Turns every weight by the angle lr against its gradient; decay only makes it shorter.

    So decay changes no angle: it acts through the size alone.
    """

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                size = p.norm()
                across = p.grad - (p.grad * p).sum() / size**2 * p
                angle = torch.tensor(group["lr"], dtype=p.dtype)
                turned = angle.cos() * p / size - angle.sin() * across / across.norm()
                p.copy_((1 - group["weight_decay"]) * size * turned)


def test_without_normalisation_a_decay_of_sizes_is_all_size():
    trainer = Trainer(
        plain_net,
        lambda model: Turning(
            [{"params": list(model.parameters()), "weight_decay": 0.01}], lr=0.02
        ),
    )
    result = decaylab.attribute(trainer, seeds=1, steps=200)
    ran = arms(result, trainer)
    everything = ran["with decay"][0].keys()
    assert far_apart(ran["size"], ran["with decay"], everything) < 1e-6
    assert far_apart(ran["rotation"], ran["without decay"], everything) < 1e-6
    assert far_apart(ran["with decay"], ran["without decay"], everything) > 0.1
    assert result.shares["size"].value == pytest.approx(1, abs=1e-5)
    assert result.shares["rotation"].value == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_arm_that_follows_all_paths_is_the_run_with_decay(optimizer):
    """Decoupled decay changes the radial part of a step alone: the paths are all there is."""
    from decaylab.attribution.arms import Arm

    def build(model):
        if optimizer is torch.optim.SGD:  # L2 without momentum is decoupled
            return torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.05)
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1.0)

    both = Arm("followed", frozenset({"size", "rotation"}))
    trainer = Trainer(plain_net, build)
    result = decaylab.attribute(trainer, seeds=1, steps=60, extra=[both])
    ran = arms(result, trainer)
    everything = ran["with decay"][0].keys()
    assert far_apart(ran["followed"], ran["with decay"], everything) < 1e-8
    assert far_apart(ran["with decay"], ran["without decay"], everything) > 0.01


def test_sizes_held_and_rotation_left_free_is_the_papers_norm_transfer():
    """Fig. 4: under SGD and BN the norms decide the effective lr, and so the rotation."""
    trainer = Trainer(batch_norm_net, sgd_on_convs(momentum=0.0, lr=0.1))
    result = decaylab.attribute(trainer, seeds=1, steps=200, extra=[SIZE_FREE_ROTATION])
    ran = arms(result, trainer)
    transferred, everything = ran["norms alone"], ran["with decay"][0].keys()
    apart = far_apart(transferred, ran["with decay"], everything)
    assert apart < 0.2 * far_apart(ran["without decay"], ran["with decay"], everything)
    assert result.shares_of("turned").extra["norms alone"].value > 0.9
    # a step that decays turns further by a factor 1 - lr wd of its radial part, no more
    paths = result.paths[0]
    free, decayed = (paths[name].angles[0] for name in ("norms alone", "with decay"))
    torch.testing.assert_close(free.tan() / decayed.tan(), torch.full_like(free, 1 - 0.1 * 0.05))


def kfac_on_convs(damping, lr, weight_decay):
    """Fresh and exact factors at each step: its direction depends on C(u) and lambda |W|^2."""

    def build(model):
        return KFAC(
            model,
            lr,
            params=decay_on(model, CONVS, weight_decay),
            outputs="exact",
            decay="decoupled",
            momentum=0.0,
            damping=damping,
            refresh_every=1,
            invert_every=1,
            factor_decay=0.0,
            others="sgd",
            step_scaling="none",
            others_lr=0.05,
        )

    return build


def test_a_damping_that_decay_keeps_from_dominating_carries_the_direction():
    trainer = Trainer(batch_norm_net, kfac_on_convs(damping=0.3, lr=0.1, weight_decay=1.0))
    result = decaylab.attribute(trainer, seeds=1, steps=30, metric="turned")
    ran = arms(result, trainer)
    assert result.plan.paths == ("size", "rotation", "damping")
    everything = ran["with decay"][0].keys()
    whole = far_apart(ran["with decay"], ran["without decay"], everything)
    # under BN the size itself does nothing: with both other paths all is back
    assert far_apart(ran["rotation + damping"], ran["with decay"], everything) < 1e-6
    assert far_apart(ran["size"], ran["without decay"], everything) < 1e-6
    assert result.shares["size"].value == pytest.approx(0, abs=1e-5)
    # at the same angles, the damping decides where to
    assert far_apart(ran["rotation"], ran["with decay"], everything) > 0.3 * whole
    dampings = result.paths[0]["with decay"].dampings
    assert (dampings[-1] < 0.02 * dampings[0]).all()


def test_a_damping_that_dominates_with_and_without_decay_carries_nothing():
    damping = 1e12  # factored damping approaches it with its square root
    trainer = Trainer(
        batch_norm_net, kfac_on_convs(damping, lr=0.3 * damping, weight_decay=0.2 / damping)
    )
    result = decaylab.attribute(trainer, seeds=1, steps=30, metric="turned")
    ran = arms(result, trainer)
    everything = ran["with decay"][0].keys()
    assert far_apart(ran["with decay"], ran["without decay"], everything) > 0.05
    assert far_apart(ran["damping"], ran["without decay"], everything) < 1e-3
    assert abs(result.shares["damping"].value) < 0.01
    assert result.shares["rotation"].value == pytest.approx(1, abs=0.01)
