"""Lightning: `watch` as a callback. `KFAC` needs none: return it from `configure_optimizers`.

    trainer = Trainer(callbacks=[WatchCallback(every=100)])
    trainer.fit(module)
    trainer.callbacks[0].watched.records.series("effective_lr/net.0")

Automatic and manual optimization, gradient accumulation, resuming and `ModelParallelStrategy`
(`fully_shard` in `configure_model`) are covered; `FSDPStrategy` is refused, and strategies that
replace the optimizer (DeepSpeed) are not covered.
"""

import importlib
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from decaylab.curvature.preserve import bare
from decaylab.errors import Lacks, needed
from decaylab.integrations.trackers import by_step
from decaylab.networks.calling import Inputs, LogitsRule
from decaylab.networks.sharded import refuse_flat_parameters
from decaylab.optim.kfac import KFAC
from decaylab.probes import Watch, watch
from decaylab.probes.applied import moved
from decaylab.probes.watch import Probes, reusable
from decaylab.records import Row, Tracker

__all__ = ["WatchCallback"]

STEPS = "decaylab_steps"
"""Where a checkpoint has the steps of each optimizer that was watched."""


def _lightning() -> Any:
    """`lightning.pytorch` or `pytorch_lightning`, the one in use first: both are the same code."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in names:
        if name in sys.modules:
            return sys.modules[name]
    try:
        return importlib.import_module(names[0])
    except ImportError:
        return needed(names[1], "lightning", "this integration")


_library: Any = _lightning()


class WatchCallback(_library.Callback):  # type: ignore[misc,unused-ignore]
    """Watches the training of a LightningModule, and sends what it records to the loggers.

    Layers are named as in the watched module. After a resume, steps continue from the checkpoint.

    Args:
        every: optimizer steps between two records.
        probes: as for `watch`; "diagnosis" needs `inputs`.
        inputs: as for `watch`; moved to the module's device.
        folder: as for `watch`.
        trackers: as for `watch`, in addition to Lightning's loggers.
        log: whether Lightning's own loggers get the rows.
        module: the submodule to watch; by default K-FAC's model, or the whole module.
    """

    def __init__(
        self,
        *,
        every: int = 100,
        probes: Probes | str | None = None,
        inputs: Inputs = None,
        logits: LogitsRule = None,
        folder: str | Path | None = None,
        trackers: Iterable[Tracker] = (),
        log: bool = True,
        module: str | None = None,
    ) -> None:
        super().__init__()
        self._every, self._inputs, self._logits = every, inputs, logits
        self._probes = reusable(probes)
        self._folder, self._trackers, self._log = folder, tuple(trackers), log
        self._module = module
        self._watched: Watch | None = None
        # where the fit that is gone on with stood: Lightning's step, and the watch's own
        self._stood = (0, 0)
        self._metrics: dict[str, float] = {}

    @property
    def watched(self) -> Watch:
        """The watch of the latest fit, with its `records`."""
        if self._watched is None:
            raise Lacks("this callback", "records yet", "call trainer.fit first")
        return self._watched

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizer, which exists by now and has its state."""
        self._detach()
        refuse_flat_parameters(trainer.model)  # it wraps the module
        optimizers = list(trainer.optimizers)
        alone = optimizers[0] if len(optimizers) == 1 else None
        # DistributedDataParallel, where it wraps the module: it tells watch which process is first
        wrapped = trainer.model if bare(trainer.model) is bare(pl_module) else pl_module
        model = alone.model if isinstance(alone, KFAC) else wrapped
        if self._module is not None:
            model = pl_module.get_submodule(self._module)
        elif self._inputs is not None and _has_no_forward(bare(model)):
            remedy = 'name the part that returns the logits: WatchCallback(module="net")'
            raise Lacks(type(bare(model)).__name__, "forward for the inputs", remedy)
        first = trainer.is_global_zero  # one process writes
        trackers = [*self._trackers, *([_Loggers(trainer)] if self._log else [])]
        self._watched = watch(
            model,
            optimizers,
            every=self._every,
            probes=self._probes,
            inputs=moved(self._inputs, pl_module.device),
            logits=self._logits,
            steps_per_epoch=_steps_per_epoch(trainer),
            folder=self._folder if first else None,
            trackers=trackers if first else (),
        )
        if trainer.global_step:
            # it counts the steps of all optimizers together
            shared = trainer.global_step // len(trainer.optimizers)
            step, watched_step = self._stood
            self._watched.resume(watched_step if step == trainer.global_step else shared)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the steps: Lightning keeps their sum over all optimizers."""
        if self._watched is not None:
            checkpoint[STEPS] = self._watched.begun_steps

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore them."""
        steps = checkpoint.get(STEPS)
        self._stood = (0, 0) if steps is None else (checkpoint["global_step"], steps)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Take the hooks off; the records stay."""
        self._log_metrics(trainer)
        self._detach()
        self._stood = (trainer.global_step, self.watched.steps)  # another fit may go on from here

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Record what the module logged."""
        self._log_metrics(trainer)

    def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Record what the module logged."""
        if not trainer.sanity_checking:
            self._log_metrics(trainer)

    def _log_metrics(self, trainer: Any) -> None:
        """Outcomes, under the names that the module logs them by, where they are new."""
        now = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self._watched is not None:
            self._watched.log(**{k: v for k, v in now.items() if v != self._metrics.get(k)})
        self._metrics = now

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Also take the hooks off when training is interrupted, maybe on this process alone."""
        if self._watched is not None:
            self._watched.__exit__(type(exception))

    def _detach(self) -> None:
        if self._watched is not None:
            self._watched.detach()


@dataclass(frozen=True)
class _Loggers:
    """Lightning's loggers as one tracker."""

    trainer: Any

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in by_step(rows).items():
            for logger in self.trainer.loggers:
                logger.log_metrics(values, step=step)


def _has_no_forward(model: nn.Module) -> bool:
    return type(model).forward is _library.LightningModule.forward


def _steps_per_epoch(trainer: Any) -> int | None:
    """Optimizer steps in an epoch; None for data without a length."""
    batches = trainer.num_training_batches
    if not math.isfinite(batches):
        return None
    return max(1, math.ceil(batches / trainer.accumulate_grad_batches))
