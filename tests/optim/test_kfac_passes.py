"""Which forward passes and layers count in a refresh, and which steps a GradScaler leaves out."""

from types import SimpleNamespace

import pytest
import torch
from oracle.kfac_runs import cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.utils.checkpoint import checkpoint

from decaylab.errors import Lacks
from decaylab.optim.health import Skips
from decaylab.optim.options import KFACOptions

X, Y = random(6, 3), labels_for(6, classes=2)


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


class Branches(nn.Module):
    """The second branch takes part only when it is asked to; `input` is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(3, 2), nn.Linear(3, 2), False

    def forward(self, x):
        return self.first(input=x) + (self.second(x) if self.both else 0)


def assert_same(found, wanted) -> None:
    for key in ("A", "S", "T"):
        torch.testing.assert_close(getattr(found, key), getattr(wanted, key), rtol=1e-12, atol=0)


def test_a_layer_that_shows_itself_later_begins_with_what_it_shows():
    """Its first mean sets its factors, whatever was averaged in the others before."""
    model = seeded(Branches)
    opt = KFAC(model, 0.0, outputs="exact", refresh_every=1)
    for model.both in (False, False, True):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        opt.step()
    fresh = KFAC(model, 0.0, outputs="exact")
    opt.zero_grad()
    cross_entropy(model(X), Y).backward()
    fresh.step()
    assert_same(opt.factors()["second"], fresh.factors()["second"])
    A = torch.cat([X, torch.ones(6, 1).double()], 1)
    torch.testing.assert_close(opt.factors()["first"].A, A.mT @ A / 6, rtol=1e-12, atol=1e-12)


class Routed(Branches):
    """The second branch is always called, if only with no example."""

    def forward(self, x):
        return self.first(x) + self.second(x[: len(x) * self.both]).sum(0)


@pytest.mark.parametrize("build", [Branches, Routed])
def test_a_layer_that_shows_itself_later_moves_from_then_on(build):
    """It does not wait for the next inversion: an expert, say, that the first batch left out."""
    after = []
    for invert_every in (2, 50):
        model = seeded(build)
        opt = KFAC(model, 0.1, outputs="exact", refresh_every=2, invert_every=invert_every)
        model.both = False
        opt.initialize([X])  # then inversions come at their interval alone
        start = model.second.weight.detach().clone()
        for step, model.both in enumerate((False, True, True)):
            opt.zero_grad()
            cross_entropy(model(X), Y).backward()
            if step == 1:
                gradient = model.second.weight.grad.clone()
            opt.step()
            if step == 1:  # nothing was measured yet: gradient descent
                assert torch.allclose(model.second.weight, start - 0.1 * gradient, atol=1e-12)
        assert not torch.equal(model.second.weight, start)
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*after)


class Experts(nn.Module):
    """One parameter for all experts, of which a batch reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.chosen = 3, 0
        self.proj = nn.Parameter(torch.randn(3, 4, 3))

    def forward(self, x):
        return nn.functional.linear(x, self.proj[self.chosen]).tanh()


def test_an_expert_that_is_first_reached_between_two_refreshes_descends():
    model = seeded(lambda: nn.Sequential(Experts(), nn.Linear(4, 2)))
    opt = KFAC(model, 0.1, outputs="exact", refresh_every=3, invert_every=3, momentum=0.0)
    experts = model[0]
    for step, experts.chosen in enumerate((0, 0, 1, 1)):
        before = experts.proj.detach().clone()
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        opt.step()
        moved = experts.proj.detach() - before
        descended = torch.allclose(moved, -0.1 * experts.proj.grad, rtol=1e-10, atol=1e-12)
        assert descended == (step == 2)
        assert [bool(m.any()) for m in moved] == [experts.chosen == i for i in range(3)]


def test_an_inversion_for_a_layer_that_shows_itself_is_not_made_twice(monkeypatch):
    model = seeded(Branches)
    opt = KFAC(model, 0.1, refresh_every=1, invert_every=2)
    made, invert = [], opt._preconditioner.invert
    monkeypatch.setattr(
        opt._preconditioner, "invert", lambda *a: made.append(opt.steps) or invert(*a)
    )
    opt.initialize([X])
    made.clear()
    for model.both in (False, False, True, True, True):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        opt.step()
    assert made == [0, 2, 4]


def test_a_layer_that_was_seen_once_may_rest():
    """With gradients that are zero, not gone: it is not taken for one whose forward is hidden."""
    model = seeded(Branches)
    opt = KFAC(model, 0.1, refresh_every=1)
    for model.both in (True, False, False):
        opt.zero_grad(set_to_none=False)
        cross_entropy(model(X), Y).backward()
        opt.step()
    assert opt.check().skipped == 0


def test_sequences_of_different_lengths():
    model = net()
    opt = KFAC(model, 0.1, refresh_every=1)
    for length in (3, 5, 1):
        x, y = random(4, length, 3), labels_for(4, length, classes=2)
        cross_entropy(model(x), y).backward()
        opt.step()
    assert opt.steps == 3


def test_observing_is_free_between_refreshes_and_outlasts_an_evaluation():
    """Also with a mask, and where the model runs without grad in between."""
    model, mask = net(), torch.arange(6) < 4
    opt = KFAC(model, 0.0, outputs="exact", refresh_every=2, logits="observed")
    for _ in range(3):
        logits = model(X)
        with torch.no_grad():
            model(2 * X)
        opt.observe(logits, mask=mask)
        cross_entropy(logits[mask], Y[mask]).backward()
        opt.step()
    kept = torch.cat([X[:4], torch.ones(4, 1).double()], 1)
    torch.testing.assert_close(opt.factors()["0"].A, kept.mT @ kept / 4, rtol=1e-12, atol=1e-12)


def test_a_pass_of_another_loss_in_the_same_backward_is_left_out_of_the_empirical_fisher():
    found = []
    for other in (False, True):
        model = net()
        opt = KFAC(model, 0.1, curvature="empirical-fisher", logits="observed")
        loss = model(2 * X).square().sum() if other else 0
        logits = model(X)
        opt.observe(logits)
        (cross_entropy(logits, Y) + loss).backward()
        opt.step()
        found.append(opt.factors())
    for name, factors in found[0].items():
        assert_same(found[1][name], factors)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_whose_gradients_are_thrown_away_is_not_in_the_empirical_fisher(reduction):
    """A loop that skips a batch, or a discriminator that the generator's loss went through."""
    found = []
    for skipped in (False, True):
        model = net()
        opt = KFAC(model, 0.1, curvature="empirical-fisher", reduction=reduction)
        if skipped:
            cross_entropy(model(3 * X), Y, reduction).backward()
        logits = model(X)
        opt.zero_grad()  # between the passes, as in many loops
        cross_entropy(logits, Y, reduction).backward()
        opt.step()
        found.append(opt.factors())
    for name, factors in found[0].items():
        assert_same(found[1][name], factors)


def test_a_reentrant_checkpoint_around_no_covered_layer_hides_nothing():
    """For the empirical Fisher: the others go back by torch.autograd.grad, which torch refuses."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(checkpoint(torch.tanh, self.first(x), use_reentrant=True))

    model = seeded(Partly)
    opt, plain = KFAC(model, 0.1, curvature="empirical-fisher"), net()
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    expected = KFAC(plain, 0.1, curvature="empirical-fisher")
    for net_, optimizer in ((model, opt), (plain, expected)):
        cross_entropy(net_(X), Y).backward()
        optimizer.step()
    assert_same(opt.factors()["last"], expected.factors()["2"])


def test_factors_are_not_rounded_by_the_autocast_of_the_loop():
    model = net().float()
    opt = KFAC(model, 0.0)
    x = X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cross_entropy(model(x), Y).backward()
        opt.step()
    A = torch.cat([x, torch.ones(6, 1)], 1)
    torch.testing.assert_close(opt.factors()["0"].A, A.mT @ A / 6, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"outputs": "sampled"}, {"outputs": "exact"}])
def test_only_sampled_outputs_depend_on_the_seed(how):
    """They are the default."""
    found = []
    for seed in (0, 1):
        model = net()
        opt = KFAC(model, 0.1, **how, options=KFACOptions(seed=seed))
        cross_entropy(model(X), Y).backward()
        opt.step()
        found.append(opt.factors()["2"].S)
    assert torch.allclose(*found, rtol=1e-10, atol=1e-12) == (how == {"outputs": "exact"})


@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize(("told", "poison"), [(1.0, False), (0.0, True), (0.0, False)])
def test_a_step_is_left_out_if_a_grad_scaler_says_so_or_it_is_not_finite(decay, told, poison):
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    opt = KFAC(model, 0.1, weight_decay=0.5, decay=decay, others="sgd")
    cross_entropy(model(X), Y).backward()
    if poison:
        model[0].weight.grad[0, 0] = torch.inf
    before = [p.detach().clone() for p in model.parameters()]
    opt.grad_scale, opt.found_inf = torch.tensor(1.0), torch.tensor(told)
    opt.step()
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [not (told or poison)] * 6


@pytest.mark.parametrize("exclude", [(), ("0",)])
def test_a_group_without_any_gradient_does_not_decay(exclude):
    """In a block or outside."""
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    options = KFACOptions(exclude=exclude)
    opt = KFAC(model, 0.1, weight_decay=0.5, params=groups, options=options)
    cross_entropy(model(X), Y).backward()
    model[0].weight.grad = model[0].bias.grad = None
    before = [p.detach().clone() for p in model.parameters()]
    opt.step()
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]


def test_a_field_named_logits_that_is_no_tensor_is_not_taken_for_them():
    """It may hold anything; who means heads hands them to `observe`."""

    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            z = self.layer(x)
            return SimpleNamespace(logits=(z, 2 * z))

    model = seeded(Answer)
    opt = KFAC(model, 0.1)
    cross_entropy(model(X).logits[0], Y).backward()
    with refuses(Lacks, what="logits for the refresh that is due"):
        opt.step()


def test_ten_skipped_steps_are_told_if_they_are_in_a_row():
    skips = Skips(torch.device("cpu"))
    for finite in [False] * 9 + [True] + [False] * 9:
        skips.count(torch.tensor(finite))
        skips.look()
    skips.look()  # warnings are errors here
    assert skips.read() == (18, 9)
    skips.count(torch.tensor(False))
    skips.look()  # takes the news
    with pytest.warns(UserWarning, match="the last 10 steps"):
        skips.look()


def test_layers_have_hooks_only_while_a_refresh_is_due():
    """Which torch calls slower; a refresh that comes sooner than it was planned is seen too."""
    model = net()
    opt = KFAC(model, 0.1, refresh_every=3)

    def hooks() -> int:
        return sum(len(layer._forward_hooks) for layer in model)

    seen = []
    for _ in range(4):
        seen.append(hooks())
        train_step(opt, model, X, Y)
    assert seen == [2, 0, 0, 2]
    before = opt.factors()["0"].A
    opt.refresh_every = 1
    train_step(opt, model, 2 * X, Y)
    assert not torch.equal(opt.factors()["0"].A, before)
    opt.refresh_every = 3
    other = KFAC(model, 0.1, refresh_every=3)
    state = opt.state_dict()
    opt.detach()
    other.load_state_dict(state)
    assert (other.steps, hooks()) == (5, 0)
    other.initialize([X])
    assert hooks() == 0
