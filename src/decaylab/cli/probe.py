"""`decaylab probe RUN`: the paper's quantities at the last checkpoint of a run."""

import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from decaylab import probes
from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.runs import layer_table
from decaylab.cli.terminal import print_json, say, show, warn
from decaylab.data import DataSet, Split, evaluation_batches
from decaylab.errors import NotFinished, Range
from decaylab.optim.kfac import KFAC
from decaylab.probes import Reading, Watch
from decaylab.records import RunFolder
from decaylab.text_table import Column, TextTable
from decaylab.training import RunSpec, checkpoint
from decaylab.training.build import build_optimizer, load_run

Example = Annotated[
    int, option("--examples", "Number of images to use from each split.", allowed=Range(at_least=2))
]
Record = Annotated[bool, option("--record", "Add what the run's records lack at that step.")]


def probe_command(
    run: options.Run,
    runs: options.Runs = options.RUNS,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    examples: Example = 256,
    record: Record = False,
    json_output: options.Json = False,
) -> None:
    """Measure a run's last checkpoint: the whole model, then layer by layer.

    Everything is measured on the first images of the training split, except the Jacobian norm (on
    the test split, as in Table 2) and the generalization gap (on both). Batch norm is in eval mode;
    K-FAC norms use batch statistics, as K-FAC does. In the names, gn is Gauss-Newton and fr is
    Fisher-Rao; "normalised" is at W/|W|. The invariance defect says how much the output changes if
    the layer's weights are rescaled. It is near 0 in scale-invariant layers.
    """
    folder = options.found_run(run, runs)
    where = options.chosen_device(device)
    model, spec, data = load_run(folder, data_dir=data_dir, device=where)
    optimizer = build_optimizer(spec, model)
    optimizer.load_state_dict(checkpoint.load(folder.checkpoint, where, "optimizer")["optimizer"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", probes.NonFiniteWarning)
        readings = list(_measured(model, optimizer, data, examples))
    for warning in caught:
        warn(f"warning: {warning.message}")
    if record:
        _append(folder, spec, model, optimizer, readings)
    if json_output:
        print_json([entry for reading in readings for entry in _entries(reading)])
        return
    used = dict.fromkeys(min(examples, len(split)) for split in (data.train, data.test))
    counted = " + ".join(map(str, used))  # of the training and the test split, where they differ
    say(f"{folder.id}: {counted} images of {data.name}, BN in eval mode", "")
    show(_totals(readings))
    print()
    rows = {name: value for reading in readings for name, value in reading.rows().items()}
    of_layers = {name: value for name, value in rows.items() if "/" in name}
    show(layer_table(of_layers, "{:.3g}", Column("layer", path=True)))


def _measured(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: DataSet, examples: int
) -> Iterator[Reading]:
    train, test = (first_images(split, data, examples) for split in (data.train, data.test))
    inputs = train[0]
    yield probes.generalization_gap(model, [train], [test])
    yield probes.jacobian_norm(model, test[0])
    yield probes.gauss_newton_norm(model, inputs)
    yield probes.kfac_gauss_newton_norm(model, [inputs])
    yield probes.fisher_rao_norm(model, inputs)
    yield probes.curvature_traces(model, inputs, curvature="fisher", samples=16)
    yield probes.curvature_traces(model, inputs, curvature="gauss-newton", samples=16)
    yield probes.weight_norms(model)
    yield probes.effective_learning_rate(model, optimizer, inputs)
    if isinstance(optimizer, KFAC):
        yield probes.effective_damping(model, optimizer.factors(), optimizer.dampings())


def _append(
    folder: RunFolder,
    spec: RunSpec,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    readings: list[Reading],
) -> None:
    """Rows of the last checkpoint's step, which a finished run's last row has; none is replaced."""
    rows = folder.rows().rows
    if not folder.is_finished() or not rows:
        command = f"decaylab train --config {folder.path / 'spec.toml'} --runs {folder.path.parent}"
        raise NotFinished(folder.id, f"finish it with `{command}`, then record")
    last = max(rows, key=lambda row: row.step)
    recorded = {row.name for row in rows if row.step == last.step}
    values = {name: v for reading in readings for name, v in reading.rows().items()}
    missing = {name: value for name, value in values.items() if name not in recorded}
    watched = Watch(model, [optimizer], {}, clock=lambda: (last.epoch, last.seconds), hooks=False)
    watched.steps = last.step
    with folder.writing(spec.to_toml()):
        watched.write_to(folder.rows_writer)
        watched.record([], missing)


def first_images(split: Split, data: DataSet, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` images of a split, normalised, with their labels."""
    return next(evaluation_batches(split, batch_size=count, mean=data.mean, std=data.std))


def _entries(reading: Reading) -> Iterator[dict[str, Any]]:
    """One entry per value, with its standard error if it is an estimate."""
    errors = {probes.row_name(reading.name, k): v for k, v in reading.errors.items()}
    if reading.total_error is not None:
        errors[reading.name] = reading.total_error
    for name, value in reading.rows().items():
        in_its_unit = name.split("/")[0] == reading.name
        yield {
            "name": name,
            "value": value,
            "error": errors.get(name),
            "unit": reading.unit if in_its_unit else None,
        }


def _totals(readings: list[Reading]) -> TextTable:
    numbers = [Column(heading, number=True) for heading in ("value", "standard error")]
    table = TextTable([Column("model"), *numbers, Column("unit", words=True)])
    for reading in readings:
        if reading.total is not None:
            error = "" if reading.total_error is None else f"{reading.total_error:.2g}"
            table.add(reading.name, f"{reading.total:.5g}", error, reading.unit)
    return table
