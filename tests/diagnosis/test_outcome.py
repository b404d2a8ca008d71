"""Whether decay helped, from outcomes that are known."""

import pytest
from diagnosis.recorded import ScriptedLayer, records
from scipy import stats

from decaylab import diagnose
from decaylab.diagnosis import Reason
from decaylab.diagnosis.outcome import Helped, end_values, outcome_of
from decaylab.diagnosis.runs import read_run
from decaylab.records import Row, Rows


def run(weight_decay, *, diverged=False, **outcomes):
    """Records of one layer, and outcomes: a last value, or all of them by step."""
    rows = list(records({"a": ScriptedLayer(growth=0.005, weight_decay=weight_decay)}).rows)
    for name, values in outcomes.items():
        listed = values if isinstance(values, list) else [values]
        rows += [Row(10 * (i + 1), 0, 0.0, f"outcome/{name}", v) for i, v in enumerate(listed)]
    if diverged:
        rows.append(Row(1000, 0, 0.0, "weight_norm/a", float("nan")))
    return Rows(tuple(rows))


def judged(mine, others):
    return outcome_of([read_run(x) for x in mine], [read_run(x) for x in others])


def test_one_seed_ends_better_or_worse():
    assert judged([run(0.02, test_loss=1.0)], [run(0, test_loss=2.0)]).verdict is Helped.BETTER
    assert judged([run(0.02, test_loss=2.0)], [run(0, test_loss=1.0)]).verdict is Helped.WORSE
    assert judged([run(0.02, test_loss=1.0)], [run(0, test_loss=1.0)]).verdict is Helped.UNDECIDED
    better = judged([run(0.02, test_accuracy=0.9)], [run(0, test_accuracy=0.8)])
    assert better.verdict is Helped.BETTER
    assert better.gain == pytest.approx(0.1)


def test_the_interval_is_welchs():
    mine, its = [2.0, 2.1, 2.3], [2.6, 2.4, 2.9]
    found = judged([run(0.02, test_loss=x) for x in mine], [run(0, test_loss=x) for x in its])
    low, high = stats.ttest_ind(its, mine, equal_var=False).confidence_interval(0.95)
    assert found.interval == pytest.approx((low, high))  # by how much lower the loss is
    assert found.verdict is (Helped.YES if low > 0 else Helped.UNDECIDED)
    assert found.seeds == (3, 3)


@pytest.mark.parametrize(("apart", "verdict"), [(1.0, Helped.YES), (-1.0, Helped.NO)])
def test_several_seeds_decide(apart, verdict):
    mine = [run(0.02, test_loss=2.0 + 0.01 * i) for i in range(3)]
    its = [run(0, test_loss=2.0 + apart + 0.01 * i) for i in range(3)]
    assert judged(mine, its).verdict is verdict
    alike = [run(0, test_loss=2.0 + 0.011 * i) for i in range(3)]
    assert judged(mine, alike).verdict is Helped.UNDECIDED


def test_what_was_not_trained_on_decides():
    mine = run(0.02, loss=[3.0, 1.0], test_loss=2.0, val_accuracy=0.5)
    its = run(0, loss=[3.0, 2.0], test_loss=1.0, val_accuracy=0.6)
    assert judged([mine], [its]).name == "val_accuracy"
    only_loss = judged([run(0.02, loss=[3.0, 1.0])], [run(0, loss=[3.0, 2.0])])
    assert only_loss.name == "loss"
    assert only_loss.in_training
    assert only_loss.verdict is Helped.BETTER
    assert judged([run(0.02, loss=1.0)], [run(0, test_loss=1.0)]).verdict is Helped.UNKNOWN


def test_a_loss_in_training_is_the_mean_of_the_last_tenth():
    values = [5.0] * 18 + [2.0, 4.0]
    assert end_values(read_run(run(0.02, loss=values)))["loss"] == 3.0
    assert end_values(read_run(run(0.02, test_loss=values)))["test_loss"] == 4.0
    broken = [2.0, float("nan")]  # the last finite one
    assert end_values(read_run(run(0.02, eval_loss=broken)))["eval_loss"] == 2.0


def until(rows, step):
    """A run that was killed after this step."""
    return Rows(tuple(row for row in rows.rows if row.step <= step))


def test_runs_of_different_lengths_are_compared_where_the_shortest_ends():
    slow, fast = [3.0 - 0.2 * i for i in range(10)], [2.9 - 0.2 * i for i in range(10)]
    mine, its = run(0.02, test_loss=fast, loss=fast), run(0, test_loss=slow, loss=slow)
    found = judged([until(mine, 50)], [its])
    assert (found.step, found.run, found.baseline) == pytest.approx((50, fast[4], slow[4]))
    assert found.verdict is Helped.BETTER
    assert judged([mine], [its]).step is None
    seeds = judged([mine, mine, until(mine, 30)], [its] * 3)
    assert (seeds.step, seeds.run, seeds.baseline) == pytest.approx((30, fast[2], slow[2]))
    shown = str(diagnose(until(mine, 50), its))
    assert "The run with decay was better (test loss 2.100 with decay, 2.200 without at" in shown
    once = run(0, test_loss=[float("nan")] * 9 + [1.0])
    assert judged([until(mine, 50)], [once]).verdict is Helped.UNKNOWN
    assert "logged in all runs by step 50" in " ".join(str(diagnose(until(mine, 50), once)).split())


def test_a_run_that_diverged_has_ended_worse():
    mine, its = run(0.02, diverged=True, test_loss=0.1), run(0, test_loss=1.0)
    worse = judged([mine], [its])
    assert (worse.verdict, worse.diverged) == (Helped.WORSE, (1, 0))
    assert judged([its], [run(0, diverged=True)]).verdict is Helped.BETTER
    assert judged([mine], [run(0, diverged=True)]).verdict is Helped.UNDECIDED
    assert judged([mine, its, its], [its, its]).diverged == (1, 0)


def test_a_loss_that_was_nan_once_is_no_divergence():
    mine = run(0.02, loss=[3.0, float("nan"), 2.0])
    read = read_run(mine)
    assert not read.diverged
    assert [trouble.reason for trouble in read.troubles] == [Reason.NOT_FINITE]
    assert judged([mine], [run(0, loss=[3.0, 2.5])]).verdict is Helped.BETTER
    ended = read_run(run(0.02, loss=[3.0, float("nan"), 2.0, float("nan"), float("inf")]))
    assert ended.diverged
    assert ended.troubles[0]["step"] == 40


def test_without_a_baseline_or_a_loss():
    assert judged([run(0.02, loss=1.0)], []).verdict is Helped.NOT_COMPARED
    assert judged([run(0.02)], []).verdict is Helped.UNKNOWN
    assert judged([run(0.02)], [run(0)]).verdict is Helped.UNKNOWN


def test_several_seeds_are_judged_one_by_one():
    mine = [run(0.02, test_loss=2.0 + 0.01 * i) for i in range(3)]
    its = [run(0, test_loss=3.0 + 0.01 * i) for i in range(2)]
    found = diagnose(mine, its)
    assert found.outcome.verdict is Helped.YES
    assert found.outcome.seeds == (3, 2)
    assert len(found.seeds) == 3
    assert {seed.findings[0].verdict for seed in found.seeds} == {found.findings[0].verdict}
    assert found.findings[0].effect.value == pytest.approx(
        found.seeds[0].findings[0].effect.value, rel=1e-6
    )


def test_seeds_that_disagree_are_not_averaged():
    strong, weak = run(0.02, test_loss=1.0), run(0.0002, test_loss=1.0)
    same = [run(0, test_loss=1.0)]
    verdicts = [diagnose(one, same[0]).findings[0].verdict for one in (strong, weak)]
    assert verdicts[0] != verdicts[1]
    found = diagnose([strong, weak], same)  # of another decay: no seed of the first
    assert [item.reason.name for item in found.troubles] == ["SEED_LEFT_OUT"]
    assert found.findings[0].verdict == verdicts[0]


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        ("episode_return", True),
        ("valid_r2", True),
        ("val/mAP", True),
        ("val_mse", False),
        ("dev.ppl", False),
        ("valid-rmse", False),
        ("score_matching_loss", False),
    ],
)
def test_which_way_is_better_goes_by_the_name(name, larger):
    better, worse = (2.0, 1.0) if larger else (1.0, 2.0)
    ended = judged([run(0.02, **{name: better})], [run(0, **{name: worse})])
    assert (ended.verdict, ended.larger_is_better) == (Helped.BETTER, larger)


def test_an_outcome_that_does_not_say_which_way_is_better_is_not_judged():
    ended = judged([run(0.02, gap=2.0)], [run(0, gap=1.0)])
    assert (ended.verdict, ended.name) == (Helped.UNKNOWN, "gap")
    beside = judged([run(0.02, gap=2.0, loss=1.0)], [run(0, gap=1.0, loss=2.0)])
    assert (beside.verdict, beside.name) == (Helped.BETTER, "loss")


def test_held_out_data_decides_whatever_its_measure_is_called():
    mine = run(0.02, loss=[1.0], valid_rmse=2.0, train_accuracy=0.9)
    its = run(0, loss=[2.0], valid_rmse=1.0, train_accuracy=0.8)
    assert judged([mine], [its]).name == "valid_rmse"


@pytest.mark.parametrize(
    ("plain", "others"),
    [
        ("val_loss", ["ema_val_loss", "val_aux_loss", "val_ece", "val_kl"]),
        ("val_acc", ["val_acc_ema", "ema_val_acc", "val_loss"]),
        ("eval_loss", ["eval_first_set_loss", "eval_ppl"]),
    ],
)
def test_of_several_held_out_outcomes_the_plainest_decides(plain, others):
    mine, its = (run(decay, **dict.fromkeys([*others, plain], 1.0)) for decay in (0.02, 0))
    assert judged([mine], [its]).name == plain


def test_any_measure_in_training_is_the_mean_of_the_last_tenth():
    values = [5.0] * 18 + [2.0, 4.0]
    assert end_values(read_run(run(0.02, g_loss=values)))["g_loss"] == 3.0
