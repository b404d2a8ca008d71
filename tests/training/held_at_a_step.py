"""`decaylab`, held before a step while a file is there: HOLD=FOLDER held_at_a_step.py train ...

A process that comes to step N while FOLDER/N exists writes FOLDER/held.N.RANK and waits until N is
gone. If it gets a signal there, it writes FOLDER/told.N.RANK.
"""

import os
import time
from pathlib import Path

from decaylab.cli import main
from decaylab.training import TrainingRun
from decaylab.training.signals import requests

train_step = TrainingRun.train_step


def held_step(run):
    folder = Path(os.environ["HOLD"])
    gate, mark = folder / str(run.step), f"{run.step}.{os.environ.get('RANK', '0')}"
    if gate.exists():
        (folder / f"held.{mark}").touch()
    while gate.exists():
        if requests.received is not None:
            (folder / f"told.{mark}").touch()
        time.sleep(0.02)
    return train_step(run)


if __name__ == "__main__":
    TrainingRun.train_step = held_step
    main()
