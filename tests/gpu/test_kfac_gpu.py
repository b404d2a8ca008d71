"""K-FAC on a CUDA device: the numbers of the CPU, and no waiting for the device in a step."""

import contextlib
import copy
import io
import warnings

import pytest
import torch
from oracle.kfac_runs import cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import nn

from decaylab.curvature.inverses import damped, factored_damping, mean_diagonal
from decaylab.networks import build
from decaylab.optim.options import KFACOptions
from decaylab.training.arithmetic import arithmetic

pytestmark = pytest.mark.gpu
CLASSES = 4


def net():
    """Its examples do not see each other, so that `outputs="exact"` draws nothing that counts."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, groups=2, padding="valid"),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 9, CLASSES),
    )


def data(seed: int = 0, size: int = 8):
    return random(size, 3, 8, 8, seed=seed), labels_for(size, classes=CLASSES, seed=seed)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


@contextlib.contextmanager
def no_synchronisation():
    """Any call that makes the host wait for the device is an error in here."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("curvature", "decay"),
    [("fisher", "l2"), ("gauss-newton", "decoupled"), ("empirical-fisher", "independent")],
)
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_steps_equal_those_of_the_cpu(curvature, decay, lag, channels_last):
    """With a lag the inverses come from a side stream."""
    options = {
        "curvature": curvature,
        "decay": decay,
        "outputs": "exact",
        "weight_decay": 0.01,
        "damping": 0.05,
        "refresh_every": 2,
        "invert_every": 3,
        "kl_clip": 1e-2,
        "options": KFACOptions(inversion_lag=lag),
    }
    host = seeded(net)
    device = copy.deepcopy(host).cuda()
    if channels_last:
        device = device.to(memory_format=torch.channels_last)
    on_host, on_device = KFAC(host, 0.05, **options), KFAC(device, 0.05, **options)
    for step in range(10):
        x, y = data(step)
        train_step(on_host, host, x, y)
        train_step(on_device, device, x.cuda(), y.cuda())
        assert (flat(host) - flat(device)).abs().max() <= 1e-8
    for name, expected in on_host.factors().items():
        found = on_device.factors()[name]
        assert found.A.is_cuda
        assert (found.A.cpu() - expected.A).abs().max() <= 1e-8
        assert (found.S.cpu() - expected.S).abs().max() <= 1e-8


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton", "empirical-fisher"])
@pytest.mark.parametrize("kl_clip", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plain_and_refresh_steps_do_not_wait_for_the_device(curvature, kl_clip, dtype):
    model = seeded(net).to("cuda", dtype)
    opt = KFAC(model, 0.01, curvature=curvature, refresh_every=2, kl_clip=kl_clip, weight_decay=0.1)
    x, y = (t.cuda() for t in data())
    x = x.to(dtype)
    for _ in range(3):  # workspaces are made on first use
        train_step(opt, model, x, y)
    with no_synchronisation():
        for _ in range(4):
            train_step(opt, model, x, y)
    health = opt.check()
    assert (health.steps, health.skipped) == (7, 0)


@pytest.mark.parametrize("scaling", ["fixed", "scale-free"])
def test_masking_a_non_finite_gradient_does_not_wait_for_the_device(scaling):
    model = seeded(net).cuda()
    options = {"damping_scaling": scaling, "options": KFACOptions(invariant=("0", "6"))}
    opt = KFAC(model, 0.01, refresh_every=2, kl_clip=1e-3, **options)
    x, y = (t.cuda() for t in data())
    for _ in range(3):
        train_step(opt, model, x, y)
    before = flat(model)
    with no_synchronisation():
        for _ in range(2):
            cross_entropy(model(x), y).backward()
            model[6].weight.grad.fill_(float("nan"))
            opt.step()
            opt.zero_grad()
    assert opt.check().skipped == 2
    assert torch.equal(before, flat(model))


def test_a_singular_factor_does_not_crash():
    """Dead inputs and dead outputs: factors with zero rows, float32."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES)).cuda()
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    opt = KFAC(model, 0.01, refresh_every=1, invert_every=1, damping=1e-12)
    x, y = torch.zeros(8, 6, device="cuda"), labels_for(8, classes=CLASSES).cuda()
    for _ in range(4):
        train_step(opt, model, x, y)
    assert all(p.isfinite().all() for p in model.parameters())


def test_sampling_uses_a_generator_on_the_device_and_resumes_bit_for_bit():
    model = seeded(net).cuda()
    options = {"refresh_every": 2, "invert_every": 3, "weight_decay": 0.1}
    opt = KFAC(model, 0.05, options=KFACOptions(seed=3), **options)
    file = io.BytesIO()
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        for step in range(7):
            if step == 3:
                torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
            train_step(opt, model, *(t.cuda() for t in data(step)))
        file.seek(0)
        saved = torch.load(file, weights_only=True, map_location="cuda")
        again = seeded(net, seed=5).cuda()
        resumed = KFAC(again, 0.1, options=KFACOptions(seed=8), **options)
        again.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["opt"])
        for step in range(3, 7):
            train_step(resumed, again, *(t.cuda() for t in data(step)))
    finally:
        torch.backends.cudnn.deterministic = before
    assert torch.equal(flat(model), flat(again))


def run_vgg_in_bf16(curvature: str, device: str, size: int = 128, steps: int = 60) -> list[float]:
    """The losses of a VGG without batch norm on ten noisy templates; autocast, channels-last."""
    torch.manual_seed(0)
    model = build("vgg11", classes=10, width=0.25, batch_norm=False)
    model = model.to(device, memory_format=torch.channels_last)
    y = torch.arange(size, device=device) % 10
    x = torch.randn(10, 3, 32, 32, device=device)[y]
    x = (x + 0.5 * torch.randn_like(x)).to(memory_format=torch.channels_last)
    opt = KFAC(
        model,
        0.01 if curvature == "fisher" else 0.03,
        curvature=curvature,
        damping=0.1,
        kl_clip=1e-2,
        refresh_every=2,
        invert_every=4,
        options=KFACOptions(seed=0),
    )
    losses = []
    for _ in range(steps):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    health = opt.check()
    assert (health.skipped, health.failed_inversions) == (0, {})
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_a_vgg_in_bf16_and_channels_last_trains(curvature):
    losses = run_vgg_in_bf16(curvature, "cuda")
    assert losses[-1] < 0.1 * losses[0]


def test_a_grad_scaler_with_fp16():
    model = seeded(net).float().cuda()
    opt = KFAC(model, 0.01, damping=0.1, refresh_every=1, invert_every=1)
    scaler = torch.amp.GradScaler("cuda")
    x, y = data()
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = cross_entropy(model(x.float().cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dropped", ["loaded", "deleted"])
def test_a_dropped_inversion_does_not_write_into_memory_that_is_used_again(dropped):
    """It is still to come on its stream when the optimizer gives its room away."""
    model = nn.Sequential(nn.Linear(511, 512)).cuda()
    opt = KFAC(model, 0.1, invert_every=2, options=KFACOptions(inversion_lag=1))
    images, labels = torch.randn(8, 511).cuda(), torch.arange(8).cuda()
    train_step(opt, model, images, labels)
    state = opt.state_dict()
    train_step(opt, model, images, labels)
    with torch.cuda.stream(opt._preconditioner._side_stream):
        torch.cuda._sleep(10**9)  # half a second
    train_step(opt, model, images, labels)  # begins an inversion, behind the sleep
    if dropped == "loaded":
        opt.load_state_dict(state)
    else:
        del opt
    taken = [torch.full((1, 512, 512), 7.0, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert all(bool((tensor == 7).all()) for tensor in taken)


@pytest.mark.parametrize("sides", [(10, 256), (64, 27)])
def test_tf32_takes_nothing_from_the_step_of_a_small_badly_conditioned_layer(sides):
    """Against a solve in float64, as benchmarks/precision.py does on runs."""
    outputs, inputs = sides
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).cuda()
    optimizer = KFAC(model, lr=0.1, damping=1e-3)
    train_step(optimizer, model, torch.randn(8, inputs).cuda(), labels_for(8, classes=4).cuda())
    inverses = optimizer._preconditioner.banks[0]
    bank = inverses.bank
    for side, length in ((bank.A, inputs), (bank.G, outputs)):
        basis = torch.linalg.qr(torch.randn(length, length, dtype=torch.float64).cuda())[0]
        scales = torch.logspace(0, -6, length, dtype=torch.float64, device="cuda")
        side[0, :length, :length] = basis * scales @ basis.mT  # no triangles: they are small
    gradient = inverses.weight_step.normal_().double()
    with arithmetic("tf32"), torch.no_grad():
        optimizer._invert()
        optimizer._preconditioner.precondition()
    sides = [side.double() for side in bank.matrices(slice(None))]
    extra = factored_damping(*map(mean_diagonal, sides), torch.tensor([1e-3]).cuda())
    A, G = (damped(side, more) for side, more in zip(sides, extra, strict=True))
    wanted = torch.linalg.solve(G, torch.linalg.solve(A, gradient, left=False))
    assert (inverses.weight_step - wanted).norm() < 1e-3 * wanted.norm()


def test_a_loop_that_goes_nowhere_is_told_so_without_a_synchronisation():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).cuda()
    opt = KFAC(model, lr=0.1, refresh_every=5, invert_every=10)
    x, y = torch.full((6, 3), torch.nan).cuda(), labels_for(6, classes=2).cuda()
    train_step(opt, model, x, y)
    with warnings.catch_warnings(record=True) as told, no_synchronisation():
        warnings.simplefilter("always")
        for _ in range(200):
            train_step(opt, model, x, y)
    assert any("has no finite gradient" in str(warning.message) for warning in told)
