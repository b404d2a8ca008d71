"""Verdicts on records written by hand, where what decay does is known."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from diagnosis.recorded import ScriptedLayer, only, reasons, records
from refusals import refuses

from decaylab import diagnose
from decaylab.diagnosis import Mechanism, Reason, suggest
from decaylab.diagnosis.layout import markdown
from decaylab.diagnosis.outcome import Helped
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.words.findings import left_out
from decaylab.errors import Lacks, WrongType
from decaylab.optim.laws import balance
from decaylab.optim.laws.dynamics import norms_without_decay
from decaylab.records import Row, Rows

# Over 1,000 steps at lr 0.1 the exposure is 2, and N doubles or more without decay.
STRONG, GROWTH = 0.02, 0.005


def sgd(**settings):
    return ScriptedLayer(growth=GROWTH, **settings)


def kfac(**settings):
    """Dominated by its damping, so that norms move as SGD's do."""
    own = {"power": 0, "damping": 1e-3, "share": 0.3, "e": -0.4}
    return ScriptedLayer(growth=GROWTH, **own | settings)


def verdicts(run, baseline=None):
    return [finding.verdict for finding in diagnose(run, baseline).findings]


@pytest.mark.parametrize("power", [2, 1])
def test_effective_learning_rate_acts(power):
    run = records({"conv": sgd(weight_decay=STRONG, power=power)})
    baseline = records({"conv": sgd(power=power)})
    against = diagnose(run, baseline)["effective l"]
    alone = diagnose(run)["effective l"]
    assert against.verdict == alone.verdict == "acts"
    assert against.effect.source == "baseline"
    assert alone.effect.source == "reconstruction"
    # the reconstruction from one run finds what the other run shows
    assert alone.effect.value == pytest.approx(against.effect.value, rel=0.02)
    expected = [
        (b / a) ** power
        for a, b in zip(
            sgd(weight_decay=STRONG, power=power).norms(1000)[549::50],
            sgd(power=power).norms(1000)[549::50],
            strict=True,
        )
    ]
    mean = math.exp(sum(map(math.log, expected)) / len(expected))
    assert against.effect.value == pytest.approx(mean, rel=0.02)


def test_effective_learning_rate_does_not_act():
    weak = records({"conv": sgd(weight_decay=STRONG / 100)})
    assert verdicts(weak)[0] == "does not act"  # exposure 0.02
    # a frozen-like layer: hardly pushed, decayed a little
    mild = records({"conv": ScriptedLayer(growth=0.0, weight_decay=STRONG / 40)})
    assert verdicts(mild, records({"conv": ScriptedLayer(growth=0.0)}))[0] == "does not act"
    head = records({"conv": sgd(), "head": sgd(weight_decay=STRONG, invariant=False)})
    finding = diagnose(head)["effective l"]
    assert finding.verdict == "does not act"
    assert reasons(finding) == {Reason.NO_INVARIANT_DECAYS}
    plain = diagnose(records({"fc": sgd(weight_decay=STRONG, invariant=False)}))
    assert plain["effective l"].verdict == "does not act"
    assert reasons(plain["effective l"]) == {Reason.NO_INVARIANT}
    assert verdicts(records({"conv": kfac(weight_decay=STRONG)}))[0] == "does not act"


def test_effective_learning_rate_cannot_be_told():
    unknown = diagnose(records({"conv": sgd(weight_decay=STRONG, power=None)}))["effective l"]
    assert unknown.verdict == "cannot tell"
    assert reasons(unknown.remedies) == {Reason.NAME_THE_LAW}
    l2 = records({"conv": sgd(weight_decay=STRONG, power=1, decay="l2")})
    alone = diagnose(l2)["effective l"]
    assert alone.verdict == "cannot tell"
    assert reasons(alone.remedies) == {Reason.GIVE_BASELINE}
    assert verdicts(l2, records({"conv": sgd(power=1)}))[0] == "acts"
    # its exposure, tiny as it looks before the preconditioner, is no ground for "does not act"
    weak = records({"conv": sgd(weight_decay=STRONG / 100, power=1, decay="l2")})
    assert verdicts(weak)[0] == "cannot tell"


def test_between_the_thresholds_it_cannot_be_told():
    between = (RULES.acts * RULES.nothing) ** 0.5
    run = records({"conv": ScriptedLayer(growth=0.0, weight_decay=math.log(between) / 150)})
    finding = diagnose(run, records({"conv": ScriptedLayer(growth=0.0)}))["effective l"]
    assert RULES.nothing < finding.effect.value < RULES.acts
    assert finding.verdict == "cannot tell"
    assert only(finding.remedies, Reason.MORE_SEEDS)


@pytest.mark.parametrize(
    ("smaller", "verdict"), [(3.0, "acts"), (1.05, "does not act"), (1.35, "cannot tell")]
)
def test_jacobian_against_a_baseline(smaller, verdict):
    net = {"fc": sgd(weight_decay=STRONG, invariant=False)}
    plain = {"fc": sgd(invariant=False)}
    finding = diagnose(
        records(net, {"jacobian_norm": 10.0}), records(plain, {"jacobian_norm": 10.0 * smaller})
    )["Jacobian"]
    assert finding.verdict == verdict
    assert finding.effect.value == pytest.approx(smaller)
    assert finding.effect.probes == ("jacobian_norm",)


@pytest.mark.parametrize(
    ("layer", "mechanism"),
    [
        (sgd, Mechanism.EFFECTIVE_LR),
        (kfac, Mechanism.DAMPING),
        (partial(kfac, scale_free=True), None),
    ],
)
def test_jacobian_beside_scale_invariant_layers_names_their_own_mechanism(layer, mechanism):
    """K-FAC's effective learning rate does not change: what it may come through is the damping.

    If that is scale-free, there is no such way.
    """
    run, baseline = (
        records({"conv": layer(weight_decay=wd), "fc": layer(weight_decay=wd, invariant=False)}, of)
        for wd, of in ((STRONG, {"jacobian_norm": 1.0}), (0.0, {"jacobian_norm": 3.0}))
    )
    through = diagnose(run, baseline)["Jacobian"].because_of(Reason.THROUGH_OTHERS)
    assert (through["mechanisms"] if through else None) == ([mechanism] if mechanism else None)


def test_jacobian_that_grows_is_said_to():
    run = records({"fc": sgd(weight_decay=STRONG, invariant=False)}, {"gn_norm": 4.0})
    baseline = records({"fc": sgd(invariant=False)}, {"gn_norm": 1.0})
    finding = diagnose(run, baseline)["Jacobian"]
    assert finding.verdict == "does not act"
    assert only(finding.reasons, Reason.OPPOSITE)["change"].effect.value == pytest.approx(1 / 4)
    assert finding.quantity == "gn_norm"


def test_layers_that_are_scale_invariant_and_nearly_so_are_compared_by_one_quantity():
    """By their angles, if both runs have them: a mean of angles and laws would be neither."""

    def run(weight_decay, angle=None):
        kinds = {"conv": True, "fc": False}
        layers = {k: sgd(weight_decay=weight_decay, invariant=x) for k, x in kinds.items()}
        rows = [*records(layers).rows, Row(1, 0, 0.0, "size_response/fc", 1e-4)]
        steps = range(50, 1001, 50) if angle else ()
        rows += [Row(s, 0, 0.0, f"rotation/{k}", x) for s in steps for k, x in angle.items()]
        return Rows(tuple(rows))

    measured = diagnose(
        run(STRONG, {"conv": 0.01, "fc": 0.03}), run(0.0, {"conv": 0.02, "fc": 0.04})
    )
    finding = measured["effective l"]
    assert finding.quantity == "rotation"
    assert [row.effect.value for row in finding.layers] == pytest.approx([0.5, 0.75])
    assert finding.effect.value == pytest.approx(math.sqrt(0.5 * 0.75))
    assert Reason.OPPOSITE in reasons(finding)
    by_law = diagnose(run(STRONG), run(0.0))["effective l"]
    assert by_law.quantity == "effective_lr"
    assert [row.effect is not None for row in by_law.layers] == [True, False]


def test_jacobian_needs_records_and_a_baseline():
    net = {"fc": sgd(weight_decay=STRONG, invariant=False)}
    alone = diagnose(records(net, {"jacobian_norm": 1.0}))["Jacobian"]
    assert alone.verdict == "cannot tell"
    # what this run has recorded
    assert reasons(alone.remedies) == {Reason.GIVE_BASELINE, Reason.RECORD_SAME_WAY}
    nothing = diagnose(records(net))["Jacobian"]
    assert reasons(nothing.remedies) == {Reason.GIVE_BASELINE, Reason.RECORD_IN_BOTH}
    unmeasured = diagnose(records(net), records({"fc": sgd(invariant=False)}))["Jacobian"]
    assert unmeasured.verdict == "cannot tell"
    assert reasons(unmeasured.remedies) == {Reason.RECORD_IN_BOTH}
    invariant = diagnose(records({"conv": sgd(weight_decay=STRONG)}))["Jacobian"]
    assert invariant.verdict == "does not act"
    assert reasons(invariant) == {Reason.ALL_INVARIANT}


def test_damping_acts():
    run, baseline = records({"conv": kfac(weight_decay=STRONG)}), records({"conv": kfac()})
    against, alone = diagnose(run, baseline), diagnose(run)
    assert against["effective d"].verdict == alone["effective d"].verdict == "acts"
    assert alone["effective d"].effect.value == pytest.approx(
        against["effective d"].effect.value, rel=0.1
    )
    assert Reason.DAMPING_DOMINATES in reasons(diagnose(baseline).follows)
    high = diagnose(records({"conv": kfac(weight_decay=STRONG, share=0.9)}))
    assert Reason.DAMPING_DOMINATES not in reasons(high.follows)


def test_a_damping_whose_share_stays_is_not_said_to_matter():
    """The effective damping falls, and the curvature as much: K-FAC is as second-order."""
    layers = [kfac(weight_decay=wd) for wd in (STRONG, 0.0)]
    lasts = [layer.norms(1000)[-1] for layer in layers]
    layers[1] = replace(layers[1], share=1 / (1 + 7 / 3 * (lasts[0] / lasts[1]) ** 2))
    result = diagnose(*(records({"conv": layer}) for layer in layers))
    assert result["effective d"].verdict == "acts"
    assert Reason.SAME_SHARES in reasons(result["effective d"])
    assert Reason.NO_MORE_SECOND_ORDER in reasons(result.follows)
    assert Reason.LOWERS_DAMPING not in reasons(result.follows)
    raised = diagnose(*(records({"conv": kfac(weight_decay=wd)}) for wd in (STRONG, 0.0)))
    assert Reason.LOWERS_DAMPING in reasons(raised.follows)


def test_the_damping_is_compared_where_it_is_recorded_most():
    """Layers whose damping was measured at the end alone are judged over the same steps."""
    pair = [records({"a": kfac(weight_decay=wd), "b": kfac(weight_decay=wd)}) for wd in (STRONG, 0)]
    sparse = [
        Rows(tuple(row for row in of.rows if row.name != "effective_damping/a" or row.step == 1000))
        for of in pair
    ]
    dense, found = (diagnose(*of)["effective d"] for of in (pair, sparse))
    assert found.effect.records == dense.effect.records > 1
    assert found.effect.value == pytest.approx(dense.effect.value, rel=1e-12)


def test_one_run_with_few_shares_asks_for_a_baseline():
    """How a norm would have grown hangs on the share all along, not at the two ends."""
    dense = records({"conv": kfac(weight_decay=STRONG)})
    few = [row for row in dense.rows if "order_share" not in row.name or row.step in (1, 1000)]
    finding = diagnose(Rows(tuple(few)))["effective d"]
    assert diagnose(dense)["effective d"].verdict == "acts"
    assert finding.verdict == "cannot tell"
    assert {Reason.FEW_SHARES, Reason.GIVE_BASELINE} <= reasons(finding)
    assert diagnose(Rows(tuple(few)), records({"conv": kfac()}))["effective d"].verdict == "acts"


def test_damping_does_not_act():
    assert verdicts(records({"conv": sgd(weight_decay=STRONG)}))[2] == "does not act"
    share = {"share": 0.999}
    pair = [records({"conv": kfac(weight_decay=wd, **share)}) for wd in (STRONG, 0.0)]
    negligible = diagnose(*pair)["effective d"]
    assert negligible.verdict == "does not act"
    assert reasons(negligible) == {Reason.DAMPING_NEGLIGIBLE}
    free = diagnose(records({"conv": kfac(weight_decay=STRONG, scale_free=True)}))["effective d"]
    assert free.verdict == "does not act"
    assert reasons(free) == {Reason.SCALE_FREE}
    plain = records({"fc": kfac(weight_decay=STRONG, invariant=False)})
    assert verdicts(plain)[2] == "does not act"


@pytest.mark.parametrize("diverged", [False, True])
def test_decay_is_not_said_to_be_dispensable_in_a_run_that_diverged(diverged):
    free = records({"conv": kfac(weight_decay=STRONG, scale_free=True)})
    last = Row(1001, 0, 0.0, "train/loss", math.nan if diverged else 1.0)
    found = diagnose(Rows((*free.rows, last)))
    assert (Reason.NO_EFFECT in reasons(found.follows)) is not diverged


def test_layers_that_lack_different_things_are_named():
    layers = {name: kfac(weight_decay=STRONG) for name in ("short", "long")}
    rows = [
        row
        for row in records(layers).rows
        if row.name != "second_order_share/long"
        and ("order_share" not in row.name or row.step in (1, 1000))
    ]
    assert (
        "There is nothing to compare with: its second-order share is recorded too rarely (short);"
        " its second-order share is not recorded (long)."
    ) in [finding["text"] for finding in diagnose(Rows(tuple(rows))).as_dict()["findings"]]


def test_damping_cannot_be_told_without_shares():
    finding = diagnose(records({"conv": kfac(weight_decay=STRONG, share=None)}))["effective d"]
    assert finding.verdict == "cannot tell"
    assert reasons(finding.remedies) == {Reason.RECORD_SHARE}
    assert reasons(finding.layers[0]) == {Reason.NO_SHARES}


def test_without_decay_nothing_acts():
    for layer in (sgd(), kfac(), sgd(invariant=False)):
        result = diagnose(records({"layer": layer}))
        assert {finding.verdict for finding in result.findings} == {"does not act"}
        assert result.first[0][0] == "the watched run"
        assert reasons(result.troubles) == {Reason.NO_DECAY}


def test_skipped_layers_are_rows_with_a_reason():
    rows = records({"conv": sgd(weight_decay=STRONG)}).rows
    rows += (Row(1, 0, 0.0, "setting_frozen/stem", 1.0),)
    rows += (Row(1, 0, 0.0, "weight_norm/other", 1.0), Row(1, 0, 0.0, "setting_moved/other", 0.0))
    result = diagnose(Rows(rows))
    skipped = {layer: why.reason for layer, why in result.skipped.items()}
    assert skipped == {"stem": Reason.FROZEN, "other": Reason.NOT_STEPPED}
    why = {row.layer: row.why for row in result["effective l"].layers}
    assert why == {"conv": None, **result.skipped}
    assert result["effective l"].verdict == "acts"


def test_decay_that_takes_more_than_the_weight_does_not_shorten_it():
    """lr wd = 3: a step turns W into -2 W, and the norm grows."""
    layer = sgd(weight_decay=30.0)
    assert layer.norms(40)[-1] > layer.norms(1)[0]
    finding = diagnose(records({"conv": layer}, steps=40, every=5))["effective l"]
    assert finding.verdict == "cannot tell"
    assert Reason.TAKES_ALL in reasons(finding)


def test_runs_that_cannot_be_compared_are_judged_alone():
    run = records({"conv": sgd(weight_decay=STRONG)})
    for other, said in (
        (records({"stem": sgd()}), Reason.OTHER_LAYERS),
        (records({"conv": sgd(power=1)}), Reason.OTHER_OPTIMIZER),
        (records({"conv": sgd(lr=0.2)}), Reason.OTHER_LR),
        (records({"conv": sgd(lr=20.0, start=9.0)}), Reason.OTHER_LR),  # which makes that norm
        (records({"conv": sgd(settings={"setting_momentum": 0.9})}), Reason.OTHER_SETTING),
        (records({"conv": sgd(weight_decay=0.01)}), Reason.BASELINE_DECAYS),
    ):
        result = diagnose(run, other)
        assert reasons(result.troubles) == {said}
        assert not result.baselines
        assert result["effective l"].effect.source == "reconstruction"


def test_the_outcome_of_a_refused_baseline_is_not_compared():
    def ended(layer, loss):
        rows = records({"conv": layer}).rows
        return Rows((*rows, Row(1000, 0, 0.0, "outcome/test_loss", loss)))

    run = ended(sgd(weight_decay=STRONG), 2.0)
    assert diagnose(run, ended(sgd(), 1.0)).outcome.verdict is Helped.WORSE
    assert diagnose(run, ended(sgd(lr=0.2), 1.0)).outcome.verdict is Helped.NOT_COMPARED


def test_schedules_of_nearly_one_length_are_one():
    """A cosine over 1,000 and one over 1,011 steps: at the end their ratio is far from one."""

    def scheduled(layer, length):
        rows = [row for row in records({"conv": layer}).rows if "setting_lr" not in row.name]
        for step in (1, *range(50, 1001, 50)):
            lr = 0.05 * (1 + math.cos(math.pi * step / length))
            rows.append(Row(step, 0, 0.0, "setting_lr/conv", lr))
        return Rows(tuple(rows))

    run = scheduled(sgd(weight_decay=STRONG), 1000)
    assert diagnose(run, scheduled(sgd(), 1011)).baselines
    assert reasons(diagnose(run, scheduled(sgd(), 1100)).troubles) == {Reason.OTHER_LR}


def test_nobody_is_told_to_raise_the_learning_rate_a_millionfold():
    for weight_decay, advised in ((STRONG, True), (0.1, False)):  # exp(4), exp(20) times
        result = diagnose(records({"conv": sgd(weight_decay=weight_decay)}))
        assert (Reason.SCHEDULE in reasons(result.follows)) is advised


def test_a_schedule_is_for_the_layers_that_it_is_written_for():
    """Not for those whose size hardly matters, which `advise schedule` leaves as they are."""
    for invariant, some in ((True, []), (False, ["conv"])):
        kinds = {"conv": True, "fc": invariant}
        layers = {k: sgd(weight_decay=STRONG, invariant=x) for k, x in kinds.items()}
        hardly = Row(1, 0, 0.0, "size_response/fc", 1e-4)  # 0.01 % per per cent
        follows = diagnose(Rows((*records(layers).rows, hardly))).follows
        (schedule,) = (said for said in follows if said.reason is Reason.SCHEDULE)
        assert schedule["some"] == some


def test_records_at_other_steps_and_too_few():
    run = records({"conv": sgd(weight_decay=STRONG)}, every=50)
    finding = diagnose(run, records({"conv": sgd()}, every=333))["effective l"]
    assert finding.effect.steps == (1, 1)  # the first step is common to all
    assert finding.verdict == "cannot tell"
    assert reasons(finding.remedies) == {Reason.RECORD_FURTHER}
    rows = tuple(row for row in records({"conv": sgd()}, every=333).rows if "norm" not in row.name)
    late = tuple(Row(s, 0, 0.0, "weight_norm/conv", 1.0) for s in (333, 666))
    apart = diagnose(run, Rows((*rows, *late)))["effective l"]
    assert apart.verdict == "cannot tell"
    assert reasons(apart.remedies) == {Reason.SAME_STEPS}
    few = diagnose(records({"conv": sgd(weight_decay=STRONG)}, steps=10, every=50))
    assert {finding.verdict for finding in few.findings} <= {"cannot tell", "does not act"}
    assert few.skipped["conv"].reason is Reason.RECORDED_ONCE


def test_exposure_that_is_not_recorded_follows_from_the_settings():
    full = records({"conv": sgd(weight_decay=STRONG)})
    less = Rows(tuple(row for row in full.rows if not row.name.startswith("decay_exposure")))
    a, b = (diagnose(rows)["effective l"].effect.value for rows in (full, less))
    assert a == pytest.approx(b, rel=1e-9)


def test_empty_and_diverged_records():
    empty = diagnose(Rows(()))
    assert {finding.verdict for finding in empty.findings} == {"cannot tell"}
    assert reasons(empty.troubles) == {Reason.NOTHING_RECORDED}
    rows = records({"conv": sgd(weight_decay=STRONG)}).rows
    bad = Row(901, 0, 0.0, "weight_norm/conv", math.nan)
    result = diagnose(Rows((*rows, bad)))
    assert result.troubles[0].reason is Reason.DIVERGED
    assert result.troubles[0]["step"] == 901
    assert result["effective l"].verdict == "acts"
    assert result["effective l"].effect.steps[1] == 900


@pytest.mark.parametrize(("last", "diverged"), [(math.nan, True), (3.0, False)])
def test_a_jacobian_that_is_not_finite_to_the_end_is_said(last, diverged):
    """K-FAC leaves steps out whose gradient is not finite, so the weights stay finite."""
    rows = records({"conv": sgd(weight_decay=STRONG)}).rows
    values = [(100, 2.0), (300, math.inf), (900, last)]
    jacobians = [Row(step, 0, 0.0, "jacobian_norm", value) for step, value in values]
    said = diagnose(Rows((*rows, *jacobians))).troubles[0]
    assert said["bad"] == ["jacobian_norm"] * (2 if diverged else 1)
    assert said.reason is (Reason.PROBABLY_DIVERGED if diverged else Reason.NOT_FINITE)


def test_records_that_are_not_there(tmp_path):
    with refuses(Lacks, what="records"):
        diagnose(tmp_path)
    with refuses(WrongType, name="the source of records"):
        diagnose(torch.nn.Linear(2, 2))


def test_one_result_three_forms():
    result = diagnose(
        records({"conv": sgd(weight_decay=STRONG), "head": sgd(invariant=False)}),
        records({"conv": sgd(), "head": sgd(invariant=False)}),
    )
    plain = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert [f["verdict"] for f in plain["findings"]] == [f.verdict for f in result.findings]
    text = result.to_markdown()
    assert text == markdown(result)
    assert all(f"## {finding['title']}" in text for finding in plain["findings"])
    assert all(sentence in text for sentence in plain["follows"])
    assert plain["headline"] in text


def test_what_is_not_known_is_null_in_json():
    """Without a baseline nothing was gained or lost, and a layer without decay has no advice."""
    alone = records({"conv": sgd(weight_decay=STRONG), "head": sgd(invariant=False)})
    assert math.isnan(diagnose(alone).outcome.gain)
    plain = json.loads(json.dumps(diagnose(alone).as_dict(), allow_nan=False))
    assert plain["outcome"]["gain"] is None
    json.dumps(suggest(records({"head": sgd(invariant=False)})).as_dict(), allow_nan=False)


@pytest.mark.parametrize("apart", [20, 450])
@pytest.mark.parametrize("e", [-1.0, 0.0, 0.5, 1.0])
def test_the_reconstruction_is_the_simulation_without_decay(e, apart):
    """Exposure 2.7, however far apart the records are: within one per cent."""
    settings = {"growth": 0.01, "lr": 0.1, "e": e}
    decayed = ScriptedLayer(weight_decay=0.03, **settings).norms(920)
    plain = ScriptedLayer(**settings).norms(920)
    at = range(19, 920, apart)
    norms = tuple((i + 1, decayed[i]) for i in at)
    exposures = [0.003 * (i + 1) for i in at]
    found = norms_without_decay(norms, exposures, [e] * len(norms))
    start = plain[19] / decayed[19]  # the reconstruction begins at the first record
    assert found[-1][1] * start == pytest.approx(plain[919], rel=0.01 + abs(start - 1))


@pytest.mark.parametrize("e", [-1.0, 0.0, 0.5])
def test_the_equilibrium_is_where_the_simulation_ends(e):
    layer = ScriptedLayer(growth=0.01, lr=0.1, weight_decay=0.03, e=e)
    norms = layer.norms(20_000)
    norm, steps = balance(0.01, 1.0, 0.003, e)
    assert norms[-1] == pytest.approx(norm, rel=0.01)
    # after `steps` steps the distance of N from the balance is 1/e of what it was, near the balance
    near = [n**2 / norm**2 - 1 for n in norms]
    start = next(i for i, x in enumerate(near) if abs(x) < 0.05)
    end = start + round(steps)
    final = norms[-1] ** 2 / norm**2 - 1
    assert (near[end] - final) / (near[start] - final) == pytest.approx(math.exp(-1), rel=0.05)


def test_undamped_kfac_has_no_equilibrium():
    assert balance(0.01, 1.0, 0.003, 1.0) is None
    assert balance(0.01, 1.0, 0.0, -1.0) is None


def test_records_cut_off_anywhere_do_not_crash(tmp_path):
    whole = records(
        {"0": ScriptedLayer(weight_decay=0.1, growth=1e-3), "1": ScriptedLayer(invariant=False)}
    )
    for length in range(0, len(whole.rows), 7):
        result = diagnose(Rows(whole.rows[:length]))
        assert len(result.findings) == 3
        if length < 9:
            assert result.first[0][0] == "the watched run"


def test_without_norms_that_is_said_first():
    whole = records({"0": ScriptedLayer(weight_decay=0.1)})
    rows = [row for row in whole.rows if not row.name.startswith("weight_norm")]
    result = diagnose(Rows(tuple(rows)))
    assert result.troubles[0].reason is Reason.TOO_FEW_NORMS
    assert [f.verdict for f in result.findings] == ["cannot tell", "cannot tell", "does not act"]
    assert reasons(result.follows) == {Reason.NOTHING_YET}


def test_what_cannot_be_told_is_followed_by_the_experiment_that_settles_it():
    """No Jacobian norm was recorded, so that records alone do not tell all."""
    head = sgd(weight_decay=STRONG, invariant=False)
    result = diagnose(records({"conv": sgd(weight_decay=STRONG), "head": head}))
    assert "cannot tell" in [finding.verdict for finding in result.findings]
    assert Reason.ATTRIBUTE in reasons(result.follows)
    assert "`decaylab.attribute` separates the mechanisms by experiment" in str(result)


def test_everything_frozen():
    rows = [Row(1, 0, 0.0, f"setting_frozen/{layer}", 1.0) for layer in "01"]
    result = diagnose(Rows(tuple(rows)))
    assert [f.verdict for f in result.findings] == ["does not act"] * 3
    assert reasons(result.findings[0]) == {Reason.ALL_FROZEN}
    assert set(result.skipped) == {"0", "1"}


def test_a_layer_of_zeros_has_no_direction():
    whole = records(
        {"0": ScriptedLayer(weight_decay=0.1, settings={"setting_beta2": 0.999}, power=1)}
    )
    rows = [replace(r, value=0.0) if r.name == "weight_norm/0" else r for r in whole.rows]
    result = diagnose(Rows(tuple(rows)))
    assert result["effective l"].verdict == "cannot tell"


def test_records_without_a_name_are_told_apart():
    run = records({"0": ScriptedLayer(weight_decay=0.1)})
    result = diagnose(run, records({"0": ScriptedLayer()}))
    assert (result.runs, result.baselines) == (("the watched run",), ("the baseline",))
    name, trouble = diagnose(run, Rows(())).first[0]
    assert (name, trouble.reason) == ("the baseline", Reason.NOTHING_RECORDED)


def test_layers_left_out_for_one_reason_share_a_line():
    rows = records({"0": sgd(weight_decay=STRONG)}).rows
    rows += tuple(Row(1, 0, 0.0, f"setting_frozen/{name}", 1.0) for name in ("stem", "tail"))
    result = diagnose(Rows(rows))
    (layers,) = left_out(result).values()
    assert layers == "stem, tail"


def test_a_baseline_that_is_shorter_is_said_first():
    run = records({"0": sgd(weight_decay=STRONG)})
    (trouble,) = diagnose(run, records({"0": sgd()}, steps=500)).troubles
    assert (trouble.reason, trouble["pair"]) == (Reason.STEPS_DIFFER, (1000, 500))
    assert diagnose(run, records({"0": sgd()}, every=333)).first == ()  # its last record: step 999
