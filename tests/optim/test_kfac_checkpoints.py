"""A KFAC's state through torch.distributed.checkpoint, which carries `state` and `param_groups`."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from oracle.kfac_runs import labels_for, random, seeded, train_step
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from decaylab.errors import Lacks
from decaylab.optim.kfac_state import COMMON, curvature_state, without_curvature
from decaylab.optim.options import KFACOptions

CLASSES = 3
WAYS = {
    "decoupled": {},
    "independent": {"decay": "independent", "others": "sgd"},
    "lagging": {"options": KFACOptions(inversion_lag=2)},
    "scale-free": {
        **{"damping_scaling": "scale-free", "damping": 0.1},
        "options": KFACOptions(invariant=("0",)),
    },
}


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, CLASSES))


def built(seed: int = 0, **options):
    model = seeded(net, seed)
    options = {"refresh_every": 3, "invert_every": 6, "weight_decay": 0.1} | options
    return model, KFAC(model, 0.1, **options)


def train(opt: KFAC, model: nn.Module, steps: range) -> None:
    for step in steps:
        batch = random(8, 4, seed=step), labels_for(8, classes=CLASSES, seed=step)
        train_step(opt, model, *batch)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process will do
@pytest.mark.parametrize("way", WAYS)
def test_a_fresh_one_goes_on_from_files(tmp_path, way):
    """From a step without an inversion on its way, and from one with."""
    model, opt = built(**WAYS[way])
    train(opt, model, range(7))
    saved, state = get_state_dict(model, opt)
    dcp.save({"model": saved, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    train(opt, model, range(7, 14))
    again, later = built(1, **WAYS[way])
    there, room = get_state_dict(again, later)
    dcp.load({"model": there, "optimizer": room}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(again, later, model_state_dict=there, optim_state_dict=room)
    assert later.steps == 7
    train(later, again, range(7, 14))
    assert same(again, model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("initialized", [False, True])
def test_asking_for_a_state_before_the_first_step_changes_nothing(way, initialized):
    """Torch takes a step then, with learning rates and gradients of zero."""
    (model, opt), (expected, oracle) = built(**WAYS[way]), built(**WAYS[way])
    for each in (opt, oracle) if initialized else ():
        each.initialize([random(8, 4)])
    get_optimizer_state_dict(model, opt)
    assert opt.steps == 0
    assert same(model, expected)
    train(opt, model, range(5))
    train(oracle, expected, range(5))
    assert same(model, expected)


def test_a_first_step_at_a_learning_rate_of_zero_is_one():
    """As at the start of a warm-up."""
    model, opt = built()
    for group in opt.param_groups:
        group["lr"] = 0.0
    train(opt, model, range(1))
    assert (opt.steps, opt.estimator.running.seen) == (1, {"0", "3"})


def test_a_flattened_state_is_refused():
    model, opt = built()
    train(opt, model, range(1))
    with pytest.raises(NotImplementedError):  # by torch
        get_optimizer_state_dict(
            model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )


def test_a_state_without_factors_is_refused():
    model, opt = built()
    train(opt, model, range(1))
    with refuses(Lacks, what="K-FAC factors"):
        opt.load_state_dict(without_curvature(opt.state_dict()))


def test_states_of_earlier_versions_are_read():
    """They hold the curvature in an entry of its own."""
    model, opt = built()
    train(opt, model, range(4))
    state = copy.deepcopy(opt.state_dict())
    earlier = without_curvature(state) | {COMMON: curvature_state(state)}
    again, later = built(1)
    again.load_state_dict(model.state_dict())
    later.load_state_dict(earlier)
    train(opt, model, range(4, 9))
    train(later, again, range(4, 9))
    assert same(again, model)
