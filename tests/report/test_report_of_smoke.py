"""The report of real runs: `decaylab reproduce all --tier smoke`, made once for all tests."""

import json
from contextlib import nullcontext

from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.paper import artefacts
from decaylab.report import write


def test_every_artefact_of_the_smoke_tier_is_shown(smoke_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "theory_beside", lambda: nullcontext(list))
    arguments = ["report", "--runs", str(smoke_runs), "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["left_out"] == []
    filled = found["coverage"]["smoke"]
    assert filled.keys() == artefacts().keys()
    for name, (done, cells) in filled.items():
        searched = name in ("fig1", "fig8")  # their L2 cells wait for a search
        assert done == cells or (searched and 0 < done < cells), name
    drawn = {path.name for path in (tmp_path / "figures").glob("*.png")}
    figures = [*(f"fig{n}" for n in range(1, 10)), "bursts", "fig9-bn", "fig9-pace", "jacobian-lr"]
    assert drawn == {f"{name}-smoke.png" for name in figures}
