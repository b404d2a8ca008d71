"""Fully connected networks of any depth and width (Fig. 5 of the paper, and the theory's nets)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from decaylab.errors import check_name
from decaylab.networks.layers import Style

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "linear": nn.Identity}


class MLP(nn.Module):
    """Linear layers with an activation between them; the input is flattened.

    `hidden` holds one width per hidden layer; an empty one gives a linear classifier.
    [N, ...] -> [N, classes]. Under batch normalisation every layer but the last is followed by it.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        classes: int,
        style: Style,
        activation: str = "relu",
    ):
        super().__init__()
        check_name("activation", activation, ACTIVATIONS)
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [*style.linear(in_features, width), ACTIVATIONS[activation]()]
            in_features = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(in_features, classes, bias=style.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [N, classes]."""
        return self.head(self.features(inputs.flatten(1)))
