import errno
import json
import math
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from decaylab.errors import (
    Damaged,
    DecaylabError,
    Mismatch,
    NoFolder,
    NotRead,
    NotWritten,
    UnknownName,
)
from decaylab.records import Manifest, Row, RunStore, TestHits, files

SPEC = 'data = "digits"\nlr = 0.1\n'


def manifest(**changes):
    values = {"status": "running", "version": "0.1.0", "commit": None, "torch": "2", "tier": "t"}
    plain = {"id": "r", "device": "cpu", "seed": 0, "started": 1.0, "updated": 1.0}
    return Manifest(**{**values, **plain, **changes})


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}


def test_the_same_spec_opens_the_same_folder_again(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    for _ in range(2):
        with folder.writing(SPEC) as opened:
            opened.rows_writer.append([Row(1, 0, 0.0, "loss", 1.0)])
    assert [run.id for run in RunStore(tmp_path).runs()] == ["r"]


def test_a_changed_spec_is_refused_and_nothing_is_overwritten(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        folder.write_manifest(manifest(status="finished"))
    before = contents(folder)
    with refuses(Mismatch, what="lr"):
        folder.writing('data = "digits"\nlr = 0.2\n').__enter__()
    assert contents(folder) == before


def test_a_field_that_a_later_version_added_is_no_change(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        pass
    with folder.writing(SPEC + "added = 1\n"):
        pass
    assert folder.spec_text() == SPEC


def test_a_damaged_or_missing_spec_under_results_is_refused(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        folder.write_manifest(manifest(status="finished"))
    (folder.path / "spec.toml").write_text("data = [")
    with pytest.raises(Damaged):
        folder.writing(SPEC).__enter__()
    (folder.path / "spec.toml").unlink()
    with refuses(NotRead, what=folder.path / "spec.toml"):
        folder.writing(SPEC).__enter__()


def test_two_writers_exclude_each_other(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        assert folder.locked()
        with pytest.raises(DecaylabError, match="another process"):
            RunStore(tmp_path).folder("r").writing(SPEC).__enter__()
    assert not folder.locked()
    with folder.writing(SPEC):
        pass


def test_a_run_whose_process_was_killed_reads_as_interrupted(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    script = (
        "import os, sys, signal; sys.path[:0] = sys.argv[2:];"
        "from pathlib import Path; from decaylab.records import RunStore;"
        "from test_store import manifest, SPEC;"
        "folder = RunStore(Path(sys.argv[1])).folder('r'); w = folder.writing(SPEC); w.__enter__();"
        "folder.write_manifest(manifest()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    here = Path(__file__).parent
    words = [sys.executable, "-c", script, tmp_path, here, here.parent]
    done = subprocess.run(list(map(str, words)), check=False)
    assert done.returncode == -9
    assert json.loads((folder.path / "manifest.json").read_text())["status"] == "running"
    assert folder.manifest().status == "interrupted"
    with folder.writing(SPEC):
        assert folder.manifest().status == "running"


def test_a_run_that_ends_while_its_manifest_is_read_was_not_interrupted(tmp_path, monkeypatch):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        folder.write_manifest(manifest(status="running"))

    def ends_now():
        folder.write_manifest(manifest(status="finished"))
        return False

    monkeypatch.setattr(folder, "locked", ends_now)
    assert folder.manifest().status == "finished"


def test_another_format_and_a_damaged_manifest_are_named(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        folder.write_manifest(replace(manifest(), format=2, version="9.0"))
        with refuses(Mismatch, what="format"):
            folder.manifest()
        for text in ("{", "[]", "{}", '{"format": 1}', '{"format": 1, "status": "odd"}'):
            (folder.path / "manifest.json").write_text(text)
            with pytest.raises(Damaged):
                folder.manifest()


@pytest.mark.parametrize(
    "field", [{"commit": 7}, {"at_once": 10**30}, {"started": math.nan}, {"device": None}]
)
def test_a_manifest_holds_texts_and_numbers_that_can_be_counted_with(tmp_path, field):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        folder.write_manifest(manifest())
    path = folder.path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **field}))
    with refuses(Damaged, what=path):
        folder.manifest()


def test_a_manifest_with_more_fields_is_read(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        folder.write_manifest(manifest(status="finished"))
    path = folder.path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert folder.manifest().status == "finished"


def test_hits_come_back_with_the_manifest_and_older_ones_have_none(tmp_path):
    folder = RunStore(tmp_path).folder("r")
    correct, labels = np.arange(11) % 3 == 0, np.arange(11)
    hits = TestHits.pack(correct, labels)
    with folder.writing(SPEC):
        folder.write_manifest(manifest(status="finished", test_hits=hits))
    assert folder.manifest().test_hits == hits
    assert hits.unpack().tolist() == correct.tolist()
    assert not hits.comparable(TestHits.pack(correct, labels[::-1]))
    assert not hits.comparable(TestHits.pack(correct[:-1], labels[:-1]))
    path = folder.path / "manifest.json"
    entry = json.loads(path.read_text())
    del entry["test_hits"]
    path.write_text(json.dumps(entry))
    assert folder.manifest().test_hits is None


@pytest.mark.parametrize("bits", ["", "oA", "oAAA", "#A=="])
def test_damaged_hits_are_named(bits):
    with pytest.raises(Damaged):
        TestHits(3, 0, bits).unpack()


def test_find_takes_a_unique_start_or_end(tmp_path):
    store = RunStore(tmp_path)
    for name in ("a-1", "a-2", "b-2x", "a-1-b"):
        with store.folder(name).writing(SPEC):
            pass
    with refuses(NoFolder, path=tmp_path / "empty"):
        RunStore(tmp_path / "empty").find("a")
    assert store.find("2x").id == "b-2x"
    assert store.find("b-").id == "b-2x"
    assert store.find("a-1").id == "a-1"
    with pytest.raises(DecaylabError, match="give more of the id"):
        store.find("a")
    with refuses(UnknownName, kind="run", name="zz"):
        store.find("zz")


def full_disk(*_arguments, **_keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch):
    folder = RunStore(tmp_path).folder("r")
    with folder.writing(SPEC):
        folder.write_manifest(manifest())
        folder.rows_writer.append([Row(1, 0, 0.0, "loss", 1.0)])
        before = contents(folder)
        monkeypatch.setattr(files.os, "fsync", full_disk)
        with pytest.raises(NotWritten, match="free some space"):
            folder.write_manifest(manifest(status="finished"))
        assert contents(folder) == before
        with pytest.raises(NotWritten, match="free some space"):
            folder.rows_writer.append([Row(2, 0, 0.0, "loss", 1.0)])
        assert contents(folder)["rows.jsonl"].startswith(before["rows.jsonl"])


def test_a_file_system_that_syncs_no_folders_will_do(tmp_path, monkeypatch):
    sync = os.fsync

    def files_only(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr(files.os, "fsync", files_only)
    files.replace_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_a_runs_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(NotWritten):
        RunStore(tmp_path / "runs").folder("r").writing(SPEC).__enter__()
    assert (tmp_path / "runs").read_text() == "mine"
