"""A run with decay and its schedule without one: the same directions, the same rotation."""

import copy
import tomllib

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import decaylab
from decaylab import diagnose, watch
from decaylab.diagnosis import EquivalentSchedule, Reason, equivalent_schedule
from decaylab.diagnosis.words.reasons import sentence
from decaylab.errors import BadValue, Damaged, DecaylabError, Lacks, UnknownName
from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import sgd
from decaylab.training import NormTransfer

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


def run(model, optimizer, after=None, every=1, clip=None):
    with watch(model, optimizer, every=every) as watched:
        for step, (inputs, labels) in enumerate(batches(), start=1):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
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


@pytest.mark.parametrize(("scaling", "momentum"), [("rms", 0.9), ("spectral", 0.0)])
def test_kfacs_steps_of_a_set_length_take_the_same_path(scaling, momentum):
    """KFAC(model), but for curvature that is always new. The momentum is one of scaled steps.

    Spectral steps have one of gradients, as in Muon, which would remember those of other norms.
    """
    start = net()
    settings = {"lr": 0.05, "outputs": "exact", "step_scaling": scaling, "momentum": momentum}
    settings |= {"refresh_every": 1, "invert_every": 1, "factor_decay": 0.0}
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    decayed, rest = decayed_layers_only(model, weight_decay=0.5, decay="decoupled")
    watched = run(model, decaylab.KFAC(model, params=[decayed, {**rest, "lr": 0.0}], **settings))
    schedule = equivalent_schedule(watched)
    layers, rest = schedule.groups(other)
    optimizer = decaylab.KFAC(other, params=[layers, {**rest, "lr": 0.0}], **settings)
    follow = Follow(optimizer, schedule)
    run(other, optimizer, lambda _: follow.step())
    for a, b in zip(directions(model), directions(other), strict=True):
        assert (a - b).norm() < 1e-8


def written_out(lr, shrink, momentum, nesterov):
    """lr r_t / (r_(t+1) mean of r): r_t = (1 - shrink)^t, and each of the momentum's weights."""
    rates = []
    for t in range(STEPS):
        weights = [momentum**k for k in range(t + 1)]  # the newest first
        if nesterov:
            weights = [momentum * w for w in weights]
            weights[0] += 1
        r = [(1 - shrink) ** (t - k) for k in range(t + 1)]
        mean = sum(w * x for w, x in zip(weights, r, strict=True)) / sum(weights)
        rates.append(lr / (1 - shrink) / mean)
    return rates


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_momentum_of_gradients_counts_what_it_remembers(nesterov):
    """Muon's and spectral K-FAC's, with every weight written out."""
    for kind in ("muon", "spectral"):
        model = net()
        decayed, rest = decayed_layers_only(model, weight_decay=0.5, decay="decoupled")
        groups = [decayed, {**rest, "lr": 0.0}]
        if kind == "spectral":
            optimizer = decaylab.KFAC(model, 0.05, params=groups, step_scaling="spectral")
            optimizer.nesterov = nesterov
        else:
            settings = {"weight_decay": 0.5, "momentum": 0.9, "nesterov": nesterov}
            optimizer = torch.optim.Muon(decayed["params"], 0.05, **settings)
        schedule = equivalent_schedule(run(model, optimizer))
        assert schedule.lr == pytest.approx(written_out(0.05, 0.025, 0.9, nesterov), rel=1e-9)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
def test_at_least_is_only_said_of_what_a_schedule_ends_above(kind):
    """Adam's second moment remembers smaller norms; Muon, which has none, needs no more."""
    model = net()
    decayed, _ = decayed_layers_only(model, weight_decay=0.5, decay="decoupled")
    watched = run(model, kind(decayed["params"], 0.05, weight_decay=0.5))
    (said,) = (x for x in diagnose(watched).follows if x.reason is Reason.SCHEDULE)
    schedule = equivalent_schedule(watched)
    ends_above = schedule.lr[-1] / schedule.others[-1] > 1.1 * said["factor"]
    assert said["remembers"] is ends_above is (kind is torch.optim.AdamW)
    assert ("to at least" in sentence(said)) is ends_above


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
    with refuses(BadValue, name="the file of a schedule"):
        schedule.save(tmp_path / "schedule.json")
    with pytest.raises(Damaged):
        EquivalentSchedule.from_csv(tmp_path / "schedule.toml")
    with refuses(UnknownName, name="3"):
        schedule.groups(nn.Sequential(nn.Linear(2, 2)))


def test_what_has_no_schedule():
    model = net()
    watched = run(model, torch.optim.SGD(model.parameters(), lr=0.05))
    with pytest.raises(Lacks):
        equivalent_schedule(watched)
    model = net()
    watched = run(model, torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1))
    with pytest.raises(DecaylabError, match="rescales L2"):
        equivalent_schedule(watched)
    model = net()
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}]
    groups.append({"params": [model[3].weight, *model[6].parameters()], "weight_decay": 0.2})
    with pytest.raises(DecaylabError, match="stepped differently"):
        equivalent_schedule(run(model, torch.optim.SGD(groups, lr=0.05)))
    model = net()
    watched = run(
        model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, amsgrad=True)
    )
    with pytest.raises(DecaylabError, match="Adam without amsgrad"):
        equivalent_schedule(watched)
    remedies = diagnose(watched)["effective l"].remedies
    assert [x.reason for x in remedies] == [Reason.GIVE_BASELINE, Reason.NAME_THE_LAW]
    model = net()
    plain = run(model, torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0, amsgrad=True))
    assert diagnose(watched, plain)["effective l"].effect.probes == ("rotation",)  # as was said
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    with pytest.raises(DecaylabError, match="gradients are clipped"):
        equivalent_schedule(run(model, optimizer, clip=1e-3))


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
    with refuses(Lacks, what="recorded norms"):
        NormTransfer(model, type(source.records)(()))
