"""When gradients count as clipped, and when eps counts: records written by hand."""

import pytest
import torch
from torch import nn

from decaylab import diagnose, watch
from decaylab.diagnosis import Reason
from decaylab.diagnosis.layers import RecordedLayer
from decaylab.diagnosis.limits import clipped, cut_entries, eps_counts
from decaylab.diagnosis.runs import read_run
from decaylab.records import LayerSettings


def series(values):
    return tuple(enumerate(values, start=1))


def different(count):
    """Sizes of gradients that are below 0.9, and none like another."""
    return [0.8 / (1 + k) for k in range(count)]


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([*[1.0] * 3, *different(17)], 3 / 20),
        ([*[1.0] * 2, *different(8)], 0.0),  # two may be chance
        ([*[1.0] * 3, *different(27)], 0.0),  # a tenth changes little
        ([*[1.0] * 4, *different(26)], 4 / 30),
        ([1.0, 1 - 5e-5, 1 - 9e-5, *different(7)], 3 / 10),
        ([1.0, 1 - 5e-5, 1 - 2e-4, *different(7)], 0.0),
        ([*[0.5] * 5, 1.0, *[0.5] * 4], 0.0),  # a bound is the largest of all
        ([0.0] * 5, 0.0),  # no gradients at all
        ([], 0.0),
    ],
)
def test_a_clipped_norm_is_the_largest_one_many_times(sizes, found):
    assert clipped({"gradient_norm": series(sizes)}, "a") == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("clip", "found"), [(None, 0.0), (0.3, 1.0)])
def test_torchs_clip_by_norm_is_seen_in_any_precision(dtype, clip, found):
    """Of 16 bits, clipped norms are up to 2 eps apart: torch rounds the norm, and its quotient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, weight_decay=0.01)
    with watch(model, optimizer, every=2) as watched:
        for _ in range(60):
            x, y = torch.randn(16, 8, dtype=dtype), torch.randint(4, (16,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).float(), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    norms = [row.value for row in watched.records.series("gradient_norm")]
    assert max(norms) / min(norms) - 1 > (0.1 if clip is None else 0.0)
    assert read_run(watched).clipped == found


@pytest.mark.parametrize("which", [(), (0,), (1,), (0, 1)])
def test_a_clip_of_one_optimizers_gradients_is_seen(which):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.05, weight_decay=0.01) for i in (0, 3)]
    with watch(model, optimizers, every=2) as watched:
        for _ in range(60):
            model.zero_grad()
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            nn.functional.cross_entropy(model(x), y).backward()
            for place in which:
                nn.utils.clip_grad_norm_(model[(0, 3)[place]].parameters(), 0.05 + place / 10)
            for optimizer in optimizers:
                optimizer.step()
    layers = read_run(watched).layers
    assert [layers[name].clipped for name in ("0", "3")] == [0 in which, 1 in which]


@pytest.mark.parametrize(("rounding", "found"), [(0.0, 0.0), (2**-10, 0.0), (2**-7, 1.0)])
def test_a_layers_own_rounding_says_how_near_clipped_norms_are(rounding, found):
    norms = series([1.0, 0.995, 0.99, 0.985])
    given = {"gradient_norm": norms}
    assert clipped(given, "a", rounding) == found
    assert clipped(given, "b") == 0.0


@pytest.mark.parametrize(
    ("norms", "largest", "parts", "found"),
    [
        (different(10), [1.0] * 10, [0.2] * 10, 1.0),
        (different(10), [1.0] * 10, [0.09] * 10, 0.0),  # hardly anything is cut off
        (different(10), [*[1.0] * 4, *different(6)], [0.5] * 10, 0.4),
        (different(10), [*[1.0] * 4, *different(6)], [0.2] * 4 + [0.9] * 6, 0.0),
        ([*[1.0] * 5, *different(5)], [*[1.0] * 4, *different(6)], [0.5] * 10, 0.5),
        ([*[1.0] * 4, *different(6)], [*[1.0] * 5, *different(5)], [0.5] * 10, 0.5),
        ((), [1.0] * 10, [0.2] * 10, 1.0),  # norms that are not finite are not recorded
        ((), [1.0] * 10, [0.09] * 10, 0.0),
    ],
)
def test_a_clip_by_value_counts_by_what_it_cuts_off_the_layer(norms, largest, parts, found):
    given = {"gradient_norm": norms, "gradient_max": largest, "gradient_at_max/a": parts}
    given = {name: series(values) for name, values in given.items()}
    assert clipped(given, "a") == pytest.approx(found, rel=1e-12)
    at_bound = [step for step, size in given["gradient_max"] if size == 1.0]
    assert cut_entries(given, "a") == {step: parts[step - 1] for step in at_bound}
    assert cut_entries(given, "b") == {}


def test_a_clip_leaves_sgd_no_law_and_adam_its_own():
    settings = [LayerSettings(law=law, lr=0.1, beta2=0.9) for law in ("sgd", "adam")]
    free = [RecordedLayer("a", ((1, each),)).law for each in settings]
    held = [RecordedLayer("a", ((1, each),), clipped=True).law for each in settings]
    assert [law.name for law in free] == ["sgd", "adam"]
    assert [law.name for law in held] == ["unknown", "adam"]
    assert (free[1].beta2, held[1].beta2) == (0.9, None)


def adam(moments, eps=1e-3, beta1=0.9, beta2=0.9):
    """|v| of a layer of four numbers, recorded every 100 steps: the bound is (10 eps)^2 each."""
    settings = LayerSettings(law="adam", eps=eps, size=4, beta1=beta1, beta2=beta2)
    steps = tuple((100 * step, value) for step, value in series(moments))
    return {"second_moment/a": steps}, "a", settings


BOUND = 4 * (10 * 1e-3) ** 2


def test_eps_counts_from_a_tenth_of_the_root_of_the_second_moment_on():
    assert eps_counts(*adam([0.98 * BOUND] * 4))
    assert not eps_counts(*adam([1.02 * BOUND] * 4))
    moments, _, settings = adam([0.98 * BOUND] * 4)
    assert not eps_counts(moments, "b", settings)
    assert not eps_counts(*adam([0.98 * BOUND] * 4, eps=0.0))
    assert not eps_counts(*adam([]))


def test_eps_counts_where_it_does_in_over_a_tenth_of_the_later_half():
    much, little = 0.5 * BOUND, 2 * BOUND
    assert not eps_counts(*adam([*[much] * 10, *[little] * 10]))
    assert not eps_counts(*adam([*[little] * 19, much]))
    assert eps_counts(*adam([*[little] * 18, much, much]))


def test_eps_is_beside_what_adam_divides_by():
    """Adam corrects v for its beginning: of 1 - 0.999^100, a part. RMSprop does not."""
    begun = BOUND * (1 - 0.999**100)
    assert eps_counts(*adam([0.98 * begun], beta2=0.999))
    assert not eps_counts(*adam([1.02 * begun], beta2=0.999))
    assert eps_counts(*adam([1.02 * begun], beta1=None, beta2=0.999))
    assert not eps_counts(*adam([1.02 * BOUND], beta1=None, beta2=0.999))


def test_that_only_one_of_two_runs_is_clipped_is_said():
    def run(weight_decay, clip):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, weight_decay=weight_decay)
        with watch(model, optimizer, every=2) as watched:
            for _ in range(60):
                x, y = torch.randn(16, 8), torch.randint(4, (16,))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
        return watched

    decayed, plain = {}, {}
    for clip in (0.3, 0.5, 100.0):
        decayed[clip], plain[clip] = run(0.1, clip), run(0.0, clip)
        alike = diagnose(decayed[clip], plain[clip])
        assert Reason.OTHER_CLIPPING not in [why.reason for _, why in alike.first]
    for ours, its in ((0.3, 100.0), (100.0, 0.3), (0.3, 0.5), (0.5, 0.3)):
        result = diagnose(decayed[ours], plain[its])
        (why,) = [why for _, why in result.first if why.reason is Reason.OTHER_CLIPPING]
        assert why["bound"] == pytest.approx(0.3, rel=1e-4)
        assert why["largest"] > 0.45
