"""Networks in which it is known what decay can do, three seeds each."""

import copy

import pytest
import torch
from diagnosis.recorded import reasons
from torch import nn
from torch.nn.functional import cross_entropy

from decaylab import diagnose, watch
from decaylab.diagnosis import Reason, equivalent_schedule
from decaylab.probes import FREE

SEEDS = (0, 1, 2)
WORDS, LENGTH, WIDTH = 17, 8, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=0.0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        return x + self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=0.0)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down_proj(nn.functional.silu(self.up_proj(self.norm(x))))


class Llama(nn.Module):
    """Whatever is written into the residual stream is normalised before it is read."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Attention(), Mlp())
        self.norm = nn.RMSNorm(WIDTH, eps=0.0)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def into_the_stream(model):
    names = ("embedding", "o_proj", "down_proj")
    return [p for name, p in model.named_parameters() if any(part in name for part in names)]


def rest(model, chosen):
    return [p for p in model.parameters() if all(p is not other for other in chosen)]


def tokens(seed, steps=120):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(WORDS, (8, LENGTH), generator=generator)
        yield batch, (batch.cumsum(1) % WORDS)


def language_run(model, optimizers, seed, after=lambda: None, **watching):
    first = next(tokens(seed))[0]
    settings = {"every": 20, "probes": [*FREE, "size_response", "gn_norm"], "inputs": first}
    with watch(model, optimizers, **settings | watching) as watched:
        for x, y in tokens(seed):
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
                optimizer.zero_grad()
            after()
            watched.log(loss=loss)
    return watched


def llama_sgd(model, weight_decay, chosen=into_the_stream):
    decayed = chosen(model)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest(model, decayed)}]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_layers_that_are_invariant_only_together(seed):
    """Rescaling all that writes into the stream changes nothing: decay of it is a raised lr."""
    runs = []
    for weight_decay in (0.05, 0.0):
        model = Llama(seed).double()
        runs.append(language_run(model, llama_sgd(model, weight_decay), seed))
    found = diagnose(*runs)
    assert found["effective l"].verdict == "acts"
    assert found["Jacobian"].verdict == "does not act"
    assert reasons(found["Jacobian"]) == {Reason.ALL_INVARIANT}
    (row,) = [row for row in found["effective l"].layers if row.effect]
    (whole,) = [motion for motion in found.motions if motion.members]
    assert whole.members == ("embedding", "blocks.0.o_proj", "blocks.1.down_proj")
    assert row.layer == whole.layer
    alone = diagnose(runs[0])["effective l"]
    assert alone.verdict == "acts"
    assert alone.effect.value == pytest.approx(found["effective l"].effect.value, rel=0.1)
    (foretold,) = [motion.foretold for motion in found.motions if motion.foretold]
    # by the law, as the effective learning rate itself
    assert foretold == alone.effect.value / found["effective l"].effect.value


def test_the_raised_learning_rate_gives_the_same_functions():
    """What `advise schedule` says of them, followed: the same logits, to rounding."""
    start = Llama(0).double()
    first, second = copy.deepcopy(start), copy.deepcopy(start)
    watched = language_run(first, llama_sgd(first, 0.05), 0, every=1)
    schedule = equivalent_schedule(watched)
    assert schedule.layers == ("embedding", "blocks.0.o_proj", "blocks.1.down_proj")
    optimizer = torch.optim.SGD(schedule.groups(second), lr=schedule.others[0])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.lambdas())
    language_run(second, optimizer, 0, after=scheduler.step)
    x = next(tokens(5))[0]
    assert torch.allclose(first(x), second(x), atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_only_the_embedding_decays_the_function_changes(seed):
    """It shrinks against what the blocks add: no decay of a scale-invariant layer."""
    runs = []
    for weight_decay in (0.05, 0.0):
        model = Llama(seed).double()
        optimizer = llama_sgd(model, weight_decay, lambda m: list(m.embedding.parameters()))
        runs.append(language_run(model, optimizer, seed))
    found = diagnose(*runs)
    assert Reason.ALL_INVARIANT not in reasons(found["Jacobian"])
    assert found["Jacobian"].effect is not None
    (row,) = [m for m in found.motions if m.layer == "embedding"]
    assert row.size_response > 0.01
    assert row.turned.value == pytest.approx(1 / row.by_decay, rel=0.6)


def image_net(seed, *, zero_gains=False):
    torch.manual_seed(seed)

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
            self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
            if zero_gains:
                nn.init.zeros_(self.norm2.weight)

        def forward(self, x):
            return x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))

    def norm(width):
        return nn.BatchNorm2d(width)

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    stem = [nn.Conv2d(1, 8, 3, padding=1, bias=False), norm(8), nn.ReLU()]
    return nn.Sequential(*stem, Block(8), Block(8), *head)


def image_run(model, optimizers, seed, steps=120):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(64, 1, 6, 6, generator=generator)
    labels = (images.mean((1, 2, 3)) > 0).long() + 2 * (images[:, 0, 2, 2] > 0).long()
    listed = optimizers if isinstance(optimizers, list) else [optimizers]
    probes = [*FREE, "size_response", "jacobian_norm"]
    with watch(model, optimizers, every=20, probes=probes, inputs=images[:16]) as watched:
        for _ in range(steps):
            chosen = torch.randint(64, (32,), generator=generator)
            loss = cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            for optimizer in listed:
                optimizer.step()
            model.zero_grad()
            watched.log(loss=loss)
    return watched


def convolutions(model):
    return [p for p in model.parameters() if p.ndim == 4]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("zero_gains", [False, True])
def test_decay_of_convolutions_alone(seed, zero_gains):
    """Under batch norm it is a raised lr and nothing else, also where gains that are zero hide it.

    At the start no change of a convolution before a gain of zero is seen at all.
    """
    runs = []
    for weight_decay in (0.05, 0.0):
        model = image_net(seed, zero_gains=zero_gains)
        decayed = convolutions(model)
        groups = [{"params": decayed, "weight_decay": weight_decay}]
        groups.append({"params": rest(model, decayed)})
        runs.append(image_run(model, torch.optim.SGD(groups, lr=0.1), seed))
    for given in (runs, runs[:1]):
        found = diagnose(*given)
        assert found["effective l"].verdict == "acts"
        assert found["Jacobian"].verdict == "does not act"
        assert sum(row.effect is not None for row in found["effective l"].layers) == 5


@pytest.mark.parametrize("seed", SEEDS)
def test_decay_of_everything_else(seed):
    """The head and the gains that feed the sum: the function alone can change.

    (Gain and shift before a ReLU, a convolution and a normalisation are scale-invariant too.)
    """
    runs = []
    for weight_decay in (0.2, 0.0):
        model = image_net(seed)
        inner = [p for name, p in model.named_parameters() if "norm1" in name]
        free = [*convolutions(model), *inner]
        groups = [{"params": rest(model, free), "weight_decay": weight_decay}, {"params": free}]
        runs.append(image_run(model, torch.optim.SGD(groups, lr=0.1), seed))
    found = diagnose(*runs)
    assert found["effective l"].verdict == "does not act"
    assert found["Jacobian"].verdict == "acts"


@pytest.mark.parametrize("seed", SEEDS)
def test_two_optimizers_side_by_side(seed):
    """SGD without decay on the body, AdamW with much of it on the head."""
    runs, through_sgd = [], []
    for weight_decay in (3.0, 0.0):
        for watch_all in (True, False):
            model = image_net(seed)
            head = list(model[-1].parameters())
            sgd = torch.optim.SGD(rest(model, head), lr=0.1)
            adamw = torch.optim.AdamW(head, lr=0.01, weight_decay=weight_decay)
            if watch_all:
                runs.append(image_run(model, [sgd, adamw], seed))
                continue
            adamw_step = adamw.step
            sgd.register_step_post_hook(lambda *_, step=adamw_step: step())
            through_sgd.append(image_run(model, sgd, seed))
    found = diagnose(*runs)
    assert [finding.verdict for finding in found.findings] == [
        *("does not act", "acts", "does not act"),
    ]
    (head,) = [m for m in found.motions if m.role == "head"]
    assert head.by_decay < 0.8
    partly = diagnose(*through_sgd)
    assert Reason.UNWATCHED in reasons(partly.troubles)
    assert Reason.NO_DECAY not in reasons(partly.troubles)
    assert partly["Jacobian"].verdict == "cannot tell"


@pytest.mark.parametrize("seed", SEEDS)
def test_decay_that_is_too_weak_to_act(seed):
    runs = []
    for weight_decay in (1e-5, 0.0):
        model = image_net(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
        runs.append(image_run(model, optimizer, seed))
    found = diagnose(*runs)
    assert {finding.verdict for finding in found.findings} == {"does not act"}
    assert reasons(found.follows) & {Reason.NO_EFFECT, Reason.NO_EFFECT_YET}


class SummedNorms(nn.Module):
    """The gains of two batch norms are scale-invariant together: their sum is normalised."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.last, self.head = nn.BatchNorm1d(8, affine=False, eps=1e-12), nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm_a(self.first(x)) + self.norm_b(self.second(x)).relu()
        return self.head(self.last(x))


def test_gains_that_are_scale_invariant_together_are_no_weights():
    model, inputs = SummedNorms(), torch.randn(32, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    with watch(model, optimizer, every=5, inputs=inputs) as watched:
        for _ in range(40):
            cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    diagnosis = diagnose(watched)
    roles = {motion.layer: motion.role for motion in diagnosis.motions}
    assert roles["norm_a + norm_b"] == "gain"
    assert "2 of 3 layers with decay" in str(diagnosis)  # first, second, head
    judged = [row.layer for row in diagnosis["effective l"].layers if row.effect]
    assert judged == ["first", "second"]
