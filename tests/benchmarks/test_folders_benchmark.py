"""The runs that it writes are runs, and every command is timed on them."""

import json

from decaylab.records import RunStore
from decaylab.records.index import summaries


def test_it_times_each_command_on_runs_that_can_be_read(benchmark, monkeypatch, capsys):
    folders = benchmark("folders")
    commands = []

    def timed(words, runs):
        commands.append(words[:2])
        known, unreadable = summaries(RunStore(runs))
        assert not unreadable
        assert all(run.manifest.status == "finished" for run in known)
        assert all(run.epoch == (2 if len(known) > 1 else 3333) for run in known)
        return {"seconds": float(len(known)), "cpu_seconds": 1.0, "megabytes": 1.0}

    monkeypatch.setattr(folders, "timed", timed)
    folders.main(["--runs", "1", "--epochs", "2", "--megabytes", "1", "--json"])
    printed = json.loads(capsys.readouterr().out)
    count = printed["about"]["runs"]
    assert count == len(folders.specs(1)) > 1
    assert {name: m["seconds"] for name, m in printed["commands"].items()} == {
        **dict.fromkeys(folders.commands(1, "page"), count),
        "runs show, 1 MB of rows": 1,
    }
    assert commands[-1][:2] == ["runs", "show"]
