import json
import tomllib
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from torch import nn

from decaylab.errors import BadValue, Conflict, Failed, Misplaced, NotRead, OutOfRange, UnknownName
from decaylab.optim.decay import parameter_groups
from decaylab.optim.kfac import KFAC
from decaylab.paper.suite import spec_for
from decaylab.training.build import build_network, build_optimizer
from decaylab.training.spec import CHOICES, PUBLISHED, RunSpec

numbers = st.floats(1e-12, 1e12)
ranges = {
    "hidden": st.lists(st.integers(1, 999), max_size=4).map(tuple),
    "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    "momentum": st.floats(0, 0.999),
    "factor_decay": st.floats(0, 0.999),
    "seed": st.integers(0, 2**63 - 1),
    "width": st.floats(0.01, 64),
    "batch_size": st.integers(1, 2**24),
    "epochs": st.integers(1, 10**7),
    "step_rms": st.just(0.0),  # which few combinations take
    "step_scaling": st.just("rms"),
    **dict.fromkeys(
        ("norm_source", "size_source", "rotation_source", "damping_source"),
        st.sampled_from(["", "digits-mlp-bn-sgd-l2-0f08e4a1"]),
    ),
    "held_layers": st.sampled_from(["all", "conv", "fc", "0,3"]),
}


@st.composite
def specs(draw):
    optimizer = draw(st.sampled_from(list(CHOICES["optimizer"])))
    values = {"optimizer": optimizer}
    optional = {name for settings in PUBLISHED.values() for name in settings}
    for item in fields(RunSpec):
        if item.name == "optimizer" or (
            item.name in optional and item.name not in PUBLISHED[optimizer]
        ):
            continue
        if draw(st.booleans()):
            continue
        if item.name in ranges:
            values[item.name] = draw(ranges[item.name])
        elif item.name in CHOICES:
            values[item.name] = draw(st.sampled_from(list(CHOICES[item.name])))
        elif "bool" in str(item.type):
            values[item.name] = draw(st.booleans())
        elif "int" in str(item.type):
            values[item.name] = draw(st.integers(1, 10**9))
        else:
            values[item.name] = draw(numbers)
    if values.get("network", "mlp") != "mlp":
        values.pop("hidden", None)
        values.pop("activation", None)
    if values.get("weight_decay") and values.get("decay", "none") == "none":
        values["decay"] = "l2"
    if values.get("norm_source"):
        values["batch_norm"] = True
    if not optimizer.startswith("kfac"):
        values.pop("late_refresh", None)
    if not optimizer.startswith("kfac") or values.get("damping_scaling", "fixed") != "fixed":
        values.pop("damping_source", None)
    if not values.get("weight_decay"):
        values.pop("held_decay", None)
    if not any(values.get(f"{path}_source") for path in ("size", "rotation", "damping")):
        values.pop("held_layers", None)
    return values


@given(specs())
def test_toml_round_trip_and_stable_id(values):
    spec = RunSpec(**values)
    again = RunSpec.from_toml(spec.to_toml())
    assert again == spec.resolved()
    assert again.id == spec.id
    backwards = dict(reversed(tomllib.loads(spec.to_toml()).items()))
    assert RunSpec.from_mapping(backwards).id == spec.id


@given(specs(), specs())
def test_different_runs_have_different_ids(one, other):
    first, second = RunSpec(**one), RunSpec(**other)
    assert (first.id == second.id) == (first.resolved() == second.resolved())


def test_an_id_does_not_depend_on_how_a_number_is_written():
    texts = ["lr = 0.1", "lr = 1e-1", "lr = 0.10", "lr = +0.1", "lr = 0.1\nwidth = 1"]
    assert len({RunSpec.from_toml(text).id for text in texts}) == 1


def test_an_id_is_readable_and_what_is_left_out_equals_the_published_value():
    spec = RunSpec("cifar10", network="vgg16", batch_norm=True, optimizer="adam", decay="decoupled")
    assert spec.id.startswith("cifar10-vgg16-bn-adam-decoupled-")
    assert spec.id == replace(spec, lr=0.001, betas=(0.9, 0.999), epochs=200).id
    assert spec.id != replace(spec, seed=1).id


def test_a_field_added_later_at_its_default_leaves_ids_alone(monkeypatch):
    spec = RunSpec()
    before = spec.id
    # a dict of its own: deleted and put back, the field would come last in every later spec
    known = {k: v for k, v in RunSpec.__dataclass_fields__.items() if k != "held_out"}
    monkeypatch.setattr(RunSpec, "__dataclass_fields__", known)
    assert spec.id == before


@pytest.mark.parametrize("optimizer", ["kfac-f", "kfac-g"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_clip_and_damping_left_out_are_table_1s(optimizer, batch_norm):
    cell = {"dataset": "cifar10", "network": "vgg16", "augment": 0, "optimizer": optimizer}
    published = spec_for({**cell, "batch_norm": int(batch_norm)}, "wd", "full")
    ours = RunSpec(optimizer=optimizer, batch_norm=batch_norm).resolved()
    assert (ours.kl_clip, ours.damping) == (published.kl_clip, published.damping)
    assert bool(ours.kl_clip) != batch_norm


def test_the_published_settings():
    kfac_g, kfac_f = (RunSpec(optimizer=name).resolved() for name in ("kfac-g", "kfac-f"))
    assert (kfac_g.epochs, kfac_g.lr_drop_every, kfac_g.curvature_scale) == (100, 40, 2.0)
    assert (kfac_f.curvature_scale, kfac_f.damping, kfac_f.momentum) == (1.0, 1e-3, 0.9)
    assert (kfac_f.refresh_every, kfac_f.invert_every, kfac_f.factor_decay) == (10, 100, 0.95)
    sgd, adam = (RunSpec(optimizer=name).resolved() for name in ("sgd", "adam"))
    assert (sgd.epochs, sgd.lr_drop_every, sgd.momentum, sgd.batch_size) == (200, 60, 0.9, 128)
    assert (adam.epochs, adam.lr_drop_every, adam.eps) == (200, 60, 1e-8)
    assert sgd.damping is None
    assert adam.momentum is None


def named_by(error):
    """The setting, or settings, that an error is about."""
    facts = vars(error)
    return facts.get("settings", [facts.get("name", facts.get("what"))])


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ('lr = "fast"', BadValue, "lr"),
        ("lr = true", BadValue, "lr"),
        ("lr = nan", BadValue, "lr"),
        ("lr = inf", BadValue, "lr"),
        ("lr = " + "9" * 400, BadValue, "lr"),
        ("lr = -0.1", OutOfRange, "lr"),
        ("lr = 0", OutOfRange, "lr"),
        ("epochs = 1.5", BadValue, "epochs"),
        ("epochs = 0", OutOfRange, "epochs"),
        ("batch_size = true", BadValue, "batch_size"),
        ("batch_norm = 1", BadValue, "batch_norm"),
        ("hidden = 3", BadValue, "hidden"),
        ("hidden = [3, 0]", OutOfRange, "hidden"),
        ('optimizer = "adam"\nbetas = [0.9]', BadValue, "betas"),
        ('optimizer = "adam"\nbetas = [0.9, 1.0]', OutOfRange, "betas"),
        ("momentum = 1.0", OutOfRange, "momentum"),
        ("momentum = -0.5", OutOfRange, "momentum"),
        ("seed = -1", OutOfRange, "seed"),
        ("seed = 9223372036854775808", OutOfRange, "seed"),
        ('network = "vgg17"', UnknownName, "vgg17"),
        ('optimizer = "sgdm"', UnknownName, "sgdm"),
        ('data = "imagenet"', UnknownName, "imagenet"),
        ("network = 3", BadValue, "network"),
        ("learning_rate = 0.1", UnknownName, "learning_rate"),
        ("damping = 0.1", Misplaced, "damping"),
        ("weight_decay = 0.1", Conflict, "weight_decay = 0.1"),
        ('network = "vgg11"\nhidden = [3]', Misplaced, "hidden"),
        ("lr = ", Failed, "reading it as TOML"),
    ],
)
def test_bad_toml_is_one_sentence(tmp_path, text, kind, name):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(kind) as caught:
        RunSpec.from_file(path)
    assert type(caught.value) is kind
    assert name in named_by(caught.value)
    assert caught.value.place == str(path)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_config_is_named(tmp_path):
    with refuses(NotRead, what=tmp_path / "none.toml"):
        RunSpec.from_file(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with refuses(NotRead, what=tmp_path / "binary.toml"):
        RunSpec.from_file(tmp_path / "binary.toml")


def test_overrides_win_over_the_file(tmp_path):
    (tmp_path / "spec.toml").write_text('lr = 0.5\nnetwork = "vgg11"')
    spec = RunSpec.from_file(tmp_path / "spec.toml", {"lr": 0.25})
    assert (spec.lr, spec.network) == (0.25, "vgg11")
    assert json.dumps(spec.lr) == "0.25"


def test_steps_of_a_set_size_are_k_facs_own_and_exclude_the_kl_clip():
    plain = RunSpec(network="vgg11", batch_norm=True, optimizer="kfac-g")
    scaled = replace(plain, step_rms=0.2)
    assert plain.id != scaled.id
    with refuses(Conflict, settings=["step_rms", "kl_clip"]):
        replace(scaled, kl_clip=1e-3)
    with refuses(Conflict, settings=["step_rms", "kl_clip"]):  # which such nets have by default
        replace(scaled, batch_norm=False)
    replace(scaled, batch_norm=False, kl_clip=0.0)
    with refuses(Misplaced, settings=["step_rms"]):
        RunSpec(optimizer="sgd", step_rms=0.2)


def test_spectral_steps_have_a_set_size_and_leave_other_ids_alone():
    scaled = RunSpec(network="vgg11", batch_norm=True, optimizer="kfac-g", step_rms=0.2)
    assert scaled.id == "digits-vgg11-bn-kfac-g-none-d9e2a009"  # before there was a choice
    spectral = replace(scaled, step_scaling="spectral")
    assert spectral.id != scaled.id
    assert RunSpec.from_toml(spectral.to_toml()) == spectral.resolved()
    with refuses(Misplaced, settings=["step_scaling = spectral"]):
        replace(spectral, step_rms=0.0)


def test_spectral_steps_are_those_of_k_fac():
    spec = RunSpec(
        **{"network": "mlp", "hidden": (6,), "batch_norm": True, "optimizer": "kfac-g"},
        **{"step_rms": 0.2, "initialize_batches": 0},
    )
    weights = {}
    for scaling in ("rms", "spectral"):
        for by_hand in (False, True):
            torch.manual_seed(0)
            model = build_network(spec, 10, 1, 8)
            if by_hand:
                settings = replace(spec, step_scaling=scaling).resolved().optimizer_settings()
                settings |= {"kl_clip": None, "step_scaling": scaling, "step_rms": 0.2}
                settings.pop("inversion_lag")
                groups = parameter_groups(model, weight_decay=0.0, decay="none")
                optimizer = KFAC(model, params=groups, curvature="gauss-newton", **settings)
            else:
                optimizer = build_optimizer(replace(spec, step_scaling=scaling), model)
            for _ in range(3):
                images, labels = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights[scaling, by_hand] = torch.cat(
                [p.detach().flatten() for p in model.parameters()]
            )
    assert torch.equal(weights["spectral", True], weights["spectral", False])
    assert torch.equal(weights["rms", True], weights["rms", False])
    assert not torch.allclose(weights["rms", True], weights["spectral", True])


def test_a_damping_relative_to_the_trace_follows_no_other_run():
    plain = RunSpec(network="vgg11", batch_norm=True, optimizer="kfac-g")
    scaled = replace(plain, damping=1.0, damping_scaling="trace")
    assert plain.id != scaled.id
    with refuses(Conflict, settings=["damping_source", "damping_scaling = trace"]):
        replace(scaled, damping_source=plain.id)


def test_adamw_is_adam_with_decoupled_decay():
    spec = RunSpec.from_mapping({"optimizer": "AdamW", "weight_decay": 0.1})
    assert spec == RunSpec(optimizer="adam", decay="decoupled", weight_decay=0.1)
    with refuses(Conflict, settings=["adamw", "l2"]):
        RunSpec.from_mapping({"optimizer": "adamw", "decay": "l2"})
