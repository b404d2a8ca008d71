"""Who steps which parameter, and the reason that is given for it; what `params` may be."""

import inspect

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import decaylab
from decaylab.curvature.kinds.kind import Reason
from decaylab.errors import Lacks, Misplaced, OutOfRange, UnknownName
from decaylab.optim.decay import parameter_groups
from decaylab.optim.options import KFACOptions


class Noisy(nn.Conv1d):
    """A layer with a forward of its own."""

    def forward(self, x):
        return super().forward(x) + 1


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.noisy = nn.Linear(3, 3), Noisy(3, 3, 1)
        self.extra, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.extra.gain = nn.Parameter(torch.ones(3))
        self.frozen.weight.requires_grad_(False)
        self.computed = parametrizations.weight_norm(nn.Linear(3, 3))
        self.norm, self.out = nn.LayerNorm(3), nn.Linear(3, 2)
        self.other = Doubled(3, 2, bias=False)


REASONS = {
    "plain.weight": "Linear",
    "plain.bias": "Linear",
    "noisy.weight": "Noisy is a Conv1d with its own forward",
    "noisy.bias": "Noisy is a Conv1d with its own forward",
    "extra.weight": "Linear",
    "extra.bias": "Linear",
    "extra.gain": "'gain' is not part of a Linear's block",
    "frozen.weight": "frozen when the optimizer was built",
    "norm.weight": "LayerNorm has no Kronecker-factored block",
    "norm.bias": "LayerNorm has no Kronecker-factored block",
    "other.weight": "Doubled is a Linear with its own forward",
    "out.weight": "excluded by name",
    "out.bias": "excluded by name",
}


@pytest.mark.filterwarnings("ignore:K-FAC covers")
@pytest.mark.parametrize("others", ["adam", "sgd"])
def test_reasons(others):
    model = Net()
    opt = KFAC(model, 0.1, others=others, options=KFACOptions(exclude=("out",)))
    found = opt.coverage()
    assert {name: found[name].explanation for name in REASONS} == REASONS
    computed = {name for name in found if name.startswith("computed.")}
    assert found.keys() == REASONS.keys() | computed
    assert len(computed) == 3  # a bias, and what the weight is computed from
    inside = {name for name, entry in found.items() if entry.method == "kfac"}
    assert inside == {"plain.weight", "plain.bias", "extra.weight", "extra.bias"}
    assert {found[name].block for name in inside} == {"plain", "extra"}
    for name in found.keys() - inside:
        assert (found[name].block, found[name].method) == (None, others)


def test_what_contains_layers_is_excluded_by_their_names():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2))
    with refuses(UnknownName, kind="layer to exclude", name="0", choices=("0.0",)):
        KFAC(model, 0.1, options=KFACOptions(exclude=("0",)))
    with refuses(UnknownName, name="heads") as refused:
        KFAC(model, 0.1, options=KFACOptions(exclude=("heads",)))
    assert set(refused.value.choices) == {"0", "0.0", "0.1", "1"}
    norm = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))
    KFAC(norm, 0.1, options=KFACOptions(exclude=("0",)))  # says what is so anyway


def test_parameters_are_given_in_every_way_that_torch_takes():
    """Bare, with names, in groups, and a group of a single tensor."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    some = {"0.weight", "0.bias", "2.weight"}
    named = [(name, p) for name, p in model.named_parameters() if name in some]
    bare = [p for _, p in named]
    ways = [
        iter(bare),
        iter(named),
        [{"params": iter(bare)}],
        [{"params": named}],
        [{"params": bare[0]}, {"params": bare[1:]}],
        [{"params": [bare[0]]}, {"params": named[1:]}],
    ]
    for way in ways:
        opt = KFAC(model, 0.1, params=way)
        assert opt.coverage().keys() == some
        held = [p for group in opt.param_groups for p in group["params"]]
        assert len(held) == 3
        assert all(p is q for p, q in zip(held, bare, strict=True))
        assert opt.factors()["2"].A.shape == (3, 3)  # its bias is not among them
        assert opt.factors()["0"].A.shape == (4, 4)
        opt.detach()


def test_a_group_that_is_split_has_the_names_of_its_own_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    names = {parameter: name for name, parameter in model.named_parameters()}
    opt = KFAC(model, 0.1, params=parameter_groups(model, weight_decay=0.1))
    assert [len(group["params"]) for group in opt.param_groups] == [4, 2]
    for group in opt.param_groups:
        assert group["names"] == [names[p] for p in group["params"]]


@pytest.mark.filterwarnings("ignore:K-FAC covers")
def test_the_bias_of_a_layer_whose_weight_a_hook_computes_is_in_no_block():
    """As torch's older spectral norm does it: the weight is no parameter, the class is Linear."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 2))
    found = KFAC(model, 0.1).coverage()
    assert found["0.bias"].reason is Reason.COMPUTED
    assert {name for name, entry in found.items() if entry.block} == {"1.weight", "1.bias"}


@pytest.mark.parametrize("number", ["lr", "momentum", "weight_decay"])
@pytest.mark.parametrize("bad", [0, 1])
def test_the_numbers_of_every_group_are_looked_at(bad, number):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for value in (-0.1, float("nan")):
        groups = [{"params": list(layer.parameters())} for layer in model]
        groups[bad][number] = value
        with refuses(OutOfRange, name=number, value=value):
            KFAC(model, 0.1, params=groups)


class Aside(nn.Module):
    """Two layers beside the way to the logits: one that is called, one whose weight is borrowed."""

    def __init__(self):
        super().__init__()
        self.out, self.called, self.borrowed = (nn.Linear(3, 2) for _ in range(3))

    def forward(self, x):
        self.aside = {"called": self.called(x), "borrowed": F.linear(x, self.borrowed.weight)}
        return self.out(x)


@pytest.mark.parametrize("name", ["called", "borrowed"])
def test_a_layer_with_a_gradient_that_no_pass_measures_is_an_error_with_its_remedy(name):
    torch.manual_seed(0)
    x, labels = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])

    def step(model, options=None):
        opt = KFAC(model, 0.1, options=options or KFACOptions())
        loss = F.cross_entropy(model(x), labels) + model.aside[name].square().mean()
        loss.backward()
        opt.step()

    with refuses(Lacks, what=f"measured curvature for the gradient of layer '{name}'"):
        step(Aside())
    model = Aside()
    before = model.get_parameter(f"{name}.weight").detach().clone()
    step(model, KFACOptions(exclude=(name,)))
    assert not torch.equal(model.get_parameter(f"{name}.weight"), before)


def test_a_group_of_nothing_else_names_the_learning_rate_of_others():
    """As in torch. In a group with both kinds `lr` is that of the blocks."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2), nn.LayerNorm(2))
    norm, other = ({"params": list(model[i].parameters())} for i in (1, 3))
    layers = [*model[0].parameters(), *model[2].parameters()]

    def rates(*groups: dict) -> list[tuple[str, float]]:
        opt = KFAC(model, 0.1, params=groups, others_lr=0.01)
        return [(group["law"], group["lr"]) for group in opt.param_groups]

    both = {"params": [*layers, *norm["params"]], "lr": 0.2}
    assert rates(both) == [("kfac", 0.2), ("adam", 0.01)]
    assert rates(both | {"others_lr": 0.3}) == [("kfac", 0.2), ("adam", 0.3)]
    apart = [{"params": layers}, norm | {"lr": 0.2}, other]
    assert rates(*apart) == [("kfac", 0.1), ("adam", 0.2), ("adam", 0.01)]
    assert rates({"params": layers}, norm | {"lr": 0.2, "others_lr": 0.3})[1] == ("adam", 0.3)


def test_what_a_group_cannot_have_for_itself_is_refused():
    """Every argument but those of groups; and what torch's SGD has and K-FAC has not."""
    model = nn.Linear(3, 2)
    own = {"lr", "weight_decay", "decay", "momentum", "others_lr"}
    arguments = inspect.signature(decaylab.KFAC).parameters.keys() - {"model", "params"}
    for name in arguments | {"dampening", "maximize", "nesterov", "betas", "name"}:
        group = {"params": model.parameters(), name: "l2" if name == "decay" else 0.5}
        if name in own | {"betas", "name"}:
            assert KFAC(model, 0.1, params=[group]).param_groups[0][name] == group[name]
        else:
            with refuses(Misplaced, settings=[name]):
                KFAC(model, 0.1, params=[group])
    unset = {"params": model.parameters(), "maximize": False, "dampening": 0.0, "nesterov": False}
    KFAC(model, 0.1, params=[unset])


def test_others_by_sgd_follow_a_learning_rate_that_is_a_tensor():
    """Their default is `lr` itself: who fills the tensor changes theirs too."""
    after = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
        opt = KFAC(model, lr, others="sgd", outputs="exact", weight_decay=0.1)
        for _ in range(3):
            F.cross_entropy(model(torch.ones(2, 3).double()), torch.tensor([0, 1])).backward()
            opt.step()
            if isinstance(lr, torch.Tensor):
                lr.mul_(0.5)
                continue
            for group in opt.param_groups:
                group["lr"] *= 0.5
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*after, rtol=1e-12, atol=1e-14)
