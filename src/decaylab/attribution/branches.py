"""Arms that branch from the middle of a run: same weights, optimizer state and batches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decaylab.attribution.arms import Loop, Make
from decaylab.data import DataSet
from decaylab.errors import Range
from decaylab.records import RunStore
from decaylab.training import Execution, RunSpec, TrainingRun, checkpoint, train
from decaylab.training.build import chosen_split

METRICS = ("test/accuracy", "test/loss", "train/loss")


def train_to(
    spec: RunSpec,
    epoch: int,
    *,
    data: DataSet,
    folder: Path,
    device: str | torch.device = "cpu",
    execution: Execution | None = None,
) -> Path:
    """Train a spec for `epoch` epochs and stop there; the checkpoint, in `folder`.

    The same call again continues, or finds it there.
    """
    epochs = spec.resolved().epochs
    assert epochs is not None
    Range(above=0, below=epochs).check("the epoch to branch at", epoch)
    store = RunStore(folder)
    path = store.folder(spec.resolved().id).checkpoint
    if path.exists() and _epochs(path) >= epoch:
        return path
    training = train(spec, data=data, device=device, store=store, execution=execution)
    for progress in training:
        if progress.epoch >= epoch:
            break
    training.close()  # which saves a checkpoint
    return path


def _epochs(path: Path) -> int:
    """How many epochs a checkpoint has behind it."""
    state = checkpoint.load(path, only="epoch") | checkpoint.load(path, only="recorded")
    return int(state["epoch"]) + bool(state["recorded"])


def branch_from(
    path: Path, spec: RunSpec, data: DataSet, device: str | torch.device = "cpu"
) -> Make:
    """`make(seed)` for `attribute`: the run as its checkpoint has it.

    Seed 0 goes on with the run's own batches, other seeds with batches in another order.
    """
    spec = spec.resolved()
    data = chosen_split(spec, data).to(device)
    state = checkpoint.load(path)

    def make(seed: int) -> Loop:
        run = TrainingRun(spec, data)
        with checkpoint.fitting(path):
            run.load_state_dict(_copied(state))
        if seed:
            order = torch.Generator(run.device).manual_seed(2**40 + seed)
            run.batches.load_state_dict({"generator": order.get_state()})

        def step() -> Tensor:
            if run.position == run.steps_per_epoch:
                run.next_epoch()
            if not run.drawn or not run.whole:
                run.begin_epoch()
            with run.at_work():
                return run.train_step()

        def evaluate() -> Mapping[str, float]:
            with run.at_work():
                run.launch_evaluation(whole_train_set=True, between=lambda: None)
                values = run.measure()
            return {name: values[name] for name in METRICS}

        return run.model, run.optimizer, step, evaluate

    return make


def _copied(state: Any) -> Any:
    """A state whose tensors are its own: loading may take them over."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(value) for value in state)
    return state
