"""Param groups, schedulers, state dicts, and the parameters that are in no block."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab.curvature.kinds.kind import Reason
from decaylab.errors import Conflict, Lacks, Mismatch, Misplaced, UnknownName
from decaylab.optim.kfac_state import curvature_state
from decaylab.optim.options import KFACOptions

CLASSES = 3


def net():
    return nn.Sequential(
        nn.Conv2d(2, 3, 2, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, CLASSES),
    )


def data(seed: int = 0, size: int = 4):
    return random(size, 2, 4, 4, seed=seed), labels_for(size, classes=CLASSES, seed=seed)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- resuming --


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("outputs", ["sampled", "exact"])
@pytest.mark.parametrize("lag", [0, 2])
def test_resumed_equals_uninterrupted_bit_for_bit(stop, outputs, lag):
    """Through torch.save and torch.load(weights_only=True), into a differently seeded optimizer.

    With a lag of 2 an inversion is pending at steps 4 and 5.
    """
    options = {
        "weight_decay": 0.1,
        "outputs": outputs,
        "refresh_every": 2,
        "invert_every": 3,
        "kl_clip": 1e-2,
        "damping_scaling": "scale-free",
    }
    model = seeded(net)
    opt = KFAC(model, 0.1, options=KFACOptions(seed=1, inversion_lag=lag), **options)
    file = io.BytesIO()
    for step in range(8):
        if step == stop:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
        train_step(opt, model, *data(step))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = seeded(net, seed=7)
    other = KFAC(again, 0.3, options=KFACOptions(seed=99, inversion_lag=lag), **options)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    for step in range(stop, 8):
        train_step(other, again, *data(step))
    assert torch.equal(flat(model), flat(again))
    assert other.steps == opt.steps
    for name, factors in opt.factors().items():
        assert torch.equal(factors.A, other.factors()[name].A)
        assert torch.equal(factors.S, other.factors()[name].S)


def test_a_state_dict_is_a_snapshot():
    model = seeded(net)
    opt = KFAC(model, 0.1, **EXACT)
    train_step(opt, model, *data())
    state = opt.state_dict()
    before = {k: v.clone() for k, v in curvature_state(state)["layers"]["0"].items()}
    train_step(opt, model, *data(1))
    assert all(torch.equal(before[k], v) for k, v in curvature_state(state)["layers"]["0"].items())


def test_a_state_dict_of_another_model_or_optimizer_is_refused():
    model = seeded(net)
    opt = KFAC(model, 0.1)
    with refuses(Lacks, what="K-FAC factors"):
        opt.load_state_dict(torch.optim.SGD(model.parameters(), 0.1).state_dict())
    other = KFAC(seeded(lambda: nn.Sequential(nn.Linear(3, 3))), 0.1)
    with refuses(Lacks, owner="this state dict", what="state of layer '4'"):
        opt.load_state_dict(other.state_dict())
    with refuses(Lacks, owner="this KFAC", what="block for layer '4' of the state dict"):
        other.load_state_dict(opt.state_dict())
    wider = KFAC(seeded(lambda: nn.Sequential(*net()[:4], nn.Linear(27, CLASSES + 1))), 0.1)
    with refuses(Mismatch, what="the shape of layer '4'"):
        opt.load_state_dict(wider.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copying_or_pickling_is_refused_with_the_way_to_do_it(copied):
    opt = KFAC(seeded(net), 0.1)
    with refuses(Lacks, owner="a KFAC that is copied or pickled by itself"):
        copied(opt)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_memory_and_hooks_go_with_the_last_reference(kind):
    """Without waiting for the garbage collector, which does not know of the device's memory."""
    model = seeded(net)
    called = torch.compile(model, backend="eager") if kind == "compiled" else model
    forward = called.forward
    opt = KFAC(called, 0.1)
    train_step(opt, called, *data())
    blocks = weakref.ref(opt._preconditioner)
    gc.disable()
    try:
        del opt
        assert blocks() is None
    finally:
        gc.enable()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert called.forward == forward


def test_a_second_optimizer_takes_over_a_compiled_model():
    """The first goes when the second is there: the second's refreshes still run eagerly."""
    model = torch.compile(seeded(net), backend="eager")
    opt = KFAC(model, 0.1, **EXACT)
    train_step(opt, model, *data())
    opt = KFAC(model, 0.1, **EXACT)
    train_step(opt, model, *data(1))
    assert opt.factors()["0"].T > 0


def test_a_whole_step_in_a_cuda_graph_is_refused(monkeypatch):
    model = seeded(net)
    opt = KFAC(model, 0.1)
    cross_entropy(model(data()[0]), data()[1]).backward()
    opt.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with refuses(Conflict, settings=["KFAC.step()", "a CUDA graph"]):
        opt.step()
    assert opt.steps == 0


# -- groups and schedulers --


def test_learning_rate_schedulers():
    """StepLR on the optimizer equals setting lr by hand; others follow the schedule too."""
    model, other = seeded(net), seeded(net)
    opt, by_hand = KFAC(model, 0.1, **EXACT), KFAC(other, 0.1, **EXACT)
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.1)
    for step in range(6):
        train_step(opt, model, *data(step))
        train_step(by_hand, other, *data(step))
        schedule.step()
        if step % 2 == 1:
            for group in by_hand.param_groups:
                group["lr"] *= 0.1
    assert torch.equal(flat(model), flat(other))
    rates = {group["law"]: group["lr"] for group in opt.param_groups}
    assert rates == pytest.approx({"kfac": 1e-4, "adam": 1e-6})


def test_a_tensor_learning_rate():
    after = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        model = seeded(net)
        opt = KFAC(model, lr, weight_decay=0.1, kl_clip=1e-2, **EXACT)
        for step in range(3):
            train_step(opt, model, *data(step))
        after.append(flat(model))
    torch.testing.assert_close(*after, rtol=0, atol=1e-14)


def test_a_group_with_both_kinds_is_split_and_keeps_its_options():
    model = seeded(net)
    opt = KFAC(
        model,
        0.1,
        params=[
            {"params": list(model[:2].parameters()), "lr": 0.2, "weight_decay": 0.3},
            {"params": list(model[4].parameters()), "decay": "l2"},
        ],
        weight_decay=0.01,
    )
    found = [(g["law"], g["decay"], g["weight_decay"], len(g["params"])) for g in opt.param_groups]
    assert sorted(found) == [
        ("adam", "decoupled", 0.3, 2),
        ("kfac", "decoupled", 0.3, 1),
        ("kfac", "l2", 0.01, 2),
    ]


def test_adding_a_group_later_is_refused():
    model = seeded(net)
    opt = KFAC(model, 0.1, params=model[4].parameters())
    with refuses(Misplaced, settings=["add_param_group"]):
        opt.add_param_group({"params": list(model[0].parameters())})


def test_only_the_given_parameters_are_stepped():
    model = seeded(net)
    opt = KFAC(model, 0.1, params=model[4].parameters(), weight_decay=0.1, **EXACT)
    before = model[0].weight.detach().clone()
    last = model[4].weight.detach().clone()
    train_step(opt, model, *data())
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[4].weight, last)
    assert set(opt.factors()) == {"4"}


# -- parameters in no block --


@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize("others", ["adam", "sgd"])
def test_others_are_stepped_by_torch(others, decay):
    """Norm scales under K-FAC move as under torch's own optimizer with the same gradients."""
    model, wd = seeded(net), 0.05
    opt = KFAC(model, 1e-30, others=others, others_lr=0.01, weight_decay=wd, decay=decay, **EXACT)
    with torch.no_grad():
        for group in opt.param_groups:
            if group["law"] == "kfac":
                group["weight_decay"] = 0.0
    twin = copy.deepcopy(model)
    l2 = wd if decay == "l2" else 0.0
    if others == "adam":
        reference = torch.optim.Adam(twin[1].parameters(), lr=0.01, weight_decay=l2)
    else:
        reference = torch.optim.SGD(twin[1].parameters(), lr=0.01, momentum=0.9, weight_decay=l2)
    shrink = {"l2": 0.0, "decoupled": 0.01 * wd, "independent": wd}[decay]
    for step in range(4):
        x, y = data(step)
        train_step(opt, model, x, y)
        cross_entropy(twin(x), y).backward()
        with torch.no_grad():
            old = [p.clone() for p in twin[1].parameters()]
        reference.step()
        with torch.no_grad():
            for p, before in zip(twin[1].parameters(), old, strict=True):
                p -= shrink * before
        twin.zero_grad()
        torch.testing.assert_close(model[1].weight, twin[1].weight, rtol=0, atol=1e-12)
        torch.testing.assert_close(model[1].bias, twin[1].bias, rtol=0, atol=1e-12)


def test_the_learning_rate_of_others():
    for others, expected in (("adam", 1e-3), ("sgd", 0.1)):
        opt = KFAC(seeded(net), 0.1, others=others)
        assert [g["lr"] for g in opt.param_groups if g["law"] == others] == [expected]


class Language(nn.Module):
    """An embedding tied to the output layer, a norm, a custom parameter and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.mix(self.norm(self.embedding(tokens))).tanh() * self.scale)


def test_coverage_accounts_for_every_parameter():
    model = seeded(Language)
    opt = KFAC(model, 0.1)
    coverage = opt.coverage()
    assert set(coverage) == {name for name, _ in model.named_parameters()}
    assert coverage["mix.weight"].block == coverage["mix.bias"].block == "mix"
    assert coverage["mix.weight"].method == "kfac"
    assert coverage["embedding.weight"].block == "embedding"
    assert coverage["embedding.weight"].about == ("Linear", "Embedding")
    assert coverage["norm.weight"].reason is Reason.NO_BLOCK
    assert coverage["norm.weight"].about == ("LayerNorm",)
    assert coverage["scale"].method == "adam"
    assert coverage["head.bias"].reason is Reason.SHARED_BIAS
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = labels_for(2, 3, classes=5)
    train_step(opt, model, tokens, tokens)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_frozen_and_gradient_less_parameters_are_left_alone():
    """Neither stepped nor decayed; what was frozen at the start is in no block."""
    model = seeded(net)
    model[4].bias.requires_grad_(False)
    opt = KFAC(model, 0.1, weight_decay=0.5, **EXACT)
    assert opt.coverage()["4.bias"].block is None
    assert opt.coverage()["4.bias"].reason is Reason.FROZEN
    frozen = model[4].bias.detach().clone()
    train_step(opt, model, *data())
    assert torch.equal(model[4].bias, frozen)
    assert opt.factors()["4"].A.shape == (27, 27)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    cross_entropy(model(data()[0]), data()[1]).backward()
    model[0].weight.grad = None
    model[1].bias.grad = None
    opt.step()
    for name in ("0.weight", "1.bias", "4.bias"):
        assert torch.equal(model.get_parameter(name), before[name])
    assert not torch.equal(model[4].weight, before["4.weight"])
    assert not torch.equal(model[1].weight, before["1.weight"])


def test_a_layer_frozen_during_training_stops():
    model = seeded(net)
    opt = KFAC(model, 0.1, weight_decay=0.5, **EXACT)
    train_step(opt, model, *data())
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    train_step(opt, model, *data(1))
    train_step(opt, model, *data(2))
    assert torch.equal(model[0].weight, before)


def test_exclude_leaves_a_layer_to_the_others():
    model = seeded(net)
    opt = KFAC(model, 0.1, options=KFACOptions(exclude=("0",)))
    assert set(opt.factors()) == {"4"}
    assert opt.coverage()["0.weight"].reason is Reason.EXCLUDED
    with refuses(UnknownName, name="nosuch"):
        KFAC(seeded(net), 0.1, options=KFACOptions(exclude=("nosuch",)))


def test_a_layer_that_is_never_called_is_not_moved():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(3, CLASSES), nn.Linear(3, CLASSES)

        def forward(self, x):
            return self.used(x)

    model = seeded(Spare)
    opt = KFAC(model, 0.1, weight_decay=0.5)
    before = model.spare.weight.detach().clone()
    for step in range(3):
        train_step(opt, model, random(4, 3, seed=step), labels_for(4, classes=CLASSES))
    assert torch.equal(model.spare.weight, before)


# -- long sides --


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_side_longer_than_the_limit_is_diagonal(side):
    """Equal to the step with the off-diagonal entries of that factor set to zero."""
    sizes = (6, 2) if side == "input" else (2, 6)
    classes = sizes[1]

    def build():
        return nn.Sequential(nn.Linear(*sizes))

    x, y = random(5, sizes[0]), labels_for(5, classes=classes)
    model, plain = seeded(build), seeded(build)
    opt = KFAC(model, 0.1, max_factor_dim=4, momentum=0.0, **EXACT)
    train_step(opt, model, x, y)
    full = KFAC(plain, 1e-30, **EXACT)
    train_step(full, plain, x, y)
    factors = full.factors()["0"]
    A, S = factors.A, factors.S
    found = opt.factors()["0"]
    if side == "input":
        torch.testing.assert_close(found.A, A.diagonal())
        A = A.diagonal().diag()
    else:
        torch.testing.assert_close(found.S, S.diagonal())
        S = S.diagonal().diag()
    start = seeded(build)
    cross_entropy(start(x), y).backward()
    gradient = torch.cat([start[0].weight.grad, start[0].bias.grad[:, None]], 1)
    pi, r = (A.diagonal().mean() / S.diagonal().mean()).sqrt(), 1e-3**0.5
    left = S + r / pi * torch.eye(len(S), dtype=S.dtype)
    right = A + pi * r * torch.eye(len(A), dtype=A.dtype)
    step = torch.linalg.solve(left, gradient) @ torch.linalg.inv(right)
    expected = start[0].weight - 0.1 * step[:, :-1]
    torch.testing.assert_close(model[0].weight, expected, rtol=0, atol=1e-10)


def after_four_steps(opt, model, reload):
    """All parameters; with `reload` the state is loaded in between, its buffers in plain order."""
    for step in range(4):
        if reload and step == 2:
            state = opt.state_dict()
            for entry in state["state"].values():
                for key in entry.keys() - {"curvature", "kfac"}:
                    entry[key] = entry[key].clone(memory_format=torch.contiguous_format)
            opt.load_state_dict(state)
        train_step(opt, model, *data(step))
    return flat(model)


def test_the_order_of_weights_in_memory_does_not_matter():
    """Channels-last and transposed weights, and a momentum loaded in plain order, step alike."""

    def stepped(model, reload=False):
        opt = KFAC(model, 0.1, outputs="exact", refresh_every=1, invert_every=1, weight_decay=0.1)
        return after_four_steps(opt, model, reload)

    plain = seeded(net)
    wanted = stepped(copy.deepcopy(plain))
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    other[-1].weight = nn.Parameter(other[-1].weight.detach().t().contiguous().t())
    holes = copy.deepcopy(plain)
    room = torch.zeros(CLASSES, 2 * 27, dtype=torch.float64)
    room[:, ::2] = holes[-1].weight.detach()
    holes[-1].weight = nn.Parameter(room[:, ::2])
    for model, reload in ((other, False), (copy.deepcopy(other), True), (holes, True)):
        torch.testing.assert_close(stepped(model, reload), wanted, rtol=1e-12, atol=1e-12)


def test_initializing_again_drops_an_inversion_that_was_begun():
    model = seeded(net)
    opt = KFAC(model, 0.1, outputs="exact", invert_every=4, options=KFACOptions(inversion_lag=3))
    for step in range(6):
        train_step(opt, model, *data(step))
    assert "A_pending" in curvature_state(opt.state_dict())["layers"]["0"]
    opt.initialize([data()[0]])
    assert "A_pending" not in curvature_state(opt.state_dict())["layers"]["0"]
    train_step(opt, model, *data())


@pytest.mark.parametrize("others", ["adam", "sgd"])
def test_buffers_of_others_are_loaded_in_their_parameters_order(others):
    """A convolution outside the blocks, channels-last, and a state dict in plain order."""

    def stepped(reload):
        model = seeded(net).to(memory_format=torch.channels_last)
        options = KFACOptions(exclude=("0",))
        opt = KFAC(model, 0.1, outputs="exact", others=others, options=options)
        return after_four_steps(opt, model, reload)

    torch.testing.assert_close(stepped(True), stepped(False), rtol=1e-12, atol=1e-12)
