"""SGD and Adam with every kind of decay, against torch's optimizers and against the formula."""

import copy
import pickle

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.nn import functional as F

from decaylab.errors import OutOfRange, UnknownName
from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam, sgd

STEPS = 100


def network():
    torch.manual_seed(0)
    # No bias before the normalisation: its gradient is rounding error, which Adam blows up.
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)
    ).double()


def train(model, optimizer, steps=STEPS, first=0):
    """Some steps on fresh data each; which data depends on the number of the step alone."""
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (16,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def ours(make, decay, weight_decay=0.1, scope="all", steps=STEPS, **options):
    model = network()
    groups = parameter_groups(model, weight_decay=weight_decay, decay=decay, scope=scope)
    return train(model, make(groups, **options), steps)


def by_torch(make, **options):
    model = network()
    return train(model, make(model.parameters(), **options))


def assert_equal(a, b):
    assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
def test_each_group_decays_as_if_it_were_alone(make, decay):
    def moved(amounts):
        weights = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in amounts]
        groups = [
            {"params": [weight], "weight_decay": amount, "decay": decay}
            for weight, amount in zip(weights, amounts, strict=True)
        ]
        optimizer = make(groups, lr=0.1)
        for step in range(5):
            for weight in weights:
                weight.grad = torch.tensor([0.5, step], dtype=torch.float64)
            optimizer.step()
        return [weight.detach() for weight in weights]

    amounts = [0.1, 0.2, 0.3]
    alone = [moved([amount])[0] for amount in amounts]
    for found, wanted in zip(moved(amounts), alone, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_group_that_is_added_later_does_not_decay(make):
    """It says nothing of decay."""
    first, later = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = make([{"params": [first], "weight_decay": 0.1, "decay": "independent"}], lr=0.1)
    optimizer.add_param_group({"params": [later]})
    first.grad = later.grad = torch.zeros(2)
    optimizer.step()
    assert torch.equal(later.detach(), torch.ones(2))
    torch.testing.assert_close(first.detach(), torch.full((2,), 0.9))


def test_sgd_l2_is_decoupled_without_momentum():
    assert_equal(
        ours(sgd, "l2", lr=0.05, momentum=0.0), ours(sgd, "decoupled", lr=0.05, momentum=0.0)
    )


def test_sgd_l2_is_not_decoupled_with_momentum():
    """Inside a momentum of 0.9 the same value decays ten times as much."""
    inside, outside = (ours(sgd, kind, lr=0.05, momentum=0.9) for kind in ("l2", "decoupled"))
    assert (inside - outside).norm() > 0.1 * outside.norm()


def test_sgd_l2_is_torch_sgd():
    assert_equal(
        ours(sgd, "l2", lr=0.05),
        by_torch(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    )


def test_adam_l2_is_torch_adam():
    assert_equal(ours(adam, "l2", lr=0.01), by_torch(torch.optim.Adam, lr=0.01, weight_decay=0.1))


def test_adam_decoupled_is_torch_adamw():
    assert_equal(
        ours(adam, "decoupled", lr=0.01), by_torch(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    )


@pytest.mark.parametrize("decay", ["decoupled", "independent"])
@pytest.mark.parametrize(
    ("make", "plain", "options"),
    [
        (sgd, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (adam, torch.optim.Adam, {"lr": 0.01}),
    ],
)
def test_decay_beside_the_step_is_the_formula(decay, make, plain, options):
    """W' = plain step from W, minus (lr *) weight_decay * W."""
    model = network()
    optimizer = plain(model.parameters(), **options)
    rate = 0.03 * (options["lr"] if decay == "decoupled" else 1.0)
    for number in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, 1, number)
        for p, old in zip(model.parameters(), before, strict=True):
            p.data -= rate * old
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_equal(ours(make, decay, weight_decay=0.03, **options), expected)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("lr", [0.0, 0.5])
def test_independent_decay_does_not_know_the_learning_rate(make, lr):
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = make([{"params": [weight], "weight_decay": 0.1, "decay": "independent"}], lr=lr)
    for _ in range(3):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.9**3), rtol=1e-15, atol=0)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
def test_scope_leaves_the_others_to_the_plain_optimizer(make, decay):
    """One step: parameters out of scope move as without decay, those in it do not."""
    plain = ours(make, "none", steps=1, lr=0.05)
    scoped = ours(make, decay, scope="fc", steps=1, lr=0.05)
    head = 8 * 4 + 4
    assert torch.equal(plain[:-head], scoped[:-head])
    assert not torch.equal(plain[-head:], scoped[-head:])


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
def test_parameters_without_gradient_do_not_decay(make, decay):
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    group = {"params": [used, unused], "weight_decay": 0.1, "decay": decay}
    optimizer = make([group], lr=0.1)
    used.grad = torch.zeros(2)
    optimizer.step()
    assert torch.equal(unused.detach(), torch.ones(2))
    assert (used < 1).all()
    before, used.grad = used.detach().clone(), None
    optimizer.step()
    assert torch.equal(used.detach(), before)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
def test_state_dict_continues_bit_for_bit(make, decay):
    whole = ours(make, decay, lr=0.02, scope="conv", steps=20)
    model = network()
    groups = parameter_groups(model, weight_decay=0.1, decay=decay, scope="conv")
    optimizer = make(groups, lr=0.02)
    train(model, optimizer, 10)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    resumed = network()
    groups = parameter_groups(resumed, weight_decay=0.7, decay=decay, scope="conv")
    continued = make(groups, lr=0.5)  # lr and weight decay come from the state
    resumed.load_state_dict(saved[0])
    continued.load_state_dict(saved[1])
    assert torch.equal(train(resumed, continued, 10, first=10), whole)


@pytest.mark.parametrize("decay", ["none", "l2", "decoupled", "independent"])
def test_a_learning_rate_in_a_tensor_is_the_same(decay):
    for make in (sgd, adam):
        number = ours(make, decay, lr=0.01, steps=20)
        tensor = ours(make, decay, lr=torch.tensor(0.01, dtype=torch.float64), steps=20)
        assert_equal(tensor, number)


def test_the_callers_groups_are_left_alone():
    groups = parameter_groups(network(), weight_decay=0.1, decay="decoupled")
    keys = [dict(group) for group in groups]
    sgd(groups, lr=0.1)
    adam(groups, lr=0.1)
    assert [group.keys() for group in groups] == [group.keys() for group in keys]
    assert groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_the_same_as_backward_and_step(decay, by_name):
    """As Lightning steps: the closure's gradient is that of the weights before they shrink."""
    model = network()
    optimizer = sgd(parameter_groups(model, weight_decay=0.1, decay=decay), lr=0.05)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (16,), generator=generator)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        said = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert said > 0
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_equal(weights, ours(sgd, decay, lr=0.05))


@pytest.mark.parametrize(
    ("make", "options", "name"),
    [
        (sgd, {"lr": -0.1}, "lr"),
        (adam, {"lr": float("nan")}, "lr"),
        (sgd, {"lr": 0.1, "momentum": 1.0}, "momentum"),
        (sgd, {"lr": 0.1, "momentum": -0.1}, "momentum"),
        (adam, {"lr": 0.1, "betas": (-0.1, 0.9)}, "beta1"),
        (adam, {"lr": 0.1, "betas": (0.9, 1.0)}, "beta2"),
    ],
)
def test_bad_numbers_get_a_sentence(make, options, name):
    with refuses(OutOfRange, name=name):
        make(parameter_groups(network(), weight_decay=0.1), **options)
    weight = nn.Parameter(torch.ones(1))
    with refuses(UnknownName, kind="decay", name="cosine"):
        make([{"params": [weight], "weight_decay": 0.1, "decay": "cosine"}], lr=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
def test_on_the_gpu_a_step_does_not_wait_for_the_device(make, decay):
    """With lr in a tensor there, the same numbers as on the CPU, and no synchronisation."""
    rate = 2.0**-7  # exact in float32, which the fused steps want lr in
    expected = ours(make, decay, lr=rate, steps=1)
    model = network()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64).cuda()
    y = torch.randint(4, (16,), generator=generator).cuda()
    model.cuda()
    lr = torch.tensor(rate, device="cuda")
    optimizer = make(parameter_groups(model, weight_decay=0.1, decay=decay), lr=lr)
    F.cross_entropy(model(x), y).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    assert (moved - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.parametrize("decay", ["decoupled", "independent"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_does_not_decay(decay, fused):
    """A fused step, as on CUDA, is called all the same, and told; the next one decays as ever."""
    model = network().float()
    optimizer = sgd(parameter_groups(model, weight_decay=0.1, decay=decay), lr=0.05)
    for group in optimizer.param_groups:
        group["fused"] = fused
    optimizer._step_supports_amp_scaling = fused
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())
    for overflow in (True, False):
        scaler.scale(model[3].weight.sum()).backward()
        if overflow:
            model[3].weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == (set() if overflow else {"3.weight"})
    rate = {"decoupled": 0.05 * 0.1, "independent": 0.1}[decay]
    wanted = (1 - rate) * before["3.weight"] - 0.05
    torch.testing.assert_close(model[3].weight.detach(), wanted)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles_decay_alike(make, decay, again):
    """Torch leaves hooks out of both."""
    model = network()
    groups = parameter_groups(model, weight_decay=0.1, decay=decay)
    optimizer = make(groups, lr=0.1)
    train(model, optimizer, 3)
    copied, its = again((model, optimizer))
    assert torch.equal(train(copied, its, 3, first=3), train(model, optimizer, 3, first=3))
