"""What ranks tell each other, where the others are played by a patched `torch.distributed`."""

from itertools import product

import pytest
import torch
from oracle.kfac_runs import random
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn

from decaylab.curvature.distribution import Alone, Ranks
from decaylab.curvature.factors import Sums
from decaylab.errors import Failed, Mismatch

CPU = torch.device("cpu")


def first_numbers(ranks, seed, step):
    generator = torch.Generator().manual_seed(5)
    ranks.seed(generator, seed, step)
    return torch.rand(2, generator=generator).tolist()


def test_random_numbers_depend_on_seed_step_and_rank():
    """Whatever their digits are behind each other; -1 is that of an initial pass."""
    given = list(product((1, 11, 111), (-1, 1, 11, 111), (0, 1, 11)))
    drawn = [tuple(first_numbers(Ranks("many", rank, 12), seed, s)) for seed, s, rank in given]
    assert len(set(drawn)) == len(given)
    assert first_numbers(Ranks("many", 1, 12), 11, 1) == list(drawn[given.index((11, 1, 1))])
    assert first_numbers(Alone(), 1, 1) == first_numbers(Alone(), 2, 2)  # those that it has


@pytest.mark.parametrize("first", [3, 2**31 + 3, 2**62 + 3])
def test_all_begin_with_the_seed_and_the_norms_of_the_first(monkeypatch, first):
    """A seed has up to 64 bits: that of torch.seed() too."""
    generators = [torch.Generator() for _ in range(2)]
    norms = [{"a": torch.tensor(norm), "b": torch.tensor(2 * norm)} for norm in (1.5, 4.0)]
    sent = []
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda flat, group, group_src: sent.append(flat.clone())
    )
    seeds = [Ranks("two", 0, 2).together(first, norms[0], generators[0])]
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda flat, group, group_src: flat.copy_(sent.pop(0))
    )
    seeds.append(Ranks("two", 1, 2).together(2**64 - 1, norms[1], generators[1]))
    assert seeds == [first, first]
    assert norms[1] == norms[0] == {"a": torch.tensor(1.5), "b": torch.tensor(3.0)}
    for rank, generator in enumerate(generators):
        expected = first_numbers(Ranks("two", rank, 2), first, 0)
        assert torch.rand(2, generator=generator).tolist() == expected


def test_a_process_alone_keeps_its_seed_and_its_numbers():
    generator = torch.Generator().manual_seed(5)
    assert Alone().together(2**64 - 1, {"a": torch.tensor(1.0)}, generator) == 2**64 - 1
    again = torch.Generator().manual_seed(5)
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=again))


def gathered(monkeypatch, own, steps=(7, 7), failures=0):
    """`own` sums of a layer, where the second rank has twice as much of everything but the step."""
    sites = KFAC(nn.Sequential(nn.Linear(2, 1)).double(), 0.1).estimator.sites

    def added(flat, group):
        if flat.numel() == 6:  # the table: here, rows, positions; failures, step, its square
            more = [1.0, *(2 * flat[1:3]).tolist(), failures, steps[1], steps[1] ** 2]
            flat += torch.tensor(more, dtype=flat.dtype)
        else:
            flat *= 3

    monkeypatch.setattr(torch.distributed, "all_reduce", added)
    return Ranks("two", 0, 2).gather(lambda: own, sites, steps[0], CPU)


def test_counts_of_ranks_are_exact(monkeypatch):
    """In single precision 2^24 + 1 rows would be 2^24."""
    A, G = random(1, 3, 3, seed=1), random(1, 1, 1, seed=2)
    for rows in (2.0**24 + 1, torch.tensor(2.0**24 + 1, dtype=torch.float64)):  # or of a mask
        own = {"0": Sums(A.clone(), G.clone(), rows, rows - 3)}
        (found,) = gathered(monkeypatch, own).values()
        assert (found.positions, found.rows) == (3 * (2**24 + 1), 3 * (2**24 - 2))
        assert torch.equal(found.sides[0], 3 * A)
        assert torch.equal(found.sides[1], 3 * G)


def test_a_layer_that_only_another_rank_has_seen_is_gathered(monkeypatch):
    (found,) = gathered(monkeypatch, {}).values()
    assert [tuple(side.shape) for side in found.sides] == [(1, 3, 3), (1, 1, 1)]


def test_ranks_that_are_not_at_one_step_or_have_failed(monkeypatch):
    own = {"0": Sums(random(1, 3, 3), random(1, 1, 1), 4.0, 4.0)}
    for steps in ((7, 8), (8, 7), (0, 1)):
        with refuses(Mismatch, what="the step they are at"):
            gathered(monkeypatch, own, steps)
    with refuses(Failed, reason="on 1 of the 2 ranks"):
        gathered(monkeypatch, own, failures=1)
