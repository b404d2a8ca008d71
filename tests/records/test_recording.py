"""One form for the records of every version."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from report.synthetic import write_run

from decaylab import networks
from decaylab.data import DATA_SETS
from decaylab.errors import Damaged, Lacks, NotRead
from decaylab.optim import schedules
from decaylab.records import (
    Event,
    LayerSettings,
    Row,
    Rows,
    RunStore,
    SettingsChange,
    read_recording,
    recording_from_rows,
)
from decaylab.records.packing import read_contents
from decaylab.records.rows import RowWriter
from decaylab.training import RunSpec
from decaylab.training.build import build_network, decay_groups

RESULTS = Path(__file__).parents[2] / "results"
SETTINGS = LayerSettings("SGD", "sgd", 0.1, "l2", 0.5, momentum=0.9, kl_clip=1.0, size=3)


@given(
    st.builds(
        LayerSettings,
        lr=st.none() | st.floats(allow_nan=False),
        weight_decay=st.floats(allow_nan=False),
        nesterov=st.none() | st.booleans(),
        refresh_every=st.none() | st.integers(1),
        decay=st.sampled_from(["none", "l2"]),
        frozen=st.booleans(),
    )
)
def test_settings_survive_a_file(tmp_path_factory, settings):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    RowWriter(path).append([SettingsChange(3, "fc", settings)])
    (change,) = read_contents(path).settings
    assert change == SettingsChange(3, "fc", settings)


def test_a_whole_number_is_read_as_the_float_it_stands_for():
    assert math.isclose(LayerSettings.from_json({"lr": 1}).lr, 1.0)
    assert type(LayerSettings.from_json({"lr": 1}).lr) is float
    assert LayerSettings.from_json({"law": "sgd", "of a later version": 1}).law == "sgd"


def test_everything_that_was_written_is_read_back(tmp_path):
    writer = RowWriter(tmp_path / "rows.jsonl")
    writer.append(meta={"steps_per_epoch": 5, "version": "9"})
    later = replace(SETTINGS, lr=0.01)
    writer.append(
        [
            Row(1, 0, 0.5, "weight_norm/fc", 2.0),
            Row(1, 0, 0.5, "outcome/val_loss", math.inf),
            SettingsChange(1, "fc", SETTINGS),
            Row(6, 1, 1.0, "weight_norm/fc", 1.0),
            SettingsChange(6, "fc", later),
            Event(6, "optimizer changed", {"to": "Adam"}),
        ]
    )
    recording = read_recording(tmp_path)
    assert recording.series("weight_norm/fc") == ((1, 2.0), (6, 1.0))
    assert recording.settings == {"fc": ((1, SETTINGS), (6, later))}
    assert [recording.settings_at("fc", step) for step in (0, 5, 6)] == [SETTINGS, SETTINGS, later]
    assert recording.settings_at("other", 1) is None
    assert recording.outcomes == {"val_loss": ((1, math.inf),)}
    assert recording.events == (Event(6, "optimizer changed", {"to": "Adam"}),)
    assert (recording.meta.steps_per_epoch, recording.meta.version) == (5, "9")
    assert recording.meta.folder == tmp_path
    assert read_recording(tmp_path / "rows.jsonl").rows == recording.rows


def test_a_resume_voids_settings_and_events_too(tmp_path):
    writer = RowWriter(tmp_path / "rows.jsonl")
    changes = [SettingsChange(step, "fc", replace(SETTINGS, lr=float(step))) for step in (1, 5)]
    writer.append([*changes, Event(5, "late")])
    writer.resume(4)
    contents = read_contents(tmp_path / "rows.jsonl")
    assert contents.settings == (changes[0],)
    assert contents.events == ()


def test_settings_that_were_rows():
    floats = {"lr": 0.1, "decay": 2.0, "weight_decay": 0.5, "beta1": 0.9, "power": 1.0}
    floats |= {"invariant": 1.0, "size": 12.0}
    rows = [Row(1, 0, 0.0, f"setting_{key}/fc", value) for key, value in floats.items()]
    rows += [Row(1, 0, 0.0, "setting_moved/head", 0.0), Row(1, 0, 0.0, "decayed_gains", 2.0)]
    rows += [Row(7, 0, 0.0, "setting_lr/fc", 0.01), Row(7, 0, 0.0, "weight_norm/fc", 3.0)]
    recording = recording_from_rows(Rows(tuple(rows)))
    first = LayerSettings("", "adam", 0.1, "decoupled", 0.5, beta1=0.9, invariant=True, size=12)
    assert recording.settings["fc"] == ((1, first), (7, replace(first, lr=0.01)))
    assert recording.settings["head"] == ((1, LayerSettings(stepped=False)),)
    assert recording.settings["decayed_gains"][0][1].decays
    assert recording.rows.names() == ["weight_norm/fc"]


def test_no_records():
    with refuses(Lacks, what="records"):
        read_recording("/nowhere")


def test_a_folder_in_the_place_of_the_rows_is_one_sentence(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    with refuses(NotRead, what=tmp_path / "rows.jsonl"):
        read_recording(tmp_path)


@pytest.mark.parametrize("cut", ["epochs", "lr_drop_every", "decay", "lr"])
def test_a_spec_that_lacks_a_line_is_damaged(tmp_path, cut):
    spec = RunSpec(data="digits", network="mlp", optimizer="sgd", decay="l2", weight_decay=0.1)
    values = {"weight_norm/features.0": 2.0, "weight_norm/head": 1.0}
    folder = write_run(RunStore(tmp_path), spec, values, tier="smoke")
    path = folder.path / "spec.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{cut} =")]
    path.write_text("\n".join(lines) + "\n")
    with refuses(Damaged, what=f"the spec of {folder.id}"):
        read_recording(folder)


def timeline(spec, per_epoch, decayed, invariant):
    """By building the network and going through the epochs: the oracle of the migration."""
    schedule = schedules.step(spec.lr_drop_every, spec.lr_drop_factor)
    found = []
    for epoch in range(spec.epochs):
        now = (
            schedule(epoch, spec.lr),
            spec.decay if decayed else "none",
            spec.weight_decay if decayed else 0.0,
            spec.momentum,
            spec.betas,
            spec.damping,
            spec.refresh_every,
            invariant,
        )
        if not found or found[-1][1] != now:
            found.append((epoch * per_epoch + 1, now))
    return found


def test_the_settings_of_our_own_older_runs_follow_from_their_specs():
    """For one run of each kind in results/, against the network that the spec builds."""
    kinds = {}
    for folder in RunStore(RESULTS).runs():
        if read_contents(folder.path / "rows.jsonl").settings:  # its own, which need no migration
            continue
        spec = RunSpec.of_run(folder).resolved()
        kinds[spec.network, spec.batch_norm, spec.optimizer, spec.decay_scope] = folder, spec
    assert len(kinds) > 10
    for folder, spec in kinds.values():
        recording = read_recording(folder)
        facts = DATA_SETS[spec.data]
        with torch.device("meta"):
            model = build_network(spec, facts.classes, *facts.shape[:2])
        roles = networks.roles(model)
        groups = [group for group in decay_groups(spec, model) if group["weight_decay"]]
        decayed = {roles[name].layer for group in groups for name in group["names"]}
        invariant = {role.layer for role in roles.values() if role.role == "invariant"}
        per_epoch = recording.meta.steps_per_epoch
        layers = [role.layer for role in roles.values() if role.role != "bias"]
        assert list(recording.settings) == list(dict.fromkeys(layers))
        for layer, changes in recording.settings.items():
            expected = timeline(spec, per_epoch, layer in decayed, layer in invariant)
            assert [
                (
                    step,
                    (
                        own.lr,
                        own.decay,
                        own.weight_decay,
                        own.momentum,
                        None if own.beta1 is None else (own.beta1, own.beta2),
                        own.damping,
                        own.refresh_every,
                        own.invariant,
                    ),
                )
                for step, own in changes
            ] == expected


def test_outcomes_of_our_own_runs():
    folder = next(run for run in RunStore(RESULTS).runs() if run.is_finished())
    recording = read_recording(folder)
    assert recording.meta.status == "finished"
    assert recording.meta.batch_size == RunSpec.of_run(folder).batch_size
    assert {"loss", "test_loss", "test_accuracy", "train_loss"} <= recording.outcomes.keys()
    last = folder.rows().last("test/accuracy")
    assert recording.outcomes["test_accuracy"][-1][1] == last
