"""Hugging Face: `watch` as a callback of `Trainer`, and which rows K-FAC counts.

    optimizer = KFAC(model, options=KFACOptions(counted_rows=labelled_rows(model)))
    trainer = Trainer(model, args, optimizers=(optimizer, None), callbacks=[WatchCallback()])

K-FAC uses the `.logits` of the model's output. Build it once the model is on its device, and set
`TrainingArguments(max_grad_norm=0)`: clipping gradients by their norm before preconditioning undoes
part of it (`kl_clip` is K-FAC's own way). With accelerate alone, an optimizer wrapped by `prepare`
works unchanged, in `watch` too.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decaylab.curvature.estimator import CountedRows
from decaylab.curvature.preserve import bare
from decaylab.errors import Lacks, needed
from decaylab.networks.calling import Inputs, LogitsRule
from decaylab.networks.sharded import device_of
from decaylab.probes import Watch, watch
from decaylab.probes.applied import moved
from decaylab.probes.watch import Probes, reusable
from decaylab.records import Tracker

__all__ = ["WatchCallback", "labelled_rows"]

_library: Any = needed("transformers", "transformers", "this integration")
# The label of rows that Hugging Face's losses leave out.
IGNORED = -100


class WatchCallback(_library.TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Watches a `Trainer`'s training.

    After a resume, steps continue from the checkpoint. To see the rows where `report_to` sends the
    loss, pass the tracker of that name: `WandB()` and `MLflow()` join the active run.

    Args:
        every: optimizer steps between two records.
        probes: as for `watch`; "diagnosis" needs `inputs`.
        inputs: as for `watch`: a batch as the model takes it; moved to the model's device.
        logits: as for `watch`.
        folder: as for `watch`.
        trackers: as for `watch`.
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
    ) -> None:
        self._every, self._inputs, self._logits = every, inputs, logits
        self._probes = reusable(probes)
        self._folder, self._trackers = folder, tuple(trackers)
        self._watched: Watch | None = None

    @property
    def watched(self) -> Watch:
        """The watch of the latest training, with its `records`."""
        if self._watched is None:
            raise Lacks("this callback", "records yet", "call trainer.train first")
        return self._watched

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the optimizer, which is prepared by now and has its state."""
        self._detach()
        model: nn.Module = kwargs["model"]
        first = state.is_world_process_zero  # one process writes
        self._watched = watch(
            model,
            kwargs["optimizer"],
            every=self._every,
            probes=self._probes,
            inputs=moved(self._inputs, device_of(model)),
            logits=self._logits,
            steps_per_epoch=_steps_per_epoch(
                kwargs.get("train_dataloader"), args.gradient_accumulation_steps
            ),
            folder=self._folder if first else None,
            trackers=self._trackers if first else (),
        )
        if state.global_step:
            self._watched.resume(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record losses and metrics, under the names that the trainer logs them by."""
        logs = kwargs.get("logs") or {}
        outcomes = {k: v for k, v in logs.items() if k == "loss" or k.startswith("eval_")}
        speeds = ("_runtime", "_per_second", "_time")
        if self._watched is not None:
            self._watched.log(**{k: v for k, v in outcomes.items() if not k.endswith(speeds)})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks off; the records stay."""
        self._detach()

    def _detach(self) -> None:
        if self._watched is not None:
            self._watched.detach()


def labelled_rows(model: nn.Module) -> CountedRows:
    """The rows of the logits that this model's loss counts, for `KFACOptions(counted_rows=...)`.

    Rows [B] or [B, T] whose label is not -100; for a causal language model, those whose *next*
    token has such a label. All rows if `labels` is not given, or not shaped like the rows. Needed
    if sequences are padded; without it, K-FAC takes the mean over padding too.
    """
    inner: Any = bare(model)
    causal = _library.loss.loss_utils.ForCausalLMLoss
    shifted = getattr(inner, "loss_function", None) is causal

    def rows(kwargs: Mapping[str, Any], logits: Tensor) -> Tensor | None:
        labels = kwargs.get("labels")
        if not isinstance(labels, Tensor) or labels.shape != logits.shape[:-1]:
            return None
        counted = labels != IGNORED
        if not shifted:
            return counted
        return torch.cat([counted[..., 1:], torch.zeros_like(counted[..., :1])], -1)

    return rows


def _steps_per_epoch(loader: Any, accumulation: int) -> int | None:
    """Optimizer steps in an epoch; None for data without a length."""
    try:
        return max(1, math.ceil(len(loader) / accumulation))
    except TypeError:
        return None
