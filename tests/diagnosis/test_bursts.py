"""Bursts: what counts as one, and that those of a real run are where its loss leaps."""

import pytest
import torch
from diagnosis.recorded import only, reasons
from torch.nn.functional import cross_entropy

from decaylab import diagnose, watch
from decaylab.data import load
from decaylab.diagnosis import Reason
from decaylab.diagnosis.bursts import Burst, bursts
from decaylab.diagnosis.layers import RecordedLayer
from decaylab.diagnosis.runs import read_run
from decaylab.networks import build
from decaylab.optim.decay import DECAYS
from decaylab.records import LayerSettings, Row, Rows

FALL = [8.0, 7.0, 6.0, 5.0, 4.5, 4.0]


def layer(norms, *rates):
    """Records every 10 steps; `rates`: (from step, lr)."""
    settings = [
        (s, LayerSettings(law="sgd", lr=lr, decay="l2", weight_decay=0.1))
        for s, lr in rates or ((0, 0.1),)
    ]
    return RecordedLayer("a", norms=tuple(enumerate(norms)), settings=tuple(settings))


@pytest.mark.parametrize(
    ("norms", "found"),
    [
        ([*FALL, 9.0], [Burst("a", 5, 4.0, 9.0)]),
        ([*FALL, 9.0, *FALL, 8.5, 8.6], [Burst("a", 5, 4.0, 9.0), Burst("a", 12, 4.0, 8.5)]),
        ([*FALL[1:], 9.0], []),  # four intervals of falling
        ([*FALL, 7.9], []),  # does not undo it
        ([*FALL, 6.0, 8.5], []),  # takes two
        ([8.2, 8.1, 8.0, 7.9, 7.8, 7.7, 8.5], []),  # by less than a fifth
        ([8.2, 8.1, 8.0, 7.9, 7.8, 7.5, 9.0], [Burst("a", 5, 7.5, 9.0)]),  # by a fifth
        ([8.0, 7.0, 7.0, 5.0, 4.5, 4.0, 9.0], []),  # stood still in between
        (FALL, []),
        ([9.0], []),
        ([], []),
    ],
)
def test_a_burst_undoes_at_once_what_five_intervals_took(norms, found):
    assert bursts(layer(norms)) == found


def test_weights_that_grow_by_a_larger_lr_do_not_burst():
    norms = [*FALL, 9.0]
    assert bursts(layer(norms, (0, 0.1), (6, 0.2))) == []
    assert bursts(layer(norms, (0, 0.1), (6, 0.05))) != []


def test_the_largest_burst_is_named_with_what_helps_its_own_layer():
    """Layers may be stepped in different ways: K-FAC leaves some to SGD."""

    def run(kfac, sgd):
        rows = []
        for name, (falls_after, top, power, damping) in {"kfac": kfac, "sgd": sgd}.items():
            norms = [*[1.0] * falls_after, *(0.9**k for k in range(6)), *[top] * 9][:15]
            how = {"lr": 0.1, "decay": DECAYS.index("decoupled"), "weight_decay": 0.5}
            how |= {"momentum": 0.0, "invariant": 1.0, "power": power}
            how |= {} if damping is None else {"damping": damping, "scale_free": 0.0}
            rows += [Row(1, 0, 0.0, f"setting_{k}/{name}", float(v)) for k, v in how.items()]
            rows += [Row(s, 0, 0.0, f"weight_norm/{name}", n) for s, n in enumerate(norms, 1)]
        return only(diagnose(Rows(tuple(rows))).follows, Reason.BURST)

    larger_in_sgd = run((0, 2.0, 0.0, 0.01), (3, 3.0, 2.0, None))
    assert larger_in_sgd["burst"] == Burst("sgd", 9, pytest.approx(0.9**5), 3.0)
    assert larger_in_sgd["others"] == 1
    assert larger_in_sgd["remedy"].reason is Reason.SHORTER_STEPS
    larger_in_kfac = run((3, 3.0, 0.0, 0.01), (0, 2.0, 2.0, None))
    assert (larger_in_kfac["burst"].layer, larger_in_kfac["burst"].step) == ("kfac", 9)
    assert larger_in_kfac["remedy"].reason is Reason.SCALE_FREE_DAMPING


def trained(weight_decay: float, steps: int = 2000):
    """SGD on digits, an MLP with BN whose invariant layers decay: what was watched, the losses."""
    torch.manual_seed(0)
    data = load("digits").train
    images, labels = data.images.float() / 255, data.labels
    model = build("mlp", classes=10, in_channels=1, image_size=8, hidden=(64, 64), batch_norm=True)
    invariant = [model.features[0].weight, model.features[3].weight]
    others = [p for p in model.parameters() if all(p is not weight for weight in invariant)]
    groups = [{"params": invariant, "weight_decay": weight_decay}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    losses = []
    with watch(model, optimizer, every=20) as watched:
        for _ in range(steps):
            batch = torch.randint(len(images), (128,))
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return watched, losses


def test_sgd_under_bn_and_strong_decay():
    watched, losses = trained(0.03)
    found = [one for one in read_run(watched).layers.values() if one.invariant]
    found = [burst for one in found for burst in bursts(one)]
    assert found
    usual = sorted(losses[500:])[750]
    for burst in found:
        around = losses[max(burst.step - 20, 0) : burst.step + 40]
        assert max(around) > 10 * usual, burst
    said = only(diagnose(watched).follows, Reason.BURST)
    assert said["burst"] == max(found, key=lambda burst: burst.after / burst.before)
    assert said["others"] == len(found) - 1


def test_little_decay_does_not_burst():
    watched, _ = trained(1e-4, steps=1000)
    assert Reason.BURST not in reasons(diagnose(watched))
