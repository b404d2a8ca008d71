"""Rounds alone, told to an observer that only writes down what it hears."""

import gc
import weakref

import pytest
import torch
from torch import nn

from decaylab.probes.rounds import Rounds


class Listener:
    def __init__(self, model, optimizers):
        self.model, self.optimizers, self.steps = model, tuple(optimizers), 0
        self.names = {
            id(optimizer): name for optimizer, name in zip(optimizers, "ab", strict=False)
        }
        self.heard = []

    def wants_step(self):
        return self.steps == 2

    def count(self, steps):
        self.steps += steps

    def round_begins(self):
        self.heard.append("(")

    def step_begins(self, optimizer, *, closure):
        self.heard.append(self.names[id(optimizer)] + ("!" if closure else ""))

    def step_ended(self, optimizer):
        self.heard.append(".")

    def round_ended(self):
        self.steps += 1
        self.heard.append(")")

    def optimizer_met(self, optimizer, replaced):
        self.names[id(optimizer)] = "c"
        self.heard.append(f"[c for {''.join(self.names[id(o)] for o in replaced) or 'none'}]")
        kept = [o for o in self.optimizers if o not in replaced]
        self.optimizers = (*kept, optimizer)

    def failed(self, what, error):
        self.heard.append(f"{what} failed")


def problem():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model, [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in range(3)]


def heard(steps, end=True, arrange=None):
    """What is heard where three optimizers step in this order, of which a and b are watched."""
    model, optimizers = problem()
    by_name = dict(zip("abc", optimizers, strict=True))
    listener = Listener(model, optimizers[:2])
    rounds = Rounds(listener)
    if arrange is not None:
        arrange(listener, by_name)
    for name in steps:
        by_name[name].step()
    if end:
        rounds.end()
    rounds.detach()
    for optimizer in optimizers:
        optimizer.step()  # nobody hears of it
    assert not any(o._optimizer_step_pre_hooks for o in optimizers)
    return "".join(listener.heard)


@pytest.mark.parametrize(
    ("steps", "rounds"),
    [
        ("abab", "(a.b.)(a.b.)"),
        ("ba", "(b.a.)"),
        ("aab", "(a.)(a.b.)"),  # one that steps again ends the round
        ("aba", "(a.b.)(a.)"),  # `end` ends the last
        ("abcabc", "(a.b.)[c for none].(a.b.c.)"),  # its first step belongs to no round
        ("cab", "[c for none](c.a.b.)"),  # no round before
    ],
)
def test_which_steps_make_a_round(steps, rounds):
    assert heard(steps) == rounds


def test_a_round_that_is_not_ended_is_not_told_of():
    assert heard("a", end=False) == "(a."


def test_an_optimizer_that_takes_the_place_of_another():
    def arrange(listener, by_name):
        by_name["c"].add_param_group({"params": by_name["b"].param_groups[0]["params"]})

    assert heard("abcac", arrange=arrange) == "(a.b.)[c for b](c.a.)(c.)"


def test_a_closure_is_told_of():
    model, (optimizer, *_) = problem()
    listener = Listener(model, [optimizer])
    Rounds(listener)
    optimizer.step(lambda: 0.0)
    optimizer.step(closure=None)
    assert "".join(listener.heard) == "(a!.)(a.)"


@pytest.mark.parametrize(
    ("method", "what"),
    [("round_begins", "snapshot"), ("step_ended", "gradients"), ("round_ended", "records")],
)
def test_errors_of_the_observer_do_not_reach_the_training(method, what):
    def arrange(listener, by_name):
        def broken(*_, **__):
            raise RuntimeError

        setattr(listener, method, broken)

    assert f"{what} failed" in heard("ab", arrange=arrange)


def test_replays_are_asked_for_and_counted():
    model, optimizers = problem()
    listener = Listener(model, optimizers)
    rounds = Rounds(listener)
    for _ in range(2):
        assert not rounds.wants_step()
        rounds.step_replayed()
    assert rounds.wants_step()


def test_torch_keeps_no_watch_alive():
    """Its hook for all optimizers outlives the watched ones, and holds neither them nor us."""
    model, optimizers = problem()
    listener = Listener(model, optimizers)
    alive = weakref.ref(listener), weakref.ref(Rounds(listener))
    del listener, optimizers
    gc.collect()
    assert not any(reference() for reference in alive)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
