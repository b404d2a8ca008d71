"""Training: a run as a frozen spec, a loop that yields, records and resumes."""

from decaylab.training.build import (
    build_data,
    build_model,
    build_optimizer,
    load_run,
    register_optimizer,
)
from decaylab.training.evaluate import Evaluation, evaluate
from decaylab.training.execution import Execution
from decaylab.training.interleave import interleave
from decaylab.training.loop import Progress, Pruned, train, train_to_end
from decaylab.training.run import TrainingRun
from decaylab.training.signals import Interrupted
from decaylab.training.spec import RunSpec
from decaylab.training.transfer import NormTransfer

__all__ = [
    "Evaluation",
    "Execution",
    "Interrupted",
    "NormTransfer",
    "Progress",
    "Pruned",
    "RunSpec",
    "TrainingRun",
    "build_data",
    "build_model",
    "build_optimizer",
    "evaluate",
    "interleave",
    "load_run",
    "register_optimizer",
    "train",
    "train_to_end",
]
