"""A head tied to an embedding: a sum of two products as one, its trace, its limits, its error."""

import copy

import pytest
import torch
from oracle.kfac import naive_factors, output_hessian, vectors_for
from oracle.kfac_runs import EXACT, cross_entropy, labels_for, seeded, train_step
from oracle.plain_kfac import KFAC
from torch import nn

from decaylab.curvature.estimator import KroneckerEstimator
from decaylab.curvature.factors import Sums, merged
from decaylab.curvature.kinds.kind import Reason
from decaylab.optim.options import KFACOptions

TOKENS, WIDTH = 6, 4
KIND = ("fisher", "categorical")


class Language(nn.Module):
    """One row of logits per sequence; the embedding as a Linear of one-hot vectors, or tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.one_hot = None if tied else nn.Linear(TOKENS, WIDTH, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        else:
            del self.embedding

    def forward(self, x):
        if self.one_hot is None:
            vectors = self.embedding(x)
        else:
            vectors = self.one_hot(nn.functional.one_hot(x, TOKENS).double())
        return self.head(self.mix(vectors.tanh().mean(1)).tanh())


def nets() -> tuple[nn.Module, nn.Module]:
    """Tied, and the same function with the two uses as layers of their own."""
    tied = seeded(lambda: Language(tied=True))
    return tied, untied(tied)


def untied(tied: nn.Module) -> nn.Module:
    apart = seeded(lambda: Language(tied=False))
    apart.mix.load_state_dict(tied.mix.state_dict())
    apart.head.weight.data = tied.head.weight.detach().clone()
    apart.one_hot.weight.data = tied.head.weight.detach().T.clone()
    return apart


def tokens(count: int = 12, seed: int = 0) -> torch.Tensor:
    return labels_for(count, 5, classes=TOKENS, seed=seed)


def products(apart: nn.Module, x) -> tuple[torch.Tensor, torch.Tensor]:
    """Both uses' blocks in the order of weight.flatten(): kron(tokens, width)."""
    naive = naive_factors(copy.deepcopy(apart), x, vectors_for(*KIND))
    head, embedding = naive["head"], naive["one_hot"]
    # the head's output side is its diagonal, as the counts of tokens are
    diagonal = torch.diag(head.S[0].diagonal())
    first = head.T * torch.kron(diagonal, head.A[0])
    return first, embedding.T * torch.kron(embedding.A[0], embedding.S[0])


def found_block(tied: nn.Module, x) -> torch.Tensor:
    factors = KroneckerEstimator(tied, curvature=KIND[0], outputs="exact").measure([x])["embedding"]
    return float(factors.T) * torch.kron(torch.diag(factors.S), factors.A)


def test_the_block_has_the_trace_of_the_sum_and_the_sides_of_both():
    tied, apart = nets()
    x = tokens()
    head, embedding = products(apart, x)
    block = found_block(tied, x)
    torch.testing.assert_close(block.trace(), (head + embedding).trace(), rtol=1e-10, atol=0)
    by_token = [p.view(TOKENS, WIDTH, TOKENS, WIDTH) for p in (block, head, embedding)]
    sides = [p.diagonal(dim1=1, dim2=3).sum(-1) for p in by_token]  # [tokens, tokens]
    torch.testing.assert_close(sides[0], sides[1] + sides[2], rtol=1e-10, atol=1e-14)
    widths = [p.diagonal(dim1=0, dim2=2).sum(-1) for p in by_token]  # [width, width]
    torch.testing.assert_close(widths[0], widths[1] + widths[2], rtol=1e-10, atol=1e-14)


def test_without_one_of_the_uses_it_is_the_other():
    torch.manual_seed(0)
    A, S = (torch.randn(1, 9, WIDTH).double() for _ in range(2))
    A, S = A.mT @ A, S.mT @ S
    G, C = torch.rand(1, TOKENS).double(), torch.rand(1, TOKENS).double()
    head = Sums(A, G, 9.0, 3.0)
    alone = merged(head, Sums(C, 0 * S, 9.0, 3.0))
    for side, expected in zip(alone.means, head.means, strict=True):
        torch.testing.assert_close(side, expected, rtol=1e-12, atol=0)
    other = merged(Sums(A, 0 * G, 9.0, 3.0), Sums(C, S, 9.0, 3.0))
    found = torch.kron(torch.diag(other.means[1][0]), other.means[0][0])
    expected = torch.kron(torch.diag(C[0] / 9), S[0] / 3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def exact_block(tied: nn.Module, x) -> torch.Tensor:
    """Mean over rows of J' H J with regard to the tied weight: both uses and what is between."""
    weight, total = tied.embedding.weight, 0
    for sequence in x:
        z = tied(sequence[None])[0]
        rows = [torch.autograd.grad(z[c], weight, retain_graph=True)[0] for c in range(TOKENS)]
        J = torch.stack([row.flatten() for row in rows])
        total = total + J.T @ output_hessian(z, *KIND) @ J
    return total / len(x)


def relative_error(block: torch.Tensor, expected: torch.Tensor) -> float:
    return float((block - expected).norm() / expected.norm())


def test_the_error_of_one_product_for_two():
    """Beside that of what K-FAC leaves out anyway: diagonals, and products of the two uses."""
    tied, _ = nets()
    opt = KFAC(tied, 0.05, kl_clip=1e-2, **EXACT)
    for step in range(20):  # until both uses count alike
        x = tokens(seed=step)
        train_step(opt, tied, x, x[:, 0])
    opt.detach()
    x = tokens(60, seed=9)
    head, embedding = products(untied(tied), x)
    one, two = found_block(tied, x), head + embedding
    assert 0.4 < head.trace() / two.trace() < 0.6
    assert relative_error(one, two) < 0.2
    for alone in (head, embedding):
        assert relative_error(alone, two) > 2 * relative_error(one, two)
    exact = exact_block(tied, x)
    assert relative_error(one, exact) < 1.1 * relative_error(two, exact)


def test_a_tied_language_model_trains_and_resumes():
    """Both parts move as one parameter; a state dict brings back the bits."""
    losses, weights = [], []
    for resumed in (False, True):
        model = seeded(lambda: Language(tied=True))
        opt = KFAC(model, 0.05, kl_clip=1e-2, **EXACT)
        for step in range(6):
            x = tokens(seed=step)
            losses.append(float(train_step(opt, model, x, x[:, 0], cross_entropy)))
            if resumed and step == 2:
                state = opt.state_dict()
                opt = KFAC(model, 0.05, kl_clip=1e-2, **EXACT)
                opt.load_state_dict(state)
        assert model.head.weight is model.embedding.weight
        weights.append(model.head.weight.detach().clone())
    assert torch.equal(*weights)
    assert losses[5] < losses[0]


@pytest.mark.parametrize("part", ["head", "embedding"])
def test_excluding_one_of_the_two_leaves_the_weight_to_the_others(part):
    model = seeded(lambda: Language(tied=True))
    found = KFAC(model, 0.1, options=KFACOptions(exclude=(part,))).coverage()
    assert found["embedding.weight"].reason is Reason.EXCLUDED


class Bare(Language):
    """The head is `F.linear` with the embedding's weight, and no module."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        del self.head

    def forward(self, x):
        mixed = self.mix(self.embedding(x).tanh().mean(1)).tanh()
        return nn.functional.linear(mixed, self.embedding.weight)


def test_a_head_that_is_no_module_is_measured_too():
    """Its factors are the tied ones with their sides exchanged, and the steps are the same."""
    tied, _ = nets()
    bare = Bare().double()
    bare.load_state_dict({k: v for k, v in tied.state_dict().items() if k != "head.weight"})
    opts = [KFAC(model, 0.1, damping=0.01, **EXACT) for model in (tied, bare)]
    for seed in range(5):
        for opt, model in zip(opts, (tied, bare), strict=True):
            train_step(opt, model, tokens(seed=seed), labels_for(12, classes=TOKENS, seed=seed))
    ours, expected = (opt.factors()["embedding"] for opt in reversed(opts))
    torch.testing.assert_close(ours.A, expected.S * expected.T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.S * ours.T, expected.A, rtol=1e-10, atol=1e-12)
    for name, parameter in bare.named_parameters():
        torch.testing.assert_close(parameter, tied.get_parameter(name), rtol=1e-10, atol=1e-12)


def test_a_part_of_an_embedding_as_a_head_leaves_its_block_to_the_embedding():
    class Part(Bare):
        def forward(self, x):
            mixed = self.mix(self.embedding(x).tanh().mean(1)).tanh()
            return nn.functional.linear(mixed, self.embedding.weight[:3])

    model = seeded(Part)
    opt = KFAC(model, 0.1, damping=0.01, **EXACT)
    train_step(opt, model, tokens(), labels_for(12, classes=3))
    counts = torch.bincount(tokens().flatten(), minlength=TOKENS).double()
    torch.testing.assert_close(opt.factors()["embedding"].A, counts / counts.sum())
