import json
import math

import pytest
import torch
from attribution.loops import Trainer, plain_net
from refusals import refuses
from torch import nn

import decaylab
from decaylab.attribution import attribute
from decaylab.attribution.reasons import Doubt, Fault
from decaylab.errors import BadValue, DecaylabError, Mismatch, OutOfRange, UnknownName


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

    def stop(result):
        if (result.arm, result.seed) == ("size", 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attribute(trainer, seeds=2, steps=10, folder=tmp_path, report=stop)
    trainer.directions.clear()
    resumed = attribute(trainer, seeds=2, steps=10, folder=tmp_path)
    trained = sum(bool(steps) for steps in trainer.directions)
    assert trained == 5  # of 8 arms: three were there
    assert [r.metrics for r in resumed.results] == [r.metrics for r in whole.results]
    trainer.directions.clear()
    assert attribute(trainer, seeds=2, steps=10, folder=tmp_path).total == whole.total
    assert not any(trainer.directions)


def test_a_folder_of_another_attribution_is_refused(tmp_path):
    attribute(Trainer(plain_net, adamw), seeds=1, steps=2, folder=tmp_path)
    with refuses(Mismatch, what="steps"):
        attribute(Trainer(plain_net, adamw), seeds=1, steps=3, folder=tmp_path)
    with refuses(Mismatch, what="layers"):
        attribute(Trainer(plain_net, adamw), seeds=1, steps=2, only="1", folder=tmp_path)


def test_a_make_that_gives_other_weights_each_time_is_refused():
    drawn = iter(range(100))
    trainer = Trainer(plain_net, adamw)
    with pytest.raises(DecaylabError, match="other weights"):
        attribute(lambda seed: trainer(next(drawn)), seeds=1, steps=2)


def test_a_make_that_gives_other_batches_each_time_is_refused():
    calls = iter(range(100))

    def make(seed):
        model, optimizer, _, evaluate = Trainer(plain_net, adamw)(seed)
        inputs = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(next(calls)))

        def step():
            loss = model(inputs.double()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return model, optimizer, step, evaluate

    with pytest.raises(DecaylabError, match="same batches"):
        attribute(make, seeds=1, steps=2)


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


@pytest.mark.parametrize("made", [None, (1, 2), ("model", "optimizer", print, print)])
def test_a_make_that_makes_something_else_is_refused(made):
    with refuses(BadValue, name="what make(seed) returns"):
        attribute(lambda seed: made, seeds=1, steps=1)


@pytest.mark.parametrize("evaluated", [0.3, {}, None])
def test_an_evaluate_that_returns_no_dict_of_numbers_is_refused(evaluated):
    trainer = Trainer(plain_net, adamw)
    with refuses(BadValue, name="what evaluate() returns", value=evaluated):
        attribute(lambda seed: (*trainer(seed)[:3], lambda: evaluated), seeds=1, steps=1)


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
