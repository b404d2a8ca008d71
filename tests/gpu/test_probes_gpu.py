"""Probes on a GPU: the same numbers as on the CPU, and the generators left alone."""

import copy

import pytest
import torch
from oracle.plain_kfac import KFAC
from oracle.tiny_nets import NAMES, tiny_net
from torch import nn

from decaylab import probes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


# K-FAC factors of rows that see each other are drawn, and a GPU draws other numbers than a CPU.
SEE_EACH_OTHER = ("bn", "residual")


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("name", NAMES)
def test_as_on_the_cpu(name, batch_norm):
    model, inputs, _ = tiny_net(name)
    there = copy.deepcopy(model).cuda()
    state = torch.cuda.get_rng_state()
    for probe in (
        lambda m, x: probes.jacobian_norm(m, x, batch_norm=batch_norm),
        lambda m, x: probes.gauss_newton_norm(m, x, batch_norm=batch_norm),
        lambda m, x: probes.fisher_rao_norm(m, x, batch_norm=batch_norm),
        lambda m, x: probes.curvature_traces(m, x, batch_norm=batch_norm),
        *([] if name in SEE_EACH_OTHER else [lambda m, x: probes.kfac_gauss_newton_norm(m, [x])]),
        lambda m, x: probes.weight_norms(m),
    ):
        want, got = probe(model, inputs).rows(), probe(there, inputs.cuda()).rows()
        assert got == pytest.approx(want, rel=1e-8, abs=1e-12)
    probes.jacobian_norm(there, inputs.cuda(), samples=3)
    probes.curvature_traces(there, inputs.cuda(), samples=3)
    assert torch.equal(state, torch.cuda.get_rng_state())


def test_watching_every_probe():
    model, inputs, labels = tiny_net("bn")
    model, inputs, labels = model.cuda(), inputs.cuda(), labels.cuda()
    kfac = KFAC(model, lr=0.05)
    with probes.watch(model, kfac, every=1, probes=probes.PROBES, inputs=inputs) as watched:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        kfac.step()
    names = set(watched.records.names())
    assert {"jacobian_norm", "second_order_share/0", "effective_lr/0", "rotation/0"} <= names
