from dataclasses import replace

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from decaylab import probes
from decaylab.data import load
from decaylab.errors import Lacks, Misplaced, NotFinished
from decaylab.networks import build, roles
from decaylab.records import RunStore
from decaylab.training import RunSpec, TrainingRun, train_to_end
from decaylab.training.transfer import rescale, source_norms

SOURCE = RunSpec(
    hidden=(16, 16), batch_norm=True, batch_size=256, epochs=4, lr_drop_every=2, decay="l2",
    weight_decay=0.1,
)  # fmt: skip


def weight_norms(model):
    return dict(probes.weight_norms(model).layers)


@pytest.mark.parametrize("network", ["mlp", "vgg11", "resnet20"])
def test_rescaling_gives_the_norms_and_keeps_the_function(network):
    torch.manual_seed(0)
    model = build(
        network, classes=5, in_channels=2, image_size=8, width=0.125, hidden=(64, 64),
        batch_norm=True, batch_norm_eps=1e-20,
    ).double()  # fmt: skip
    images = torch.randn(16, 2, 8, 8, dtype=torch.double)
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zero at the start
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(images)  # running statistics
    in_training = model.train(True)(images).detach()
    in_eval = model.train(False)(images).detach()
    invariant = [role.layer for role in roles(model).values() if role.role == "invariant"]
    head = model.head.weight.clone() if hasattr(model, "head") else None
    wanted = {name: 0.3 + n for n, name in enumerate(weight_norms(model))}
    rescale(model, wanted)
    after = weight_norms(model)
    for name in invariant:
        assert after[name] == pytest.approx(wanted[name], rel=1e-12)
    assert torch.allclose(model.train(False)(images), in_eval, rtol=1e-9, atol=1e-10)
    assert torch.allclose(model.train(True)(images), in_training, rtol=1e-9, atol=1e-10)
    if head is not None:
        assert torch.equal(model.head.weight, head)


def weight_normalised():
    return nn.Sequential(
        nn.Flatten(), weight_norm(nn.Linear(128, 8)), nn.ReLU(), nn.Linear(8, 3)
    )  # fmt: skip


OTHER_NETS = {
    "ReLU between": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.BatchNorm2d(4, eps=1e-20), nn.Flatten(), nn.Linear(144, 3)
    ),
    "in a block of its own": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3)),
        nn.Sequential(nn.BatchNorm2d(4, eps=1e-20), nn.Flatten()),
        nn.Linear(144, 3),
    ),
    "instances": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.InstanceNorm2d(4, eps=1e-20, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(144, 3),
    ),
    "weight normalisation": weight_normalised,
    "compiled": lambda: torch.compile(
        nn.Sequential(
            nn.Flatten(), nn.Linear(128, 8), nn.BatchNorm1d(8, eps=1e-20), nn.Linear(8, 3)
        ),
        backend="eager",
    ),
}


@pytest.mark.parametrize("kind", OTHER_NETS)
def test_rescaling_keeps_the_function_wherever_the_normalisation_is(kind):
    torch.manual_seed(0)
    model, images = OTHER_NETS[kind]().double(), torch.randn(16, 2, 8, 8, dtype=torch.double)
    model(images)  # running statistics
    expected = [model.train(training)(images).detach() for training in (True, False)]
    (layer,) = probes.layers_of(model).defects
    rescale(model, {layer: 0.3})
    assert probes.weight_norms(model).layers[layer] == pytest.approx(0.3, rel=1e-12)
    # eval mode first: train mode moves the running statistics
    for training, before in ((False, expected[1]), (True, expected[0])):
        torch.testing.assert_close(model.train(training)(images), before, rtol=1e-9, atol=1e-10)


def test_frozen_layers_have_no_norm_and_keep_their_weights():
    model = build("mlp", classes=3, in_channels=1, image_size=4, hidden=(8, 8), batch_norm=True)
    frozen, trained = model.features[0], model.features[3]
    frozen.requires_grad_(False)
    before = frozen.weight.clone()
    rescale(model, {"features.3": 0.3})
    assert torch.equal(frozen.weight, before)
    assert float(trained.weight.detach().norm()) == pytest.approx(0.3, rel=1e-6)
    with refuses(Lacks, what="norm of layer features.3"):
        rescale(model, {})


def test_a_run_starts_each_epoch_with_the_norms_of_its_source(tmp_path, monkeypatch):
    store, data = RunStore(tmp_path), load("digits")
    train_to_end(SOURCE, data=data, store=store)
    seen = {}
    begin = TrainingRun.begin_epoch

    def watched(run):
        begin(run)
        seen[run.epoch] = weight_norms(run.model)

    monkeypatch.setattr(TrainingRun, "begin_epoch", watched)
    run = replace(SOURCE, decay="none", weight_decay=0.0, norm_source=SOURCE.id)
    train_to_end(run, data=data, store=store)
    source = source_norms(store, SOURCE.id, 4)
    invariant = list(source[1])[:-1]  # all but the last layer
    for epoch in (1, 2, 3):
        for layer in invariant:
            assert seen[epoch][layer] == pytest.approx(source[epoch][layer], rel=1e-6)
    assert seen[0] == source[0]  # the same start, by the same seed
    last = list(source[1])[-1]
    assert seen[3][last] != pytest.approx(source[3][last], rel=1e-2)  # the head goes its own way


def test_a_source_that_is_not_finished_or_too_short_is_refused(tmp_path):
    store, data = RunStore(tmp_path), load("digits")
    run = replace(SOURCE, decay="none", weight_decay=0.0, norm_source=SOURCE.id)
    with refuses(NotFinished, run=SOURCE.id):
        train_to_end(run, data=data, store=store)
    with refuses(Lacks, what="store"):
        train_to_end(run, data=data)
    train_to_end(SOURCE, data=data, store=store)
    with refuses(Lacks, what="norms after epoch 5"):
        train_to_end(replace(run, epochs=8), data=data, store=store)
    with refuses(Misplaced, settings=["norm_source"]):
        replace(run, batch_norm=False)


def test_the_source_is_part_of_the_id_and_its_absence_is_not():
    plain = replace(SOURCE, decay="none", weight_decay=0.0)
    assert replace(plain, norm_source=SOURCE.id).id != plain.id
    assert replace(plain, norm_source="").id == plain.id
