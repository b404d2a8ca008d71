"""Loops as other people write them, each with a truth that is known from how it was made."""

import math
from dataclasses import replace

import pytest
import torch
from diagnosis.recorded import ScriptedLayer, only, reasons, records
from torch import nn
from torch.nn import functional as F

from decaylab import KFAC, diagnose, watch
from decaylab.diagnosis import Reason, Verdict, suggest
from decaylab.diagnosis.reasons import has
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.runs import read_run
from decaylab.diagnosis.words.headline import headline, next_reason
from decaylab.diagnosis.words.motions import insight, motion_table
from decaylab.networks.scale_invariance import measure_invariance
from decaylab.probes import jacobian_norm
from decaylab.probes.layers import layers_of
from decaylab.records import Row, Rows


def trained(model, optimizer, *, steps=60, every=5, seed=0, labels=None, **watching):
    """A model watched while it learns to tell random vectors apart."""
    generator = torch.Generator().manual_seed(seed)
    with watch(model, optimizer, every=every, **watching) as watched:
        for _ in range(steps):
            x = torch.randn(32, 6, generator=generator)
            y = x[:, :3].argmax(1) if labels is None else labels(x)
            output = model(x)
            loss = F.cross_entropy(output, y) if labels is None else F.mse_loss(output, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss)
    return watched


def normalised_net():
    return nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32),
        nn.ReLU(), nn.Linear(32, 3),
    )  # fmt: skip


INPUTS = torch.randn(32, 6, generator=torch.Generator().manual_seed(9))


class LowRank(nn.Module):
    """A frozen layer and what is added to it, as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, False), nn.Linear(2, base.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return self.base(x) + 0.1 * self.up(self.down(x))


def adapted(*, new_head):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64),
        nn.ReLU(), nn.Linear(64, 3),
    )  # fmt: skip
    model.requires_grad_(False)
    model[0], model[3] = LowRank(model[0]), LowRank(model[3])
    if new_head:
        model[6].requires_grad_(True)
    return model


@pytest.mark.parametrize("new_head", [False, True])
def test_the_size_of_an_adapter_is_the_point_of_it(new_head):
    model = adapted(new_head=new_head)
    stepped = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(stepped, lr=1e-3, weight_decay=20.0)
    watched = trained(model, optimizer, inputs=INPUTS)
    adapters = {"0.down", "0.up", "3.down", "3.up"}
    measured = measure_invariance(model, INPUTS)
    assert measured.adapters == adapters
    # they change the outputs little, in proportion to their size
    assert max(measured.size_response(layer).total for layer in adapters) < 0.25
    found = diagnose(watched)
    assert found["effective l"].verdict is Verdict.DOES_NOT_ACT
    assert {row.layer for row in found["effective l"].layers if row.why.reason is Reason.ADAPTER}
    follows = {why.reason: why for why in found.follows}
    assert set(follows[Reason.ADAPTERS]["layers"]) == adapters
    assert not follows.keys() & {Reason.DIRECTION_ONLY, Reason.NEARLY_DIRECTION_ONLY}
    roles = {motion.layer: motion.role for motion in found.motions}
    assert {layer for layer, role in roles.items() if role == "adapter"} == adapters
    advice = {row.layer: row for row in suggest(watched).layers}
    assert advice["0.down"].suggested is None
    assert advice["0.down"].notes[0]["counts"].reason is Reason.ADAPTER


def test_a_network_that_is_trained_whole_has_no_adapters():
    torch.manual_seed(0)
    assert measure_invariance(normalised_net(), INPUTS).adapters == frozenset()
    half = normalised_net()
    half[0].requires_grad_(False)  # less than half of it, and nothing is left without the others
    assert measure_invariance(half, INPUTS).adapters == frozenset()


def test_an_optimizer_that_steps_in_proportion_to_the_norm_has_no_damping():
    torch.manual_seed(0)
    model = normalised_net()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.5)
    found = diagnose(trained(model, optimizer, inputs=INPUTS))
    assert found["effective l"].because_of(Reason.BY_LR)
    assert found["effective d"].because_of(Reason.ONLY_KFAC_DAMPS)
    (direction,) = [why for why in found.follows if why.reason is Reason.DIRECTION_ONLY]
    assert direction["by_lr"]


def test_l2_that_acts_at_the_first_step_is_no_other_start():
    """Behind a gain of zero, RMSprop divides what is L2 alone by its own size."""

    def run(weight_decay):
        torch.manual_seed(0)
        model = normalised_net()
        nn.init.zeros_(model[4].weight)
        model[5] = nn.Identity()  # a ReLU would keep the gain at zero
        optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3, weight_decay=weight_decay)
        return trained(model, optimizer, inputs=INPUTS)

    decayed, plain = run(1e-2), run(0.0)
    norms = [x.records.series("weight_norm/3")[0].value for x in (decayed, plain)]
    assert norms[0] / norms[1] < 0.8  # at step 1
    found = diagnose(decayed, plain)
    assert found.baselines
    assert Reason.OTHER_START not in {why.reason for why in found.troubles}


def test_one_number_for_each_example_has_a_jacobian():
    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, x):
            return self.last(self.first(x).tanh()).squeeze(-1)

    torch.manual_seed(0)
    model = Regression().double()
    inputs = INPUTS.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer, probes=["jacobian_norm"], inputs=inputs) as watched:
        model(inputs).sum().backward()
        optimizer.step()
    variable = inputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(variable).sum(), variable)
    (row,) = watched.records.series("jacobian_norm")
    assert row.value == pytest.approx(float(gradient.square().sum(1).mean()), rel=1e-10)


def test_a_run_with_one_record_shows_no_empty_table_and_asks_for_more_records():
    torch.manual_seed(0)
    model = normalised_net()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    found = diagnose(trained(model, optimizer, steps=3, every=100, inputs=INPUTS))
    assert motion_table(found)[0] == []
    assert "angle/step" not in str(found)
    assert next_reason(found) is Reason.RECORD_MORE


def scripted(weight_decay, *norms, start=1.0, invariant=False):
    """A layer of 100 numbers with these norms at the last records."""
    layer = ScriptedLayer(invariant=invariant, weight_decay=weight_decay, start=start, growth=1e-3)
    layer.settings = {"setting_size": 100.0}
    steps = range(1050, 1050 + 50 * len(norms), 50)
    later = [Row(s, 0, 0.0, "weight_norm/a", norm) for s, norm in zip(steps, norms, strict=True)]
    return Rows((*records({"a": layer}).rows, *later))


def test_weights_that_explode_are_a_divergence():
    found = diagnose(scripted(0.02, 5e6, 5e6), scripted(0.0))
    assert found.outcome.diverged == (1, 0)
    assert only(found.troubles, Reason.DIVERGED)["step"] == 1050
    # neither do layers that grow from next to nothing, nor scale-invariant ones at a high lr
    for grown in (scripted(0.02, 9.0, start=1e-3), scripted(0.02, 5e6, 5e6, invariant=True)):
        assert Reason.DIVERGED not in reasons(diagnose(grown).troubles)


def test_a_run_that_diverged_is_not_asked_for_a_baseline():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4, weight_decay=0.1)
    with pytest.warns(UserWarning, match="not finite"):
        watched = trained(model, optimizer, labels=lambda x: x[:, :3])
    result = diagnose(watched)
    assert result.outcome.diverged == (1, 0)
    assert next_reason(result) is None
    assert headline(result).startswith("The run diverged. Next: less decay")


class Sharpness(torch.optim.Optimizer):
    """As SAM: holds another optimizer, which makes the steps, under a name of its own."""

    def __init__(self, parameters, base, **settings):
        super().__init__(parameters, settings)
        self.base_optimizer = base(self.param_groups, **settings)

    def step(self, closure=None):
        raise NotImplementedError("call second_step")

    def second_step(self):
        self.base_optimizer.step()
        self.zero_grad()


def test_an_optimizer_that_another_holds_did_not_change_on_the_way():
    model = normalised_net()
    optimizer = Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, weight_decay=0.1)
    with watch(model, optimizer, every=5) as watched:
        for _ in range(20):
            model(INPUTS).square().mean().backward()
            optimizer.second_step()
    result = diagnose(watched)
    assert watched.steps == 20
    assert Reason.OPTIMIZER_CHANGED not in reasons(result.troubles)
    assert result["effective l"].effect is not None


def test_of_records_without_a_number_no_decay_is_denied(tmp_path):
    """Somebody else's rows.jsonl, say."""
    (tmp_path / "rows.jsonl").write_text('{"iter": 3, "loss": 1.0}\n')
    assert headline(diagnose(tmp_path)).startswith("There is nothing to judge. Next: train inside")


def test_decay_that_is_not_known_is_not_denied():
    model = normalised_net()
    watched = trained(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5))
    said = headline(diagnose(watched.records))  # numbers alone: how layers are stepped is not there
    assert said.startswith("Whether this run has weight decay is not known. Next: give the watch")
    model = normalised_net()
    *body, head = model.children()
    plain = torch.optim.SGD(head.parameters(), lr=0.1)
    decayed = torch.optim.AdamW([p for m in body for p in m.parameters()], weight_decay=0.5)
    plain.register_step_post_hook(lambda *_: decayed.step())  # which no hook of `watch` reports
    said = headline(diagnose(trained(model, plain)))
    assert said.startswith("Whether this run has weight decay is not known. Next: watch all")


@pytest.mark.parametrize(("on", "off", "more"), [(0, 100, True), (80, 100, True), (0, 20, False)])
def test_how_long_decay_takes_is_said_for_the_steps_with_decay(on, off, more):
    """It is switched on late, or off early; 1/(lr wd) is 500 steps."""
    runs = []
    for weight_decay in (0.2, 0.0):
        model = normalised_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps = iter(range(100))

        def switch(*_, group=optimizer.param_groups[0], steps=steps, weight_decay=weight_decay):
            group["weight_decay"] = weight_decay if on <= next(steps) < off else 0.0

        optimizer.register_step_pre_hook(switch)
        runs.append(trained(model, optimizer, steps=100, probes="diagnosis", inputs=INPUTS))
    result = diagnose(*runs)
    assert [m.timescale for m in result.motions] == pytest.approx([500] * len(result.motions))
    assert "Decay needs about 500 steps" in " ".join(insight(result))
    little = result["effective l"].because_of(Reason.TOO_LITTLE)
    if little is not None:
        assert little["enough"] == pytest.approx(500 * math.log(RULES.acts))
    said = [why for f in result.findings for why in f.reasons if why.reason is Reason.MAY_SHOW_MORE]
    assert [why["full"] for why in said] == [pytest.approx(500)] * len(said)
    assert more or not said


def test_jacobians_on_inputs_of_another_kind_are_not_compared():
    runs = []
    for weight_decay, inputs in ((2.0, INPUTS), (0.0, INPUTS.flip(0) * 1.1), (0.0, 255 * INPUTS)):
        model = normalised_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay)
        runs.append(trained(model, optimizer, steps=200, probes="diagnosis", inputs=inputs))
    alike, other = (diagnose(runs[0], baseline)["Jacobian"] for baseline in runs[1:])
    assert alike.verdict is Verdict.ACTS
    assert other.verdict is Verdict.CANNOT_TELL
    why = other.because_of(Reason.OTHER_INPUTS)
    assert why["pair"][1] / why["pair"][0] == pytest.approx(255)
    assert only(other.remedies, Reason.RECORD_SAME_INPUTS)


def test_more_seeds_beside_records_in_memory_are_no_command(tmp_path):
    runs = []
    for weight_decay in (0.5, 0.0):
        model = normalised_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay)
        folder = tmp_path / "run" if weight_decay else None
        runs.append(trained(model, optimizer, folder=folder))
        runs[-1].log(loss=weight_decay)
    said = headline(diagnose(*runs))
    assert "then `diagnose([watched, watched_2], [baseline, baseline_2])`" in said


@pytest.mark.parametrize("invariant", [True, False])
def test_only_scale_invariant_layers_burst(invariant):
    rows = scripted(0.02, *(0.1 * 0.9**i for i in range(6)), 0.5, invariant=invariant).rows
    hardly = Row(1, 0, 0.0, "size_response/a", 1e-4)  # 0.01 % per per cent
    follows = reasons(diagnose(Rows((*rows, hardly))).follows)
    assert (Reason.DIRECTION_ONLY in follows) == invariant
    assert (Reason.NEARLY_DIRECTION_ONLY in follows) != invariant
    assert (Reason.BURST in follows) == invariant


def test_a_vector_with_axes_of_one_is_no_weight():
    class Policy(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
            self.log_std = nn.Parameter(torch.zeros(1, 3))

        def forward(self, x):
            for layer in list(self)[:3]:
                x = layer(x)
            return x * self.log_std.exp()

    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    watched = trained(model, optimizer, inputs=INPUTS)
    roles = {motion.layer: motion.role for motion in diagnose(watched).motions}
    assert roles == {"0": "weight", "2": "head", "log_std": "vector"}
    assert {advice.layer for advice in suggest(watched).layers} == {"0", "2"}


class Attention(nn.Module):
    """With parameters of its own: three matrices, a bias, a temperature and a layer scale."""

    def __init__(self):
        super().__init__()
        self.tokens, self.read = nn.Linear(1, 8), nn.Linear(8, 3)
        for name in ("wq", "wk", "wv"):
            setattr(self, name, nn.Parameter(torch.randn(8, 8) / 8**0.5))
        self.bv, self.layer_scale = (
            nn.Parameter(torch.zeros(8)),
            nn.Parameter(torch.full((8,), 0.1)),
        )
        self.tau = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.tokens(x[..., None])
        weights = (self.tau * (x @ self.wq) @ (x @ self.wk).mT).softmax(-1)
        return self.read((x + self.layer_scale * (weights @ (x @ self.wv + self.bv))).mean(1))


def test_bare_parameters_are_judged_one_by_one():
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    watched = trained(model, optimizer, inputs=INPUTS)
    motions = {motion.layer: motion for motion in diagnose(watched).motions}
    assert {"wq", "wk", "wv", "layer_scale", "tau"} < motions.keys()
    assert "bv" not in motions  # of wv
    assert motions["layer_scale"].role == motions["tau"].role == "vector"
    for name in ("wq", "layer_scale"):
        norm = torch.linalg.vector_norm(getattr(model, name)).item()
        assert watched.records.last(f"weight_norm/{name}") == pytest.approx(norm)


def test_kfacs_rows_of_a_recurrent_layer_are_those_of_the_layers_that_are_judged():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.lstm(x[..., None])[0][:, -1])

    torch.manual_seed(0)
    model = Recurrent()
    optimizer = KFAC(model, lr=0.02, weight_decay=0.1)
    watched = trained(model, optimizer, inputs=INPUTS, probes="diagnosis")
    layers = read_run(watched).layers
    assert layers.keys() == {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "head"}
    for layer in layers.values():
        assert layer.preconditioned
        assert not layer.too_few_shares
        assert layer.series["rotation"]
        assert layer.series["effective_damping"]


def test_the_table_is_of_layers_with_decay():
    torch.manual_seed(0)
    model = normalised_net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    found = diagnose(trained(model, optimizer, inputs=INPUTS))
    assert [row[0] for row in motion_table(found)[1]] == ["0", "3", "6 (head)"]
    assert {motion.layer for motion in found.motions} == {"0", "1", "3", "4", "6"}


def test_schedules_of_other_lengths_are_said_to_be():
    def run(steps, weight_decay):
        torch.manual_seed(0)
        model = normalised_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
        cosine = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        optimizer.register_step_post_hook(lambda *_: cosine.step())
        return trained(model, optimizer, steps=steps, inputs=INPUTS)

    found = diagnose(run(60, 0.5), run(120, 0.0))
    (why,) = [why for why in found.troubles if why.reason is Reason.OTHER_LR]
    assert why["lengths"] == (60, 120)


class Branch(nn.Module):
    """A residual branch behind a normalisation, with a layer scale, in front of another one."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.norm = nn.Linear(6, width), nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.layer_scale = nn.Parameter(torch.full((width,), 0.01))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        x = x + self.layer_scale * self.contract(F.gelu(self.expand(self.norm(x))))
        return self.head(self.last(x))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02}),
        (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 5.0}),
    ],
)
def test_one_run_says_nothing_of_pushes_that_no_law_gives_a_length(kind, settings):
    """SGD's are as long as gradients, which shrink with all of a branch: 969x was once said.

    AdamW's have a length of their own, and so has its estimate.
    """

    def run(weight_decay):
        torch.manual_seed(0)
        model = Branch()
        optimizer = kind(model.parameters(), **settings | {"weight_decay": weight_decay})
        return trained(model, optimizer, steps=200, every=10, inputs=INPUTS)

    watched = run(settings["weight_decay"])
    rows = {row.layer: row for row in diagnose(watched)["effective l"].layers}
    motions = diagnose(watched).motions
    hardly = {m.layer for m in motions if m.size_response <= RULES.size_little}
    branch = {"expand", "contract"} & hardly
    assert branch
    for layer in branch:
        if kind is torch.optim.SGD:
            assert rows[layer].effect is None
            assert rows[layer].why.reason is Reason.PUSHES_UNKNOWN
        else:
            assert rows[layer].effect is not None


def test_an_estimate_is_held_against_the_same_quantity_of_two_runs():
    """Of scale-invariant layers the effective learning rate, whatever the gradients became."""
    runs = []
    for weight_decay in (3.0, 0.0):
        torch.manual_seed(0)
        model = normalised_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
        runs.append(trained(model, optimizer, steps=200, every=10, inputs=INPUTS))
    both, alone = diagnose(*runs)["effective l"], diagnose(runs[0])["effective l"]
    estimates = {row.layer: row.effect.value for row in alone.layers if row.effect}
    measured = {row.layer: row.effect.value for row in both.layers if row.effect}
    moved = [m for m in diagnose(*runs).motions if m.invariant and m.role == "weight"]
    foretold = {m.layer: m.foretold for m in moved}
    assert foretold.keys() == estimates.keys() == measured.keys() == {"0", "3"}
    for layer, ratio in foretold.items():
        assert ratio == pytest.approx(estimates[layer] / measured[layer])
    assert "as the same gradients would without it" in insight(diagnose(runs[0]))[0]
    assert "same gradients" not in insight(diagnose(*runs))[0]


def test_steps_before_the_watch_are_said_to_be_missing(tmp_path):
    model = normalised_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    whole = diagnose(trained(model, optimizer, folder=tmp_path / "whole"))
    assert Reason.STEPPED_BEFORE not in reasons(whole.troubles)
    rest = diagnose(trained(model, optimizer))
    assert Reason.STEPPED_BEFORE in reasons(rest.troubles)
    with watch(model, optimizer, every=5, folder=tmp_path / "whole") as watched:
        watched.resume(60)
        for _ in range(10):
            F.cross_entropy(model(INPUTS), INPUTS[:, :3].argmax(1)).backward()
            optimizer.step()
    assert Reason.STEPPED_BEFORE not in reasons(diagnose(watched).troubles)


def test_layers_are_held_against_a_shorter_baseline_up_to_its_end():
    def until(watched, step):
        recording = watched.recording
        return replace(
            recording, rows=Rows(tuple(r for r in recording.rows.rows if r.step <= step))
        )

    run, baseline = (
        trained(model, torch.optim.AdamW(model.parameters(), 0.01, weight_decay=wd), steps=200)
        for wd in (0.5, 0.0)
        for model in [normalised_net()]
    )
    both = [diagnose(until(run, 100), until(baseline, 100)), diagnose(run, until(baseline, 100))]
    foretold = [[m.foretold for m in each.motions if m.foretold is not None] for each in both]
    assert foretold[0] == pytest.approx(foretold[1])
    assert len(foretold[0]) == 2
    early = diagnose(run, until(baseline, 5))  # decay had taken 2.5 % of the weights, later 63 %
    assert {(m.turned, m.foretold, m.by_decay) for m in early.motions} == {(None, None, None)}


def test_layers_of_which_no_size_is_known_are_not_said_to_count():
    """Without `inputs`, behind a normalisation: what they do is open, and so is the verdict."""

    def diagnosed(**watching):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), Branch16(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1.0)
        return diagnose(trained(model, optimizer, **watching))

    class Branch16(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    found = diagnosed()
    assert found["effective l"].verdict is Verdict.CANNOT_TELL
    assert has(found["effective l"].reasons, Reason.INVARIANCE_UNKNOWN)
    (unknown,) = [why for why in found.follows if why.reason is Reason.SIZES_UNKNOWN]
    assert unknown["layers"] == ["2.up", "2.down"]
    assert not has(diagnosed(inputs=INPUTS).follows, Reason.SIZES_UNKNOWN)


def test_what_is_not_known_of_some_layers_is_not_said_of_all():
    """Adam's L2 has no rate, but its layers turn all the same, as two runs show."""
    runs = []
    for weight_decay in (0.1, 0.0):
        torch.manual_seed(0)
        model = normalised_net()
        groups = [
            {"params": [model[0].weight], "weight_decay": weight_decay},
            {"params": [model[3].weight], "weight_decay": weight_decay},
        ]
        l2 = torch.optim.Adam(groups[:1], lr=1e-2)
        decoupled = torch.optim.AdamW(groups[1:], lr=1e-2)
        runs.append(trained_by_both(model, l2, decoupled))
    found = diagnose(*runs)
    turned = {m.layer: m.turned.value for m in found.motions if m.turned is not None}
    assert max(turned, key=turned.get) == "0"
    assert turned["0"] > RULES.acts > turned["3"]
    assert insight(found)[0].startswith("Decay makes 0 turn") or "layer 0" in insight(found)[0]


def trained_by_both(model, first, second):
    """Both optimizers step after each batch."""
    generator = torch.Generator().manual_seed(0)
    with watch(model, [first, second], every=5, inputs=INPUTS) as watched:
        for _ in range(100):
            x = torch.randn(32, 6, generator=generator)
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            watched.log(loss=loss)
    return watched


class Repeated(nn.Module):
    """One block under several names, as in `nn.ModuleList([block] * depth)`, and a tied weight."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU())
        self.blocks = nn.ModuleList([block] * 3)
        self.tied, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.tied.weight = block[0].weight

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.tied(x))


def test_watching_a_block_under_several_names_leaves_it_as_it_was():
    weights = []
    everything = {"inputs": INPUTS, "probes": ("size_response", "jacobian_norm", "gn_norm")}
    for watching in (None, everything):
        torch.manual_seed(0)
        model = Repeated()
        named = dict(model.named_parameters(remove_duplicate=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x, y in [(INPUTS, INPUTS.argmax(1) % 3)] * 5:
            if watching:
                with watch(model, optimizer, every=1, **watching):
                    pass
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        after = dict(model.named_parameters(remove_duplicate=False))
        assert {name: id(p) for name, p in after.items()} == {n: id(p) for n, p in named.items()}
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_the_response_of_a_block_under_several_names_is_of_all_its_uses():
    torch.manual_seed(0)
    model, inputs = Repeated().double(), INPUTS.double()
    responses = measure_invariance(model, inputs)
    step = 1e-6
    with torch.no_grad():
        logits = model(inputs)
        for parameter in (model.tied.weight, model.tied.bias, model.blocks[0][0].bias):
            parameter.mul_(1 + step)
        change = (model(inputs) - logits) / step
    along = float((change * logits).sum() / logits.square().sum())
    scaled = {n: 1.0 for n in responses.layers if n in ("blocks.0.0", "tied", "tied.bias")}
    assert responses.response_along(scaled).size == pytest.approx(along, rel=1e-4)


def turning(weight_decay, step_length):
    """A layer whose size hardly matters, turned by steps of this length."""
    layer = ScriptedLayer(invariant=False, power=1, weight_decay=weight_decay)
    rows = records({"a": layer}).rows
    angles = [
        Row(row.step, 0, 0.0, "rotation/a", step_length / row.value)
        for row in rows
        if row.name == "weight_norm/a"
    ]
    sizes = [Row(1, 0, 0.0, f"{part}_response/a", 1e-4) for part in ("size", "direction")]
    return Rows((*rows, *angles, *sizes))


def test_angles_that_gradients_change_too_are_taken_apart():
    """A baseline that fits its data hardly steps; the norms alone say that decay acts."""
    run, baseline = turning(0.02, 1e-2), turning(0.0, 1e-2 / 40)
    finding = diagnose(run, baseline)["effective l"]
    norms = [row.value for row in run.series("weight_norm/a")]
    late = norms[len(norms) // 2 :]
    smaller = math.exp(-sum(map(math.log, late)) / len(late))
    assert finding.effect.value == pytest.approx(40 * smaller)
    assert finding.effect.value > RULES.acts * math.exp(2 * 1000 * 0.1 * 0.02)  # all of decay's
    assert finding.verdict is Verdict.ACTS
    why = finding.because_of(Reason.LONGER_STEPS)
    assert (why["smaller"], why["longer"]) == (pytest.approx(smaller), pytest.approx(40))


def test_angles_that_gradients_change_alone_are_not_put_down_to_decay():
    finding = diagnose(turning(1e-3, 1e-2), turning(0.0, 1e-2 / 40))["effective l"]
    assert finding.verdict is Verdict.CANNOT_TELL
    assert reasons(finding) >= {Reason.MORE_THAN_DECAY}
    assert (
        diagnose(turning(0.02, 1e-2), turning(0.0, 1e-2))["effective l"].because_of(
            Reason.LONGER_STEPS
        )
        is None
    )


class Sine(nn.Module):
    """A linear layer as SIREN has it, with its own forward."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(outputs, inputs) - 0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.sin(F.linear(x, self.weight, self.bias))


class Gate(nn.Module):
    """A weight per channel, broadcast over examples and places."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x):
        return x * self.weight


def test_a_matrix_of_one_row_or_column_is_a_weight_and_a_gate_no_gain():
    model = nn.ModuleDict({"first": Sine(1, 8), "last": Sine(8, 1), "gate": Gate(8)})
    layers = layers_of(model)
    assert set(layers.weights) == {"first", "last"}
    assert layers.roles["gate"] == "vector"


class Spectral(nn.Module):
    """A convolution by complex weights in Fourier space, as in a neural operator."""

    def __init__(self, channels):
        super().__init__()
        real = torch.randn(channels, channels, 3, 2) / channels
        self.weight = nn.Parameter(torch.view_as_complex(real))

    def forward(self, x):
        modes = torch.einsum("bif,iof->bof", torch.fft.rfft(x)[..., :3], self.weight)
        return torch.fft.irfft(modes, n=x.shape[-1])


def test_complex_weights_turn_as_pairs_of_real_numbers():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 4, 1), Spectral(4), nn.InstanceNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 1)
    )
    inputs, targets = torch.randn(8, 1, 16), torch.randn(8, 2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=5.0)
    pairs = []
    with watch(model, optimizer, every=1, probes="diagnosis", inputs=inputs) as watched:
        for _ in range(20):
            before = torch.view_as_real(model[1].weight.detach()).clone().flatten()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            pairs.append((before, torch.view_as_real(model[1].weight.detach()).flatten().clone()))
            optimizer.zero_grad()
    last = watched.records.last
    assert last("weight_norm/1") == pytest.approx(float(pairs[-1][1].norm()))
    cosine = float(F.cosine_similarity(*(side.double() for side in pairs[-1]), dim=0))
    assert last("rotation/1") == pytest.approx(math.acos(cosine), rel=1e-3)
    moment = torch.view_as_real(optimizer.state[model[1].weight]["exp_avg_sq"]).sum()
    assert last("second_moment/1") == pytest.approx(float(moment))
    assert not watched.recording.events
    assert read_run(watched).layers["1"].invariant  # a normalisation follows, without a bias before


class Bags(nn.Module):
    """An embedding whose backward pass has no derivative, before a layer."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(9, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens))


def train_on(tokens, model, optimizer):
    for _ in range(20):
        F.cross_entropy(model(tokens), tokens[:, 0] % 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_measurement_that_failed_is_not_asked_for_again():
    tokens = torch.randint(9, (16, 4), generator=torch.Generator().manual_seed(0))
    runs = []
    for decay in (0.5, 0.0):
        torch.manual_seed(0)
        model = Bags()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
        watched = watch(model, optimizer, every=5, probes="diagnosis", inputs=tokens)
        with pytest.warns(UserWarning, match="gn_norm"):
            train_on(tokens, model, optimizer)
        watched.detach()
        runs.append(watched)
    compared, alone = (diagnose(*pair)["Jacobian"] for pair in (runs, runs[:1]))
    assert compared.because_of(Reason.SENSITIVITY_FAILED)["probe"] == "gn_norm"
    assert reasons(compared.remedies) == {Reason.RECORD_ANOTHER}
    assert reasons(alone.remedies) == {Reason.GIVE_BASELINE, Reason.RECORD_ANOTHER}


def test_maps_of_logits_take_few_backward_passes():
    passes = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            passes.append(1)
            return gradient

    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 3, 3, padding=1)
    inputs = torch.randn(4, 1, 8, 8)
    exact = jacobian_norm(convolution, inputs).total

    class Map(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = convolution

        def forward(self, x):
            return self.inner(Counted.apply(x))

    model = Map()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watching = {"every": 1, "probes": ["jacobian_norm"], "inputs": inputs}
    with watch(model, optimizer, **watching) as watched:
        optimizer.step()
    assert len(passes) == 16
    assert watched.records.last("jacobian_norm") == pytest.approx(exact, rel=0.25)


@pytest.mark.parametrize(
    ("power", "exposure", "least"), [(2, 1.5, False), (2, 5.0, True), (1, 5.0, False)]
)
def test_one_run_of_sgd_gives_a_lower_estimate_after_much_decay(power, exposure, least):
    """2: SGD's law, 1: that of Adam and its kin."""
    layer = ScriptedLayer(power=power, weight_decay=exposure / 1000 / 0.1, growth=1e-4)
    finding = diagnose(records({"a": layer}))["effective l"]
    assert finding.verdict is Verdict.ACTS
    assert finding.effect.least is least
    assert (finding.because_of(Reason.LOWER_ESTIMATE) is not None) is least
    plain = ScriptedLayer(power=power, growth=1e-4)
    compared = diagnose(records({"a": layer}), records({"a": plain}))["effective l"]
    assert not compared.effect.least


@pytest.mark.parametrize(
    ("level", "scatter", "verdict"),
    [
        (1.0, 0.05, Verdict.DOES_NOT_ACT),
        (1.0, 1.5, Verdict.CANNOT_TELL),
        (2.0, 0.05, Verdict.ACTS),
        (2.0, 1.5, Verdict.CANNOT_TELL),
    ],
)
def test_a_mean_of_records_that_scatter_says_nothing(level, scatter, verdict):
    """A flow's Gauss-Newton norm is 0.2 to 21 times the baseline's, and 1.03 times on average."""
    runs = []
    for weight_decay, size, spread in ((0.01, 1.0, scatter), (0.0, level, 0.0)):
        layer = ScriptedLayer(invariant=False, weight_decay=weight_decay)
        rows = records({"a": layer}).rows
        steps = sorted({row.step for row in rows})
        norms = [size * math.exp(spread * (-1) ** at) for at in range(len(steps))]
        pairs = zip(steps, norms, strict=True)
        runs.append(Rows((*rows, *(Row(s, 0, 0.0, "jacobian_norm", v) for s, v in pairs))))
    finding = diagnose(*runs)["Jacobian"]
    assert finding.verdict is verdict
    scatters = finding.because_of(Reason.SCATTERS) is not None
    assert scatters is (verdict is Verdict.CANNOT_TELL)


def test_too_short_a_run_is_told_how_long_it_takes():
    """Adam's factor is exp(exposure) at most, SGD's exp(2 exposure): ln 1.25 is enough for both."""
    short = records({"a": ScriptedLayer(weight_decay=1e-4, growth=1e-4)})  # 1e-5 a step
    why = diagnose(short)["effective l"].because_of(Reason.TOO_LITTLE)
    assert why["enough"] == pytest.approx(math.log(RULES.acts) / 1e-5, rel=1e-6)
    layers = [ScriptedLayer(power=1, weight_decay=wd, growth=1e-4) for wd in (2.5e-3, 0.0)]
    between = diagnose(*(records({"a": layer}) for layer in layers))["effective l"]
    assert between.because_of(Reason.BETWEEN) is not None
    more = between.because_of(Reason.MAY_SHOW_MORE)
    assert more["full"] == pytest.approx(1 / 2.5e-4)


class ActorCritic(nn.Module):
    """Two nets in one module, of which the outputs that are measured see one."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        return self.actor(x), self.critic(x)


def test_of_a_layer_that_the_outputs_do_not_depend_on_no_size_is_known():
    torch.manual_seed(0)
    model = ActorCritic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0)
    with watch(model, optimizer, every=5, inputs=INPUTS, logits=0) as watched:
        for _ in range(20):
            logits, value = model(INPUTS)
            (F.cross_entropy(logits, INPUTS.argmax(1) % 3) + (value - 1).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    layers = read_run(watched).layers
    assert layers["critic"].size_counts is None
    assert layers["actor"].size_counts is True
    finding = diagnose(watched)["effective l"]
    assert finding.because_of(Reason.INVARIANCE_UNKNOWN)["layers"] == ["critic"]
    sizes = {motion.layer: motion.size_response for motion in diagnose(watched).motions}
    assert sizes["critic"] is None
    assert sizes["actor"] == pytest.approx(1, rel=1e-3)
