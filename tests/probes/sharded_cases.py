"""Watching sharded models, as one process: `sharded_cases.py FOLDER RANK SIZE DEVICE [CASE]`."""

import copy
import errno
import math
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle.two_ranks import run_cases
from pytorch_optimizer import Lion
from refusals import refuses
from torch import nn
from torch.autograd import forward_ad
from torch.distributed import new_group
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from decaylab import audit_decay, decay_table, diagnose, watch
from decaylab.diagnosis import suggest
from decaylab.errors import Conflict, Failed, Lacks, Mismatch, NotWritten, WrongType
from decaylab.networks import measure_invariance, sharded
from decaylab.optim.optimizer_behaviour import behaviour
from decaylab.probes import curvature_traces, gauss_newton_norm, weight_norms
from decaylab.records import read_recording
from decaylab.records.rows import RowWriter
from decaylab.training import NormTransfer

SIZE = int(sys.argv[3]) if __name__ == "__main__" else 2
FOLDER = sys.argv[1] if __name__ == "__main__" else ""
TOLERANCE = 1e-10
STEPS = 20
TOKENS, WIDTH = 7, 6
CASES = {}
PROBES = ("movement", "weight_norm", "effective_lr", "decay_exposure", "second_moment")
EVERYTHING = (*PROBES, "update_correlation", "size_response", "spectra", "gn_norm", "fr_norm")


def case(function):
    CASES[function.__name__] = function
    return function


class Block(nn.Module):
    """A residual block that has what transformers have: norm, attention of one head, MLP."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 2), nn.GELU())
        self.contract = nn.Linear(2 * WIDTH + 2, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.contract(self.mlp(x))


class Language(nn.Module):
    """The head is tied to the embedding; the last norm's gain and a scale stand alone."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.temperature * self.head(self.norm(x))


class Perceptron(nn.Module):
    """Layers before a norm, by order of modules; inputs are numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Linear(WIDTH, 9), nn.LayerNorm(9, elementwise_affine=False)
        self.second, self.norm2 = nn.Linear(9, 5), nn.LayerNorm(5)
        self.head = nn.Linear(5, TOKENS)

    def forward(self, x):
        return self.head(self.norm2(self.second(self.norm1(self.first(x)).tanh())))


def new(build):
    torch.manual_seed(0)
    return build().double()


def batch(build, step, size=8):
    generator = torch.Generator().manual_seed(100 + step)
    if issubclass(build, Perceptron):
        x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        return x, torch.randint(TOKENS, (size,), generator=generator)
    x = torch.randint(TOKENS, (size, 5), generator=generator)
    return x, torch.randint(TOKENS, (size, 5), generator=generator)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01, amsgrad=False)


def lion(model):
    return Lion(model.parameters(), lr=0.001, weight_decay=0.5)


def muon(model):
    """Muon on the matrices of the blocks, AdamW on all else."""
    matrices = [p for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.1),
    ]


def fully(model, mesh=None, **options):
    """fully_shard of every block, and then of the model."""
    mesh = mesh or init_device_mesh("cpu", (SIZE,))
    for block in getattr(model, "blocks", [model.first] if hasattr(model, "first") else []):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def hybrid(model):
    """Replicas of the model, each sharded."""
    return fully(model, init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("many", "shards")))


def hybrid_of_one(model):
    """One replica, sharded."""
    return fully(model, init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("many", "shards")))


PLAN = {"mlp.0": ColwiseParallel(), "contract": RowwiseParallel()}


def tensor_parallel(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (SIZE,))
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    return model


def both(model):
    """Tensor parallelism within fully_shard."""
    mesh = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    return fully(model, mesh["data"])


def share(part, rank, parts):
    return part[rank % parts :: parts]


def train(model, optimizers, build, *, share_of=(0, 1), steps=STEPS, watched=None, clip=None):
    """Steps of the mean loss over a batch, of which this process has a share."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for step in range(steps):
        x, y = (share(part, *share_of) for part in batch(build, step))
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if watched is not None:
            watched.log(loss=loss)


def numbers(watched):
    return {(row.step, row.name): row.value for row in watched.records.rows}


def assert_same(found, expected, tolerance=TOLERANCE):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = {}
    for key, value in found.items():
        # an angle from a difference of squares has the root of their precision
        own = max(tolerance, 1e-8) if "direction_response" in key[1] else tolerance
        if not abs(value - expected[key]) <= own * max(1.0, abs(expected[key])):
            wrong[key] = value, expected[key]
    assert not wrong, wrong


def recorded(build, optimizer, wrap=None, share_of=(0, 1), *, used=False, **options):
    """Records of a training, settings and layers; in one process if there is no `wrap`."""
    model = new(build)
    shown = model if wrap is None else wrap(model)
    inputs, optimizers = batch(build, -1, 4)[0], optimizer(model)
    if used:  # the root of a sharded model then still holds all its weights
        with torch.no_grad():
            shown(inputs)
        assert wrap is None or not isinstance(shown.head.weight, DTensor)
    with watch(shown, optimizers, every=4, inputs=inputs, **options) as watched:
        train(shown, optimizers, build, share_of=share_of, watched=None)
    return watched


def same_as_alone(rank, build, optimizer, wrap, *, tolerance=TOLERANCE, data=None, **options):
    """Every row, every layer's settings and what diagnose says are those of one process."""
    data = SIZE if data is None else data
    share_of = (rank if data == SIZE else rank // (SIZE // data), data)
    found = recorded(build, optimizer, wrap, share_of, **options)
    expected = recorded(build, optimizer, **options)
    assert numbers(expected)
    assert_same(numbers(found), numbers(expected), tolerance)
    assert found.recording.settings == expected.recording.settings
    assert [e.kind for e in found.recording.events] == [e.kind for e in expected.recording.events]
    return found, expected


# -- fully_shard --


@case
def fully_sharded(rank):
    found, expected = same_as_alone(rank, Language, adamw, fully, probes=EVERYTHING)
    names = {row.name.partition("/")[0] for row in found.records.rows}
    wanted = {"rotation", "second_moment", "size_response", "decay_response", "gn_norm", "fr_norm"}
    assert names >= wanted | {"spectral_norm", "gradient_norm", "update_correlation"}
    assert str(diagnose(found)) == str(diagnose(expected))


@case
def diagnosed_probes_of_numbers(rank):
    found, _ = same_as_alone(rank, Perceptron, adam, fully, probes="diagnosis")
    assert "jacobian_norm" in {row.name for row in found.records.rows}


@case
def invariance_by_order_of_modules(rank):
    """Without inputs: gradients along the weights are recorded instead."""
    share_of = (rank, SIZE)
    names = set()
    runs = []
    for wrap, part in ((fully, share_of), (None, (0, 1))):
        model = new(Perceptron)
        shown = model if wrap is None else wrap(model)
        optimizer = sgd(model)
        with watch(shown, optimizer, every=3) as watched:
            train(shown, optimizer, Perceptron, share_of=part, clip=0.1)
        runs.append(numbers(watched))
        names = {row.name for row in watched.records.rows}
    assert "radial_gradient/first" in names
    assert_same(*runs, tolerance=1e-9)  # the radial part is a cancellation


@case
def with_muon(rank):
    """It orthogonalises in bfloat16, whose rounding depends on the order of sums."""
    found, expected = (
        recorded(Language, muon, wrap, part, probes=EVERYTHING)
        for wrap, part in ((fully, (rank, SIZE)), (None, (0, 1)))
    )
    assert found.recording.settings == expected.recording.settings
    one, other = numbers(found), numbers(expected)
    assert one.keys() == other.keys()
    smooth = [key for key in one if key[1].startswith(("weight_norm", "rotation", "effective_lr"))]
    assert_same({key: one[key] for key in smooth}, {key: other[key] for key in smooth}, 0.02)


@case
def replicas_of_shards(rank):
    same_as_alone(rank, Language, adamw, hybrid, probes=EVERYTHING)
    same_as_alone(rank, Language, adamw, hybrid_of_one, probes=EVERYTHING)


# -- tensor parallelism: no forward mode there, so differences --


@case
def tensor_parallelism(rank):
    free = (*PROBES, "update_correlation", "spectra")
    same_as_alone(rank, Language, adamw, tensor_parallel, data=1, probes=free)
    model, inputs = tensor_parallel(new(Language)), batch(Language, -1, 4)[0]
    norms = [gauss_newton_norm(m, inputs) for m in (model, new(Language))]
    assert norms[0].total == pytest.approx(norms[1].total, rel=1e-6)
    assert norms[0].layers == pytest.approx(norms[1].layers, rel=1e-6)


def tensor_parallelism_in_fully_shard(rank):
    """Of four processes."""
    free = (*PROBES, "update_correlation", "spectra")
    same_as_alone(rank, Language, adamw, both, data=SIZE // 2, probes=free)


# -- other ways to train a sharded model --


def replicas_and_shards_of_four(rank):
    """Each replica has its own part of the batch, and each of its shards too."""
    same_as_alone(rank, Language, adamw, hybrid, probes=EVERYTHING)


@case
def in_lower_precision(rank):
    """Passes are in bfloat16; weights, moments and what is measured of them are not."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully(new(Language).float(), mp_policy=policy)
    inputs, optimizer = batch(Language, -1, 4)[0], adamw(model)
    exact = measure_invariance(new(Language).float(), inputs)
    with watch(model, optimizer, every=4, inputs=inputs, probes=EVERYTHING) as watched:
        train(model, optimizer, Language, share_of=(rank, SIZE))
    values = numbers(watched)
    weight = model.blocks[0].qkv.weight.detach().full_tensor().double().norm()
    assert values[20, "weight_norm/blocks.0.qkv"] == pytest.approx(float(weight), rel=1e-6)
    for name in exact.layers:
        if not math.isnan(exact.defects[name]):
            response = values[1, f"size_response/{name}"]
            assert response == pytest.approx(exact.size_response(name).size / 100, abs=2e-3)
    assert {e.kind for e in watched.recording.events} == set()


@case
def offloaded_to_the_cpu(rank):
    def offloaded(model):
        return fully(model, offload_policy=CPUOffloadPolicy(pin_memory=False))

    same_as_alone(rank, Language, adamw, offloaded, probes=EVERYTHING)


@case
def modules_sharded_as_one_and_parameters_left_out(rank):
    """A tied head in one group with its embedding; a parameter that every process has whole."""

    def grouped(model):
        mesh = init_device_mesh("cpu", (SIZE,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard([model.embedding, model.head], mesh=mesh)
        return fully_shard(model, mesh=mesh, ignored_params={model.temperature})

    def still(model):
        return torch.optim.AdamW(
            [p for p in model.parameters() if p.numel() > 1], lr=0.02, weight_decay=0.5
        )

    same_as_alone(rank, Language, still, grouped, probes=EVERYTHING)


@case
def norms_of_another_run(rank):
    """`NormTransfer` gives a sharded model the norms that were recorded."""
    recorded_run = recorded(Perceptron, adamw)
    wanted = numbers(recorded_run)[20, "weight_norm/first"]
    model = fully(new(Perceptron))
    NormTransfer(model, recorded_run)(20)
    assert weight_norms(model).layers["first"] == pytest.approx(wanted, rel=1e-12)


@case
def checkpointed_activations(rank):
    class Checkpointed(Language):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.temperature * self.head(self.norm(x))

    tolerance = TOLERANCE if checkpoints_have_a_forward_mode() else 1e-6  # by differences
    same_as_alone(rank, Checkpointed, adamw, fully, probes=EVERYTHING, tolerance=tolerance)


def checkpoints_have_a_forward_mode():
    """From torch 2.12 on."""
    with torch.no_grad(), forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch scripts its own decompositions
        dual = forward_ad.make_dual(torch.ones(1), torch.ones(1))
        try:
            checkpoint(torch.sin, dual, use_reentrant=False)
        except NotImplementedError:
            return False
    return True


@case
def a_pass_that_is_cut_short(rank):
    """The model holds its shards afterwards, and the next pass gathers them anew."""
    model, alone = fully(new(Language)), new(Language)
    model.set_modules_to_forward_prefetch([model.blocks[1]])
    x = batch(Language, 0)[0]
    with torch.no_grad():
        model(x)
        hook = model.blocks[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), sharded.passing(model):
            model(x)
        hook.remove()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for changed in (model, alone):  # of the root, and of a block that was gathered ahead
            for parameter in (changed.temperature, changed.blocks[1].contract.bias):
                sharded.local(parameter).mul_(3)
        assert torch.allclose(model(x), alone(x))


@case
def without_a_forward_mode_and_after_a_pass(rank):
    """An operation without one, in a model whose root still holds all its weights."""

    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            s = x.sigmoid()
            return gradient * (s + x * s * (1 - s))

    class Own(Perceptron):
        def forward(self, x):
            return self.head(self.norm2(self.second(Swish.apply(self.norm1(self.first(x))))))

    same_as_alone(rank, Own, adamw, fully, probes=EVERYTHING, tolerance=1e-6, used=True)


# -- what processes must do together, and what one may do alone --


@case
def one_rank_alone_is_refused(rank):
    """It waits at the meeting, and says so; nothing has been sent."""
    model = fully(new(Perceptron))
    optimizer, inputs = adamw(model), batch(Perceptron, -1, 4)[0]
    before = sharded.SECONDS_TO_WARN, sharded.SECONDS_TO_WAIT
    sharded.SECONDS_TO_WARN, sharded.SECONDS_TO_WAIT = 0.1, 0.5
    try:
        if rank == 0:
            with (
                pytest.warns(UserWarning, match="waits for rank 1"),
                refuses(Lacks, owner="watch(...) on rank 0", what="counterpart on rank 1"),
            ):
                watch(model, optimizer, inputs=inputs)
        else:
            next(sharded._meetings[tuple(range(SIZE))])  # a call of watch that never came
    finally:
        sharded.SECONDS_TO_WARN, sharded.SECONDS_TO_WAIT = before
    dist.barrier()
    train(model, optimizer, Perceptron, steps=1, share_of=(rank, SIZE))


def teams_that_overlap(rank):
    """Two of the four processes have met before all do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("many", "shards"))
    with mock.patch.object(sharded, "SECONDS_TO_WAIT", 5.0):
        if rank < 2:
            sharded.Team(mesh["shards"]).meet("watch(...)", {"steps between records": 1})
        dist.barrier()
        sharded.Team(mesh).meet("watch(...)", {"steps between records": 2})


@case
def ranks_that_watch_otherwise_are_refused(rank):
    model = fully(new(Perceptron))
    optimizer, inputs = adamw(model), batch(Perceptron, -1, 4 + rank)[0]
    with refuses(Mismatch, what="shapes of the inputs"):
        watch(model, optimizer, inputs=inputs)
    with refuses(Mismatch, what="steps between records"):
        watch(model, optimizer, every=10 + rank)


@case
def the_first_rank_inputs_count(rank):
    """Each gives its own batch: all measure on the first one's."""
    model = fully(new(Perceptron))
    own, first = (batch(Perceptron, -1 - r, 4)[0] for r in (rank, 0))
    with watch(model, adamw(model), inputs=(own,)) as watched:
        (given,) = watched.inputs
    assert torch.equal(given, first)


@case
def one_rank_may_read_and_diagnose(rank):
    """It writes the only file; logs are of each process; no one waits for anyone."""
    folder, rows = f"{FOLDER}/written", []
    model = fully(new(Language))
    optimizer, inputs = adamw(model), batch(Language, -1, 4)[0]

    class Tracker:
        def log(self, given):
            rows.extend(given)

    with watch(model, optimizer, every=4, inputs=inputs, folder=folder, trackers=[Tracker()]) as w:
        train(model, optimizer, Language, share_of=(rank, SIZE), watched=w)
        if rank == 0:
            w.log(test_loss=1.0)
            assert "effective learning rate" in str(diagnose(w))
    if rank == 0:
        recording = read_recording(folder)
        assert set(recording.outcomes) == {"loss", "test_loss"}
        written = {(row.step, row.name): row.value for row in recording.rows.rows}
        assert written == numbers(w)
        assert len(rows) == len(written)
        advice = suggest(recording, steps=1000)
        assert str(advice)
    else:
        assert rows == []
        assert w.recording.meta.folder is None
    losses = [value for (_, name), value in numbers(w).items() if name == "outcome/loss"]
    gathered = [torch.zeros(STEPS, dtype=torch.float64) for _ in range(SIZE)]
    dist.all_gather(gathered, torch.tensor(losses, dtype=torch.float64))
    assert not torch.equal(*gathered)


@case
def a_disk_that_is_full(rank):
    """It fails the first one's writes alone, and no measurement that the others wait in."""
    model = fully(new(Perceptron))
    probes = ("weight_norm", "update_correlation")
    watched = watch(model, adamw(model), every=2, probes=probes, folder=f"{FOLDER}/full")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        mock.patch.object(RowWriter, "append", full),
        pytest.warns(UserWarning, match="No space") if rank == 0 else nullcontext(),
        watched,
    ):
        train(model, watched.optimizer, Perceptron, share_of=(rank, SIZE), steps=6)
    names = {(step, name.partition("/")[0]) for step, name in numbers(watched)}
    assert names >= {(step, "weight_norm") for step in (1, 2, 4, 6)}
    assert names >= {(step, "update_correlation") for step in (2, 3, 5)}


@case
def folders_that_fail_on_the_first_rank(rank):
    """All are told, and none waits; the others may name no folder."""
    model = fully(new(Perceptron))
    path = Path(FOLDER, "a file")
    path.touch()
    folder = path / "in it" if rank == 0 else None
    with pytest.raises(NotADirectoryError if rank == 0 else Failed):
        watch(model, adamw(model), folder=folder)
    folder = f"{FOLDER}/damaged" if rank == 0 else None
    with watch(model, adamw(model), every=1, folder=folder) as watched:
        if rank == 0:
            Path(FOLDER, "damaged", "rows.jsonl").mkdir()
        with pytest.raises(NotWritten if rank == 0 else Failed):
            watched.resume(0)
        if rank == 0:
            Path(FOLDER, "damaged", "rows.jsonl").rmdir()
        train(model, watched.optimizer, Perceptron, share_of=(rank, SIZE), steps=1)


@case
def training_is_left_alone(rank):
    """Bit for bit, as are the generators."""
    ends = []
    for probes in (None, EVERYTHING):
        model = fully(new(Language))
        optimizer, inputs = adamw(model), batch(Language, -1, 4)[0]
        if probes is None:
            train(model, optimizer, Language, share_of=(rank, SIZE))
        else:
            with watch(model, optimizer, every=3, inputs=inputs, probes=probes):
                train(model, optimizer, Language, share_of=(rank, SIZE))
        state = [p.detach().to_local() for p in model.parameters()]
        state += [optimizer.state[p]["exp_avg_sq"].to_local() for p in model.parameters()]
        ends.append([*state, torch.get_rng_state()])
    assert all(map(torch.equal, *ends))


@case
def messages(rank):
    """Nothing is sent between records; of weights, as many messages however many layers."""
    counts = {}
    all_reduce = dist.all_reduce

    class Deep(Language):
        def __init__(self):
            super().__init__()
            self.blocks.extend([Block(), Block()])

    for build in (Language, Deep):
        model = fully(new(build))
        optimizer, sent = adamw(model), []

        def counted(*args, sent=sent, **kwargs):
            sent.append(len(sent))
            return all_reduce(*args, **kwargs)

        with (
            mock.patch.object(dist, "all_reduce", counted),
            watch(model, optimizer, every=4) as watched,
        ):
            for step in range(1, 9):
                before = len(sent)
                train(model, optimizer, Language, share_of=(rank, SIZE), steps=1)
                now = len(sent) - before
                assert (now > 0) == (step in (1, 4, 8))
                counts.setdefault(step, set()).add(now)
            before = len(sent)
            assert numbers(watched)
            watched.log(loss=1.0)
        assert len(sent) == before
    assert all(len(of_step) == 1 for of_step in counts.values())
    assert max(counts[4]) <= 16


@case
def sharded_numbers_that_are_logged(rank):
    """Whole ones are taken as they are; what would have to be gathered is refused."""
    model = fully(new(Perceptron))
    mesh = model.head.weight.device_mesh
    loss = torch.tensor(2.0 + rank)
    with watch(model, adamw(model)) as watched:
        watched.log(loss=DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()]))
        with refuses(WrongType):
            watched.log(norm=DTensor.from_local(loss, mesh, [Partial()], run_check=False))
    assert numbers(watched) == {(0, "outcome/loss"): 2.0}


@case
def loops_that_break_off_at_different_places(rank):
    """No `with` waits for another rank at its end, not even amid a round of two optimizers."""
    model = fully(new(Language))
    optimizers = muon(model)

    class Broken(Exception):
        pass

    watched = watch(model, optimizers, every=1)

    def loop():
        with watched:
            train(model, optimizers, Language, share_of=(rank, SIZE), steps=2)
            if rank == 0:
                optimizers[0].step()  # without gradients: it sends nothing
            raise Broken

    with pytest.raises(Broken):
        loop()
    assert max(step for step, _ in numbers(watched)) == 2


@case
def resumed_from_a_distributed_checkpoint(rank):
    """Saved after 8 steps, killed after 12 and resumed: as in one process."""
    found = _resumed(fully, "resumed", (rank, SIZE))
    expected = _resumed(None, f"alone{rank}", (0, 1))
    assert_same(numbers(found), numbers(expected))
    assert found.exposure() == pytest.approx(expected.exposure())
    assert [event.kind for event in found.recording.events].count("resumed") == 1
    if rank == 0:
        rows = read_recording(f"{FOLDER}/resumed").rows.rows
        assert {(row.step, row.name): row.value for row in rows} == numbers(found)


def _resumed(wrap, name, share_of):
    folder, options = f"{FOLDER}/{name}", {"every": 4, "probes": EVERYTHING}
    checkpoint_id = f"{folder}-checkpoint"
    inputs = batch(Language, -1, 4)[0]
    states = {}
    for resumes in (False, True):
        model = new(Language)
        shown = model if wrap is None else wrap(model)
        optimizer = adamw(model)
        if resumes and wrap is None:
            model.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
        elif resumes:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            load(state, checkpoint_id=checkpoint_id)
            model_state, optimizer_state = state["model"], state["optimizer"]
            set_state_dict(
                *(model, optimizer),
                model_state_dict=model_state,
                optim_state_dict=optimizer_state,
            )
        with watch(shown, optimizer, inputs=inputs, folder=folder, **options) as watched:
            if resumes:
                watched.resume(8)
            train(shown, optimizer, Language, share_of=share_of, steps=8)
            if resumes:
                return watched
            if wrap is None:
                states = copy.deepcopy(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                )
            else:
                pair = get_state_dict(model, optimizer)
                save({"model": pair[0], "optimizer": pair[1]}, checkpoint_id=checkpoint_id)
            train(shown, optimizer, Language, share_of=share_of, steps=4)
    raise AssertionError


# -- what reads optimizers, and what is refused --


@case
def tables_and_audits(rank):
    """One process may call them alone."""
    model, expected = fully(new(Language)), new(Language)
    if rank == 0:
        for optimizer in (adamw, muon, lion):
            table = decay_table(model, optimizer(model))
            assert str(table) == str(decay_table(expected, optimizer(expected)))
            assert all(row.decay == "decoupled" for row in table)
        audit = audit_decay(lambda: (model, adamw(model)))
        assert audit.passed
        assert audit.operator.kind == "decoupled"
    dist.barrier()


@case
def an_optimizer_that_waits_for_others_is_not_tried(rank):
    class Waiting(torch.optim.SGD):
        def step(self, closure=None):
            dist.all_reduce(torch.ones(1))
            return super().step(closure)

    class Founding(torch.optim.SGD):
        def __init__(self, params, lr=0.1, weight_decay=0.1):
            super().__init__(params, lr=lr, weight_decay=weight_decay)
            self.group = new_group()

    class Meshed(torch.optim.SGD):
        def __init__(self, params, lr=0.1, weight_decay=0.1):
            super().__init__(params, lr=lr, weight_decay=weight_decay)
            self.mesh = init_device_mesh("cpu", (SIZE, 1))

    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model = fully(new(Perceptron))
    kinds = (Waiting, Founding, Meshed)
    unknown = [kind(model.parameters(), lr=0.1, weight_decay=0.1) for kind in kinds]
    if rank == 0:
        for waiting in unknown:
            assert behaviour(waiting, waiting.param_groups[0]).operator.kind == "unknown"
        own = Own(model.parameters(), lr=0.1, weight_decay=0.1)
        assert behaviour(own, own.param_groups[0]).decay == "decoupled"
    dist.barrier()


@case
def what_is_refused(rank):
    flat = FullyShardedDataParallel(
        new(Perceptron), use_orig_params=True, device_id=torch.device("cpu")
    )
    inputs = batch(Perceptron, -1, 4)[0]
    for refused in (
        lambda: watch(flat, adamw(flat)),
        lambda: decay_table(flat, adamw(flat)),
        lambda: measure_invariance(flat, inputs),
    ):
        with refuses(Conflict):
            refused()
    model = fully(new(Perceptron))
    with refuses(Lacks, owner="the sharded model"):
        curvature_traces(model, inputs, samples=2)
    refused = ["gn_trace", "fisher_trace", "kfac_gn_norm"]
    watched = watch(model, adamw(model), every=1, inputs=inputs, probes=[*refused, "weight_norm"])
    with warnings.catch_warnings(record=True) as caught, watched:
        warnings.simplefilter("always")
        train(model, watched.optimizer, Perceptron, share_of=(rank, SIZE), steps=2)
    said = [name for name in refused if any(f"{name} at step" in str(w.message) for w in caught)]
    assert said == (refused if rank == 0 else [])
    assert "weight_norm" in {name for _, name in numbers(watched)}
    events = watched.recording.events
    assert [(event.kind, event.data["probe"]) for event in events] == [
        ("probe-failed", name) for name in refused
    ]


@case
def compiled(rank):
    """Each block, in place, and the whole model around them; what is measured runs uncompiled."""
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    def wrap(model):
        for block in model.blocks:
            block.compile(backend=counted)
        return torch.compile(fully(model), backend=counted)

    same_as_alone(rank, Language, adamw, wrap, probes=EVERYTHING)
    watched = len(graphs)
    torch.compiler.reset()
    model = new(Language)
    train(wrap(model), adamw(model), Language, share_of=(rank, SIZE))
    assert len(graphs) == 2 * watched


# -- replicas of a whole model --


@case
def data_parallel(rank):
    """As sharded: every process may name the folder, and the first one writes."""
    folder = f"{FOLDER}/parallel"
    model = new(Language)
    shown, optimizer = DistributedDataParallel(model), adamw(model)
    inputs = batch(Language, -1, 4)[0]
    with watch(shown, optimizer, every=4, inputs=inputs, probes=EVERYTHING, folder=folder) as w:
        train(shown, optimizer, Language, share_of=(rank, SIZE), watched=w)
    alone = recorded(Language, adamw, probes=EVERYTHING)
    values = {key: value for key, value in numbers(w).items() if key[1] != "outcome/loss"}
    assert_same(values, numbers(alone))
    if rank == 0:
        rows = read_recording(folder).rows
        assert rows.superseded == 0
        assert {(row.step, row.name): row.value for row in rows.rows} == numbers(w)


@case
def optimizer_states_divided_between_replicas(rank):
    """ZeRO: a process has the moments of some parameters, and steps these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts what is beside it
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def redundant(model):
        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.02, weight_decay=0.5
        )

    model = new(Language)
    shown, optimizer = DistributedDataParallel(model), redundant(model)
    inputs = batch(Language, -1, 4)[0]
    with watch(shown, optimizer, every=4, inputs=inputs, probes=EVERYTHING) as watched:
        train(shown, optimizer, Language, share_of=(rank, SIZE))
    expected = recorded(Language, adamw, probes=EVERYTHING)
    values, wanted = numbers(watched), numbers(expected)
    moments = {key for key in wanted if key[1].startswith("second_moment")}
    own = moments & values.keys()
    assert 0 < len(own) < len(moments)
    assert_same(values, {key: v for key, v in wanted.items() if key not in moments - own})
    assert watched.recording.settings == expected.recording.settings
    table = decay_table(model, optimizer)
    assert str(table) == str(decay_table(model, adamw(model)))


def main(folder, rank, size, device, *chosen):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    warnings.filterwarnings("ignore", "The .grad attribute")  # torch.compile of a sharded block
    of_four = (
        tensor_parallelism_in_fully_shard,
        replicas_and_shards_of_four,
        teams_that_overlap,
    )
    cases = {name: CASES.get(name) for name in chosen or CASES}
    cases |= {function.__name__: function for function in of_four}
    run_cases(cases, folder, int(rank), SIZE, chosen or tuple(CASES))


if __name__ == "__main__":
    main(*sys.argv[1:])
