"""What runs faster by its place in memory counts the same: padded sides, copies by runs."""

import pytest
import torch
from oracle.kfac_runs import EXACT, labels_for, library_factors, random, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import nn

from decaylab.curvature.kinds.conv import copy_runs
from decaylab.curvature.kinds.kind import Shape


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(16, 3, bias=False),
        nn.Linear(3, 3),
    )


@pytest.mark.parametrize("max_factor_dim", [8192, 8, 2])
def test_zeros_behind_the_input_side_change_nothing(monkeypatch, max_factor_dim):
    """On CUDA they are there, for the tensor cores."""

    def trained() -> torch.Tensor:
        model = seeded(net)
        opt = KFAC(model, 0.1, damping=0.1, kl_clip=1e-2, max_factor_dim=max_factor_dim, **EXACT)
        for step in range(3):
            opt.load_state_dict(opt.state_dict())
            train_step(opt, model, random(5, 2, 4, 4, seed=step), labels_for(5, classes=3))
        sides = [side.flatten() for f in opt.factors().values() for side in (f.A, f.S)]
        return torch.cat([*(p.detach().flatten() for p in model.parameters()), *sides])

    bare = trained()
    monkeypatch.setattr(Shape, "wide", lambda self, device: self.input_dim + 5)
    torch.testing.assert_close(trained(), bare, rtol=1e-12, atol=1e-12)


def test_copies_by_runs_of_numbers():
    """Each tensor with each obstacle: odd rows, holes, an odd start, odd distances between rows."""

    def views(room: torch.Tensor) -> list[torch.Tensor]:
        shapes = [((3, 2, 4), (8, 4, 1)), ((3, 2, 3), (8, 4, 1)), ((3, 2, 4), (16, 8, 2))]
        shapes += [((3, 2, 4), (9, 4, 1)), ((3, 2, 4), (12, 5, 1))]
        return [room.as_strided(*shape, start) for shape in shapes for start in (0, 1)]

    for dtype in (torch.float32, torch.float64):
        numbers = torch.arange(1, 101).to(dtype)
        for source in views(numbers):
            for place in range(len(views(numbers))):
                room = torch.zeros_like(numbers)
                target = views(room)[place]
                if target.shape == source.shape:
                    copy_runs(target, source)
                    assert torch.equal(target, source)
                    assert room.count_nonzero() == source.numel()


def test_an_input_in_memory_of_others_that_begins_between_two_runs():
    """A mapped file behind a header, say: the batch itself begins where a run does."""
    model = nn.Sequential(nn.Conv2d(1, 2, 4, 4, bias=False), nn.Flatten(), nn.Linear(8, 3))
    images = random(5, 1, 8, 8).float()
    room = bytearray(images.nbytes + 48)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % 16 + 4
    count = images.numel() + 4
    batch = torch.frombuffer(room, dtype=torch.float32, offset=start, count=count)[3:-1]
    batch = batch.view_as(images).copy_(images)
    assert (batch.data_ptr() % 16, batch.storage_offset()) == (0, 3)
    found = library_factors(model, batch)["0"].A
    torch.testing.assert_close(found, library_factors(model, images)["0"].A)
