import pytest
from report.synthetic import write_run

from decaylab.cli.demo import demo_specs
from decaylab.paper import FinishedRuns
from decaylab.records import RunStore
from decaylab.report.mechanisms import MECHANISMS, TIER, demo_runs, demo_section, mechanism_grid
from decaylab.sweeps.run_index import indexed_runs

FIRST = MECHANISMS[0]  # effective learning rate: weight decay should raise it


def demo(root, with_decay, without=(1.0, 1.0, 1.0)):
    """The demo with given effective learning rates per seed; None: that run is missing."""
    store = RunStore(root)
    for spec in demo_specs(seeds=3):
        if spec.optimizer == "sgd" and spec.batch_norm:
            value = (with_decay if spec.decay == "decoupled" else without)[spec.seed]
            if value is not None:
                rows = {"test/accuracy": 0.9, "test/loss": 0.1, "train/loss": 0.1}
                write_run(store, spec, {**rows, "effective_lr/features.0": value}, tier=TIER)
    return demo_runs(indexed_runs(store)[0], FinishedRuns(store))


@pytest.mark.parametrize(
    ("with_decay", "said", "tone"),
    [
        ((2.0, 3.0, 4.0), "3 of 3 seeds", "good"),
        ((2.0, 0.5, 4.0), "2 of 3 seeds", "near"),
        ((0.5, 0.5, 0.5), "0 of 3 seeds", "bad"),
        ((1.01, 1.02, 0.99), "about equal", "plain"),
        ((None, 2.0, None), "yes, one seed", "plain"),
        ((None, None, 0.5), "no, one seed", "plain"),
        ((None, None, None), "no runs yet", "plain"),
    ],
)
def test_a_mechanism_is_judged_seed_by_seed(tmp_path, with_decay, said, tone):
    grid = mechanism_grid(FIRST, FIRST.quantities[0], demo(tmp_path, with_decay))
    verdict = grid.rows[0][-1]
    assert (grid.rows[0][0].text, verdict.text, verdict.tone) == ("SGD", said, tone)


def test_seeds_are_compared_with_themselves(tmp_path):
    runs = demo(tmp_path, (None, 20.0, 200.0), without=(1.0, 10.0, 100.0))
    row = mechanism_grid(FIRST, FIRST.quantities[0], runs).rows[0]
    assert [cell.text for cell in row[-2:]] == ["× 2.00", "2 of 2 seeds"]


def test_what_the_demo_has_not_got_to_is_shown_as_missing(tmp_path):
    section = demo_section(demo(tmp_path, (2.0, 2.0, 2.0)))
    charts = {block.anchor: len(block.charts) for block in section.blocks}
    assert charts["mechanism1"] == 1
    missing = {block.anchor: block.missing for block in section.blocks if block.missing}
    assert missing == {"mechanism2": "No runs yet.", "mechanism3": "No runs yet."}
