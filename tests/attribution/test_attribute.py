import json
import math

import numpy as np
import pytest
import torch
from attribution.loops import Trainer, batch_norm_net, plain_net
from refusals import refuses
from torch import nn

import decaylab
from decaylab.attribution import attribute, words
from decaylab.attribution.reasons import Doubt, Fault
from decaylab.errors import (
    BadValue,
    DecaylabError,
    Lacks,
    Mismatch,
    OutOfRange,
    UnknownName,
)


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 1.0, **settings})


def with_bias():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()


def test_the_answer_for_any_loop():
    result = decaylab.attribute(Trainer(plain_net, adamw), seeds=2, steps=20)
    assert result.metric == "test/loss"
    assert result.seeds == (0, 1)
    assert len(result.results) == 8
    assert not result.unused
    assert set(result.shares) == {"size", "rotation", "interaction"}
    total = result.shares_of("test/accuracy").total
    by_arm = {(r.arm, r.seed): r.metrics["test/accuracy"] for r in result.results}
    differences = [by_arm["with decay", s] - by_arm["without decay", s] for s in (0, 1)]
    assert total.value == pytest.approx(sum(differences) / 2)
    assert json.loads(json.dumps(result.as_dict()))["steps"] == 20
    with refuses(UnknownName, kind="metric", name="nothing"):
        result.shares_of("nothing")


def test_text_of_80_columns():
    text = str(attribute(Trainer(plain_net, adamw), seeds=2, steps=5))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Decay changes test/loss by")


def test_parameters_that_decay_and_are_not_held_have_a_share_of_their_own():
    result = attribute(Trainer(with_bias, adamw), seeds=1, steps=10)
    assert "others" in result.shares
    assert "direction" not in result.shares
    values = {r.arm: r.metrics["test/loss"] for r in result.results}
    expected = values["decay on the others"] - values["without decay"]
    assert result.shares_of("test/loss").effects["others"].value == pytest.approx(expected)
    parts = [result.shares[name].value for name in ("size", "rotation", "others")]
    assert sum(parts) == pytest.approx(1)


def test_l2_before_a_preconditioner_has_a_direction_of_its_own():
    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)

    result = attribute(Trainer(plain_net, adam), seeds=1, steps=10)
    assert abs(result.shares["direction"].value) > 1e-3
    parts = [result.shares[name].value for name in ("size", "rotation", "direction")]
    assert sum(parts) == pytest.approx(1)


def test_killed_in_the_middle_it_goes_on(tmp_path):
    trainer = Trainer(plain_net, adamw)
    whole = attribute(trainer, seeds=2, steps=10)

    trainer.directions.clear()

    def killed(seed):
        model, optimizer, step, evaluate = trainer(seed)

        def last_step():
            if len(trainer.directions) == 7 and len(trainer.directions[-1]) == 5:
                raise KeyboardInterrupt
            return step()

        return model, optimizer, last_step, evaluate

    with pytest.raises(KeyboardInterrupt):
        attribute(killed, seeds=2, steps=10, folder=tmp_path)
    trainer.directions.clear()
    resumed = attribute(trainer, seeds=2, steps=10, folder=tmp_path)
    # three rehearsals, and 5 of 8 arms: three were there
    assert [len(steps) for steps in trainer.directions] == 3 * [3] + 5 * [10]
    assert [r.metrics for r in resumed.results] == [r.metrics for r in whole.results]
    trainer.directions.clear()
    assert attribute(trainer, seeds=2, steps=10, folder=tmp_path).total == whole.total
    assert [len(steps) for steps in trainer.directions] == 3 * [3]


def test_a_folder_of_another_attribution_is_refused(tmp_path):
    attribute(Trainer(plain_net, adamw), seeds=1, steps=2, folder=tmp_path)
    with refuses(Mismatch, what="steps"):
        attribute(Trainer(plain_net, adamw), seeds=1, steps=3, folder=tmp_path)
    with refuses(Mismatch, what="layers"):
        attribute(Trainer(plain_net, adamw), seeds=1, steps=2, only="1", folder=tmp_path)


def test_arms_trained_with_another_decay_are_not_taken_for_this_one(tmp_path):
    attribute(Trainer(plain_net, adamw), seeds=1, steps=2, folder=tmp_path)
    stronger = Trainer(plain_net, lambda model: adamw(model, weight_decay=2.0))
    with refuses(Mismatch, what="weight_decay of AdamW"):
        attribute(stronger, seeds=1, steps=2, folder=tmp_path)


@pytest.mark.parametrize("changed", ["weights", "batches"])
def test_arms_of_another_loop_are_not_taken_for_this_one(tmp_path, changed):
    attribute(Trainer(plain_net, adamw), seeds=1, steps=2, folder=tmp_path)

    def other_net():
        model = plain_net()
        if changed == "weights":
            model[1].weight.data.mul_(1.01)
        return model

    other = Trainer(other_net, adamw, batch_size=64 if changed == "weights" else 32)
    with pytest.raises(Mismatch) as caught:
        attribute(other, seeds=1, steps=2, folder=tmp_path)
    assert "another folder" in caught.value.remedy
    assert str(tmp_path) in "".join(caught.value.values)


def counted(make):
    """A make whose steps are counted."""

    def counting(seed):
        model, optimizer, step, evaluate = make(seed)

        def counted_step():
            counting.steps += 1
            return step()

        return model, optimizer, counted_step, evaluate

    counting.steps = 0
    return counting


def refused_early(make, error, **settings):
    """A mistake is told in the rehearsal: a few steps, not an arm."""
    make = counted(make)
    with pytest.raises(error) as caught:
        attribute(make, **{"seeds": 1, "steps": 50, **settings})
    assert make.steps <= 9
    return caught.value


def test_a_make_that_gives_other_weights_each_time_is_refused():
    drawn = iter(range(100))
    trainer = Trainer(plain_net, adamw)
    error = refused_early(lambda seed: trainer(next(drawn)), Mismatch)
    assert "weights" in error.what


@pytest.mark.parametrize("from_step", [1, 2])
def test_a_make_that_gives_other_batches_each_time_is_refused(from_step):
    calls = iter(range(100))

    def make(seed):
        model, optimizer, _, evaluate = Trainer(plain_net, adamw)(seed)
        shared, own = (torch.Generator().manual_seed(s) for s in (0, next(calls)))
        taken = 0

        def step():
            nonlocal taken
            taken += 1
            generator = own if taken >= from_step else shared
            loss = model(torch.randn(8, 1, 8, 8, generator=generator).double()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return model, optimizer, step, evaluate

    assert refused_early(make, Mismatch).what == f"the loss of step {from_step}"


def test_an_unknown_metric_is_refused_before_the_arms():
    error = refused_early(Trainer(plain_net, adamw), UnknownName, metric="test loss")
    assert error.kind == "metric"


@pytest.mark.parametrize("times", [0, 2])
def test_an_optimizer_that_is_not_stepped_once_per_step_is_refused_before_the_arms(times):
    def make(seed):
        model, optimizer, _, evaluate = Trainer(plain_net, adamw)(seed)

        def step():
            model(torch.ones(4, 1, 8, 8).double()).square().mean().backward()
            for _ in range(times):
                optimizer.step()

        return model, optimizer, step, evaluate

    error = refused_early(make, Mismatch)
    assert error.values == {"AdamW": 3 * times, "the loop": 3}


def test_a_loader_that_runs_out_is_told_in_a_sentence():
    def make(seed):
        model, optimizer, step, evaluate = Trainer(plain_net, adamw)(seed)
        batches = iter(range(5))
        return model, optimizer, lambda: (next(batches), step())[1], evaluate

    with refuses(Lacks, owner="step() after 5 steps"):
        attribute(make, seeds=1, steps=50)


def test_a_make_that_ignores_its_seed_is_refused():
    """Else every seed is the same run, and every interval a point."""
    trainer = Trainer(plain_net, adamw)
    error = refused_early(lambda seed: trainer(0), DecaylabError, seeds=2)
    assert "make(0) and make(1) are the same run" in str(error)


def test_seeds_may_differ_in_their_batches_alone():
    """As where make loads a checkpoint."""

    def make(seed):
        model, optimizer, _, evaluate = Trainer(plain_net, adamw)(0)
        order = torch.Generator().manual_seed(seed)

        def step():
            model(torch.rand(8, 1, 8, 8, generator=order).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step, evaluate

    assert attribute(make, seeds=2, steps=2).total.seeds == 2


def test_seeds_given_twice_are_refused():
    with refuses(BadValue, name="seeds"):
        attribute(Trainer(plain_net, adamw), seeds=[0, 1, 0], steps=2)


def with_metric(values, rehearsals=3):
    """A make whose evaluate has one more number: that of the arm, in the order they are made."""
    calls = iter([*[0.0] * rehearsals, *values])

    def make(seed):
        model, optimizer, step, evaluate = Trainer(plain_net, adamw)(seed)
        number = next(calls)
        return model, optimizer, step, lambda: {**evaluate(), "extra": number}

    return make


def test_a_metric_without_a_number_costs_its_own_shares_alone():
    """A metric that is not finite is no divergence: the other metrics keep all their seeds."""
    plain = attribute(Trainer(plain_net, adamw), seeds=2, steps=5)
    numbers = [2.0, 1.0, 1.5, math.nan, 2.0, 1.0, 1.5, 1.25]  # seed 0's rotation has none
    result = attribute(with_metric(numbers), seeds=2, steps=5)
    assert not result.unused
    assert result.total == plain.total
    assert result.shares == plain.shares
    extra = result.shares_of("extra")
    assert (extra.total.value, extra.total.seeds) == (1.0, 2)
    assert extra.effects["size"].seeds == 1
    assert extra.effects["size"].value == pytest.approx((0.5 + 0.75) / 2)
    [unused] = attribute(with_metric(numbers), seeds=2, steps=5, metric="extra").unused
    assert (unused.fault, unused.seed, unused.arm) == (Fault.NO_NUMBER, 0, "rotation")


def test_a_metric_that_no_arm_has_a_number_for():
    result = attribute(with_metric([math.nan] * 4, rehearsals=2), seeds=1, steps=5, metric="extra")
    assert result.shares_of("extra").doubt is Doubt.NO_SEED
    assert "nan" not in str(result)
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["metric"] == "extra"


def test_a_number_that_is_none_is_null_in_the_file_of_an_arm_and_comes_back(tmp_path):
    numbers = [2.0, math.nan, math.inf, 1.25]
    first = attribute(with_metric(numbers), seeds=1, steps=5, folder=tmp_path)
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
    again = attribute(with_metric(numbers), seeds=1, steps=5, folder=tmp_path)
    assert again.as_dict() == first.as_dict()


def test_progress_says_what_is_done_and_how_long_the_rest_takes(capsys, monkeypatch):
    monkeypatch.setattr("decaylab.attribution.progress.EVERY", 0.0)
    attribute(Trainer(plain_net, adamw), seeds=1, steps=4)
    printed = capsys.readouterr()
    assert not printed.out
    lines = printed.err.splitlines()
    assert len(lines) == 4 * (4 + 1)
    assert lines[0].startswith("seed 0, with decay: 25 %, about ")
    assert lines[4].startswith("seed 0, with decay: test/loss ")
    assert all(line.endswith("left") for line in lines[:-2])
    assert "left" not in lines[-1]
    attribute(Trainer(plain_net, adamw), seeds=1, steps=4, silent=True)
    assert not capsys.readouterr().err


def test_a_reference_that_diverges_takes_its_seed_out_and_the_others_go_on():
    def build(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    trainer = Trainer(plain_net, build)

    def make(seed):
        model, optimizer, step, evaluate = trainer(seed)
        if seed == 1:
            optimizer.param_groups[0]["lr"] = 1e200
        return model, optimizer, step, evaluate

    result = attribute(make, seeds=[0, 1], steps=5)
    assert {u.fault for u in result.unused} == {Fault.DIVERGED}
    assert {u.seed for u in result.unused} == {1}
    assert result.total.seeds == 1
    assert result.shares_of("test/loss").doubt is Doubt.ONE_SEED
    assert math.isfinite(result.shares["rotation"].value)


@pytest.mark.parametrize(
    "made", [None, (1, 2), ("model", "optimizer", print, print), batch_norm_net()[:4]]
)
def test_a_make_that_makes_something_else_is_refused(made):
    with refuses(BadValue, name="what make(seed) returns"):
        attribute(lambda seed: made, seeds=1, steps=1)


@pytest.mark.parametrize("evaluated", [0.3, {}, None])
def test_an_evaluate_that_returns_no_dict_of_numbers_is_refused(evaluated):
    trainer = Trainer(plain_net, adamw)
    make = lambda seed: (*trainer(seed)[:3], lambda: evaluated)  # noqa: E731
    error = refused_early(make, BadValue)
    assert (error.name, error.value) == ("what evaluate() returns", evaluated)


@pytest.mark.parametrize("value", ["0.3", None, torch.ones(2)])
def test_an_evaluate_with_something_that_is_no_number_is_refused(value):
    trainer = Trainer(plain_net, adamw)
    make = lambda seed: (*trainer(seed)[:3], lambda: {"loss": value})  # noqa: E731
    assert refused_early(make, BadValue).name == "loss in what evaluate() returns"


def test_numbers_of_numpy_and_torch_are_numbers():
    trainer = Trainer(plain_net, adamw)
    numbers = {"numpy": np.float32(0.5), "torch": torch.tensor([0.5]), "bool": True}
    result = attribute(lambda seed: (*trainer(seed)[:3], lambda: numbers), seeds=1, steps=1)
    assert result.results[0].metrics == {"numpy": 0.5, "torch": 0.5, "bool": 1.0}


def test_no_seed_or_step_is_refused():
    for seeds, steps, name in [(0, 5, "seeds"), (1, 0, "steps"), ([], 5, "seeds")]:
        with refuses(OutOfRange, name=name):
            attribute(Trainer(plain_net, adamw), seeds=seeds, steps=steps)


def test_the_callers_generators_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    attribute(Trainer(plain_net, adamw), seeds=1, steps=1)
    # the trainer seeds torch itself, inside
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_a_decay_that_is_lost_in_rounding_is_told(precision):
    def make(seed):
        model = nn.Linear(4, 3, dtype=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

        def step():
            loss = model(torch.randn(8, 4, dtype=precision)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return model, optimizer, step, lambda: {"norm": model.weight.detach().norm()}

    result = attribute(make, steps=5, seeds=2, silent=True)
    assert (words.DECAY_LOST in result.sentences()) == (precision == torch.bfloat16)
