"""Exact curvature-vector products and per-parameter traces by autograd, for any model.

The curvature is that of the loss averaged over rows (Eq. 2-4): with R rows of logits z_r [C] and
the Jacobian J_r of row r with respect to the parameters,

    C = (1/R) sum_r J_r' H_r J_r

where H_r is I (Gauss-Newton), the output Hessian (Fisher: diag(p) - pp' for the categorical
likelihood) or g_r g_r' with g_r the gradient of row r's loss at the data's target (empirical
Fisher). Scaling: mean over rows (all leading axes of the logits), sum over classes; the loss of the
Gaussian likelihood is |z - y|^2 / 2.

With `batch_norm="train"` the rows depend on each other through the batch statistics and J_r
includes that. The model is left as it was. Nothing here approximates by Kronecker factors.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import jvp

from decaylab.curvature.outputs import Curvature, Likelihood, exact, hessian_product, sampled
from decaylab.curvature.preserve import (
    BatchNormMode,
    as_function,
    bare,
    check_inputs,
    check_logits,
    tied,
    trainable,
    untouched,
)
from decaylab.errors import DecaylabError, Lacks, Mismatch, Range, check_name
from decaylab.networks.rescaling import RepeatedForward
from decaylab.networks.sharded import scale_derivative, team_of


def jacobian_product(
    model: nn.Module,
    inputs: Tensor,
    vector: dict[str, Tensor],
    *,
    batch_norm: BatchNormMode = "eval",
) -> tuple[Tensor, Tensor]:
    """The logits [..., C] and J v: v is a dict of directions, parameters left out stay.

    Cost: one forward-mode pass (about two forward passes); two backward passes where an operation
    of the model has no forward-mode rule. Rows are not averaged.
    """
    check_inputs(model, inputs)
    with untouched(model, batch_norm=batch_norm) as bare_model:
        primals, tangents = _directions(bare_model, vector)
        logits, tangent = _jvp(as_function(bare_model, inputs), primals, tangents)
    return logits.detach(), tangent.detach()


def scale_product(
    model: nn.Module,
    inputs: Tensor,
    names: Collection[str],
    *,
    batch_norm: BatchNormMode = "eval",
) -> tuple[Tensor, Tensor]:
    """The logits and J v, where v is the named parameters themselves.

    That is their derivative by the logarithm of a factor on these, which a sharded model has too: a
    forward-mode pass through its own hooks, or under tensor parallelism, and where an operation has
    no forward mode, differences of four passes (relative error about 1e-7 in float64, 1e-4 in
    float32). Cost else as `jacobian_product`.
    """
    parameters = dict(bare(model).named_parameters())
    for name in names:
        check_name("parameter", name, parameters)
    if team_of(bare(model)) is None:
        direction = {name: parameters[name].detach() for name in names}
        return jacobian_product(model, inputs, direction, batch_norm=batch_norm)
    check_inputs(model, inputs)
    chosen = [parameters[name] for name in names]
    with untouched(model, batch_norm=batch_norm) as bare_model, torch.no_grad():
        evaluate = RepeatedForward(bare_model, inputs, check_logits)
        with _forward_mode():
            try:
                ((logits, tangent),) = scale_derivative(bare_model, chosen, evaluate)
            except DecaylabError:
                ((logits, tangent),) = _differences(evaluate, chosen)
    return logits.detach(), tangent.detach()


def _differences(
    evaluate: RepeatedForward, parameters: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Outputs, and their derivatives by log a from central differences at two distances.

    The error of each is of the square of its distance h = log a, and is extrapolated to h = 0. One
    distance of 16-bit outputs, whose rounding the extrapolation would enlarge.
    """
    outputs = evaluate()
    short = any(torch.finfo(output.dtype).bits <= 16 for output in outputs)
    slopes = []
    for ratio in (1 + 2**-4,) if short else (1 + 2**-6, 1 + 2**-7):
        h = math.log(ratio)
        up, down = (evaluate.rescaled([(p, a) for p in parameters]) for a in (ratio, 1 / ratio))
        pairs = zip(up, down, strict=True)
        slopes.append((h * h, [(a.double() - b.double()) / (2 * h) for a, b in pairs]))
    (far, slope), (near, better) = slopes[0], slopes[-1]
    if far != near:
        pairs = zip(slope, better, strict=True)
        slope = [(far * b - near * a) / (far - near) for a, b in pairs]
    return list(zip(outputs, slope, strict=True))


def curvature_product(
    model: nn.Module,
    inputs: Tensor,
    vector: dict[str, Tensor],
    *,
    curvature: Curvature = "gauss-newton",
    likelihood: Likelihood = "categorical",
    targets: Tensor | None = None,
    batch_norm: BatchNormMode = "eval",
) -> dict[str, Tensor]:
    """C v for the parameters named in `vector` (their block of C), in their shapes.

    `curvature` chooses Gauss-Newton, Fisher or empirical Fisher (which needs `targets`: class
    numbers, or values of the logits' shape for the Gaussian and Bernoulli likelihoods). Cost: one
    forward-mode pass, one forward, one backward.
    """
    check_inputs(model, inputs)
    with untouched(model, batch_norm=batch_norm) as bare_model:
        primals, tangents = _directions(bare_model, vector)
        function = as_function(bare_model, inputs)
        logits, tangent = _jvp(function, primals, tangents)
        if curvature == "empirical-fisher":
            gradient = loss_gradient(logits, targets, likelihood)
            at_output = gradient * (gradient * tangent).sum(-1, keepdim=True)
        else:
            at_output = hessian_product(logits, tangent, curvature, likelihood)
        leaves = _leaves(primals)
        vectors = at_output.detach().to(logits.dtype) / rows(logits)
        product = _pulled_back(function(leaves), leaves, vectors)
    return dict(zip(leaves, product, strict=True))


def exact_traces(
    model: nn.Module,
    inputs: Tensor,
    *,
    curvature: Curvature = "gauss-newton",
    likelihood: Likelihood = "categorical",
    targets: Tensor | None = None,
    batch_norm: BatchNormMode = "eval",
) -> dict[str, Tensor]:
    """Trace of each trainable parameter's diagonal block: (1/R) sum_r sum_c |J_r' v_rc|^2.

    Cost: one backward pass per row and class (empirical Fisher: per row): of one example in eval
    mode, of the whole batch where batch statistics tie the rows together. For large batches use
    `sampled_traces`.
    """
    check_inputs(model, inputs)
    with untouched(model, batch_norm=batch_norm) as bare_model:
        parameters = _leaves(trainable(bare_model))
        total = {name: p.new_zeros((), dtype=torch.float64) for name, p in parameters.items()}
        count = 0
        for part, part_targets in _separable_parts(inputs, targets, tied(bare_model, batch_norm)):
            logits = as_function(bare_model, part)(parameters)
            count += rows(logits)
            for cotangent in _exact_cotangents(logits, curvature, likelihood, part_targets):
                # rows add up before they are squared in a backward pass: one row at a time
                for row in range(rows(logits)):
                    alone = torch.zeros_like(cotangent).flatten(0, -2)
                    alone[row] = cotangent.flatten(0, -2)[row]
                    for name, square in _squared_norms(logits, parameters, alone.view_as(logits)):
                        total[name] += square
    return {name: value / count for name, value in total.items()}


def sampled_traces(
    model: nn.Module,
    inputs: Tensor,
    *,
    samples: int,
    generator: torch.Generator,
    curvature: Curvature = "gauss-newton",
    likelihood: Likelihood = "categorical",
    batch_norm: BatchNormMode = "eval",
) -> dict[str, Tensor]:
    """Unbiased draws of each block's trace, [samples] per trainable parameter.

    One draw is (1/R) |sum_r J_r' v_r|^2 with independent v_r, E[v_r] = 0 and E[v_r v_r'] = H_r, so
    that the cross terms between rows vanish in the mean. Cost: one forward and `samples` backward
    passes. Scaling as `exact_traces`; Fisher and Gauss-Newton only (the empirical Fisher's vectors
    are given, not drawn).
    """
    Range(at_least=2).check("samples", samples, "one draw has no standard error")
    check_inputs(model, inputs)
    with untouched(model, batch_norm=batch_norm) as bare_model:
        parameters = _leaves(trainable(bare_model))
        draws = {name: p.new_zeros(samples, dtype=torch.float64) for name, p in parameters.items()}
        logits = as_function(bare_model, inputs)(parameters)
        for k in range(samples):
            cotangent = sampled(logits, curvature, likelihood, generator)
            for name, square in _squared_norms(logits, parameters, cotangent):
                draws[name][k] = square / rows(logits)
    return draws


def loss_gradient(logits: Tensor, targets: Tensor | None, likelihood: Likelihood) -> Tensor:
    """Gradient of each row's own loss at its logits, [..., C]: p - y, or z - y (gaussian)."""
    if targets is None:
        raise Lacks("the empirical Fisher", "targets", "give the labels of the batch")
    expected = logits.shape[:-1] if likelihood == "categorical" else logits.shape
    if targets.shape != expected:
        shapes = {"the targets": list(targets.shape), "the logits' rows": list(expected)}
        raise Mismatch("shape", shapes, f"give targets of the {likelihood} likelihood")
    z = logits.detach()
    if likelihood == "categorical":
        return z.softmax(-1) - nn.functional.one_hot(targets, z.shape[-1]).to(z.dtype)
    return (z.sigmoid() if likelihood == "bernoulli" else z) - targets.to(z.dtype)


def rows(logits: Tensor) -> int:
    """How many rows of logits: the product of all axes but the last."""
    return logits.numel() // logits.shape[-1]


def _jvp(
    function: Callable[[dict[str, Tensor]], Tensor],
    primals: dict[str, Tensor],
    tangents: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    with _forward_mode():
        try:
            result = jvp(function, (primals,), (tangents,))
        except torch.OutOfMemoryError:  # the way round needs more
            raise
        except RuntimeError:
            # operations without a forward-mode rule (weight_norm), functions of the old style
            return _jvp_by_two_backward_passes(function, primals, tangents)
    return result[0], result[1]


@contextmanager
def _forward_mode() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch loads its own forward-mode rules on first use, through its deprecated scripting
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*")
        yield


def _jvp_by_two_backward_passes(
    function: Callable[[dict[str, Tensor]], Tensor],
    primals: dict[str, Tensor],
    tangents: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """J v as the derivative of u' J v with regard to u.

    It is linear in u, so that u times its derivative is itself: a backward pass that hides from
    autograd, as kernels of others may, is seen by that, unless its part is small.
    """
    leaves = _leaves(primals)
    logits = function(leaves)
    u = torch.randn_like(logits).requires_grad_()
    pulled = _pulled_back(logits, leaves, u, create_graph=True)
    terms = [g * v for g, v in zip(pulled, tangents.values(), strict=True)]
    # 0 * u: where no direction reaches the logits the product is still a function of u
    total = torch.stack([0 * u.sum(), *(term.sum() for term in terms)]).sum()
    try:
        (tangent,) = torch.autograd.grad(total, u)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _not_twice(f" ({str(error).splitlines()[0].partition('. ')[0]})") from error
    # terms of random signs add up to about their root sum of squares; half precision, TF32 and a
    # model's own autocast round them by less than a tenth of it. Where J v is zero (a bias in front
    # of BN) there is nothing but rounding: beside the logits it is small.
    numbers = [term.detach().double() for term in (*terms, -u * tangent)]
    gap = abs(sum(float(part.sum()) for part in numbers))
    floor = torch.finfo(logits.dtype).eps ** 0.5 * (u * logits).detach().double()
    size = math.sqrt(sum(float(part.square().sum()) for part in (*numbers, floor)))
    if gap > (1e-4 if logits.dtype == torch.float64 else 0.1) * size:
        raise _not_twice()
    return logits, tangent


def _not_twice(which: str = "") -> Lacks:
    return Lacks(
        f"an operation of the model{which}",
        "derivative in forward mode or of its backward pass",
        "give its torch.autograd.Function a `setup_context` and a `jvp`, or leave this quantity"
        " out",
    )


def _pulled_back(
    logits: Tensor, leaves: dict[str, Tensor], vectors: Tensor, *, create_graph: bool = False
) -> Sequence[Tensor]:
    """J' v of each leaf; zeros where the logits do not depend on it."""
    chosen = list(leaves.values())
    if not logits.requires_grad:  # on none of them
        return [torch.zeros_like(leaf) for leaf in chosen]
    return torch.autograd.grad(
        logits, chosen, vectors, create_graph=create_graph, materialize_grads=True
    )


def _directions(
    model: nn.Module, vector: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = dict(model.named_parameters())
    for name, direction in vector.items():
        check_name("parameter", name, parameters)
        if direction.shape != parameters[name].shape:
            shapes = {"its direction": list(direction.shape), name: list(parameters[name].shape)}
            raise Mismatch("shape", shapes, "give a direction shaped as the parameter")
    if not vector:
        raise Lacks("the direction", "parameters", "name at least one")
    return (
        {name: parameters[name].detach() for name in vector},
        {name: direction.detach() for name, direction in vector.items()},
    )


def _leaves(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters without the hooks that somebody hung on them (clips, masks)."""
    return {name: p.detach().requires_grad_() for name, p in parameters.items()}


def _separable_parts(
    inputs: Tensor, targets: Tensor | None, together: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The batch itself, or its examples one by one where they do not depend on each other."""
    if together:
        yield inputs, targets
        return
    for i in range(len(inputs)):
        yield inputs[i : i + 1], None if targets is None else targets[i : i + 1]


def _exact_cotangents(
    logits: Tensor, curvature: Curvature, likelihood: Likelihood, targets: Tensor | None
) -> Iterator[Tensor]:
    if curvature == "empirical-fisher":
        return iter([loss_gradient(logits, targets, likelihood)])
    return exact(logits, curvature, likelihood)


def _squared_norms(
    logits: Tensor, parameters: dict[str, Tensor], cotangent: Tensor
) -> Iterator[tuple[str, Tensor]]:
    gradients = torch.autograd.grad(
        logits, list(parameters.values()), cotangent, retain_graph=True, allow_unused=True
    )
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            yield name, gradient.double().square().sum()  # 16-bit squares leave their range
