"""A second, marked value from our own search beside the published settings' one (issue 8)."""

import pytest
from report.synthetic import write_run, write_searched

from decaylab.paper import FinishedRuns, artefact_of, artefacts, cells, select
from decaylab.paper.evidence import Bench
from decaylab.paper.plan import plan
from decaylab.records import RunStore
from decaylab.report.sections import fill, tables_section
from decaylab.report.tables import legend, to_grid

CONDITIONS = ["dataset=cifar10", "network=vgg16", "batch_norm=1", "augment=0", "optimizer=sgd"]


def of(name, folder, tier="short", seeds=1):
    return select(cells(name, tier, seeds, searched_folder=folder), CONDITIONS)


def test_the_published_runs_stay_and_ours_are_added(tmp_path):
    plain, decayed = of("table1", write_searched(tmp_path), seeds=2)
    before = of("table1", None, seeds=2)
    assert [cell.runs for cell in (plain, decayed)] == [cell.runs for cell in before]
    assert plain.searched_runs == ()
    assert [(run.lr, run.weight_decay, run.seed) for run in decayed.searched_runs] == [
        (0.03, 3e-4, 0),
        (0.03, 3e-4, 1),
    ]
    assert {run.held_out for run in decayed.searched_runs} == {False}
    assert decayed.searched_runs[0].epochs == decayed.runs[0].epochs


def test_a_search_at_tier_short_serves_tier_full(tmp_path):
    _, decayed = of("table1", write_searched(tmp_path), tier="full")
    assert [run.epochs for run in decayed.searched_runs] == [200]


def test_a_winner_that_is_the_published_one_needs_no_second_value(tmp_path):
    _, decayed = of("table1", write_searched(tmp_path, lr=0.1, weight_decay=1e-3))
    assert decayed.searched_runs == ()


@pytest.mark.parametrize(
    ("tier", "dataset", "having"),
    [
        ("short", "cifar10", {"table1"}),
        ("quick", "digits", {"table1", "table3"}),
        ("smoke", "cifar10", set()),
    ],
)
def test_only_tables_of_accuracies_have_it(tmp_path, tier, dataset, having):
    folder = write_searched(tmp_path, tier=tier, dataset=dataset)
    found = {
        name
        for name in artefacts()
        for c in cells(name, tier, searched_folder=folder)
        if c.searched_runs
    }
    assert found == having


def test_on_digits_all_that_are_one_run_have_it_and_the_legend_says_whose_settings(tmp_path):
    folder = write_searched(tmp_path, tier="quick", dataset="digits")
    store, found = RunStore(tmp_path), cells("table1", "quick", searched_folder=folder)
    having = [cell for cell in found if cell.searched_runs]
    assert {cell.key["dataset"] for cell in having} == {"cifar10", "cifar100"}
    assert {cell.key["augment"] for cell in having} == {0, 1}
    assert len({cell.searched_runs[0].id for cell in having}) == 1
    for spec, accuracy in ((having[0].runs[0], 0.86), (having[0].searched_runs[0], 0.89)):
        write_run(store, spec, {"test/accuracy": accuracy}, tier="quick")
    table = fill(artefact_of("table1"), "quick", FinishedRuns(store), 1).table
    texts = [cell.text for row in to_grid(table).rows for cell in row]
    assert texts.count("86.00, ‡ 89.00") == len(having)
    assert "differ from those chosen for digits" in legend(table)
    assert legend(table).count("VGG16 BN SGD with decay: lr 0.03 instead of") == 1


@pytest.mark.parametrize(("tried", "on_edge"), [((1e-9, 1e9), False), ((1e-3, 1e-2), True)])
def test_the_legend_says_where_a_search_ended_on_the_edge(tmp_path, tried, on_edge):
    _, decayed = of("table1", write_searched(tmp_path, tried=tried))
    store = RunStore(tmp_path)
    for spec in (*decayed.runs, *decayed.searched_runs):
        write_run(store, spec, {"test/accuracy": 0.9}, tier="short")
    said = legend(fill(artefact_of("table1"), "short", FinishedRuns(store), 1).table)
    assert "decay 0.0003 instead of 0.001" in said
    assert ("on the edge of what was tried: decay (" in said) is on_edge
    assert ("edge" in said) is on_edge


def test_reproduce_makes_both(tmp_path):
    chosen = of("table1", write_searched(tmp_path))
    assert len(plan(chosen)) == 3
    assert plan(chosen)[-1].spec == chosen[1].searched_runs[0]
    assert len(plan(of("table1", None))) == 2


def test_the_table_shows_both_and_claims_go_by_the_published_settings(tmp_path):
    folder = write_searched(tmp_path)
    plain, decayed = of("table1", folder)
    store = RunStore(tmp_path)
    for spec, accuracy in (
        (plain.runs[0], 0.87),
        (decayed.runs[0], 0.86),
        (decayed.searched_runs[0], 0.89),
    ):
        write_run(store, spec, {"test/accuracy": accuracy, "exposure/stage": 2.0}, tier="short")
    finished_runs = FinishedRuns(store)
    filled = fill(artefact_of("table1"), "short", finished_runs, 1)
    texts = [[cell.text for cell in row] for row in to_grid(filled.table).rows]
    assert [row[6] for row in texts if "‡" in row[6]] == ["86.00, ‡ 89.00"]
    block = tables_section([filled], finished_runs, "short").blocks[0]
    assert "lr 0.03 instead of 0.1, decay 0.0003 instead of 0.001" in " ".join(block.text)
    sample = Bench(finished_runs, "short", 1, folder).sample(decayed)
    assert sample.values == {0: pytest.approx(0.86)}
