"""Roles and scale invariance: exact where eps vanishes; odd models; the model is left alone."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from decaylab.curvature.blocks import plan_blocks
from decaylab.errors import Failed, Lacks
from decaylab.networks import INVARIANCE_THRESHOLD, NETWORKS, build, invariance, roles

IMAGES = {"mlp": 8, "vgg11": 32, "vgg13": 32, "vgg16": 32, "vgg19": 32}


def images(name, batch=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        batch, 3, IMAGES.get(name, 12), IMAGES.get(name, 12), generator=generator, dtype=dtype
    )


def network(name, **options):
    torch.manual_seed(0)
    model = build(name, classes=10, image_size=IMAGES.get(name, 12), width=1 / 16, **options)
    for p in model.parameters():  # biases too: at zero they would hide a mistake
        if p.ndim == 1:
            nn.init.normal_(p, std=0.1)
    return model.double()


def by_role(found):
    names = {}
    for role in found.values():
        names.setdefault(role.role, set()).add(role.parameter)
    return names


@pytest.mark.parametrize("name", NETWORKS)
def test_batch_norm_with_next_to_no_eps_is_exactly_invariant(name):
    model = network(name, batch_norm=True, batch_norm_eps=1e-300)
    defects = invariance(model, images(name))
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert defects.keys() == layers
    assert defects.pop("head") == pytest.approx(1.0, abs=1e-12)  # weight and bias: f -> 2 f
    assert max(defects.values()) < 1e-12


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch_norm", [True, False])
def test_by_order_and_by_measurement_agree_on_our_networks(name, batch_norm):
    model = network(name, batch_norm=batch_norm)
    measured = roles(model, images(name))
    assert measured == roles(model)
    expected = "invariant" if batch_norm else "weight"
    for parameter, role in measured.items():
        layer, kind = parameter.rsplit(".", 1)
        assert role.layer == layer
        assert role.role == ("bias" if kind == "bias" else "head" if layer == "head" else expected)
        assert role.kind == ("linear" if layer == "head" or name == "mlp" else "conv")


def test_the_defect_is_the_formula():
    """On VGG11 without batch normalisation, against a model scaled by hand."""
    model, x = network("vgg11", batch_norm=False), images("vgg11")
    defects = invariance(model, x)
    for name in ("features.0", "features.6", "head"):
        scaled = copy.deepcopy(model)
        for p in scaled.get_submodule(name).parameters():
            p.data *= 2
        expected = (scaled(x) - model(x)).norm() / model(x).norm()
        assert defects[name] == pytest.approx(expected.item(), rel=1e-12)
        assert defects[name] > 2 * INVARIANCE_THRESHOLD


class Dropping(nn.Module):
    """Everything that a run could change: batch statistics, dropout, a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.head(self.dropout(self.norm(self.layer(x))))


def test_the_model_is_left_bit_for_bit_as_it_was():
    torch.manual_seed(0)
    model = Dropping()
    x = torch.randn(5, 4)
    model(x).sum().backward()
    model.train()
    model.norm.eval()  # frozen statistics: the mode of each module counts
    pending = model(x).square().sum()
    before = copy.deepcopy(model.state_dict())
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    tensors = [id(t) for t in (*model.parameters(), *model.buffers())]
    generator = torch.get_rng_state()

    defects = invariance(model, x)
    roles(model, x)

    assert defects["layer"] < 1e-4  # the same dropout mask in both runs, or this would be large
    assert defects["head"] == pytest.approx(1.0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters())
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == tensors
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    pending.backward()  # a graph from before is still valid


def test_the_model_is_left_alone_when_its_forward_fails():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    before = copy.deepcopy(model.state_dict())
    for wrong in (torch.randn(3, 5), torch.randn(1, 4)):
        with pytest.raises(Failed):
            invariance(model, wrong)
    assert not model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6, eps=0.0), nn.GroupNorm(2, 6, eps=0.0), nn.RMSNorm(6, eps=0.0)]
)
def test_other_normalisations(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), norm, nn.Linear(6, 3)).double()
    x = torch.rand(5, 4, dtype=torch.float64)
    assert invariance(model, x)["0"] < 1e-12  # weight and bias together, though the bias is not 0
    names = by_role(roles(model, x))
    assert names["invariant"] == {"0.weight"}
    assert names["head"] == {"3.weight"}
    assert names["bias"] == {"0.bias", "3.bias"}
    assert names["norm"] == {f"2.{n}" for n, _ in norm.named_parameters()}
    assert roles(model) == roles(model, x)


def test_weight_normalisation():
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    names = by_role(roles(model, x))
    assert names["invariant"] == {"0.parametrizations.weight.original1"}
    assert names["norm"] == {"0.parametrizations.weight.original0"}
    assert names["head"] == {"2.weight"}
    assert roles(model) == roles(model, x)


def test_spectral_normalisation_is_found_by_measurement():
    torch.manual_seed(0)
    layer = spectral_norm(nn.Linear(4, 6), n_power_iterations=20)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3)).double()
    names = by_role(roles(model, torch.randn(5, 4, dtype=torch.float64)))
    assert names["invariant"] == {"0.parametrizations.weight.original"}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weight_and_spectral_normalisation_in_their_older_form():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    nn.utils.weight_norm(model[0])
    nn.utils.spectral_norm(model[2], n_power_iterations=20)
    x = torch.randn(5, 4, dtype=torch.float64)
    names = by_role(roles(model.double(), x))
    assert names["invariant"] == {"0.weight_v", "2.weight_orig"}
    assert names["norm"] == {"0.weight_g"}
    assert names["bias"] == {"0.bias", "2.bias", "4.bias"}
    assert by_role(roles(model))["invariant"] == {"0.weight_v"}


def test_a_power_iteration_that_lags_behind_is_the_same_in_every_evaluation():
    torch.manual_seed(0)
    layers = [spectral_norm(nn.Linear(16, 16, bias=False)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(16, 3)).double()
    for layer in layers:  # far from what its vectors were iterated on, as after a large step
        nn.init.normal_(layer.parametrizations.weight.original)
    defects = invariance(model, torch.randn(5, 16, dtype=torch.float64))
    assert [defects[name] for name in "012"] == pytest.approx([0.0] * 3, abs=1e-12)


@pytest.mark.parametrize("cached", [False, True])
def test_under_autocast_the_scaled_weights_are_those_that_count(cached):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        model(x)  # fills the cache
        defects = invariance(model, x)
        after = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(after, model(x))  # nothing is left in the cache
    assert defects["0"] < INVARIANCE_THRESHOLD
    assert defects["3"] == pytest.approx(1.0)  # its bias included, it doubles the logits


def test_so_they_are_where_the_forward_has_an_autocast_of_its_own():
    """As accelerate wraps it: one context for all calls, made before anything is measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    x = torch.randn(6, 4)
    with torch.autocast("cpu", enabled=False):  # while one is open, the cache is kept
        defects = invariance(model, x)
    assert defects["0"] < INVARIANCE_THRESHOLD
    assert defects["3"] == pytest.approx(1.0)


class Block(nn.Module):
    """Weights of its own behind the normalisation that is its first part."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, 4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head((self.norm(x) + self.positions).tanh())


class NormalisesItself(nn.Conv1d):
    """A convolution with its normalisation as a part."""

    def __init__(self):
        super().__init__(6, 5, 1)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(super().forward(x))


def test_a_normalisation_that_is_a_part_of_a_module_with_weights():
    torch.manual_seed(0)
    x = torch.randn(3, 6, 4)
    for model in (Block(), nn.Sequential(NormalisesItself(), nn.Flatten(), nn.Linear(20, 2))):
        assert roles(model) == roles(model, x)
    model = nn.Sequential(spectral_norm(nn.Conv1d(6, 5, 1)), nn.BatchNorm1d(5))
    assert by_role(roles(model))["invariant"] == {"0.parametrizations.weight.original"}


@dataclass
class Output:
    """What a model of somebody's own returns."""

    logits: torch.Tensor
    count: int


def test_an_output_that_is_a_dataclass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    x = torch.randn(6, 4)
    wanted = invariance(model, x)
    model.register_forward_hook(lambda _, __, logits: Output(logits, len(logits)))
    assert invariance(model, x) == wanted


class Language(nn.Module):
    """An embedding tied to the head, and attention between."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)  # registered first, runs last
        self.embedding = nn.Embedding(11, 8)
        self.embedding.weight = self.head.weight
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, tokens):
        return {"logits": self.head(self.block(self.embedding(tokens)))}


def test_tied_embedding_and_transformer_layer():
    torch.manual_seed(0)
    model, tokens = Language(), torch.randint(11, (4, 7))
    found = roles(model, {"tokens": tokens})
    assert found.keys() == dict(model.named_parameters()).keys()
    names = by_role(found)
    assert names["head"] == {"head.weight"}
    assert names["weight"] == {
        "block.self_attn.in_proj_weight",
        "block.self_attn.out_proj.weight",
        "block.linear1.weight",
        "block.linear2.weight",
    }
    assert names["norm"] == {f"block.norm{i}.{n}" for i in (1, 2) for n in ("weight", "bias")}
    assert "invariant" not in names  # a residual sum stands before each normalisation
    assert set(invariance(model, (tokens,))) == {
        "head",
        "embedding",
        "block.self_attn",
        "block.self_attn.out_proj",
        "block.linear1",
        "block.linear2",
    }


def test_attention_alone_has_its_output_projection_as_head():
    model = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    x = torch.randn(5, 3, 8)
    names = by_role(roles(model, (x, x, x)))
    assert names["head"] == {"out_proj.weight"}
    assert names["weight"] == {"in_proj_weight"}
    assert names["other"] == {"bias_k", "bias_v"}
    assert names["bias"] == {"in_proj_bias", "out_proj.bias"}


class Reordered(nn.Module):
    """Layers of a list that run in the reverse of the order in which they stand there."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 6), nn.Linear(4, 6)])
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        for layer in reversed(self.layers[1:]):
            x = self.norm(layer(x))
        return self.layers[0](x)


def test_the_order_of_running_counts_with_inputs():
    names = by_role(roles(Reordered(), torch.randn(9, 4)))
    assert names["head"] == {"layers.0.weight"}
    assert names["invariant"] == {"layers.1.weight", "layers.2.weight"}


def test_a_last_layer_behind_which_a_norm_stands_is_invariant_and_no_head():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False))
    for found in (roles(model), roles(model, torch.randn(9, 4))):
        assert by_role(found) == {"invariant": {"0.weight"}, "bias": {"0.bias"}}


class Branches(nn.Module):
    """Layers on which the output does not, or hardly, depend."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)
        self.zero = nn.Linear(4, 4, bias=False)
        self.weak = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.zero.weight)
        nn.init.constant_(self.weak.weight, 1e-3)

    def forward(self, x):
        return self.head(x + self.zero(x) + self.weak(x))


def test_layers_that_hardly_matter_are_not_called_invariant():
    model, x = Branches(), torch.randn(9, 4)
    defects = invariance(model, x)
    assert all(math.isnan(defects[name]) for name in ("unused", "zero", "weak"))
    assert by_role(roles(model, x))["weight"] == {"unused.weight", "zero.weight", "weak.weight"}


class Own(nn.Module):
    """Parameters of a module's own, and a recurrent layer that keeps a list of its weights."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.shift = nn.Parameter(torch.randn(4))
        self.recurrent = nn.LSTM(4, 5, batch_first=True)
        self.scale = nn.ParameterList([torch.ones(5)])
        self.head = nn.Conv1d(5, 2, 1)

    def forward(self, x):
        x, state = self.recurrent(x @ self.matrix + self.shift)
        return self.head((x * self.scale[0]).mT), state


def test_unknown_modules_go_by_shape():
    torch.manual_seed(0)
    model = Own()
    x = torch.randn(3, 6, 4)
    names = by_role(roles(model, x))
    assert names["head"] == {"head.weight"}
    assert names["weight"] == {"matrix", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0"}
    assert names["bias"] == {"shift", "recurrent.bias_ih_l0", "recurrent.bias_hh_l0", "head.bias"}
    assert names["other"] == {"scale.0"}
    assert roles(model)["head.weight"].kind == "conv"


class Attention(nn.Module):
    """Bare parameters, as people write it."""

    def __init__(self):
        super().__init__()
        self.wq = nn.Parameter(torch.randn(4, 4))
        self.wk = nn.Parameter(torch.randn(4, 4))
        self.wv, self.bv = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.zeros(4))
        self.tau = nn.Parameter(torch.ones(()))


class Tokens(nn.Module):
    """A vision transformer's own parameters, around a block with a layer scale."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 4))
        self.attn = Attention()
        self.norm = nn.LayerNorm(4)
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.recurrent = nn.LSTM(4, 4)
        self.norm2 = nn.LayerNorm(4)


def test_every_parameter_that_stands_alone_is_a_layer():
    found = roles(Tokens())
    layers = {name: (role.layer, role.role) for name, role in found.items() if "norm" not in name}
    assert layers == {
        "cls_token": ("cls_token", "other"),
        "pos_embed": ("pos_embed", "weight"),
        "attn.wq": ("attn.wq", "weight"),  # and not normalised, though a norm comes next
        "attn.wk": ("attn.wk", "weight"),
        "attn.wv": ("attn.wv", "weight"),
        "attn.bv": ("attn.wv", "bias"),
        "attn.tau": ("attn.tau", "other"),
        "layer_scale": ("layer_scale", "other"),
        "recurrent.weight_ih_l0": ("recurrent.weight_ih_l0", "weight"),
        "recurrent.weight_hh_l0": ("recurrent.weight_hh_l0", "weight"),
        "recurrent.bias_ih_l0": ("recurrent.weight_ih_l0", "bias"),
        "recurrent.bias_hh_l0": ("recurrent.weight_hh_l0", "bias"),
    }


def test_a_weight_and_its_bias_are_one_layer():
    class Pair(nn.Module):
        def __init__(self, **parameters):
            super().__init__()
            for name, shape in parameters.items():
                self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def layers(**parameters):
        return {name: role.layer for name, role in roles(nn.Sequential(Pair(**parameters))).items()}

    assert layers(weight=(3, 2), bias=3) == {"0.weight": "0", "0.bias": "0"}
    assert layers(kernel=(2, 3), offset=3) == {"0.kernel": "0.kernel", "0.offset": "0.kernel"}
    by_name = layers(w1=(3, 2), b1=3, w2=(3, 2), b2=3)
    assert by_name == {"0.w1": "0.w1", "0.b1": "0.w1", "0.w2": "0.w2", "0.b2": "0.w2"}
    gain = layers(v=(3, 2), g=3, bias=3)  # the bias is known by name
    assert gain == {"0.v": "0.v", "0.g": "0.g", "0.bias": "0.v"}
    experts = layers(up=(5, 3, 2), up_bias=(5, 3))  # has two axes, and is a bias all the same
    assert experts == {"0.up": "0.up", "0.up_bias": "0.up"}


def test_the_layers_have_the_names_of_kfacs_blocks():
    model = nn.Sequential()
    model.attn = nn.MultiheadAttention(4, 2, kdim=3, vdim=3)
    model.packed = nn.MultiheadAttention(4, 2)
    model.recurrent = nn.GRU(4, 4, 2)
    model.head = nn.Linear(4, 2)
    blocks = plan_blocks(model, list(model.parameters())).by_name
    weights = {role.layer for role in roles(model).values() if role.role in ("weight", "head")}
    assert weights == set(blocks)


class OwnRMSNorm(nn.Module):
    """As in many libraries: no subclass of torch's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * nn.functional.normalize(x, dim=-1)


def test_a_norm_that_is_not_torchs():
    found = roles(nn.Sequential(nn.Linear(4, 4), OwnRMSNorm()))
    assert (found["1.weight"].role, found["1.weight"].kind) == ("norm", "norm")


def test_nothing_to_find():
    assert roles(nn.ReLU()) == {}
    assert invariance(nn.ReLU(), torch.randn(2)) == {}
    assert by_role(roles(nn.BatchNorm1d(3))) == {"norm": {"weight", "bias"}}


def test_lazy_layers_get_a_sentence():
    model = nn.Sequential(nn.LazyLinear(3))
    with refuses(Lacks, owner="a lazy layer", what="shape yet"):
        roles(model)


def test_an_output_without_numbers_gets_a_sentence():
    class Classes(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(1)

    with refuses(Lacks, what="floating-point tensor"):
        invariance(Classes(3, 2), torch.randn(4, 3))


@pytest.mark.gpu
def test_on_the_gpu_the_model_and_its_generator_are_left_alone():
    torch.manual_seed(0)
    model = Dropping().cuda()
    x = torch.randn(5, 4, device="cuda")
    before, generator = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    defects = invariance(model, x)
    assert defects["layer"] < 1e-4
    assert defects["head"] == pytest.approx(1.0)
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_embeddings_that_are_added_up_are_not_invariant_one_by_one():
    """As BERT's, of which the types were said to be: the normalisation follows the sum of three."""

    class Embeddings(nn.Module):
        def __init__(self, types: bool) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            if types:
                self.types = nn.Embedding(2, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, tokens):
            types = self.types(tokens % 2) if hasattr(self, "types") else 0
            return self.norm(self.words(tokens) + types)

    tokens = torch.arange(6).view(2, 3)
    for types, role in ((True, "weight"), (False, "invariant")):
        torch.manual_seed(0)
        model = nn.Sequential(Embeddings(types), nn.Linear(8, 3))
        for known in (roles(model), roles(model, tokens)):
            assert known["0.words.weight"].role == role
            assert not types or known["0.types.weight"].role == role
