"""The input-output Jacobian norm (Sec. 4.2, Table 2): how strongly logits react to the input."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from decaylab.curvature.preserve import (
    BatchNormMode,
    check_inputs,
    check_logits,
    chunks,
    tied,
    untouched,
)
from decaylab.errors import BadValue, DecaylabError, Lacks, Mismatch, Range
from decaylab.probes.applied import applied, whole
from decaylab.probes.reading import Reading
from decaylab.probes.registry import Moment, Probe, register

UNIT = "logit^2 / input^2"
SAMPLES = 16  # backward passes at most in loops that are not ours; maps of logits have thousands
CHUNK = 250  # test images whose Jacobians are made together: 10,000 are a multiple of it


def jacobian_norm(
    model: nn.Module,
    inputs: Tensor,
    *,
    samples: int | None = None,
    chunk: int | None = 128,
    batch_norm: BatchNormMode = "eval",
    seed: int = 0,
) -> Reading:
    """Mean over inputs of the squared Frobenius norm of the input-output Jacobian.

    |J_x|_F^2 = (1/B) sum_b sum_c |d z_bc / d x_b|^2 for inputs x [B, ...] and logits z [B, ..., C]
    (every output of an example counts). Scaling: mean over examples, sum over outputs and pixels,
    in units of the input as given (normalised pixels, if the inputs are normalised).

    Exact by default: one backward pass per output of an example. With `samples=k` it is
    Hutchinson's estimate from k backward passes, E|J' v|^2 with random signs v, and `total_error`
    is its standard error given these inputs. Memory: that of one forward pass on `chunk` examples.

    With `batch_norm="train"` the examples of a batch are tied together: J is then the derivative of
    all logits with regard to all inputs, still divided by B; the batch is not cut into chunks and
    the exact value costs one backward pass per example and output.
    """
    if samples is not None:
        Range(at_least=2).check("samples", samples, "one draw has no standard error")
    draws = _draws(model, inputs, samples, chunk, batch_norm, seed) / len(inputs)
    total = float(draws.mean(0).sum())
    if samples is None:
        return Reading("jacobian_norm", UNIT, total=total)
    error = float((draws.var(0) / samples).sum().sqrt())
    return Reading("jacobian_norm", UNIT, total=total, total_error=error)


def jacobian_norms(model: nn.Module, inputs: Tensor, *, chunk: int | None = 128) -> Tensor:
    """|J_x|_F^2 of each input on its own, [B] in float64: `jacobian_norm` is their mean.

    Exact, in eval mode. Compare the mean with the median to see whether a few inputs make it up.
    """
    norms = _draws(model, inputs, None, chunk, "eval", 0)[0]
    if len(norms) < len(inputs):
        raise Lacks(
            "an example",
            "Jacobian of its own",
            "it shares batch statistics with the others; use jacobian_norm, or build the norms with"
            " track_running_stats=True",
        )
    return norms


def _draws(
    model: nn.Module,
    inputs: Tensor,
    samples: int | None,
    chunk: int | None,
    batch_norm: BatchNormMode,
    seed: int,
) -> Tensor:
    """The squared norm, or estimates of it: [draws, examples]; tied examples are one column."""
    check_inputs(model, inputs)
    if not inputs.is_floating_point():
        raise BadValue("the dtype of the inputs", inputs.dtype, "floating-point, not tokens")
    with untouched(model, batch_norm=batch_norm) as bare_model:
        together = tied(bare_model, batch_norm)
        generator = torch.Generator(inputs.device).manual_seed(seed)
        parts = [
            _exact(_pull_back(bare_model, part), together)
            if samples is None
            else _sampled(_pull_back(bare_model, part), samples, together, generator)
            for part in chunks(bare_model, inputs, chunk, batch_norm)
        ]
    return torch.cat(parts, 1)


def _pull_back(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The outputs [B, outputs of an example], and J' v by example [B, ...] for v of their shape."""
    leaf = inputs.detach().clone().requires_grad_()
    outputs = check_logits(model(leaf)).flatten(1)
    if len(outputs) != len(inputs):
        lengths = {"the inputs": len(inputs), "the logits": len(outputs)}
        raise Mismatch("length", lengths, "the first axis of both must be the batch")
    detached = DecaylabError("no gradient reaches the inputs: in eval mode the model detaches them")
    if not outputs.requires_grad:
        raise detached

    def pull_back(vector: Tensor) -> Tensor:
        gradients = torch.autograd.grad(outputs, leaf, vector, retain_graph=True, allow_unused=True)
        if gradients[0] is None:
            raise detached
        return gradients[0]

    return outputs.detach(), pull_back


def _exact(passes: tuple[Tensor, Callable[[Tensor], Tensor]], together: bool) -> Tensor:
    """sum_c |J' e_c|^2 as one draw: [1, B], or [1, 1] for examples that are tied together."""
    outputs, pull_back = passes
    unit = torch.zeros_like(outputs)
    total = torch.zeros(1 if together else len(outputs), dtype=torch.float64, device=unit.device)
    for c in range(outputs.shape[1]):
        if together:
            for b in range(len(outputs)):
                unit.zero_()[b, c] = 1.0
                total += pull_back(unit).double().square().sum()
        else:  # an example's logits depend on its own input alone: one pass serves them all
            unit.zero_()[:, c] = 1.0
            total += _by_example(pull_back(unit))
    return total[None]


def _sampled(
    passes: tuple[Tensor, Callable[[Tensor], Tensor]],
    samples: int,
    together: bool,
    generator: torch.Generator,
) -> Tensor:
    """|J' v|^2 for `samples` vectors v of random signs: [samples, B], or [samples, 1] if tied."""
    outputs, pull_back = passes
    draws = []
    for _ in range(samples):
        coins = torch.randint(2, outputs.shape, generator=generator, device=outputs.device)
        squares = _by_example(pull_back((2 * coins - 1).to(outputs.dtype)))
        draws.append(squares.sum(0, keepdim=True) if together else squares)
    return torch.stack(draws)


def _by_example(gradient: Tensor) -> Tensor:
    return gradient.flatten(1).double().square().sum(1)


def _exact_passes(model: nn.Module, inputs: Tensor, chunk: int | None) -> int:
    """How many backward passes the exact norm of one chunk takes; costs its forward pass."""
    with untouched(model) as bare_model, torch.no_grad():
        first = next(iter(chunks(bare_model, inputs, chunk, "eval")))
        entries = check_logits(bare_model(first)).numel()
        return entries if tied(bare_model, "eval") else entries // len(first)


def _measure(moment: Moment) -> list[Reading]:
    """In runs of ours on the whole test set (Table 2), with the median over images.

    Elsewhere from `SAMPLES` backward passes, the same signs at every record, or exactly from fewer.
    """
    if moment.images is None:
        model, inputs = applied(moment.model, moment.inputs, moment.logits)
        chunk = None if whole(moment.inputs) else 128
        samples = SAMPLES if _exact_passes(model, inputs, chunk) > SAMPLES else None
        return [jacobian_norm(model, inputs, samples=samples, chunk=chunk)]
    parts = moment.images.test(8 * CHUNK)
    norms = torch.cat([jacobian_norms(moment.model, part, chunk=CHUNK) for part in parts])
    return [
        Reading("jacobian_norm", UNIT, total=float(norms.mean())),
        Reading("jacobian_norm_median", UNIT, total=float(norms.median())),
    ]


register(
    Probe(
        "jacobian_norm",
        "many",
        _measure,
        needs_inputs=True,
        unit=UNIT,
        when="end",
        how={"batch_norm": "eval"},
    )
)
