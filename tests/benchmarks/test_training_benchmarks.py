"""The benchmarks that train, or time a user's own loop, on a CPU and at a tiny size."""

import json
import math
from pathlib import Path

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
    options = "--networks tiny --modes eager captured --steps 3 --warm-up 2 --no-peers"
    rows = records(benchmark("eager").main, options, tmp_path / "eager.json")
    ways = [(row["step"], row["mode"]) for row in rows]
    assert len(ways) == len(set(ways)) == 6
    assert all(row["ms"] > 0 for row in rows)
    assert "kfac-g" in capsys.readouterr().out


def test_the_gpt_and_its_grids(benchmark, tmp_path, capsys):
    gpt = benchmark("gpt")
    assert all(len(grid) <= 8 for grid in gpt.GRIDS.values())
    options = "--tiny --steps 8 --seeds 2 --optimizers adamw muon kfac"
    setting = ["--settings", '{"lr": 0.002, "weight_decay": 0.1}']
    path = tmp_path / "gpt.json"
    gpt.main([*options.split(), *setting, "--device", "cpu", "--out", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["optimizer"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("adamw", "muon", "kfac") for seed in (0, 1)
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
