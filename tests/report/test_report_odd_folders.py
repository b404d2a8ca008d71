"""Folders as they become in use: renamed, mixed, half lost, with seeds that are dates."""

from dataclasses import replace

from refusals import refuses
from report.synthetic import everything, write_run
from results_pages.blocks import BLOCKS
from results_pages.results import Results

from decaylab.cli.demo import demo_specs
from decaylab.errors import Damaged
from decaylab.paper import FinishedRuns, cells
from decaylab.records import RunStore
from decaylab.report.diagnoses import diagnosed
from decaylab.report.mechanisms import TIER, demo_runs, demo_section
from decaylab.sweeps.run_index import indexed_runs
from decaylab.training import RunSpec


def block(name, root):
    return BLOCKS[name](Results(root))


def test_what_is_left_does_not_depend_on_the_seeds_that_were_run(tmp_path):
    """`reproduce` makes seed 0, for the sources of a norm transfer too."""
    spec = cells("table1", "full", 3)[0].runs[2]
    write_run(RunStore(tmp_path / "third seed"), spec, everything(1), tier="full")
    assert block("rest", tmp_path / "third seed") == block("rest", tmp_path / "nothing")


def test_a_seed_that_is_a_date_is_no_count_of_seeds(tmp_path):
    spec = replace(cells("table1", "full")[0].runs[0], seed=20240101)
    write_run(RunStore(tmp_path), spec, everything(1), tier="full")
    assert Results(tmp_path).seeds == 10


def test_a_finished_run_whose_rows_are_lost_has_no_best_epoch(tmp_path):
    cell = next(c for c in cells("table1", "full") if c.key["batch_norm"] and c.key["weight_decay"])
    folder = write_run(RunStore(tmp_path), cell.runs[0], everything(1), tier="full")
    (folder.path / "rows.jsonl").unlink()
    assert block("first-order", tmp_path).startswith("*")


def test_a_damaged_file_of_the_independent_script_is_named(tmp_path):
    (tmp_path / "independent").mkdir()
    (tmp_path / "independent" / "sgd.json").write_text('[{"opt')
    with refuses(Damaged, what=tmp_path / "independent" / "sgd.json"):
        Results(tmp_path)


def test_renamed_runs_are_diagnosed_against_each_other(tmp_path):
    store = RunStore(tmp_path)
    plain = RunSpec(hidden=(8,), batch_norm=True, epochs=3)
    for name, spec in {
        "my baseline": plain,
        "my run": replace(plain, decay="l2", weight_decay=1.0),
    }.items():
        write_run(store, spec, {"norm/features.0": 1.0}, tier="custom").path.rename(tmp_path / name)
    (case,), left_out = diagnosed(indexed_runs(store)[0])
    assert (case.diagnoses[0].runs, case.diagnoses[0].baselines) == (("my run",), ("my baseline",))
    assert not left_out


def test_demos_of_two_lengths_are_not_averaged(tmp_path):
    store = RunStore(tmp_path)
    for epochs, accuracy in ((2, 0.1), (50, 0.9)):
        spec = demo_specs(epochs=epochs)[0]
        write_run(store, spec, {"test/accuracy": accuracy}, tier=TIER)
    section = demo_section(demo_runs(indexed_runs(store)[0], FinishedRuns(store)))
    assert section.blocks[0].grids[0].rows[0][2].text == "90.00"
    assert ", 50 epochs, one seed" in section.text[0]


def test_a_run_of_ones_own_under_the_demos_label_does_not_stop_the_report(tmp_path):
    store = RunStore(tmp_path)
    spec = replace(demo_specs()[0], decay="independent", weight_decay=1e-4)
    write_run(store, spec, {"test/accuracy": 0.5}, tier=TIER)
    assert demo_runs(indexed_runs(store)[0], FinishedRuns(store)) == {}
