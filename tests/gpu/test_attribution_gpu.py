"""Arms on a GPU: replayed graphs follow paths as plain steps do."""

from dataclasses import replace

import pytest
import torch

from decaylab.attribution.recorded_arms import attribute_spec
from decaylab.data import load
from decaylab.records import RunStore
from decaylab.sweeps.worker import WorkerOptions
from decaylab.training import RunSpec, TrainingRun
from decaylab.training.build import chosen_split
from decaylab.training.paths import Targets

pytestmark = pytest.mark.gpu

SPEC = RunSpec(
    data="digits",
    network="mlp",
    hidden=(32, 32),
    batch_norm=True,
    lr=0.05,
    decay="l2",
    weight_decay=0.02,
    epochs=3,
    lr_drop_every=2,
)
KFAC = replace(
    SPEC,
    optimizer="kfac-f",
    lr=0.03,
    decay="decoupled",
    weight_decay=1.0,
    initialize_batches=2,
    refresh_every=3,
    invert_every=6,
)


@pytest.mark.parametrize("spec", [SPEC, KFAC], ids=["sgd", "kfac"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_arms_hold_their_paths(spec, at_once, tmp_path):
    result = attribute_spec(
        spec,
        store=RunStore(tmp_path),
        seeds=(0,),
        options=WorkerOptions(device=torch.device("cuda"), at_once=at_once),
    )
    assert not result.unused
    assert max(result.worst_errors().values()) < 1e-4


@pytest.mark.parametrize("spec", [SPEC, KFAC], ids=["sgd", "kfac"])
def test_graphs_record_what_plain_steps_record(spec):
    spec = spec.resolved()
    data = chosen_split(spec, load("digits")).to("cuda")
    recorded = []
    for graphs in (True, False):
        run = TrainingRun(spec, data, graphs=graphs)
        run.follow(Targets())
        with run.at_work():
            run.initialize(lambda: None)
        for _ in range(run.epochs):
            run.begin_epoch()
            with run.at_work():
                while run.position < run.steps_per_epoch:
                    run.train_step()
            run.next_epoch()
        recorded.append(run.intervention.paths())
    torch.testing.assert_close(recorded[0].sizes, recorded[1].sizes, rtol=1e-3, atol=0)
    early = slice(0, 10)
    torch.testing.assert_close(
        recorded[0].angles[early], recorded[1].angles[early], rtol=1e-2, atol=1e-6
    )


def test_steps_with_an_intervention_do_not_wait_for_the_device():
    spec = SPEC.resolved()
    run = TrainingRun(spec, chosen_split(spec, load("digits")).to("cuda"), graphs=False)
    run.follow(Targets())
    run.begin_epoch()
    with run.at_work():
        run.train_step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                run.train_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
