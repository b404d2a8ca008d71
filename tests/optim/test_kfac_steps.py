"""Several steps on changing batches equal those computed with dense Kronecker matrices."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.dense_kfac import DenseKFAC, Settings
from oracle.kfac_runs import cross_entropy, labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import nn
from torch.nn import functional as F

from decaylab.optim.options import KFACOptions

CLASSES = 3
STEPS = 7
BASE = {"refresh_every": 2, "invert_every": 3, "factor_decay": 0.7, "damping": 0.05}


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 2, 2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def batch(step: int, size: int = 4):
    """A batch of its own for every step; its size changes too."""
    size += step % 2
    return random(size, 2, 4, 4, seed=step), labels_for(size, classes=CLASSES, seed=step)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run_both(options, *, steps=STEPS, build=conv_net, batch=batch, groups=None, loss=cross_entropy):
    """Step the library and the dense oracle from the same start; the weights after each step."""
    ours = seeded(build)
    dense = DenseKFAC(copy.deepcopy(ours), loss, Settings(**options))
    library = {k: v for k, v in options.items() if k not in ("own", "inversion_lag")}
    library["options"] = KFACOptions(inversion_lag=options.get("inversion_lag", 0))
    params = None if groups is None else groups(ours)
    opt = KFAC(ours, outputs="exact", params=params, **library)
    clips = []
    for step in range(steps):
        x, y = batch(step)
        expected = dense.step(x, y)
        found = train_step(opt, ours, x, y, loss)
        assert abs(float(found) - expected) <= 1e-9, step
        assert (flat(ours) - flat(dense.model)).abs().max() <= 1e-10, step
        clips.append(dense.clip)
        if options.get("kl_clip") is None:
            assert opt.clip_coefficient is None
        else:
            assert float(opt.clip_coefficient) == pytest.approx(dense.clip, rel=1e-9)
    start = flat(seeded(build))
    assert (flat(ours) - start).abs().max() > 1e-3  # it went somewhere
    return opt, clips


@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton", "empirical-fisher"])
def test_every_decay_and_curvature(curvature, decay):
    weight_decay = 0.01 if decay == "independent" else 0.2
    options = BASE | {"lr": 0.05, "weight_decay": weight_decay, "decay": decay}
    run_both(options | {"curvature": curvature})


@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
def test_a_kl_clip_that_binds(decay):
    options = BASE | {"lr": 0.1, "weight_decay": 0.02, "decay": decay, "kl_clip": 1e-3}
    _, clips = run_both(options)
    assert max(clips) < 0.9


def test_a_kl_clip_that_does_not_bind():
    _, clips = run_both(BASE | {"lr": 0.01, "kl_clip": 1e3})
    assert min(clips) == 1.0


@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    refresh_every=st.integers(1, 4),
    invert_every=st.integers(1, 5),
    factor_decay=st.sampled_from([0.0, 0.5, 0.95]),
    damping=st.sampled_from([0.01, 0.3]),
    decay=st.sampled_from(["l2", "decoupled", "independent"]),
    curvature_scale=st.sampled_from([1.0, 2.0]),
    sharing=st.sampled_from(["expand", "reduce"]),
    kl_clip=st.sampled_from([None, 1e-3]),
)
@settings(max_examples=12, deadline=None)
def test_intervals_momentum_and_averages(**drawn):
    run_both({"lr": 0.03, "weight_decay": 0.05} | drawn, steps=6)


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("refresh_every", [1, 2])
def test_an_inversion_that_is_used_later(lag, refresh_every):
    """Begun at step k from the factors of step k, used from step k + lag on; the first at once."""
    options = BASE | {"lr": 0.05, "invert_every": 4, "refresh_every": refresh_every}
    run_both(options | {"inversion_lag": lag}, steps=11)


def test_the_default_intervals():
    """Refresh and invert at steps 1, 11, 21: a small net, 22 steps."""
    run_both(
        {"lr": 0.02, "damping": 0.05},
        steps=22,
        build=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
        batch=lambda s: (random(4, 3, seed=s), labels_for(4, classes=CLASSES, seed=s)),
    )


def test_sequences_and_several_rows_per_example():
    run_both(
        BASE | {"lr": 0.05, "weight_decay": 0.1},
        build=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
        batch=lambda s: (random(2, 3, 3, seed=s), labels_for(2, 3, classes=CLASSES, seed=s)),
    )


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_other_likelihoods(likelihood):
    def loss(z, y):
        if likelihood == "bernoulli":
            return F.binary_cross_entropy_with_logits(z, y, reduction="sum") / len(z)
        return 0.5 * F.mse_loss(z, y, reduction="sum") / len(z)

    def with_targets(step):
        return random(4, 2, 4, 4, seed=step), random(4, CLASSES, seed=step).sigmoid().round()

    options = BASE | {"lr": 0.05, "likelihood": likelihood}
    run_both(options, batch=with_targets, loss=loss)
    run_both(options | {"curvature": "empirical-fisher"}, batch=with_targets, loss=loss)


@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize("kl_clip", [None, 1e-3])
def test_weight_and_bias_in_groups_of_their_own(decay, kl_clip):
    """The block is the layer's; lr and weight decay are the parameter's."""
    own = {"0.weight": (0.05, 0.1), "0.bias": (0.01, 0.0), "2.weight": (0.05, 0.1)}
    own |= {"5.weight": (0.02, 0.3), "5.bias": (0.05, 0.1)}

    def groups(model):
        return [
            {"params": [parameter], "lr": own[name][0], "weight_decay": own[name][1]}
            for name, parameter in model.named_parameters()
        ]

    run_both(BASE | {"lr": 1.0, "own": own, "decay": decay, "kl_clip": kl_clip}, groups=groups)


# -- channels last --


class VolumeNet(nn.Module):
    """2-d and 3-d convolutions, with and without groups, in one net."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Conv2d(2, 4, (2, 3), groups=2)
        self.mixed = nn.Conv2d(4, 4, 2, bias=False)
        self.deep = nn.Conv3d(2, 4, (2, 1, 2), groups=2, padding=(0, 1, 0))
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x):
        h = self.mixed(self.flat(x).tanh()).tanh()  # [B, 4, 3, 2]
        volume = h.unflatten(1, (2, 2))  # [B, 2, 2, 3, 2]
        return self.head(self.deep(volume).relu().flatten(1).repeat(1, 48 // 20 + 1)[:, :48])


def channels_last(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.dim() in (4, 5):
            form = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
            parameter.data = parameter.data.to(memory_format=form)
    return model


@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("max_factor_dim", [8192, 6])
def test_channels_last_takes_the_same_steps(decay, sharing, max_factor_dim):
    models = [seeded(VolumeNet), channels_last(seeded(VolumeNet))]
    assert models[1].deep.weight.stride() != models[0].deep.weight.stride()
    options = BASE | {"weight_decay": 0.02, "decay": decay, "kl_clip": 1e-2, "sharing": sharing}
    opts = [
        KFAC(model, 0.05, outputs="exact", max_factor_dim=max_factor_dim, **options)
        for model in models
    ]
    for step in range(STEPS):
        x, y = random(4, 2, 5, 5, seed=step), labels_for(4, classes=CLASSES, seed=step)
        train_step(opts[0], models[0], x, y)
        train_step(opts[1], models[1], x.to(memory_format=torch.channels_last), y)
        torch.testing.assert_close(flat(models[1]), flat(models[0]), rtol=0, atol=1e-11)
    for name, expected in opts[0].factors().items():
        found = opts[1].factors()[name]
        torch.testing.assert_close(found.A, expected.A, rtol=0, atol=1e-11)
        torch.testing.assert_close(found.S, expected.S, rtol=0, atol=1e-11)


@pytest.mark.parametrize("max_factor_dim", [8192, 6])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_state_moves_from_channels_last_to_contiguous_and_back(max_factor_dim, lag):
    options = BASE | {"options": KFACOptions(inversion_lag=lag), "max_factor_dim": max_factor_dim}
    models = [channels_last(seeded(VolumeNet)), seeded(VolumeNet), channels_last(seeded(VolumeNet))]
    opts = [KFAC(model, 0.05, outputs="exact", **options) for model in models]
    for step in range(STEPS):
        x, y = random(4, 2, 5, 5, seed=step), labels_for(4, classes=CLASSES, seed=step)
        train_step(opts[0], models[0], x, y)
        if step == 3:
            for model, opt in zip(models[1:], opts[1:], strict=True):
                model.load_state_dict(models[0].state_dict())
                opt.load_state_dict(copy.deepcopy(opts[0].state_dict()))
        if step > 3:
            for model, opt in zip(models[1:], opts[1:], strict=True):
                train_step(opt, model, x, y)
                torch.testing.assert_close(flat(model), flat(models[0]), rtol=0, atol=1e-11)


@pytest.mark.parametrize("last", [False, True])
def test_a_volume_net_equals_the_dense_oracle(last):
    """Conv3d with groups, and both memory formats, against dense matrices."""
    form = channels_last if last else (lambda model: model)
    run_both(
        BASE | {"lr": 0.05, "weight_decay": 0.1},
        build=lambda: form(VolumeNet()),
        batch=lambda s: (random(4, 2, 5, 5, seed=s), labels_for(4, classes=CLASSES, seed=s)),
    )


# -- conversions --


def trained(steps=STEPS, reduction="mean", **options) -> torch.Tensor:
    model = seeded(conv_net)
    opt = KFAC(model, outputs="exact", reduction=reduction, **(BASE | options))
    for step in range(steps):
        x, y = random(4, 2, 4, 4, seed=step), labels_for(4, classes=CLASSES, seed=step)
        train_step(opt, model, x, y, lambda z, y: cross_entropy(z, y, reduction))
    return flat(model)


@pytest.mark.parametrize("decay", ["l2", "decoupled", "independent"])
@pytest.mark.parametrize("curvature", ["gauss-newton", "fisher", "empirical-fisher"])
@pytest.mark.parametrize("kl_clip", [None, 1e-3])
def test_the_published_scale_of_two(decay, curvature, kl_clip):
    """Recipe line 5: with 1x, lr/2, damping/2, decoupled decay x 2, kl_clip/2; L2 unchanged."""
    common = {"decay": decay, "curvature": curvature}
    two = trained(
        curvature_scale=2.0, lr=0.1, damping=0.06, weight_decay=0.05, kl_clip=kl_clip, **common
    )
    one = trained(
        lr=0.05,
        damping=0.03,
        weight_decay=0.1 if decay == "decoupled" else 0.05,
        kl_clip=None if kl_clip is None else kl_clip / 2,
        **common,
    )
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("curvature", ["gauss-newton", "fisher", "empirical-fisher"])
def test_sum_and_mean_reduction(curvature):
    """A summed loss with lr / N (and decoupled decay * N) takes the same steps."""
    mean = trained(curvature=curvature, lr=0.05, weight_decay=0.1)
    total = trained(curvature=curvature, lr=0.05 / 4, weight_decay=0.1 * 4, reduction="sum")
    torch.testing.assert_close(mean, total, rtol=0, atol=1e-12)


def test_l2_and_decoupled_differ_by_the_place_of_one_term():
    """With damping far above the curvature both precondition by the same multiple of one."""
    huge = {"damping": 1e10, "lr": 1e8, "momentum": 0.0}
    l2 = trained(decay="l2", weight_decay=0.1, **huge)
    decoupled = trained(decay="decoupled", weight_decay=0.1 / 1e10, **huge)
    none = trained(**huge)
    assert (l2 - none).abs().max() > 1e-3
    torch.testing.assert_close(l2, decoupled, rtol=0, atol=1e-5)
    # and with curvature that matters they do not agree
    assert (
        trained(decay="l2", lr=0.1, weight_decay=0.1) - trained(lr=0.1, weight_decay=0.1)
    ).norm() > 1e-2


def test_decoupled_decay_is_not_stored_in_the_velocity():
    """Zero gradient: only decay acts, by lr * wd a step, with momentum or without (Eq. 7)."""
    for momentum in (0.0, 0.9):
        for decay, shrink in (("decoupled", 1 - 0.1 * 0.2), ("independent", 1 - 0.2)):
            model = seeded(lambda: nn.Sequential(nn.Linear(3, 2)))
            start = flat(model)
            opt = KFAC(model, 0.1, weight_decay=0.2, decay=decay, momentum=momentum)
            for _ in range(3):
                train_step(opt, model, random(4, 3), None, lambda z, y: (0 * z).sum())
            torch.testing.assert_close(flat(model), start * shrink**3, rtol=1e-14, atol=0)


def test_initialize_is_the_mean_over_batches():
    """Recipe line 8: the factors start as their mean over a pass; the first refresh averages."""
    model = seeded(conv_net)
    batches = [random(4, 2, 4, 4, seed=s) for s in range(3)]
    together = KFAC(copy.deepcopy(model), 0.1, outputs="exact")
    together.initialize([torch.cat(batches)])
    opt = KFAC(model, 0.1, outputs="exact", factor_decay=0.75)
    opt.initialize(batches)
    start = opt.factors()
    for name, expected in together.factors().items():
        torch.testing.assert_close(start[name].A, expected.A, rtol=1e-12, atol=0)
        torch.testing.assert_close(start[name].S, expected.S, rtol=1e-12, atol=1e-16)
        assert start[name].T == expected.T
    x, y = batch(0)
    fresh = KFAC(copy.deepcopy(model), 0.1, outputs="exact")
    fresh.initialize([x])
    new = fresh.factors()
    train_step(opt, model, x, y)
    for name, found in opt.factors().items():
        expected = 0.75 * start[name].S + 0.25 * new[name].S
        torch.testing.assert_close(found.S, expected, rtol=1e-12, atol=1e-16)


def test_initialize_inverts():
    """Steps right after it use those factors, although no inversion would change them."""
    model = seeded(conv_net)
    x, y = batch(0)
    plain = copy.deepcopy(model)
    first = KFAC(plain, 0.1, outputs="exact", damping=0.05)
    train_step(first, plain, x, y)
    opt = KFAC(model, 0.1, outputs="exact", damping=0.05)
    opt.initialize([(x, y)])
    train_step(opt, model, x, y)
    torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=1e-12)
