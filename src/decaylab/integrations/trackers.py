"""Trackers: what `watch` records, sent to TensorBoard, Weights & Biases or MLflow as it happens.

    tracker = MLflow(experiment="decay")
    with watch(model, optimizer, trackers=[tracker]):
        ...  # your own loop
    tracker.close()

A tracker is anything with `log(rows)`. The ones here connect when the first rows arrive, not when
they are built. If one fails, `watch` warns and drops it, and training continues. Names are those of
the records (`effective_lr/features.0`); values that are not finite are sent unchanged.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decaylab.errors import needed, warn_user
from decaylab.records import Row, Tracker

__all__ = ["MLflow", "TensorBoard", "Tracker", "WandB"]

STEP = "decaylab/step"
# So many metrics MLflow takes in one request.
REQUEST = 1000


class TensorBoard:
    """Scalars in a folder that `tensorboard --logdir` shows.

    Args:
        where: the folder, or your own `SummaryWriter` (such as Lightning's `logger.experiment`),
            which is then left open.
    """

    def __init__(self, where: str | Path | Any) -> None:
        self._library = needed("torch.utils.tensorboard", "tensorboard", "this tracker")
        self._folder = where if isinstance(where, str | Path) else None
        self._writer: Any = None if self._folder is not None else where

    def log(self, rows: Sequence[Row]) -> None:
        """Write the rows, and flush, so that a killed process loses none."""
        if self._writer is None:
            self._writer = self._library.SummaryWriter(str(self._folder))
        for row in rows:
            self._writer.add_scalar(row.name, row.value, row.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files, if they are this tracker's own."""
        if self._folder is not None and self._writer is not None:
            _finish("TensorBoard", self._writer.close)
            self._writer = None


class WandB:
    """A Weights & Biases run.

    Args:
        run: the run to log to. Without one: the run that is active when the first rows come (the
            one of Lightning's or Hugging Face's own logger), or else a new one.
        settings: for `wandb.init`, if it opens a run (`project`, `mode="offline"`, ...).

    The step is its own metric, `decaylab/step`, and the x axis of the recorded ones, because W&B's
    step counts the calls of all loggers of the run.
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        self._library = needed("wandb", "wandb", "this tracker")
        self._run, self._settings, self._opened_run = run, settings, False
        self._families: set[str] = set()

    def log(self, rows: Sequence[Row]) -> None:
        """Send the rows, one call a step."""
        if self._run is None:
            self._opened_run = self._library.run is None
            self._run = (
                self._library.init(**self._settings) if self._opened_run else self._library.run
            )
        for step, values in by_step(rows).items():
            for family in {name.split("/")[0] for name in values} - self._families:
                self._families.add(family)
                for pattern in (family, f"{family}/*"):
                    self._run.define_metric(pattern, step_metric=STEP)
            self._run.log({STEP: step, **values})

    def close(self) -> None:
        """Finish the run, if this tracker opened it."""
        if self._opened_run and self._run is not None:
            _finish("WandB", self._run.finish)
            self._run, self._opened_run = None, False


class MLflow:
    """An MLflow run.

    Args:
        run_id: the run to log to. Without one: the active run, or else a new one.
        experiment: the name of the experiment in which a new run is opened.
        tracking_uri: the server or database; by default what MLflow is set to.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        experiment: str = "decaylab",
        tracking_uri: str | None = None,
    ) -> None:
        self._library = needed("mlflow", "mlflow", "this tracker")
        self._run_id, self._experiment, self._uri = run_id, experiment, tracking_uri
        self._client: Any = None
        self._opened_run = False

    @property
    def run_id(self) -> str | None:
        """The run that is logged to; None until the first rows have come."""
        return self._run_id

    def log(self, rows: Sequence[Row]) -> None:
        """Send the rows, in requests of at most a thousand."""
        self._open()
        timestamp = int(time.time() * 1000)
        metrics = [
            self._library.entities.Metric(_mlflow_name(row.name), row.value, timestamp, row.step)
            for row in rows
        ]
        for first in range(0, len(metrics), REQUEST):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + REQUEST])

    def close(self) -> None:
        """Mark the run as finished, if this tracker opened it."""
        if self._opened_run:
            _finish("MLflow", lambda: self._client.set_terminated(self._run_id))
            self._opened_run = False

    def _open(self) -> None:
        if self._client is None:
            self._client = self._library.MlflowClient(tracking_uri=self._uri)
        active = self._library.active_run()
        if self._run_id is None and active is not None:
            self._run_id = active.info.run_id
        if self._run_id is None:
            existing = self._client.get_experiment_by_name(self._experiment)
            create = self._client.create_experiment
            experiment = create(self._experiment) if existing is None else existing.experiment_id
            self._run_id = self._client.create_run(experiment).info.run_id
            self._opened_run = True


def by_step(rows: Sequence[Row]) -> dict[int, dict[str, float]]:
    """Rows as step -> name -> value."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        steps.setdefault(row.step, {})[row.name] = row.value
    return steps


def _mlflow_name(name: str) -> str:
    """A name with what MLflow allows in one.

    >>> _mlflow_name("weight_norm/blocks.0[a]")
    'weight_norm/blocks.0_a_'
    """
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _finish(name: str, close: Any) -> None:
    """Close; if that fails, only warn: the script may still have a model to save."""
    try:
        close()
    except Exception as error:
        text = f"{name} could not be closed: {type(error).__name__}: {error}"
        warn_user(text)
