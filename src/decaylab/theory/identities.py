"""T1 to T4: gradient structure, Gauss-Newton norms, Jacobian norm (Lemmas 1-2, Theorem 1, App. E).

Each function returns checks: the statement where its conditions are met, then what becomes of it
where one is broken. Left and right sides are computed by different means.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from decaylab.curvature.products import curvature_product, jacobian_product
from decaylab.probes.gauss_newton import gauss_newton_norm, kfac_gauss_newton_norm
from decaylab.probes.jacobian import jacobian_norm
from decaylab.probes.reading import Reading
from decaylab.theory import nets
from decaylab.theory.check import Check, Pairs, Statement

Net = Callable[..., nn.Module]


def gradient_structure() -> list[Check]:
    """T1, Lemma 1: f(x) = J_x x = J_theta theta / (L + 1) for bias-free ReLU nets."""
    t1 = Statement("T1", "Lemma 1", 1e-10)
    return [
        t1.check("f = J_x x; ReLU MLPs, no bias", _through_inputs(nets.mlp)),
        t1.check("f = J_x x; ReLU convs, max-pool, no bias", _through_inputs(nets.convnet)),
        t1.check("f = J_theta theta / (L+1); ReLU MLPs, no bias", _through_weights(nets.mlp)),
        t1.check(
            "f = J_theta theta / (L+1); ReLU convs, max-pool, no bias",
            _through_weights(nets.convnet),
        ),
        t1.broken("f = J_x x; biases added", _through_inputs(nets.mlp, bias=True)),
        t1.broken("f = J_theta theta / (L+1); biases added", _through_weights(nets.mlp, bias=True)),
        t1.broken(
            "f = J_theta theta / (L+1); tanh for ReLU",
            _through_weights(nets.mlp, activation="tanh"),
        ),
    ]


def gauss_newton_norms() -> list[Check]:
    """T2, Lemma 2 and App. C: |theta|_G^2 = (L+1)^2 E|f|^2; K-FAC's = (L+1) E|f|^2 if linear."""
    t2 = Statement("T2", "Lemma 2, App. C", 1e-8)
    linear = {"activation": "linear"}
    return [
        t2.check("exact GN norm; ReLU MLPs, no bias", _exact_norm(nets.mlp)),
        t2.check("exact GN norm; ReLU convs, max-pool, no bias", _exact_norm(nets.convnet)),
        t2.check("K-FAC GN norm; linear MLPs, no bias", _kfac_norm(nets.mlp, **linear)),
        t2.broken("exact GN norm; biases added", _exact_norm(nets.mlp, bias=True)),
        t2.broken("exact GN norm; tanh for ReLU", _exact_norm(nets.mlp, activation="tanh")),
        t2.broken("K-FAC GN norm; ReLU, not linear", _kfac_norm(nets.mlp)),
        t2.broken("K-FAC GN norm; biases added", _kfac_norm(nets.mlp, bias=True, **linear)),
        t2.broken(
            "K-FAC GN norm; linear convs, many positions", _kfac_norm(nets.convnet, **linear)
        ),
    ]


def jacobian_norms() -> list[Check]:
    """T3, Theorem 1: K-FAC GN norm = (L+1) |J_x|_F^2 for linear nets on whitened inputs."""
    t3 = Statement("T3", "Theorem 1", 1e-8)
    return [
        t3.check("linear MLPs, no bias, whitened inputs", _theorem_1(activation="linear")),
        t3.broken("inputs not whitened", _theorem_1(activation="linear", white=False)),
        t3.broken("ReLU, not linear", _theorem_1()),
        t3.broken("biases added", _theorem_1(activation="linear", bias=True)),
    ]


def norm_gradient() -> list[Check]:
    """T4, App. E: the gradient of |theta|_G^2, G differentiated too, is 2 (L+1) G theta."""
    t4 = Statement("T4", "App. E", 1e-8)
    return [
        t4.check("ReLU MLPs, no bias", _norm_gradient(nets.mlp)),
        t4.check("ReLU convs, max-pool, no bias", _norm_gradient(nets.convnet)),
        t4.broken("biases added", _norm_gradient(nets.mlp, bias=True)),
        t4.broken("tanh for ReLU", _norm_gradient(nets.mlp, activation="tanh")),
    ]


def _cases(make: Net, **kind: object) -> Iterator[tuple[nn.Module, Tensor]]:
    # one weight layer is exact for K-FAC and has no activation: broken conditions need depth
    whole = kind.get("activation", "relu") == "linear" or not kind
    depths = nets.DEPTHS if whole else nets.DEPTHS[1:]
    for depth, width, seed in product(depths, nets.WIDTHS, nets.SEEDS):
        net = make(depth, width, seed, **kind).eval()
        yield net, nets.inputs_for(net, seed)


def _through_inputs(make: Net, **kind: object) -> Pairs:
    for net, x in _cases(make, **kind):
        J = vmap(jacrev(lambda row, net=net: net(row[None])[0]))(x)
        yield net(x).detach(), (J.flatten(2) @ x.flatten(1)[..., None])[..., 0].detach()


def _through_weights(make: Net, **kind: object) -> Pairs:
    for net, x in _cases(make, **kind):
        theta = {name: p.detach() for name, p in net.named_parameters()}
        logits, along = jacobian_product(net, x, theta)
        yield logits, along / nets.layer_count(net)


def _mean_square(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).detach().square().sum(1).mean()


def _exact_norm(make: Net, **kind: object) -> Pairs:
    for net, x in _cases(make, **kind):
        yield (
            _number(gauss_newton_norm(net, x, per_layer=False)),
            nets.layer_count(net) ** 2 * _mean_square(net, x),
        )


def _kfac_norm(make: Net, **kind: object) -> Pairs:
    for net, x in _cases(make, **kind):
        yield (
            _number(kfac_gauss_newton_norm(net, [x])),
            nets.layer_count(net) * _mean_square(net, x),
        )


def _theorem_1(white: bool = True, **kind: object) -> Pairs:
    for net, x in _cases(nets.mlp, **kind):
        inputs = nets.whitened(x) if white else x
        right = nets.layer_count(net) * _number(jacobian_norm(net, inputs))
        yield _number(kfac_gauss_newton_norm(net, [inputs])), right


def _norm_gradient(make: Net, **kind: object) -> Pairs:
    for net, x in _cases(make, **kind):
        theta = {name: p.detach() for name, p in net.named_parameters()}
        left = grad(partial(_squared_norm, net, x))(theta)
        right = curvature_product(net, x, theta)
        factor = 2 * nets.layer_count(net)
        yield _flat(left), factor * _flat(right)


def _squared_norm(net: nn.Module, x: Tensor, theta: dict[str, Tensor]) -> Tensor:
    """E|J_theta theta|^2 as a function of theta, J included."""
    tangent = jvp(lambda p: functional_call(net, p, (x,)), (theta,), (theta,))[1]
    return tangent.square().sum() / len(x)


def _number(reading: Reading) -> Tensor:
    return torch.tensor(reading.total, dtype=torch.float64)


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])
