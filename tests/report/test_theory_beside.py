"""The theory in another process: the same checks; and here, where that process says nothing."""

import subprocess
from dataclasses import replace

from decaylab.report import beside, theory
from decaylab.theory import STATEMENTS, Check

CHECK = Check("T1", "Lemma 1", "here", 1.0, 1.0, 0.0, 1e-9, holds=True, kind="statement")

NUMBERS = {"left": 0.0, "right": 0.0, "error": 0.0}  # of as many threads as a process has


def test_it_is_what_is_computed_here(monkeypatch):
    monkeypatch.setattr(beside.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(theory, "theory_checks", list)  # so that it is computed there
    with theory.theory_beside() as computed:
        there = computed()
    assert list(dict.fromkeys(check.id for check in there)) == list(STATEMENTS)
    for name in ("T6", "T7"):  # which are quick
        assert [replace(check, **NUMBERS) for check in there if check.id == name] == [
            replace(check, **NUMBERS) for check in STATEMENTS[name]()
        ]


def test_where_the_other_process_fails_it_is_computed_here(monkeypatch):
    monkeypatch.setattr(beside.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(beside.sys, "executable", "/bin/false")
    monkeypatch.setattr(theory, "theory_checks", lambda: [CHECK])
    with theory.theory_beside() as computed:
        assert computed() == [CHECK]


def test_with_one_core_there_is_no_other_process(monkeypatch):
    monkeypatch.setattr(beside.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(theory, "theory_checks", lambda: [CHECK])
    with theory.theory_beside() as computed:
        assert computed() == [CHECK]
