"""The sentences about decay operators, all of them."""

import math
from typing import get_args

from decaylab.audits import AuditCheck, DecayReason
from decaylab.optim.decay_operator import DecayOperator, OperatorKind
from decaylab.optim.table import DecayProblem, Problem
from decaylab.optim.table_words import KINDS, explain_operator

ONCE = (1.0, 1.0)
OPERATORS = {
    DecayOperator("decoupled", ONCE): "outside the step, times lr",
    DecayOperator("decoupled", (2.0, 2.0)): "outside the step, times lr, 2 times",
    DecayOperator(
        "decoupled", (0.1, 1.0)
    ): "outside the step, times lr, 0.1 to 1 times, depending on step, gradients or shape",
    DecayOperator(
        "masked", ONCE, share=0.5
    ): "outside the step, at some entries at a time (50% of them)",
    DecayOperator(
        "unknown", along=0.5, across=2.0
    ): "none of the known kinds (0.5 lr wd |W| along the weight, 2 across)",
    DecayOperator("none", unasked=1e-4): "decays by 0.0001 lr without weight decay",
}
TWICE = DecayOperator("decoupled", (2.0, 2.0))
NAMES = ("a", "b", "c", "d", "e")
CHECKS = {
    DecayReason.NAMED: ({"operator": TWICE}, "decoupled: outside the step, times lr, 2 times"),
    DecayReason.IGNORED: ({}, "a weight decay is set, but nothing decays"),
    DecayReason.UNKNOWN: (
        {"along": 0.5, "across": 2.0},
        "no known operator: it removes 0.5 lr wd |W| along the weight and 2 across",
    ),
    DecayReason.NOT_TRIED: ({"error": "E: x"}, "it could not be tested (E: x)"),
    DecayReason.NOTHING_SEEN: (
        {},
        "no known operator: its steps are not finite, or do not depend on the gradient",
    ),
    DecayReason.OTHER_KIND: (
        {"kind": "l2", "expected": "decoupled", "why": "name"},
        "it is l2, not decoupled, as its name says",
    ),
    DecayReason.ONCE: ({}, "applied once per step"),
    DecayReason.REPEATED: ({"times": 2}, "applied 2 times per step"),
    DecayReason.SCALED: (
        {"least": 0.1, "most": 1.0},
        "scaled by 0.1 to 1, depending on the step and on the gradients",
    ),
    DecayReason.FORMATS_RIGHT: ({}, "the same if parameters differ in number format"),
    DecayReason.FORMATS_REPEATED: (
        {"times": 3},
        "applied 3 times per step if parameters differ in number format",
    ),
    DecayReason.GROUPS_RIGHT: ({}, "each param group has its own weight decay"),
    DecayReason.GROUPS_LOST: (
        {"asked": [0.1, 0.0], "got": [0.05, 0.05]},
        "groups that ask for 0.1, 0 get 0.05, 0.05",
    ),
    DecayReason.VECTORS_ALIKE: ({}, "vectors decay like matrices"),
    DecayReason.VECTORS_OTHERWISE: (
        {"operator": DecayOperator("ignored")},
        "ignored: set, but nothing decays",
    ),
    DecayReason.NOTHING_UNASKED: ({}, "nothing decays with weight decay 0"),
    DecayReason.UNASKED: (
        {"strength": 0.5},
        "with weight decay 0 it still decays, by 0.5 lr per step",
    ),
    DecayReason.NO_DECAY: ({}, "no weight decay is set"),
    DecayReason.TABLE_PROBLEM: (
        {"problem": DecayProblem(Problem.IGNORED, ("a",), {"optimizer": "X"})},
        "X ignores its weight decay: a",
    ),
}
PROBLEMS = {
    Problem.SHARED: (
        {},
        "stepped and decayed more than once: a, b, c and 2 more; give each to one optimizer",
    ),
    Problem.UNSTEPPED: (
        {},
        "trainable and in no optimizer: a, b, c and 2 more; add them, or freeze them",
    ),
    Problem.MISSED: (
        {},
        "decayed, unlike most parameters of normalisations: a, b, c and 2 more; if those are left"
        " out by name, the list misses some",
    ),
    Problem.FOREIGN: ({"count": 3}, "the optimizers step 3 parameters that are not the model's"),
    Problem.IGNORED: ({"optimizer": "X"}, "X ignores its weight decay: a, b, c and 2 more"),
    Problem.LOST: (
        {"optimizer": "X", "format": "float16"},
        "X's decay is lost to rounding, because W (1 - lr x decay) is W in float16: a, b, c and 2"
        " more; keep the weights in float32, with autocast if need be",
    ),
    Problem.REPEATED: (
        {"optimizer": "X", "times": 2},
        "X applies its weight decay 2 times per step: a, b, c and 2 more",
    ),
    Problem.UNASKED: (
        {"optimizer": "X", "strength": 0.5},
        "X decays without weight decay, by 0.5 lr per step: a, b, c and 2 more",
    ),
    Problem.UNKNOWN: (
        {"optimizer": "X", "along": 0.5, "across": 2.0},
        "X decays in none of the known ways (0.5 lr wd |W| along the weight, 2 across): a, b, c"
        " and 2 more",
    ),
}


def test_operators():
    assert set(KINDS) == set(get_args(OperatorKind))
    for operator, words in OPERATORS.items():
        assert explain_operator(operator) == words
    assert explain_operator(DecayOperator("l2", ONCE), preconditioned=True) == (
        "in the gradient, then preconditioned"
    )
    assert explain_operator(DecayOperator("none"), stepped=False) == "not in this optimizer"


def test_every_reason_has_its_sentence():
    assert CHECKS.keys() == set(DecayReason)
    for reason, (data, words) in CHECKS.items():
        assert AuditCheck("x", True, reason, data).words == words


def test_every_problem_has_its_sentence():
    assert PROBLEMS.keys() == set(Problem)
    for problem, (data, words) in PROBLEMS.items():
        assert DecayProblem(problem, NAMES, data).words == words
    untried = {"optimizer": "X", "along": math.nan, "across": math.nan}
    assert DecayProblem(Problem.UNKNOWN, ("a",), untried).words == (
        "X could not be tested, so its decay is unknown: a"
    )
