"""Evaluation by graphs: which work is captured, when it is captured anew. On a GPU: tests/gpu."""

import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from decaylab.data import load
from decaylab.training import RunSpec, evaluate, train_to_end
from decaylab.training.build import build_model

MODULE = sys.modules["decaylab.training.evaluate"]  # the package has a function of that name
SPEC = RunSpec(hidden=(16,), batch_norm=True, batch_size=256, epochs=1, lr_drop_every=2)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture
def captures(monkeypatch):
    """Stands for CUDA: work that was given for capture once is called again at each replay."""
    made = []

    class Replayed:
        def __init__(self, work, graphs):
            self.work, self.calls = work, 0
            made.append(self)

        def __call__(self):
            self.calls += 1
            return self.work()

    monkeypatch.setattr(MODULE, "Captured", Replayed)
    return made


def evaluator(model, data, **options):
    made = MODULE.Evaluator(model, data, **options)
    made._graphs = Forgetful()
    return made


class Forgetful:
    """In the place of CUDA graphs: counts how often they are let go of."""

    forgotten = 0

    def forget(self):
        self.forgotten += 1


def test_replays_give_what_evaluate_gives_as_weights_and_statistics_change(digits, captures):
    model = build_model(SPEC, digits)
    again = evaluator(model, digits, batch_size=100)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.uniform_(0.1, 1.0)
        for split in (digits.test, digits.train):
            assert again(split) == evaluate(model, split, digits, batch_size=100)
    assert len(captures) == 3  # full batches of both splits, and the last ones: 60 and 37 images
    assert captures[0].calls == 3 * (3 + 14)
    assert model.training


def test_what_lies_elsewhere_now_is_captured_anew(digits, captures):
    model, other = build_model(SPEC, digits), build_model(replace(SPEC, seed=1), digits)
    again = evaluator(model, digits)
    again(digits.test)
    model.load_state_dict(other.state_dict())  # copies
    assert again(digits.test) == evaluate(other, digits.test, digits)
    assert len(captures) == 1
    model.load_state_dict(other.state_dict(), assign=True)
    assert again(digits.test) == evaluate(other, digits.test, digits)
    assert len(captures) == 2
    model.double().float()
    again(digits.test)
    assert len(captures) == 3
    assert again._graphs.forgotten == 3


def test_each_batch_enters_autocast_by_itself(digits, captures):
    """So that no weights that were cast before the capture become part of it."""
    entered = []

    def autocast():
        entered.append(1)
        return nullcontext()

    evaluator(build_model(SPEC, digits), digits, batch_size=100, autocast=autocast)(digits.test)
    assert len(entered) == 4


def test_a_signal_between_batches_ends_it(digits):
    model = build_model(SPEC, digits)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluator(model, digits).launch(digits.test, interrupt)
    assert model.training


def test_a_run_evaluates_in_its_precision(digits):
    last = train_to_end(replace(SPEC, precision="bf16"), data=digits)
    exact = evaluate(last.model, digits.test, digits)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = evaluate(last.model, digits.test, digits)
    assert last.values["test/loss"] == rounded.loss != exact.loss
