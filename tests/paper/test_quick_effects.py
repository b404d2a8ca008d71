"""Effects of the paper that do appear at tier quick, with margins; the smallest runs of each."""

import math

import pytest
import torch

from decaylab.data import load
from decaylab.paper import FinishedRuns, cells, select
from decaylab.paper.evidence import Bench
from decaylab.paper.plan import plan
from decaylab.paper.statistics import correlation
from decaylab.records import RunStore
from decaylab.sweeps.worker import Worker, WorkerOptions

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Runs the cells a test asks for, once, and reads them."""
    store = RunStore(tmp_path_factory.mktemp("quick"))
    digits = load("digits")

    def made(artefact, *only):
        chosen = select(cells(artefact, "quick"), only)
        everything = [cell for name in ("fig3", "fig5", "table2") for cell in cells(name, "quick")]
        how = WorkerOptions(torch.device("cpu"))
        reproduction = Worker(plan(chosen, everything, tier="quick"), store, how)
        reproduction._data["digits"] = digits
        list(reproduction.run())
        assert not reproduction.outcome.failed
        finished_runs = FinishedRuns(store)
        return [finished_runs.of_cell(cell)[0] for cell in chosen]

    return made


def test_effective_lr_falls_without_decay_and_not_with_it(quick):
    without, decayed = quick("fig3", "network=vgg16", "optimizer=sgd")
    ratios = []
    for run in (without, decayed):
        curve = dict(run.curve(run.first_layer("effective_lr")))
        ratios.append(curve[12] / curve[1])  # over the first stage
    assert ratios[0] < 0.6
    assert ratios[1] > 0.9
    assert decayed.first_stage_exposure() > 1


def test_weight_decay_shrinks_the_jacobian_under_kfac_g_more_than_under_sgd(quick):
    found = {}
    for optimizer in ("sgd", "kfac-g"):
        runs = quick("table2", "network=vgg16", f"optimizer={optimizer}")
        norms = [run.final("jacobian_norm") for run in runs]
        found[optimizer] = norms[0] / norms[1]
        assert Bench(FinishedRuns(RunStore("")), "quick", 1, None).enough(runs)
    assert found["kfac-g"] > 8
    assert 1.5 < found["sgd"] < found["kfac-g"] / 1.5


def test_kfac_gn_norm_goes_with_the_jacobian_norm(quick):
    runs = quick("fig5", "dataset=mnist", "hidden=128x128,512x512")
    assert len(runs) == 12
    points = [(r.final("kfac_gn_norm"), r.final("jacobian_norm"), r) for r in runs]
    norms, jacobians = ([point[axis] for point in points] for axis in (0, 1))
    over_nets = correlation(norms, jacobians, [run.spec.optimizer for run in runs])
    assert over_nets.low > 0
    assert over_nets.rank > 0.75
    assert all(math.isfinite(x) and x > 0 for point in points for x in point[:2])


def test_norm_transfer_takes_over_the_effective_lr_of_decay(quick):
    none, decay, transferred, _ = quick("fig4", "network=vgg16")
    name = decay.first_layer("effective_lr")
    # after an epoch of its own the transferred run is still close to its source, the baseline far
    ends = {run.spec.id: dict(run.curve(name))[30] for run in (none, decay, transferred)}
    gap = math.log(ends[decay.spec.id] / ends[none.spec.id])
    assert gap > 1.0
    assert abs(math.log(ends[transferred.spec.id] / ends[decay.spec.id])) < 0.2 * gap
