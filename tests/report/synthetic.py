"""Run folders written by hand: no training, so that a test knows every number in them."""

import math

from decaylab.paper import FinishedRuns, artefacts, cells
from decaylab.records import Manifest, Row, RunStore

CLOCK = 1_700_000_000.0
SEARCHED = """[cell]
dataset = "{dataset}"
network = "vgg16"
batch_norm = 1
augment = 0
optimizer = "sgd"
batch_size = 128
scheme = "wd"
[winner]
lr = {lr}
weight_decay = {weight_decay}
[search]
tier = "{tier}"
lr_tried = {lr_tried}
weight_decay_tried = {weight_decay_tried}
"""


def write_run(
    store, spec, values, *, tier, status="finished", device="cpu", epochs=3, compiled=False
):
    """A run whose rows have each value, an equal step apart, after `epochs` epochs."""
    spec = spec.resolved()
    with store.folder(spec.id).writing(spec.to_toml()) as folder:
        for epoch in range(epochs + 1):
            grown = {name: value * (0.5 + 0.5 * epoch / epochs) for name, value in values.items()}
            rows = {**grown, "train/seconds": 2.0 * epoch}
            folder.rows_writer.append(
                Row(10 * epoch, epoch, 2.5 * epoch, name, value) for name, value in rows.items()
            )
        folder.write_manifest(
            Manifest(
                id=spec.id,
                status=status,
                version="0.1.0",
                commit="0123456789abcdef+",
                torch="2.13.0",
                device=device,
                seed=spec.seed,
                tier=tier,
                started=CLOCK,
                updated=CLOCK + 9,
                compiled=compiled,
            )
        )
    return folder


def write_searched(
    root, *, lr=0.03, weight_decay=3e-4, tier="short", dataset="cifar10", tried=(1e-9, 1e9)
):
    """What a search found for VGG16 with batch norm under SGD with decay; its folder."""
    folder = root / "searched"
    folder.mkdir(exist_ok=True)
    text = SEARCHED.format(
        lr=lr, weight_decay=weight_decay, tier=tier, dataset=dataset,
        lr_tried=[1e-9, lr, 1e9], weight_decay_tried=[*tried, weight_decay],
    )  # fmt: skip
    (folder / "found.toml").write_text(text)
    return folder


def everything(number):
    """Every name an artefact reads, with values that differ from run to run."""
    return {
        "test/accuracy": 0.9 + 0.0005 * (number % 97),
        "train/accuracy": 1.0,
        "test/loss": 0.3 + 0.001 * (number % 13),
        "train/loss": 0.01,
        "train/running_loss": 0.02 + 0.001 * (number % 7),
        "train/running_accuracy": 0.9995,
        "effective_lr/features.0": 1e-4 * (1 + number % 5),
        "jacobian_norm": 10.0 + number % 31,
        "kfac_gn_norm": math.exp(number % 11),
        "jacobian_norm_2000": 9.0 + number % 31,
        "train/pass_loss": 0.015 + 0.001 * (number % 7),
        "fisher_trace_normalised_train/features.0": 5.0,
        "gn_trace_normalised_train/features.0": 50.0,
        "exposure/stage": 2.0,
        "norm/features.0": 4.0,
        "lr": 0.1,
    }


def fill_artefacts(root, names=None, *, tier="smoke", seeds=1):
    """Finished runs for every cell of some artefacts that needs no search."""
    store, done = RunStore(root), set()
    for name in names or artefacts():
        for cell in cells(name, tier, seeds):
            for spec in cell.runs:
                if spec.id not in done:
                    done.add(spec.id)
                    write_run(store, spec, everything(len(done)), tier=tier)
    return FinishedRuns(store)
