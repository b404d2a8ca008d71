import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refuses

from decaylab.data import load
from decaylab.errors import Damaged, Lacks, Mismatch
from decaylab.records import RunStore
from decaylab.training import RunSpec, checkpoint, load_run, train, train_to_end

BASE = RunSpec(
    hidden=(16,), batch_norm=True, augment=True, batch_size=256, epochs=4, lr_drop_every=2
)
SPECS = {
    "sgd": replace(BASE, decay="l2", weight_decay=0.01),
    "adam": replace(BASE, optimizer="adam", decay="decoupled", weight_decay=0.1),
    "kfac-g": replace(
        BASE, optimizer="kfac-g", refresh_every=3, invert_every=4, decay="l2", weight_decay=0.01
    ),
}


def final_state(store, spec):
    state = checkpoint.load(store.folder(spec.id).checkpoint)
    state.pop("seconds")
    state.pop("train_seconds")
    return checkpoint.flatten(state)


def numbers(store, spec):
    rows = store.folder(spec.id).rows().rows
    return {(r.step, r.name): (r.epoch, r.value) for r in rows if r.name != "train/seconds"}


@pytest.mark.parametrize(("optimizer", "seed"), [("sgd", 0), ("adam", 1), ("kfac-g", 2)])
@pytest.mark.usefixtures("one_thread")  # as the killed processes have
def test_killed_at_random_moments_it_ends_as_the_uninterrupted_run(tmp_path, optimizer, seed):
    spec = SPECS[optimizer]
    whole, killed = RunStore(tmp_path / "whole"), RunStore(tmp_path / "killed")
    train_to_end(spec, data=load("digits"), store=whole)
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    script = Path(__file__).with_name("killed_runs.py")
    arguments = [str(tmp_path / "spec.toml"), str(killed.root), str(seed)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[-1] == "finished"
    assert sum(line.startswith("killed") for line in told) >= 5
    starts = [int(line.split()[-1]) for line in told if line.startswith("continued")]
    assert starts == sorted(starts)  # never back behind a checkpoint
    assert starts[-1] > 0

    (tree, tensors), (expected_tree, expected) = final_state(killed, spec), final_state(whole, spec)
    assert tree == expected_tree
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    assert numbers(killed, spec) == numbers(whole, spec)
    assert killed.folder(spec.id).manifest().status == "finished"
    assert killed.folder(spec.id).manifest().resumes >= 5


def stopped(store, spec, after=2):
    """A run that was left after so many epochs; its folder."""
    for progress in train(spec, data=load("digits"), store=store):
        if progress.epoch == after:
            break
    del progress
    return store.folder(spec.id)


def test_a_run_is_not_continued_on_images_in_another_order(tmp_path):
    """CIFAR's archive and its parquet form differ in it; held-out images would be trained on."""
    data, spec, store = load("digits"), replace(BASE, held_out=True), RunStore(tmp_path)
    stopped(store, spec)
    turned = replace(data, train=data.train.take(torch.arange(len(data.train)).flip(0)))
    order = "the order of digits images, as archive and parquet files do"
    with refuses(Mismatch, what=order):
        train_to_end(spec, data=turned, store=store)
    assert train_to_end(spec, data=data, store=store).kind == "finished"


@pytest.mark.parametrize("kept", [0, 1])
def test_a_run_whose_rows_are_behind_its_checkpoint_is_not_continued(tmp_path, kept):
    folder = stopped(RunStore(tmp_path), BASE)
    lines = folder.rows_writer.path.read_text().splitlines(keepends=True)
    older = "".join(line for line in lines if json.loads(line).get("epoch", 0) < kept)
    folder.rows_writer.path.write_text(older)
    with refuses(Lacks, what=f"rows of epoch {kept}"):
        train_to_end(BASE, data=load("digits"), store=RunStore(tmp_path))
    folder.checkpoint.unlink()
    train_to_end(BASE, data=load("digits"), store=RunStore(tmp_path))
    assert {row.epoch for row in folder.rows().rows} == set(range(5))


@pytest.mark.parametrize("part", ["batches", "model"])
def test_a_checkpoint_that_lacks_a_part_is_refused_with_its_remedy(tmp_path, part):
    folder = stopped(RunStore(tmp_path), BASE)
    state = checkpoint.load(folder.checkpoint)
    state[part].popitem()
    checkpoint.Snapshot(state).write(folder.checkpoint)
    with refuses(Damaged, what=folder.checkpoint):
        train_to_end(BASE, data=load("digits"), store=RunStore(tmp_path))
    if part == "model":
        with refuses(Damaged, what=folder.checkpoint):
            load_run(folder)
