"""The theory in another process: the same checks; and here, where that process says nothing."""

import subprocess

from decaylab.report import theory
from decaylab.theory import Check

CHECK = Check("T1", "Lemma 1", "here", 1.0, 1.0, 0.0, 1e-9, holds=True, kind="statement")


def test_it_is_what_is_computed_here(monkeypatch):
    monkeypatch.setattr(theory.os, "cpu_count", lambda: 2)
    with theory.theory_beside() as computed:
        beside = computed()
    here = theory.theory_checks()
    assert [(c.id, c.condition, c.kind, c.holds) for c in beside] == [
        (c.id, c.condition, c.kind, c.holds) for c in here
    ]


def test_where_the_other_process_fails_it_is_computed_here(monkeypatch):
    monkeypatch.setattr(theory.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(theory.sys, "executable", "/bin/false")
    monkeypatch.setattr(theory, "theory_checks", lambda: [CHECK])
    with theory.theory_beside() as computed:
        assert computed() == [CHECK]


def test_with_one_core_there_is_no_other_process(monkeypatch):
    monkeypatch.setattr(theory.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", None)
    with theory.theory_beside() as computed:
        assert computed is theory.theory_checks
