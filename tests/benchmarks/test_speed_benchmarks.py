"""The speed benchmarks run on a CPU, and what they print is what they say."""

import itertools
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle.plain_kfac import KFAC
from report.synthetic import write_run
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from decaylab.networks import build
from decaylab.records import Manifest, Row, RunStore
from decaylab.training import RunSpec

PAGE = Path(__file__).parents[2] / "docs" / "speed.md"
TINY = "--device cpu --networks vgg11 --width 0.05 --batch-size 4 --json"


def printed(main, options, capsys):
    main(f"{TINY} {options}".split())
    said = capsys.readouterr()
    result = json.loads(said.out)
    measured = [row for rows in result.values() if isinstance(rows, list) for row in rows]
    told = [line for line in said.err.splitlines() if line.startswith("{")]
    assert len(told) == len([row for row in measured if isinstance(row, dict)])
    return result


def test_steps_with_ratios_and_parts(benchmark, capsys, monkeypatch):
    step = benchmark("step")
    # A clock that goes on by one whenever it is read: a busy machine would mix up the medians.
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    options = "--steps 3 --part-steps 11 --no-peers --optimizers sgd kfac-g"
    result = printed(step.main, options, capsys)
    rows = {(row["step"], row["mode"]): row for row in result["rows"]}
    assert list(rows) == [("sgd", "stock"), ("sgd", "eager"), ("kfac-g", "eager")]
    mine, other = rows["kfac-g", "eager"], rows["sgd", "eager"]
    assert mine["over_sgd"] == pytest.approx(mine["ms"] / other["ms"])
    assert mine["over_stock"] == pytest.approx(mine["ms"] / rows["sgd", "stock"]["ms"])
    assert (other["over_sgd"], rows["sgd", "stock"]["over_stock"]) == (1, 1)
    assert mine["kinds"].keys() == {"plain"}  # three steps behind the first three
    assert result["about"]["batch_size"] == 4
    assert torch.__version__ == result["about"]["torch"]
    (parts,) = result["parts"]
    for kind, names in benchmark("measuring").PARTS_OF.items():
        assert parts[kind].keys() == {*names, "step"}
        # a part without time was not seen: the functions have moved
        assert all(value > 0 for value in parts[kind].values()), kind
        assert sum(parts[kind][name] for name in names) < parts[kind]["step"]
    assert "kfac-g" in step.table(result)


def test_only_the_deterministic_mode_is_deterministic(benchmark, capsys, monkeypatch):
    step, asked = benchmark("step"), []

    def noted(*args, **kwargs):
        asked.append(torch.are_deterministic_algorithms_enabled())
        return original(*args, **kwargs)

    original = step.TrainingRun.train_step
    monkeypatch.setattr(step.TrainingRun, "train_step", noted)
    options = "--steps 1 --no-peers --no-parts --optimizers sgd --modes eager deterministic"
    result = printed(step.main, options, capsys)
    assert [row["mode"] for row in result["rows"]] == ["stock", "eager", "deterministic"]
    assert all(row["ms"] > 0 for row in result["rows"])
    assert asked == [False, False, True, True]  # one to warm up, one that counts


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_peers(benchmark, capsys, monkeypatch):
    peers = benchmark("peers")
    assert peers.installed("curvlinops")
    for other in ("kfac-pytorch", "singd"):
        monkeypatch.delitem(peers.PEERS, other)
    monkeypatch.setitem(peers.PEERS, "asdl", ("no_such_module", peers.asdl))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    images, labels = torch.randn(8, 3, 2, 2), torch.arange(8) % 3
    before = nn.functional.cross_entropy(model(images), labels).item()
    step = peers.curvlinops(model, images, labels)
    for _ in range(12):
        step()
    assert nn.functional.cross_entropy(model(images), labels).item() < before

    def broken(*_):
        raise RuntimeError("not for this torch\nmore")

    monkeypatch.setitem(peers.PEERS, "curvlinops", ("curvlinops", broken))
    steps = benchmark("step")
    result = printed(steps.main, "--steps 1 --optimizers sgd", capsys)
    (row,) = [row for row in result["rows"] if row["mode"] == "peer"]
    assert row["over_stock"] is None
    assert row["error"] == "RuntimeError: not for this torch"
    assert result["not_installed"] == ["asdl"]
    said = steps.table(result)
    assert "not for this torch" in said
    assert "asdl: not installed" in said


def test_epochs(benchmark, capsys):
    epoch = benchmark("epoch")
    options = "--train 12 --test 8 --at-once 2 --epochs 1 --optimizers sgd --evaluation-batches 4 8"
    result = printed(epoch.main, options, capsys)
    (row,) = result["epoch"]
    assert row["ratio"] == pytest.approx(row["epoch_seconds"] / row["steps_seconds"])
    (row,) = result["at-once"]
    assert row["throughput"] == pytest.approx(2 * row["alone_seconds"] / row["together_seconds"])
    assert [row["batch_size"] for row in result["evaluation"]] == [4, 8]
    (row,) = result["jacobian"]
    assert row["images"] == 8
    assert row["seconds"] > 0
    assert row["first_seconds"] > 0
    (row,) = result["checkpoint"]
    assert row["waited_seconds"] > 0
    assert row["written_seconds"] > 0
    assert row["gigabytes"] > 1e-5
    assert "jacobian: vgg11" in epoch.table(result)


def rows_for(network, **steps):
    return [
        {"network": network, "step": step, "mode": mode, "ms": ms, "gigabytes": gigabytes}
        | {"kinds": {"plain": ms}, "over_sgd": 1.0, "over_stock": 0.5}
        for step, (mode, ms, gigabytes) in steps.items()
    ]


def whole_runs(folder):
    """Seven runs: 1 to 4 are short, shared, stopped, or no K-FAC; the last has large batches."""
    good = {"tier": "full", "at_once": 1, "resumes": 0, "device": "A GPU", "compiled": True}
    others = ({}, {"tier": "short"}, {"at_once": 4}, {"resumes": 1}, {}, {}, {})
    like = {"data": "cifar10", "network": "vgg16", "epochs": 100, "lr_drop_every": 40}
    store = RunStore(folder)
    for i, other in enumerate(others):
        spec = RunSpec(**like, optimizer="sgd" if i == 4 else "kfac-g", batch_norm=i != 5,
                       batch_size=2000 if i == 6 else 128)  # fmt: skip
        run = store.folder(f"cifar10-vgg16-{i}")
        times = {"started": 1000.0, "updated": 1125.0}
        base = {"id": run.id, "status": "finished", "version": "", "commit": "", "torch": ""}
        took = [(1, 11.0, 9.0), (2, 137.0 - 4 * i, 115.0)]
        with run.writing(spec.to_toml()):
            run.write_manifest(Manifest(**base, seed=0, **times, **(good | other)))
            run.rows_writer.append([Row(e, e, s, "train/seconds", value) for e, s, value in took])
    return folder


def test_the_page_has_every_number_beside_its_goal(benchmark, capsys, tmp_path):
    page = benchmark("page")
    step, epoch = benchmark("step"), benchmark("epoch")
    made = {
        "step": printed(step.main, "--steps 1 --part-steps 11 --no-peers", capsys),
        "epoch": printed(epoch.main, "--train 8 --test 4 --at-once 2 --epochs 1", capsys),
    }
    made["step"]["rows"] += [
        *rows_for("vgg16", sgd=("captured", 2.0, 1.0)),
        *rows_for("vgg16", sgd=("compiled-captured", 1.9, 1.5)),
        *rows_for("vgg16", **{"kfac-g": ("captured", 2.28, 3.25)}),
        {"network": "vgg16", "step": "asdl", "mode": "peer", "error": "ImportError: broken"},
    ]
    made["epoch"]["at-once"].append(
        {"network": "vgg16", "optimizer": "kfac-g", "runs": 4, "throughput": 1.25}
    )
    layers = {"stem": {"as trained": 0.021, "bf16 inverses": 0.3}}
    layers["head"] = {"as trained": 0.0012, "bf16 inverses": 0.04}
    run = {"run": "a-run", "step": 70, "damping": 0.001, "layers": layers}
    about = benchmark("measuring").place("cpu")
    made["precision-before"] = {
        "about": about,
        "precision": [run | {"layers": {"stem": layers["head"]}}],
    }
    made["precision"] = {"about": about, "precision": [run]}
    for name, result in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    target = tmp_path / "speed.md"
    target.write_text(PAGE.read_text())
    hand_written = target.read_text().partition(page.END)[2]
    files = [str(tmp_path / f"{name}.json") for name in made]
    for _ in range(2):  # the second time over what is there
        page.main([*files, "--page", str(target), "--runs", str(whole_runs(tmp_path / "runs"))])
    text = target.read_text()
    assert text.partition(page.END)[2] == hand_written != ""
    lines = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("|")}
    assert lines["| SGD step, ms"].startswith("| SGD step, ms | <= 2.2 | 1.900 | <= 6.6 | not mea")
    assert "| 1.20 |" in lines["| K-FAC-G step over our SGD"]
    assert "| >= 1.4 | 1.25 (missed) |" in lines["| throughput of K-FAC runs at once over one"]
    assert "| <= 2.5 | 2.25 |" in lines["| peak memory of K-FAC over SGD, GB"]
    assert "| yes | 9.0 | 115.0 | 137.0 |" in lines["| `cifar10-vgg16-0`"]
    ends = [lines[f"| `cifar10-vgg16-{i}`"].split(" | ", 6)[6] for i in (0, 5, 6)]
    assert ends == ["<= 130 | missed |", "<= 130 | yes |", " |  |"]
    listed = [i for i in range(7) if f"| `cifar10-vgg16-{i}`" in lines]
    assert listed == [0, 5, 6]
    trained, rounded = (line for line in text.splitlines() if line.startswith("| `a-run`, step 70"))
    assert trained.endswith("| 0.001 | as trained | 2.10% | 2.10% (stem) | 1 of 2 |")
    assert rounded.endswith("| 30.00% (stem) | 2 of 2 |")
    assert "ImportError: broken" in lines["| vgg16: asdl, peer"]
    assert "| vgg11: kfac-g, eager" in lines
    inversion = made["step"]["parts"][-1]["invert"]["inversion"]
    assert any(f"{inversion:.2f}" in line for line in lines.values())
    assert made["step"]["about"]["torch"] in text
    assert f"{page.EPOCH_PARTS['jacobian']}:" in text
    with pytest.raises(SystemExit):
        page.main([*files, "--page", files[0]])
    assert json.loads((tmp_path / "step.json").read_text()) == made["step"]


def test_what_deterministic_steps_cost_is_told_apart_from_the_others(benchmark):
    page = benchmark("page")
    measured = page.SpeedRows()
    measured.add_steps(rows_for("vgg16", sgd=("captured", 2.0, 1.0)))
    both = rows_for("vgg16", sgd=("captured", 4.0, 1.0))
    measured.add_steps([*both, *rows_for("vgg16", sgd=("deterministic", 5.0, 1.0))])
    assert measured.best("vgg16", "sgd")["ms"] == 2.0
    assert "| vgg16: sgd | 4.000 | 5.000 | +25.0% |" in page.determinism(measured)


def test_accuracies_are_listed_run_by_run_with_their_mean_by_precision(benchmark, tmp_path):
    page = benchmark("page")
    spec = RunSpec(data="cifar10", network="resnet32", optimizer="kfac-g", decay="decoupled")
    spec = replace(spec, weight_decay=0.1, epochs=20)
    made = [("", "bf16", 0, 0.9, True), (page.REPEATS, "bf16", 1, 0.88, False)]
    made.append((page.REPEATS, "tf32", 0, 0.91, True))
    for folder, precision, seed, accuracy, compiled in made:
        run = replace(spec, seed=seed, precision=precision)
        store = RunStore(tmp_path / folder)
        write_run(store, run, {"test/accuracy": accuracy}, tier="short", compiled=compiled)
        other = replace(run, augment=True)
        write_run(store, other, {"test/accuracy": 0.5}, tier="short", compiled=compiled)
    text = page.trained(page.SpeedRows.read([], tmp_path))
    assert [line.split(" | ")[1:] for line in text.splitlines()[2:]] == [
        ["0", "bf16", "yes", "90.00", "", " |"],
        ["1", "bf16", "no", "88.00", "", " |"],
        ["", "bf16", "", "89.00 ± 1.41", ">= 89.5", "missed |"],
        ["0", "tf32", "yes", "91.00", "", " |"],
        ["", "tf32", "", "91.00", ">= 89.5", "yes |"],
    ]


def test_bounds_count_the_operations_of_a_real_step(benchmark, monkeypatch):
    """Against torch's own count of the products, one part at a time: no memory, one rate."""
    bounds = benchmark("bounds")
    model = build("vgg11", classes=10, width=0.05, batch_norm=True)
    rates = bounds.Rates(bf16=1.0, tf32=1.0, fp32=1.0, memory=math.inf)
    optimizer = KFAC(model, lr=0.1, damping=1e-3, curvature="gauss-newton")
    counted: dict[str, int] = {}

    def count(owner, name, part):
        original = getattr(owner, name)

        def inside(*args, **kwargs):
            with FlopCounterMode(display=False) as counter:
                result = original(*args, **kwargs)
            counted[part] = counted.get(part, 0) + counter.get_total_flops()
            return result

        monkeypatch.setattr(owner, name, inside)

    for part in ("preconditioning", "factor products", "curvature passes"):
        for owner, name in benchmark("measuring").PARTS[part]:
            count(owner, name, part)
    logits = model(torch.randn(4, 3, 32, 32))
    optimizer.observe(logits)
    logits.square().mean().backward()
    optimizer.step()
    counted["sampled backward"] = counted.pop("curvature passes") - counted["factor products"]
    layers = [bounds.seconds(layer, rates) for layer in bounds.sides(model, batch_size=4)]
    assert counted == {part: sum(layer[part] for layer in layers) for part in counted}
    assert len(counted) == 3
    assert min(counted.values()) > 0
