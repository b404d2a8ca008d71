"""Runs whose device is behind: when each gets its next turn. The device is a clock of our own."""

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import pytest
import torch

from decaylab.data import load
from decaylab.training import (
    Execution,
    Progress,
    RunSpec,
    TrainingRun,
    backlog,
    interleave,
    train,
    train_to_end,
)
from decaylab.training.backlog import LEAD, Backlog

HOST = 1e-4  # seconds that the host needs to ask for a step


class Clock:
    now = 0.0

    def sleep(self, seconds):
        self.now += seconds


@dataclass
class Event:
    clock: Clock
    at: float

    def query(self):
        return self.clock.now >= self.at


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(backlog, "sleep", clock.sleep)
    monkeypatch.setattr(backlog, "perf_counter", lambda: clock.now)
    return clock


def run(clock, seconds, steps, *, backlog=None):
    """A run whose steps take so long on a stream of its own; inf: the first never ends."""
    backlog, ends = backlog or Backlog(), 0.0
    for step in range(1, steps + 1):
        clock.now += HOST
        ends = max(ends, clock.now) + seconds
        backlog.add(Event(clock, ends))
        yield Progress("step", "", 0, 1, step, steps, 0.0, backlog=backlog)


def test_runs_get_turns_in_proportion_to_the_pace_of_their_steps(clock):
    runs = {"long": run(clock, 4e-3, 500), "short": run(clock, 1e-3, 2000)}
    done = dict.fromkeys(runs, 0)
    for name, progress in interleave(runs):
        done[name] = progress.step
        if len(runs) == 2:  # either may have LEAD steps asked for that the other has not
            assert -4 * LEAD - 2 <= done["short"] - 4 * done["long"] <= LEAD + 2
    assert done == {"long": 500, "short": 2000}
    assert clock.now == pytest.approx(2.0, rel=0.02)  # as long as each takes alone


def test_a_run_never_has_more_than_its_lead_outstanding(clock):
    for asked, (_, progress) in enumerate(interleave({0: run(clock, 4e-3, 50)}), start=1):
        done = sum(clock.now >= HOST + 4e-3 * n for n in range(1, 51))
        assert asked == progress.step <= done + LEAD


def test_one_that_is_never_done_does_not_stop_the_others(clock):
    runs = {"stuck": run(clock, inf, 99), "a": run(clock, 1e-3, 99), "b": run(clock, 3e-3, 99)}
    turns = dict.fromkeys(runs, 0)
    interleaved = interleave(runs)
    while turns["b"] < 99:
        turns[next(interleaved)[0]] += 1
    assert turns == {"stuck": LEAD, "a": 99, "b": 99}
    interleaved.close()


def test_nobody_starves_beside_runs_that_are_always_ready(clock):
    """The host is what is short here: it asks for a step of each before it asks for a second."""
    runs = {n: run(clock, 0.0, 300) for n in range(5)} | {"long": run(clock, 4e-3, 20)}
    order = [name for name, _ in interleave(runs)]
    assert order.count("long") == 20
    last = len(order) - 1 - order[::-1].index("long")
    turns = [order[:last].count(n) for n in range(5)]
    assert max(turns) - min(turns) <= 1
    # it is ready after 40 turns of the others, and is then one of the next five
    places = [at for at, name in enumerate(order) if name == "long"][LEAD:]
    assert all(30 < after - before <= 46 for before, after in pairwise(places))


def test_one_that_joins_while_all_wait_is_next(clock):
    runs = {"first": run(clock, 1.0, LEAD + 1)}
    order = []
    for name, _ in interleave(runs):
        order.append(name)
        if len(order) == LEAD:
            runs["second"] = run(clock, 1.0, 2)
    assert order == ["first"] * LEAD + ["second"] * 2 + ["first"]


def test_a_turn_that_reads_comes_when_nothing_is_outstanding(clock):
    reading = Backlog()

    def reads():
        for progress in run(clock, 0.1, 3, backlog=reading):
            reading.reads_next = progress.step == 3
            yield progress
        assert clock.now >= 0.3
        reading.reads_next = False
        yield "read"

    order = [given for _, given in interleave({"reads": reads(), "other": run(clock, 1e-3, 200)})]
    before = [given.steps for given in order[: order.index("read")]]
    assert before.count(3) == 3
    assert before.count(200) == 200  # not one of them waited for the evaluation


def test_waiting_is_the_time_of_all_who_wait(clock):
    backlogs = [Backlog(), Backlog()]
    runs = {n: run(clock, 2e-3, 50, backlog=b) for n, b in enumerate(backlogs)}
    for _ in interleave(runs):
        pass
    assert backlogs[0].waited > 0
    assert sum(b.waited for b in backlogs) == pytest.approx(clock.now - 100 * HOST)


def test_an_error_of_the_device_is_left_to_the_turn_that_meets_it():
    class Broken:
        def query(self):
            raise RuntimeError("an illegal memory access was encountered")

    full = Backlog()
    for _ in range(LEAD):
        full.add(Broken())
    assert full.is_short()


def test_in_whatever_order_turns_come_each_run_gives_what_it_gives_alone(clock):
    digits, how = load("digits"), Execution(every_step=True, at_once=3)
    base = RunSpec(hidden=(8, 8), batch_norm=True, batch_size=256, epochs=2, lr_drop_every=1)
    specs = [
        replace(base, augment=True),
        replace(base, optimizer="adam", seed=3, epochs=3),
        replace(base, optimizer="kfac-g", refresh_every=3, invert_every=4, inversion_lag=2),
    ]
    draws = random.Random(0)

    def late(spec):
        for progress in train(spec, data=digits, execution=how):
            for _ in range(LEAD):
                progress.backlog.add(Event(clock, clock.now + draws.choice([0, 1e-3, 1e-2])))
            yield progress

    order, last = [], {}
    for number, progress in interleave({n: late(spec) for n, spec in enumerate(specs)}):
        order.append(number)
        last[number] = progress
    assert order[:9] != [0, 1, 2] * 3
    for number, spec in enumerate(specs):
        alone = train_to_end(spec, data=digits)
        found = last[number].values | {"train/seconds": 0}
        assert found == alone.values | {"train/seconds": 0}
        for key, value in alone.model.state_dict().items():
            assert torch.equal(last[number].model.state_dict()[key], value), (number, key)


def test_a_run_says_that_it_reads_next_and_its_part_of_the_waiting_is_time_at_work():
    spec = RunSpec(hidden=(8,), epochs=1).resolved()
    run = TrainingRun(spec, load("digits"))
    run.begin_epoch()
    with run.at_work():
        run.train_step()
        run.launch_evaluation(whole_train_set=False, between=lambda: None)
    assert run.backlog.reads_next
    assert run.backlog.is_short()  # on a CPU nothing is outstanding
    before = run.seconds
    run.backlog.waited += 10
    assert run.seconds == before + 10
    with run.at_work():
        run.measure()
    assert not run.backlog.reads_next
    assert before + 10 < run.seconds < before + 20
    assert run.state_dict()["seconds"] == run.seconds
