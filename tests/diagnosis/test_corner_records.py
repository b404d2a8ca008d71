"""Records that are not as one would like them: resumed, zeros, warm-ups, mixed optimizers."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from diagnosis.recorded import ScriptedLayer, only, reasons, records
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from decaylab import watch
from decaylab.diagnosis import Reason, diagnose, equivalent_schedule, suggest
from decaylab.diagnosis.comparable import comparable
from decaylab.diagnosis.runs import Run, read_run
from decaylab.errors import DecaylabError
from decaylab.records import Row, Rows
from decaylab.records.recording import Meta, Recording

DECAYED = ScriptedLayer(weight_decay=0.03, growth=0.004)


def changed(rows, name, value):
    """`value(row)` instead of the rows of a name."""
    return Rows(tuple(replace(r, value=value(r)) if r.name == name else r for r in rows.rows))


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8, affine=False, eps=1e-300),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).double()


def train(model, optimizer, steps, after=lambda: None):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long()).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def test_a_resumed_run_has_all_of_its_exposure(tmp_path):
    """`watch` counts the exposure from the resume on; the settings tell the rest."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.02)
    for start, steps in ((0, 45), (40, 60)):
        with watch(model, optimizer, every=10, folder=tmp_path) as watched:
            if start:
                watched.resume(start)
            train(model, optimizer, steps)
    layer = read_run(tmp_path).layers["0"]
    assert [step for step, _ in layer.norms] == [1, *range(10, 101, 10)]
    for step, exposure in layer.exposure:
        assert exposure == pytest.approx(0.002 * step)


def test_records_that_begin_in_the_middle_are_no_verdict_on_the_whole():
    """A resumed run that was watched without a folder: it says which steps it speaks of."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    with watch(model, optimizer, every=10) as watched:
        watched.resume(85)
        train(model, optimizer, 35)
    found = diagnose(watched)
    assert only(found.troubles, Reason.BEGINS_LATE)["step"] == 90
    little = only(found["effective l"].reasons, Reason.TOO_LITTLE)
    assert little["steps"] == (90, 120)
    assert little["taken"] == pytest.approx(0.035)


def test_zeros_at_a_record_leave_the_others_as_they_are():
    """A layer that begins at zero has no direction there, and has one later."""
    whole = records({"conv": DECAYED})
    zero = changed(whole, "weight_norm/conv", lambda r: 0.0 if r.step == 1 else r.value)
    lacking = Rows(tuple(r for r in whole.rows if (r.step, r.name) != (1, "weight_norm/conv")))
    for judge in (diagnose, suggest):
        assert judge(zero) == judge(lacking)
    assert diagnose(zero)["effective l"].verdict == "acts"


@pytest.mark.parametrize("power", [2, 1, 0])
def test_a_layer_that_stays_zero_is_left_out(power):
    layer = replace(DECAYED, power=power, damping=1e-3 if power == 0 else None)
    both = records({"zero": layer, "conv": layer})
    rows = changed(both, "weight_norm/zero", lambda r: 0.0)
    assert {k: why.reason for k, why in diagnose(rows).skipped.items()} == {"zero": Reason.ZEROS}
    zero, conv = suggest(rows).layers
    assert (zero.suggested, reasons(zero)) == (None, {Reason.ZEROS})
    assert conv.suggested == suggest(both).layers[1].suggested
    assert equivalent_schedule(rows).layers == ("conv",)


@pytest.mark.parametrize("power", [1, 2])
def test_a_step_that_is_recorded_twice_counts_once(power):
    """As where a loop that was started again wrote into the same records."""
    once = records({"conv": replace(DECAYED, power=power, settings={"setting_beta2": 0.99})})
    twice = Rows(tuple(row for row in once.rows for _ in range(2)))
    assert diagnose(twice) == diagnose(once)
    assert suggest(twice) == suggest(once)


def test_an_unused_layer_of_zeros_is_no_divergence():
    """Its direction does not turn by any number: the rotation is nan from the first step on."""
    turns = [Row(step, 0, 0.0, "rotation/unused", math.nan) for step in (1, 500, 1000)]
    result = diagnose(Rows((*records({"conv": DECAYED}).rows, *turns)))
    assert not result.troubles


def test_a_norm_that_no_decay_holds_is_said_of_its_layer():
    """A first norm of 0.1, at which a step adds more than |W|^2."""
    slow, fast = (
        ScriptedLayer(
            decay="l2", weight_decay=1e-4, growth=growth, settings={"setting_momentum": 0.9}
        )
        for growth in (0.001, 0.4)
    )
    both = records({"slow": slow, "fast": fast})
    both = changed(both, "weight_norm/fast", lambda row: 0.1 if row.step == 1 else row.value)
    advised = suggest(both)
    assert advised.layers[1].suggested is None
    assert reasons(advised.layers[1]) == {Reason.NOTHING_HOLDS}
    assert advised.weight_decay == pytest.approx(advised.layers[0].suggested)


def test_the_learning_rate_of_a_suggestion_is_the_one_it_is_for():
    """Decoupled decay takes lr * wd: 0.1 after a warm-up at 0.02."""
    free = ScriptedLayer(growth=0.004)
    warm = changed(records({"conv": free}), "setting_lr/conv", lambda r: 0.02)
    warm = Rows((*warm.rows, Row(50, 0, 0.0, "setting_lr/conv", 0.1)))
    found, plain = suggest(warm), suggest(records({"conv": free}))
    assert found.lr == 0.1
    assert found.lr * found.weight_decay == pytest.approx(plain.lr * plain.weight_decay, rel=0.01)


def test_a_schedule_that_begins_at_zero_has_no_factors():
    """As a linear warm-up has it: LambdaLR multiplies, and nothing times zero is a rate."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.02)
    warm_up = LambdaLR(optimizer, lambda step: min(step / 5, 1.0))
    with watch(model, optimizer, every=1) as watched:
        train(model, optimizer, 10, warm_up.step)
    schedule = equivalent_schedule(watched)
    assert schedule.others[0] == schedule.lr[0] == 0.0
    with pytest.raises(DecaylabError, match="starts at a learning rate of 0"):
        schedule.lambdas()


def test_a_schedule_holds_what_a_normalised_weight_is_computed_from():
    model = small_net()
    model[0] = nn.utils.parametrizations.weight_norm(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.02)
    with watch(model, optimizer, every=2) as watched:
        train(model, optimizer, 40)
    schedule = equivalent_schedule(watched)
    assert schedule.layers == ("0",)
    own, rest = schedule.groups(model)
    direction = model[0].parametrizations.weight.original1
    assert [id(p) for p in own["params"]] == [id(direction)]
    assert len(rest["params"]) == len(list(model.parameters())) - 1


def test_dampening_is_part_of_the_decay():
    """With a dampening, L2 takes that much less: same path, same exposure, same suggestion."""
    start = small_net()
    model, other = copy.deepcopy(start), copy.deepcopy(start)
    settings = {"momentum": 0.9, "dampening": 0.8}
    groups = [{"params": [model[0].weight], "weight_decay": 0.2}, {"params": model[3].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, **settings)
    with watch(model, optimizer, every=1) as watched:
        train(model, optimizer, 60)
    schedule = equivalent_schedule(watched)
    optimizer = torch.optim.SGD(schedule.groups(other), lr=schedule.others[0], **settings)
    scheduler = LambdaLR(optimizer, schedule.lambdas())
    train(other, optimizer, 60, scheduler.step)
    a, b = (net[0].weight.detach() / net[0].weight.detach().norm() for net in (model, other))
    assert (a - b).norm() < 1e-8
    recording = watched.recording
    rest = tuple(r for r in recording.rows.rows if not r.name.startswith("decay_exposure"))
    for of in (recording, replace(recording, rows=Rows(rest))):
        assert read_run(of).layers["0"].total_exposure == pytest.approx(60 * 0.1 * 0.2 * 0.2 / 0.1)

    def with_dampening(value):
        timelines = recording.settings.items()
        changed = {
            layer: tuple((step, replace(own, dampening=value)) for step, own in timeline)
            for layer, timeline in timelines
        }
        return suggest(replace(recording, settings=changed)).layers[0]

    taken, summed = suggest(recording).layers[0], with_dampening(None)
    assert taken.suggested == pytest.approx(summed.suggested / 0.2)
    kept_out = with_dampening(1.0)
    assert kept_out.suggested is None
    assert reasons(kept_out) == {Reason.DAMPENED_OUT}


def test_what_differs_is_said_in_the_order_of_the_settings():
    spec = {"decay": "l2", "epochs": 3, "precision": "fp32", "deterministic": False, "seed": 0}
    other = {"decay": "none", "epochs": 4, "precision": "tf32", "deterministic": True, "seed": 1}
    runs = [Run(Recording("run", Rows(()), meta=Meta(spec=of)), {}, {}, 10) for of in (spec, other)]
    why_not, differs = comparable(*runs)
    assert why_not is None
    assert [item["name"] for item in differs] == ["epochs", "precision", "deterministic", "seed"]


def test_kfac_beside_adam_is_not_said_to_be_scale_free():
    """The decayed scale-invariant layer is left to Adam, the head is K-FAC's."""
    run = records(
        {
            "conv": replace(DECAYED, power=1),
            "head": ScriptedLayer(power=0, damping=1e-3, invariant=False, weight_decay=0.03),
        }
    )
    finding = diagnose(run)["effective d"]
    assert finding.verdict == "does not act"
    assert reasons(finding) == {Reason.NO_KFAC_LAYER}


def test_a_mechanism_that_there_is_not():
    with pytest.raises(KeyError, match="momentum"):
        diagnose(records({"conv": DECAYED}))["momentum"]


def test_moments_of_one_run_only_are_not_compared_with_none():
    """Adam's law has two forms, with the recorded second moment and without: both or neither."""
    settings = {"setting_momentum": None, "setting_beta1": 0.9, "setting_beta2": 0.999}
    decayed, plain = (
        records(
            {"conv": ScriptedLayer(weight_decay=decay, growth=0.004, power=1, settings=settings)}
        )
        for decay in (0.03, 0.0)
    )
    # gradients that grow, so that what Adam remembers of the norms is not what it is without them
    steps = sorted({row.step for row in decayed.rows})
    moments = [Row(s, 0, 0.0, "second_moment/conv", math.exp(s / 50)) for s in steps]
    without = diagnose(decayed, plain)["effective l"].effect
    for first, second in ((moments, []), ([], moments)):
        pair = Rows((*decayed.rows, *first)), Rows((*plain.rows, *second))
        assert diagnose(*pair)["effective l"].effect == without
    both = (Rows((*rows.rows, *moments)) for rows in (decayed, plain))
    effect = diagnose(*both)["effective l"].effect
    assert effect.probes == ("weight_norm", "lr", "second_moment")
    assert abs(effect.value / without.value - 1) > 0.01


def test_a_baseline_without_a_common_step_is_not_asked_for_again():
    settings = {"setting_momentum": None, "setting_beta1": 0.9, "setting_beta2": 0.999}
    run = records(
        {"conv": ScriptedLayer(decay="l2", weight_decay=0.03, power=1, settings=settings)}
    )
    other = records({"conv": ScriptedLayer(power=1, settings=settings)})
    apart = Rows(
        tuple(replace(r, step=r.step + 7) if "setting" not in r.name else r for r in other.rows)
    )
    finding = diagnose(run, apart)["effective l"]
    assert reasons(finding.layers[0]) == {Reason.NO_COMMON_STEP}
    assert reasons(finding.remedies) == {Reason.SAME_STEPS}
    alone = diagnose(run)["effective l"]
    assert reasons(alone.layers[0]) == {Reason.L2_RESCALED}
    assert reasons(alone.reasons) == {Reason.NOTHING_TO_COMPARE, Reason.L2_RESCALED}
    assert reasons(alone.remedies) == {Reason.GIVE_BASELINE}


def test_the_damping_is_judged_of_kfac_s_layers_alone():
    """As in a transformer: an embedding under a normalisation is stepped by Adam beside K-FAC."""
    conv = replace(DECAYED, power=0, e=0.0, damping=1e-2, share=0.5)
    embedding = replace(DECAYED, power=1, weight_decay=0.06)
    alone, beside = (
        diagnose(records(layers))["effective d"]
        for layers in ({"conv": conv}, {"conv": conv, "embedding": embedding})
    )
    assert beside.effect == alone.effect
    assert reasons(beside.layers[1]) == {Reason.NOT_KFAC}
    assert beside.layers[1].verdict is None


@pytest.mark.parametrize(("grown", "free"), [(True, False), (False, False), (True, True)])
def test_scale_free_damping_is_advised_where_it_would_be_lower(grown, free):
    """lambda |W(0)|^2 / |W|^2 is lower where the weights have grown, else higher."""
    moves = {"growth": 0.004} if grown else {"weight_decay": 0.01}
    layer = ScriptedLayer(power=0, e=0.0, damping=1e-2, scale_free=free, share=0.02, **moves)
    said = only(diagnose(records({"conv": layer})).follows, Reason.DAMPING_DOMINATES)
    assert said["remedies"][0]["grown"] is (grown and not free)


def test_a_layer_without_a_gradient_does_not_decay():
    """torch leaves such a weight alone: a norm that stands still is no balance there."""
    model = small_net()
    model.unused = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).double()
    model.forward = lambda inputs: model[3](model[2](model[1](model[0](inputs))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.02)
    with watch(model, optimizer, every=10) as watched:
        train(model, optimizer, 100)
    result = diagnose(watched)
    assert {k: why.reason for k, why in result.skipped.items()} == dict.fromkeys(
        ("unused.0", "unused.1"), Reason.NEVER_MOVED
    )
    assert [row.layer for row in suggest(watched).layers if row.suggested] == ["0"]
    assert equivalent_schedule(watched).layers == ("0",)


def test_the_exposure_is_that_of_the_layers_that_are_judged():
    """Fine-tuning: the normalised layers have a small part of the head's learning rate."""
    head = ScriptedLayer(invariant=False, weight_decay=0.03)
    slow = diagnose(records({"conv": replace(DECAYED, lr=1e-3), "head": head}))
    finding = slow["effective l"]
    assert finding.verdict == "does not act"
    little = only(finding.reasons, Reason.TOO_LITTLE)
    assert (little["taken"], little["steps"][1]) == (pytest.approx(0.03), 1000)
    faster = {"conv": replace(DECAYED, lr=3e-3, growth=0.01), "head": head}
    finding = diagnose(records(faster))["effective l"]
    assert finding.verdict == "does not act"
    assert only(finding.reasons, Reason.MAY_SHOW_MORE)["taken"] == pytest.approx(0.09)


def test_a_warm_up_does_not_hide_what_kfac_remembers():
    """The factors' memory is long against the decay at the full learning rate, not at the first."""
    memory = {"setting_factor_decay": 0.95, "setting_refresh_every": 10.0}
    layer = replace(DECAYED, power=0, e=0.0, damping=1e-2, share=0.9, settings=memory)
    layer = replace(layer, weight_decay=0.1, growth=0.02)
    full = records({"conv": layer})
    warm = changed(full, "setting_lr/conv", lambda r: 1e-4)
    warm = Rows((*warm.rows, Row(50, 0, 0.0, "setting_lr/conv", 0.1)))
    for rows in (full, warm):
        assert reasons(diagnose(rows)["effective d"].layers[0]) == {Reason.OLD_FACTORS}


def test_a_baseline_whose_momentum_changes_on_the_way_is_no_baseline():
    decayed, plain = (records({"conv": of}) for of in (DECAYED, ScriptedLayer(growth=0.004)))
    assert diagnose(decayed, plain).baselines
    other = Rows((*plain.rows, Row(500, 0, 0.0, "setting_momentum/conv", 0.5)))
    found = diagnose(decayed, other)
    assert not found.baselines
    other = only(found.troubles, Reason.OTHER_SETTING)
    assert (other["name"], other["pair"], other["step"]) == ("momentum", (0.0, 0.5), 500)


def test_a_learning_rate_of_zero_has_no_factor_with_a_baseline_or_without():
    """Nothing turns at lr 0: for the first 800 of 1000 steps, and for the last 500."""
    for settings in (((1, 0.0), (801, 0.1)), ((1, 0.1), (501, 0.0))):
        runs = []
        for layer in (DECAYED, ScriptedLayer(growth=0.004)):
            rates = [Row(step, 0, 0.0, "setting_lr/conv", lr) for step, lr in settings]
            kept = [r for r in records({"conv": layer}).rows if r.name != "setting_lr/conv"]
            runs.append(Rows((*rates, *kept)))
        alone, both = (diagnose(*of)["effective l"].effect for of in (runs[:1], runs))
        assert alone.steps == both.steps
        assert alone.records == both.records


def test_the_schedules_factor_is_said_of_this_runs_learning_rate():
    """A learning rate that falls to a hundredth needs less at the end than at the start."""
    falling = ScriptedLayer(weight_decay=0.03, growth=0.004)
    rows = [r for r in records({"conv": falling}).rows if not r.name.startswith("decay_exp")]
    rows.append(Row(501, 0, 0.0, "setting_lr/conv", 0.001))
    schedule = equivalent_schedule(Rows(tuple(rows)))
    assert schedule.lr[-1] < schedule.lr[0]
    said = only(diagnose(Rows(tuple(rows))).follows, Reason.SCHEDULE)
    assert said["factor"] == pytest.approx(schedule.lr[-1] / schedule.others[-1], rel=0.02)


def test_the_decay_beside_a_suggestion_is_the_latest():
    rows = records({"conv": DECAYED, "head": replace(DECAYED, invariant=False)}).rows
    later = [Row(500, 0, 0.0, f"setting_weight_decay/{name}", 0.3) for name in ("conv", "head")]
    assert [of.weight_decay for of in suggest(Rows((*rows, *later))).layers] == [0.3, 0.3]


def test_nothing_is_suggested_from_a_layer_that_decay_has_taken():
    advised = suggest(records({"conv": ScriptedLayer(weight_decay=0.3, growth=1e-12, e=0.0)}))
    assert advised.weight_decay is None
    assert reasons(advised.layers[0]) == {Reason.TAKEN}


def test_a_layer_frozen_on_the_way_is_judged_by_its_training():
    """As `watch` records it: no norms since. Its decay ended there, that of the other went on."""
    runs = []
    for layer in (DECAYED, ScriptedLayer(growth=0.004)):
        rows = records({"first": layer, "second": layer}).rows
        kept = [r for r in rows if not (r.name.endswith("/first") and r.step > 500)]
        runs.append(Rows((*kept, Row(550, 0, 0.0, "setting_frozen/first", 1.0))))
    found = diagnose(*runs)
    assert not found.skipped
    until = {row.layer: row.effect.steps[1] for row in found["effective l"].layers}
    assert until == {"first": 500, "second": 1000}
    assert only(found.follows, Reason.SCHEDULE)["exposure"] == pytest.approx(1000 * 0.1 * 0.03)


@pytest.mark.parametrize("budget", [None, 500])
def test_a_decay_that_would_hold_a_norm_too_slowly_is_not_suggested(budget):
    """Pushes that end after a tenth of the run: what holds a norm later does not bring it back.

    The suggestion does within the budget: of |W|^2's distance to its balance exp(-2) is left.
    """
    free = changed(
        records({"conv": ScriptedLayer(power=1)}),
        "weight_norm/conv",
        lambda row: (1 + 0.09 * min(row.step, 100) + 1e-5 * row.step) ** 0.5,
    )
    advice = suggest(free, steps=budget).layers[0]
    start, target = 10.01, advice.target**2
    squared, shrink = start, 0.1 * advice.suggested
    for _ in range(budget or 1000):  # dN = G - 2 s N
        squared = squared * (1 - 2 * shrink) + 1e-5
    assert (squared - target) / (start - target) == pytest.approx(math.exp(-2), rel=0.01)
    assert only(advice.notes, Reason.FOR_THE_BUDGET)["budget"] == (budget or 1000)
    patient = suggest(free, steps=10**6).layers[0]
    assert Reason.FOR_THE_BUDGET not in reasons(patient)
    assert patient.target == pytest.approx(1.0, rel=0.1)
    assert Reason.FOR_THE_BUDGET not in reasons(suggest(records({"conv": DECAYED})).layers[0])


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("response", [0.1, 0.2, 0.249, 0.251, 0.3, 0.5])
def test_a_verdict_that_hangs_on_the_limit_of_what_a_size_counts_is_open(response, another):
    """Unless another layer, whose size certainly does not count, has the same verdict."""
    layers = {"a": ScriptedLayer(invariant=False, power=1, weight_decay=0.02, growth=2e-3)}
    layers |= {"b": replace(layers["a"], invariant=True)} if another else {}
    rows = (*records(layers).rows, Row(1000, 0, 0.0, "size_response/a", response / 100))
    finding = diagnose(Rows(rows))["effective l"]
    if another or response < 0.15:
        assert finding.verdict == "acts"
    elif response > 0.4:
        assert finding.verdict == "does not act"
    else:
        assert finding.verdict == "cannot tell"
        (reason,) = finding.reasons
        assert reason.reason is Reason.SIZE_IN_DOUBT
        assert reason["responses"] == pytest.approx({"a": response})


def test_a_layer_frozen_on_the_way_in_a_loop_is_judged_by_its_training():
    """`watch` says of it that it is frozen, and that no optimizer steps it."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    with watch(model, optimizer, every=2) as watched:
        for step in range(30):
            if step == 20:
                model[0].requires_grad_(False)
            nn.functional.cross_entropy(
                model(torch.randn(8, 6).double()), torch.arange(8) % 3
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    diagnosis = diagnose(watched)
    assert not diagnosis.skipped
    assert Reason.UNWATCHED not in reasons(diagnosis.troubles)
    row = next(row for row in diagnosis["effective l"].layers if row.layer == "0")
    assert row.effect.steps[1] == 20


def test_a_run_is_no_baseline_or_seed_of_itself(tmp_path):
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, every=1, folder=tmp_path) as watched:
        for _ in range(3):
            model(torch.randn(8, 6).double()).square().mean().backward()
            optimizer.step()
    with pytest.raises(DecaylabError, match="is given twice"):
        diagnose(watched, watched)
    with pytest.raises(DecaylabError, match="is given twice"):
        diagnose([watched, tmp_path])
    with pytest.raises(DecaylabError, match="is given twice"):
        diagnose(tmp_path, [tmp_path / "." / ""])


BATCH = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class FindsItsRate(torch.optim.Optimizer):
    """SGD with d lr for its learning rate, as D-Adaptation and Prodigy have: d grows to its own."""

    def __init__(self, params, weight_decay):
        defaults = {"lr": 1.0, "weight_decay": weight_decay, "d": 1e-3, "law": "sgd"}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = min(1.2 * group["d"], 0.1)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["d"] * group["lr"] * group["weight_decay"])
                    parameter.sub_(parameter.grad, alpha=group["d"] * group["lr"])


def watched_with(make):
    model = small_net()
    optimizer = make(model.parameters())
    with watch(model, optimizer, every=10, probes="diagnosis", inputs=BATCH) as watched:
        train(model, optimizer, 100)
    return watched


@pytest.mark.filterwarnings("ignore:watch. effective_lr.*it finds its learning rate itself")
def test_decay_at_a_learning_rate_that_the_optimizer_finds_is_decay():
    """What it takes per step is not known; that there is some is, and how far the weights turn."""
    run = watched_with(lambda p: FindsItsRate(p, 0.5))
    plain = watched_with(lambda p: FindsItsRate(p, 0.0))
    alone, paired = diagnose(run), diagnose(run, plain)
    assert alone.decays
    assert not alone.troubles
    assert reasons(alone["effective l"]) == {Reason.LAW_UNKNOWN, Reason.GIVE_BASELINE}
    assert paired.baselines
    assert paired["effective l"].quantity == "rotation"
    assert read_run(run).layers["0"].unknown.reason is Reason.OWN_LR


@pytest.mark.filterwarnings("ignore:watch. effective_lr.*it finds its learning rate itself")
def test_decay_at_a_learning_rate_that_one_of_two_optimizers_finds_is_recorded_as_finite():
    model = small_net()
    found = FindsItsRate(model[0].parameters(), 0.5)
    given = torch.optim.SGD(model[3].parameters(), lr=0.1, weight_decay=0.1)
    with watch(model, [given, found], every=5, probes="diagnosis", inputs=BATCH) as run:
        train(model, given, 10, after=found.step)
    names = [name for name in run.records.names() if name.startswith("decay_exposure")]
    assert names == ["decay_exposure/3"]
    assert not run.records.not_finite()


@pytest.mark.filterwarnings("ignore:watch. effective_lr.*it finds its learning rate itself")
def test_a_learning_rate_that_is_found_is_not_compared_with_one_that_is_given():
    run = watched_with(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5))
    assert reasons(diagnose(run, watched_with(lambda p: FindsItsRate(p, 0.0))).troubles) == {
        Reason.OTHER_OPTIMIZER
    }


def test_optimizers_of_one_power_and_another_law_are_not_compared():
    run = watched_with(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5))
    adam = watched_with(lambda p: torch.optim.Adam(p, lr=0.01))
    lion = watched_with(lambda p: torch.optim.Adam([{"params": list(p), "law": "lion"}], lr=0.01))
    assert diagnose(run, adam).baselines
    assert reasons(diagnose(run, lion).troubles) == {Reason.OTHER_OPTIMIZER}


def test_no_run_at_all_is_refused():
    with pytest.raises(DecaylabError, match="the list of runs has no run: give one or more"):
        diagnose([])
