"""Reproduces a small grid in processes that are killed at random moments.

Usage: killed_workers.py RUNS SEED KILLS PROCESSES. So many processes share the folder; one that is
killed is started again, until there were KILLS kills, and the last ones end. Each that ends prints
the runs it made. The moments are those of training/killed_runs.py (in a step, around a rename,
while a checkpoint or a line of rows is written) and those around the creation of an owner's file.
File locks exclude nobody here.
"""

import fcntl
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
from decaylab.records import RunStore, ownership
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
    process = os.fork()
    if process == 0:
        work()
        os._exit(0)
    return process


def prepare_owners(countdown):
    """Kill around the creation of an owner's file too."""
    create = ownership._create

    def killing_create(path, owner):
        if countdown.is_over():
            countdown.kill(f"before a claim by {path.name}")
        made = create(path, owner)
        if countdown.is_over():
            countdown.kill(f"after a claim by {path.name}")
        return made

    ownership._create = killing_create


def main():
    torch.set_num_threads(1)
    fcntl.flock = fcntl.lockf = lambda *given: None
    runs, chance = sys.argv[1], random.Random(int(sys.argv[2]))
    kills, processes = map(int, sys.argv[3:])

    def make():
        line = " ".join(["made", *reproduce(runs).finished])
        # whole: `print` may write word by word (PYTHONUNBUFFERED), into the line of another process
        os.write(sys.stdout.fileno(), f"{line}\n".encode())

    def make_until_killed():
        countdown = Countdown(moments, sys.stdout.fileno())
        prepare(countdown)
        prepare_owners(countdown)
        make()

    with tempfile.TemporaryDirectory() as folder:
        reproduce(folder, checkpoint_every=60.0)  # what torch imports late, once for all
    under_way = set()
    while True:
        while len(under_way) < processes:
            moments = chance.randint(1, 35)
            under_way.add(in_a_process(make_until_killed if kills > 0 else make))
            kills -= 1
        process, status = os.wait()
        under_way.remove(process)
        if status not in (0, signal.SIGKILL):  # an error of its own: the runs it made are not told
            sys.exit(1)
        if status == 0 and kills <= 0:
            break
    statuses = [os.waitpid(process, 0)[1] for process in under_way]
    statuses.append(os.waitpid(in_a_process(make), 0)[1])  # what a killed one left at the very end
    sys.exit(any(status not in (0, signal.SIGKILL) for status in statuses))


if __name__ == "__main__":
    main()
