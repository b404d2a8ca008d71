"""Suggestions and conversions against simulated dynamics; margins are stated beside each."""

import math

import pytest
import torch
from diagnosis.recorded import ScriptedLayer, only, reasons, records
from refusals import refuses

from decaylab.diagnosis import Reason, Stepping, convert_decay, suggest
from decaylab.errors import Conflict, Lacks, OutOfRange, Range, UnknownName
from decaylab.optim.first_order import adam, sgd
from decaylab.optim.laws import balance

SIZE = 2000  # a random direction in so many dimensions is orthogonal to W but for 1/sqrt(2000)


def orthogonal_noise(weight, generator):
    """The gradient of a scale-invariant loss in a noisy landscape: (I - uu') xi / |W|, |xi| = 1."""
    noise = torch.randn(SIZE, generator=generator, dtype=torch.float64) / math.sqrt(SIZE)
    norm = weight.norm()
    unit = weight / norm
    return (noise - (noise @ unit) * unit) / norm


def simulate(build, steps, start=1.0):
    """Norms and rotations of every step, `build` making the optimizer of one group."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    weight = torch.nn.Parameter(start * weight / weight.norm())
    optimizer = build([{"params": [weight]}])
    norms, turns = [], []
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = orthogonal_noise(weight.detach(), generator)
        optimizer.step()
        cosine = float(before @ weight.detach() / before.norm() / weight.detach().norm())
        turns.append(math.acos(min(cosine, 1.0)))
        norms.append(float(weight.detach().norm()))
    return norms, turns


def with_decay(weight_decay, decay):
    return lambda groups: [
        {**group, "weight_decay": weight_decay, "decay": decay} for group in groups
    ]


SIMULATED = {
    "sgd, l2": ("sgd", "l2", 0.1, 0.9, 1e-3),
    "sgd, decoupled": ("sgd", "decoupled", 0.1, 0.9, 1e-2),
    "sgd without momentum": ("sgd", "l2", 0.5, 0.0, 4e-3),
    "adam": ("adam", "decoupled", 1e-3, 0.9, 1.0),
}


@pytest.mark.parametrize("case", SIMULATED)
def test_equilibrium_norm_and_rotation(case):
    """Norm within 3 %, rotation per step within 5 % of 500 simulated steps' mean."""
    kind, decay, lr, momentum, weight_decay = SIMULATED[case]
    grouped = with_decay(weight_decay, decay)
    if kind == "sgd":
        norms, turns = simulate(lambda g: sgd(grouped(g), lr=lr, momentum=momentum), 2000)
    else:
        norms, turns = simulate(lambda g: adam(grouped(g), lr=lr, betas=(momentum, 0.999)), 2000)
    stepping = Stepping(kind, lr, decay, momentum)
    shrink = convert_decay(weight_decay, stepping, stepping).shrink
    # growth of |W|^2 by pushes at |W| = 1, in the long run: SGD's (lr |g| / (1 - m))^2; Adam's
    # steps are g / sqrt(mean g^2) element by element, so that lr^2 a weight
    growth, e = ((lr / (1 - momentum)) ** 2, -1.0) if kind == "sgd" else (lr**2 * SIZE, 0.0)
    rested = stepping.law.equilibrium(growth, 1.0, shrink)
    assert stepping.law.elasticity() == e
    assert torch.tensor(norms[1500:]).mean() == pytest.approx(rested.norm, rel=0.03)
    assert torch.tensor(turns[1500:]).mean() == pytest.approx(rested.rotation, rel=0.05)


def test_damped_kfac_balances_between_the_two_laws():
    """Step |W| / (c + damping |W|^2) (I - uu') xi: the elasticity is 2 share - 1. Within 5 %."""
    lr, curvature, damping, weight_decay = 0.05, 1.0, 1.0, 0.005

    def grown(norm):
        return (lr * norm / (curvature + damping * norm**2)) ** 2

    norm = 2.0
    for _ in range(50_000):
        norm = math.sqrt((norm * (1 - lr * weight_decay)) ** 2 + grown(norm))
    at = 1.05 * norm  # measured a little away from it
    share = curvature / (curvature + damping * at**2)
    assert balance(grown(at), at, lr * weight_decay, 2 * share - 1)[0] == pytest.approx(
        norm, rel=0.05
    )


@pytest.mark.parametrize(("weight_decay", "less"), [(1e-4, False), (8e-3, True)])
def test_a_balance_beyond_all_floats_is_said_to_be_far(weight_decay, less):
    """K-FAC that is almost undamped: pushes and decay are both in proportion to |W|^2."""
    layer = ScriptedLayer(
        growth=1e-3, weight_decay=weight_decay, power=0, damping=1e-9, share=1 - 1e-5
    )
    (row,) = suggest(records({"conv": layer})).layers
    assert row.suggested == pytest.approx(1e-3 / 2 / layer.lr, rel=0.05)
    assert row.equilibrium is None
    assert only(row.notes, Reason.FAR_SMALLER if less else Reason.FAR_LARGER)


@pytest.mark.parametrize("e", [-1.0, 0.0])
def test_the_suggestion_holds_the_norm_that_was_asked_for(e):
    """A run without decay; the suggested decay, put in, keeps |W| within 3 % of the start's."""
    power = 2 if e < 0 else 1
    free = ScriptedLayer(growth=0.004, power=power)
    advised = suggest(records({"conv": free, "head": ScriptedLayer(invariant=False, growth=0.01)}))
    held = ScriptedLayer(growth=0.004, power=power, weight_decay=advised.weight_decay)
    assert held.norms(5000)[-1] == pytest.approx(free.norms(1)[0], rel=0.03)
    conv, head = advised.layers
    assert conv.target == pytest.approx(1.0, rel=0.01)
    assert head.suggested is None
    assert reasons(head) == {Reason.CHOOSE_BY_OUTCOME}
    # the same from a run that decays already, and the present equilibrium with it
    decayed = ScriptedLayer(growth=0.004, power=power, weight_decay=0.05)
    again = suggest(records({"conv": decayed}, steps=3000, every=20), norm_at=1)
    assert again.weight_decay == pytest.approx(advised.weight_decay, rel=0.05)
    assert again.layers[0].equilibrium == pytest.approx(decayed.norms(20_000)[-1], rel=0.02)


@pytest.mark.parametrize(
    "other", [{"lr": 0.01}, {"settings": {"setting_momentum": 0.9}, "decay": "l2"}]
)
def test_layers_that_are_stepped_otherwise_have_no_one_value(other):
    """A third of it would hold one layer, and ten times as much the other."""
    first = ScriptedLayer(growth=0.004, weight_decay=1e-3, decay=other.get("decay", "decoupled"))
    second = ScriptedLayer(**{"growth": 0.004, "weight_decay": 1e-3} | other)
    found = suggest(records({"a": first, "b": second}))
    assert found.weight_decay is None
    assert found.notes[-1].reason is Reason.NO_ONE_VALUE
    assert [len(group.layers) for group in found.groups] == [1, 1]
    a, b = (row.suggested for row in found.layers)
    assert max(a, b) / min(a, b) == pytest.approx(10, rel=0.05)
    alike = suggest(records({"a": first, "b": first}))
    assert alike.weight_decay == pytest.approx(alike.layers[0].suggested, rel=1e-12)


def test_a_norm_on_its_way_is_said_to_be():
    """Adam's law: the distance of |W|^2 from its balance falls by exp(-2 s) a step."""
    layer = ScriptedLayer(growth=1e-4, power=1, weight_decay=0.02)  # s = 0.002: |W|^2 goes to 0.025
    (row,) = suggest(records({"conv": layer}, steps=400)).layers
    norms = layer.norms(5000)
    assert row.equilibrium == pytest.approx(norms[-1], rel=0.01)
    note = only(row.notes, Reason.ON_ITS_WAY)
    assert (note["norm"], note["balance"]) == (pytest.approx(norms[399]), row.equilibrium)
    assert note["steps"] == pytest.approx(250)
    left = (norms[649] ** 2 - norms[-1] ** 2) / (norms[399] ** 2 - norms[-1] ** 2)
    assert left == pytest.approx(math.exp(-1), rel=0.01)
    (row,) = suggest(records({"conv": layer}, steps=4000)).layers
    assert Reason.ON_ITS_WAY not in reasons(row)


def test_a_balance_far_from_what_was_seen_is_not_given_as_a_number():
    layer = ScriptedLayer(growth=1e-6, power=1, weight_decay=0.02)  # |W|^2 goes to 2.5e-4
    (row,) = suggest(records({"conv": layer}, steps=400)).layers
    norms = layer.norms(20_000)
    assert norms[-1] < norms[399] / 10
    assert row.equilibrium is None
    assert only(row.notes, Reason.FAR_SMALLER)["norm"] == pytest.approx(norms[399])


def test_a_rotation_that_was_asked_for():
    (row,) = suggest(records({"conv": ScriptedLayer(growth=0.004)}), rotation=0.05).layers
    assert row.rotation == pytest.approx(0.05)
    assert row.suggested * 0.1 * 2 == pytest.approx(0.05**2)  # momentum 0: rotation^2 = 2 lr wd
    with refuses(OutOfRange, name="rotation", value=2.0):
        suggest(records({"conv": ScriptedLayer(growth=0.004)}), rotation=2.0)
    fast = ScriptedLayer(growth=0.004, settings={"setting_momentum": 0.9})
    (row,) = suggest(records({"conv": fast}), rotation=0.5).layers  # 2.4 of W a step
    assert row.suggested is None
    assert reasons(row) == {Reason.ASK_FOR_LESS}


def test_undamped_kfac_and_layers_without_a_push():
    kfac = ScriptedLayer(growth=0.002, power=0, damping=1e-3)
    (row,) = suggest(records({"conv": kfac})).layers
    assert row.rotation is None
    assert Reason.TURNS_BY_LR in reasons(row)
    held = ScriptedLayer(growth=0.002, power=0, weight_decay=row.suggested)
    assert held.norms(2000)[-1] == pytest.approx(1.0, rel=0.03)
    still = suggest(records({"conv": ScriptedLayer(growth=0.0)}))
    assert still.weight_decay is None
    assert reasons(still.layers[0]) == {Reason.DOES_NOT_GROW}
    assert still.notes[-1].reason is Reason.NO_SUGGESTION
    plain = suggest(records({"head": ScriptedLayer(growth=0.004, invariant=False)}))
    assert reasons(plain.notes) == {Reason.NO_CANDIDATE}
    once = suggest(records({"head": ScriptedLayer(invariant=False)}, steps=10))
    assert once.notes[-1].reason is Reason.NO_SUGGESTION  # no layer could be judged


def test_conversion_keeps_the_equilibrium_rotation_in_simulation():
    """SGD with L2 and the AdamW it converts to turn by the same angle a step, within 5 %."""
    source = Stepping("sgd", 0.1, "l2", 0.9)
    target = Stepping("adam", 1e-3, "decoupled", 0.9)
    found = convert_decay(1e-3, source, target)
    first, second = with_decay(1e-3, "l2"), with_decay(found.weight_decay, "decoupled")
    _, here = simulate(lambda g: sgd(first(g), lr=0.1, momentum=0.9), 2000)
    _, there = simulate(lambda g: adam(second(g), lr=1e-3, betas=(0.9, 0.999)), 2000)
    ratio = sum(there[1500:]) / sum(here[1500:])
    assert ratio == pytest.approx(1.0, abs=0.05)
    assert found.rotations[0] == found.rotations[1]


def test_conversion_there_and_back():
    sgd_l2 = Stepping("sgd", 0.1, "l2", 0.9)
    for target in (
        Stepping("adam", 1e-3),
        Stepping("kfac-g", 0.03),
        Stepping("sgd", 0.1, "independent"),
    ):
        there = convert_decay(5e-4, sgd_l2, target)
        back = convert_decay(there.weight_decay, target, sgd_l2)
        assert back.weight_decay == pytest.approx(5e-4, rel=1e-10)
        assert there.steps == pytest.approx(1 / there.shrink)
    assert convert_decay(0.0, sgd_l2, sgd_l2).steps == math.inf


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (("lio", 0.1), UnknownName),
        (("adam", 0.1, "l2"), Lacks),
        (("sgd", 0.0), OutOfRange),
        (("sgd", 0.1, "none"), Lacks),
        (("sgd", 0.1, "l2", 1.0), OutOfRange),
        (("sgd", 0.1, "soft"), UnknownName),
    ],
)
def test_bad_settings(settings, kind):
    with pytest.raises(kind):
        Stepping(*settings)


@pytest.mark.parametrize(
    ("asked", "kind", "fields"),
    [
        ({"rotation": 0.01, "norm_at": 1}, Conflict, {"settings": ["rotation", "norm_at"]}),
        ({"norm_at": 101}, OutOfRange, {"wanted": Range(at_most=100)}),
        ({"norm_at": 0}, OutOfRange, {"wanted": Range(at_least=1)}),
    ],
)
def test_what_cannot_be_kept_is_refused(asked, kind, fields):
    with refuses(kind, **fields):
        suggest(records({"conv": ScriptedLayer(growth=0.004)}, steps=100), **asked)


def test_one_value_for_layers_that_disagree_is_the_weakest_that_acts():
    """The first grows fast and asks for more than the budget does, the second for less."""
    fast = ScriptedLayer(growth=0.2, power=1, lr=1e-2)
    slow = ScriptedLayer(growth=1e-4, power=1, lr=1e-2)
    (group,) = suggest(records({"fast": fast, "slow": slow}, steps=1000)).groups
    low, high = group.spread
    assert high > 10 * low
    # e = 0: two timescales 1/(2 s) in 1,000 steps, s = lr wd
    assert group.weight_decay == pytest.approx(2 / (2 * 1000) / 1e-2, rel=1e-6)
    assert low <= group.weight_decay <= high
    assert group.steps == pytest.approx(1000 / 2)  # the value's own, not those of what layers ask
    agreeing = suggest(records({"a": fast, "b": fast}, steps=1000)).groups[0]
    assert agreeing.weight_decay == pytest.approx(agreeing.spread[0])
