"""Models that people have, built from their configurations: what is covered, and that all learn."""

import re
import warnings

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.nn import functional as F

from decaylab.curvature.blocks import plan_blocks
from decaylab.curvature.kinds.kind import Reason
from decaylab.errors import Lacks
from decaylab.optim.options import KFACOptions

TOKENS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def share(coverage) -> float:
    inside = sum(entry.size for entry in coverage.values() if entry.block is not None)
    return inside / sum(entry.size for entry in coverage.values())


def assert_learns(model: nn.Module, loss, covered: float) -> KFAC:
    """Covered to that share, and every parameter with a gradient moves."""
    opt = KFAC(model, 0.01, kl_clip=1e-4)
    assert share(opt.coverage()) > covered
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, learning = [], set()
    for _ in range(3):
        value = loss(model)
        value.backward()
        learning |= {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        opt.step()
        opt.zero_grad()
        losses.append(float(value.detach()))
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert not still & learning
    assert losses[-1] < losses[0]
    return opt


def language(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def huggingface(name: str, **config) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(kind.config_class(**config)).train()


def test_gpt2_of_124_million_parameters_is_covered():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    planned = plan_blocks(model, model.parameters())
    size = sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for p, placement in planned.placements.items() if placement.block)
    assert size == 124_439_808
    assert inside / size > 0.999
    left = {placement.about for placement in planned.placements.values() if not placement.block}
    assert left == {("LayerNorm",)}


def test_gpt2():
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model = huggingface("GPT2LMHeadModel", **sizes, **IDS)
    opt = assert_learns(model, language, 0.98)
    assert opt.coverage()["transformer.wte.weight"].about == ("Linear", "Embedding")
    assert opt.factors()["transformer.wpe"].A.shape == (16,)


@pytest.mark.parametrize(
    ("name", "covered"), [("BertForMaskedLM", 0.97), ("LlamaForCausalLM", 0.99)]
)
def test_other_language_models(name, covered):
    assert_learns(huggingface(name, **SMALL, **IDS, intermediate_size=48), language, covered)


def test_vit():
    sizes = SMALL | {"image_size": 16, "patch_size": 4, "num_labels": 5, "intermediate_size": 64}
    del sizes["vocab_size"]
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2])
    model = huggingface("ViTForImageClassification", **sizes)
    assert_learns(model, lambda m: m(pixel_values=images, labels=labels).loss, 0.95)


EXPERTS = SMALL | IDS | {"intermediate_size": 48, "num_key_value_heads": 2}
MIXTURES = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "GptOssForCausalLM": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        **{"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_theta": 1e4}},
    },
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts(name):
    """Their experts are one parameter, multiplied by one function, each with rows of its own."""
    model = huggingface(name, **EXPERTS, **MIXTURES[name])
    opt = assert_learns(model, language, 0.98)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert opt.factors()[experts].A.shape == (4, *(33 if "Oss" in name else 32,) * 2)


def test_experts_that_show_no_product_are_said_with_the_remedy():
    model = huggingface("MixtralForCausalLM", **EXPERTS, num_local_experts=4)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    model.set_experts_implementation("batched_mm")
    with pytest.warns(UserWarning, match=r"covers .*set_experts_implementation"):
        found = KFAC(model, 0.01).coverage()
    assert found[experts].reason is Reason.OTHER_PRODUCT
    factors = []
    for implementation in ("eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        opt = KFAC(model, 0.0, others_lr=0.0, curvature="empirical-fisher")
        language(model).backward()
        opt.step()
        opt.zero_grad()
        opt.detach()
        factors.append(opt.factors()[experts])
    for side in ("A", "S", "T"):
        torch.testing.assert_close(getattr(factors[0], side), getattr(factors[1], side))


def test_experts_of_llama_4_can_be_excluded_by_the_names_that_the_error_has():
    config = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
    model = huggingface("Llama4ForCausalLM", **EXPERTS, **config, head_dim=8)
    with refuses(Lacks, owner="this step") as refused:
        assert_learns(model, language, 0.9)
    names = re.findall(r"'([^']*experts\.[^']*)'", refused.value.remedy.split("exclude=")[1])
    assert len(names) == 4
    model = huggingface("Llama4ForCausalLM", **EXPERTS, **config, head_dim=8)
    opt = KFAC(model, 0.01, kl_clip=1e-4, options=KFACOptions(exclude=tuple(names)))
    assert {n for n, entry in opt.coverage().items() if entry.reason is Reason.EXCLUDED} == {*names}
    language(model).backward()
    opt.step()


class WordLanguageModel(nn.Module):
    """As pytorch/examples has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(16, 64)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        return F.log_softmax(self.decoder(self.encoder(self.embedding(x), mask=mask)), -1)


def test_a_transformer_of_torchs_own_layers():
    torch.manual_seed(0)
    model = WordLanguageModel()

    def loss(net):
        torch.manual_seed(1)  # dropout
        return F.nll_loss(net(TOKENS).flatten(0, 1), TOKENS.flatten())

    opt = assert_learns(model, loss, 0.98)
    assert opt.factors()["encoder.layers.0.self_attn"].A.shape == (3, 17, 17)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(64, 8), nn.LSTM(8, 8)
        self.decoder = nn.Linear(8, 64)

    def forward(self, x):
        return self.decoder(self.rnn(self.encoder(x))[0])


def test_a_recurrent_language_model_is_covered_whole():
    torch.manual_seed(0)

    def loss(net):
        return F.cross_entropy(net(TOKENS).flatten(0, 1), TOKENS.flatten())

    found = assert_learns(Recurrent(), loss, 0.99).coverage()
    assert all(entry.reason is Reason.COVERED for entry in found.values())


class LowRank(nn.Module):
    """A frozen layer and a trained pair beside it, as LoRA has: B is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.layer(x) + 2 * self.lora_B(self.lora_A(x))


def test_low_rank_pairs_beside_frozen_layers():
    torch.manual_seed(0)
    model = nn.Sequential(LowRank(nn.Linear(6, 8)), nn.Tanh(), LowRank(nn.Linear(8, 3)))
    x, labels = torch.randn(12, 6), torch.randint(3, (12,))
    frozen = [model[0].layer.weight.clone(), model[2].layer.weight.clone()]
    opt = KFAC(model, 0.05, kl_clip=1e-3, curvature="gauss-newton", refresh_every=1)
    reasons = {name: entry.reason for name, entry in opt.coverage().items()}
    covered = {name for name, reason in reasons.items() if reason is Reason.COVERED}
    assert covered == {f"{i}.lora_{side}.weight" for i in (0, 2) for side in "AB"}
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(model[0].layer.weight, frozen[0])
    assert torch.equal(model[2].layer.weight, frozen[1])
