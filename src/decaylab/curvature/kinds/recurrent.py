"""Recurrent layers through their linear maps: nn.RNN, nn.LSTM, nn.GRU and their cells.

With s = W_ih x + b_ih and h~ = W_hh h + b_hh at each time step, and sigma the sigmoid:

    RNN     h <- tanh(s + h~), or relu
    LSTM    i, f, g, o = s + h~,    c <- sigma(f) c + sigma(i) tanh(g),    h <- sigma(o) tanh(c)
            with `proj_size` h <- W_hr h
    GRU     n = tanh(s_n + sigma(s_r + h~_r) h~_n),    h <- n + sigma(s_z + h~_z) (h - n)

Each matrix is a block, whose rows are the examples at all time steps, as of any layer that is
shared over positions: the products of different time steps are left out, as in the simplest of the
approximations of Martens, Ba & Johnson (2018). Torch computes all of this in one kernel, which
shows no product; in an observed pass, and only there, UNROLLED computes it step by step from
`F.linear`, where products are met.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.curvature.kinds.grouped import Projection
from decaylab.curvature.kinds.kind import Part

States = tuple[Tensor, ...]  # h, and of an LSTM c: [examples, width]


class Recurrent(Projection):
    """A block for each matrix, under the name of the parameter, with the bias that it has."""

    bases = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
    unrolled = True

    def parts(self, name: str, module: Any) -> Iterator[Part]:
        """By layer and direction: inputs, hidden states and, of some LSTMs, what leaves them."""
        if isinstance(module, nn.RNNBase):
            attributes = [attribute for layer in module._all_weights for attribute in layer]
        else:
            attributes = ["weight_ih", "weight_hh"]
        for attribute in attributes:
            if attribute.startswith("weight"):
                bias = attribute.replace("weight", "bias")
                yield Part(f"{name}.{attribute}", module, self, attribute, bias)


class Weights(NamedTuple):
    """The parameters of one layer in one direction."""

    inputs: Tensor
    hidden: Tensor
    inputs_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


Step = Callable[[Tensor, States, Weights], States]  # from s, the states and the weights


def _rnn_step(activation: Callable[[Tensor], Tensor], s: Tensor, states: States, w: Weights) -> Any:
    return (activation(s + F.linear(states[0], w.hidden, w.hidden_bias)),)


def _lstm_step(s: Tensor, states: States, w: Weights) -> States:
    h, c = states
    i, f, g, o = (s + F.linear(h, w.hidden, w.hidden_bias)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if w.projection is None else F.linear(h, w.projection)), c


def _gru_step(s: Tensor, states: States, w: Weights) -> States:
    (h,) = states
    s_r, s_z, s_n = s.chunk(3, 1)
    h_r, h_z, h_n = F.linear(h, w.hidden, w.hidden_bias).chunk(3, 1)
    n = (s_n + (s_r + h_r).sigmoid() * h_n).tanh()
    return (n + (s_z + h_z).sigmoid() * (h - n),)


def _cell(step: Step, x: Tensor, hx: Tensor | States, *weights: Tensor | None) -> Tensor | States:
    """As `torch.lstm_cell` and its like: one time step."""
    w = Weights(*weights)  # type: ignore[arg-type]
    s = F.linear(x, w.inputs, w.inputs_bias)
    if isinstance(hx, Tensor):
        return step(s, _cast((hx,), s, x.is_cuda), w)[0]
    return step(s, _cast(hx, s, x.is_cuda), w)


def _sequences(step: Step, *args: Any) -> States:
    """As `torch.lstm` and its like: of a padded batch, or with `batch_sizes` of a packed one."""
    if not isinstance(args[2], list):
        x, batch_sizes, *rest = args
        return _layers(step, x, batch_sizes.tolist(), *rest)
    x, *rest, batch_first = args
    x = x.transpose(0, 1) if batch_first else x
    rows, *last = _layers(step, x.flatten(0, 1), [x.shape[1]] * x.shape[0], *rest)
    outputs = rows.unflatten(0, x.shape[:2])
    return (outputs.transpose(0, 1) if batch_first else outputs), *last


def _layers(
    step: Step,
    rows: Tensor,
    sizes: Sequence[int],
    hx: Tensor | States,
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> States:
    """The outputs [positions, width] of the last layer, and the last states of all of them.

    `rows` [positions, in]: those of each time step, of which there are `sizes`, one after another.
    """
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    first_states = (hx,) if isinstance(hx, Tensor) else hx
    last_states: list[States] = []
    for layer in range(layers):
        if layer and dropout:
            rows = F.dropout(rows, dropout, training)
        outputs = []
        for backward in range(directions):
            number = layer * directions + backward
            own = weights[number * each : (number + 1) * each]
            biases = own[2:4] if has_biases else [None, None]
            projection = own[-1:] if each % 2 else []
            w = Weights(*own[:2], *biases, *projection)
            begin = tuple(state[number] for state in first_states)
            out, last = _one_way(step, rows, sizes, begin, w, backward=bool(backward))
            outputs.append(out)
            last_states.append(last)
        rows = torch.cat(outputs, 1)
    return rows, *(torch.stack(states) for states in zip(*last_states, strict=True))


def _one_way(
    step: Step, rows: Tensor, sizes: Sequence[int], states: States, w: Weights, *, backward: bool
) -> tuple[Tensor, States]:
    """One layer in one direction: its outputs [positions, width], and the states at its end.

    The longest sequences come first, so that those which go on at a time step are the first ones.
    """
    products = F.linear(rows, w.inputs, w.inputs_bias)
    onednn = len(states) == 2 and w.projection is None
    states = _cast(states, products, rows.is_cuda or onednn)
    by_time = products.split(sizes)
    outputs = [products] * len(sizes)
    for time in reversed(range(len(sizes))) if backward else range(len(sizes)):
        size = sizes[time]
        if size == len(states[0]):
            states = step(by_time[time], states, w)
            outputs[time] = states[0]
        else:
            moved = step(by_time[time], tuple(state[:size] for state in states), w)
            outputs[time] = moved[0]
            pairs = zip(moved, states, strict=True)
            states = tuple(torch.cat([new, state[size:]]) for new, state in pairs)
    return torch.cat(outputs), states


def _cast(states: States, products: Tensor, cast: bool) -> States:
    """States in the dtype of autocast's products, where torch's kernel has them so."""
    return tuple(state.to(products.dtype) for state in states) if cast else states


_STEPS: dict[str, Step] = {
    "rnn_tanh": partial(_rnn_step, torch.tanh),
    "rnn_relu": partial(_rnn_step, torch.relu),
    "lstm": _lstm_step,
    "gru": _gru_step,
}

# Instead of the functions of these names in `torch._VF`, which recurrent modules call.
UNROLLED: dict[str, Callable[..., Any]] = {
    **{name: partial(_sequences, step) for name, step in _STEPS.items()},
    **{f"{name}_cell": partial(_cell, step) for name, step in _STEPS.items()},
}
