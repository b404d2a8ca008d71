"""`decaylab reproduce all --tier smoke`, and what `claims` and `report` make of its runs."""

import json
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.data import load
from decaylab.paper import TIERS, FinishedRuns, artefacts, cells
from decaylab.records import RunStore
from decaylab.sweeps import worker


def decaylab(*arguments):
    return CliRunner().invoke(app, [str(word) for word in arguments])


@pytest.fixture(scope="module")
def an_eighth():
    """Tier smoke with an eighth of the images in batches of an eighth: as many steps as it has."""
    smoke = TIERS["smoke"]
    batches = {papers: ours // 8 for papers, ours in smoke.batches.items()}

    def loaded(*given):
        data = load(*given)
        parts = [split.take(torch.arange(len(split) // 8)) for split in (data.train, data.test)]
        return replace(data, train=parts[0], test=parts[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TIERS, "smoke", replace(smoke, batches=batches))
        patch.setattr(worker, "load", loaded)
        yield


@pytest.fixture(scope="module")
def smoke_runs(an_eighth, tmp_path_factory):
    """The records of `decaylab reproduce all --tier smoke`: long work, so only read them."""
    runs = tmp_path_factory.mktemp("smoke") / "runs"
    done = decaylab("reproduce", "all", "--tier", "smoke", "--runs", runs)
    assert done.exit_code == 0, done.output
    (runs / "said.txt").write_text(done.output)
    return runs


def test_every_artefact_is_filled_at_smoke_tier_with_all_it_wants(smoke_runs):
    finished_runs = FinishedRuns(RunStore(smoke_runs))
    for name, artefact in artefacts().items():
        for cell in cells(name, "smoke"):
            (reading,) = finished_runs.of_cell(cell)
            assert reading.manifest.tier == "smoke"
            assert not reading.lacking(cell.probes), (name, cell.label)
            if artefact.metric in reading.rows.names():
                assert finished_runs.values(cell.runs, artefact.metric)
            else:  # a quantity of the first layer
                assert reading.first_layer(artefact.metric)
    assert not finished_runs.left_out
    total = sum(len(cells(name, "smoke")) for name in artefacts())
    assert f"{total} of {total} cells filled" in (smoke_runs / "said.txt").read_text()
    assert not list(smoke_runs.glob("*/checkpoint*"))


def test_claims_of_a_smoke_tier_are_never_supported_for_want_of_schedule(smoke_runs):
    result = decaylab("claims", "--tier", "smoke", "--runs", smoke_runs, "--json")
    assert result.exit_code == 0, result.output
    claims = {claim["id"]: claim for claim in json.loads(result.stdout)}
    assert len(claims) == 17
    assert claims["E1"]["verdict"] == "not enough schedule"
    assert claims["E1"]["n"] == 32
    assert claims["E14"]["verdict"] == "not enough schedule"
    about_decay = ["E1", "E2", "E3", "E4", "E6", "E8", "E9", "E11", "E13"]
    assert {claims[name]["verdict"] for name in about_decay} <= {
        "not enough schedule",
        "not enough runs",
    }
    text = decaylab("claims", "--runs", smoke_runs).stdout
    assert re.search(r"^E15 \(App\. G\.1\)", text, re.MULTILINE)
    assert "NOT ENOUGH SCHEDULE, tier smoke, 32 runs" in text


@pytest.mark.usefixtures("without_theory")
def test_every_artefact_of_the_smoke_tier_is_in_the_report(smoke_runs, tmp_path):
    result = decaylab("report", "--runs", smoke_runs, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["left_out"] == []
    coverage = report["coverage"]["smoke"]
    assert coverage.keys() == artefacts().keys()
    for name, (done, total) in coverage.items():
        searched = name in ("fig1", "fig8")  # their L2 cells wait for a search
        assert done == total or (searched and 0 < done < total), name
    drawn = {path.name for path in (tmp_path / "figures").glob("*.png")}
    figures = [name for name, artefact in artefacts().items() if artefact.kind != "table"]
    assert drawn == {f"{name}-smoke.png" for name in figures}
