"""The words themselves: a snapshot of every sentence, in words.txt beside this file.

To write it anew after a change, and then read it aloud:

    UPDATE_WORDS=1 python -m pytest tests/diagnosis/test_words.py
"""

import ast
import difflib
import os
import re
import string
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosis.recorded import ScriptedLayer, records

import decaylab.diagnosis
from decaylab.diagnosis import Because, Diagnosis, Mechanism, Reason, Verdict, diagnose
from decaylab.diagnosis.advice import GroupAdvice
from decaylab.diagnosis.bursts import Burst
from decaylab.diagnosis.commands import Address, Places
from decaylab.diagnosis.effects import Change, ComparedWith, Effect, Motion, Spread
from decaylab.diagnosis.mechanisms import SecondOrderShares
from decaylab.diagnosis.outcome import Helped, Outcome
from decaylab.diagnosis.words.advice import group_text
from decaylab.diagnosis.words.findings import verdict_title
from decaylab.diagnosis.words.headline import headline
from decaylab.diagnosis.words.motions import insight, motion_legend, motion_table, motion_title
from decaylab.diagnosis.words.reasons import KINDS, sentence

SNAPSHOT = Path(__file__).with_name("words.txt")
EFFECT = Effect(
    1.6, 1.4, 2.51, ("weight_norm",), (100, 200), 11, ComparedWith.BASELINE, Spread.LAYERS
)
# What reasons carry; a sentence takes what it needs.
DATA = {
    "acts": 1.5,
    "balance": 2.5,
    "bound": 0.5,
    "budget": 400,
    "clip": 0.5,
    "by_lr": False,
    "bad": ["weight_norm/a"] * 3,
    "counts": {Verdict.ACTS: 2, Verdict.CANNOT_TELL: 1},
    "change": Change("rotation", EFFECT),
    "counting": (["a", "b", "c", "d", "e"], True),
    "epochs": 3,
    "exposure": 0.6,
    "factor": 3.3,
    "fields": {"lr": (0.1, 0.2)},
    "growth": 1.2,
    "grown": True,
    "holding": 0.3,
    "kind": "cautious",
    "largest": 2.0,
    "lasting": "weight_norm/a",
    "layer": "a",
    "layers": ["a", "b", "c", "d", "e"],
    "least": 1.0,
    "lengths": (200, 100),
    "longer": 2.1,
    "mechanisms": [Mechanism.EFFECTIVE_LR],
    "message": "the loss is nan",
    "most": 1.5,
    "name": "momentum",
    "norm": 5.0,
    "optimizer": "AdamW",
    "nothing": 1.2,
    "of": 10,
    "others": 2,
    "pair": (0.9, 0.8),
    "parameters": ["a.weight", "b.weight"],
    "remembers": False,
    "remedies": [Because(Reason.LOWER_DAMPING, {"grown": True})],
    "response": 0.98,
    "responses": {"a": 0.2, "b": 0.31, "c": 0.27},
    "limit": 0.25,
    "seen": 3.0,
    "share": 0.25,
    "smaller": 3.1,
    "full": 400.0,
    "enough": 22300.0,
    "probe": "jacobian_norm",
    "error": "RuntimeError: no such operation",
    "shares": SecondOrderShares(0.5, 0.2, estimated=True),
    "status": "interrupted",
    "step": 40,
    "some": ["a", "b"],
    "steps": 120.0,
    "taken": 0.3,
    "turned": EFFECT,
    "way": "strong",
    "why": [(Because(Reason.LAW_UNKNOWN), ["conv", "head"])],
}
OTHER_DATA = {
    Reason.BURST: {
        "burst": Burst("a", 40, 0.5, 2.0),
        "remedy": Because(Reason.SCALE_FREE_DAMPING),
    },
    Reason.CHOOSE_BY_OUTCOME: {"counts": Because(Reason.SIZE_COUNTS, {"response": 0.98})},
    Reason.DAMAGED: {"damaged": ["rows.jsonl, line 3: no JSON"] * 3},
    Reason.SEED_LEFT_OUT: {"why": Because(Reason.OTHER_LAYERS)},
    Reason.TOO_LITTLE: {"steps": (1, 200)},
}
PLACES = {
    "folders": Places((Address("runs/a"),), (Address("runs/b"),)),
    "one folder": Places((Address("runs/a"),)),
    "our own": Places(
        (Address("runs/a", ours=True, seed=0),), (Address("r b", ours=True, seed=0),)
    ),
    "our own, without checkpoints": Places(
        (Address("runs/a", True, 0, kept=False),), (Address("runs/b", True, 0),)
    ),
    "our own, unfinished": Places((Address("runs/a", True, 0, "interrupted"),)),
    "our own, of several": Places(
        (Address("runs/a", True, 0),), left_runs=True, left_baselines=True
    ),
    "in memory": Places((Address(),), (Address(),)),
}


def told(reason):
    return Because(reason, DATA | OTHER_DATA.get(reason, {}))


def outcome(verdict):
    interval = (-0.03, 0.1) if verdict is Helped.UNDECIDED else (0.03, 0.1)
    interval = (-0.1, -0.03) if verdict is Helped.NO else interval
    seeds = (3, 3) if verdict in (Helped.YES, Helped.NO, Helped.UNDECIDED) else (1, 1)
    known = {"run": 2.1, "baseline": 2.2, "seeds": seeds, "gain": 0.1}
    name = "gap" if verdict is Helped.UNKNOWN else "test_loss"
    return Outcome(verdict, name, **known, interval=interval if seeds[0] > 1 else None)


@pytest.fixture(scope="module")
def result():
    layers = {"conv": ScriptedLayer(growth=0.005, weight_decay=0.02)}
    return diagnose(records(layers), records({"conv": ScriptedLayer(growth=0.005)}))


def motions():
    def moved(layer, turned, rotation, response, role="weight", members=(), timescale=500.0):
        effect = replace(EFFECT, value=turned)
        numbers = (rotation, 0.02, timescale, 400, 5.0, effect, False, 1.1, response, 0.7, 0.6)
        return Motion(layer, role, members, True, *numbers)

    return (
        moved("blocks.0.qkv", 1.5, 0.019, 0.1),
        moved("blocks.0.out", 2.25, 0.01, 0.04),
        moved("head", 1.1, 0.002, 1.0, "head"),
        moved("norm", 3.0, 0.1, 1.0, "gain"),
    )


def with_motions(result: Diagnosis, moved):
    """The same diagnosis as if its layers had moved so."""
    changed = replace(result)
    vars(changed)["motions"] = tuple(moved)  # as functools.cached_property keeps them
    return changed


def everything(result: Diagnosis):
    for reason in Reason:
        several = PLACES if "{places" in reason.value else {"": Places()}
        for kind, places in several.items():
            name = f"{reason.name}, {kind}" if kind else reason.name
            yield name, sentence(told(reason), places)
    for helped in Helped:
        yield f"headline, {helped}", headline(replace(result, outcome=outcome(helped)))
    for diverged, seeds in (((1, 0), (1, 1)), ((0, 1), (1, 1)), ((1, 1), (1, 1)), ((1, 0), (3, 2))):
        mine, theirs = (a / b for a, b in zip(diverged, seeds, strict=True))
        helped = Helped.WORSE if mine > theirs else Helped.BETTER if mine < theirs else None
        ended = Outcome(helped or Helped.UNDECIDED, seeds=seeds, diverged=diverged)
        yield (
            f"headline, {diverged} of {seeds} diverged",
            headline(replace(result, outcome=ended)),
        )
    near = replace(outcome(Helped.WORSE), run=2.201, baseline=2.2, gain=-0.001)
    yield "headline, slightly worse", headline(replace(result, outcome=near))
    acts = {"verdict": Verdict.ACTS, "effect": EFFECT}
    quantities = ("effective_lr", "jacobian_norm", "effective_damping")
    each = zip(result.findings, quantities, strict=True)
    all_act = tuple(replace(finding, **acts, quantity=name) for finding, name in each)
    for which in (all_act[:2], all_act):
        yield f"headline, {len(which)} act", headline(replace(result, findings=which))
    yield "headline, no decay", headline(replace(result, decays=False))
    several = replace(result, decays=False, runs=("a", "b"))
    yield "headline, no decay in several runs", headline(several)
    for finding in result.findings:
        for verdict in Verdict:
            yield (
                f"title, {finding.mechanism}, {verdict}",
                verdict_title(replace(finding, verdict=verdict)),
            )
    less = replace(EFFECT, value=0.5)
    turned_less = replace(result.findings[0], verdict=Verdict.DOES_NOT_ACT, effect=less)
    for quantity in ("effective_lr", "rotation"):
        other_way = replace(turned_less, quantity=quantity)
        yield f"title, the other way, {quantity}", verdict_title(other_way)
    none_acts = (other_way, *(replace(f, effect=None) for f in result.findings[1:]))
    ended = replace(result, outcome=outcome(Helped.WORSE), findings=none_acts)
    yield "headline, the other way", headline(ended)
    moving = with_motions(result, motions())
    for number, line in enumerate(insight(moving)):
        yield f"insight {number}", line
    settled = with_motions(result, motions()[:1])
    yield "insight, settled", insight(settled)[-1]
    yield "insight, none settled", insight(with_motions(result, motions()[1:2]))[-1]
    hardly = with_motions(result, motions()[2:3])
    yield "insight, no layer turns further", insight(hardly)[0]
    yield "legend", motion_legend(moving)
    none = tuple(replace(f, verdict=Verdict.DOES_NOT_ACT) for f in moving.findings)
    worse = {"outcome": outcome(Helped.WORSE), "findings": none}
    yield (
        "headline, layers turn, no mechanism",
        headline(with_motions(replace(result, **worse), motions())),
    )
    by_angle = replace(moving.findings[0], quantity="rotation")
    rows = tuple(replace(by_angle.layers[0], layer=m.layer) for m in motions()[:2])
    by_angle = replace(by_angle, layers=rows)
    some = with_motions(replace(result, findings=(by_angle, *none[1:])), motions())
    yield "headline, some layers turn", headline(some)
    group = replace(motions()[0], layer="a + 2 more", role="", members=("a", "b", "c"))
    yield "legend, layers together", motion_legend(with_motions(result, (group,)))
    yield "title of several seeds", motion_title(replace(result, seeds=(result, result)))
    for steps in (200.0, 900.0):
        group = GroupAdvice(("a", "b"), "AdamW", "decoupled", 1e-3, 0.5, (0.3, 0.8), steps)
        yield f"suggested, {steps:g} steps", group_text(group, 400)
    headings, rows = motion_table(moving)
    yield "table", " | ".join([*headings, *rows[1]])


def test_the_words_are_those_of_the_snapshot(result):
    text = "".join(f"{name}: {sentence}\n" for name, sentence in everything(result))
    if os.environ.get("UPDATE_WORDS"):
        SNAPSHOT.write_text(text, encoding="utf-8")
    known = SNAPSHOT.read_text(encoding="utf-8")
    changed = list(difflib.unified_diff(known.splitlines(), text.splitlines(), lineterm="", n=0))
    assert not changed, "\n".join(changed)


def test_outcomes_have_the_digits_that_tell_them_apart(result):
    near = Outcome(Helped.WORSE, "d_loss", False, 1.38213, 1.38207, (1, 1), -6e-5)
    text = headline(replace(result, outcome=near))
    assert "d loss 1.38213 with decay, 1.38207 without" in text
    far = replace(near, run=1.5)
    assert "1.500 with decay, 1.382 without" in headline(replace(result, outcome=far))


def test_the_data_of_every_reason_is_written_in_a_known_way():
    for reason in Reason:
        for _, name, spec, _ in string.Formatter().parse(reason.value):
            assert not spec or spec in KINDS or re.fullmatch(r"\.?\d*g", spec), (reason, name)


def test_what_names_of_layers_have_in_them_is_no_template():
    odd = sentence(Because(Reason.COLLAPSED, {"layers": ["{step}"]}))
    assert "{step}" in odd


def test_sentences_are_whole(result):
    for name, text in everything(result):
        assert not re.search(r"\{|\}|  |None|<", text), (name, text)
        assert "RUN" not in text, (name, text)
        assert not re.search(r"\bBASE\b|BASELINE", text), (name, text)


def compared_strings(tree):
    """Strings that something is compared with, looked for in, or looked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            parts += [
                e for p in parts if isinstance(p, ast.Tuple | ast.List | ast.Set) for e in p.elts
            ]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            looks = ("startswith", "endswith", "find", "index", "match", "search", "count")
            parts = node.args if node.func.attr in looks else []
        elif isinstance(node, ast.match_case) and isinstance(node.pattern, ast.MatchValue):
            parts = [node.pattern.value]
        else:
            continue
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value, part.lineno


def readers():
    package = Path(decaylab.diagnosis.__file__).parent
    outside = ("cli/diagnose.py", "cli/advise.py", "report/diagnoses.py")
    return [*package.glob("*.py"), *(package.parent / name for name in outside)]


@pytest.mark.parametrize("path", readers(), ids=lambda path: path.name)
def test_nothing_is_compared_with_a_sentence(path):
    """Mending a sentence must not change a verdict."""
    found = list(compared_strings(ast.parse(path.read_text(encoding="utf-8"))))
    assert not [(text, line) for text, line in found if " " in text.strip()]


@pytest.mark.parametrize(
    "code", ['"less than twice" in why', 'why.startswith("it is frozen")', 'x == "does not act"']
)
def test_a_comparison_with_a_sentence_is_seen(code):
    assert list(compared_strings(ast.parse(code)))
