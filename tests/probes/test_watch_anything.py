"""Several optimizers, outcomes, inputs and outputs of any form: what other people's loops have."""

import math
from types import SimpleNamespace

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.nn import functional as F

from decaylab import diagnose, watch
from decaylab.diagnosis import Reason
from decaylab.errors import Lacks, NameTaken, WrongType
from decaylab.probes import PROBES, Probe, Reading, head_ranks, register, spectra
from decaylab.probes.applied import applied
from decaylab.probes.registry import load_all
from decaylab.probes.size_response import measured_invariance
from decaylab.records import read_recording


def net() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.randn(16, 6), torch.randint(3, (16,))


def train(model, optimizers, inputs, labels, steps=1):
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def body_and_head(model):
    body = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    return [body, torch.optim.AdamW(model[3].parameters(), lr=0.01, weight_decay=0.5)]


def test_several_optimizers_make_one_step():
    model, inputs, labels = net()
    optimizers = body_and_head(model)
    with watch(model, optimizers, every=2) as watched:
        train(model, optimizers, inputs, labels, 5)
    assert watched.steps == 5
    assert [row.step for row in watched.records.series("weight_norm")] == [1, 2, 4]
    settings = {k: own[-1][1].optimizer for k, own in watched.recording.settings.items()}
    assert settings == {"0": "SGD", "1": "SGD", "3": "AdamW"}
    assert watched.records.last("decay_exposure/3") == pytest.approx(4 * 0.01 * 0.5)
    assert watched.records.last("decay_exposure/0") == 0.0
    assert watched.records.last("rotation/0") > 0 < watched.records.last("rotation/3")
    assert not any(o._optimizer_step_pre_hooks for o in optimizers)


def test_the_gradient_norm_is_that_of_all_optimizers():
    model, inputs, labels = net()
    with watch(model, body_and_head(model), every=1) as watched:
        F.cross_entropy(model(inputs), labels).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        for optimizer in watched.optimizers:
            optimizer.step()
    assert watched.records.last("gradient_norm") == pytest.approx(float(norm), rel=1e-6)


def test_loops_that_alternate_or_use_one_of_them():
    model, inputs, labels = net()
    optimizers = body_and_head(model)
    with watch(model, optimizers, every=1) as watched:
        for which in (0, 0, 1, 1, 0):
            train(model, [optimizers[which]], inputs, labels)
    # 0 | 0 1 | 1 0: a round ends with the last of them, or before one that steps again
    assert watched.steps == 3
    one = watch(model, optimizers, every=1)
    train(model, [optimizers[0]], inputs, labels, 4)
    one.detach()
    assert one.steps == 4
    assert len(one.records.series("weight_norm")) == 4


def test_another_optimizer_is_noticed():
    model, inputs, labels = net()
    body, head = body_and_head(model)
    with watch(model, body, every=1) as watched:
        train(model, [body, head], inputs, labels, 3)
    assert watched.optimizers == (body, head)
    own = dict(watched.recording.settings["3"])
    assert not own[1].stepped
    assert own[2].weight_decay == 0.5
    assert watched.steps == 3  # its first step belongs to the round that was just recorded
    assert watched.exposure()["3"] == pytest.approx(3 * 0.5 * head.param_groups[0]["lr"])
    (first, event) = watched.recording.events
    assert first.kind == "unstepped-parameters"
    assert (event.kind, event.data) == ("optimizer-joined", {"optimizer": "AdamW"})
    (trouble,) = diagnose(watched).troubles
    assert trouble.reason is Reason.OPTIMIZER_JOINED


def test_an_optimizer_that_takes_the_place_of_another(tmp_path):
    model, inputs, labels = net()
    first = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with watch(model, first, every=1, folder=tmp_path) as watched:
        train(model, [first], inputs, labels, 2)
        second = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1.0)
        train(model, [second], inputs, labels, 2)
    assert (watched.steps, watched.optimizers) == (4, (second,))
    timeline = read_recording(tmp_path).settings["0"]
    assert [(step, own.optimizer) for step, own in timeline] == [(1, "SGD"), (3, "AdamW")]
    exposure = 2 * 0.1 * 0.1 + 2 * 0.01
    assert watched.records.last("decay_exposure/0") == pytest.approx(exposure)
    (event,) = read_recording(tmp_path).events
    assert event.data == {"was": ["SGD"], "now": "AdamW"}


def test_optimizers_inside_others_and_of_other_models_are_not_noticed():
    model, inputs, labels = net()
    other = net()[0]
    kfac, far = KFAC(model, lr=0.01), torch.optim.SGD(other.parameters(), lr=0.1)
    with watch(model, kfac, every=1) as watched:
        train(model, [kfac], inputs, labels, 2)
        train(other, [far], inputs, labels, 2)
    assert watched.optimizers == (kfac,)
    assert (watched.steps, watched.recording.events) == (2, ())


def test_shared_parameters_are_said():
    model, inputs, labels = net()
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with watch(model, both, every=1) as watched:
        train(model, both, inputs, labels, 2)
    (event,) = watched.recording.events
    assert event.kind == "shared-parameters"
    assert event.data["parameters"] == [name for name, _ in model.named_parameters()]
    assert watched.steps == 2


def test_outcomes_are_recorded_as_they_are(tmp_path):
    model, inputs, labels = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shown = []
    tracker = SimpleNamespace(log=shown.extend)
    with watch(model, optimizer, every=10, folder=tmp_path, trackers=[tracker]) as watched:
        for step in range(3):
            train(model, [optimizer], inputs, labels)
            watched.log(loss=torch.tensor(float(step)), accuracy=0.5)
        watched.log(test_loss=math.inf)
    watched.log(test_accuracy=torch.tensor(0.25))  # as people do behind the block
    for recording in (watched.recording, read_recording(tmp_path)):
        assert recording.outcomes == {
            "loss": ((1, 0.0), (2, 1.0), (3, 2.0)),
            "accuracy": ((1, 0.5), (2, 0.5), (3, 0.5)),
            "test_loss": ((3, math.inf),),
            "test_accuracy": ((3, 0.25),),
        }
    assert "outcome/loss" in {row.name for row in shown}
    assert read_recording(tmp_path).rows.rows == watched.records.rows


@pytest.mark.parametrize("value", [torch.ones(3), None, "low", torch.ones(0)])
def test_what_is_not_one_number_is_refused_where_it_is_logged(value):
    """Not at the next record, in the middle of somebody's step."""
    model, *_ = net()
    watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with watched, refuses(WrongType, name="loss"):
        watched.log(loss=value)


def test_a_watch_that_has_ended_is_not_entered_again():
    """It has no hooks any more, and would record nothing."""
    model, *_ = net()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as watched:
        pass
    with refuses(Lacks, owner="a watch that has ended"), watched:
        pass


def test_a_probe_goes_by_the_name_of_what_it_records():
    model, inputs, labels = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, every=1, probes=["rotation", "update_norm"]) as watched:
        train(model, [optimizer], inputs, labels)
    rows = {row.name.partition("/")[0] for row in watched.records.rows}
    assert {"rotation", "update_norm"} <= rows


class Gpt(nn.Module):
    """As nanoGPT: (idx, targets) in, (logits, loss) out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 7, bias=False)

    def forward(self, idx, targets=None):
        logits = self.head(self.norm(self.embedding(idx)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x, hidden):
        output, hidden = self.cell(x, hidden)
        return self.head(output), hidden


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.mix = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, x, t):
        return {"noise": self.mix(x + self.time(t)), "t": t}


def case(name):
    torch.manual_seed(0)
    if name in ("tuple", "callable"):
        model, idx = Gpt(), torch.randint(7, (3, 5))
        batch = (idx, idx) if name == "tuple" else lambda m: m(idx, idx)
        return model, batch, None, lambda: model(idx, idx)[1]
    if name == "recurrent":
        model, x = Recurrent(), torch.randn(3, 6, 4)
        hidden = (torch.zeros(1, 3, 5), torch.zeros(1, 3, 5))
        return model, (x, hidden), None, lambda: model(x, hidden)[0].square().mean()
    if name == "mapping":
        model, x, t = Denoiser(), torch.randn(6, 4), torch.randint(10, (6,))
        return model, {"x": x, "t": t}, "noise", lambda: model(x, t)["noise"].square().mean()
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    batch = (torch.randn(2, 4, 8), torch.randn(2, 3, 8))
    return model, batch, None, lambda: model(*batch).square().mean()


@pytest.mark.parametrize("name", ["tuple", "callable", "recurrent", "mapping", "transformer"])
def test_inputs_and_outputs_of_any_form(name):
    model, batch, logits, loss = case(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    chosen = ["weight_norm", "movement", "size_response", "gn_norm"]
    chosen += ["jacobian_norm"] if name in ("recurrent", "mapping", "transformer") else []
    before = [p.detach().clone() for p in model.parameters()]
    with watch(model, optimizer, every=1, probes=chosen, inputs=batch, logits=logits) as watched:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    names = {row.split("/")[0] for row in watched.records.names()}
    assert {"gn_norm", "rotation", "invariance", "size_response", "decay_response"} <= names
    assert ("jacobian_norm" in names) == ("jacobian_norm" in chosen)
    assert not watched.recording.events
    assert watched.records.last("gn_norm") > 0


def test_a_named_output_that_is_not_there():
    model, batch, _, _ = case("mapping")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refuses(Lacks, what="logits under 'nothing'"):
        watch(model, optimizer, inputs=batch, logits="nothing")


def test_the_jacobian_of_one_of_several_inputs():
    """Of z = A (x + E[t]): |A|_F^2, whatever the batch."""
    model, batch, logits, _ = case("mapping")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(
        model, optimizer, every=1, probes=["jacobian_norm"], inputs=batch, logits=logits
    ) as watched:
        model(**batch)["noise"].sum().backward()
        optimizer.step()
    expected = float(model.mix.weight.detach().square().sum())
    assert watched.records.last("jacobian_norm") == pytest.approx(expected, rel=1e-5)


def test_gains_that_start_at_zero_hide_invariance_only_at_first():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.branch, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x):
            x = self.stem(x)
            return self.head(x + self.norm(self.branch(x)))

    torch.manual_seed(0)
    model, (_, inputs, labels) = Residual(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    probes = ["weight_norm", "size_response", "effective_lr"]
    with watch(model, optimizer, every=1, probes=probes, inputs=inputs) as watched:
        assert watched.layers.invariant("branch") is None
        train(model, [optimizer], inputs, labels, 8)
    timeline = watched.recording.settings["branch"]
    assert timeline[-1][1].invariant is True
    assert abs(watched.records.last("size_response/branch")) < 1e-3
    assert watched.records.last("size_response/head") == pytest.approx(0.01, rel=0.05)
    # measured at the 1st and the 4th record, and a 16th would be next
    assert [row.step for row in watched.records.series("size_response/branch")] == [1, 4]


def test_layers_that_are_invariant_only_together():
    """A pre-norm residual stream: embedding and what writes into it."""

    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.write = nn.Linear(6, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.norm = nn.LayerNorm(8, eps=1e-12, elementwise_affine=False)
            self.last = nn.LayerNorm(8, eps=1e-12, elementwise_affine=False)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.stem(x)
            return self.head(self.last(x + self.write(self.norm(x))))

    torch.manual_seed(0)
    model, (_, inputs, labels) = PreNorm(), net()
    decayed = [{"params": [model.stem.weight, model.write.weight], "weight_decay": 0.1}]
    optimizer = torch.optim.SGD([*decayed, {"params": model.head.parameters()}], lr=0.1)
    probes = ["weight_norm", "size_response"]
    with watch(model, optimizer, every=1, probes=probes, inputs=inputs) as watched:
        train(model, [optimizer], inputs, labels)
    own = watched.recording.settings["stem"][-1][1]
    assert (own.invariant, set(own.together)) == (False, {"stem", "write"})
    alone = watched.records.last("direction_response/stem")
    assert watched.records.last("decay_response") < 1e-4 * alone


def test_momentum_correlates_successive_updates():
    """Under independent gradients the cosine is the momentum."""
    torch.manual_seed(0)
    model = nn.Linear(100, 50, bias=False)
    for momentum in (0.0, 0.8):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        with watch(
            model, optimizer, every=5, probes=["weight_norm", "update_correlation"]
        ) as watched:
            for _ in range(60):
                model.weight.grad = torch.randn_like(model.weight)
                optimizer.step()
        rows = watched.records.series("update_correlation/model")
        assert [row.step for row in rows][:3] == [2, 6, 11]
        late = [row.value for row in rows if row.step > 30]
        assert sum(late) / len(late) == pytest.approx(momentum, abs=0.05)


def test_spectra():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.MultiheadAttention(20, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.outer(torch.randn(20), torch.randn(30)))
        query, _, _ = model[1].in_proj_weight.chunk(3)
        query[5:10] = torch.outer(torch.randn(5), torch.randn(20))  # the second head, of rank one
    norms, ranks, outliers = (reading.layers for reading in spectra(model))
    frobenius = float(model[0].weight.detach().norm())
    assert norms["0"] == pytest.approx(frobenius, rel=1e-5)
    assert ranks["0"] == pytest.approx(1.0, rel=1e-5)
    assert outliers["0"] == pytest.approx(1.0, rel=1e-5)
    heads = head_ranks(model).layers
    assert heads["1.1"] == 1.0
    assert all(2 <= heads[f"1.{i}"] <= 5 for i in (0, 2, 3))
    assert 3 < ranks["1.out_proj"] < 20
    assert outliers["1.out_proj"] < 0.4


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_spectra_of_complex_weights(dtype):
    """U diag(3, 2, 1) V' with unitary U and V, and heads whose W_Q' W_K has one singular value."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, n, dtype=dtype))[0] for n in (4, 3))
    model = nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.MultiheadAttention(4, 2, dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(u[:, :3] * torch.tensor([3.0, 2.0, 1.0]) @ v)
        for rows, factor in ((slice(0, 2), 1j), (slice(4, 6), 1)):  # of head 0: W_Q and W_K
            real = factor * torch.outer(torch.ones(2), torch.randn(4))
            model[1].in_proj_weight[rows] = real.to(dtype)
    norms, ranks, _ = (reading.layers for reading in spectra(model))
    assert norms["0"] == pytest.approx(3.0, rel=1e-5)
    assert ranks["0"] == pytest.approx(14 / 9, rel=1e-5)
    heads = head_ranks(model).layers
    assert (heads["1.0"], heads["1.1"]) == (1.0, 2.0)


def test_a_probe_is_one_file(tmp_path, monkeypatch):
    text = (
        "from decaylab.probes import Probe, Reading, register\n"
        "register(Probe('answer', 'free', lambda m: Reading('answer', '1', total=42.0)))\n"
    )
    package = tmp_path / "own_probes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "answer.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_all("own_probes", [str(package)])
    try:
        model, inputs, labels = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, every=1, probes={"answer": 2, "weight_norm": 3}) as watched:
            train(model, [optimizer], inputs, labels, 6)
        assert [row.step for row in watched.records.series("answer")] == [1, 2, 4, 6]
        assert [row.step for row in watched.records.series("weight_norm")] == [1, 3, 6]
        with refuses(NameTaken, kind="probe", name="answer"):
            register(Probe("answer", "free", lambda m: Reading("answer", "1")))
    finally:
        del PROBES["answer"]


def test_a_replayed_step_is_counted():
    model, inputs, labels = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    with watch(model, optimizer, every=4, probes=["weight_norm", "decay_exposure"]) as watched:
        (hook,) = optimizer._optimizer_step_post_hooks.values()
        rounds = hook.__self__  # what replays steps asks the hooks' owner
        assert rounds.wants_step()
        train(model, [optimizer], inputs, labels)
        for _ in range(2):
            assert not rounds.wants_step()
            rounds.step_replayed()
        assert rounds.wants_step()
        train(model, [optimizer], inputs, labels)
    assert [row.step for row in watched.records.series("weight_norm")] == [1, 4]
    assert watched.records.last("decay_exposure/0") == pytest.approx(4 * 0.05)


def test_frozen_layers_are_measured_once_they_are_thawed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(16, 4)

    def step():
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with watch(model, optimizer, every=2, inputs=inputs) as watched:
        step()
        assert watched.layers.measured.layers == ("1", "3")
        model[0].requires_grad_(True)
        step()
        assert watched.layers.measured.layers == ("0", "1", "3")
        assert watched.layers.invariant("0")
    model.requires_grad_(False)  # where nothing is trained, all are measured
    assert measured_invariance(model, inputs).layers == ("0", "1", "3")


def test_hooks_of_the_model_run_once_per_pass():
    """A hook that doubles the inputs would act twice where it is called twice."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    plain = applied(model, (inputs,))[0](inputs)
    model.register_forward_pre_hook(lambda _, arguments: (2 * arguments[0],))
    view, tensor = applied(model, (inputs / 2,))
    assert torch.equal(view(tensor), plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, of what it compiles
def test_measuring_compiles_nothing():
    """Modules compiled in place are measured uncompiled: torch allows few recompilations."""
    compiled = []

    def counted(graph, _):
        compiled.append(graph)
        return graph.forward

    class Own(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh()

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), Own(4, 4), torch.nn.Linear(4, 2))
    model[1].compile(backend=counted)
    optimizer, inputs = torch.optim.AdamW(model.parameters()), torch.randn(5, 3)
    torch.compiler.reset()
    with watch(model, optimizer, every=1, inputs=inputs, probes="diagnosis") as watched:
        assert not compiled
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(compiled) == 1
    assert watched.records.series("jacobian_norm")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of what it compiles
def test_a_compiled_step_is_measured_as_it_is():
    """Probes are not traced along with it, which they do not survive."""
    records = []
    for wrapped in (torch.compile(backend="eager"), lambda step: step):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        inputs, lr = torch.randn(5, 3), torch.tensor(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
        step = wrapped(lambda optimizer=optimizer: optimizer.step())
        with watch(model, optimizer, every=2, inputs=inputs, probes="diagnosis") as watched:
            for _ in range(4):
                model(inputs).square().mean().backward()
                step()
                optimizer.zero_grad()
        records.append({(row.step, row.name): row.value for row in watched.records.rows})
    torch.compiler.reset()
    assert records[0] == pytest.approx(records[1], rel=1e-4, abs=1e-6)
