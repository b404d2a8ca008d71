"""Watching sharded models, against one process: `sharded_cases.py FOLDER RANK SIZE DEVICE [CASE]`."""

import copy
import math
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from oracle.two_ranks import run_cases
from refusals import refuses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from decaylab import audit_decay, decay_table, diagnose, watch
from decaylab.errors import Conflict, Lacks, Mismatch, WrongType
from decaylab.networks import measure_invariance, sharded
from decaylab.probes import curvature_traces, gauss_newton_norm

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
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 1), nn.GELU())
        self.contract = nn.Linear(2 * WIDTH + 1, WIDTH)

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
    if build is Perceptron:
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


def recorded(build, optimizer, wrap=None, share_of=(0, 1), given=None, **options):
    """Records of a training, settings and layers; in one process if there is no `wrap`."""
    model = new(build)
    shown = model if wrap is None else wrap(model)
    inputs = batch(build, -1, 4)[0] if given is None else given
    optimizers = optimizer(model)
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


@case
def tensor_parallelism_in_fully_shard(rank):
    """Of four processes."""
    free = (*PROBES, "update_correlation", "spectra")
    same_as_alone(rank, Language, adamw, both, data=SIZE // 2, probes=free)


# -- other ways to train a sharded model --


@case
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
    norm = sum(p.full_tensor().double().square().sum() for p in model.blocks[0].qkv.parameters())
    weight = model.blocks[0].qkv.weight.full_tensor().double().norm()
    assert values[20, "weight_norm/blocks.0.qkv"] == pytest.approx(float(weight), rel=1e-6)
    assert norm > 0
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
def checkpointed_activations(rank):
    class Checkpointed(Language):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.temperature * self.head(self.norm(x))

    same_as_alone(rank, Checkpointed, adamw, fully, probes=EVERYTHING)


@case
def with_a_wrong_pass_behind_it(rank):
    """An operation without a forward mode, and a model whose root still holds all its weights."""

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

    def used(model):
        model = fully(model)
        with torch.no_grad():
            model(batch(Own, -2)[0].new_zeros(2, WIDTH))
        assert not isinstance(model.head.weight, DTensor)
        return model

    def numbered(step, size=8):
        return batch(Perceptron, step, size)

    found, expected = (
        _watched_perceptron(Own, wrap, part)
        for wrap, part in ((used, (rank, SIZE)), (None, (0, 1)))
    )
    assert_same(numbers(found), numbers(expected), tolerance=1e-6)


def _watched_perceptron(build, wrap, part):
    model = new(build)
    shown = model if wrap is None else wrap(model)
    optimizer = adamw(model) if wrap is None else adamw(shown)
    inputs = batch(Perceptron, -1, 4)[0]
    with watch(shown, optimizer, every=4, inputs=inputs, probes=EVERYTHING) as watched:
        train(shown, optimizer, Perceptron, share_of=part)
    return watched


def main(folder, rank, size, device, *chosen):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    run_cases(CASES, folder, int(rank), SIZE, chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
