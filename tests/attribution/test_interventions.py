import math

import pytest
import torch
from attribution.loops import Trainer, digits, plain_net
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

import decaylab
from decaylab.attribution.arms import held_errors
from decaylab.errors import DecaylabError, Lacks, Mismatch, UnknownName, WrongType
from decaylab.optim.first_order import sgd
from decaylab.probes.movement import movement, snapshot
from decaylab.probes.weight_norm import weight_norms
from decaylab.training.held_layers import LayerNote, select
from decaylab.training.interventions import Intervention
from decaylab.training.paths import LayerPaths, Targets

STEPS = 12


def muon_and_adamw(model):
    """As modded-nanogpt has them: matrices with Muon, the rest with AdamW."""
    return [
        torch.optim.Muon([model[1].weight], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([model[3].weight], lr=0.01, weight_decay=0.1),
    ]


class Replacing(torch.optim.SGD):
    """Steps by putting other tensors into the parameters' place, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * (p.grad + group["weight_decay"] * p.data)


class OtherName(torch.optim.SGD):
    """Calls its weight decay `wd`."""

    def __init__(self, params, lr, wd):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "wd": wd})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad + group["wd"] * p))


OPTIMIZERS = {
    "other name": lambda m: OtherName(m.parameters(), lr=0.1, wd=0.01),
    "replacing": lambda m: Replacing(m.parameters(), lr=0.1, weight_decay=0.01),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "muon and adamw": muon_and_adamw,
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, weight_decay=0.01),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01, weight_decay=0.1),
    "kfac": lambda m: KFAC(m, 0.05, weight_decay=0.1, kl_clip=1e-3, invert_every=3),
}


def trained(optimizer, steps=STEPS, targets=None, off=False, around=None):
    """Steps of a loop with an intervention on it; (what was recorded, model)."""
    model, optimizers, step, _ = Trainer(plain_net, optimizer)(0)
    chosen = select(model, optimizers)
    undecayed = chosen.held if off else ()
    weights, targets = chosen.weights, targets or Targets()
    with Intervention(chosen.optimizers, weights, steps, targets, undecayed) as intervention:
        for i in range(steps):
            if around is not None:
                around(i, model)
            step()
        return intervention.paths(), model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_recorded_is_what_the_probes_measure(name):
    model, optimizers, step, _ = Trainer(plain_net, OPTIMIZERS[name])(0)
    chosen = select(model, optimizers)
    with Intervention(chosen.optimizers, chosen.weights, 3) as intervention:
        sizes, angles = [weight_norms(model).layers], []
        for _ in range(3):
            before = snapshot(model)
            step()
            angles.append(movement(model, before)[1].layers)
            sizes.append(weight_norms(model).layers)
        paths = intervention.paths()
    expected = [[row[layer] for layer in paths.layers] for row in sizes]
    torch.testing.assert_close(paths.sizes, torch.tensor(expected, dtype=torch.float64))
    expected = [[row[layer] for layer in paths.layers] for row in angles]
    torch.testing.assert_close(paths.angles, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_without_decay_follows_the_paths_of_one_with_it(name):
    reference, _ = trained(OPTIMIZERS[name])
    free, _ = trained(OPTIMIZERS[name], off=True)
    assert not torch.allclose(free.sizes, reference.sizes, rtol=1e-4)
    targets = Targets(size=reference, rotation=free)
    followed, _ = trained(OPTIMIZERS[name], targets=targets, off=True)
    torch.testing.assert_close(followed.sizes, reference.sizes, rtol=1e-9, atol=0)
    torch.testing.assert_close(followed.angles, free.angles, rtol=1e-6, atol=0)
    errors = held_errors(followed, targets)
    assert all(e < 1e-6 for by in errors.values() for e in by.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_decay_is_the_optimizer_built_without_it(name):
    def built_without(model):
        optimizers = OPTIMIZERS[name](model)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            for group in optimizer.param_groups:
                group["wd" if "wd" in group else "weight_decay"] = 0.0
        return optimizers

    _, model = trained(OPTIMIZERS[name], off=True)
    plain, _, step, _ = Trainer(plain_net, built_without)(0)
    for _ in range(STEPS):
        step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_imposed_changes_nothing():
    _, model = trained(OPTIMIZERS["adam"])
    plain, _, step, _ = Trainer(plain_net, OPTIMIZERS["adam"])(0)
    for _ in range(STEPS):
        step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_a_free_size_keeps_the_radial_part_of_the_step():
    reference, _ = trained(OPTIMIZERS["sgd"])
    wide = LayerPaths(reference.layers, reference.sizes, 3 * reference.angles)
    model, optimizers, step, _ = Trainer(plain_net, OPTIMIZERS["sgd"])(0)
    chosen = select(model, optimizers)
    before = {name: parts[0].detach().clone() for name, parts in chosen.weights.items()}
    with Intervention(chosen.optimizers, chosen.weights, 1, Targets(rotation=wide)):
        step()
    other, _, plain_step, _ = Trainer(plain_net, OPTIMIZERS["sgd"])(0)
    plain_step()
    for i, (name, old) in enumerate(before.items()):
        free = other.get_submodule(name).weight.detach()
        turned = model.get_submodule(name).weight.detach()
        assert float((turned * old).sum()) == pytest.approx(float((free * old).sum()), rel=1e-9)
        cosine = float((turned * old).sum() / turned.norm() / old.norm())
        assert math.acos(cosine) == pytest.approx(float(wide.angles[0, i]), rel=1e-5)


def test_decay_that_a_hook_adds_is_held_off_too():
    def outside(model):
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1, "decay": "decoupled"}]
        return sgd(groups, lr=0.1, momentum=0.0)

    def without(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    decayed, _ = trained(outside)
    free, model = trained(outside, off=True)
    plain, _, step, _ = Trainer(plain_net, without)(0)
    for _ in range(STEPS):
        step()
    assert not torch.allclose(decayed.sizes, free.sizes)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_schedulers_keep_their_groups():
    """A group is split only inside a step: schedulers know the groups by number."""
    schedulers = []

    def scheduled(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return optimizer

    model, optimizer, step, _ = Trainer(plain_net, scheduled)(0)
    chosen = select(model, optimizer, only="1")
    assert list(chosen.weights) == ["1"]
    assert len(chosen.others) == 1
    with Intervention([optimizer], chosen.weights, 3, undecayed=chosen.held) as intervention:
        for _ in range(3):
            step()
            schedulers[0].step()
        angles = intervention.paths().angles
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert optimizer.param_groups[0]["lr"] == 0.01 / 8
    assert float(angles[2]) < float(angles[0])


def test_the_hooks_go_with_the_intervention():
    model = plain_net()
    optimizer = KFAC(model, 0.1, weight_decay=0.1)
    own = optimizer.scale_free
    chosen = select(model, optimizer)
    paths = LayerPaths(tuple(chosen.weights), *(torch.ones(n, 2) for n in (2, 1, 2)))
    with Intervention([optimizer], chosen.weights, 1, Targets(damping=paths)):
        assert "device_step" in vars(optimizer)
        assert optimizer.scale_free is not own
    assert "device_step" not in vars(optimizer)
    assert optimizer.scale_free is own


def test_kfac_inverts_with_the_damping_of_the_path():
    model = plain_net()
    optimizer = KFAC(model, 0.1, damping=1e-2, weight_decay=0.1)
    chosen = select(model, optimizer)
    assert chosen.damping
    effective = torch.tensor([[0.5, 0.25]] * 2, dtype=torch.float64)
    paths = LayerPaths(tuple(chosen.weights), effective, effective[:1], effective)
    with Intervention([optimizer], chosen.weights, 1, Targets(damping=paths)):
        dampings = optimizer.dampings()
    for i, (layer, (weight,)) in enumerate(chosen.weights.items()):
        held = float(dampings[layer]) * float(weight.detach().norm()) ** 2
        assert held == pytest.approx(float(effective[0, i]), rel=1e-6)


def test_sizes_set_now_and_then():
    reference, _ = trained(OPTIMIZERS["sgd"])
    targets = Targets(size=reference, size_every=4)
    followed, _ = trained(OPTIMIZERS["sgd"], targets=targets, off=True)
    deviations = ((followed.sizes - reference.sizes) / reference.sizes).abs().max(1).values
    assert (deviations[::4] < 1e-9).all()
    assert (deviations[[1, 2, 3, 5]] > 1e-9).all()
    assert max(held_errors(followed, targets)["size"].values()) < 1e-9


def test_a_loop_that_changes_the_weights_itself_is_seen():
    reference, _ = trained(OPTIMIZERS["sgd"])

    @torch.no_grad()
    def clipped(i, model):
        if i == 5:
            model[1].weight.mul_(0.9)

    targets = Targets(size=reference, rotation=reference)
    followed, _ = trained(OPTIMIZERS["sgd"], targets=targets, around=clipped)
    assert held_errors(followed, targets)["size"]["1"] == pytest.approx(0.1, rel=1e-3)


def test_half_precision_is_recorded_for_what_it_is():
    """Steps that bfloat16 rounds away turn nothing: an angle cannot be held there, and it shows."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    nn.init.uniform_(model.weight, 0.05, 0.1)  # one near zero would not round, and turn for all
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, weight_decay=0.1)
    chosen = select(model, optimizer)
    aim = LayerPaths(("",), torch.full((4, 1), 5.0), torch.full((3, 1), 1e-5))
    targets = Targets(rotation=aim)
    with Intervention([optimizer], chosen.weights, 3, targets) as intervention:
        for _ in range(3):
            model(torch.randn(8, 64, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
        taken = intervention.paths()
    assert held_errors(taken, targets)["rotation"][""] > 0.02


def test_paths_survive_a_file(tmp_path):
    paths, _ = trained(OPTIMIZERS["kfac"], steps=2)
    paths.save(tmp_path / "paths.safetensors")
    back = LayerPaths.load(tmp_path / "paths.safetensors")
    assert back.layers == paths.layers
    for name in ("sizes", "angles", "dampings"):
        assert torch.equal(getattr(back, name), getattr(paths, name))


def test_a_checkpoint_in_the_middle_goes_on():
    whole, _ = trained(OPTIMIZERS["sgd"])
    model, optimizer, step, _ = Trainer(plain_net, OPTIMIZERS["sgd"])(0)
    chosen = select(model, optimizer)
    with Intervention([optimizer], chosen.weights, STEPS) as first:
        for _ in range(5):
            step()
    with Intervention([optimizer], chosen.weights, STEPS) as second:
        second.load_state_dict(first.state_dict())
        for _ in range(STEPS - 5):
            step()
        assert torch.equal(second.paths().angles, whole.angles)


# ---------------------------------------------------------------- what is refused


def refused(model, optimizers, only="all"):
    with pytest.raises(DecaylabError) as caught:
        select(model, optimizers, only)
    return str(caught.value)


def test_lbfgs_is_refused_and_the_others_go_on():
    model = plain_net()
    lbfgs = torch.optim.LBFGS([model[1].weight])
    lbfgs.param_groups[0]["weight_decay"] = 0.1
    assert "LBFGS" in refused(model, lbfgs)
    chosen = select(model, [lbfgs, torch.optim.AdamW([model[3].weight], weight_decay=0.1)])
    assert list(chosen.weights) == ["3"]
    assert chosen.notes == {"1": LayerNote.SEVERAL_STEPS}


def test_schedule_free_is_refused_and_the_others_go_on():
    """The weights that it steps are its own: the model's, which are set, are made of them."""
    library = pytest.importorskip("pytorch_optimizer")
    model = plain_net()
    averaging = library.ScheduleFreeAdamW([model[1].weight], weight_decay=0.1)
    assert "schedule-free" in refused(model, averaging)
    chosen = select(model, [averaging, torch.optim.AdamW([model[3].weight], weight_decay=0.1)])
    assert list(chosen.weights) == ["3"]
    assert chosen.notes == {"1": LayerNote.OWN_WEIGHTS}


def test_a_wrapper_is_refused_in_a_sentence():
    library = pytest.importorskip("pytorch_optimizer")
    model = plain_net()
    inside = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    with refuses(WrongType, name="the optimizer"):
        select(model, library.Lookahead(inside))


def test_layers_that_cannot_be_held_are_noted_and_the_others_go_on():
    model = nn.ModuleDict(
        {
            "zero": nn.Linear(4, 4),
            "sparse": nn.Embedding(4, 4, sparse=True),
            "frozen": nn.Linear(4, 4),
            "tied": nn.Embedding(4, 4),
            "left": nn.Linear(4, 4),
            "complex": nn.Linear(4, 4, dtype=torch.complex64),
            "head": nn.Linear(4, 4, bias=False),
        }
    )
    nn.init.zeros_(model["zero"].weight)
    model["frozen"].requires_grad_(False)
    model["head"].weight = model["tied"].weight
    stepped = [p for name, p in model.named_parameters() if not name.startswith("left")]
    chosen = select(model, torch.optim.AdamW(stepped, weight_decay=0.1))
    notes = {layer.split(".")[0]: note for layer, note in chosen.notes.items()}
    assert notes.pop("tied", notes.pop("head", None)) is LayerNote.TIED
    assert notes == {
        "zero": LayerNote.ZERO,
        "sparse": LayerNote.SPARSE,
        "frozen": LayerNote.FROZEN,
        "left": LayerNote.NOT_STEPPED,
        "complex": LayerNote.COMPLEX,
    }
    assert len(chosen.weights) == 1  # the tied weight, once


def test_nothing_to_hold():
    model = plain_net()
    with refuses(Lacks, what="layer that decays"):
        select(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with refuses(UnknownName, name="nowhere"):
        select(model, optimizer, "nowhere")
    with refuses(WrongType, value="sgd"):
        select(model, "sgd")


def test_paths_of_another_run_are_refused():
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    weights = select(model, optimizer).weights
    short = LayerPaths(("1", "3"), torch.ones(3, 2), torch.ones(2, 2))
    with refuses(Mismatch, what="number of steps"):
        Intervention([optimizer], weights, 5, Targets(size=short))
    other = LayerPaths(("1", "x"), torch.ones(6, 2), torch.ones(5, 2))
    with refuses(UnknownName, name="3"):
        Intervention([optimizer], weights, 5, Targets(rotation=other))
    with refuses(Lacks, what="damping"):
        Intervention([optimizer], weights, 2, Targets(damping=short))


def test_a_loop_that_steps_too_rarely_is_refused():
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    images, labels = digits()
    with Intervention([optimizer], select(model, optimizer).weights, 3) as intervention:
        nn.functional.cross_entropy(model(images[:8]), labels[:8]).backward()
        optimizer.step()
        with refuses(Mismatch, values={"SGD": 1, "the loop": 3}):
            intervention.paths()


def test_kfac_with_its_defaults_has_no_damping_path():
    """Its damping is relative to the curvature: decay does not change it beside that."""
    paths, _ = trained(lambda model: decaylab.KFAC(model, weight_decay=0.1), steps=4)
    assert paths.dampings is None
    assert paths.finite()


def test_a_step_along_the_weight_turns_nothing():
    """What rounding leaves of it is no direction: an arm that is to turn there says so."""
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.3)
    weights = select(model, optimizer).weights
    aim = LayerPaths(tuple(weights), torch.ones(3, 2), torch.full((2, 2), 0.1))
    targets = Targets(rotation=aim)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Intervention([optimizer], weights, 2, targets) as intervention:
        optimizer.step()
        optimizer.step()
        taken = intervention.paths()
    assert (taken.angles == 0).all()
    torch.testing.assert_close(taken.sizes[1:], taken.sizes[:-1] * 0.97, rtol=1e-12, atol=0)
    assert min(held_errors(taken, targets)["rotation"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [1e-5, 1e-2, 1.0])
def test_the_weight_after_a_step_is_the_formula(dtype, wanted):
    """W <- n (cos(t) W / |W| + sin(t) v / |v|), written out in float64, whatever the step was."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    weights = select(model, optimizer).weights
    weight = model.weight.detach().double()
    model.weight.grad = torch.randn(30, 40, dtype=dtype)
    step = -0.1 * (model.weight.grad.double() + 0.1 * weight)
    across = step - (step * weight).sum() / weight.square().sum() * weight
    size, angle = 3.0, torch.tensor(wanted, dtype=torch.float64)
    expected = size * (angle.cos() * weight / weight.norm() + angle.sin() * across / across.norm())
    aim = LayerPaths(("",), torch.full((2, 1), size).double(), angle.view(1, 1))
    with Intervention([optimizer], weights, 1, Targets(size=aim, rotation=aim)) as intervention:
        optimizer.step()
        taken = intervention.paths()
    # what a step of float32 is short of: its rounding at the weights, not at the step
    apart = (model.weight.detach().double() - expected).norm() / size
    assert apart < (1e-13 if dtype == torch.float64 else 1e-7)
    assert float(taken.sizes[-1]) == pytest.approx(size, rel=1e-6)
    # |v| is what |d|^2 leaves beside its part along W, which is 1e4 times as long here at most
    rounding = 1e-11 if dtype == torch.float64 else 1e-7
    assert float(taken.angles[0]) == pytest.approx(wanted, rel=1e-9, abs=rounding)


def test_bare_parameters_are_held_each_by_itself():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
            self.lstm = nn.LSTM(3, 3)

    model = Bare()
    chosen = select(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    assert list(chosen.weights) == ["first", "second", "lstm.weight_ih_l0", "lstm.weight_hh_l0"]
    assert chosen.notes == {}
