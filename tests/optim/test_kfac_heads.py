"""Heads with different numbers of rows: each loss is averaged over its own rows, and they add."""

import copy

import pytest
import torch
from oracle.plain_kfac import KFAC
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab.errors import Lacks
from decaylab.optim.options import KFACOptions


class ExampleAndTokenHeads(nn.Module):
    """A body over tokens [examples, tokens, 3]; one row of logits per example, one per token."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.example, self.token = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.example(h.mean(1)), self.token(h)


@pytest.mark.parametrize("curvature", ["gauss-newton", "fisher"])
def test_the_curvature_of_the_body_is_the_sum_over_heads(curvature):
    torch.manual_seed(0)
    model, x = ExampleAndTokenHeads().double(), torch.randn(4, 6, 3, dtype=torch.float64)

    def factors(*heads: int):
        net = copy.deepcopy(model)
        opt = KFAC(net, 0.0, curvature=curvature, outputs="exact", logits="observed")
        outputs = net(x)
        opt.observe([outputs[i] for i in heads])
        sum(outputs[i].square().mean() for i in heads).backward()
        opt.step()
        return opt.factors()

    def block(found) -> Tensor:
        return found.T * torch.kron(found.S, found.A)

    example, token = block(factors(0)["body"]), block(factors(1)["body"])
    for order in ((0, 1), (1, 0)):
        both = factors(*order)
        torch.testing.assert_close(block(both["body"]), example + token, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(block(both["example"]), block(factors(0)["example"]))
        torch.testing.assert_close(block(both["token"]), block(factors(1)["token"]))


def test_an_actor_critic_is_told_to_leave_its_value_head_out():
    """The output is no tensor, and the value head does not lead to the logits: both are said."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.policy, self.value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x):
            hidden = self.body(x).tanh()
            return self.policy(hidden), self.value(hidden)

    def train(opt, model, *, observed):
        x = torch.randn(16, 4)
        logits, values = model(x)
        if observed:
            opt.observe(logits)
        policy_loss = F.cross_entropy(logits, x[:, :3].argmax(1))
        (policy_loss + (values[:, 0] - x[:, 0]).square().mean()).backward()
        opt.step()

    torch.manual_seed(0)
    model = ActorCritic()
    with pytest.raises(Lacks) as caught:
        train(KFAC(model, 0.01), model, observed=False)
    assert "observe(logits)" in caught.value.remedy
    assert 'exclude=("value",)' in caught.value.remedy
    model = ActorCritic()
    train(KFAC(model, 0.01, options=KFACOptions(exclude=("value",))), model, observed=True)
