"""What `watch` records of steps that are not a plain `step()` over parameters known at first."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from decaylab import diagnose, watch
from decaylab.diagnosis.runs import read_run
from decaylab.records import Rows

INFINITE = 2  # the step whose loss a GradScaler refuses


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    batches = torch.randn(5, 16, 6).double(), torch.randint(3, (5, 16))
    return model, list(zip(*batches, strict=True))


def size(model):
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


def steps_and_values(watched, name):
    return {row.step: row.value for row in watched.records.series(name)}


@pytest.mark.parametrize("by_name", [False, True])
def test_gradients_that_a_closure_takes_are_those_of_this_step(by_name):
    model, batches = problem()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {}
    with watch(model, opt, every=1) as watched:
        for step, (x, y) in enumerate(batches, start=1):

            def closure(x=x, y=y, step=step):
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                seen[step] = size(model)
                return loss

            opt.step(**{"closure": closure}) if by_name else opt.step(closure)
    assert steps_and_values(watched, "gradient_norm") == pytest.approx(seen, rel=1e-10)


class Spoils(torch.optim.SGD):
    """Uses its gradients up."""

    def step(self, closure=None):
        super().step()
        self.zero_grad(set_to_none=False)


def test_a_step_that_calls_its_base_class_is_one_step():
    model, batches = problem()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)  # so torch hooks it too
    opt = Spoils(model.parameters(), lr=0.1, weight_decay=0.5)
    opt.step()  # outside the watch; the gradients are none yet
    before = [model[0].weight.detach().clone()]
    with watch(model, opt, every=2) as watched, watch(model, plain, every=1) as other:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            opt.step()
            before.append(model[0].weight.detach().clone())
    assert watched.steps == len(batches)
    assert (other.steps, other.optimizers) == (len(batches), (opt,))  # it took plain's place
    lengths = {step: float((before[step] - before[step - 1]).norm()) for step in (1, 2, 4)}
    assert steps_and_values(watched, "update_norm/0") == pytest.approx(lengths, rel=1e-10)
    exposure = {step: step * 0.1 * 0.5 for step in (1, 2, 4)}
    assert steps_and_values(watched, "decay_exposure/0") == pytest.approx(exposure)


def test_no_closure_by_name_is_a_plain_step():
    model, batches = problem()
    opt, seen = Spoils(model.parameters(), lr=0.1), {}
    with watch(model, opt, every=1) as watched:
        for step, (x, y) in enumerate(batches, start=1):
            F.cross_entropy(model(x), y).backward()
            seen[step] = size(model)
            opt.step(closure=None)
    assert steps_and_values(watched, "gradient_norm") == pytest.approx(seen, rel=1e-10)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_changes_neither_the_size_of_gradients_nor_the_exposure(fused):
    """Fused optimizers are handed scaled gradients, and leave the step out themselves."""
    model, batches = problem()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    with watch(model, opt, every=1) as watched:
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * (float("inf") if i == INFINITE else 1.0)
            scaler.scale(loss).backward()
            if i != INFINITE:
                seen.append(size(model) / scaler.get_scale())
            scaler.step(opt)
            scaler.update()
    got = steps_and_values(watched, "gradient_norm")
    assert list(got.values()) == pytest.approx(seen, rel=1e-10)
    largest = steps_and_values(watched, "gradient_max")
    assert all(largest[step] < norm for step, norm in got.items())
    taken = len(batches) - 1
    assert watched.records.last("decay_exposure/0") == pytest.approx(taken * 0.1 * 0.5)


def test_a_layer_given_to_the_optimizer_later_is_one_that_it_holds():
    model, batches = problem()
    opt = torch.optim.SGD(model[0].parameters(), lr=0.1, weight_decay=0.1)
    with watch(model, opt, every=1) as watched:
        for i, (x, y) in enumerate(batches):
            if i == 1:
                opt.add_param_group({"params": list(model[3].parameters())})
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    stepped = [(step, own.stepped) for step, own in watched.recording.settings["3"]]
    assert stepped == [(1, False), (2, True)]
    assert "does not hold" not in str(diagnose(watched))


def test_a_row_costs_no_name_and_no_dictionary():
    model, batches = problem()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, every=1) as watched:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            opt.step()
    series = watched.records.series("weight_norm/0")
    assert len(series) == len(batches)
    assert len({id(row.name) for row in series}) == 1
    assert not hasattr(series[0], "__dict__")


def test_what_is_thawed_after_a_resume_takes_nothing_from_the_others():
    model, batches = problem()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    model[0].requires_grad_(False)
    with watch(model, opt, every=1) as watched:
        watched.resume(10)
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            model[0].requires_grad_(i >= 3)
            F.cross_entropy(model(x), y).backward()
            opt.step()
    assert watched.records.last("decay_exposure/3") == pytest.approx(len(batches) * 0.1 * 0.5)
    assert watched.records.last("decay_exposure/0") == pytest.approx(2 * 0.1 * 0.5)


@pytest.mark.parametrize("measured", [False, True])
def test_layers_that_are_frozen_or_thawed_on_the_way(measured):
    """As in gradual unfreezing: a layer's records begin and end with its training."""
    model, batches = problem()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    model[0].requires_grad_(False)
    with watch(model, opt, every=1, inputs=batches[0][0] if measured else None) as watched:
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            if i == 2:
                model[0].requires_grad_(True)
                model[3].requires_grad_(False)
            F.cross_entropy(model(x), y).backward()
            opt.step()
    rate = 0.1 * 0.5
    settings = watched.recording.settings
    assert [(step, own.frozen) for step, own in settings["0"]] == [(1, True), (3, False)]
    assert [(step, own.frozen) for step, own in settings["3"]] == [(1, False), (3, True)]
    exposure = {step: (step - 2) * rate for step in (3, 4, 5)}
    assert steps_and_values(watched, "decay_exposure/0") == pytest.approx(exposure)
    assert steps_and_values(watched, "decay_exposure/3") == pytest.approx({1: rate, 2: 2 * rate})
    assert steps_and_values(watched, "effective_lr/0").keys() == {3, 4, 5}
    assert steps_and_values(watched, "rotation/3").keys() == {1, 2}


@pytest.mark.parametrize("every", [1, 5])
def test_decay_while_a_layer_is_frozen_is_not_counted(every):
    model, batches = problem()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    with watch(model, opt, every=every) as watched:
        watched.resume(0)  # without a folder exposure is counted anew
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            model[0].requires_grad_(i not in (1, 2))
            F.cross_entropy(model(x), y).backward()
            opt.step()
    taken = {1: 0.05, 4: 0.1, 5: 0.15} if every == 1 else {1: 0.05, 5: 0.15}
    assert steps_and_values(watched, "decay_exposure/0") == pytest.approx(taken)
    assert watched.records.last("decay_exposure/3") == pytest.approx(len(batches) * 0.05)
    if every > 1:
        return
    rows = [row for row in watched.records.rows if not row.name.startswith("decay_exposure")]
    as_settings_say = replace(watched.recording, rows=Rows(tuple(rows)))
    assert dict(read_run(as_settings_say).layers["0"].exposure) == pytest.approx(taken)
