"""A run with decay and its schedule without one: the same directions, the same rotation."""

import copy
import tomllib

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from decaylab import KFAC, watch
from decaylab.data import load
from decaylab.diagnosis import EquivalentSchedule, NormTransfer, equivalent_schedule
from decaylab.diagnosis.observed import observe
from decaylab.errors import DecaylabError
from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam, sgd

STEPS = 60


def net(seed=0, eps=1e-300):
    torch.manual_seed(seed)
    layers = []
    for a, b in ((6, 8), (8, 8)):
        layers += [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b, affine=False, eps=eps), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def batches(steps=STEPS, size=16):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        yield inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def run(model, optimizer, after=None, every=1):
    with watch(model, optimizer, every=every) as watched:
        for step, (inputs, labels) in enumerate(batches(), start=1):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if after is not None:
                after(step)
    return watched


def directions(model):
    return [model[i].weight.detach() / model[i].weight.detach().norm() for i in (0, 3)]


def decayed_layers_only(model, **settings):
    return parameter_groups(model, scope=lambda role: role.role == "invariant", **settings)


@pytest.mark.parametrize(
    ("decay", "momentum", "tolerance"),
    [("decoupled", 0.0, 1e-8), ("l2", 0.9, 1e-8), ("decoupled", 0.9, 0.019)],
)
def test_sgd_takes_the_same_path(decay, momentum, tolerance):
    """Exact without momentum and for L2. Beside a momentum, the buffer remembers other norms."""
    start = net()
    model = copy.deepcopy(start)
    groups = decayed_layers_only(model, weight_decay=0.05 if momentum else 0.2, decay=decay)
    watched = run(model, sgd(groups, lr=0.05, momentum=momentum))
    schedule = equivalent_schedule(watched)
    assert schedule.layers == ("0", "3")
    other = copy.deepcopy(start)
    optimizer = torch.optim.SGD(schedule.groups(other), lr=schedule.others[0], momentum=momentum)
    scheduler = LambdaLR(optimizer, schedule.lambdas())
    run(other, optimizer, lambda _: scheduler.step())
    for a, b in zip(directions(model), directions(other), strict=True):
        assert (a - b).norm() < tolerance
    # without the schedule it would be another path
    plain = copy.deepcopy(start)
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=momentum))
    assert (directions(model)[0] - directions(plain)[0]).norm() > 3 * tolerance


def test_kfac_takes_the_same_path_with_the_damping_of_the_schedule():
    """The heads are held: K-FAC has one damping, and theirs would change with it."""
    start = net()
    settings = {"lr": 0.05, "momentum": 0.0, "damping": 0.1, "outputs": "exact"}
    settings |= {"refresh_every": 1, "invert_every": 1, "factor_decay": 0.0}
    model = copy.deepcopy(start)
    decayed, rest = decayed_layers_only(model, weight_decay=0.5, decay="decoupled")
    optimizer = KFAC(model, params=[decayed, {**rest, "lr": 0.0}], **settings)
    schedule = equivalent_schedule(run(model, optimizer))
    other = copy.deepcopy(start)
    layers, rest = schedule.groups(other)
    optimizer = KFAC(other, params=[layers, {**rest, "lr": 0.0}], **settings)
    follow = Follow(optimizer, schedule)
    run(other, optimizer, lambda _: follow.step())
    for a, b in zip(directions(model), directions(other), strict=True):
        assert (a - b).norm() < 1e-8


def digits():
    data = load("digits")
    images = (data.train.images.float() / 255 - data.mean[0]) / data.std[0]
    return images.flatten(1), data.train.labels


def train_on_digits(model, optimizer, scheduler=None, steps=440):
    inputs, labels = digits()
    generator = torch.Generator().manual_seed(0)
    with watch(model, optimizer, every=4) as watched:
        for _ in range(steps):
            chosen = torch.randint(len(inputs), (64,), generator=generator)
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return watched.records


def means(values, parts=8):
    size = len(values) // parts
    return [sum(values[i * size : (i + 1) * size]) / size for i in range(parts)]


def values(records, name):
    return [row.value for row in records.series(name)][1:]


def effective(records, layer):
    return [value for _, value in observe(records).layers[layer].effective][1:]


def normalised_net(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()]
    layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


def adamw_three_times(betas, seed=0):
    """With decay; without, by the schedule; without, and no schedule. 20 epochs, exposure 0.9."""
    start = normalised_net(seed)
    settings = {"lr": 2e-3, "betas": betas, "weight_decay": 0.0}
    model = copy.deepcopy(start)
    groups = decayed_layers_only(model, weight_decay=1.0, decay="decoupled")
    decayed = train_on_digits(model, adam(groups, lr=2e-3, betas=betas, eps=1e-8))
    schedule = equivalent_schedule(decayed)
    other, plain = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = torch.optim.AdamW(schedule.groups(other), **settings)
    converted = train_on_digits(other, optimizer, LambdaLR(optimizer, schedule.lambdas()))
    ignored = train_on_digits(plain, torch.optim.AdamW(plain.parameters(), **settings))
    return decayed, converted, ignored


@pytest.mark.parametrize(
    ("betas", "seed"),
    [((0.9, 0.999), 0), ((0.9, 0.999), 1), ((0.9, 0.999), 2), ((0.9, 0.95), 0)],
)
def test_adamw_on_digits_keeps_its_effective_learning_rate(betas, seed):
    """Within 5 % at every record of training, and so the rotation per step, in means."""
    decayed, converted, ignored = adamw_three_times(betas, seed)
    for layer in ("0", "3"):
        expected = effective(decayed, layer)
        assert effective(converted, layer) == pytest.approx(expected, rel=0.05)
        assert effective(ignored, layer)[-1] < 0.6 * expected[-1]
        turned = means(values(decayed, f"rotation/{layer}"), 4)
        found = means(values(converted, f"rotation/{layer}"), 4)
        assert found == pytest.approx(turned, rel=0.05)
        assert means(values(ignored, f"rotation/{layer}"), 4)[-1] < 0.8 * turned[-1]


def test_what_adam_remembers_is_needed_for_it():
    """By lr/|W| alone the same two runs are far apart at beta2 = 0.999, though they turn alike."""
    decayed, converted, _ = adamw_three_times((0.9, 0.999))
    by_norm = [values(of, "effective_lr/0")[-1] for of in (decayed, converted)]
    assert by_norm[1] > 1.3 * by_norm[0]


@pytest.mark.parametrize(("decay", "weight_decay"), [("l2", 2e-2), ("decoupled", 2e-1)])
def test_sgd_on_digits_keeps_its_effective_learning_rate(decay, weight_decay):
    """lr/|W|^2 (Eq. 9) within 5 % at every record; momentum 0.9, exposure 0.9."""
    start = normalised_net()
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    groups = decayed_layers_only(model, weight_decay=weight_decay, decay=decay)
    decayed = train_on_digits(model, sgd(groups, lr=0.01, momentum=0.9))
    schedule = equivalent_schedule(decayed)
    optimizer = torch.optim.SGD(schedule.groups(other), lr=schedule.others[0], momentum=0.9)
    converted = train_on_digits(other, optimizer, LambdaLR(optimizer, schedule.lambdas()))
    assert schedule.lr[-1] > 4 * schedule.lr[0]
    for layer in ("0", "3"):
        expected = values(decayed, f"effective_lr/{layer}")
        assert values(converted, f"effective_lr/{layer}") == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("every", "momentum", "lr", "tolerance"),
    [(5, 0.0, 5e-3, 0.05), (50, 0.0, 5e-3, 0.05), (50, 0.9, 5e-4, 0.05), (50, 0.9, 5e-3, 0.09)],
)
def test_kfac_on_digits_turns_as_far(every, momentum, lr, tolerance):
    """In every eighth; decay 0.25 % a step, factors that remember norms three times as large."""
    start = normalised_net()
    settings = {"lr": lr, "momentum": momentum, "damping": 1e-2, "curvature": "gauss-newton"}
    settings |= {"refresh_every": 5, "invert_every": every}
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    groups = decayed_layers_only(model, weight_decay=2.5e-3 / lr, decay="decoupled")
    decayed = train_on_digits(model, KFAC(model, params=groups, **settings))
    schedule = equivalent_schedule(decayed)
    optimizer = KFAC(other, params=schedule.groups(other), **settings)
    converted = train_on_digits(other, optimizer, Follow(optimizer, schedule))
    for layer in ("0", "3"):
        turned = means(values(decayed, f"rotation/{layer}"))
        found = means(values(converted, f"rotation/{layer}"))
        assert found == pytest.approx(turned, rel=tolerance)


class Follow:
    """Learning rate and damping of a schedule, step by step, for K-FAC."""

    def __init__(self, optimizer, schedule):
        self.optimizer, self.schedule, self.at = optimizer, schedule, -1
        self.step()

    def step(self):
        self.at = min(self.at + 1, len(self.schedule.lr) - 1)
        self.optimizer.param_groups[0]["lr"] = self.schedule.lr[self.at]
        self.optimizer.damping = self.schedule.damping[self.at]


def test_files(tmp_path):
    model = net()
    groups = decayed_layers_only(model, weight_decay=0.2, decay="decoupled")
    schedule = equivalent_schedule(run(model, sgd(groups, lr=0.05, momentum=0.9)))
    schedule.save(tmp_path / "schedule.csv")
    assert EquivalentSchedule.from_csv(tmp_path / "schedule.csv") == schedule
    assert len(schedule.lr) == STEPS
    schedule.save(tmp_path / "schedule.toml")
    read = tomllib.loads((tmp_path / "schedule.toml").read_text())
    assert read["lr"] == list(schedule.lr)
    with pytest.raises(DecaylabError, match=r"\.csv or \.toml"):
        schedule.save(tmp_path / "schedule.json")
    with pytest.raises(DecaylabError, match="is no schedule"):
        EquivalentSchedule.from_csv(tmp_path / "schedule.toml")
    with pytest.raises(DecaylabError, match="no layer '3'"):
        schedule.groups(nn.Sequential(nn.Linear(2, 2)))


def test_what_has_no_schedule():
    model = net()
    watched = run(model, torch.optim.SGD(model.parameters(), lr=0.05))
    with pytest.raises(DecaylabError, match="nothing to replace"):
        equivalent_schedule(watched)
    model = net()
    watched = run(model, torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1))
    with pytest.raises(DecaylabError, match="L2 inside Adam"):
        equivalent_schedule(watched)
    model = net()
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}]
    groups.append({"params": [model[3].weight, *model[6].parameters()], "weight_decay": 0.2})
    with pytest.raises(DecaylabError, match="stepped differently"):
        equivalent_schedule(run(model, torch.optim.SGD(groups, lr=0.05)))


def test_norm_transfer_in_a_plain_loop():
    """The norms become the other run's at every record; the function stays as it is."""
    source_model = net()
    groups = decayed_layers_only(source_model, weight_decay=0.5, decay="decoupled")
    source = run(source_model, sgd(groups, lr=0.05, momentum=0.9), every=20)
    model = net()
    transfer = NormTransfer(model, source)
    inputs, _ = next(batches())
    changes = []

    def after(step):
        before = model(inputs).detach()
        norm = model[0].weight.norm().item()
        if transfer(step):
            changes.append(abs(model[0].weight.norm().item() - norm))
            recorded = {row.step: row.value for row in source.records.series("weight_norm/0")}
            assert model[0].weight.norm().item() == pytest.approx(recorded[step], rel=1e-12)
            assert torch.allclose(model(inputs), before, atol=1e-10)

    run(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), after)
    assert len(changes) == 4
    assert max(changes) > 0.01
    with pytest.raises(DecaylabError, match="no recorded norms"):
        NormTransfer(model, type(source.records)(()))
