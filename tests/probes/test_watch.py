"""Watching any loop: what is recorded, what is not disturbed, what happens when a probe fails."""

import errno
import math
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from oracle import tiny_nets
from oracle.plain_kfac import KFAC
from oracle.tiny_nets import tiny_net, train
from refusals import refuses
from torch import nn

from decaylab import diagnose, probes
from decaylab.errors import (
    BadValue,
    Failed,
    Lacks,
    Mismatch,
    OutOfRange,
    UnknownName,
    WrongType,
)
from decaylab.optim.decay import parameter_groups
from decaylab.optim.first_order import adam, sgd
from decaylab.records.packing import read_rows


def test_what_is_recorded_and_when():
    model, inputs, labels = tiny_net("bn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    norms = []
    optimizer.register_step_post_hook(
        lambda *_: norms.append(float(model[0].weight.detach().norm()))
    )
    with probes.watch(model, optimizer, every=3, steps_per_epoch=4) as watched:
        train(model, optimizer, inputs, labels, 8)
    rows = watched.records
    said = f"<Watch of Sequential, SGD, every=3: 8 steps, {len(rows.rows)} rows>"
    assert repr(watched) == said
    series = rows.series("weight_norm/0")
    assert [row.step for row in series] == [1, 3, 6]
    assert [row.epoch for row in series] == [0, 0, 1]
    assert [row.value for row in series] == pytest.approx([norms[0], norms[2], norms[5]])
    assert rows.last("effective_lr/0") == pytest.approx(0.1 / norms[5] ** 2)
    assert rows.last("decay_exposure/0") == pytest.approx(6 * 0.1 * 0.01 / 0.5)
    assert {"update_norm/0", "rotation/0", "weight_norm/5", "weight_norm"} <= set(rows.names())
    assert "effective_lr/5" not in rows.names()  # the head is not scale-invariant
    seconds = [row.seconds for row in rows.rows]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("kind", ["decoupled", "independent", "l2"])
def test_movement_is_of_the_whole_step_decay_included(kind):
    model, inputs, labels = tiny_net("mlp")
    groups = parameter_groups(model, weight_decay=0.3, decay=kind)
    optimizer = adam(groups, lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    old = model[0].weight.detach().clone()
    with probes.watch(model, optimizer, every=1) as watched:
        train(model, optimizer, inputs, labels, 1)
    moved = float((model[0].weight.detach() - old).norm())
    assert watched.records.last("update_norm/0") == pytest.approx(moved, rel=1e-10)


def test_exposure_follows_the_schedule():
    model, inputs, labels = tiny_net("mlp")
    groups = parameter_groups(model, weight_decay=0.2, decay="decoupled", scope="fc")
    optimizer = sgd(groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    with probes.watch(model, optimizer, every=4, probes=["decay_exposure"]) as watched:
        for _ in range(4):
            train(model, optimizer, inputs, labels, 1)
            schedule.step()
    assert watched.records.last("decay_exposure/2") == pytest.approx(0.2 * (0.2 + 0.02))
    assert watched.records.last("decay_exposure/0") == 0.0


def test_gains_are_exposed_as_the_weights_of_their_group_are():
    """Summed up from the learning rates at records, under a schedule, they would not be."""
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with probes.watch(model, optimizer, every=10) as watched:
        for _ in range(20):
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
            schedule.step()
    layers = diagnose(watched).motions
    assert {motion.layer for motion in layers} == {"0", "1", "2"}
    assert len({motion.timescale for motion in layers}) == 1


def test_exposure_is_counted_from_where_a_run_is_resumed():
    model, inputs, labels = tiny_net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    with probes.watch(model, optimizer, every=4, probes=["decay_exposure"]) as watched:
        train(model, optimizer, inputs, labels, 7)
        watched.resume(4)
        train(model, optimizer, inputs, labels, 4)
    found = [(row.step, row.value) for row in watched.records.series("decay_exposure/0")]
    assert found == [(1, pytest.approx(1e-3)), (4, pytest.approx(4e-3)), (8, pytest.approx(4e-3))]


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2)])
def test_exposure_continues_from_the_last_row_in_the_folder(tmp_path, model):
    """Of a weight that the model itself holds too, which has no name but "model" in rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    for step in (0, 4):
        with probes.watch(model, optimizer, every=2, folder=tmp_path) as watched:
            if step:
                watched.resume(step)
            for _ in range(5):  # the fifth of the first run is lost
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
    layer = "0" if isinstance(model, nn.Sequential) else "model"
    found = {row.step: row.value for row in watched.records.series(f"decay_exposure/{layer}")}
    assert found == pytest.approx({step: step * 1e-3 for step in (1, 2, 4, 6, 8)})


def test_exposure_counts_the_steps_between_the_last_row_and_the_checkpoint(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    for begin, end in ((0, 9), (7, 12)):  # resumed from the 7th, the last row is of the 4th
        with probes.watch(model, optimizer, every=4, folder=tmp_path) as watched:
            if begin:
                watched.resume(begin)
            for _ in range(begin, end):
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
    found = {row.step: row.value for row in watched.records.series("decay_exposure/0")}
    assert found == pytest.approx({step: step * 1e-3 for step in (1, 4, 8, 12)})


def test_a_resumed_run_measures_as_seldom_as_one_that_went_on(tmp_path):
    """At its 1st, 4th and 16th record, although outcomes are logged before and at every step."""
    stops = {"whole": [40], "resumed": [11, 40]}
    for name, ends in stops.items():
        model, inputs, labels = tiny_net("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"every": 2, "inputs": inputs, "probes": ["size_response", "update_correlation"]}
        for end in ends:
            with probes.watch(model, optimizer, **options, folder=tmp_path / name) as watched:
                if end != ends[0]:
                    watched.resume(ends[0])
                watched.log(loss=0.5)
                while watched.steps < end:
                    train(model, optimizer, inputs, labels, 1)
                    watched.log(loss=0.5)
        measured = {row.step for row in watched.records.series("size_response/0")}
        assert measured == {1, 6, 30}, name


def test_exposure_of_a_module_of_which_one_weight_is_left_alone():
    model = nn.LSTM(3, 2)
    optimizer = torch.optim.SGD([model.weight_hh_l0], lr=0.1, weight_decay=0.01)
    with probes.watch(model, optimizer, every=1) as watched:
        model(torch.ones(2, 3))[0].sum().backward()
        optimizer.step()
    settings = watched.recording.settings
    assert settings["weight_hh_l0"][-1][1].weight_decay == 0.01
    assert watched.records.last("decay_exposure/weight_hh_l0") == pytest.approx(1e-3)
    assert not settings["weight_ih_l0"][-1][1].stepped


def test_training_is_the_same_with_and_without():
    def run(watching: bool) -> list[torch.Tensor]:
        model, inputs, labels = tiny_net("residual")
        kfac = KFAC(model, lr=0.05, refresh_every=2, invert_every=2)
        if watching:
            probes.watch(model, kfac, every=1, probes=probes.PROBES, inputs=inputs)
        train(model, kfac, inputs, labels, 4)
        return list(model.state_dict().values())

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_every_probe_by_name():
    model, inputs, labels = tiny_net("bn")
    kfac = KFAC(model, lr=0.05)
    with probes.watch(model, kfac, every=1, probes=probes.PROBES, inputs=inputs) as watched:
        train(model, kfac, inputs, labels, 1)
    names = set(watched.records.names())
    assert {
        *("weight_norm", "update_norm/0", "rotation/0", "effective_lr/0", "invariance/0"),
        *("decay_exposure/0", "gn_norm", "fr_norm", "jacobian_norm", "kfac_gn_norm/0"),
        *(
            "fisher_trace_train/0",
            "fisher_trace_normalised_train/0",
            "gn_trace_train/5",
            "second_order_share/0",
        ),
        *("effective_damping/0", "factored_damping/0", "factored_share/5"),
    } <= names
    assert watched.records.last("jacobian_norm") == probes.jacobian_norm(model, inputs).total


def test_a_failing_probe_warns_once_and_does_not_stop():
    model, inputs, labels = tiny_net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def broken(moment):
        raise ValueError("no such thing")

    mine = probes.Probe("mine", "free", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with probes.watch(model, optimizer, every=1, probes=[mine, "weight_norm"]) as watched:
            train(model, optimizer, inputs, labels, 3)
    assert len(caught) == 1
    assert "mine at step 1: ValueError: no such thing" in str(caught[0].message)
    assert caught[0].filename == tiny_nets.__file__  # where the loop is
    assert len(watched.records.series("weight_norm")) == 3


def test_what_is_not_finite_is_recorded_and_said_once():
    model, inputs, labels = tiny_net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with probes.watch(model, optimizer, every=1, probes=["weight_norm"]) as watched:
            train(model, optimizer, inputs, labels, 3)
    assert [str(w.message) for w in caught if "not finite" in str(w.message)] == [
        "watch: weight_norm at step 1: weight_norm is not finite: layer '0', layer '2', the model "
        "(shown once; training continues)"
    ]
    assert len(watched.records.series("weight_norm/0")) == 3


def test_of_many_layers_that_are_not_finite_some_are_named():
    layers = {str(layer): math.nan for layer in range(9)}
    with pytest.warns(probes.NonFiniteWarning, match="layer '3' and 5 more") as caught:
        probes.Reading("norm", "1", layers)
    assert caught[0].filename == __file__


def test_detach_and_rows_on_disk(tmp_path):
    model, inputs, labels = tiny_net("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    watched = probes.watch(model, optimizer, every=2, folder=tmp_path / "run")
    train(model, optimizer, inputs, labels, 2)
    watched.detach()
    train(model, optimizer, inputs, labels, 2)
    assert watched.steps == 2
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    written = read_rows(tmp_path / "run" / "rows.jsonl")
    assert written.rows == watched.records.rows
    assert written.rows


def test_a_disk_that_is_full_at_the_first_record_loses_nothing(tmp_path, monkeypatch):
    """Trackers get those rows at once, the file gets them later, without an earlier run's."""
    shown = []
    tracker = SimpleNamespace(log=shown.extend)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    for steps in (6, 2):
        model, inputs, labels = tiny_net("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shown.clear()
        with probes.watch(
            model, optimizer, every=1, folder=tmp_path, trackers=[tracker]
        ) as watched:
            if steps == 2:  # anew, in the same folder
                with monkeypatch.context() as patch:
                    patch.setattr(os, "fsync", full)
                    with pytest.warns(UserWarning, match="free some space"):
                        train(model, optimizer, inputs, labels, 1)
                assert {row.step for row in shown} == {1}
            train(model, optimizer, inputs, labels, steps - watched.steps)
    assert read_rows(tmp_path / "rows.jsonl").rows == watched.records.rows == tuple(shown)


def test_wrapped_models_and_optimizers():
    """As accelerate and Lightning wrap them: an object that holds the optimizer as `.optimizer`."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self, closure=None):
            return self.optimizer.step(closure)

    model, inputs, labels = tiny_net("mlp")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = Wrapper(inner)
    compiled = torch.compile(model, backend="eager")
    with probes.watch(compiled, wrapped, every=1) as watched:
        for _ in range(2):

            def closure():
                inner.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                return loss

            wrapped.step(closure)
    assert len(watched.records.series("weight_norm/0")) == 2
    assert watched.records.last("update_norm/0") > 0


def test_bad_arguments():
    model, inputs, _ = tiny_net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refuses(UnknownName, kind="probe", name="nope"):
        probes.watch(model, optimizer, probes=["nope"])
    with refuses(Lacks, what="inputs"):
        probes.watch(model, optimizer, probes=["jacobian_norm"])
    with refuses(OutOfRange, name="every", value=0):
        probes.watch(model, optimizer, every=0)
    with refuses(WrongType, name="optimizer", value="sgd"):
        probes.watch(model, "sgd")
    with refuses(WrongType, name="model"):
        probes.watch(model.parameters(), optimizer)
    with refuses(Lacks, what="parameter of this model"):
        probes.watch(tiny_net("mlp")[0], optimizer)
    with refuses(Mismatch, what="dtype"):
        probes.watch(model, optimizer, inputs=inputs.float())
    with pytest.raises(Failed, match="shapes"):
        probes.watch(model, optimizer, inputs=torch.cat([inputs, inputs], -1))
    for trackers in (SimpleNamespace(log=print), ["wandb"]):
        with refuses(BadValue, name="trackers"):
            probes.watch(model, optimizer, trackers=trackers)
    with refuses(Lacks, what="parameter that is not frozen"):
        probes.watch(model.requires_grad_(False), optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_costs_are_declared_and_the_defaults_are_free():
    assert {probe.cost for probe in probes.PROBES.values()} == {"free", "one backward", "many"}
    assert all(probes.PROBES[name].cost == "free" for name in probes.FREE)
    assert not any(probes.PROBES[name].needs_inputs for name in probes.FREE)


def test_a_second_run_in_the_same_folder_is_not_mixed_with_the_first(tmp_path):
    for steps in (8, 4):
        model, inputs, labels = tiny_net("bn")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with probes.watch(model, optimizer, every=2, folder=tmp_path) as watched:
            train(model, optimizer, inputs, labels, steps)
    kept = read_rows(tmp_path / "rows.jsonl")
    assert [row.step for row in kept.series("weight_norm/0")] == [1, 2, 4]
    assert kept.rows == watched.records.rows


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_going_on_in_a_folder_without_its_step_is_said(tmp_path, name):
    """Adagrad has a state from the start; a new optimizer, or a resumed watch, is told nothing."""
    model, inputs, labels = tiny_net("bn")

    def built():
        settings = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings)

    optimizer = built()
    for again in (False, True):
        optimizer = built() if again else optimizer
        with probes.watch(model, optimizer, every=2, folder=tmp_path) as watched:
            train(model, optimizer, inputs, labels, 4)
    with probes.watch(model, optimizer, every=2, folder=tmp_path) as watched:
        watched.resume(4)
        train(model, optimizer, inputs, labels, 2)
    assert [row.step for row in watched.records.series("weight_norm")] == [1, 2, 4, 6]
    said = r"up to step 6, no longer.*call watched.resume\(step\)"
    watched = probes.watch(model, optimizer, every=2, folder=tmp_path)
    with watched:
        with pytest.warns(UserWarning, match=said):
            train(model, optimizer, inputs, labels, 2)
        assert [r.step for r in read_rows(tmp_path / "rows.jsonl").series("weight_norm")] == [1, 2]
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write("\n")  # somebody else; that is said as well
        with pytest.warns(UserWarning, match="another watch or process writes to it too"):
            train(model, optimizer, inputs, labels, 2)


def test_two_that_write_to_one_folder_are_told(tmp_path):
    nets = [tiny_net("bn") for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model, _, _ in nets]
    both = [
        probes.watch(model, optimizer, every=1, folder=tmp_path)
        for (model, _, _), optimizer in zip(nets, optimizers, strict=True)
    ]
    for (model, inputs, labels), optimizer in zip(nets, optimizers, strict=True):
        train(model, optimizer, inputs, labels, 2)
    model, inputs, labels = nets[0]
    with pytest.warns(UserWarning, match="another watch or process writes to it too"):
        train(model, optimizers[0], inputs, labels, 1)
    for watched in both:
        watched.detach()


def test_the_probes_of_a_diagnosis():
    model, inputs, labels = tiny_net("bn")
    for build, share in ((torch.optim.SGD, False), (KFAC, True)):
        optimizer = build(model if share else model.parameters(), lr=0.01)
        with probes.watch(model, optimizer, probes="diagnosis", inputs=inputs) as watched:
            train(model, optimizer, inputs, labels, 1)
        names = watched.records.names()
        assert {"jacobian_norm", "weight_norm/0"} <= set(names)
        assert ("second_order_share/0" in names) == share
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with refuses(Lacks, what="inputs"):
        probes.watch(model, optimizer, probes="diagnosis")
    with refuses(BadValue, name="probes", value="all"):
        probes.watch(model, optimizer, probes="all")


def test_tokens_have_no_jacobian():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randint(5, (6, 2)), torch.randint(3, (6,))
    with probes.watch(model, optimizer, probes="diagnosis", inputs=inputs) as watched:
        train(model, optimizer, inputs, labels, 1)
    assert watched.records.last("gn_norm") > 0
    assert "jacobian_norm" not in watched.records.names()
