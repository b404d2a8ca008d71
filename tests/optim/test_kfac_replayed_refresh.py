"""Refresh and inversion in KFAC.step() as replays: on a CPU, by operations that are taken down."""

import warnings

import pytest
import torch
from oracle.kfac_runs import cross_entropy, seeded
from oracle.plain_kfac import KFAC
from oracle.recorded_graphs import Taped
from oracle.small_conv import data, flat, net

from decaylab.curvature import inverses
from decaylab.curvature.kinds import kind
from decaylab.optim.graphs import Captured
from decaylab.optim.options import KFACOptions

STEPS = 12


def trained(graphs=None, change=lambda step, model, opt: None, batches=data, **options):
    """The optimizer and its model after inversions at every second step."""
    model = seeded(lambda: net(norm=True)).float()
    opt = KFAC(model, 0.125, refresh_every=1, invert_every=2, **options)
    if graphs is not None:
        opt.estimator.running.keeps_totals = True
        opt._fold = captured(opt.estimator.running.fold, graphs)
        opt._inversion = captured(opt._preconditioner.invert_damped, graphs)
    for step in range(STEPS):
        change(step, model, opt)
        images, labels = batches(step)
        cross_entropy(model(images.float()), labels).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def captured(work, graphs):
    return Captured(work, graphs, eager_runs=1, name="it")


def same(change=lambda step, model, opt: None, **options):
    """Whether replays leave the weights and the state that launches leave; and the optimizer."""
    launched, expected = trained(None, change, **options)
    graphs = Taped()
    replayed, opt = trained(graphs, change, **options)
    assert (graphs.captures, graphs.replays > STEPS) == (2, True)
    assert torch.equal(flat(launched), flat(replayed))
    layers = (o._preconditioner.state_dict() for o in (expected, opt))
    for one, other in zip(*(layer.values() for layer in layers), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    return opt


@pytest.mark.parametrize("scaling", ["fixed", "scale-free", "trace"])
@pytest.mark.parametrize("half", [False, True])
def test_replayed_inversions_are_launched_ones(monkeypatch, scaling, half):
    """Also of triangles, blocks of triangles, and inverses in float16."""
    monkeypatch.setattr(kind, "PACKED_ABOVE", 5)
    monkeypatch.setattr(inverses, "BLOCK", 4)
    monkeypatch.setattr("decaylab.curvature.preconditioner.LARGEST_PRECISE", 5)
    options = KFACOptions(half_inverses=half)
    opt = same(damping_scaling=scaling, damping=0.1, options=options)
    assert opt._preconditioner.banks[0].A.half == half


def test_a_damping_that_changes_is_read_by_the_graph():
    def soften(step, model, opt):
        opt.damping = 0.1 / (1 + step)

    same(soften)


def test_a_loaded_state_is_read_by_the_graph():
    def load(step, model, opt):
        if step == 7:
            opt.load_state_dict(earlier[id(opt)])
        elif step == 3:
            earlier[id(opt)] = opt.state_dict()

    earlier = {}
    same(load)


def test_a_factorisation_that_fails_is_counted_by_the_graph():
    def spoil(step, model, opt):
        """A's last entry, below zero for a while."""
        bank = opt.estimator.running.banks[0]
        if step in (5, 6, 7, 8):
            bank.A[..., -1, -1] = -1e6

    opt = same(spoil)
    assert opt.check().failed_inversions


def test_a_factor_decay_that_changes_is_read_by_the_graph():
    def forget(step, model, opt):
        opt.factor_decay = 0.9 - 0.05 * step

    same(forget)


def test_batches_of_other_sizes_and_of_nothing_finite_are_read_by_the_graph():
    """Also a layer that is frozen, so that nothing is summed for it."""

    def vary(step, model, opt):
        model[4].weight.requires_grad_(step not in (5, 8))
        model[4].bias.requires_grad_(step not in (5, 8))

    same(vary, batches=lambda step: data(step, 4 + step % 3))

    def spoiled(step):
        images, labels = data(step)
        return (images * torch.nan if step in (6, 7) else images), labels

    assert same(batches=spoiled).check().skipped == 2


def test_weights_at_another_address_are_read_for_their_norms():
    def swap(step, model, opt):
        if step == 7:
            weight = model[0].weight
            weight.data = 2 * weight.data

    same(swap, damping_scaling="scale-free", damping=0.1)


def test_initial_factors_are_inverted_by_the_graph_too():
    def again(step, model, opt):
        if step in (4, 7):
            opt.refresh([data(step + 20)[0].float()], invert=True)

    same(again)


def test_what_cannot_be_captured_runs_as_it_is_and_says_so():
    class Broken(Taped):
        def capture(self, work):
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    launched, _ = trained()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, _ = trained(Broken())
    expected = "it cannot be captured (operation not permitted) and runs eagerly, which is slower"
    assert [str(w.message) for w in told] == [expected] * 2
    assert torch.equal(flat(launched), flat(model))


def test_the_room_of_an_inversion_is_counted_by_its_largest_parts(monkeypatch):
    _, opt = trained()
    monkeypatch.setattr("decaylab.curvature.preconditioner.ROOM_TO_INVERT", 1.5)
    convolution, head = 4 * (9**2 + 3**2), 4 * (28**2 + 3**2)
    assert opt._preconditioner.inversion_room == 1.5 * (convolution + head)
    monkeypatch.setattr("decaylab.curvature.preconditioner.STREAMS", 1)
    assert opt._preconditioner.inversion_room == 1.5 * head


def test_sums_of_a_refresh_stay_for_a_graph_alone(monkeypatch):
    for graphs, sides in ((None, 0), (Taped(), 2)):
        running = trained(graphs)[1].estimator.running
        assert {len(bank._totals) for bank in running.banks} == {sides}
    numbers = 9**2 + 3**2 + 28**2 + 3**2
    for most in (4 * numbers, 4 * numbers - 1):
        monkeypatch.setattr("decaylab.curvature.factors.LARGEST_TOTALS", most)
        assert running.may_keep_totals == (most == 4 * numbers)
