"""`decaylab probe RUN` on runs trained here."""

import json

import pytest
import typer
from refusals import refuses
from typer.testing import CliRunner

from decaylab import probes
from decaylab.cli.probe import probe_command
from decaylab.data import evaluation_batches
from decaylab.errors import Lacks
from decaylab.records import RunStore
from decaylab.training import RunSpec, train_to_end
from decaylab.training.build import load_run


def trained(root, **spec):
    """A short run on digits; its id."""
    spec = RunSpec(data="digits", network="mlp", hidden=(12,), epochs=2, **spec)
    train_to_end(spec, store=RunStore(root))
    return spec.id


def run(*arguments):
    app = typer.Typer()
    app.command()(probe_command)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("optimizer", ["sgd", "kfac-g"])
def test_values_are_those_of_the_checkpoint(tmp_path, optimizer):
    own = {"initialize_batches": 2} if optimizer == "kfac-g" else {}
    name = trained(tmp_path, optimizer=optimizer, batch_norm=True, **own)
    result = run(name, "--runs", str(tmp_path), "--examples", "32", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    model, _, data = load_run(tmp_path / name)
    (inputs, _), *_ = evaluation_batches(data.test, batch_size=32, mean=data.mean, std=data.std)
    want = probes.jacobian_norm(model, inputs)
    assert rows["jacobian_norm"]["value"] == pytest.approx(want.total, rel=1e-5)
    assert rows["jacobian_norm"]["unit"] == want.unit
    assert rows["generalization_gap"]["error"] > 0
    layer = next(iter(probes.weight_norms(model).layers))
    assert {f"effective_lr/{layer}", f"fisher_trace/{layer}", f"kfac_gn_norm/{layer}"} <= set(rows)
    assert (f"effective_damping/{layer}" in rows) == (optimizer == "kfac-g")


def test_the_tables_have_a_line_per_layer(tmp_path):
    name = trained(tmp_path, optimizer="adam")
    result = run(name, "--runs", str(tmp_path), "--examples", "16", "--device", "cpu")
    assert result.exit_code == 0, result.output
    model, _, _ = load_run(tmp_path / name)
    for word in ("jacobian_norm", "standard error", *probes.weight_norms(model).layers):
        assert word in result.stdout


def test_an_unknown_run_is_one_sentence(tmp_path):
    with refuses(Lacks, owner=tmp_path, what="runs"):
        CliRunner().invoke(_app(), ["nope", "--runs", str(tmp_path)], catch_exceptions=False)


def _app():
    app = typer.Typer()
    app.command()(probe_command)
    return app
