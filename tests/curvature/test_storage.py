"""Triangles lose nothing, halves what TF32 loses; a KFAC that uses them steps and resumes alike."""

import copy
from types import SimpleNamespace

import pytest
import torch
from oracle.kfac_runs import labels_for, random, seeded, train_step
from torch import nn

from decaylab.curvature import kinds, preconditioner, storage
from decaylab.curvature.kinds.kind import Shape
from decaylab.curvature.storage import InverseStack, diagonal_of, halved, pack, unpack
from decaylab.optim.kfac import KFAC, KFACOptions
from decaylab.optim.kfac_state import curvature_state

CLASSES = 3
CPU = torch.device("cpu")


def symmetric(count: int, length: int) -> torch.Tensor:
    matrices = random(count, length, length, seed=length)
    return matrices + matrices.mT


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 33])
def test_a_triangle_gives_back_the_matrix(length):
    matrices = symmetric(3, length)
    triangles = pack(matrices)
    assert triangles.shape[1:] == storage.packed_shape(length)
    assert triangles[0].numel() <= (length + 1) * (length + 2) / 2
    assert torch.equal(unpack(triangles, length), matrices)
    assert torch.equal(diagonal_of(triangles)[:, :length], matrices.diagonal(dim1=1, dim2=2))


def test_a_triangle_is_the_lower_one():
    """Which is what a factorisation reads."""
    matrices = random(2, 6, 6)
    found = unpack(pack(matrices), 6)
    assert torch.equal(found.tril(), matrices.tril())
    assert torch.equal(found, found.mT)


def test_sums_of_triangles_are_triangles_of_sums():
    one, other = symmetric(2, 5), 3 * symmetric(2, 5)
    assert torch.equal(pack(one) + 0.5 * pack(other), pack(one + 0.5 * other))


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 3e4, 1e30])
def test_halves_have_eleven_significant_bits_at_any_scale(size):
    matrices = (random(3, 20, 20) * size).float()
    halves, scale = halved(matrices)
    again = halves.float() * scale[:, None, None]
    assert halves.isfinite().all()
    large = matrices.abs() > 1e-3 * matrices.abs().amax()
    error = (again - matrices).abs() / matrices.abs()
    assert error[large].max() <= 2**-11
    # and the same again, bit for bit, as a state dict needs it
    twice, same = halved(again)
    assert torch.equal(twice, halves)
    assert torch.equal(same, scale)


@pytest.mark.parametrize("largest", [1 - 2**-13, 1 - 2**-12, 1 - 2**-11, 1.0, 1 + 2**-11])
def test_halves_round_up_to_a_power_of_two_and_stay_there(largest):
    matrices = torch.full((1, 2, 2), largest)
    matrices[0, 0, 1] = 2**-26 * 1.37  # where float16 has few bits left
    halves, scale = halved(matrices)
    twice, same = halved(halves.float() * scale[:, None, None])
    assert torch.equal(twice, halves)
    assert torch.equal(same, scale)


def test_zeros_and_what_is_not_finite():
    halves, scale = halved(torch.zeros(1, 2, 2))
    assert not halves.any()
    assert scale.isfinite().all()
    for bad in (torch.inf, torch.nan):
        halves, scale = halved(torch.full((1, 2, 2), bad))
        assert not (halves.float() * scale).isfinite().any()


def test_an_inverse_that_is_not_sound_is_not_written():
    stack = InverseStack(2, 3, 5, torch.float32, CPU, diagonal=False, half=True)
    first = symmetric(2, 3).float()
    stack.write(slice(0, 2), first)
    stack.write(slice(0, 2), 1000 * first, torch.tensor([True, False]))
    torch.testing.assert_close(stack.read()[0], 1000 * first[0], rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(stack.read()[1], first[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("half", [False, True])
def test_products_with_inverses(half):
    stack = InverseStack(2, 3, 3, torch.float32, CPU, diagonal=False, half=half)
    inverse = symmetric(2, 3).float() * 1e5
    stack.write(slice(0, 2), inverse)
    rows = random(2, 4, 3).float() * 1e-7
    tolerance = 3e-3 if half else 1e-6
    for found, expected in (
        (stack.after(rows), rows @ inverse),
        (stack.before(rows.mT), inverse @ rows.mT),
    ):
        product, scale = found
        product = product if scale is None else product * scale[:, None, None]
        assert (product - expected).norm() < tolerance * expected.norm()


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(16, 7),
        nn.Tanh(),
        nn.Linear(7, CLASSES),
    )


def trained(model: nn.Module, resume_at: int | None = None, **options) -> KFAC:
    dtype = next(model.parameters()).dtype
    opt = KFAC(model, 0.1, kl_clip=1e-2, outputs="exact", refresh_every=2, **options)
    for step in range(5):
        images = random(6, 2, 4, 4, seed=step).to(dtype)
        train_step(opt, model, images, labels_for(6, classes=CLASSES, seed=step))
        if step == resume_at:
            state = copy.deepcopy(opt.state_dict())
            opt = KFAC(model, 0.1, kl_clip=1e-2, outputs="exact", refresh_every=2, **options)
            opt.load_state_dict(state)
    return opt


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_triangles_change_a_training_by_rounding_alone(monkeypatch):
    """Traces are added up in another order."""
    plain, packed = seeded(net), seeded(net)
    expected = trained(plain)
    monkeypatch.setattr(kinds.kind, "PACKED_ABOVE", 2)
    found = trained(packed)
    assert found.estimator.running.home["4"].A.shape[1:] == storage.packed_shape(17)
    torch.testing.assert_close(weights(plain), weights(packed), rtol=1e-12, atol=1e-13)
    for name, factor in found.factors().items():
        torch.testing.assert_close(factor.A, expected.factors()[name].A, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("half", [False, True])
def test_a_resumed_training_has_the_same_bits(monkeypatch, half, lag):
    monkeypatch.setattr(kinds.kind, "PACKED_ABOVE", 2)
    monkeypatch.setattr(preconditioner, "LARGEST_PRECISE", 2)
    options = {"options": KFACOptions(half_inverses=half, inversion_lag=lag), "invert_every": 2}
    whole, parts = seeded(net).float(), seeded(net).float()
    opt = trained(whole, **options)
    assert opt._preconditioner.banks[0].A.half == half
    trained(parts, resume_at=2, **options)
    assert torch.equal(weights(whole), weights(parts))


def test_states_of_whole_matrices_and_inverses_load_into_either(monkeypatch):
    """As older versions saved them, which is how they are saved now."""
    model = seeded(net).float()
    opt = trained(model)
    state = opt.state_dict()
    layers = curvature_state(state)["layers"]
    assert layers["4"]["A"].shape == (1, 17, 17)
    assert layers["4"]["A_inverse"].dtype == torch.float32
    monkeypatch.setattr(kinds.kind, "PACKED_ABOVE", 2)
    monkeypatch.setattr(preconditioner, "LARGEST_PRECISE", 2)
    other = KFAC(model, 0.1, kl_clip=1e-2, options=KFACOptions(half_inverses=True))
    other.load_state_dict(state)
    for name, own in curvature_state(other.state_dict())["layers"].items():
        for side in ("A", "G"):
            saved = layers[name]
            torch.testing.assert_close(own[side], saved[side], rtol=1e-6, atol=1e-8)
            inverse = f"{side}_inverse"
            error = (own[inverse] - saved[inverse]).norm() / saved[inverse].norm()
            assert error < 2**-11


def test_steps_with_halves_are_within_two_percent_of_float64(monkeypatch):
    """With sides of several hundreds, after some training, at the default damping."""
    torch.manual_seed(0)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(700, 660), nn.ReLU(), nn.Linear(660, 10))

    model = wide()
    inputs = torch.randn(256, 700) @ torch.randn(700, 700).tril() / 20  # correlated
    labels = torch.randint(10, (256,))
    opt = KFAC(model, 0.03, kl_clip=1e-3, damping=1e-3, refresh_every=2, invert_every=4)
    for _ in range(9):
        train_step(opt, model, inputs, labels)
    state = opt.state_dict()
    steps = []
    for half in (False, True):
        other = KFAC(model, 0.03, damping=1e-3, options=KFACOptions(half_inverses=half))
        other.load_state_dict(state)
        assert other._preconditioner.banks[0].A.half == half
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        slots = other._preconditioner.slots
        for parameter, slot in slots.items():
            slot.step.copy_(parameter.grad)
        gradient = {p: p.grad.clone() for p in slots}
        other._preconditioner.precondition()
        steps.append({p: slot.step.clone() for p, slot in slots.items()})
        other.detach()
    layer = curvature_state(state)["layers"]["0"]
    joined = torch.cat([gradient[model[0].weight], gradient[model[0].bias][:, None]], 1).double()
    exact = layer["G_inverse"][0].double() @ joined @ layer["A_inverse"][0].double()
    found = torch.cat([steps[1][model[0].weight], steps[1][model[0].bias][:, None]], 1)
    assert (found - exact).norm() < 0.02 * exact.norm()
    for parameter, step in steps[0].items():
        assert (steps[1][parameter] - step).norm() < 0.02 * step.norm()


def test_how_much_is_kept():
    """In bytes beside the parameters: factors as triangles, inverses in halves, one place more."""
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    opt = KFAC(model, 0.1, options=KFACOptions(half_inverses=True))
    bank, inverses = opt.estimator.running.banks[0], opt._preconditioner.banks[0]
    size = model[0].weight.nbytes
    factors = bank.A.nbytes + bank.G.nbytes
    inverted = inverses.A.values.nbytes + inverses.G.values.nbytes
    assert factors == pytest.approx(size, rel=2e-3)  # two whole matrices would be twice that
    assert inverted == size
    assert inverses.weight_step.nbytes == size


@pytest.fixture
def matmul():
    """Torch's setting of products in float32 on CUDA, which comes back after the test."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    yield setting
    setting.fp32_precision = before


def test_by_default_large_inverses_are_halved_on_cuda(matmul):
    """If they would need over 1 GiB. Short sides, diagonals and the CPU do not count."""
    matmul.fp32_precision = "tf32"

    def are_halved(*sides, device="cuda", diagonal=False):
        shapes = [Shape(*side, False, diagonal, diagonal, torch.float32) for side in sides]
        banks = [SimpleNamespace(count=1, shape=shape) for shape in shapes]
        return preconditioner.are_halved(banks, torch.device(device))

    whole = 2**14  # its square in float32 is 1 GiB
    assert not are_halved((whole, 640))
    assert are_halved((whole, 640), (641, 1))
    assert not are_halved((whole, whole), device="cpu")
    assert not are_halved((whole, whole), diagonal=True)
    opt = KFAC(nn.Linear(700, 700), 0.1)
    assert not opt._preconditioner.banks[0].A.half


@pytest.mark.parametrize(
    ("allow", "halved"),
    [
        (lambda matmul: torch.set_float32_matmul_precision("highest"), False),
        (lambda matmul: torch.set_float32_matmul_precision("high"), True),
        (lambda matmul: setattr(matmul, "allow_tf32", False), False),
        (lambda matmul: setattr(matmul, "allow_tf32", True), True),
        (lambda matmul: setattr(matmul, "fp32_precision", "ieee"), False),
        (lambda matmul: setattr(matmul, "fp32_precision", "tf32"), True),
    ],
)
def test_by_default_inverses_are_halved_only_for_tf32_products(matmul, allow, halved):
    """By torch's newer settings and by its older ones."""
    shape = Shape(2**15, 1, False, False, False, torch.float32)
    allow(matmul)
    banks = [SimpleNamespace(count=1, shape=shape)]
    assert preconditioner.are_halved(banks, torch.device("cuda")) is halved


def room_for_steps(opt: KFAC) -> int:
    """Bytes that there are now."""
    banks = opt._preconditioner.banks
    parts = [part for bank in banks for part in (bank.weight_step, bank.bias_step)]
    return sum(part.untyped_storage().nbytes() for part in parts)


@pytest.mark.parametrize("resume_at", [None, 2])
def test_a_large_model_has_room_for_steps_in_steps_alone(monkeypatch, resume_at):
    plain, large = seeded(net).float(), seeded(net).float()
    expected = trained(plain, resume_at)
    monkeypatch.setattr(preconditioner, "LARGEST_KEPT", 0)
    opt = trained(large, resume_at)
    assert torch.equal(weights(plain), weights(large))
    assert room_for_steps(opt) == 0
    with opt._preconditioner.room():
        assert room_for_steps(opt) == room_for_steps(expected) > 0


def test_also_where_weights_lie_transposed(monkeypatch):
    def text() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, CLASSES))

    models = [seeded(text), seeded(text)]
    for model, most in zip(models, (2**30, 0), strict=True):
        monkeypatch.setattr(preconditioner, "LARGEST_KEPT", most)
        opt = KFAC(model, 0.1, kl_clip=1e-2, outputs="exact", refresh_every=2)
        for step in range(3):
            tokens = torch.randint(5, (6, 2), generator=torch.Generator().manual_seed(step))
            train_step(opt, model, tokens, labels_for(6, classes=CLASSES, seed=step))
    assert room_for_steps(opt) == 0
    assert torch.equal(*map(weights, models))


def test_a_step_that_is_refused_gives_its_room_back(monkeypatch):
    monkeypatch.setattr(preconditioner, "LARGEST_KEPT", 0)
    model = seeded(net).float()
    opt = trained(model)
    monkeypatch.setattr(opt._preconditioner, "precondition", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_step(opt, model, random(6, 2, 4, 4).float(), labels_for(6, classes=CLASSES))
    assert room_for_steps(opt) == 0
