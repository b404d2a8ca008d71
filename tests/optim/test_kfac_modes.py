"""K-FAC beside batch norm, torch.compile, activation checkpointing and mixed precision."""

import pytest
import torch
from oracle.kfac_runs import (
    EXACT,
    cross_entropy,
    labels_for,
    random,
    same_factors,
    seeded,
    train_step,
)
from oracle.plain_kfac import KFAC
from oracle.small_conv import CLASSES, data, flat, net
from refusals import refuses
from torch import nn
from torch.utils.checkpoint import checkpoint

from decaylab.errors import Conflict, Lacks
from decaylab.training.arithmetic import arithmetic


@pytest.mark.parametrize("outputs", ["exact", "sampled"])
def test_running_statistics_are_those_of_plain_training(outputs):
    model, plain = seeded(lambda: net(norm=True)), seeded(lambda: net(norm=True))
    opt = KFAC(model, 1e-30, outputs=outputs, refresh_every=1, others="sgd")
    opt.initialize([data(s)[0] for s in range(3)])
    assert int(model[1].num_batches_tracked) == 0
    for step in range(3):
        train_step(opt, model, *data(step))
        plain(data(step)[0])
    assert int(model[1].num_batches_tracked) == 3
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
    assert torch.equal(model[1].running_var, plain[1].running_var)
    assert model[1].momentum == 0.1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model(in_place):
    """Refresh steps run the eager module, the others the compiled one."""
    model, plain = seeded(net), seeded(net)
    if in_place:
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    options = {"outputs": "exact", "refresh_every": 2, "invert_every": 2}
    opt, expected = KFAC(compiled, 0.1, **options), KFAC(plain, 0.1, **options)
    for step in range(5):
        train_step(opt, compiled, *data(step))
        train_step(expected, plain, *data(step))
        torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=1e-12)
    assert set(opt.factors()) == {"0", "3"}


def test_a_step_in_a_compiled_function_is_the_plain_one():
    model, plain = seeded(net), seeded(net)
    options = {"outputs": "exact", "refresh_every": 2, "invert_every": 2}
    opt, expected = KFAC(model, 0.1, **options), KFAC(plain, 0.1, **options)
    step = torch.compile(lambda: opt.step(), backend="eager")
    for number in range(4):
        images, labels = data(number)
        cross_entropy(model(images), labels).backward()
        step()
        opt.zero_grad()
        train_step(expected, plain, images, labels)
    assert torch.equal(flat(model), flat(plain))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3) if norm else nn.Identity(), nn.ReLU(inplace=True)
        )
        self.head = nn.Linear(27, CLASSES)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.head(self.body(x).flatten(1))
        x = x.requires_grad_()
        return self.head(checkpoint(self.body, x, use_reentrant=self.use_reentrant).flatten(1))


@pytest.mark.parametrize("curvature", ["fisher", "empirical-fisher"])
def test_non_reentrant_checkpointing_equals_none(curvature):
    model, plain = seeded(lambda: Checkpointed(False)), seeded(lambda: Checkpointed(None))
    options = {"curvature": curvature} | EXACT
    opt, expected = KFAC(model, 0.1, **options), KFAC(plain, 0.1, **options)
    for step in range(3):
        train_step(opt, model, *data(step))
        train_step(expected, plain, *data(step))
        assert same_factors(opt, expected)
        torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=1e-12)


def test_recomputation_in_our_backward_leaves_running_statistics_alone():
    """Plain training with checkpoints updates them once more in the loss's backward; so do we."""
    model, plain = (seeded(lambda: Checkpointed(False, norm=True)) for _ in range(2))
    opt = KFAC(model, 1e-30, refresh_every=1, others="sgd")
    for step in range(2):
        train_step(opt, model, *data(step))
        cross_entropy(plain(data(step)[0]), data(step)[1]).backward()
    assert torch.equal(model.body[1].running_mean, plain.body[1].running_mean)
    assert model.body[1].num_batches_tracked == plain.body[1].num_batches_tracked


def test_reentrant_checkpointing_is_refused_by_name():
    model = seeded(lambda: Checkpointed(True))
    opt = KFAC(model, 0.1)
    hidden = "reentrant activation checkpointing of layer 'body.0'"
    with refuses(Conflict, settings=["K-FAC", hidden]):
        train_step(opt, model, *data())


def test_bf16_autocast_is_close_to_full_precision():
    model, plain = seeded(net).float(), seeded(net).float()
    options = {"outputs": "exact", "refresh_every": 1, "invert_every": 1, "damping": 0.1}
    opt, expected = KFAC(model, 0.05, **options), KFAC(plain, 0.05, **options)
    for step in range(3):
        x, y = data(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x.float())
        cross_entropy(logits.float(), y).backward()
        opt.step()
        opt.zero_grad()
        train_step(expected, plain, x.float(), y)
    for name, factors in opt.factors().items():
        full = expected.factors()[name]
        assert factors.A.dtype == factors.S.dtype == torch.float32
        for found, wanted in ((factors.A, full.A), (factors.S, full.S)):
            assert (found - wanted).norm() < 0.03 * wanted.norm()
    assert (flat(model) - flat(plain)).norm() < 0.02 * flat(plain).norm()
    assert not torch.equal(flat(model), flat(plain))


def test_factors_of_float32_inputs_are_not_rounded_under_autocast():
    """The first layer's A is a product of what came in, whatever the dtype of the forward pass."""
    factors = []
    for autocast in (False, True):
        model = seeded(net).float()
        opt = KFAC(model, 0.05, **EXACT)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            opt.initialize([data()[0].float()])
        factors.append(opt.factors()["0"].A)
    torch.testing.assert_close(*factors, rtol=1e-6, atol=1e-7)


def test_a_step_inside_autocast_is_the_step_outside():
    after = []
    for autocast in (False, True):
        model = seeded(net).float()
        opt = KFAC(model, 0.05, weight_decay=0.1, **EXACT)
        for step in range(2):
            x, y = data(step)
            cross_entropy(model(x.float()), y).backward()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                opt.step()
            opt.zero_grad()
        after.append(flat(model))
    assert torch.equal(*after)


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_grad_scaler_changes_nothing(curvature, unscale_first):
    """The loss is scaled by 1024: the gradients are unscaled, the curvature never was."""
    model, plain = seeded(net).float(), seeded(net).float()
    options = {"curvature": curvature, "damping": 0.1, "kl_clip": 1e-2} | EXACT
    opt, expected = KFAC(model, 0.05, **options), KFAC(plain, 0.05, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        x, y = data(step)
        scaler.scale(cross_entropy(model(x.float()), y)).backward()
        if unscale_first:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        train_step(expected, plain, x.float(), y)
        assert same_factors(opt, expected, 1e-5)
        torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=1e-5)


def test_a_grad_scaler_backs_off_after_an_overflow():
    model = seeded(lambda: net(norm=True)).float()
    opt = KFAC(model, 0.05, weight_decay=0.1, **EXACT)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = flat(model)
    scaler.scale(cross_entropy(model(data()[0].float()), data()[1])).backward()
    model[0].weight.grad.view(-1)[0] = float("inf")
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    assert torch.equal(flat(model), before)
    assert scaler.get_scale() == 512.0
    assert opt.check().skipped == 0  # looking for its scale is the scaler's business
    # and without a scaler the next step is an ordinary one
    train_step(opt, model, data()[0].float(), data()[1])
    assert not torch.equal(flat(model), before)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_grad_scaler_is_refused_for_the_empirical_fisher(unscale_first):
    """It is made of the loss's own gradients, which are scaled by a number we do not know."""
    model = seeded(net).float()
    opt = KFAC(model, 0.05, curvature="empirical-fisher")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(cross_entropy(model(data()[0].float()), data()[1])).backward()
    if unscale_first:
        scaler.unscale_(opt)
    with refuses(Conflict, settings=["the empirical Fisher", "a GradScaler"]):
        scaler.step(opt)


def test_small_layers_are_preconditioned_in_full_precision_whatever_the_caller_allows(monkeypatch):
    """Large ones in what the caller allows; and the caller's setting comes back."""
    model = seeded(lambda: nn.Sequential(nn.Linear(700, 4), nn.Tanh(), nn.Linear(4, 3)))
    optimizer = KFAC(model, lr=0.1)
    matmul = torch.backends.cuda.matmul
    seen = {}

    def recorded(left, right, **given):
        seen.setdefault(tuple(left.shape[-2:]), set()).add(matmul.fp32_precision)
        return bmm(left, right, **given)

    bmm = torch.bmm
    train_step(optimizer, model, random(6, 700), labels_for(6, classes=3))
    monkeypatch.setattr(torch, "bmm", recorded)
    with arithmetic("tf32"):
        optimizer._preconditioner.precondition()
        assert matmul.fp32_precision == "tf32"
    assert seen.pop((4, 701)) == {"tf32"}
    assert seen.pop((3, 5)) == {"ieee"}


@pytest.mark.parametrize("in_place", [False, True])
def test_only_refreshes_leave_the_compiled_code(in_place):
    """Counted by a compiler of our own; an evaluation runs compiled too, when a refresh is due."""
    calls = []

    class Own(nn.Sequential):
        def forward(self, x):  # torch does not compile a plain Sequential in place
            return super().forward(x)

    def compiler(graph, inputs):
        def run(*args):
            calls.append(len(graph.graph.nodes))
            return graph.forward(*args)

        return run

    model = seeded(lambda: Own(*net()))
    compiled = model if in_place else torch.compile(model, backend=compiler)
    if in_place:
        model.compile(backend=compiler)
    opt = KFAC(compiled, 0.1, refresh_every=3)
    ran = []
    for step in range(6):
        calls.clear()
        train_step(opt, compiled, *data(step))
        ran.append(bool(calls))
    assert ran == [False, True, True, False, True, True]
    assert opt.refresh_due
    calls.clear()
    with torch.no_grad():
        compiled(data()[0])
    assert calls


def test_a_model_that_is_compiled_too_late_is_said_to_be():
    model = seeded(net)
    opt = KFAC(model, 0.1)
    model.compile(backend="eager")  # its calls go past the hooks from now on
    with refuses(Lacks, owner="the first step", what="observed forward pass before it"):
        train_step(opt, model, *data())


class Teacher(nn.Module):
    """A covered layer that is also run without a graph, and a path through the graph that forks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        with torch.no_grad():
            target = self.layer(x)
        hidden = torch.tanh(self.layer(x) - target)
        for _ in range(60):  # 2^60 paths lead back from here
            hidden = (hidden + hidden) / 2
        return self.head(hidden)


def test_a_layer_that_also_runs_without_grad_is_no_reentrant_checkpoint():
    model = seeded(Teacher)
    opt = KFAC(model, 0.1)
    train_step(opt, model, random(6, 4), labels_for(6, classes=CLASSES))
    assert set(opt.factors()) == {"layer", "head"}


def test_a_reentrant_checkpoint_far_behind_forks_is_found():
    model = seeded(lambda: nn.Sequential(Checkpointed(True), Teacher()))
    model[1].layer = nn.Linear(CLASSES, 4).double()
    opt = KFAC(model, 0.1)
    hidden = "reentrant activation checkpointing of layer '0.body.0'"
    with refuses(Conflict, settings=["K-FAC", hidden]):
        train_step(opt, model, *data())


def test_initialize_leaves_the_modes_of_all_modules():
    model = seeded(lambda: net(norm=True))
    model[1].eval()
    opt = KFAC(model, 0.1)
    before = [module.training for module in model.modules()]
    opt.initialize([data()[0]])
    assert [module.training for module in model.modules()] == before
    assert len(set(before)) == 2
    model.eval()
    opt.initialize([data()[0]])
    assert not any(module.training for module in model.modules())
