"""K-FAC in random loops against dense blocks: nets, settings, freezes, resumes, ways to store."""

import copy
from random import Random

import pytest
import torch
from oracle.plain_kfac import KFAC
from oracle.random_loops import DenseLoop, Net, Settings
from torch.nn import functional as F

from decaylab.curvature import preconditioner
from decaylab.curvature.kinds import kind
from decaylab.optim.options import KFACOptions


def optimizer(net: Net, s: Settings) -> KFAC:
    return KFAC(
        net,
        s.lr,
        curvature=s.curvature,
        outputs="exact",
        damping=s.damping,
        damping_scaling=s.damping_scaling,
        weight_decay=s.weight_decay,
        decay=s.decay,
        momentum=s.momentum,
        kl_clip=s.kl_clip,
        step_scaling="none" if s.rms is None else "spectral" if s.spectral else "rms",
        refresh_every=s.refresh_every,
        invert_every=s.invert_every,
        factor_decay=s.factor_decay,
        options=KFACOptions(inversion_lag=s.lag, momentum_first=s.momentum_first),
    )


def resumed(opt: KFAC, net: Net, s: Settings) -> KFAC:
    """Another one for the same net, from the state of the first."""
    state = copy.deepcopy(opt.state_dict())
    opt.detach()
    frozen = [p for p in net.parameters() if not p.requires_grad]
    net.requires_grad_(True)
    other = optimizer(net, s)
    for p in frozen:
        p.requires_grad_(False)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("seed", range(24))
def test_a_random_loop(monkeypatch, seed):
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    margin = random.choice([1, 8])  # zeros behind input sides, as on CUDA
    monkeypatch.setattr(kind.Shape, "wide", lambda self, _: -(-self.input_dim // margin) * margin)
    monkeypatch.setattr(kind, "PACKED_ABOVE", random.choice([1000, 2]))
    monkeypatch.setattr(preconditioner, "INVERTED_AT_ONCE", random.choice([2**27, 64]))
    monkeypatch.setattr(preconditioner, "LARGEST_KEPT", random.choice([2**30, 0]))
    torch.manual_seed(seed)
    settings, net = Settings.drawn(random), Net(random).double()
    if random.random() < 0.3:
        net = net.to(memory_format=torch.channels_last)
    expected = DenseLoop(copy.deepcopy(net), settings)
    opt = optimizer(net, settings)
    names = [name for name, _ in net.named_parameters()]
    for step in range(8):
        if step > 2 and random.random() < 0.4:
            name = random.choice([name for name in names if name != "head.weight"])
            thawed = not net.get_parameter(name).requires_grad
            for model in (net, expected.net):
                model.get_parameter(name).requires_grad_(thawed)
        if step and random.random() < 0.3:
            opt = resumed(opt, net, settings)
        passes = random.choice([1, 2])
        for _ in range(passes):
            inputs, labels = net.batch(random.choice([2, 5]), generator)
            if opt.refresh_due:
                expected.observe(inputs)
            for model in (net, expected.net):
                (F.cross_entropy(model(inputs), labels) / passes).backward()
        opt.step()
        expected.step()
        for model in (net, expected.net):
            model.zero_grad()
        for name in names:
            found, wanted = net.get_parameter(name), expected.net.get_parameter(name)
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9, msg=f"{step}: {name}")
