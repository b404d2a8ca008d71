"""Trains one spec in processes that are killed (SIGKILL) at random moments, until one finishes.

Usage: killed_runs.py SPEC.toml RUNS SEED. Prints, per process, the step it started from and how it
was killed. The moments: between steps, before and after each rename, while the checkpoint's file is
half written (in its own thread, beside the steps), and in the middle of a line of rows.
"""

import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from decaylab.data import load
from decaylab.records import RunStore, files
from decaylab.records.rows import RowWriter
from decaylab.training import Execution, RunSpec, checkpoint, train_to_end
from decaylab.training.run import TrainingRun


class Countdown:
    """Kills this process at a moment that is so many moments away."""

    def __init__(self, moments, log):
        self.left, self.log = moments, log

    def is_over(self):
        self.left -= 1
        return self.left <= 0  # the thread that writes counts too, and may have passed it by

    def kill(self, where):
        os.write(self.log, f"killed {where}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def prepare(countdown):
    """Put the countdown into the functions that write, and into the step."""
    step, rename, save = TrainingRun.train_step, os.replace, checkpoint.save_file
    write = RowWriter._write

    def killing_step(run):
        if countdown.is_over():
            countdown.kill("in a step")
        return step(run)

    def killing_rename(source, target):
        if countdown.is_over():
            countdown.kill(f"before a rename to {Path(target).name}")
        rename(source, target)
        if countdown.is_over():
            countdown.kill(f"after a rename to {Path(target).name}")

    def killing_save(tensors, filename, metadata):
        save(tensors, filename, metadata)
        if countdown.is_over():
            os.truncate(filename, os.path.getsize(filename) // 2)
            countdown.kill("while a checkpoint was written")

    def killing_write(writer, lines):
        if countdown.is_over():
            with writer.path.open("ab") as file:
                file.write("\n".join(lines).encode()[: max(len(lines[0]) // 2, 1)])
            countdown.kill("in a line of rows")
        write(writer, lines)

    TrainingRun.train_step, RowWriter._write = killing_step, killing_write
    files.os.replace, checkpoint.save_file = killing_rename, killing_save


def child(spec, data, store, moments, log):
    begin = TrainingRun.load_state_dict

    def logged_begin(run, state):
        begin(run, state)
        os.write(log, f"continued from {run.step}\n".encode())

    TrainingRun.load_state_dict = logged_begin
    if moments:
        prepare(Countdown(moments, log))
    train_to_end(spec, data=data, store=store, execution=Execution(checkpoint_every=0.0))
    os.write(log, b"finished\n")


def main():
    torch.set_num_threads(1)
    spec = RunSpec.from_file(sys.argv[1])
    store, chance = RunStore(sys.argv[2]), random.Random(int(sys.argv[3]))
    data = load("digits")
    train_to_end(replace(spec, epochs=1), data=data)  # what torch imports late, once for all
    for round_number in range(40):
        moments = chance.randint(1, 14) if round_number < 12 else 0
        process = os.fork()
        if process == 0:
            child(spec, data, store, moments, sys.stdout.fileno())
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if status == 0:
            return
        if os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(1)
    sys.exit(1)


if __name__ == "__main__":
    main()
