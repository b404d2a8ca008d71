"""KFAC in data-parallel training: processes that meet through a file, and what is refused."""

import pytest
import torch
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from oracle.two_ranks import failures
from refusals import refuses
from torch import nn

from decaylab.curvature import guards, messages
from decaylab.curvature.distribution import Alone, Ranks
from decaylab.curvature.preconditioner import Inversion
from decaylab.errors import Conflict, Lacks

CLASSES = 3


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.SyncBatchNorm(5), nn.Tanh(), nn.Linear(5, CLASSES))


def data(seed: int = 0, size: int = 6):
    return random(size, 4, seed=seed), labels_for(size, classes=CLASSES, seed=seed)


def test_two_ranks(tmp_path):
    assert failures(tmp_path, "cpu") == []


def test_one_rank_is_a_single_process(tmp_path):
    assert failures(tmp_path, "cpu", "a_single_process", size=1) == []


def test_a_group_of_some_processes(tmp_path):
    assert failures(tmp_path, "cpu", "a_group_of_some", size=3) == []


def test_synchronized_batch_norm_in_an_initial_pass():
    """It runs by its counter of batches, which stays where it was."""
    model = seeded(net)
    opt = KFAC(model, 0.1, curvature="empirical-fisher")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    opt.initialize([data()], loss=cross_entropy)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert int(model[1].num_batches_tracked) == 0
    train_step(opt, model, *data())
    assert int(model[1].num_batches_tracked) == 1


def test_an_empty_batch_under_synchronized_batch_norm_is_refused(monkeypatch):
    """The others' extra backward passes would wait for this rank's."""
    model = seeded(net)
    opt = KFAC(model, 0.1, logits="observed", **EXACT)
    logits = model(data()[0])[:0]
    opt.observe(logits)  # a single process goes on
    opt = KFAC(model, 0.1, logits="observed", **EXACT)
    logits = model(data()[0])[:0]
    monkeypatch.setattr(guards, "several", lambda: True)
    with refuses(Lacks, owner="the batch of this rank", what="rows"):
        opt.observe(logits)


def test_a_captured_step_of_several_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda = torch.device("cuda")
    Alone().check_step(cuda)
    with refuses(Conflict, settings=["a step of several ranks", "a CUDA graph"]):
        Ranks("two", 0, 2).check_step(cuda)


@pytest.mark.parametrize("sizes", [(9, 7, 7, 5, 4, 4, 3, 2, 2, 1), (1, 2, 2, 3, 4, 4, 5, 7, 7, 9)])
def test_inversions_are_divided_evenly(sizes):
    """Each is run by one rank, and of d^3 work nobody has more than the largest one alone is.

    In whatever order the layers are.
    """
    sides = [torch.zeros(1, size, size) for size in sizes]
    every = [Inversion(side, torch.zeros(1, 2), torch.ones(1)) for side in sides]
    parts = [Ranks("three", rank, 3).divided(every) for rank in range(3)]
    run = [id(inversion) for mine, _ in parts for inversion in mine]
    assert sorted(run) == sorted(map(id, every))
    assert all(len(mine) + len(others) == len(every) for mine, others in parts)
    work = [sum(inversion.cost for inversion in mine) for mine, _ in parts]
    assert max(work) == max(inversion.cost for inversion in every) == 9**3 + 2


def test_many_tensors_are_few_messages(monkeypatch):
    """Those of one dtype together, a large one by itself; each is overwritten with its own sum."""
    sent = []

    def doubled(flat, group):
        sent.append((flat.dtype, flat.numel()))
        flat.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", doubled)
    monkeypatch.setattr(messages, "SENT_AT_ONCE", 800)
    shapes = [(3, 4), (200,), (2, 2), (5, 5), ()]
    tensors = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    tensors += [tensor.float().t() for tensor in tensors[2:4]]  # in another order in memory
    expected = [2 * tensor for tensor in tensors]
    Ranks("two", 0, 2).add_up(tensors)
    assert all(map(torch.equal, tensors, expected))
    assert sent == [
        *((torch.float64, 12), (torch.float64, 200), (torch.float64, 4 + 25 + 1)),
        (torch.float32, 4 + 25),
    ]
