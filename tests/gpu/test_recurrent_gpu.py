"""Recurrent layers on CUDA, where cuDNN computes the passes that are not observed."""

import pytest
import torch
from oracle.plain_kfac import KFAC
from torch import nn
from torch.nn import functional as F

import decaylab
from decaylab.curvature.estimator import KroneckerEstimator

pytestmark = pytest.mark.gpu
LAYERS = {
    "lstm": lambda: nn.LSTM(16, 12, 2, bidirectional=True),
    "projected": lambda: nn.LSTM(16, 12, proj_size=8),
    "gru": lambda: nn.GRU(16, 12, 2),
    "rnn": lambda: nn.RNN(16, 12),
}


class Language(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(50, 16), recurrent
        self.head = nn.LazyLinear(50)

    def forward(self, x):
        return self.head(self.recurrent(self.embedding(x))[0])


TOKENS = torch.arange(40).view(5, 8)


def language(layer: str, dtype: torch.dtype, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = Language(LAYERS[layer]())
    model(TOKENS)
    return model.to(device, dtype)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("layer", LAYERS)
def test_the_same_factors_as_on_a_cpu(layer):
    factors = []
    for device in ("cpu", "cuda"):
        model = language(layer, torch.float64, device)
        tokens = TOKENS.to(device)
        opt = KFAC(model, 0.1, kl_clip=1e-3, curvature="empirical-fisher")
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        opt.step()
        factors.append(opt.factors())
    for name, found in factors[1].items():
        for side in ("A", "S"):
            expected = getattr(factors[0][name], side)
            torch.testing.assert_close(getattr(found, side).cpu(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("layer", LAYERS)
def test_under_autocast_it_has_cudnns_dtypes(layer):
    module = language(layer, torch.float32, "cuda").recurrent
    x = torch.randn(5, 8, 16, device="cuda")
    estimator = KroneckerEstimator(module, logits="observed")

    def outputs():
        output, states = module(x)
        return [output, *(states if isinstance(states, tuple) else [states])]

    with torch.autocast("cuda", torch.bfloat16):
        expected = outputs()
        with estimator.listening():
            found = outputs()
    assert estimator.capture.calls
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)


@pytest.mark.parametrize("layer", LAYERS)
def test_captured_steps_are_the_plain_ones(layer):
    weights = []
    for capture in (False, True):
        model, tokens = language(layer, torch.float32, "cuda"), TOKENS.to("cuda")
        rate = torch.tensor(1e-3, device="cuda")
        opt = decaylab.KFAC(model, rate, refresh_every=2, invert_every=4)

        def step(x, model=model, opt=opt):
            F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            opt.step()
            opt.zero_grad()

        take = decaylab.captured(step, model, opt) if capture else step
        for _ in range(14):
            take(tokens)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        opt.detach()
    assert weights[0].isfinite().all()
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
