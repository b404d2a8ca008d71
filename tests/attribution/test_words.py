import math

import numpy as np
import pytest
from scipy import stats

from decaylab.attribution import words
from decaylab.attribution.arms import SIZE_FREE_ROTATION, ArmResult
from decaylab.attribution.reasons import Doubt, Fault, Unused
from decaylab.attribution.shares import Estimate, Shares, estimate, in_points, seeds_to_tell
from decaylab.training.held_layers import WHY_NOT_HELD, LayerNote


def shares(metric="test/accuracy", doubt=None):
    total = Estimate(0.019, 0.012, 0.026, 3)
    fractions = {"size": Estimate(0.05, -0.1, 0.2, 3), "rotation": Estimate(0.92, 0.8, 1.04, 3)}
    effects = {"size": Estimate(0.001, 0.0, 0.002, 3), "rotation": Estimate(0.018, 0.01, 0.026, 3)}
    points = in_points(metric, [0.9])
    return Shares(
        metric, total, effects, effects, fractions, fractions, doubt=doubt, in_points=points
    )


def test_the_answer_is_one_sentence():
    assert words.sentence(shares()) == (
        "Decay changes test/accuracy by +1.9 [+1.2, +2.6] points; 92 % [80, 104] of it is"
        " recovered by the rotation alone, 5 % [-10, 20] by the size alone."
    )
    assert words.sentence(shares("loss")).startswith(
        "Decay changes loss by +0.019 [+0.012, +0.026];"
    )
    assert "cannot be told apart from zero" in words.sentence(shares(doubt=Doubt.TOTAL_UNCLEAR))
    no_shares = Shares("loss", Estimate(1.0, -1.0, 3.0, 2), doubt=Doubt.NO_SEED)
    assert "cannot be told apart from zero" in words.sentence(no_shares)
    assert words.sentence(Shares("loss", Estimate(1.0, math.nan, math.nan, 1))) == (
        "Decay changes loss by +1."
    )


def test_numbers_without_bounds():
    assert words.fraction(Estimate(0.5, math.nan, math.nan, 1)) == "50 %"
    assert words.fraction(Estimate(0.5, -math.inf, math.inf, 3)) == "50 %"
    assert words.fraction(Estimate(math.nan, -math.inf, math.inf, 3)) == "?"
    assert words.fraction(Estimate(-0.004, -0.003, 0.002, 3)) == "0 % [0, 0]"  # not -0
    assert words.amount(Estimate(-0.0, -0.0, 0.0, 3), points=False) == "+0 [+0, +0]"
    assert words.percent(3e-9) == "< 0.001 %"
    assert words.percent(0.031) == "3.1 %"


def test_the_rows_of_a_table():
    rows = words.share_rows(shares())
    assert rows[0] == ["total", "", "", "+1.9 ± 0.7"]
    assert rows[2] == ["rotation", "92 % [80, 104]", "92 % [80, 104]", "+1.8 ± 0.8"]
    unclear = words.share_rows(shares(doubt=Doubt.TOTAL_UNCLEAR))
    assert unclear[2] == ["rotation", "", "", "+1.8 ± 0.8"]  # no fractions of what may be nothing


def test_the_unit_of_an_accuracy_goes_by_its_values():
    assert all(in_points(name, [0.5, math.nan]) for name in ("test/accuracy", "val_acc", "Acc@1"))
    assert not in_points("val_acc", [91.5])  # percent already
    assert not in_points("loss", [0.5])
    assert not in_points("acceleration", [0.5])


def test_how_many_seeds_would_tell():
    for count in (4, 9, 30):
        values = np.resize([0.0, 2.0], 3) * math.sqrt(count / 4)
        total = estimate([*values])
        needed = seeds_to_tell(total)
        deviation = np.std(values, ddof=1)
        quantile = stats.t.ppf(0.975, needed - 1)
        assert quantile * deviation / math.sqrt(needed) < total.value
        before = stats.t.ppf(0.975, needed - 2) * deviation / math.sqrt(needed - 1)
        assert before >= total.value or needed == 4
    assert seeds_to_tell(Estimate(0.001, -1.0, 1.002, 3)) is None
    assert "about 7 seeds" in words.doubt_sentence(Doubt.TOTAL_UNCLEAR, "loss", 7)


@pytest.mark.parametrize("note", LayerNote)
def test_every_note_has_a_sentence(note):
    sentence = words.note_sentence("conv1", note)
    assert sentence.startswith("conv1 is ")
    assert sentence.endswith(".")
    if not note.held:
        assert WHY_NOT_HELD[note]


@pytest.mark.parametrize("doubt", Doubt)
def test_every_doubt_has_a_sentence(doubt):
    assert words.doubt_sentence(doubt, "loss").endswith(".")


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_has_a_sentence(fault):
    sentence, *remedy = words.unused_sentences(
        [Unused("size", 2, fault, "rotation", "conv1", 0.031)]
    )
    assert "size" in sentence
    assert "eed 2" in sentence
    if fault is Fault.MISSED:
        assert "the rotation of conv1 by 3.1 % (more than 2 %)" in sentence
    assert bool(remedy) == (fault is Fault.MISSED)


def test_arms_that_diverged_are_named_in_one_sentence():
    lost = [Unused(arm, seed, Fault.DIVERGED) for arm in ("size", "rotation") for seed in (0, 1, 4)]
    [sentence] = words.unused_sentences(lost)
    assert sentence.endswith("size (seeds 0, 1 and 4); rotation (seeds 0, 1 and 4).")


def test_arms_with_what_they_missed():
    results = [
        ArmResult("with decay", 0, {"loss": 1.0}),
        ArmResult("size", 0, {"loss": 2.0}, {"size": {"a": 0.01, "b": 0.001}}),
        ArmResult("size", 1, {"loss": 2.5}, {"size": {"a": 0.0, "b": 0.015}}),
        ArmResult(SIZE_FREE_ROTATION.name, 0, {"loss": math.nan}, finite=False),
    ]
    assert words.arm_rows(results, Shares("loss", Estimate(1.0, 0.0, 2.0, 2))) == [
        ["with decay", "1", ""],
        ["size", "2.25 ± 0.35", "1.5 %, size"],
        ["norms alone", "diverged", ""],
    ]
