"""Calling a model on whatever its inputs are, and finding the logits in whatever it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from decaylab.errors import Lacks, WrongType
from decaylab.networks.sharded import whole

Inputs = Any
"""A tensor, a tuple or list of arguments, a mapping of keyword arguments, or a function that takes
the model and returns its output."""
LogitsRule = str | int | Callable[[Any], Tensor] | None
"""Where the logits are in an output: a name, an index or a function; None: see `find_logits`."""


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for a tensor, a tuple, a mapping, or by a function of the model.

    >>> from torch import ones
    >>> model = nn.Identity()
    >>> all(call(model, x).item() == 1 for x in (ones(1), (ones(1),), {"input": ones(1)}))
    True
    >>> call(model, lambda model: model(ones(1)) + 1).item()
    2.0
    """
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    if callable(inputs):
        return inputs(model)
    return model(inputs)


def call_with(
    model: nn.Module, parameters: Mapping[str, Tensor], arguments: tuple[Any, ...] = ()
) -> Any:
    """The model's output with other parameters, by their names in `named_parameters`.

    A tied parameter is replaced wherever it is. Each module is visited once: torch's own tying
    visits one that the model holds under two names twice, and leaves the replacement in it.
    """
    replacements = {id(p): parameters[n] for n, p in model.named_parameters() if n in parameters}
    values = {
        f"{module_name}.{attribute}".lstrip("."): replacements[id(parameter)]
        for module_name, module in model.named_modules()
        for attribute, parameter in module._parameters.items()  # with every name of each
        if id(parameter) in replacements
    }
    return functional_call(model, values, arguments, tie_weights=False)


def find_logits(output: Any, rule: LogitsRule = None) -> list[Tensor]:
    """The tensors in a model's output that count as its logits; never empty.

    Without a rule: the output itself if it is a tensor, what it calls `logits` (an attribute or a
    key, as in Hugging Face models), else every floating-point tensor in it.
    """
    if rule is not None:
        return [whole(_by_rule(output, rule))]
    if not isinstance(output, Tensor):
        named = output.get("logits") if isinstance(output, Mapping) else None
        named = getattr(output, "logits", None) if named is None else named
        output = named if isinstance(named, Tensor) else output
    tensors = list(_floating_tensors(output))
    if not tensors:
        raise Lacks("the model's output", "floating-point tensor", "name its logits with logits=")
    return [whole(tensor) for tensor in tensors]


_RULES = "give the name, the index or a function of the output that returns the logits"


def _by_rule(output: Any, rule: str | int | Callable[[Any], Tensor]) -> Tensor:
    try:
        if callable(rule):
            logits = rule(output)
        elif isinstance(rule, str) and not isinstance(output, Mapping):
            logits = getattr(output, rule)
        else:
            logits = output[rule]
    except (AttributeError, LookupError, TypeError) as error:
        what = f"the model's output, a {type(output).__name__},"
        raise Lacks(what, f"logits under {rule!r}", _RULES) from error
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        name = f"what logits={rule!r} finds in the model's output"
        raise WrongType(name, logits, "a floating-point tensor", _RULES)
    return logits


def _floating_tensors(output: Any) -> Iterator[Tensor]:
    """All floating-point tensors in an output, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    if isinstance(output, tuple | list):
        for part in output:
            yield from _floating_tensors(part)
