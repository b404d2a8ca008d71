"""docs/mechanisms.md: each row names a function and a test that are there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\|(.+)\|(.*)\| `([\w.]+)` \| `([\w/.]+)::(\w+)` \|$")
LINES = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8").splitlines()
ROWS = [ROW.match(line) for line in LINES if line.startswith("| ") and "function" not in line]


def test_every_row_is_complete():
    assert all(ROWS)
    told = " ".join(row[1] for row in ROWS)
    for number in (2, 3, 4, 6, 7, 8, 9, 13, 14):
        assert f"Eq. {number}" in told
    for statement in range(1, 8):
        assert f"(T{statement})" in told


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].strip())
def test_function_and_test_exist(row):
    parts = row[3].split(".")
    found = importlib.import_module("decaylab." + ".".join(parts[:2]))
    for name in parts[2:]:
        found = getattr(found, name)
    assert found.__doc__
    assert f"def {row[5]}(" in (ROOT / "tests" / row[4]).read_text(encoding="utf-8")
