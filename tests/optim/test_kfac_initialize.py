"""`KFAC.initialize` in its other ways: with a loss (empirical Fisher), a forward, observed logits.

Each is compared with the factors that one training step on all examples together measures.
"""

import copy

import pytest
import torch
from oracle.plain_kfac import KFAC
from refusals import refuses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from decaylab.errors import Lacks, WrongType

SIZES = (4, 1, 3)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (sum(SIZES),), generator=generator)


def in_batches() -> list[tuple[Tensor, Tensor]]:
    x, y = examples()
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def of_one_step(**options) -> dict:
    net, (x, y) = model(), examples()
    opt = KFAC(net, 0.0, **options)
    cross_entropy(net(x), y, reduction=options.get("reduction", "mean")).backward()
    opt.step()
    return opt.factors()


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, factor in expected.items():
        for part in ("A", "S", "T"):
            torch.testing.assert_close(
                getattr(found[name], part), getattr(factor, part), rtol=1e-12, atol=1e-14
            )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_empirical_fisher_of_batches_is_that_of_all_rows(reduction):
    """Each batch's loss is averaged over its own rows, not over those of all batches."""
    options = {"curvature": "empirical-fisher", "reduction": reduction}
    net = model()
    opt = KFAC(net, 0.1, **options)
    opt.initialize(in_batches(), loss=lambda z, y: cross_entropy(z, y, reduction=reduction))
    assert_same(opt.factors(), of_one_step(**options))
    assert all(p.grad is None for p in net.parameters())


def test_a_mean_loss_is_what_the_empirical_fisher_expects():
    net, (x, y) = model(), examples()
    opt = KFAC(net, 0.0, curvature="empirical-fisher")
    cross_entropy(net(x), y).backward()
    opt.step()
    assert_same(opt.factors(), of_one_step(curvature="empirical-fisher", reduction="sum"))


@pytest.mark.parametrize("logits", ["output", "observed"])
@pytest.mark.parametrize("given", [False, True])
def test_a_forward_of_the_callers(given, logits):
    net = model()
    opt = KFAC(net, 0.1, outputs="exact", logits=logits)
    batches = [{"image": x} for x, _ in in_batches()] if given else [x for x, _ in in_batches()]
    opt.initialize(batches, forward=(lambda batch: net(batch["image"])) if given else None)
    assert_same(opt.factors(), of_one_step(outputs="exact"))


def test_a_forward_that_takes_the_logits_out_of_what_the_model_returns():
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": self.inner(x)}

    net = Wrapped()
    opt = KFAC(net, 0.1, outputs="exact")
    opt.initialize([x for x, _ in in_batches()], forward=lambda x: net(x)["scores"])
    found = {name.removeprefix("inner."): f for name, f in opt.factors().items()}
    assert_same(found, of_one_step(outputs="exact"))


def test_it_leaves_a_running_refresh_of_the_training_alone():
    """Afterwards a step is the step of an optimizer whose factors were those from the start."""
    net, (x, y) = model(), examples()
    other = copy.deepcopy(net)
    opt = KFAC(net, 0.1, curvature="empirical-fisher", damping=0.1, factor_decay=0.0)
    opt.initialize(in_batches(), loss=cross_entropy)
    plain = KFAC(other, 0.1, curvature="empirical-fisher", damping=0.1)
    for trained, optimizer in ((net, opt), (other, plain)):
        cross_entropy(trained(x), y).backward()
        optimizer.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_second_time_begins_anew():
    net, batches = model(), in_batches()
    opt = KFAC(net, 0.1, outputs="exact")
    opt.initialize([x for x, _ in batches[:1]])
    opt.initialize([list(batch) for batch in batches])  # batches as lists, as a loader gives them
    assert_same(opt.factors(), of_one_step(outputs="exact"))


@pytest.mark.parametrize("initialized", [True, False])
def test_the_intervals_of_refreshes_and_inversions(initialized):
    """10 and 100 steps; without an initial pass, inversions too come every 10 of the first 100."""
    net, (x, y) = model(), examples()
    opt = KFAC(net, 0.0)
    if initialized:
        opt.initialize([x])
    refreshes, inversions = [], []
    for step in range(201):
        if step == 50:  # the state knows whether there was an initial pass
            state, opt = opt.state_dict(), KFAC(net, 0.0)
            opt.load_state_dict(state)
        refreshes += [step] * opt.refresh_due
        inversions += [step] * opt.inverts_now
        opt.zero_grad()
        cross_entropy(net(x), y).backward()
        opt.step()
    assert refreshes == list(range(0, 201, 10))
    early = range(10, 100, 10) if not initialized else ()
    assert inversions == [0, *early, 100, 200]


class Partly(nn.Module):
    """A layer that is not used, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 4)
        self.spare = nn.Linear(3, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def test_the_empirical_fisher_of_a_part_of_the_model():
    torch.manual_seed(0)
    net, (x, y) = Partly().double(), examples()
    plain = copy.deepcopy(net)
    opt, expected = (KFAC(n, 0.0, curvature="empirical-fisher") for n in (net, plain))
    opt.initialize(in_batches(), loss=cross_entropy)
    cross_entropy(plain(x), y).backward()
    expected.step()
    assert_same(opt.factors(), expected.factors())


def test_a_loss_is_called_for_the_empirical_fisher_alone():
    opt = KFAC(model(), 0.1, outputs="exact")
    opt.initialize([x for x, _ in in_batches()], loss=pytest.fail)
    assert_same(opt.factors(), of_one_step(outputs="exact"))


class Counting(nn.Module):
    """Counts its calls in a buffer, as a codebook's moving average or a power iteration would."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


def normalised() -> nn.Sequential:
    net = model()
    norms = nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=None), Counting()
    return nn.Sequential(net[0], *norms, net[1], net[2]).double()


def test_one_batch_alone_is_refused():
    """Its rows would be taken for batches."""
    net = normalised()
    with refuses(WrongType, name="batches"):
        KFAC(net, 0.1).initialize(examples()[0])


@pytest.mark.parametrize("spoiled", [False, True])
def test_buffers_are_left_alone_whatever_the_batches_hold(spoiled):
    net, batches = normalised(), [x for x, _ in in_batches() if len(x) > 1]
    opt = KFAC(net, 0.1, outputs="exact")
    opt.initialize(batches[:1])
    buffers, factors = dict(net.named_buffers()), opt.factors()
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    if spoiled:
        batches[1][0, 0] = torch.inf
        with refuses(Lacks, what="finite factors of layer '0'"):
            opt.initialize(batches)
        assert_same(opt.factors(), factors)
    else:
        opt.initialize(batches)
    for name, buffer in net.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, before[name]), name


def test_a_normalisation_that_is_kept_in_eval_mode_stays_in_it():
    """As in the training step: the factors are those of the function that is trained."""
    x, y = examples()
    found = []
    for initial in (True, False):
        net = normalised().train()
        net[1].eval()
        opt = KFAC(net, 0.0, outputs="exact")
        if initial:
            opt.initialize([x])
        else:
            cross_entropy(net(x), y).backward()
            opt.step()
        found.append(opt.factors())
    assert_same(*found)
