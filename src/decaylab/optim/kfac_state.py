"""Where the state dict of a KFAC holds its curvature: in `state`, with each block's parameter.

`torch.distributed.checkpoint.state_dict` and others that gather states by parameter carry `state`
and `param_groups`, and drop everything else. So

    state[weight]["curvature"][block]   factors, inverses and counters of a block
    state[first]["kfac"]                what there is once: steps, damping, seed, ...

stand beside the momentum, `first` being the parameter of the first block. States of decaylab 0.1
have both in an entry "kfac" of their own; `curvature_state` reads them too.
"""

from collections.abc import Mapping
from typing import Any

from decaylab.errors import Lacks

BLOCKS, COMMON = "curvature", "kfac"


def add_curvature(
    state: dict[str, Any],
    common: Mapping[str, Any],
    blocks: Mapping[str, Mapping[str, Any]],
    homes: Mapping[str, int],
) -> None:
    """Put the states of blocks into torch's state dict; `homes` numbers their parameters there."""
    for name, block in blocks.items():
        state["state"].setdefault(homes[name], {}).setdefault(BLOCKS, {})[name] = block
    state["state"][homes[next(iter(blocks))]][COMMON] = dict(common)


def curvature_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What KFAC has put into its state dict: what there is once, and `layers`, by block."""
    if COMMON in state_dict:
        return dict(state_dict[COMMON])
    entries = list(state_dict["state"].values())
    common = [entry[COMMON] for entry in entries if COMMON in entry]
    if not common:
        raise Lacks(
            "this state dict",
            "K-FAC factors",
            "it is another optimizer's, or was made with "
            "StateDictOptions(flatten_optimizer_state_dict=True), which drops them",
        )
    layers = {n: block for entry in entries for n, block in entry.get(BLOCKS, {}).items()}
    return {**common[0], "layers": layers}


def without_curvature(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict as torch loads it: it would cast the factors to the parameters' dtype."""
    state = {
        key: {name: value for name, value in entry.items() if name not in (BLOCKS, COMMON)}
        for key, entry in state_dict["state"].items()
    }
    return {
        "state": {key: entry for key, entry in state.items() if entry},
        "param_groups": state_dict["param_groups"],
    }
