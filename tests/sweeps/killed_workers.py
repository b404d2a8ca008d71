"""Reproduces a small grid in processes that are killed at random moments, or in two at a time.

Usage: killed_workers.py RUNS SEED KILLS. With KILLS = 0 two processes share the folder; each
prints the runs it made. The moments are those of training/killed_runs.py: in a step, around a
rename, while a checkpoint or a line of rows is written.
"""

import os
import random
import signal
import sys
import tempfile
from functools import cache

import torch
from training.killed_runs import Countdown, prepare

from decaylab.data import load
from decaylab.paper import cells, select
from decaylab.paper.plan import plan
from decaylab.records import RunStore
from decaylab.sweeps.worker import Worker, WorkerOptions


def small_grid():
    """Fig. 4's four schemes and a K-FAC pair: two runs wait for a third one's norms."""
    chosen = select(cells("fig4", "smoke"), ["network=vgg16"])
    return plan([*chosen, *select(cells("fig7", "smoke"), ["network=vgg16"])], tier="smoke")


@cache
def digits():
    return load("digits")


def reproduce(runs, checkpoint_every=0.0):
    how = WorkerOptions(torch.device("cpu"), checkpoint_every=checkpoint_every, poll=0.05)
    reproduction = Worker(small_grid(), RunStore(runs), how)
    reproduction._data["digits"] = digits()
    for _ in reproduction.run():
        pass
    return reproduction.outcome


def in_a_process(work):
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        work()
        sys.stdout.flush()
        os._exit(0)
    return process


def main():
    torch.set_num_threads(1)
    runs, chance, kills = sys.argv[1], random.Random(int(sys.argv[2])), int(sys.argv[3])

    def make():
        print("made", *reproduce(runs).finished)

    def make_until_killed():
        prepare(Countdown(chance.randint(1, 35), sys.stdout.fileno()))
        reproduce(runs)
        print("not killed")

    with tempfile.TemporaryDirectory() as folder:
        reproduce(folder, checkpoint_every=60.0)  # what torch imports late, once for all
    if kills == 0:
        processes = [in_a_process(make) for _ in range(2)]
        sys.exit(max(os.waitpid(process, 0)[1] for process in processes) != 0)
    for _ in range(kills):
        _, status = os.waitpid(in_a_process(make_until_killed), 0)
        if status and os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(1)
        chance.random()  # the child drew from its own copy
    _, status = os.waitpid(in_a_process(make), 0)
    sys.exit(status != 0)


if __name__ == "__main__":
    main()
