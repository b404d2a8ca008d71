"""Work in another process gives what it gives here; and is done here, where that process ends."""

import os
from concurrent.futures import process
from dataclasses import replace

import pytest

from decaylab.report import beside
from decaylab.theory import STATEMENTS, all_checks

NUMBERS = {"left": 0.0, "right": 0.0, "error": 0.0}  # of as many threads as a process has


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(beside.os, "cpu_count", lambda: 2)


def own_process(end_in=0):
    """This process's number; ends any other than one."""
    if end_in and os.getpid() != end_in:
        os._exit(1)
    return os.getpid()


def failing():
    raise KeyError("there")


def test_the_theory_is_what_is_computed_here():
    with beside.beside(all_checks) as computed:
        there = computed()
    assert list(dict.fromkeys(check.id for check in there)) == list(STATEMENTS)
    for name in ("T6", "T7"):  # which are quick
        assert [replace(check, **NUMBERS) for check in there if check.id == name] == [
            replace(check, **NUMBERS) for check in STATEMENTS[name]()
        ]


def test_it_is_another_process_and_its_errors_are_raised_here():
    with beside.beside(own_process) as number:
        assert number() != os.getpid()
    with beside.beside(failing) as result, pytest.raises(KeyError):
        result()


def test_where_the_other_process_ends_the_work_is_done_here():
    with beside.beside(own_process, os.getpid()) as number:
        assert number() == os.getpid()


def test_with_one_core_there_is_no_other_process(monkeypatch):
    monkeypatch.setattr(beside.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(process, "_process_worker", None)
    with beside.beside(own_process) as number:
        assert number() == os.getpid()
