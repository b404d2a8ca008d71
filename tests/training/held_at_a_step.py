"""`decaylab`, held before a step while a file is there: HOLD=FOLDER held_at_a_step.py train ...

A process that comes to step N while FOLDER/N exists writes FOLDER/N.RANK and waits until N is gone.
"""

import os
import time
from pathlib import Path

from decaylab.cli import main
from decaylab.training import TrainingRun

train_step = TrainingRun.train_step


def held_step(run):
    gate = Path(os.environ["HOLD"]) / str(run.step)
    if gate.exists():
        gate.with_name(f"{run.step}.{os.environ.get('RANK', '0')}").touch()
    while gate.exists():
        time.sleep(0.02)
    return train_step(run)


TrainingRun.train_step = held_step
main()
