import errno
import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from safetensors.torch import load_file, save_file

from decaylab.errors import Damaged, DecaylabError, NotWritten
from decaylab.records import RunStore
from decaylab.training import Execution, RunSpec, checkpoint, train, train_to_end

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)
keys = st.one_of(st.text(max_size=5), st.integers(-9, 9))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
)


@given(states)
def test_any_nesting_comes_back(state):
    tree, tensors = checkpoint.flatten(state)
    back = checkpoint.nest(tree, tensors)
    assert back == state
    assert repr(back) == repr(state)  # tuples stay tuples, True stays True


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path):
    shared = torch.randn(4, 4, dtype=torch.float64)
    state = {
        "float": torch.randn(3, 2),
        "views": [shared[0], shared[:, 1], shared.t()],
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "bytes": torch.get_rng_state(),
        "half": torch.randn(5).bfloat16(),
        "odd": torch.tensor([math.nan, math.inf, -0.0]),
        "channels_last": torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "flag": torch.tensor(True),
        0: {"step": torch.tensor(1.0), "name.with.dots": torch.ones(1)},
    }
    path = tmp_path / "checkpoint.safetensors"
    checkpoint.Snapshot(state).write(path)
    back = checkpoint.load(path)
    assert list(back) == list(state)
    _, before = checkpoint.flatten(state)
    _, after = checkpoint.flatten(back)
    assert list(before) == list(after)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor.detach().nan_to_num(7.0), after[key].nan_to_num(7.0)), key
    assert set(load_file(path)) == set(before)  # the public reader agrees


def test_keys_that_meet_in_one_path_are_kept_apart(tmp_path):
    state = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), 1: torch.ones(2), "1": torch.ones(3)}
    checkpoint.Snapshot(state).write(tmp_path / "c")
    back = checkpoint.load(tmp_path / "c")
    assert [len(back[1]), len(back["1"]), back["a"]["b"].item(), back["a.b"].item()] == [2, 3, 0, 1]


def test_one_entry_alone(tmp_path):
    path = tmp_path / "c"
    checkpoint.Snapshot(
        {"model": {"w": torch.ones(2)}, "model2": {"w": torch.zeros(2)}, "n": 1}
    ).write(path)
    assert checkpoint.load(path, only="model")["model"]["w"].tolist() == [1, 1]
    with refuses(Damaged, what=path):
        checkpoint.load(path, only="nothing")


def test_what_is_no_state_is_refused_by_its_path():
    with pytest.raises(TypeError, match=r"state\.groups\.0\.hook is a function"):
        checkpoint.flatten({"groups": [{"hook": lambda: None}]})


@pytest.mark.parametrize("damage", [b"", b"\x00" * 100, b'{"a"', b"\xff" * 9])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "c"
    path.write_bytes(damage)
    with refuses(Damaged, what=path):
        checkpoint.load(path)
    checkpoint.Snapshot({"w": torch.ones(100)}).write(path)
    path.write_bytes(path.read_bytes()[:-10])
    with refuses(Damaged, what=path):
        checkpoint.load(path)


def test_a_disk_that_fills_up_while_writing_leaves_the_old_one(tmp_path):
    # A limit on file size stands for the disk: the write fails half-way, as it does there.
    script = """
import resource, sys, torch
from pathlib import Path
from decaylab.errors import NotWritten
from decaylab.training import checkpoint
path = Path(sys.argv[1])
checkpoint.Snapshot({"w": torch.ones(3)}).write(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    checkpoint.Snapshot({"w": torch.zeros(100_000)}).write(path)
except NotWritten as error:
    print(error.what)
"""
    path = tmp_path / "checkpoint.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{path}\n"
    assert checkpoint.load(path)["w"].tolist() == [1, 1, 1]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_reported_by_the_writer_is_one_sentence(tmp_path, monkeypatch):
    path = tmp_path / "c"
    checkpoint.Snapshot({"n": 1}).write(path)

    def full(_tensors, filename, metadata):
        filename.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with refuses(NotWritten, what=path):
        checkpoint.Snapshot({"n": 2}).write(path)
    assert checkpoint.load(path) == {"n": 1}


def test_a_bit_that_flips_anywhere_is_noticed_or_changes_nothing(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    generator = torch.Generator().manual_seed(0)
    state = {
        "model": {"weight": torch.randn(40, 30, generator=generator)},
        "moments": (torch.randn(7, dtype=torch.float64), torch.arange(5)),
        "step": 12,
    }
    checkpoint.Snapshot(state).write(path)
    whole = path.read_bytes()
    expected = checkpoint.flatten(checkpoint.load(path))
    noticed = 0
    for place in range(0, 8 * len(whole), 8 * len(whole) // 400):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            tree, tensors = checkpoint.flatten(checkpoint.load(path))
        except DecaylabError:
            noticed += 1
            continue
        assert tree == expected[0]
        assert tensors.keys() == expected[1].keys()
        assert all(torch.equal(tensors[key], expected[1][key]) for key in tensors)
    assert noticed > 380


def test_a_checkpoint_without_checksums_is_read(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    tree, tensors = checkpoint.flatten({"weight": torch.ones(3), "step": 1})
    save_file(tensors, path, metadata={"state": json.dumps(tree)})
    assert checkpoint.load(path)["step"] == 1


def test_a_damaged_checkpoint_is_fallen_back_from_and_the_records_are_the_same(tmp_path):
    spec = RunSpec(hidden=(8,), batch_size=256, epochs=4, lr_drop_every=2)
    every = Execution(checkpoint_every=0.0)
    whole, damaged = RunStore(tmp_path / "whole"), RunStore(tmp_path / "damaged")
    train_to_end(spec, store=whole)
    run = train(spec, store=damaged, execution=every)
    for _ in range(2):
        next(run)
    run.close()
    folder = damaged.folder(spec.id)
    content = bytearray(folder.checkpoint.read_bytes())
    content[-9] ^= 4
    folder.checkpoint.write_bytes(content)
    train_to_end(spec, store=damaged, execution=every)

    def values(store):
        rows = store.folder(spec.id).rows().rows
        return {(r.step, r.name): r.value for r in rows if r.name != "train/seconds"}

    assert values(damaged) == values(whole)
    first, second = folder.manifest().starts
    assert (first.fallback, second.fallback) == (False, True)
    assert second.step > 0
    assert not folder.previous_checkpoint.exists()
