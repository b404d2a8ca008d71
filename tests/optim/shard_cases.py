"""What ranks do with shards, each case in all: `shard_cases.py FOLDER RANK SIZE DEVICE [CASE ...]`.

As `rank_cases.py`. Layers have fewer rows than three ranks could share evenly, and some ranks none.
"""

import copy
import io
import sys
import warnings

import torch
import torch.distributed as dist
from oracle.kfac_runs import cross_entropy, labels_for, random, seeded
from oracle.two_ranks import run_cases
from refusals import refuses
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from decaylab import KFAC
from decaylab.errors import Conflict, Lacks, Mismatch
from decaylab.optim.kfac_state import curvature_state
from decaylab.optim.options import KFACOptions

CLASSES, TOKENS, ROWS = 3, 7, 12
SIZE = int(sys.argv[3]) if __name__ == "__main__" else 2
TOLERANCE = 1e-10
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# -- models --


def mlp():
    return nn.Sequential(
        *(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh()),
        nn.Linear(4, CLASSES),
    )


def conv_net():
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1), nn.Tanh()),
        *(nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


class TransformerBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """The head is the embedding: a layer, or `F.linear` with its weight."""

    def __init__(self, *, functional_head=False, checkpoints=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, 4), nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(TransformerBlock(4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(4), None
        self.checkpoints = checkpoints
        if not functional_head:
            self.head = nn.Linear(4, TOKENS, bias=False)
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]).expand_as(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        x = self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)


class Attention(nn.Module):
    """Its products are functions of the gathered weights; as are the recurrent layer's."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.gru, self.last = nn.GRU(4, 3), nn.Linear(3, CLASSES)

    def forward(self, x):
        x = x.unflatten(1, (2, 2)).repeat(1, 1, 2)
        outputs, _ = self.gru(self.attention(x, x, x, need_weights=False)[0].transpose(0, 1))
        return self.last(outputs[-1])


class Experts(nn.Module):
    """One parameter for all, of which each product has a view; as Mixtral has them."""

    num_experts = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.num_experts, 5, 4))

    def forward(self, x):
        chosen = x[:, :3].argmax(1)
        outputs = x.new_zeros(len(x), 5)
        for expert in range(self.num_experts):
            rows = (chosen == expert).nonzero()[:, 0]
            outputs = outputs.index_add(0, rows, F.linear(x[rows], self.weight[expert]))
        return outputs


def mixture():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Experts(), nn.Tanh(), nn.Linear(5, CLASSES))


def data(step):
    return random(ROWS, 4, seed=step), labels_for(ROWS, classes=CLASSES, seed=step)


def text(step):
    tokens = labels_for(ROWS, 6, classes=TOKENS, seed=step)
    return tokens[:, :-1], tokens[:, 1:]


def share(batch, rank, size=None):
    return tuple(part.chunk(size or SIZE)[rank] for part in batch)


def sharded(model, **options):
    """Each block by itself, and the rest with the whole."""
    for block in getattr(model, "blocks", [m for m in model.children() if [*m.parameters()]][:1]):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def alone(model, **options):
    """A KFAC of this process's own, which the others tell nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="there are several processes")
        return KFAC(model, 0.05, **options)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights(model):
    return torch.cat([whole(p).detach().flatten() for p in model.parameters()])


def own_weights(model):
    return torch.cat([p.to_local().detach().flatten() for p in model.parameters()])


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def train(model, opt, steps, rank=None, batches=data):
    """The loop that SGD has; without a rank on whole batches."""
    for step in steps:
        x, y = batches(step) if rank is None else share(batches(step), rank)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()


def kfac_of(model, options):
    given = dict(options)
    kept = {"seed": 3, "equal_shares": True, **given.pop("options", {})}
    return KFAC(model, 0.05, options=KFACOptions(**kept), **given)


# -- as one process with the whole batch, and as under DistributedDataParallel --

RARE = {"outputs": "exact", "refresh_every": 2, "invert_every": 4, "weight_decay": 0.1}
INVARIANT = {"damping_scaling": "scale-free", "damping": 0.1}
UNSCALED = {"step_scaling": "none", "kl_clip": 1e-3}
SPECTRAL = {"step_scaling": "spectral"}


def trains_as_one(
    rank, build=mlp, batches=data, shard=sharded, steps=12, train_sharded=train, **options
):
    options = RARE | options
    one = seeded(build)
    chosen = {"seed": 3, **options.get("options", {})}
    oracle = alone(one, **(options | {"options": KFACOptions(**chosen)}))
    train(one, oracle, range(steps), batches=batches)
    model = shard(seeded(build))
    opt = kfac_of(model, options)
    train_sharded(model, opt, range(steps), rank, batches)
    assert_close(weights(model), weights(one))
    factors, expected = opt.factors(), oracle.factors()
    for name in expected:
        for side in "AST":
            assert_close(getattr(factors[name], side), getattr(expected[name], side))
    return model, opt


for name, given in {
    "steps_of_a_set_size": {"steps": 30},
    "spectral_steps": {"steps": 30, **SPECTRAL},
    "a_kl_clip": {"steps": 30, **UNSCALED, "decay": "l2"},
    "independent_decay": {"decay": "independent", "others": "sgd"},
    "gauss_newton": {"curvature": "gauss-newton", **UNSCALED},
    "empirical_fisher": {"curvature": "empirical-fisher"},
    "sampled_outputs": {"outputs": "sampled"},
    "scale_free_damping": {**INVARIANT, "options": {"invariant": ("0", "3")}},
    "inversions_that_lag": {"options": {"inversion_lag": 2}},
    "diagonal_sides": {"max_factor_dim": 4, "decay": "l2"},
    "momentum_first_and_l2": {"decay": "l2", "options": {"momentum_first": True}},
    "convolutions": {"build": conv_net, "steps": 30},
    "convolutions_and_spectral_steps": {"build": conv_net, **SPECTRAL},
    "functional_layers": {"build": Attention, "shard": fully_shard},
    "experts": {"build": mixture, "shard": fully_shard},
    "a_small_gpt": {"build": GPT, "batches": text, "steps": 30},
    "a_small_gpt_and_spectral_steps": {"build": GPT, "batches": text, "steps": 30, **SPECTRAL},
    "a_functional_head": {"build": lambda: GPT(functional_head=True), "batches": text},
    "checkpoints": {"build": lambda: GPT(checkpoints=True), "batches": text},
    "no_resharding_after_forward": {
        "shard": lambda model: sharded(model, reshard_after_forward=False),
        **{"build": GPT, "batches": text},
    },
}.items():

    def one_of_them(rank, given=given):
        trains_as_one(rank, **given)

    CASES[f"as_one_process_with_{name}"] = one_of_them


@case
def as_distributed_data_parallel(rank):
    """With samples of each rank's own."""
    for options in ({}, SPECTRAL):
        parallel, model = DistributedDataParallel(seeded(GPT)), sharded(seeded(GPT))
        for network in (parallel, model):
            opt = KFAC(network, 0.05, refresh_every=2, weight_decay=0.1, **options)
            train(network, opt, range(12), rank, text)
        assert_close(weights(model), weights(parallel))


@case
def compiled_models(rank):
    """A refresh runs the eager modules."""

    def blocks_first(model):
        for block in model.blocks:
            block.compile(backend="eager")
        return sharded(model)

    def the_whole(model):
        return torch.compile(sharded(model), backend="eager")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # torch's compiler looks there
        for shard in (blocks_first, the_whole):
            trains_as_one(rank, build=GPT, batches=text, shard=shard)


@case
def shards_of_columns(rank):
    """Another axis than the first, which must be even."""

    def build():
        return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, CLASSES))

    def shard(model):
        last = model[2].weight
        return fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p is last else None)

    for options in ({}, SPECTRAL):
        model, _ = trains_as_one(rank, build=build, shard=shard, **options)
        assert model[2].weight.placements == (Shard(1),)


@case
def accumulated_gradients(rank):
    """Reduced at the last of the passes."""

    def accumulating(model, opt, steps, rank, batches):
        for step in steps:
            for part in range(2):
                x, y = share(share(batches(step), rank), part, 2)
                model.set_requires_gradient_sync(part == 1)
                (cross_entropy(model(x), y) / 2).backward()
            opt.step()
            opt.zero_grad()

    # by a curvature without samples: those of both parts would be drawn in another order
    trains_as_one(rank, train_sharded=accumulating, curvature="gauss-newton")


@case
def clipped_gradients(rank):
    one, model = seeded(GPT), sharded(seeded(GPT))
    oracle, opt = alone(one, **RARE, options=KFACOptions(seed=3)), kfac_of(model, RARE)
    for step in range(6):
        for network, batch in ((one, text(step)), (model, share(text(step), rank))):
            cross_entropy(network(batch[0]), batch[1]).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.05)
        for optimizer in (oracle, opt):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), weights(one))


@case
def frozen_parameters(rank):
    """Before, and for some steps: then a layer's other part moves as if it were a constant."""

    def build():
        model = mlp()
        model[3].bias.requires_grad_(False)
        return model

    def thawing(model, opt, steps, rank=None, batches=data):
        for step in steps:
            model[5].weight.requires_grad_(step % 4 != 1)
            train(model, opt, [step], rank, batches)

    one, model = seeded(build), sharded(seeded(build))
    oracle, opt = alone(one, **RARE, options=KFACOptions(seed=3)), kfac_of(model, RARE)
    thawing(one, oracle, range(8))
    thawing(model, opt, range(8), rank)
    assert_close(weights(model), weights(one))


@case
def replicas_of_shards(rank):
    """On a mesh of two axes: two shards each."""
    if SIZE % 2:
        return
    mesh = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("replicas", "shards"))
    for options in ({}, SPECTRAL):
        build = {"build": GPT, "batches": text}
        trains_as_one(rank, shard=lambda m: sharded(m, mesh=mesh), **build, **options)


@case
def an_initial_pass(rank):
    for curvature in ("fisher", "empirical-fisher"):
        one, model = seeded(mlp), sharded(seeded(mlp))
        options = RARE | {"curvature": curvature}
        oracle, opt = alone(one, **options, options=KFACOptions(seed=3)), kfac_of(model, options)
        batches = [data(50), data(51)]
        before = own_weights(model)
        # the mean of the empirical Fisher is over the rank's own rows of each batch
        own = [share(batch, rank) for batch in batches]
        oracle.initialize(batches, loss=cross_entropy)
        opt.initialize(own, loss=cross_entropy)
        assert torch.equal(before, own_weights(model))
        assert all(p.grad is None for p in model.parameters())
        for name, expected in oracle.factors().items():
            assert_close(opt.factors()[name].A, expected.A)
            assert_close(opt.factors()[name].S, expected.S)
        train(one, oracle, range(3))
        train(model, opt, range(3), rank)
        assert_close(weights(model), weights(one))


@case
def bfloat16_layers(rank):
    """Of parameters in float32, which the same layers in float32 nearly agree with."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    one, model = seeded(GPT).float(), sharded(seeded(GPT).float(), mp_policy=policy)
    options = {"refresh_every": 1, "outputs": "exact"}
    oracle, opt = alone(one, **options, options=KFACOptions(seed=3)), kfac_of(model, options)
    train(one, oracle, [0], batches=text)
    train(model, opt, [0], rank, text)
    factors, expected = opt.factors(), oracle.factors()
    assert factors.keys() == expected.keys()
    for name in expected:
        assert factors[name].A.dtype == factors[name].S.dtype == torch.float32
        for side in "AS":
            found, exact = getattr(factors[name], side), getattr(expected[name], side)
            assert (found - exact).norm() < 0.05 * exact.norm(), (name, side)
    train(model, opt, range(1, 5), rank, text)
    assert own_weights(model).isfinite().all()


@case
def memory_of_shards(rank):
    """Weights, momentum and moments: each rank has no more than its part."""
    model = sharded(seeded(mlp))
    opt = KFAC(model, 0.05)
    train(model, opt, range(2), rank)
    for p in model.parameters():
        tensors = [value for value in opt.state[p].values() if value.dim()]
        assert tensors
        for value in tensors:
            assert value.to_local().shape == p.to_local().shape
            assert value.to_local().untyped_storage().nbytes() == p.to_local().nbytes


@case
def a_gradient_of_one_rank_that_is_not_finite(rank):
    """Of a parameter outside blocks and one inside, in a step of each kind: all ranks skip it."""
    for options in ({}, SPECTRAL, UNSCALED):
        model = sharded(seeded(mlp))
        opt = KFAC(model, 0.05, **options)
        train(model, opt, range(2), rank)
        for skipped, parameter in enumerate((model[1].weight, model[3].weight), start=1):
            before = own_weights(model), copy.deepcopy(opt.state_dict()["state"])
            x, y = share(data(2 + skipped), rank)
            cross_entropy(model(x), y).backward()
            if rank == 0:
                parameter.grad.to_local().view(-1)[0] = torch.inf
            opt.step()
            opt.zero_grad()
            assert opt.check().skipped == skipped
            assert torch.equal(own_weights(model), before[0])
            for number, entry in opt.state_dict()["state"].items():
                if "momentum_buffer" in entry:
                    momentum = before[1][number]["momentum_buffer"].to_local()
                    assert torch.equal(entry["momentum_buffer"].to_local(), momentum)
        train(model, opt, range(5, 7), rank)
        assert not torch.equal(own_weights(model), before[0])


@case
def a_loss_that_is_scaled(rank):
    """Too far at times; what one rank's gradients overflow, all ranks' steps are skipped for."""
    for options in (UNSCALED, SPECTRAL, {"others": "sgd"}):
        one, model = seeded(mlp), sharded(seeded(mlp))
        given = RARE | options
        oracle, opt = alone(one, **given, options=KFACOptions(seed=3)), kfac_of(model, given)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
        for step in range(8):
            pairs = ((one, oracle, data(step)), (model, opt, share(data(step), rank)))
            for scaler, (network, optimizer, (x, y)) in zip(scalers, pairs, strict=True):
                scaler.scale(cross_entropy(network(x), y)).backward()
                if step == 3 and (network is one or rank == 0):
                    gradient = network[1].weight.grad
                    (gradient if network is one else gradient.to_local()).view(-1)[0] = torch.inf
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
        assert_close(weights(model), weights(one))


# -- states --

STATES = ({}, SPECTRAL, {"others": "sgd"}, {"options": {"inversion_lag": 3}, "refresh_every": 1})


def started(rank, options):
    model = sharded(seeded(GPT))
    opt = kfac_of(model, options)
    train(model, opt, range(6), rank, text)
    return model, opt


def goes_on(rank, model, opt, expected):
    train(model, opt, range(6, 10), rank, text)
    assert torch.equal(own_weights(model), own_weights(expected))


def other(options):
    model = sharded(seeded(GPT, seed=1))
    return model, kfac_of(model, options)


@case
def each_ranks_own_state(rank):
    """Through a file."""
    for options in STATES:
        model, opt = started(rank, RARE | options)
        file = io.BytesIO()
        torch.save((model.state_dict(), opt.state_dict()), file)
        train(model, opt, range(6, 10), rank, text)
        file.seek(0)
        network_state, state = torch.load(file)
        again, later = other(RARE | options)
        again.load_state_dict(network_state)
        later.load_state_dict(state)
        goes_on(rank, again, later, model)


@case
def a_distributed_checkpoint(rank):
    """In parts; whole, from every rank; and whole, from the first one alone."""
    ways = (
        {},
        {"full_state_dict": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
    )
    for options in STATES[:3]:
        for way in ways:
            model, opt = started(rank, RARE | options)
            saving = StateDictOptions(full_state_dict="full_state_dict" in way)
            states = copy.deepcopy(get_state_dict(model, opt, options=saving))
            if rank and "broadcast_from_rank0" in way:
                states = {}, {}
            train(model, opt, range(6, 10), rank, text)
            again, later = other(RARE | options)
            set_model_state_dict(again, states[0], options=StateDictOptions(**way))
            set_optimizer_state_dict(again, later, states[1], options=StateDictOptions(**way))
            goes_on(rank, again, later, model)


@case
def a_state_of_another_rank(rank):
    """Would be divided in the same way, and be another part."""
    _, opt = started(rank, RARE)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    files = [file.getvalue()]
    dist.broadcast_object_list(files)
    state = torch.load(io.BytesIO(files[0]))
    before = copy.deepcopy(opt.state_dict())
    if rank:
        with refuses(Mismatch, what="which parts of tensors this rank holds"):
            opt.load_state_dict(state)
        single = alone(seeded(GPT), **RARE)
        with refuses(Mismatch, what="which parts of tensors this rank holds"):
            single.load_state_dict(state)
        after = opt.state_dict()
        assert curvature_state(after)["steps"] == curvature_state(before)["steps"]


@case
def a_state_of_one_process(rank):
    """Whole tensors, of which each rank takes its part; and back again."""
    for options in STATES[:3]:
        options = RARE | options
        one = seeded(GPT)
        oracle = alone(one, **(options | {"options": KFACOptions(seed=3)}))
        train(one, oracle, range(6), batches=text)
        model, opt = other(options)
        opt.load_state_dict(copy.deepcopy(oracle.state_dict()))
        with torch.no_grad():
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                p.copy_(torch.distributed.tensor.distribute_tensor(q, p.device_mesh))
        train(one, oracle, range(6, 9), batches=text)
        train(model, opt, range(6, 9), rank, text)
        assert_close(weights(model), weights(one))
        full = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(model, opt, options=full)
        again = seeded(GPT)
        later = alone(again, **(options | {"options": KFACOptions(seed=3)}))
        again.load_state_dict(one.state_dict())
        set_optimizer_state_dict(again, later, copy.deepcopy(state), options=full)
        train(one, oracle, range(9, 12), batches=text)
        train(again, later, range(9, 12), batches=text)
        assert_close(weights(again), weights(one))


# -- what is refused --


@case
def other_kinds_of_shards(rank):
    mesh = init_device_mesh("cpu", (SIZE,))
    columns = parallelize_module(seeded(mlp), mesh, {"0": ColwiseParallel()})
    with refuses(Conflict, settings=["K-FAC", "tensor parallelism"]):
        KFAC(columns)
    flattened = FullyShardedDataParallel(seeded(mlp), device_id=torch.device("cpu"))
    with refuses(Conflict, settings=["decaylab", "FullyShardedDataParallel"]):
        KFAC(flattened)
    model = seeded(mlp)
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("one", "all")))
    fully_shard(model, mesh=mesh)
    with refuses(Conflict, settings=["K-FAC", "parameters sharded on several meshes"]):
        KFAC(model)


@case
def a_parameter_that_is_not_sharded(rank):
    """Its gradient is each rank's own; a frozen one, or one that another optimizer steps, has none.

    A forward pass leaves the outermost parameters gathered.
    """
    model = seeded(mlp)
    fully_shard(model, ignored_params={model[3].bias})
    with refuses(Lacks, owner="the parameter '3.bias'", what="shards"):
        KFAC(model)
    KFAC(model, params=[p for p in model.parameters() if p is not model[3].bias])
    model[3].bias.requires_grad_(False)
    train(model, KFAC(model), range(2), rank)
    model = fully_shard(seeded(mlp))
    model(data(0)[0])
    with refuses(Lacks, owner="the parameter '0.weight'", what="shards"):
        KFAC(model)
    model.reshard()
    train(model, KFAC(model), range(2), rank)


@case
def another_group_than_the_meshs(rank):
    lone = [dist.new_group([one]) for one in range(SIZE)][rank]
    model = sharded(seeded(mlp))
    with refuses(Mismatch, what="ranks"):
        KFAC(model, options=KFACOptions(process_group=lone))
    train(model, KFAC(model, options=KFACOptions(process_group=dist.group.WORLD)), [0], rank)


@case
def a_rank_without_rows(rank):
    """Others would wait for its extra backward pass."""
    for shard in (sharded, fully_shard):
        model = shard(seeded(mlp))
        opt = KFAC(model, logits="observed")
        logits = model(data(0)[0])
        with refuses(Lacks, owner="the batch of this rank", what="rows"):
            opt.observe(logits[:0])


@case
def gathered_parameters_in_a_step(rank):
    """A forward pass in between gathers them: what the step writes would be overlooked."""
    model = sharded(seeded(mlp))
    opt = KFAC(model, refresh_every=1)
    x, y = share(data(0), rank)
    cross_entropy(model(x), y).backward()
    with torch.no_grad():
        model(x)
    with refuses(Lacks, what="parameter '1.weight' that KFAC was built with"):
        opt.step()
    model.reshard()
    opt.step()


def main(folder, rank, size, device, *chosen):
    warnings.simplefilter("error")
    run_cases(CASES, folder, int(rank), SIZE, chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
