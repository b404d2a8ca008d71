"""How much a step launches: counted operations, which on CUDA are launches, and not time."""

import pytest
import torch
from oracle.kfac_runs import labels_for
from oracle.plain_kfac import KFAC
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from decaylab.curvature import factors, inverses, storage
from decaylab.curvature.kinds import kind

# They run on the host alone: views, and memory that is asked for.
NO_LAUNCH = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice"),
    *(
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
        "_unsafe_view",
    ),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
CLASSES, WIDTH = 3, 6


class Counted(TorchDispatchMode):
    """Counts what is launched in it."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.launches += function._schema.name.split("::")[1] not in NO_LAUNCH
        return function(*args, **(kwargs or {}))


def uncounted(work):
    """The work as one launch."""

    def run(*arguments):
        with _disable_current_modes():
            work(*arguments)
        torch.ones(())

    return run


def launches(monkeypatch, depth, *, replay=False):
    """Of `KFAC.step` in a plain step, one that refreshes, and one that inverts too.

    Folds are one kernel each, as on CUDA. `replay`: what graphs of a refresh
    and an inversion do counts as one.
    """
    monkeypatch.setattr(factors, "fold_", uncounted(factors.fold_))
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))
    opt = KFAC(model, 1e-3, step_scaling="rms", refresh_every=2, invert_every=4)
    if replay:
        opt._fold = uncounted(opt.estimator.running.fold)
        opt._inversion = uncounted(opt._preconditioner.invert_damped)
    opt.initialize([torch.randn(4, WIDTH)])
    counts = {}
    for _ in range(8):
        kinds = "invert" if opt.inverts_now else "refresh" if opt.refresh_due else "plain"
        nn.functional.cross_entropy(
            model(torch.randn(4, WIDTH)), labels_for(4, classes=CLASSES)
        ).backward()
        with Counted() as counted:
            opt.step()
        opt.zero_grad()
        counts[kinds] = counted.launches
    return counts


@pytest.mark.parametrize("packed_above", [1000, 2])
def test_launches_do_not_grow_with_layers_of_one_shape(monkeypatch, packed_above):
    monkeypatch.setattr(kind, "PACKED_ABOVE", packed_above)
    assert launches(monkeypatch, 2) == launches(monkeypatch, 7)


def test_how_many_there_are(monkeypatch):
    """Of two shapes. What follows the gather of a plain step is replayed as one graph on CUDA."""
    counts = launches(monkeypatch, 3)
    assert counts["plain"] <= 56
    assert counts["refresh"] - counts["plain"] <= 37
    assert counts["invert"] - counts["refresh"] <= 100
    replayed = launches(monkeypatch, 3, replay=True)
    assert replayed["refresh"] - replayed["plain"] <= 8
    assert replayed["invert"] - replayed["refresh"] <= 15


def measuring_launches(depth, **how):
    """What a pass launches beyond a plain one where a refresh is due: backward again, and sums."""
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))
    opt = KFAC(model, 1e-3, step_scaling="rms", refresh_every=2, invert_every=100, **how)
    counts = {}
    for _ in range(4):
        due = opt.refresh_due
        with Counted() as counted:
            loss = nn.functional.cross_entropy(
                model(torch.randn(4, WIDTH)), labels_for(4, classes=CLASSES)
            )
        loss.backward()
        opt.step()
        opt.zero_grad()
        counts[due] = counted.launches
    return counts[True] - counts[False]


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_what_a_layer_adds_to_a_measurement(curvature):
    """Its backward pass (tanh, a product), input rows with a 1 behind them, a product per side."""
    few, many = (measuring_launches(depth, curvature=curvature) for depth in (2, 7))
    assert many - few <= 5 * 7


def test_the_diagonal_blocks_of_a_triangle_are_copied_together(monkeypatch):
    """However many there are: those of one size at once, and what is left of the last."""
    monkeypatch.setattr(inverses, "BLOCK", 4)
    counts = []
    for blocks in (3, 9):
        L = torch.eye(4 * blocks + 2).tril()[None]
        with Counted() as counted:
            list(inverses._on_the_diagonal(L))
            monkeypatch.setattr(inverses, "_join_inverses_", lambda L: None)
            inverses._invert_triangle_(L)
        counts.append(counted.launches)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_lower_triangles_are_unpacked_in_three_copies(length, cut):
    """Those that a factorisation reads; also where zeros behind the matrix are cut off."""
    matrices = torch.randn(2, length + cut, length + cut)
    matrices = matrices + matrices.mT
    triangles = storage.pack(matrices)
    with Counted() as counted:
        lower = storage.lower(triangles, length)
    assert counted.launches <= 3
    assert torch.equal(lower.tril(), matrices[:, :length, :length].tril())
