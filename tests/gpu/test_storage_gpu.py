"""Large inverses in halves on CUDA: the steps, no synchronisation, and what is kept."""

import gc

import pytest
import torch
from oracle.kfac_runs import train_step
from torch import nn

import decaylab
from decaylab.curvature import preconditioner
from decaylab.curvature.inverses import damped, factored_damping, mean_diagonal
from decaylab.optim.kfac import KFAC, KFACOptions

pytestmark = pytest.mark.gpu


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1000, 700), nn.ReLU(), nn.Linear(700, 10)).cuda()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    mix = torch.randn(1000, 1000, device="cuda", generator=generator).tril() / 20
    inputs = torch.randn(512, 1000, device="cuda", generator=generator) @ mix
    return inputs, torch.randint(10, (512,), device="cuda", generator=generator)


def test_steps_are_within_two_percent_of_float64():
    """Factors as triangles and inverses in halves."""
    model = wide()
    options = KFACOptions(half_inverses=True)
    every = {"refresh_every": 2, "invert_every": 2}
    opt = KFAC(model, 0.03, kl_clip=1e-3, damping=1e-3, options=options, **every)
    for _ in range(9):
        train_step(opt, model, *data())
    first, other = opt._preconditioner.banks
    assert (first.A.half, first.G.half) == (True, True)
    assert (other.A.half, other.G.half) == (True, False)
    assert first.bank.A.shape[1] != first.bank.A.shape[2]
    for inverses in (first, other):
        torch.manual_seed(1)
        gradient = torch.randn_like(inverses.weight_step)
        bias = torch.randn_like(inverses.bias_step)
        inverses.weight_step.copy_(gradient)
        inverses.bias_step.copy_(bias)
        inverses.precondition(decreases=True)
        sides = [side.double() for side in inverses.bank.matrices(slice(None))]
        extra = factored_damping(*map(mean_diagonal, sides), torch.full((1,), 1e-3, device="cuda"))
        A, G = (damped(side, more) for side, more in zip(sides, extra, strict=True))
        joined = torch.cat([gradient, bias[..., None]], 2).double()
        wanted = torch.linalg.solve(G, torch.linalg.solve(A, joined, left=False))
        found = torch.cat([inverses.weight_step, inverses.bias_step[..., None]], 2)
        assert (found - wanted).norm() < 0.02 * wanted.norm()
        decrease = float(sum(part.sum() for part in inverses.decreases))
        assert decrease == pytest.approx(float((joined * wanted).sum()), rel=0.02)


def test_a_resumed_training_has_the_same_bits():
    weights = []
    for resumed in (False, True):
        model = wide()
        options = {"kl_clip": 1e-3, "refresh_every": 2, "invert_every": 2}
        opt = KFAC(model, 0.03, options=KFACOptions(seed=0, half_inverses=True), **options)
        for step in range(6):
            train_step(opt, model, *data())
            if resumed and step == 2:
                state = opt.state_dict()
                opt = KFAC(model, 0.03, options=KFACOptions(seed=0, half_inverses=True), **options)
                opt.load_state_dict(state)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_no_step_waits_for_the_device():
    model = wide()
    options = KFACOptions(half_inverses=True)
    opt = KFAC(model, 0.03, kl_clip=1e-3, refresh_every=2, invert_every=2, options=options)
    for _ in range(4):
        train_step(opt, model, *data())
    inputs, labels = data()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            opt.step()
            opt.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("capture", [False, True])
def test_a_large_model_has_room_for_steps_in_steps_alone(monkeypatch, capture):
    """The same steps, launched or captured as a whole, and less memory between them."""
    weights, memory = [], []
    inputs, labels = data()
    for most in (2**30, 0):
        monkeypatch.setattr(preconditioner, "LARGEST_KEPT", most)
        gc.collect()  # what tests before, and the other optimizer, have left in cycles
        torch._C._cuda_clearCublasWorkspaces()  # each K-FAC's own: one for each of its streams
        before = torch.cuda.memory_allocated()
        model = wide()
        options = KFACOptions(seed=0, replay=False)
        rate = torch.tensor(1e-3, device="cuda")
        opt = KFAC(model, rate, refresh_every=2, invert_every=4, options=options)

        def step(x, y, model=model, opt=opt):
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()

        take = decaylab.captured(step, model, opt) if capture else step
        for _ in range(14):
            take(inputs, labels)
        memory.append(torch.cuda.memory_allocated() - before)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        opt.detach()
        del model, opt, step, take
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
    if not capture:
        assert memory[1] < memory[0]


def test_attention_and_embeddings_on_cuda():
    """The same factors as on a CPU."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            x = self.embedding(x)
            return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))

    factors = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Language().double().to(device)
        tokens = torch.arange(40).view(8, 5).to(device)
        opt = KFAC(model, 0.1, kl_clip=1e-3, curvature="gauss-newton", outputs="exact")
        nn.functional.cross_entropy(model(tokens), tokens[:, 0]).backward()
        opt.step()
        factors.append(opt.factors())
    for name, found in factors[1].items():
        for side in ("A", "S"):
            expected = getattr(factors[0][name], side)
            torch.testing.assert_close(getattr(found, side).cpu(), expected, rtol=1e-7, atol=1e-9)
