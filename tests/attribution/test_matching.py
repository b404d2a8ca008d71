import json
import math
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from typer.testing import CliRunner

from decaylab.attribution.matching import Match, match, matched_spec
from decaylab.attribution.shares import Estimate
from decaylab.attribution.words import match_sentence
from decaylab.cli import app
from decaylab.errors import Lacks, Mismatch, UnknownName
from decaylab.records import RunStore
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training import RunSpec
from decaylab.training.paths import LayerPaths, paths_file

CPU = WorkerOptions(device=torch.device("cpu"))
A = RunSpec(
    data="digits",
    network="mlp",
    hidden=(16,),
    lr=0.3,
    decay="l2",
    weight_decay=0.01,
    momentum=0.0,
    epochs=2,
    lr_drop_every=2,
)
B = RunSpec(
    data="digits",
    network="mlp",
    hidden=(16,),
    optimizer="adam",
    lr=0.003,
    decay="decoupled",
    weight_decay=0.1,
    epochs=2,
    lr_drop_every=2,
)


def paths(store, spec):
    return LayerPaths.load(paths_file(store.folder(spec.id)))


@pytest.mark.parametrize(("path", "quantity"), [("rotation", "angles"), ("norm", "sizes")])
def test_b_follows_a(path, quantity, tmp_path):
    store = RunStore(tmp_path)
    result = match(A, B, path, options=CPU, store=store, seeds=(0, 1))
    assert not result.unused
    for seed in (0, 1):
        a, b = replace(A, seed=seed), replace(B, seed=seed)
        expected = getattr(paths(store, a), quantity)
        followed = getattr(paths(store, matched_spec(a, b, path)), quantity)
        torch.testing.assert_close(followed, expected, rtol=1e-3, atol=0)
        assert not torch.allclose(getattr(paths(store, b), quantity), expected, rtol=0.05)
    before, after = result.differences["test/loss"], result.left["test/loss"]
    assert result.gone["test/loss"].value == pytest.approx(1 - after.value / before.value)
    assert max(map(len, str(result).splitlines())) <= 80
    table = {line.split()[0]: line for line in str(result).splitlines() if "±" in line}
    for metric, difference in result.differences.items():  # no part of what may be nothing
        assert table[metric].endswith("]") != (0.0 in difference)


def test_a_run_matched_with_itself_differs_in_nothing(tmp_path):
    result = match(A, A, "rotation", options=CPU, store=RunStore(tmp_path), seeds=(0,))
    assert result.differences["test/loss"].value == 0
    assert abs(result.left["test/loss"].value) < 1e-4


def test_a_timescale_is_matched_by_the_weight_decay():
    """lr wd / (1 - momentum) of SGD's L2 is lr wd of a decoupled decay."""
    fast = replace(A, momentum=0.9)
    matched = matched_spec(fast, B, "timescale")
    assert matched.lr * matched.weight_decay == pytest.approx(0.3 * 0.01 / (1 - 0.9))
    assert not matched.followed


@pytest.mark.parametrize(
    ("a", "b", "path", "kind", "what"),
    [
        (A, replace(B, epochs=3), "rotation", Mismatch, "epochs"),
        (A, replace(B, batch_size=64), "rotation", Mismatch, "batch_size"),
        (A, replace(B, hidden=(8,)), "norm", Mismatch, "hidden"),
        (A, replace(B, decay="l2"), "timescale", Lacks, "timescale"),
        (A, replace(B, decay="none", weight_decay=0.0), "timescale", Lacks, "weight decay"),
    ],
)
def test_what_cannot_be_matched_is_refused(a, b, path, kind, what):
    with refuses(kind, what=what):
        matched_spec(a, b, path)
    with refuses(UnknownName, name="colour"):
        matched_spec(A, B, "colour")


def test_a_difference_that_grows_is_not_said_to_be_gone():
    def of(value):
        return {"test/accuracy": Estimate(value, math.nan, math.nan, 1)}

    differences = of(0.04)
    for left, gone, said in (
        (0.05, -0.25, "the difference is no smaller."),
        (0.03, 0.25, "25 % of the difference is gone."),
    ):
        found = Match("a", "b", "rotation", (0,), differences, of(left), of(gone))
        assert match_sentence(found).endswith(said)


def test_the_command(tmp_path):
    files = []
    for name, spec in (("a", A), ("b", B)):
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(spec.to_toml())
    common = ["--runs", str(tmp_path / "runs"), "--device", "cpu", "--seeds", "1"]
    done = CliRunner().invoke(app, ["compare", *map(str, files), "--match", "rotation", *common])
    assert done.exit_code == 0, done.output
    assert "of the difference is gone" in done.output
    done = CliRunner().invoke(app, ["compare", *map(str, files), *common, "--json"])
    assert json.loads(done.output)["path"] == "rotation"
    done = CliRunner().invoke(app, ["compare", *map(str, files), "--match", "colour", *common])
    assert done.exit_code == 2
    assert "colour" in done.output
