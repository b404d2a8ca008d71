"""A GPT under AdamW: what decay does to how far its layers turn, against the angles themselves."""

import importlib.util
import math
import sys
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch
from diagnosis.invariant_runs import angle
from torch import nn

from decaylab import diagnose, watch
from decaylab.diagnosis import Mechanism, Reason
from decaylab.diagnosis.rules import RULES
from decaylab.probes import FREE

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, EVERY, LENGTH = 400, 5, 64  # as the example itself trains


@pytest.fixture(scope="module")
def gpt():
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLES / "gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(EXAMPLES))
    return module


def trained(gpt, weight_decay, seed=0):
    """The watched run, and by layer the angle of each of its steps."""
    torch.manual_seed(seed)
    text = gpt.standard_library()
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(character) for character in text])
    model = gpt.GPT(len(alphabet), length=LENGTH, width=64, depth=2)
    optimizer = gpt.optimizer_for("adamw", model, 3e-3, weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS))
    )
    layers = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
    angles = {name: [] for name in layers}
    probes = [*FREE, "size_response"]
    inputs = tokens[None, :LENGTH]
    with watch(model, optimizer, every=EVERY, probes=probes, inputs=inputs) as watched:
        for _ in range(STEPS):
            starts = torch.randint(len(tokens) - LENGTH - 1, (16,))
            batch = torch.stack([tokens[i : i + LENGTH + 1] for i in starts.tolist()])
            logits = model(batch[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
            loss.backward()
            before = {name: weight.detach().clone() for name, weight in layers.items()}
            optimizer.step()
            for name, weight in layers.items():
                angles[name].append(angle(before[name].double(), weight.detach().double()))
            optimizer.zero_grad()
            schedule.step()
            watched.log(loss=loss)
    return watched, angles


@pytest.fixture(scope="module")
def runs(gpt):
    return trained(gpt, 1.0), trained(gpt, 0.0)


def measured(runs, layer):
    """The ratio of the two runs' angles over the second half of their steps, all of them."""
    late = [angles[layer][STEPS // 2 : -1] for _, angles in runs]
    return geometric_mean(a / b for a, b in zip(*late, strict=True) if a and b)


def test_decays_effect_on_rotation_is_that_of_the_angles(runs):
    """Within 10 %, though only every fifth step is recorded; and "acts" is the verdict."""
    found = diagnose(runs[0][0], runs[1][0])
    assert found["effective l"].verdict == "acts"
    assert found["effective l"].quantity == "rotation"
    rows = [motion for motion in found.motions if motion.turned is not None]
    assert len(rows) >= 10
    for motion in rows:
        assert motion.turned.value == pytest.approx(measured(runs, motion.layer), rel=0.1)
    assert found.outcome.name == "loss"


def test_the_baselines_angle_follows_from_the_decayed_run_alone(runs):
    """Within 10 % for each layer whose size hardly matters; of the others nothing is foretold."""
    decayed, (_, plain) = runs
    alone = diagnose(decayed[0])
    off = []
    for motion in alone.motions:
        foretold = motion.layer in plain and motion.size_response <= RULES.size_little
        assert (motion.turned is not None) == (motion.by_decay is not None) == foretold
        if not foretold:
            continue
        angles, own = plain[motion.layer], decayed[1][motion.layer]
        late = slice(STEPS // 2, -1)
        predicted = geometric_mean([a for a in own[late] if a]) / motion.turned.value
        off.append(predicted / geometric_mean([a for a in angles[late] if a]))
    assert len(off) >= 5  # Python 3.12 has another standard library, which is what the GPT reads
    assert off == pytest.approx([1.0] * len(off), abs=0.1)
    assert alone["effective l"].verdict == "acts"
    assert alone[Mechanism.JACOBIAN].because_of(Reason.JACOBIAN_ALONE)


def test_a_head_counts_by_its_size_and_most_of_the_body_does_not(runs):
    response = {m.layer: m.size_response for m in diagnose(runs[0][0]).motions}
    assert response["head"] == pytest.approx(1.0, abs=0.1)
    assert response["blocks.1.contract"] < 0.25
    roles = {m.layer: m.role for m in diagnose(runs[0][0]).motions}
    assert (roles["head"], roles["positions"], roles["norm"]) == ("head", "embedding", "gain")
