"""The independently written script takes decaylab's steps, and its images are the recipe's."""

import json

import pytest
import torch
from results_pages.results import Results, independent
from torch import nn
from torch.nn import functional as F

from decaylab.data import DATA_SETS, DataSet, Split
from decaylab.data.batches import _Normalise
from decaylab.training import RunSpec
from decaylab.training.run import TrainingRun

FACTS = DATA_SETS["cifar10"]


@pytest.fixture(scope="module")
def script(benchmark):
    return benchmark("independent")


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (64, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return pixels, torch.randint(10, (64,), generator=generator)


def in_double(run, trainer, images):
    """Both in float64, from decaylab's weights."""
    run.model.double()
    trainer.model.double()
    run.batches._normalise = _Normalise(images, FACTS.mean, FACTS.std, torch.float64)
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (FACTS.mean, FACTS.std)
    )
    trainer.model[0].forward = lambda x: (x.permute(0, 3, 1, 2).double() / 255 - mean) / std
    with torch.no_grad():
        pairs = zip(trainer.model.parameters(), run.model.parameters(), strict=True)
        for mine, theirs in pairs:
            mine.copy_(theirs)


@pytest.mark.parametrize("network", ["vgg16", "resnet32"])
@pytest.mark.parametrize(("optimizer", "lr", "decay"), [("sgd", 0.1, 1e-3), ("adam", 1e-3, 0.3)])
def test_the_same_batches_give_the_same_weights(script, images, network, optimizer, lr, decay):
    pixels, labels = images
    split = Split(pixels.permute(0, 3, 1, 2).contiguous(), labels)
    spec = RunSpec(
        data="cifar10", network=network, width=1 / 32, batch_norm=True, augment=True, batch_size=32,
        optimizer=optimizer, lr=lr, decay="l2" if optimizer == "sgd" else "decoupled",
        weight_decay=decay, epochs=2, lr_drop_every=1,
    ).resolved()  # fmt: skip
    run = TrainingRun(spec, DataSet("cifar10", split, split, 10, FACTS.mean, FACTS.std))
    name = "sgd" if optimizer == "sgd" else "adamw"
    given = f"--network {network} --width {1 / 32} --optimizer {name} --lr {lr} --wd {decay}"
    options = script.parse(f"{given} --precision fp32 --device cpu --batch 32".split())
    trainer = script.Trainer(options, torch.device("cpu"))
    in_double(run, trainer, split.images)
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (FACTS.mean, FACTS.std)
    )
    for epoch in range(2):
        run.begin_epoch()
        trainer.model.train()
        trainer.set_lr(lr * 0.1**epoch)
        while run.position < run.steps_per_epoch:
            seen, target = run.batches.batch(run.position)
            raw = ((seen * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
            run.train_step()
            trainer.step(raw, target)
        run.next_epoch()
    for mine, theirs in zip(trainer.model.parameters(), run.model.parameters(), strict=True):
        if theirs.dim() > 1:
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
    norms = [
        [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        for model in (trainer.model, run.model)
    ]
    for mine, theirs in zip(*norms, strict=True):
        torch.testing.assert_close(mine.running_var, theirs.running_var, rtol=1e-8, atol=1e-10)


def test_every_image_is_one_of_its_crops_and_flips(script, images):
    pixels, labels = images
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(1))
    seen, targets = script.shuffled(pixels, labels, True, generator)
    assert torch.equal(targets, labels[order])
    corners = set()
    for image, source in zip(seen, pixels[order], strict=True):
        padded = F.pad(source.permute(2, 0, 1), (4,) * 4)
        found = [
            (top, left, flip)
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
            if torch.equal(
                image.flip(1) if flip else image,
                padded[:, top : top + 32, left : left + 32].permute(1, 2, 0),
            )
        ]
        assert len(found) == 1
        corners.update(found)
    assert len(corners) > 40


def test_decay_outside_the_momentum(script, images):
    options = script.parse(
        ["--width", "0.05", "--lr", "0.1", "--wd", "0.5", "--decay", "decoupled", "--device", "cpu"]
    )
    trainer = script.Trainer(options, torch.device("cpu"))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    for group in trainer.optimizer.param_groups:
        assert group["weight_decay"] == 0
    trainer.step(*images)
    for old, p in zip(before, trainer.model.parameters(), strict=True):
        expected = old - 0.1 * (p.grad + 0.5 * old)
        torch.testing.assert_close(p.detach(), expected)


def test_its_records_are_shown_as_they_are(script, images, tmp_path, monkeypatch, capsys):
    pixels, labels = images
    data = {"train_x": pixels, "train_y": labels, "test_x": pixels, "test_y": labels}
    monkeypatch.setattr(script, "load", lambda *_: data)
    (tmp_path / "independent").mkdir()
    file = tmp_path / "independent" / "one.json"
    grid = "wd=1e-3;decay=decoupled,bn=0"
    short = {"width": 0.05, "epochs": 2, "drop-every": 1, "batch": 32, "device": "cpu"}
    words = [f"--{name}={value}" for name, value in short.items()]
    script.main([*words, "--aug", "--grid", grid, "--json", str(file)])
    capsys.readouterr()
    first, second = json.loads(file.read_text())
    assert [len(run["curve"]) for run in (first, second)] == [2, 2]
    assert second["reestimated"] is None
    rows = [line for line in independent(Results(tmp_path)).splitlines() if "VGG16" in line]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0][:4] == ["VGG16, BN + Aug", "SGD", "0.1", "0.001"]
    assert cells[1][3] == "0.001 outside the momentum"
    assert cells[0][8] == f"{first['last']:.2f}"
    assert cells[0][10] == f"{first['reestimated']:.2f}"
    assert cells[1][10] == "—"
