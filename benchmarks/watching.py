"""What watching costs in a GPT's own loop, in training steps of that loop.

    python benchmarks/watching.py [--rounds 5]

record: a record of the default probes. inputs: measuring how the outputs respond to each layer's
size, on a quarter of the batch; due at the 1st, 4th, 16th, 64th ... record. diagnosis: what
`probes="diagnosis"` adds to a record, on that quarter. Time of this process, medians in turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decaylab import watch
from decaylab.probes import FREE, PROBES
from decaylab.probes.size_response import measured_invariance


class GPT(nn.Module):
    """1.3 million parameters, bytes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 160)
        block = nn.TransformerEncoderLayer(160, 4, 640, 0.0, F.gelu, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.Linear(160, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, position, byte]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.blocks(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


def costs(model: nn.Module, x: Tensor, y: Tensor, probe: str, rounds: int) -> dict[str, float]:
    """Seconds of a step, and of the rest in steps."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    batch = x[: len(x) // 4]
    watched = watch(model, optimizer, every=10**9, inputs=batch)

    def step() -> None:
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def record() -> None:
        watched.before_step()
        watched.measure([PROBES[name] for name in FREE])

    parts: dict[str, Callable[[], object]] = {
        "step": step,
        "record": record,
        "inputs": lambda: measured_invariance(model, batch),
        "diagnosis": lambda: watched.measure([PROBES[probe]]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds + 1):
        for name, part in parts.items():
            start = time.process_time()
            part()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    whole = medians.pop("step")
    return {"step": whole, **{name: value / whole for name, value in medians.items()}}


def main() -> None:
    """Print a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    tokens = torch.randint(256, (16, 65))
    measured = costs(GPT(), tokens[:, :-1], tokens[:, 1:], "gn_norm", rounds)
    step = 1e3 * measured.pop("step")
    parts = ", ".join(f"{part} {cost:.2f}" for part, cost in measured.items())
    print(f"a step takes {step:.0f} ms; in steps: {parts}")


if __name__ == "__main__":
    main()
