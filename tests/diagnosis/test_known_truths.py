"""What decay does is known by construction, and the diagnosis once said something else."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diagnosis.recorded import ScriptedLayer, only, reasons, records
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import LambdaLR

from decaylab import KFAC, diagnose, watch
from decaylab.diagnosis import Reason, suggest
from decaylab.diagnosis.comparable import comparable, grown_otherwise
from decaylab.diagnosis.runs import read_run
from decaylab.probes import FREE
from decaylab.records import Row, Rows

RESULTS = Path(__file__).parents[2] / "results"
INPUTS = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()


def train(
    model, optimizer, steps=40, scheduler=None, batch=INPUTS, clip=None, bound=None, **watching
):
    with watch(model, optimizer, **{"every": 4} | watching) as watched:
        for _ in range(steps):
            nn.functional.cross_entropy(model(batch), LABELS).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if bound is not None:
                nn.utils.clip_grad_value_(model.parameters(), bound)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return watched


def batch_norm_net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


@pytest.mark.parametrize("decayed", [True, False])
def test_gains_are_part_of_the_function(decayed):
    """Weight normalisation everywhere: the weights are scale-invariant, but their gains are not."""

    def run(weight_decay):
        torch.manual_seed(0)
        model = nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.ReLU(), weight_norm(nn.Linear(8, 3)))
        gains = [p for name, p in model.named_parameters() if name.endswith("original0")]
        rest = [p for p in model.parameters() if all(p is not gain for gain in gains)]
        groups = [{"params": rest, "weight_decay": weight_decay}]
        groups.append({"params": gains, "weight_decay": weight_decay if decayed else 0.0})
        optimizer = torch.optim.SGD(groups, lr=0.05)
        return train(model, optimizer, inputs=INPUTS, probes=["weight_norm", "jacobian_norm"])

    found = diagnose(run(0.5), run(0.0))
    layers = [row for row in found["Jacobian"].layers if row.layer in ("0", "2")]
    assert all(reasons(row) == {Reason.INVARIANT} for row in layers)
    assert found["Jacobian"].verdict == ("acts" if decayed else "does not act")
    said = [item["counting"] for item in found.follows if "counting" in item.data]
    assert any(gains for _, gains in said) is decayed


class Residual(nn.Module):
    """A sum stands before the normalisation, so the layer before it is not scale-invariant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.second(torch.relu(self.first(x)))))


def test_gradients_that_a_closure_takes_are_those_of_the_step():
    """As Lightning does it: before the step there are those of the last one, at other weights."""
    for model, name, invariant in ((Residual(), "second", False), (batch_norm_net(64), "0", True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-3)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(INPUTS), LABELS)
            loss.backward()
            return loss

        with watch(model, optimizer, every=2) as watched:
            for step in range(20):
                optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        parts = [row.value for row in watched.records.series(f"radial_gradient/{name}")]
        assert (max(parts) < 1e-3) is invariant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_modules_is_checked_by_the_gradients(dtype):
    for model, name, invariant in ((Residual(), "second", False), (batch_norm_net(), "0", True)):
        model = model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.5)
        watched = train(model, optimizer, batch=INPUTS.to(dtype))
        found = diagnose(watched)
        why = {row.layer: reasons(row) for row in found["Jacobian"].layers}
        assert (why[name] == {Reason.INVARIANT}) is invariant
        assert (Reason.GRADIENTS_ALONG in reasons(found.troubles)) is not invariant


def test_the_jacobian_is_a_product_over_layers():
    """4 % of each of sixteen layers is a factor of 3.6 in |J|^2; of one layer, 1.08."""
    for depth, verdict in ((16, "acts"), (1, "does not act")):
        layers = [
            {
                str(i): ScriptedLayer(invariant=False, weight_decay=weight_decay)
                for i in range(depth)
            }
            for weight_decay in (4e-4, 0.0)
        ]
        smaller = math.exp(-2 * 0.04 * depth)
        run, baseline = (
            records(of, {"jacobian_norm": value})
            for of, value in zip(layers, (smaller, 1.0), strict=True)
        )
        assert diagnose(run, baseline)["Jacobian"].verdict == verdict


def test_runs_that_begin_otherwise_are_not_compared():
    decayed, plain = ScriptedLayer(weight_decay=0.01, growth=1e-3), ScriptedLayer(growth=1e-3)
    run, baseline = records({"a": decayed}), records({"a": plain})
    assert diagnose(run, baseline).baselines
    larger = Rows(
        tuple(
            Row(*(row.step, row.epoch, row.seconds, row.name), row.value * 2)
            if row.name.startswith("weight_norm")
            else row
            for row in baseline.rows
        )
    )
    found = diagnose(run, larger)
    assert not found.baselines
    assert reasons(found.troubles) == {Reason.OTHER_START}
    runs = [
        train(model, torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=weight_decay))
        for model, weight_decay in ((batch_norm_net(8), 0.1), (batch_norm_net(10), 0.0))
    ]
    assert only(diagnose(*runs).troubles, Reason.OTHER_SIZE)["pair"] == (48, 60)


def test_a_decay_that_rounding_undoes():
    """bfloat16 has eight bits: W (1 - 1e-3) is W, and the two runs are the same, bit for bit."""
    runs = []
    for weight_decay in (0.1, 0.0):
        model = batch_norm_net().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay)
        schedule = LambdaLR(optimizer, lambda step: 1 - step / 600)  # to 0, which is no decay
        runs.append(train(model, optimizer, 600, schedule, INPUTS.bfloat16(), every=100))
    assert runs[0].records.series("weight_norm/0")[-1].value == pytest.approx(
        runs[1].records.series("weight_norm/0")[-1].value, rel=1e-12
    )
    for diagnosis in (diagnose(runs[0]), diagnose(*runs)):
        assert only(diagnosis.troubles, Reason.LOST_TO_ROUNDING)["layers"] == ["0", "3", "1"]
        assert [finding.verdict for finding in diagnosis.findings] == ["does not act"] * 3
        assert "Rounding undoes all weight decay of this run. Next: " in str(diagnosis)
        assert "\nRounding undoes all weight decay.\n" in str(diagnosis)
    for watched in runs:
        assert suggest(watched).weight_decay is None  # of a decay as weak as that


def test_a_decay_that_rounding_may_undo():
    """W (1 - 0.003) is W for some numbers of bfloat16 and not for others."""
    model = batch_norm_net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.3)
    alone = diagnose(train(model, optimizer, 600, batch=INPUTS.bfloat16(), every=100))
    assert alone["effective l"].verdict == "cannot tell"
    assert Reason.ROUNDED_AWAY in reasons(alone["effective l"])


def test_more_than_decay_can_do_is_not_put_down_to_it():
    """The baseline has the larger gradients of a smaller batch: exp(2 x 0.1) is all of decay's."""
    kfac = {"power": 0, "damping": 1e-3, "share": 0.5}
    run = records({"a": ScriptedLayer(weight_decay=1e-3, growth=1e-3, **kfac)})
    baseline = records({"a": ScriptedLayer(growth=1e-2, **kfac)})
    found = diagnose(run, baseline)["effective d"]
    assert found.verdict == "cannot tell"
    why = only(found.reasons, Reason.MORE_THAN_DECAY)
    assert (why["taken"], why["most"]) == (pytest.approx(0.1), pytest.approx(math.exp(0.2)))
    assert reasons(found.remedies) == {Reason.SAME_DATA}


@pytest.mark.parametrize(
    ("batches", "seeds"), [((64, 8), (0, 0)), ((8, 64), (0, 1)), ((64, 64), (0, 1))]
)
def test_a_baseline_of_other_batches_is_not_believed(batches, seeds):
    """A baseline of the same batch size, but of another seed, is."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 16, generator=generator)
    labels = torch.randint(0, 4, (512,), generator=generator)

    def run(weight_decay, batch, seed):
        order = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=weight_decay)
        with watch(model, optimizer, every=20) as watched:
            for _ in range(400):
                chosen = torch.randint(512, (batch,), generator=order)
                nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
                optimizer.step()
                optimizer.zero_grad()
        return watched

    mine, other = (run(*of) for of in zip((5e-3, 0.0), batches, seeds, strict=True))
    found = diagnose(mine, other)
    if batches[0] == batches[1]:
        assert found.baselines
        assert not found.first
    else:
        assert not found.baselines
        assert Reason.OTHER_GROWTH in reasons(found.troubles)
        assert found["effective l"].effect == diagnose(mine)["effective l"].effect


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("start", [1 / 1.2, 1.2])
def test_a_small_layer_of_another_seed_begins_elsewhere_and_grows_alike(power, start):
    layer = {"growth": 1e-3, "power": power}
    run = records({"a": ScriptedLayer(weight_decay=5e-3, **layer)})
    found = diagnose(run, records({"a": ScriptedLayer(start=start, **layer)}))
    assert found.baselines
    assert not found.first
    found = diagnose(run, records({"a": ScriptedLayer(start=start, **layer | {"growth": 2e-2})}))
    assert not found.baselines
    assert reasons(found.troubles) == {Reason.OTHER_GROWTH}


def test_a_baseline_whose_squared_norms_are_no_floats_is_left_out():
    """A float64 run on its way to infinity."""
    run = records({"a": ScriptedLayer(weight_decay=1e-3, growth=1e-3)})
    rows = [
        replace(row, value=1e200) if row.name == "weight_norm/a" and row.step > 500 else row
        for row in records({"a": ScriptedLayer(growth=1e-3)}).rows
    ]
    assert Reason.OTHER_GROWTH in reasons(diagnose(run, Rows(tuple(rows))).troubles)


def test_true_baselines_of_the_records_are_believed():
    names = ("bn-sgd", "bn-adam")
    specs = [path for path in RESULTS.rglob("spec.toml") if any(n in str(path) for n in names)]
    runs = [read_run(path.parent) for path in specs]
    decayed, plain = ([run for run in runs if run.decays is decays] for decays in (True, False))
    pairs = [(run, of) for run in decayed for of in plain if not comparable(run, of)[0]]
    assert len(pairs) > 20
    assert [(run.name, why) for run, of in pairs if (why := grown_otherwise(run, of))] == []


def test_records_of_others_are_not_said_to_have_no_decay(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(9)))
    assert len(only(diagnose(tmp_path).troubles, Reason.DAMAGED)["damaged"]) == 9
    found = diagnose(Rows(tuple(Row(s, 0, 0.0, "weight_norm/a", 1.0 + s) for s in range(1, 9))))
    assert {finding.verdict for finding in found.findings} == {"cannot tell"}
    assert Reason.NO_DECAY not in reasons(found.troubles)
    assert reasons(found.follows) == {Reason.NOTHING_YET}


@pytest.mark.parametrize("clips", [(1e-3, 1e-3), (1e-3, None), (None, 1e-3), (None, None)])
def test_clipped_gradients_do_not_follow_sgds_law(clips):
    """Where each step has one length, a weight turns by lr/|W|, not by lr/|W|^2.

    Two runs that are clipped alike show it by how far they turned.
    """
    runs = []
    for weight_decay, clip in zip((0.1, 0.0), clips, strict=True):
        model = batch_norm_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=weight_decay)
        runs.append(train(model, optimizer, 100, clip=clip))
    found = diagnose(*runs)["effective l"]
    alike = clips[0] == clips[1]
    assert found.verdict == ("acts" if alike else "cannot tell")
    assert any(x.data.get("share") == 1.0 for x in found.reasons) is not alike
    assert found.quantity == ("" if not alike else "rotation" if clips[0] else "effective_lr")
    alone = diagnose(runs[0])["effective l"]
    assert alone.verdict == ("cannot tell" if clips[0] else "acts")
    assert (Reason.GIVE_BASELINE in reasons(alone.remedies)) is bool(clips[0])


@pytest.mark.parametrize(("bound", "law"), [(1e-5, 1.0), (0.3, 2.0)])
def test_gradients_clipped_by_value_do_not_follow_sgds_law(bound, law):
    """At a bound of 1e-5 all entries are cut, and a weight turns by lr/|W|; at 0.3 hardly any."""
    turns = []
    for scale in (1.0, 2.0):  # the law itself: how far the first step turns weights twice as long
        model = batch_norm_net().double()
        model[0].weight.data *= scale
        model[0].bias.data *= scale
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        once = train(model, optimizer, 1, batch=INPUTS.double(), bound=bound)
        turns.append(once.records.last("rotation/0"))
    assert math.log2(turns[0] / turns[1]) == pytest.approx(law, abs=0.05)
    runs = []
    for weight_decay in (0.1, 0.0):
        model = batch_norm_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=weight_decay)
        runs.append(train(model, optimizer, 100, bound=bound))
    for given in (runs, runs[:1]):
        found = diagnose(*given)["effective l"]
        unknown = law == 1 and len(given) == 1  # two runs show it by how far they turned
        assert found.verdict == ("cannot tell" if unknown else "acts")
        assert any(x.data.get("share") == 1.0 for x in found.reasons) is unknown


def test_a_kl_clip_shortens_what_old_curvature_makes_longer():
    """Without recorded rotations the clip's coefficients tell, where they do."""
    memory = {"factor_decay": 0.95, "refresh_every": 10, "invert_every": 100}
    layers = [
        ScriptedLayer(
            **{"power": 0, "damping": 1e-9, "share": 0.99, "lr": 0.02, "growth": 1e-3},
            weight_decay=weight_decay,
            settings={f"setting_{name}": float(value) for name, value in memory.items()},
        )
        for weight_decay in (0.1, 0.0)
    ]
    longer = []
    for clips in ((1.0, 1.0), (0.8, 1.0)):
        pair = [
            records({"a": layer}, {"clip_coefficient": clip})
            for layer, clip in zip(layers, clips, strict=True)
        ]
        why = only(diagnose(*pair)["effective l"].reasons, Reason.OLD_CURVATURE)
        longer.append(why["longer"])
        assert why["clip"] == (None if clips[0] == 1 else pytest.approx(0.8))
    assert longer[1] == pytest.approx(0.8 * longer[0])


@pytest.mark.parametrize("baseline", [True, False])
def test_a_run_that_changed_its_optimizer_has_no_one_law(baseline):
    """AdamW turns by lr/|W|, then SGD by lr/|W|^2: recorded angles are believed, no law is."""
    runs = []
    for weight_decay in (0.3, 0.0)[: 1 + baseline]:
        model = batch_norm_net()
        with watch(model, torch.optim.AdamW(model.parameters(), 0.01), every=4) as watched:
            for kind, lr in ((torch.optim.AdamW, 0.01), (torch.optim.SGD, 0.1)):
                optimizer = kind(model.parameters(), lr, weight_decay=weight_decay)
                for _ in range(60):
                    nn.functional.cross_entropy(model(INPUTS), LABELS).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        runs.append(watched)
    found = diagnose(*runs)
    assert Reason.OPTIMIZER_CHANGED in reasons(found.troubles)
    if baseline:
        assert found["effective l"].quantity == "rotation"
        assert found["effective l"].effect.probes == ("rotation",)
    else:
        assert found["effective l"].verdict == "cannot tell"
        assert reasons(found["effective l"].remedies) == {Reason.GIVE_BASELINE}


def test_the_decay_time_is_that_of_the_whole_run():
    """A cosine: 1/(lr wd) at the mean lr, not at that of the half that is judged."""
    model = batch_norm_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    watched = train(model, optimizer, 200, cosine)
    motion = diagnose(watched).motions[0]
    assert motion.timescale == pytest.approx(1 / (0.01 * 0.5), rel=0.02)
    assert motion.steps / motion.timescale == pytest.approx(
        watched.records.last("decay_exposure/0"), rel=0.03
    )


def test_a_watch_with_a_folder_is_known_by_it(tmp_path):
    model = batch_norm_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.5)
    watched = train(model, optimizer, folder=tmp_path / "mine")
    assert diagnose(watched).runs == (str(tmp_path / "mine"),)
    assert diagnose(watched).places == diagnose(tmp_path / "mine").places


@pytest.mark.parametrize(("refresh", "invert"), [(10, 100), (1, 1)])
def test_a_curvature_of_longer_weights_makes_kfacs_steps_longer(refresh, invert):
    """Decay takes 0.2 % a step: the factors are of weights half as long again, if 200 steps old."""
    memory = {"factor_decay": 0.95, "refresh_every": refresh, "invert_every": invert}
    layers = [
        ScriptedLayer(
            **{"power": 0, "damping": 1e-9, "share": 0.99, "lr": 0.02, "growth": 1e-3},
            weight_decay=weight_decay,
            settings={f"setting_{name}": float(value) for name, value in memory.items()},
        )
        for weight_decay in (0.1, 0.0)
    ]
    found = diagnose(*(records({"a": layer}) for layer in layers))
    assert found["effective d"].verdict == "does not act"
    old = refresh > 1
    assert found["effective l"].verdict == ("cannot tell" if old else "does not act")
    said = reasons(found.follows) & {Reason.NO_EFFECT, Reason.NO_EFFECT_YET}
    assert bool(said) is not old


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_kfacs_defaults_turn_short_weights_further(clip):
    """Steps of a set length, a damping relative to the curvature; a clip of gradients is undone."""

    def run(weight_decay):
        model = batch_norm_net(width=32)
        optimizer = KFAC(model, lr=0.01, weight_decay=weight_decay)
        probes = [*FREE, "second_order_share"]
        with watch(model, optimizer, every=10, inputs=INPUTS, probes=probes) as watched:
            for _ in range(300):
                labels = torch.randint(3, (32,))
                inputs = torch.randn(32, 6) + nn.functional.one_hot(labels, 6)
                nn.functional.cross_entropy(model(inputs), labels).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        angles = [row.value for row in watched.records.rows if row.name == "rotation/0"]
        return watched, math.prod(angles[15:]) ** (1 / len(angles[15:]))

    (decayed, angle), (plain, plain_angle) = run(0.5), run(0.0)
    for diagnosis in (diagnose(decayed, plain), diagnose(decayed)):
        finding = diagnosis["effective"]
        assert finding.verdict == "acts"
        assert finding.effect.value == pytest.approx(angle / plain_angle, rel=0.1)
        assert only(diagnosis["effective damping"].reasons, Reason.SCALE_FREE)
        assert Reason.DAMPING_DOMINATES not in reasons(diagnosis.follows)


def test_one_layer_of_many_is_not_lost_in_the_mean():
    layers = {str(i): ScriptedLayer(weight_decay=2e-4, growth=1e-4) for i in range(12)}
    layers["strong"] = ScriptedLayer(weight_decay=5e-3, growth=1e-4)
    run, baseline = records(layers), records(dict.fromkeys(layers, ScriptedLayer(growth=1e-4)))
    for given in ((run, baseline), (run,)):
        found = diagnose(*given)
        assert found["effective l"].effect.value < 1.1
        assert found["effective l"].verdict == "cannot tell"
        assert only(found["effective l"].reasons, Reason.SOME_LAYERS_MORE)["layers"] == ["strong"]
        # layers that are stepped differently have no schedule in common
        assert Reason.SCHEDULE not in reasons(found.follows)


def test_what_is_said_of_several_seeds_is_true_of_their_mean():
    """Of the first alone the change is too little to matter but in one layer; not of both."""

    def seed(growth, weak, strong):
        layers = {str(i): ScriptedLayer(weight_decay=weak, growth=growth) for i in range(12)}
        return records(layers | {"strong": ScriptedLayer(weight_decay=strong, growth=growth)})

    runs = [seed(growth, 8e-4, 5e-3) for growth in (2.7e-3, 2e-3)]
    baselines = [seed(growth, 0.0, 0.0) for growth in (2.7e-3, 2e-3)]
    for order in (1, -1):
        found = diagnose(runs[::order], baselines[::order])
        assert {each["effective l"].verdict for each in found.seeds} == {"cannot tell"}
        assert 1.1 < found["effective l"].effect.value < 1.25
        assert Reason.BETWEEN in reasons(found["effective l"].reasons)
        assert Reason.HARDLY_CHANGED not in reasons(found["effective l"].reasons)


def test_seeds_that_disagree_on_a_layer_leave_it_open():
    def angles(weight_decay, further):
        layer = ScriptedLayer(weight_decay=weight_decay, invariant=False)
        hardly = [Row(1, 0, 0.0, f"size_response/{name}", 1e-4) for name in further]
        turned = [
            Row(step, 0, 0.0, f"rotation/{name}", 0.01 * factor)
            for step in range(50, 1001, 50)
            for name, factor in further.items()
        ]
        return Rows((*records(dict.fromkeys(further, layer)).rows, *hardly, *turned))

    runs = [angles(5e-3, {"a": a, "b": 1.5, "c": 1.5}) for a in (1.5, 1.0)]
    baselines = [angles(0.0, dict.fromkeys("abc", 1.0)) for _ in runs]
    verdicts = {row.layer: row.verdict for row in diagnose(runs, baselines)["effective l"].layers}
    assert verdicts == {"a": "cannot tell", "b": "acts", "c": "acts"}


def test_an_opposite_change_is_not_called_none():
    run = records({"a": ScriptedLayer(invariant=False, weight_decay=0.05)}, {"jacobian_norm": 30.0})
    baseline = records({"a": ScriptedLayer(invariant=False)}, {"jacobian_norm": 10.0})
    assert Reason.REACTS_MORE in reasons(diagnose(run, baseline).follows)
    run, baseline = (
        records(
            {"a": ScriptedLayer(weight_decay=of[0], growth=of[1], power=0, damping=1e-3, share=0.5)}
        )
        for of in ((0.01, 0.01), (0.0, 1e-4))
    )
    found = diagnose(run, baseline)
    assert Reason.OPPOSITE in reasons(found["effective d"])
    assert not reasons(found.follows) & {Reason.NO_EFFECT, Reason.NO_EFFECT_YET}


def test_weights_that_decay_takes_all_of():
    run = records({"a": ScriptedLayer(weight_decay=0.1), "b": ScriptedLayer(weight_decay=0.01)})
    (trouble,) = diagnose(run).troubles
    assert (trouble.reason, trouble["layers"]) == (Reason.COLLAPSED, ["a"])


def test_a_suggestion_for_sgd_is_what_torchs_sgd_calls_weight_decay():
    """Held within 5 % when run, where the norm is that of the records; momentum sums it up."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(400, dtype=torch.float64))
    steps = 3000

    def norms(weight_decay):
        generator = torch.Generator().manual_seed(1)
        now = nn.Parameter(weight.detach().clone())
        optimizer = torch.optim.SGD([now], lr=0.1, momentum=0.9, weight_decay=weight_decay)
        found = []
        for _ in range(steps):
            noise = torch.randn(400, generator=generator, dtype=torch.float64)
            unit = now.detach() / now.detach().norm()
            now.grad = (noise - (noise @ unit) * unit) / now.detach().norm()
            optimizer.step()
            found.append(float(now.detach().norm()))
        return found

    grown = norms(0.0)
    rows = [Row(s, 0, 0.0, "weight_norm/a", grown[s - 1]) for s in range(1, steps + 1, 100)]
    settings = {"lr": 0.1, "decay": 0, "weight_decay": 0, "momentum": 0.9, "power": 2}
    settings["invariant"] = 1
    rows += [Row(1, 0, 0.0, f"setting_{k}/a", float(v)) for k, v in settings.items()]
    found = suggest(Rows(tuple(rows)), norm_at=1501)
    assert found.decay == "l2"
    held = norms(found.weight_decay)
    assert sum(held[-500:]) / 500 == pytest.approx(grown[1500], rel=0.05)


def test_a_suggestion_for_a_far_norm_is_called_rough():
    found = suggest(records({"a": ScriptedLayer(growth=0.05)}))
    (row,) = found.layers
    assert row.norm > 2 * row.target
    note = only(row.notes, Reason.ROUGH)
    assert note["factor"] == pytest.approx((row.norm / row.target) ** 2)
    assert note["way"] == "strong"
    assert suggest(records({"a": ScriptedLayer(growth=1e-4)})).layers[0].notes == ()


def test_a_suggestion_does_not_hang_on_how_often_a_schedule_is_recorded():
    """Cosine with warmup: no two records have one learning rate."""

    def suggested(every):
        model = batch_norm_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)

        def factor(step):
            return min(1, (step + 1) / 40) * (1 + math.cos(math.pi * step / 400)) / 2

        return suggest(train(model, optimizer, 400, LambdaLR(optimizer, factor), every=every))

    often, seldom = suggested(4), suggested(20)
    assert often.lr > 0.1
    assert seldom.lr > 0.1
    assert often.weight_decay == pytest.approx(seldom.weight_decay, rel=0.5)
