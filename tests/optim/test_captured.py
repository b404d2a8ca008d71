"""The captured step's logic on a CPU, with recorded work in the place of CUDA graphs."""

import subprocess
import sys
import warnings

import pytest
import torch
from oracle.kfac_runs import cross_entropy, seeded
from oracle.plain_kfac import KFAC
from oracle.recorded_graphs import Recorded
from oracle.small_conv import data, flat, net
from refusals import refuses
from torch import nn

import decaylab
from decaylab.errors import BadValue, OutOfRange, UnknownName, WrongType
from decaylab.optim.captured import CapturedStep, NotCapturable, Obstacle, captured
from decaylab.optim.first_order import sgd
from decaylab.optim.graphs import EAGER_RUNS
from decaylab.optim.options import KFACOptions


def stepped(model, *optimizers, seen=None):
    def step(x, y):
        if seen is not None:
            seen.append(x)
        loss = cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def wrapped(step, model, *optimizers, graphs=None, **options):
    models = model if isinstance(model, list) else [model]
    graphs = graphs or Recorded()
    cpu = torch.device("cpu")
    return CapturedStep(step, models, list(optimizers), cpu, graphs, **options), graphs


def new_kfac(model, **more):
    options = {"refresh_every": 3, "invert_every": 6, "weight_decay": 0.1, "kl_clip": 1e-2}
    return KFAC(model, 0.1, **{**options, **more}, options=KFACOptions(seed=0))


def new_sgd(model, **more):
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9, fused=True, **more)


def test_it_is_exported_and_imports_no_trainer():
    assert decaylab.captured is captured
    code = (
        "import sys, types; sys.modules['decaylab'] = m = types.ModuleType('decaylab');"
        f"m.__path__ = {list(decaylab.__path__)!r};"
        "import decaylab.optim.captured;"
        "assert not [n for n in sys.modules if n.startswith('decaylab.training')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_on_a_cpu_it_is_the_plain_step():
    model, other = seeded(net), seeded(net)
    opt, plain_opt = new_kfac(model), new_kfac(other)
    step, plain = captured(stepped(model, opt), model, opt), stepped(other, plain_opt)
    for i in range(5):
        assert torch.equal(step(*data(i)), plain(*data(i)))
    assert torch.equal(flat(model), flat(other))
    assert step.replayed == 0
    assert opt.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"step": 3}, WrongType),
        ({"step": nn.Linear(2, 2)}, WrongType),
        ({"model": nn.Linear(2, 2).parameters()}, WrongType),
        ({"optimizers": {}}, WrongType),
        ({"optimizers": None}, WrongType),
        ({"on_failure": "ignore"}, UnknownName),
        ({"shapes": 0}, OutOfRange),
    ],
)
def test_arguments_of_another_kind_are_refused_on_a_cpu_too(wrong, error):
    model = nn.Linear(2, 2)
    right = {
        "step": lambda: None,
        "model": model,
        "optimizers": torch.optim.SGD(model.parameters()),
    }
    captured(**right)
    with refuses(error):
        captured(**{**right, **wrong})


@pytest.mark.parametrize("lag", [0, 2])
def test_kfac_steps_are_replayed_by_kind_and_are_the_eager_ones(lag):
    """The host's part (counting, pending inverses) is outside what is replayed."""

    def made(model):
        options = KFACOptions(seed=0, inversion_lag=lag)
        lr = torch.tensor(0.1)
        return KFAC(model, lr, refresh_every=3, invert_every=6, weight_decay=0.1, options=options)

    model, other = seeded(net), seeded(net)
    opt, plain_opt = made(model), made(other)
    step, graphs = wrapped(stepped(model, opt), model, opt)
    plain = stepped(other, plain_opt)
    for i in range(30):
        assert torch.equal(step(*data(i)), plain(*data(i)).detach())
        assert torch.equal(flat(model), flat(other))
    assert opt.steps == plain_opt.steps == 30
    kinds = 3 if lag == 0 else 2 + 1  # plain, refresh, and one that inverts at once
    assert graphs.captures <= kinds
    assert graphs.captures >= 2
    assert step.replayed == graphs.replays >= 30 - EAGER_RUNS * kinds
    assert step.obstacle is None


def test_results_are_copies_and_inputs_lie_in_one_place():
    model = seeded(net)
    opt = new_sgd(model)
    seen = []
    step, _ = wrapped(stepped(model, opt, seen=seen), model, opt)
    losses = [step(*data(i)) for i in range(6)]
    assert len({float(loss) for loss in losses}) == 6
    assert not any(loss.requires_grad for loss in losses)
    assert len({x.data_ptr() for x in seen}) == 1


def test_nested_inputs_and_constants():
    model = nn.Linear(3, 2)
    opt = new_sgd(model)

    def step(batch, *, power):
        loss = (model(batch["x"]) - batch["y"][0]).pow(power).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return {"loss": loss, "nothing": None}

    take, graphs = wrapped(step, model, opt)
    for power in (2, 2, 2, 4, 4, 4):
        take({"x": torch.randn(4, 3), "y": [torch.zeros(4, 2)]}, power=power)
    assert graphs.captures == 2
    assert take.replayed == 2


def test_a_new_shape_gets_its_own_graph_up_to_a_limit():
    model = seeded(net)
    opt = new_sgd(model)
    step, graphs = wrapped(stepped(model, opt), model, opt, shapes=2)
    for size in (4, 8) * 3:
        step(*data(size, size))
    assert graphs.captures == 2
    with pytest.warns(UserWarning, match="drop_last"):
        step(*data(6, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*data(6, 6))  # told once
        step(*data(4, 4))
    assert step.replayed == 3
    assert step.obstacle is None


@pytest.mark.parametrize("way", ["scheduler", "assigned", "tensor"])
def test_learning_rates_change_outside(way):
    """By a scheduler built before or a number that is assigned, as without graphs."""

    def trained(wrap):
        model = seeded(net)
        lr = torch.tensor(0.5) if way == "tensor" else 0.5
        opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
        step = stepped(model, opt)
        if wrap:
            step, _ = wrapped(step, model, opt)
        for i in range(7):
            step(*data(i))
            if way == "assigned":
                opt.param_groups[0]["lr"] = 0.5 ** (i + 2)
            else:
                schedule.step()
        return flat(model)

    assert torch.equal(trained(wrap=True), trained(wrap=False))


def test_changed_settings_make_a_new_capture():
    model, other = seeded(net), seeded(net)
    opt, plain_opt = new_sgd(model), new_sgd(other)
    step, graphs = wrapped(stepped(model, opt), model, opt)
    plain = stepped(other, plain_opt)
    for i in range(12):
        if i == 6:
            for optimizer in (opt, plain_opt):
                optimizer.param_groups[0]["weight_decay"] = 0.1
        step(*data(i))
        plain(*data(i))
    assert graphs.captures == 2
    assert torch.equal(flat(model), flat(other))


def test_settings_that_change_all_the_time():
    model = seeded(net)
    opt = new_sgd(model)
    step, _ = wrapped(stepped(model, opt), model, opt)

    def change():
        for i in range(40):
            opt.param_groups[0]["momentum"] = 0.5 + i / 100
            step(*data(i))

    with pytest.raises(NotCapturable) as failure:
        change()
    assert failure.value.obstacle is Obstacle.SETTINGS


def test_moved_parameters_and_a_loaded_state_make_a_new_capture():
    model = seeded(net)
    opt = new_kfac(model)
    step, graphs = wrapped(stepped(model, opt), model, opt)
    for i in range(9):
        step(*data(i))
    before = graphs.captures
    opt.load_state_dict(opt.state_dict())
    for i in range(9):
        step(*data(i))
    assert graphs.captures > before
    before = graphs.captures
    with torch.no_grad():
        weight = next(model.parameters())
        weight.data = weight.data.clone()
    for i in range(9):
        step(*data(i))
    assert graphs.captures > before


def test_two_optimizers_and_two_models():
    first, second = seeded(net), nn.Linear(2, 3, dtype=torch.float64)
    one, two = new_kfac(first), new_sgd(second)

    def step(x, y):
        logits = first(x) + second(x.mean((2, 3)))
        loss = cross_entropy(logits, y)
        loss.backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    take, _ = wrapped(step, [first, second], one, two)
    losses = [float(take(*data())) for _ in range(12)]
    assert losses[-1] < losses[0]
    assert take.replayed > 0


# -- what cannot be captured --


def refusal(make):
    """The obstacle of a step that raises, and that of the same step asked to go on."""
    with pytest.raises(NotCapturable) as failure:
        make("raise")
    with pytest.warns(UserWarning, match="the step runs uncaptured"):
        step = make("eager")
    assert step.obstacle is failure.value.obstacle
    assert ": " in str(failure.value)  # the fault, then the remedy
    return failure.value.obstacle


def test_an_optimizer_that_is_not_capturable():
    model = seeded(net)
    for opt in (
        torch.optim.AdamW(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1),
    ):
        found = refusal(lambda how, o=opt: wrapped(stepped(model, o), model, o, on_failure=how)[0])
        assert found is Obstacle.NOT_CAPTURABLE


def test_parameters_of_a_second_model():
    model, other = seeded(net), seeded(net)
    opt = new_sgd(other)
    found = refusal(lambda how: wrapped(stepped(model, opt), model, opt, on_failure=how)[0])
    assert found is Obstacle.FOREIGN_PARAMETERS


def test_a_hook_that_a_replay_would_leave_out():
    model = seeded(net)
    opt = new_sgd(model)
    opt.register_step_post_hook(lambda *_: None)
    found = refusal(lambda how: wrapped(stepped(model, opt), model, opt, on_failure=how)[0])
    assert found is Obstacle.STEP_HOOK


def test_our_own_decay_outside_the_step_is_no_obstacle():
    model = seeded(net)
    group = {"params": list(model.parameters()), "decay": "decoupled", "weight_decay": 0.1}
    opt = sgd([group], lr=0.1)
    opt.param_groups[0]["fused"] = True
    assert wrapped(stepped(model, opt), model, opt)[0].obstacle is None


class Watcher:
    """Wants every fifth step."""

    def __init__(self):
        self.hooked = self.replayed = 0

    def wants_step(self):
        return (self.hooked + 1) % 5 == 0

    def step_replayed(self):
        self.replayed += 1

    def hook(self, *_):
        self.hooked += 1  # by a recorded replay too, other than by a CUDA graph's


def test_a_watcher_sees_the_steps_it_wants_and_counts_the_others():
    model = seeded(net)
    opt, watcher = new_kfac(model), Watcher()
    opt.register_step_post_hook(watcher.hook)
    step, graphs = wrapped(stepped(model, opt), model, opt)
    for i in range(20):
        wanted, before = watcher.wants_step(), graphs.replays
        step(*data(i))
        assert not (wanted and graphs.replays > before)
    assert watcher.hooked == 20
    assert watcher.replayed == step.replayed == graphs.replays > 0


def run(how, graphs, steps=6, **more):
    """A model with steps that graphs cannot capture, beside the same steps without them."""
    model, other = seeded(net), seeded(net)
    opt, plain_opt = new_kfac(model, **more), new_kfac(other, **more)
    graphs.damaged = list(model.parameters())
    step, _ = wrapped(stepped(model, opt), model, opt, graphs=graphs, on_failure=how)
    plain = stepped(other, plain_opt)
    for i in range(steps):
        step(*data(i))
    for i in range(steps):
        plain(*data(i))
    assert torch.allclose(flat(model), flat(other), rtol=1e-6, atol=1e-9)  # lr was a float32 tensor
    assert isinstance(opt.param_groups[0]["lr"], float)
    return step


def test_a_host_wait():
    assert refusal(lambda how: run(how, Recorded(waits=["train.py:7"]))) is Obstacle.HOST_WAIT
    with pytest.raises(NotCapturable, match=r"train\.py:7"):
        run("raise", Recorded(waits=["train.py:7"]))


def test_a_capture_that_fails_leaves_the_step_as_it_was():
    error = RuntimeError("operation not permitted when stream is capturing")
    assert refusal(lambda how: run(how, Recorded(error=error))) is Obstacle.CAPTURE


def test_a_number_as_result_and_inputs_that_graphs_cannot_have():
    model = seeded(net)
    opt = new_sgd(model)

    def with_number(x, y):
        return stepped(model, opt)(x, y), 3

    def returned(how):
        step, _ = wrapped(with_number, model, opt, on_failure=how)
        for i in range(3):
            step(*data(i))
        return step

    assert refusal(returned) is Obstacle.RESULT

    def given(how, **more):
        step, _ = wrapped(lambda x, y, **_: stepped(model, opt)(x, y), model, opt, on_failure=how)
        step(*data(), **more)
        return step

    assert refusal(lambda how: given(how, more={1, 2})) is Obstacle.INPUT
    x = torch.zeros(2, requires_grad=True)
    assert refusal(lambda how: given(how, x2=x)) is Obstacle.INPUT

    def inside(how):
        with torch.autocast("cpu", torch.bfloat16):
            return given(how)

    assert refusal(inside) is Obstacle.AUTOCAST


@pytest.mark.parametrize("times", [0, 2])
def test_kfac_is_stepped_once(times):
    model = seeded(net)
    opt = new_kfac(model)

    def step(x, y):
        cross_entropy(model(x), y).backward()
        for _ in range(times):
            opt.step()

    take, _ = wrapped(step, model, opt)
    with refuses(BadValue, name="calls of KFAC.step() in a captured step", value=times):
        take(*data())


def test_every_obstacle_has_a_sentence():
    for obstacle in Obstacle:
        sentence = str(NotCapturable(obstacle, "this", "that"))
        assert "{" not in sentence
        assert "  " not in sentence
