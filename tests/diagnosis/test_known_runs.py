"""Runs made so that the mechanism is known by construction; digits, three seeds each."""

import warnings

import pytest
import torch
from diagnosis.recorded import reasons
from oracle.plain_kfac import KFAC
from torch import nn

from decaylab import diagnose, watch
from decaylab.data import load
from decaylab.diagnosis import Reason
from decaylab.probes import FREE

SEEDS = (0, 1, 2)
STEPS, EVERY = 300, 20


@pytest.fixture(scope="module")
def digits():
    data = load("digits")
    images = (data.train.images.float() / 255 - data.mean[0]) / data.std[0]
    return images.flatten(1), data.train.labels


def net(seed, *, norm=nn.BatchNorm1d, bias=True, activation=nn.ReLU):
    torch.manual_seed(seed)
    layers = []
    for width in (64, 32):
        layers += [nn.Linear(width, 32, bias=bias), norm(32) if norm else nn.Identity()]
        layers.append(activation())
    return nn.Sequential(*layers, nn.Linear(32, 10, bias=bias))


def train(digits, model, optimizer, seed=0, probes=(), **watching):
    inputs, labels = digits
    generator = torch.Generator().manual_seed(seed)
    settings = {"every": EVERY, "probes": [*FREE, *probes], "inputs": inputs[:64]} | watching
    with watch(model, optimizer, **settings) as watched:
        for _ in range(STEPS):
            chosen = torch.randint(len(inputs), (64,), generator=generator)
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched


def pair(digits, seed, build, weight_decay, probes=(), **shape):
    """The run with decay, and the same without."""
    return [
        train(digits, model, build(model, wd), seed, probes)
        for wd in (weight_decay, 0.0)
        for model in [net(seed, **shape)]
    ]


def verdicts(*runs):
    return [finding.verdict for finding in diagnose(*runs).findings]


def sgd(model, weight_decay):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay)


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_norm_with_sgd(digits, seed):
    run, baseline = pair(digits, seed, sgd, 5e-3)
    against, alone = diagnose(run, baseline), diagnose(run)
    assert against["effective l"].verdict == alone["effective l"].verdict == "acts"
    assert against["effective d"].verdict == alone["effective d"].verdict == "does not act"
    # what one run says beforehand of the other: within a quarter
    ratio = alone["effective l"].effect.value / against["effective l"].effect.value
    assert 0.75 < ratio < 1.25
    assert Reason.SCHEDULE in reasons(alone)
    (head,) = [row for row in against["effective l"].layers if row.layer == "6"]
    assert head.effect is None
    assert reasons(head) == {Reason.SIZE_COUNTS}


@pytest.mark.parametrize("seed", SEEDS)
def test_bias_free_linear_net_with_kfac_g(digits, seed):
    def kfac(model, weight_decay):
        settings = {"damping": 0.1, "invert_every": 20, "weight_decay": weight_decay}
        return KFAC(model, lr=0.01, curvature="gauss-newton", **settings)

    shape = {"norm": None, "bias": False, "activation": nn.Identity}
    run, baseline = pair(digits, seed, kfac, 0.5, ["jacobian_norm"], **shape)
    assert verdicts(run, baseline) == ["does not act", "acts", "does not act"]
    assert verdicts(run) == ["does not act", "cannot tell", "does not act"]
    assert diagnose(run, baseline)["Jacobian"].effect.value > 3


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_norm_with_kfac_f_at_a_damping_that_dominates(digits, seed):
    def kfac(model, weight_decay):
        settings = {"damping": 1e-2, "refresh_every": 2, "invert_every": 20}
        return KFAC(model, lr=0.01, weight_decay=weight_decay, **settings)

    run, baseline = pair(digits, seed, kfac, 0.7, ["second_order_share"])
    against, alone = diagnose(run, baseline), diagnose(run)
    for result in (against, alone):
        assert result["effective l"].verdict == "does not act"
        assert result["effective d"].verdict == "acts"
    ratio = alone["effective d"].effect.value / against["effective d"].effect.value
    assert 0.75 < ratio < 1.33
    assert Reason.DAMPING_DOMINATES in reasons(diagnose(baseline))


def test_kfac_whose_factors_are_older_than_the_decay_needs_a_baseline(digits):
    """One run's reconstruction would be ten times too much, and the verdict wrong."""

    def kfac(model, weight_decay):
        settings = {"damping": 1e-3, "refresh_every": 5, "invert_every": 5}
        settings |= {"curvature": "gauss-newton", "weight_decay": weight_decay}
        return KFAC(model, lr=0.03, **settings)

    run, baseline = pair(digits, 0, kfac, 0.5, ["second_order_share"])
    against = diagnose(run, baseline)["effective d"]
    assert against.verdict == "does not act"
    assert [row.verdict for row in against.layers if row.layer in ("0", "3", "6")] == [
        *("does not act", "does not act", None),
    ]
    alone = diagnose(run)["effective d"]
    assert alone.verdict == "cannot tell"
    assert {Reason.OLD_FACTORS, Reason.GIVE_BASELINE} <= reasons(alone)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_decay_that_does_nothing(digits, seed):
    run, baseline = pair(digits, seed, sgd, 1e-5, ["jacobian_norm"])
    assert verdicts(run, baseline) == ["does not act"] * 3
    assert verdicts(run) == ["does not act"] * 3
    found = reasons(diagnose(run, baseline))
    assert Reason.NO_EFFECT_YET in found
    assert Reason.SCHEDULE not in found


def test_layer_norm_is_found_with_inputs_and_adamw_acts(digits):
    def adamw(model, weight_decay):
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=weight_decay)

    run, baseline = pair(digits, 0, adamw, 1.0, norm=nn.LayerNorm)
    against, alone = diagnose(run, baseline)["effective l"], diagnose(run)["effective l"]
    assert against.verdict == alone.verdict == "acts"
    assert alone.effect.value == pytest.approx(against.effect.value, rel=0.1)


def test_no_normalisation_and_frozen_layers(digits):
    model = net(0, norm=None)
    model[0].requires_grad_(False)
    result = diagnose(train(digits, model, sgd(model, 5e-3)))
    assert [f.verdict for f in result.findings] == ["does not act", "cannot tell", "does not act"]
    assert {k: why.reason for k, why in result.skipped.items()} == {"0": Reason.FROZEN}
    frozen = net(0)
    frozen[0].requires_grad_(False)
    result = diagnose(train(digits, frozen, sgd(frozen, 5e-3)))
    assert result["effective l"].verdict == "acts"
    assert {row.layer: row.verdict for row in result["effective l"].layers}["3"] == "acts"


def test_a_baseline_that_trained_other_layers_for_a_time_is_no_baseline(digits):
    def unfreezing(weight_decay, at):
        model = net(0)
        model[3].requires_grad_(False)
        optimizer = sgd(model, weight_decay)
        steps = iter(range(STEPS))

        def thaw(*_):
            if next(steps) == at:
                model[3].requires_grad_(True)

        optimizer.register_step_post_hook(thaw)
        return train(digits, model, optimizer)

    run, same, other = unfreezing(5e-3, 100), unfreezing(0.0, 100), unfreezing(0.0, 200)
    assert diagnose(run, same).baselines
    result = diagnose(run, other)
    assert not result.baselines
    why = next(why for _, why in result.first if why.reason is Reason.OTHER_SETTING)
    assert (why["layer"], why["name"], why["pair"]) == ("3", "frozen", (False, True))


def test_an_optimizer_for_some_layers_only(digits):
    model = net(0)
    parameters = [*model[3].parameters(), *model[6].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-3)
    result = diagnose(train(digits, model, optimizer))
    assert {k: why.reason for k, why in result.skipped.items()} == dict.fromkeys(
        ("0", "1", "4"), Reason.NOT_STEPPED
    )
    assert result["effective l"].verdict == "acts"


class Mine(torch.optim.Optimizer):
    """Plain descent with L2; `tells` is what its constructor asks for besides."""

    def __init__(self, parameters, tells=None):
        super().__init__(parameters, {"lr": 0.1, "weight_decay": 0.1})
        if not (tells or len(self.param_groups[0]["params"]) > 1):
            raise ValueError("too few parameters")

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (p.grad + group["weight_decay"] * p)


def test_an_optimizer_that_cannot_be_tried(digits):
    model = net(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        watched = train(digits, model, Mine(model.parameters()))
    texts = {str(warning.message) for warning in said}
    assert any(
        "weight decay of Mine is none of the known kinds and counts as L2" in t for t in texts
    )
    assert any("effective learning rate of Mine is not known" in t for t in texts)
    result = diagnose(watched)
    assert result["effective l"].verdict == "cannot tell"


def test_an_optimizer_from_elsewhere_is_tried(digits):
    """One that steps as torch's SGD does is judged as it is."""

    class Theirs(Mine):
        def __init__(self, parameters):
            super().__init__(parameters, tells=True)

    model, same = net(0), net(0)
    theirs = diagnose(train(digits, model, Theirs(model.parameters())))["effective l"]
    optimizer = torch.optim.SGD(same.parameters(), lr=0.1, weight_decay=0.1)
    known = diagnose(train(digits, same, optimizer))["effective l"]
    assert theirs.verdict == known.verdict == "acts"
    assert theirs.effect.value == pytest.approx(known.effect.value, rel=1e-5)


def test_records_on_disk_say_the_same(digits, tmp_path):
    model = net(0)
    watched = train(digits, model, sgd(model, 5e-3), folder=tmp_path / "run")
    in_memory = diagnose(watched)
    for source in (tmp_path / "run", tmp_path / "run" / "rows.jsonl", watched.recording):
        for mine, other in zip(diagnose(source).findings, in_memory.findings, strict=True):
            assert (mine.verdict, mine.effect) == (other.verdict, other.effect)
            assert mine.layers == other.layers
