"""What ranks do together, each case in all: `rank_cases.py FOLDER RANK SIZE DEVICE [CASE ...]`.

Prints "CASE ok", or "CASE failed" and why, for each. A case asserts at its end, when the ranks have
nothing left to tell each other.
"""

import copy
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from oracle.two_ranks import run_cases
from refusals import refuses
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from decaylab.curvature.distribution import distribution_of
from decaylab.curvature.preconditioner import Inversion
from decaylab.errors import Conflict, Failed, Lacks, Mismatch
from decaylab.optim import kfac
from decaylab.optim.kfac_state import curvature_state
from decaylab.optim.options import KFACOptions

CLASSES = 3
SIZE, DEVICE = (int(sys.argv[3]), sys.argv[4]) if __name__ == "__main__" else (2, "cpu")
TOLERANCE = 1e-10
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def net():
    return nn.Sequential(
        *(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh()),
        nn.Linear(5, CLASSES),
    )


def conv_net():
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1), nn.Tanh()),
        *(nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


class Recurrent(nn.Module):
    """Both ways through the inputs as a sequence of two, and a row of logits for the whole."""

    def __init__(self):
        super().__init__()
        self.gru, self.last = nn.GRU(2, 3, bidirectional=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        outputs, _ = self.gru(x.unflatten(1, (2, 2)).transpose(0, 1))
        return self.last(outputs.mean(0))


class TwoPaths(nn.Module):
    """The second layer is used for batches whose first column is positive."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        hidden = self.first(x).tanh()
        if bool((x[:, 0] > 0).all()):
            hidden = self.second(hidden).tanh()
        return self.last(hidden)


def new(build, seed=0):
    return seeded(build, seed).to(DEVICE)


def data(seed=0, size=8):
    x, y = random(size, 4, seed=seed), labels_for(size, classes=CLASSES, seed=seed)
    return x.to(DEVICE), y.to(DEVICE)


def numbered(rows):
    return torch.arange(rows, device=DEVICE)


def share(batch, rank, first=None):
    """A rank's rows of a batch; the first rank has `first` of them, or half."""
    first = len(batch[0]) // 2 if first is None else first
    return tuple(part[:first] if rank == 0 else part[first:] for part in batch)


def alone(model, **options):
    """A KFAC of this process's own, which the others tell nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="there are several processes")
        return KFAC(model, 0.1, **options)


def parallel(build=net, seed=0, wrapper=None, **options):
    model = DistributedDataParallel(new(build, seed), **(wrapper or {}))
    return model, KFAC(model, 0.1, **options)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def factors(opt):
    return {f"{n} {key}": getattr(f, key) for n, f in opt.factors().items() for key in "AST"}


def on_all(tensor):
    """What each rank has, [SIZE, ...]."""
    found = [torch.empty_like(tensor) for _ in range(SIZE)]
    dist.all_gather(found, tensor.contiguous())
    return torch.stack(found)


def assert_same_bits(tensors):
    assert tensors.isfinite().all()
    assert torch.equal(tensors[0], tensors[1])


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


# -- equal shares: one process with the whole batch does the same --


def trains_as_one(rank, wrap=None, build=net, passes=1, **options):
    """Nine steps; `wrap` makes the model and its optimizer from the network and the options."""
    options = EXACT | options
    expected = new(build)
    oracle = alone(expected, **options)
    if wrap is None:
        model, opt = parallel(build, **options)
    else:
        model, opt = wrap(new(build), options)
    for step in range(9):
        batch = data(step)
        train_step(oracle, expected, *batch)
        for i in range(passes):
            own = tuple(part.chunk(passes)[i] for part in share(batch, rank))
            with model.no_sync() if i < passes - 1 else nullcontext():
                logits = model(own[0])
                opt.observe(logits)
                (cross_entropy(logits, own[1]) / passes).backward()
        opt.step()
        opt.zero_grad()
    weights = on_all(flat(model))
    assert_same_bits(weights)
    assert_close(weights[0], flat(expected))
    assert_close(factors(opt), factors(oracle))


INVARIANT = {"damping_scaling": "scale-free", "options": KFACOptions(invariant=("0", "3"))}
EMPIRICAL = {"curvature": "empirical-fisher"}
for name, given in {
    "fisher": {"kl_clip": 1e-3, "weight_decay": 0.1, "decay": "l2"},
    "gauss_newton": {"curvature": "gauss-newton", "weight_decay": 0.1, "others": "sgd"},
    "empirical_fisher": EMPIRICAL,
    "scale_free_damping": {**INVARIANT, "damping": 0.1},
    "rare_inversions": {"refresh_every": 2, "invert_every": 4},
    "spectral_steps": {"step_scaling": "spectral", "refresh_every": 2, "invert_every": 4},
    "inversions_that_lag": {
        **{"refresh_every": 2, "invert_every": 4, "damping": 0.1},
        "options": KFACOptions(inversion_lag=2),
    },
    "diagonal_sides": {"max_factor_dim": 4},
    "convolutions": {"build": conv_net, "kl_clip": 1e-3},
    "recurrent_layers": {"build": Recurrent, "kl_clip": 1e-3},
    "accumulated_gradients": {"passes": 2},
    "accumulated_empirical_fisher": {"passes": 2, **EMPIRICAL},
    "unused_parameters_looked_for": {"wrapper": {"find_unused_parameters": True}},
    "a_static_graph": {"wrapper": {"static_graph": True}},
    "gradients_in_buckets": {"wrapper": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}},
}.items():

    def one_of_them(rank, given=given):
        given = dict(given)
        wrapper, wrap = given.pop("wrapper", None), None
        if wrapper is not None:

            def wrap(model, options):
                model = DistributedDataParallel(model, **wrapper)
                return model, KFAC(model, 0.1, **options)

        trains_as_one(rank, wrap, **given)

    CASES[f"as_one_process_with_{name}"] = one_of_them


@case
def compiled_outside(rank):
    def wrap(model, options):
        model = torch.compile(DistributedDataParallel(model), backend="eager")
        return model, KFAC(model, 0.1, **options)

    trains_as_one(rank, wrap, refresh_every=2, invert_every=2)


@case
def compiled_inside(rank):
    def wrap(model, options):
        model = DistributedDataParallel(torch.compile(model, backend="eager"))
        return model, KFAC(model, 0.1, **options)

    trains_as_one(rank, wrap, refresh_every=2, invert_every=2)


@case
def built_before_it_is_wrapped(rank):
    """The ranks' weights, and so scale-free damping's first norms, differ until then."""

    def wrap(model, options):
        if rank == 1:
            model[0].weight.data.mul_(3)
        rare = KFACOptions(process_group=dist.group.WORLD, invariant=("0", "3"))
        opt = KFAC(model, 0.1, **(options | {"options": rare}))
        dampings.append(torch.stack([*opt.scale_free.norms.values()]))
        return DistributedDataParallel(model), opt

    dampings = []
    trains_as_one(rank, wrap, **INVARIANT, damping=0.1)
    assert_same_bits(on_all(dampings[0]))


@case
def observed_logits(rank):
    """Behind the wrapper, whose backward pass does more than the network's."""
    for wrapper in ({}, {"find_unused_parameters": True}):
        model, opt = parallel(wrapper=wrapper, logits="observed", **EXACT)
        expected = new(net)
        oracle = alone(expected, **EXACT)
        for step in range(3):
            x, y = share(data(step), rank)
            logits = model(x)
            opt.observe(logits)
            cross_entropy(logits, y).backward()
            opt.step()
            opt.zero_grad()
            train_step(oracle, expected, *data(step))
        assert_same_bits(on_all(flat(model)))
        assert_close(flat(model), flat(expected))


class InADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return {"scores": self.net(x)}


@case
def extra_passes_through_a_static_graph(rank):
    """They would be taken for the loss's pass, whose gradients then are not added up."""
    static = {"wrapper": {"static_graph": True}}
    model, opt = parallel(**static, logits="observed", **EXACT)
    excluded = ["K-FAC's backward pass", "DistributedDataParallel's static_graph=True"]
    with refuses(Conflict, settings=excluded):
        opt.observe(model(data(rank)[0]))
    model, opt = parallel(InADict, **static, **EXACT)
    with refuses(Conflict, settings=excluded):
        opt.observe(model(data(rank)[0])["scores"])
    model, opt = parallel(**static, **EMPIRICAL)
    with refuses(Conflict, settings=excluded):
        opt.initialize([data(rank)], forward=lambda batch: model(batch[0]), loss=cross_entropy)


@case
def an_empirical_fisher_in_a_static_graph(rank):
    """It has no extra pass, also where the logits are handed over."""

    def wrap(model, options):
        model = DistributedDataParallel(model, static_graph=True)
        return model, KFAC(model, 0.1, logits="observed", **options)

    trains_as_one(rank, wrap, **EMPIRICAL)


# -- unequal shares: the factors are those of all rows --


def factors_as_one(rank, first, mask=None, **options):
    """Of nine rows, of which the first rank has `first`, and `mask` counts some."""
    options = EXACT | options | ({} if mask is None else {"logits": "observed"})
    model, opt = parallel(**options)
    expected = new(net)
    oracle = alone(expected, **options)
    batch = data(size=9)
    mask = numbered(9) >= 0 if mask is None else mask
    own = (*share(batch, rank, first), *share((mask,), rank, first))
    reduction = options.get("reduction", "mean")
    for one, network, (x, y, counted) in ((opt, model, own), (oracle, expected, (*batch, mask))):
        logits = network(x)
        one.observe(logits, None if bool(counted.all()) else counted)
        (cross_entropy(logits, y, reduction) if len(x) else logits.sum()).backward()
        one.step()
    assert_same_bits(on_all(flat(model)))
    assert_close(factors(opt), factors(oracle))


@case
def shares_of_different_size(rank):
    factors_as_one(rank, 2)
    factors_as_one(rank, 2, curvature="empirical-fisher")
    factors_as_one(rank, 2, curvature="empirical-fisher", reduction="sum")


@case
def a_rank_without_rows(rank):
    factors_as_one(rank, 0)


@case
def masked_rows(rank):
    factors_as_one(rank, 3, mask=numbered(9) % 4 != 0)


@case
def a_rank_whose_rows_are_all_masked(rank):
    factors_as_one(rank, 3, mask=numbered(9) >= 3)


@case
def a_mask_on_one_rank_only(rank):
    factors_as_one(rank, 3, mask=numbered(9) != 1)


@case
def no_row_counts_on_any_rank(rank):
    """Then nothing is known of the layers, and nothing moves: as in one process."""
    model, opt = parallel(logits="observed", **EXACT)
    expected = new(net)
    oracle = alone(expected, logits="observed", **EXACT)
    for one, network, (x, y) in ((opt, model, share(data(), rank)), (oracle, expected, data())):
        logits = network(x)
        one.observe(logits, torch.zeros(len(x), device=DEVICE))
        cross_entropy(logits, y).backward()
        one.step()
    assert_close(flat(model), flat(expected))
    assert_close(factors(opt), factors(oracle))
    assert_same_bits(on_all(flat(model)))


@case
def a_layer_that_one_rank_uses(rank):
    """Its factors are those of that rank's rows, the others' are those of all rows."""
    batch = data(size=9)
    batch[0][:, 0] = torch.where(numbered(9) < 4, -1.0, 1.0)
    model, opt = parallel(TwoPaths, wrapper={"find_unused_parameters": True}, **EXACT)
    train_step(opt, model, *share(batch, rank, 4))
    expected = new(TwoPaths)
    oracle = alone(expected, **EXACT)
    for part in range(SIZE):
        x, y = share(batch, part, 4)
        cross_entropy(expected(x), y).backward()
    oracle.step()
    assert_same_bits(on_all(flat(model)))
    assert_close(factors(opt), factors(oracle))


@case
def a_layer_that_one_rank_uses_late(rank):
    """All ranks invert then: a layer would stand still until the next inversion is due."""
    wrapper = {"find_unused_parameters": True}
    rare = {"outputs": "exact", "refresh_every": 1, "invert_every": 3}
    model, opt = parallel(TwoPaths, wrapper=wrapper, **rare)
    before = flat(model.module.second)
    for step in range(5):
        x, y = data(SIZE * step + rank)
        x[:, 0] = 1.0 if (rank, step) == (1, 4) else -1.0
        train_step(opt, model, x, y)
    weights = on_all(flat(model))
    assert not torch.equal(before, flat(model.module.second))
    assert_same_bits(weights)


# -- numbers that are not finite, and inversions that fail --


@case
def a_batch_of_one_rank_that_is_not_finite(rank):
    model, opt = parallel(**EXACT)
    train_step(opt, model, *data(rank))
    before = flat(model), factors(opt)
    x, y = data(2 + rank)
    if rank == 1:
        x[0] = torch.nan
    train_step(opt, model, x, y)
    after, health = (flat(model), factors(opt)), opt.check()
    train_step(opt, model, *data(4 + rank))
    weights = on_all(flat(model))
    assert health.skipped == 1
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert_same_bits(weights)


@case
def inversions_that_fail(rank):
    """The rank that tries finds out, and all know: dampings and counters are the same."""
    model, opt = parallel(outputs="exact", refresh_every=100, invert_every=1, damping=1e-12)
    train_step(opt, model, *data(rank))
    state = opt.state_dict()
    for layer in ("0", "3", "5"):
        curvature_state(state)["layers"][layer]["A"].mul_(-1)
    opt.load_state_dict(state)
    for step in (1, 2):
        train_step(opt, model, *data(SIZE * step + rank))
    failed, dampings = opt.check().failed_inversions, torch.stack([*opt.dampings().values()])
    assert_same_bits(on_all(flat(model)))
    assert failed == {"0": 2, "3": 2, "5": 2}
    assert_close(dampings, torch.full_like(dampings, 4e-12))


@case
def inversions_are_divided(rank):
    """Those of two layers of one shape, too: each rank runs one."""
    run = []
    original = Inversion.run
    Inversion.run = lambda self: (run.append(len(self.A)), original(self))[1]
    try:
        model, opt = parallel(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        train_step(opt, model, *data(rank))
    finally:
        Inversion.run = original
    assert on_all(torch.tensor(sum(run))).tolist() == [1, 1]


# -- one rank gives up: the others do not wait for it --


@case
def logits_that_one_rank_does_not_show(rank):
    model, opt = parallel(logits="observed", **EXACT)
    x, y = data(rank)
    logits = model(x)
    if rank == 0:
        opt.observe(logits)
    cross_entropy(logits, y).backward()
    without_logits = refuses(Lacks, what="logits for the refresh that is due")
    with refuses(Failed, reason="on 1 of the 2 ranks") if rank == 0 else without_logits:
        opt.step()


@case
def nothing_that_any_rank_observed(rank):
    model, opt = parallel(**EXACT)
    with opt.paused():
        cross_entropy(model(data(rank)[0]), data(rank)[1]).backward()
    with refuses(Lacks, owner="the first step", what="observed forward pass before it"):
        opt.step()


@case
def nothing_that_one_rank_observed(rank):
    """The factors are the other rank's."""
    model, opt = parallel(**EXACT)
    expected = new(net)
    oracle = alone(expected, **EXACT)
    x, y = data(rank)
    with opt.paused() if rank == 1 else nullcontext():
        cross_entropy(model(x), y).backward()
    opt.step()
    train_step(oracle, expected, *data(0))
    assert_same_bits(on_all(flat(model)))
    assert_close(factors(opt), factors(oracle))


@case
def a_state_that_one_rank_loads(rank):
    model, opt = parallel(refresh_every=2)
    train_step(opt, model, *data(rank))
    train_step(opt, model, *data(rank))
    opt.detach()
    new = KFAC(model, 0.1, refresh_every=2)
    if rank == 0:
        new.load_state_dict(opt.state_dict())
    with refuses(Mismatch, what="the step they are at"):
        train_step(new, model, *data(rank))


# -- the initial pass --


def initialized_as_one(rank, own, every, **options):
    given = {"outputs": "exact", **options}
    model, opt = parallel(**given)
    expected = new(net)
    oracle = alone(expected, **given)
    opt.initialize(own, loss=cross_entropy)
    oracle.initialize(every, loss=cross_entropy)
    found = factors(opt), factors(oracle)
    train_step(opt, model, *share(data(7), rank))
    train_step(oracle, expected, *data(7))
    assert_same_bits(on_all(flat(model)))
    assert_close(*found)
    assert_close(flat(model), flat(expected))


@case
def an_initial_pass_over_different_batches(rank):
    every = [data(seed, size=3 + seed) for seed in range(4)]
    own = every[:1] if rank == 0 else every[1:]
    initialized_as_one(rank, own, every)
    initialized_as_one(rank, own, every, curvature="empirical-fisher")
    initialized_as_one(rank, every if rank == 0 else [], every)


@case
def an_initial_pass_without_batches(rank):
    with refuses(Lacks, what="batches"):
        parallel()[1].initialize([])


@case
def an_initial_pass_that_fails_on_one_rank(rank):
    not_of_that_width = pytest.raises(RuntimeError, match="cannot be multiplied")  # torch's words
    with refuses(Failed, reason="on 1 of the 2 ranks") if rank == 0 else not_of_that_width:
        parallel()[1].initialize([random(2, 4 + rank).to(DEVICE)])


# -- sampled outputs --


def saved_by_the_first(rank, model, opt):
    """The others do nothing meanwhile, and get it later."""
    if rank != 0:
        return [None]
    return [copy.deepcopy((opt.state_dict(), model.module.state_dict()))]


def resumed(saved, **options):
    dist.broadcast_object_list(saved)
    model, opt = parallel(seed=1, **options)
    opt.load_state_dict(saved[0][0])
    model.module.load_state_dict(saved[0][1])
    return model, opt


@case
def samples(rank):
    """Each rank has its own, the weights stay the same, and the first rank's state goes on."""
    torch.manual_seed(rank)
    options = {"refresh_every": 2, "invert_every": 4}
    model, opt = parallel(**options)
    numbers = []

    def train(opt, model, steps):
        for step in steps:
            if opt.refresh_due:
                numbers.append(torch.rand(4, generator=opt.generator.clone_state(), device=DEVICE))
            train_step(opt, model, *data(SIZE * step + rank))

    opt.initialize([data(50 + rank)[0]])
    train(opt, model, range(4))
    saved = saved_by_the_first(rank, model, opt)
    train(opt, model, range(4, 9))
    torch.manual_seed(60 + rank)
    again, later = resumed(saved, **options)
    train(later, again, range(4, 9))
    weights, drawn = on_all(flat(model)), on_all(torch.stack(numbers[:5]))
    assert_same_bits(weights)
    assert torch.equal(flat(model), flat(again))
    assert drawn.unique().numel() == drawn.numel()  # by rank and by step


@case
def samples_of_one_process(rank):
    """Where all have an equal part of a batch; the state of one goes on in the other."""
    options = {"refresh_every": 2, "invert_every": 4, "options": KFACOptions(seed=3)}
    expected = new(net)
    oracle = alone(expected, **options)
    model, opt = parallel(**options | {"options": KFACOptions(seed=3, equal_shares=True)})
    for step in range(3):
        train_step(oracle, expected, *data(step))
        train_step(opt, model, *share(data(step), rank))
    opt.load_state_dict(copy.deepcopy(oracle.state_dict()))
    for step in range(3, 6):
        train_step(oracle, expected, *data(step))
        train_step(opt, model, *share(data(step), rank))
    assert_same_bits(on_all(flat(model)))
    assert_close(flat(model), flat(expected))
    assert_close(factors(opt), factors(oracle))


@case
def shares_that_are_not_equal(rank):
    model, opt = parallel(options=KFACOptions(equal_shares=True))
    with refuses(Mismatch, what="number of rows"):
        train_step(opt, model, *share(data(), rank, 3))


@case
def samples_of_the_initial_pass(rank):
    """Are each rank's own too, and leave those of the steps as they were."""
    batch = data(size=8)[0]
    opt = parallel(options=KFACOptions(seed=3))[1]
    before = opt.generator.get_state()
    opt.initialize([batch])
    after = opt.generator.get_state()
    alike = alone(new(net))
    alike._distribution = opt._distribution  # the seed of this rank, the rows of this rank alone
    alike._seed = opt._seed
    alike.initialize([batch])
    own = on_all(alike.factors()["5"].S)
    assert_close(own.mean(0), opt.factors()["5"].S)
    assert not torch.equal(own[0], own[1])
    assert torch.equal(before, after)


@case
def a_state_with_inversions_on_their_way(rank):
    """The first rank has run its share of them only when it saves; nobody waits."""
    options = {"refresh_every": 1, "invert_every": 4, "options": KFACOptions(inversion_lag=3)}
    model, opt = parallel(**options)
    for step in range(6):
        train_step(opt, model, *data(SIZE * step + rank))
    saved = saved_by_the_first(rank, model, opt)
    for step in range(6, 10):
        train_step(opt, model, *data(SIZE * step + rank))
    again, later = resumed(saved, **options)
    for step in range(6, 10):
        train_step(later, again, *data(SIZE * step + rank))
    assert_same_bits(on_all(flat(model)))
    assert "A_pending" in curvature_state(saved[0][0])["layers"]["0"]
    assert torch.equal(flat(model), flat(again))


@case
def a_state_that_travels_through_a_distributed_checkpoint(rank):
    """Factors, inverses and counters go with it, and a fresh KFAC is left as it is meanwhile."""
    model, opt = parallel(refresh_every=2, invert_every=4)
    for step in range(5):
        train_step(opt, model, *data(SIZE * step + rank))
    weights, state = copy.deepcopy(get_state_dict(model, opt))
    again, later = parallel(seed=1, refresh_every=2, invert_every=4)
    before = flat(again)
    fresh = get_state_dict(again, later)[1]
    assert (later.steps, later.estimator.running.seen) == (0, set())
    assert torch.equal(flat(again), before)
    assert fresh["state"].keys() == state["state"].keys()
    set_state_dict(again, later, model_state_dict=weights, optim_state_dict=state)
    for step in range(5, 9):
        train_step(opt, model, *data(SIZE * step + rank))
        train_step(later, again, *data(SIZE * step + rank))
    assert_same_bits(on_all(flat(model)))
    assert torch.equal(flat(model), flat(again))


# -- what is said --


@case
def names_are_those_of_the_network(rank):
    opt = parallel(options=KFACOptions(exclude=("3",)))[1]
    assert list(opt.factors()) == ["0", "5"]


@case
def a_model_outside_a_wrapper(rank):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kfac.KFAC(new(net), 0.1)
    assert "process_group=torch.distributed.group.WORLD" in str(said[0].message)
    assert "KFAC(DistributedDataParallel(model), ...)" in str(said[0].message)
    assert said[0].filename == __file__
    KFAC(new(net), 0.1, options=KFACOptions(process_group=dist.group.WORLD))


@case
def leaving_before_the_others(rank):
    """Refused at each step, also one that tells the others nothing: they would count apart."""
    for steps_before in (0, 1):
        model, opt = parallel()
        for _ in range(steps_before):
            train_step(opt, model, *data(rank))
        with refuses(Conflict, settings=["K-FAC", "model.join()"]), model.join():
            train_step(opt, model, *data(rank))


@case
def leaving_before_inverses_are_shared(rank):
    model, opt = parallel(invert_every=2, options=KFACOptions(inversion_lag=1))
    for _ in range(3):
        train_step(opt, model, *data(rank))
    with refuses(Conflict, settings=["K-FAC", "model.join()"]), model.join():
        opt.before_step()


@case
def a_layer_that_the_wrapper_ignores(rank):
    """Its gradients are not added up: the KL clip would be another on each rank."""
    network = new(net)
    network._ddp_params_and_buffers_to_ignore = ["0.bias"]
    model = DistributedDataParallel(network)
    opt = KFAC(model, 0.1, kl_clip=1e-3, **EXACT)
    with refuses(Lacks, what="common gradients of layer '0'"):
        train_step(opt, model, *data(rank))
    opt.detach()
    network[0].requires_grad_(False)  # then there is nothing to add up
    opt = KFAC(model, 0.1, kl_clip=1e-3, **EXACT)
    opt.initialize([data(rank)[0]])


@case
def a_layer_that_is_thawed_behind_the_wrapper(rank):
    """Its gradients are not added up: the wrapper knows those that it was built with."""
    network = new(net)
    network[0].requires_grad_(False)
    model = DistributedDataParallel(network)
    opt = KFAC(model, 0.1, **EXACT)
    train_step(opt, model, *data(rank))
    network[0].requires_grad_(True)
    with refuses(Mismatch, what="number of trained parameters"):
        train_step(opt, model, *data(rank))
    opt.detach()
    model = DistributedDataParallel(network)
    opt = KFAC(model, 0.1, **EXACT)
    opt.initialize([data(rank)[0]])
    train_step(opt, model, *data(rank))
    assert_same_bits(on_all(flat(model)))


@case
def shards_behind_its_back(rank):
    """The weights in use are others then, and would stand still."""
    if DEVICE != "cpu":
        return
    model = new(net)
    opt = KFAC(model, 0.1, refresh_every=1, options=KFACOptions(process_group=dist.group.WORLD))
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    x, y = data(rank)
    with opt.paused():
        cross_entropy(model(x), y).backward()
    with refuses(Lacks, what="parameter '0.weight' that KFAC was built with"):
        opt.step()


# -- on CUDA only --


def normalized_net():
    return nn.Sequential(
        *(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5)),
        *(nn.Tanh(), nn.Linear(5, CLASSES)),
    )


def synchronized(model, options):
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    return model, KFAC(model, 0.1, **options)


def batch_norm_over_all_ranks(rank):
    """SyncBatchNorm tells the others of a backward pass: of the extra ones too."""
    trains_as_one(rank, synchronized, build=normalized_net, **EMPIRICAL, damping=0.1)
    model, opt = synchronized(new(normalized_net), {"refresh_every": 2})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    opt.initialize([data(rank)[0], data(2 + rank)[0]])
    for name, buffer in model.named_buffers():
        assert torch.equal(before[name], buffer)
    for step in range(4):
        train_step(opt, model, *data(SIZE * step + rank))
    assert_same_bits(on_all(flat(model)))


def a_captured_step(rank):
    model, opt = parallel(refresh_every=2, others="sgd")
    train_step(opt, model, *data(rank))
    cross_entropy(model(data(rank)[0]), data(rank)[1]).backward()
    counter = torch.zeros((), device=DEVICE)
    excluded = ["a step of several ranks", "a CUDA graph"]
    with refuses(Conflict, settings=excluded), torch.cuda.graph(torch.cuda.CUDAGraph()):
        counter.add_(1)  # torch warns of graphs that are empty
        opt.device_step()


def single_precision(rank):
    """By other kernels than double precision, with inversions beside the training."""
    for lag in (0, 3):
        options = {"refresh_every": 1, "invert_every": 5, "options": KFACOptions(inversion_lag=lag)}
        model = DistributedDataParallel(new(net).float())
        opt = KFAC(model, 0.1, **options)
        for step in range(12):
            x, y = data(SIZE * step + rank)
            train_step(opt, model, x.float(), y)
        assert_same_bits(on_all(flat(model)))


if DEVICE != "cpu":
    for one in (batch_norm_over_all_ranks, a_captured_step, single_precision):
        case(one)


def a_single_process(rank):
    """Alone in its group: bit for bit, with the names and random numbers; a state goes both ways.

    Not among the cases of two.
    """

    def build():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES))

    plain, wrapped = new(build), DistributedDataParallel(new(build))
    single, opt = KFAC(plain, 0.1, refresh_every=2), KFAC(wrapped, 0.1, refresh_every=2)
    for step in range(5):
        train_step(single, plain, *data(step))
        train_step(opt, wrapped, *data(step))
    assert all(map(torch.equal, plain.parameters(), wrapped.parameters()))
    single.load_state_dict(opt.state_dict())
    opt.load_state_dict(single.state_dict())
    # a static graph is refused where gradients of several ranks are added up
    wrapped = DistributedDataParallel(new(net), static_graph=True)
    plain, shown = new(net), {**EXACT, "logits": "observed"}
    single, opt = KFAC(plain, 0.1, **shown), KFAC(wrapped, 0.1, **shown)
    for step in range(3):
        for one, model in ((single, plain), (opt, wrapped)):
            x, y = data(step)
            logits = model(x)
            one.observe(logits)
            cross_entropy(logits, y).backward()
            one.step()
            one.zero_grad()
    assert all(map(torch.equal, plain.parameters(), wrapped.parameters()))


def a_group_of_some(rank):
    """Of three processes the last two train together: as one, from the first of them's seed.

    Not among the cases of two.
    """
    group = dist.new_group([1, 2])
    lone = [dist.new_group([one]) for one in range(SIZE)][rank]
    expected, network = new(net), new(net)
    rare = EXACT | INVARIANT | {"damping": 0.1}
    oracle = alone(expected, **rare)
    torch.manual_seed(10 + rank)
    if rank == 0:
        model, opt = expected, alone(new(net))
    else:
        if rank == 2:  # which has yet to get its weights from the first
            network[0].weight.data.mul_(3)
        chosen = KFACOptions(process_group=group, invariant=("0", "3"))
        opt = KFAC(network, 0.1, **(rare | {"options": chosen}))
        model = DistributedDataParallel(network, process_group=group)
    norms = {name: norm.clone() for name, norm in opt.scale_free.norms.items()}
    for step in range(3):
        train_step(oracle, expected, *data(step))
        if rank:
            train_step(opt, model, *share(data(step), rank - 1))
    weights, seeds = (
        on_all(flat(model)),
        on_all(torch.tensor(curvature_state(opt.state_dict())["seed"])),
    )
    if rank:
        assert_close(norms, {name: new(net)[int(name)].weight.norm() for name in ("0", "3")})
        assert_close(flat(model), flat(expected))
        assert distribution_of(model, lone).size == 1  # a group that is named counts
        two = distribution_of(model, None)
        assert (two.rank, two.size) == (rank - 1, 2)
    assert_same_bits(weights[1:])
    assert seeds.tolist() == [10, 11, 11]


def main(folder, rank, size, device, *chosen):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # torch's first backward on CUDA
    early = KFAC(new(net), 0.1)

    @case
    def built_before_the_processes_met(rank):
        with refuses(Lacks, owner="this KFAC", what="process group"):
            train_step(early, early.model, *data(rank))

    others = {"a_single_process": a_single_process, "a_group_of_some": a_group_of_some}
    cases = {name: (CASES | others)[name] for name in chosen or CASES}
    run_cases(cases, folder, int(rank), SIZE, chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
