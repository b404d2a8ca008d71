"""The benchmarks that train, or time a user's own loop, on a CPU and at a tiny size."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn


def records(main, options, path):
    main([*options.split(), "--device", "cpu", "--out", str(path)])
    result = json.loads(path.read_text())
    assert result["about"]["torch"] == torch.__version__
    assert not [row["error"] for row in result["rows"] if "error" in row]
    return result["rows"]


def test_a_plain_loop(benchmark, tmp_path, capsys):
    options = "--networks tiny --modes eager captured --steps 3 --rounds 2 --warm-up 2 --no-peers"
    rows = records(benchmark("eager").main, options, tmp_path / "eager.json")
    ways = [(row["step"], row["mode"]) for row in rows]
    assert len(ways) == len(set(ways)) == 6
    assert all(min(row["rounds"]) <= row["ms"] <= max(row["rounds"]) for row in rows)
    assert {len(row["rounds"]) for row in rows} == {2}
    assert "kfac-g" in capsys.readouterr().out


def test_the_gpt_and_its_grids(benchmark, tmp_path, capsys):
    gpt = benchmark("gpt")
    assert all(len(grid) <= 8 for grid in gpt.GRIDS.values())
    options = "--tiny --steps 8 --seeds 2 --optimizers adamw muon kfac spectral"
    setting = ["--settings", '{"lr": 0.002, "weight_decay": 0.1}']
    path = tmp_path / "gpt.json"
    gpt.main([*options.split(), *setting, "--device", "cpu", "--out", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["optimizer"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("adamw", "muon", "kfac", "spectral") for seed in (0, 1)
    ]
    for row in rows:
        assert row["held_out"] < math.log(256) + 0.1
        assert row["curve"][-1]["step"] == 8
    assert "(n = 2)" in capsys.readouterr().out


def test_its_muon_is_torchs(benchmark):
    gpt = benchmark("gpt")
    after = []
    for make in (gpt.Muon, torch.optim.Muon):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 8, bias=False))
        more = {} if make is gpt.Muon else {"adjust_lr_fn": "match_rms_adamw"}
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0.1, **more)
        for _ in range(4):
            model(torch.ones(3, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*after, atol=1e-6)


def test_its_schedule_rises_and_falls(benchmark):
    gpt = benchmark("gpt")
    rates = [gpt.rate_at(step, 100) for step in range(100)]
    assert max(rates) == rates[9] == 1
    assert rates[0] == 0.1
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_defaults_train_every_net_at_a_tiny_size(benchmark, tmp_path, capsys):
    defaults = benchmark("defaults")
    assert 2 * len(defaults.FOUND_ON) <= len(defaults.NETS)
    rows = records(defaults.main, "--tiny --steps 4 --seeds 1", tmp_path / "defaults.json")
    assert {row["net"] for row in rows} == set(defaults.NETS)
    assert all(math.isfinite(row["loss"]) for row in rows if row["optimizer"] == "kfac")
    shown = capsys.readouterr().out
    assert shown.count("| kfac |") == shown.count("| adamw |") == len(defaults.NETS)


def test_defaults_on_cifar10(benchmark, tmp_path, monkeypatch):
    defaults, samples = benchmark("defaults"), benchmark("samples")
    split = SimpleNamespace(
        images=torch.randint(256, (7000, 3, 32, 32), dtype=torch.uint8),
        labels=torch.randint(10, (7000,)),
    )
    monkeypatch.setattr(samples, "load", lambda name, folder: SimpleNamespace(train=split))
    options = "--tiny --steps 2 --seeds 1 --nets mlp --cifar10"
    rows = records(defaults.main, options, tmp_path / "defaults.json")
    assert [row["optimizer"] for row in rows] == ["kfac", "adamw", "adamw"]


def test_a_record_is_there_once_it_is_complete(benchmark, tmp_path):
    """A queue takes the file for the end of the work."""
    save, path = benchmark("measuring").save, tmp_path / "loop.json"
    save(path, {"rows": [1]})
    assert not path.exists()
    assert json.loads((tmp_path / "loop.json.part").read_text()) == {"rows": [1]}
    save(path, {"rows": [1, 2]}, complete=True)
    assert json.loads(path.read_text()) == {"rows": [1, 2]}
    assert [file.name for file in tmp_path.iterdir()] == ["loop.json"]


def test_steps_of_a_set_size_beside_the_papers(benchmark, tmp_path, capsys):
    options = f"--smoke --seeds 1 --runs {tmp_path / 'runs'}"
    rows = records(benchmark("step_sizes").main, options, tmp_path / "sizes.json")
    ways = [(row["step"], row["part"]) for row in rows]
    assert ways == [("rms", "held-out")] * 4 + [("rms", "test"), ("fixed", "test")]
    best = max(rows[:4], key=lambda row: row["accuracy"])
    assert rows[4]["setting"] == best["setting"]
    assert "fixed" in capsys.readouterr().out
    table = benchmark("loops_page").sizes(rows)
    assert table.count("| held-out |") == 4
    assert table.count("| test |") == 2


def test_kinds_of_steps(benchmark, tmp_path, capsys):
    step_kinds = benchmark("step_kinds")
    options = "--steps 3 --seeds 2 --rates 0.001 0.01 --dampings 0.1"
    rows = records(step_kinds.main, options, tmp_path / "steps.json")
    assert len(rows) == (8 + 5) * (2 + 1)  # AdamW, kinds of K-FAC; on the GPT Muon and two more
    assert all(math.isfinite(row["held_out"]) for row in rows)
    assert capsys.readouterr().out.count("(n = 2)") == (8 + 5) * 2
    assert benchmark("loops_page").steps(rows).count("(n = 2)") == (8 + 5) * 2
    assert records(step_kinds.main, options, tmp_path / "steps.json") == rows  # known by now


def test_computed_memory_is_near_what_was_measured(benchmark):
    memory, folder = benchmark("memory"), Path(__file__).parents[2] / "results" / "loops"
    computed, measured = (
        {
            (row["network"], row["step"]): row["gigabytes"]
            for row in json.loads((folder / f"{name}.json").read_text())["rows"]
        }
        for name in ("memory-computed", "eager-models")
    )
    both = measured.keys() & computed.keys()
    assert len(both) == 12
    for loop in both:
        assert computed[loop] == pytest.approx(measured[loop], rel=0.03)
    assert computed["gpt350", "kfac-g-half"] < 1.6 * computed["gpt350", "first"]
    again = memory.predicted("gpt10", "kfac-g")
    assert again["gigabytes"] == pytest.approx(computed["gpt10", "kfac-g"], rel=0.01)


def test_the_page_shows_the_records(benchmark):
    loops, root = benchmark("loops_page"), Path(__file__).parents[2]
    files = (root / "results" / "loops").glob("*.json")
    records = {path.stem: json.loads(path.read_text()) for path in files}
    page = (root / "docs" / "kfac.md").read_text()
    assert all(f"<!-- loops: {name} -->" in page for name in records)
    assert loops.written(page, records) == page


def test_the_suggested_decay_beside_a_sweep(benchmark, tmp_path, capsys):
    options = "--small --steps 12 --seeds 1"
    rows = records(benchmark("advice").main, options, tmp_path / "advice.json")
    suggestion = json.loads((tmp_path / "advice.json").read_text())["suggestion"]
    assert [row["decay"] for row in rows] == [
        *("0", "suggested", "suggested, on every matrix", "0.01", "0.1", "1"),
    ]
    layers = {name for group in suggestion["groups"] for name in group["layers"]}
    assert "head" not in layers
    assert {"layers.0.attention.qkv", "layers.1.down"} <= layers
    plain, own, everywhere = rows[:3]
    assert own["norms"]["layers.1.down"] < plain["norms"]["layers.1.down"]
    assert everywhere["norms"]["head"] < own["norms"]["head"]  # decayed in one of them alone
    assert f"for {len(layers)} layers" in capsys.readouterr().out
