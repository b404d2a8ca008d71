"""One process writes a run at a time, by nothing but files: no lock of the system is asked for."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from decaylab.errors import DecaylabError
from decaylab.records import Row, RunStore, ownership
from decaylab.records.ownership import Ownership, is_owned, read_owner

SPEC = 'data = "digits"\nlr = 0.1\n'
HOLD = """
import sys, time
from pathlib import Path
from decaylab.records.ownership import Ownership
assert Ownership(Path(sys.argv[1])).take() is None
print("mine", flush=True)
time.sleep(600)
"""
COMPETE = """
import os, sys
from pathlib import Path
from decaylab.records.ownership import Ownership
print("ready", flush=True)
os.read(int(sys.argv[2]), 1)
own = Ownership(Path(sys.argv[1]))
print("mine" if own.take() is None else "taken", flush=True)
sys.stdin.read()
"""


STALE = 3600.0  # in these tests: however slow the machine, they end before it


@pytest.fixture(autouse=True)
def stale_after_an_hour(monkeypatch):
    assert ownership.BEAT < ownership.STALE < STALE
    monkeypatch.setattr(ownership, "STALE", STALE)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "owner.json"


def from_elsewhere(path, age):
    """Make an owner's file one of another host, whose last beat was so many seconds ago."""
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "host": "another", "name": "far", "pid": 1, "token": "t"}))
    written = path.stat().st_mtime - age
    os.utime(path, (written, written))


def held_by_a_process(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "mine\n"
    return process


def test_a_live_process_keeps_others_out_and_a_killed_one_does_not(path):
    process = held_by_a_process(path)
    try:
        assert is_owned(path)
        owner = Ownership(path).take()
        assert owner.pid == process.pid
    finally:
        os.kill(process.pid, signal.SIGKILL)
    while Ownership(path).take() is not None:  # also while nobody has waited for it (a zombie)
        time.sleep(0.01)
    process.wait()
    process.stdout.close()
    assert read_owner(path).pid == os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="by /proc")
def test_a_killed_process_owns_nothing_where_the_system_hides_when_processes_began(
    path, monkeypatch
):
    read = Path.read_text

    def read_text(file, *given, **how):
        if file.match("/proc/*/stat"):
            file.stat()  # there, or an error
            return "1 (python) S" + 50 * " 0"
        return read(file, *given, **how)

    monkeypatch.setattr(Path, "read_text", read_text)
    mine = Ownership(path)
    assert mine.take() is None
    assert is_owned(path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    entry = json.loads(path.read_bytes()) | {"pid": gone.pid}
    path.write_text(json.dumps(entry))
    assert not is_owned(path)


def test_an_id_that_a_new_process_has_got_is_not_the_owner(path):
    Ownership(path).take()
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "started": entry["started"] - 1}))
    assert not is_owned(path)
    assert Ownership(path).take() is None


@pytest.mark.parametrize(("age", "lives"), [(0, True), (STALE / 2, True), (STALE + 1, False)])
def test_an_owner_on_another_host_is_stale_after_a_stated_time(path, age, lives):
    Ownership(path).take()
    from_elsewhere(path, age)
    assert is_owned(path) == lives
    assert (Ownership(path).take() is not None) == lives


@pytest.mark.parametrize("shift", [-86400.0, 86400.0])
def test_clocks_that_differ_do_no_harm(path, monkeypatch, shift):
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + shift)
    Ownership(path).take()
    from_elsewhere(path, 0)
    assert is_owned(path)
    from_elsewhere(path, STALE + 30)
    assert not is_owned(path)


@pytest.mark.parametrize("attempt", range(3))
def test_of_many_that_find_a_stale_owner_one_takes_over(path, attempt):
    Ownership(path).take()
    from_elsewhere(path, STALE + 30)
    gate, opens = os.pipe()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPETE, str(path), str(gate)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[gate],
        )
        for _ in range(6)
    ]  # fmt: skip
    assert {process.stdout.readline() for process in processes} == {"ready\n"}
    os.close(opens)  # for all at once
    os.close(gate)
    answers = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.communicate()
    assert sorted(answers) == ["mine", *["taken"] * 5]


def test_who_only_sees_a_stale_owner_vanish_does_not_own_the_folder(path, monkeypatch):
    Ownership(path).take()
    from_elsewhere(path, STALE + 30)
    tries = []

    def removed_by_another(file, mine):
        tries.append(file)
        if len(tries) == 3:
            file.unlink()

    monkeypatch.setattr(ownership, "_remove_stale", removed_by_another)
    assert Ownership(path).take() is not None
    assert len(tries) == 3
    assert not path.exists()


def test_a_killed_takeover_is_cleared_away_by_one_of_two_that_find_it(path, monkeypatch):
    """One of them stands still after its look at it, the other before it removes the stale file."""
    takeover = path.with_name(path.name + ".takeover")
    for left_by_a_killed_process in (path, takeover):
        Ownership(left_by_a_killed_process).take()
        from_elsewhere(left_by_a_killed_process, STALE + 30)
    is_alive, unlink = ownership.is_alive, Path.unlink
    stands = {"late": threading.Event(), "first": threading.Event()}
    goes_on = {name: threading.Event() for name in stands}
    own = {name: Ownership(path) for name in stands}
    taken = {}

    def stand_still(name):
        if threading.current_thread().name == name and not stands[name].is_set():
            stands[name].set()
            goes_on[name].wait()

    def look(owner, file):
        alive = is_alive(owner, file)
        if file == takeover:
            stand_still("late")
        return alive

    def remove(file, missing_ok=False):
        if file == path:
            stand_still("first")
        unlink(file, missing_ok=missing_ok)

    def take():
        name = threading.current_thread().name
        taken[name] = own[name].take() is None

    monkeypatch.setattr(ownership, "is_alive", look)
    monkeypatch.setattr(Path, "unlink", remove)
    late, first = (threading.Thread(target=take, name=name) for name in stands)
    late.start()
    stands["late"].wait()
    first.start()
    stands["first"].wait()
    goes_on["late"].set()
    late.join()
    goes_on["first"].set()
    first.join()
    assert sorted(taken.values()) == [False, True]
    for name in stands:
        own[name].check()


def test_a_file_that_said_nothing_and_is_gone_is_not_removed_again(path, monkeypatch):
    """It might be a new owner's by then."""
    path.write_text("")
    os.utime(path, (1.0, 1.0))
    create, unlink, removed = ownership._create, Path.unlink, []

    def after_another(file, owner):
        if file != path:
            unlink(path, missing_ok=True)
        return create(file, owner)

    def remove(file, missing_ok=False):
        removed.append(file)
        unlink(file, missing_ok=missing_ok)

    monkeypatch.setattr(ownership, "_create", after_another)
    monkeypatch.setattr(Path, "unlink", remove)
    assert Ownership(path).take() is None
    assert path not in removed


def test_who_was_suspended_and_taken_over_writes_nothing_more(tmp_path):
    store = RunStore(tmp_path)
    with store.folder("r").writing(SPEC) as folder:
        folder.rows_writer.append([Row(1, 0, 0.0, "loss", 1.0)])
        from_elsewhere(folder.path / "owner.json", STALE + 30)
        with RunStore(tmp_path).folder("r").writing(SPEC) as other:
            before = folder.rows_writer.path.read_bytes()
            with pytest.raises(DecaylabError, match="was taken over"):
                folder.rows_writer.append([Row(2, 0, 0.0, "loss", 2.0)])
            assert folder.rows_writer.path.read_bytes() == before
            with pytest.raises(DecaylabError, match="was taken over"):
                folder.check_ownership()
            other.check_ownership()
            folder._ownership.beat()  # does not touch what is another's
            other.check_ownership()
        assert not folder.locked()


def test_a_beat_keeps_the_file_and_makes_it_new(path):
    own = Ownership(path)
    own.take()
    before = path.read_bytes()
    os.utime(path, (1.0, 1.0))
    own.beat()
    assert path.read_bytes() == before
    assert path.stat().st_mtime > 1.0


def test_the_heart_beats_while_something_is_owned(path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT", 0.01)
    monkeypatch.setattr(ownership, "_heart", ownership._Heart())  # the other may wait for its beat
    own = Ownership(path)
    own.take()
    os.utime(path, (1.0, 1.0))
    while path.stat().st_mtime == 1.0:
        time.sleep(0.01)
    own.release()
    assert not path.exists()


def test_a_fork_gives_nothing_up(path):
    own = Ownership(path)
    own.take()
    child = os.fork()
    if child == 0:
        own.release()
        os._exit(0)
    os.waitpid(child, 0)
    own.check()
    own.release()


def test_a_file_that_says_nothing_is_left_alone_until_it_is_old(path):
    path.write_text("")
    assert is_owned(path)
    assert Ownership(path).take() is not None
    os.utime(path, (1.0, 1.0))
    assert not is_owned(path)
    assert Ownership(path).take() is None
