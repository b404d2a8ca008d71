"""Captured steps in a loop of the user's own, and replayed updates, on CUDA: the eager numbers.

Deterministic algorithms throughout, so that equal means equal.
"""

import copy
import functools
import gc
import itertools
import warnings
import weakref

import pytest
import torch
from oracle.plain_kfac import KFAC
from torch import nn
from torch.nn import functional as F

import decaylab
from decaylab.optim.captured import NotCapturable, Obstacle
from decaylab.optim.options import KFACOptions

pytestmark = pytest.mark.gpu
STEPS = 24


@pytest.fixture(autouse=True)
def _deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(before)


class Net(nn.Module):
    """Convolutions, batch norm, dropout: kernels that draw, and buffers that change."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.dropout(F.relu(self.second(x)), 0.1)
        return self.head(x.flatten(1))


def batch(seed, size=32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return x, torch.randint(10, (size,), generator=generator)


def rate(value):
    return torch.tensor(value, device="cuda")


def new_kfac(model, *, lag=0, replay=True, **more):
    options = KFACOptions(seed=0, inversion_lag=lag, replay=replay)
    common = {"refresh_every": 3, "invert_every": 6, "weight_decay": 0.1, "kl_clip": 1e-2}
    return KFAC(model, rate(0.0625), **{**common, **more}, options=options)


OPTIMIZERS = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), rate(0.05), momentum=0.9, fused=True)],
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), rate(1e-3), capturable=True)],
    "kfac-f": lambda m: [new_kfac(m)],
    "kfac-g, lag": lambda m: [new_kfac(m, lag=2, curvature="gauss-newton")],
    "kfac, spectral": lambda m: [new_kfac(m, kl_clip=None, step_scaling="spectral")],
    "kfac, sgd for the rest": lambda m: [new_kfac(m, others="sgd", decay="l2")],
    "two": lambda m: [
        new_kfac(m, params=[*m.first.parameters(), *m.second.parameters()]),
        torch.optim.Adam([*m.norm.parameters(), *m.head.parameters()], rate(1e-3), capturable=True),
    ],
}


def trained(name, *, capture, autocast=False, clip=False, wait=None, size=lambda i: 32, **how):
    """The model after so many steps of a plain loop, its optimizers' states and its losses."""
    torch.manual_seed(1)
    model = Net().cuda()
    optimizers = OPTIMIZERS[name](model)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 5, gamma=0.5) for o in optimizers]

    def step(x, y):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        if wait is not None:
            wait(loss)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    take = decaylab.captured(step, model, optimizers, **how) if capture else step
    torch.manual_seed(2)
    losses = []
    for i in range(STEPS):
        x, y = batch(i, size(i))
        # from the CPU, as a DataLoader gives them
        given = (x.pin_memory(), y.pin_memory()) if capture else (x.cuda(), y.cuda())
        losses.append(take(*given))
        for schedule in schedules:
            schedule.step()
    return model, optimizers, torch.stack(losses), take


@functools.cache
def eager(name):
    """What a plain loop gives, for all tests that compare with it."""
    return trained(name, capture=False)


def assert_same(one, other):
    assert torch.equal(one[2], other[2])
    for name, value in one[0].state_dict().items():
        assert torch.equal(value, other[0].state_dict()[name]), name
    for a, b in zip(one[1], other[1], strict=True):
        for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
            for key, value in a.state.get(p, {}).items():
                assert torch.equal(value, b.state[q][key]), key


@pytest.mark.parametrize("how", [{}, {"autocast": True, "clip": True}], ids=["plain", "bf16-clip"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_step_is_the_eager_one(name, how):
    launched = trained(name, capture=False, **how) if how else eager(name)
    replayed = trained(name, capture=True, **how)
    assert_same(launched, replayed)
    assert replayed[3].replayed >= STEPS // 2
    assert launched[2].isfinite().all()
    assert len(launched[2].unique()) > STEPS // 2  # in bf16 some losses are equal


def test_shapes_have_graphs_of_their_own():
    def size(i):
        return 32 if i % 4 else 16

    assert_same(trained("sgd", capture=False, size=size), trained("sgd", capture=True, size=size))


@pytest.mark.parametrize(
    ("wait", "obstacle"),
    [
        (lambda loss: loss.item(), Obstacle.HOST_WAIT),
        (lambda loss: bool(loss > 100), Obstacle.HOST_WAIT),
        (lambda loss: loss.add(torch.ones(()).to("cuda")), Obstacle.HOST_WAIT),
        (lambda loss: torch.cuda.synchronize(), Obstacle.CAPTURE),
    ],
    ids=["item", "if", "to", "synchronize"],
)
@pytest.mark.parametrize("name", ["sgd", "kfac-f"])
def test_what_cannot_be_captured_goes_on_eagerly_if_asked(name, wait, obstacle):
    """Also behind a capture that failed half-way: gradients and random numbers are in order."""
    with pytest.raises(NotCapturable) as failure:
        trained(name, capture=True, wait=wait)
    assert failure.value.obstacle is obstacle
    if obstacle is Obstacle.HOST_WAIT:
        assert "test_captured_gpu.py" in str(failure.value)
    with pytest.warns(UserWarning, match="the step runs uncaptured"):
        stopped = trained(name, capture=True, wait=wait, on_failure="eager")
    assert torch.allclose(stopped[2], eager(name)[2], rtol=1e-5)
    assert stopped[3].replayed == 0


def test_torchs_optimizers_that_cannot_be_captured():
    model = Net().cuda()
    for optimizer in (
        torch.optim.Adam(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1),
    ):
        with pytest.raises(NotCapturable) as failure:
            decaylab.captured(lambda: None, model, optimizer)
        assert failure.value.obstacle is Obstacle.NOT_CAPTURABLE


def updated(*, replay, tensor_rate, **more):
    """A model and its K-FAC after steps: gradients come and go, and the rate changes."""
    torch.manual_seed(3)
    model = Net().cuda()
    optimizer = new_kfac(model, replay=replay, others_lr=rate(0.0625), **more)
    if not tensor_rate:
        for group in optimizer.param_groups:
            group["lr"] = float(group["lr"])
    for i in range(STEPS):
        x, y = (t.cuda() for t in batch(i))
        F.cross_entropy(model(x), y).backward()
        if i in (9, 13):
            model.norm.weight.grad = None
            model.second.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    replays = [captured.replays for captured in optimizer._updater._captured.values()]
    return model, optimizer, replays


@pytest.mark.parametrize("more", [{}, {"decay": "l2"}, {"others": "sgd"}, {"kl_clip": None}])
def test_a_replayed_update_is_the_launched_one(more):
    """Inside KFAC.step(), whether rates are numbers or tensors."""
    launched = updated(replay=False, tensor_rate=True, **more)
    assert not launched[2]
    for tensor_rate in (False, True):
        replayed = updated(replay=True, tensor_rate=tensor_rate, **more)
        assert any(replayed[2])
        for p, q in zip(launched[0].parameters(), replayed[0].parameters(), strict=True):
            assert torch.equal(p, q)
        assert replayed[1].check().skipped == launched[1].check().skipped == 0


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("scaling", ["fixed", "trace"])
def test_a_replayed_refresh_and_inversion_are_the_launched_ones(half, scaling):
    """Of matrices, triangles and several blocks.

    As batches, decay and dampings change, a batch is not finite and a factorisation fails.
    """

    def run(replay):
        torch.manual_seed(3)
        sizes = itertools.pairwise((300, 1100, 1100, 1100, 10))
        model = nn.Sequential(*(nn.Linear(m, n) for m, n in sizes)).cuda()
        options = KFACOptions(seed=0, replay=replay, half_inverses=half)
        every = {"refresh_every": 1, "invert_every": 2, "kl_clip": 1e-2}
        opt = KFAC(model, rate(0.0625), damping_scaling=scaling, options=options, **every)
        for i in range(12):
            opt.damping, opt.factor_decay = 0.1 / (1 + i), 0.95 - i / 100
            if i == 6:
                opt.estimator.running.home["0"].A[0, 7, 7] = -1e6
            size = 64 + i
            x, y = torch.randn(size, 300).cuda(), torch.randint(10, (size,)).cuda()
            if i == 9:
                x[0, 0] = torch.nan
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return model, opt

    (launched, expected), (replayed, opt) = run(replay=False), run(replay=True)
    assert (expected._fold, expected._inversion) == (None, None)
    assert opt._fold.replays
    assert opt._inversion.replays
    assert opt.check().skipped == 1
    assert opt.check() == expected.check()
    assert opt.check().failed_inversions.keys() == {"0"}
    for p, q in zip(launched.parameters(), replayed.parameters(), strict=True):
        assert torch.equal(p, q)
    states = (o._preconditioner.state_dict() for o in (expected, opt))
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_what_the_graph_of_an_inversion_keeps_in_memory():
    """No more than is counted; it goes with the optimizer."""

    def kept(pool):
        """What graphs keep by stream."""
        segments = {}
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(pool):
                segments.setdefault(segment["stream"], []).append(segment["total_size"])
        return segments

    def run(replay):
        opt = new_kfac(model, kl_clip=None, refresh_every=1, invert_every=1)
        if not replay:
            opt._inversion = None
        for _ in range(6):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        assert not replay or opt._inversion.replays
        opt.detach()
        return opt, opt._updater._graphs.pool

    model = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(4)), nn.Linear(2000, 10)).cuda()
    x, y = torch.randn(64, 2000).cuda(), torch.randint(10, (64,)).cuda()
    opt, pool = run(replay=False)
    launched = kept(pool)
    opt, pool = run(replay=True)
    replayed, room = kept(pool), opt._preconditioner.inversion_room
    more = sum(map(sum, replayed.values())) - sum(map(sum, launched.values()))
    parts = f"by stream: {launched}, with the inversion {replayed}"
    assert 0 < more <= room, f"more than {room}; {parts}"
    state = weakref.ref(opt._preconditioner)
    del opt
    gc.collect()
    assert state() is None
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream: no graph of it is replayed again
    torch.cuda.empty_cache()
    assert not kept(pool)


def test_a_replayed_update_leaves_out_what_is_not_finite():
    model = Net().cuda()
    optimizer = new_kfac(model)
    for i in range(12):
        x, y = (t.cuda() for t in batch(i))
        F.cross_entropy(model(x), y).backward()
        before = copy.deepcopy(model.state_dict())
        if i == 10:
            model.second.weight.grad.fill_(torch.nan)
        optimizer.step()
        optimizer.zero_grad()
        moved = not torch.equal(before["second.weight"], model.second.weight)
        assert moved == (i != 10)
    assert optimizer.check().skipped == 1


def test_a_compiled_model():
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    model = Net().cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler uses what torch has deprecated
        compiled = torch.compile(model)
        optimizer = KFAC(compiled, 0.01, kl_clip=1e-2, refresh_every=5, invert_every=10)

        def step(x, y):
            loss = F.cross_entropy(compiled(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        take = decaylab.captured(step, compiled, optimizer)
        losses = [float(take(*batch(0))) for _ in range(40)]
    assert take.replayed > 30 - 8
    assert losses[-1] < 0.5 * losses[0]
