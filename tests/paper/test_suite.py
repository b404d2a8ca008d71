import math
from dataclasses import replace

import pytest
from refusals import refuses

from decaylab.errors import BadValue, Damaged, Lacks, Misplaced, UnknownName
from decaylab.networks import NETWORKS
from decaylab.paper import TIERS, artefacts, cells, register_artefact, select
from decaylab.paper.pace import pace_spec
from decaylab.paper.plan import plan
from decaylab.paper.settings import searched, table
from decaylab.paper.suite import spec_for

OURS = {
    "decay-alone",
    "jacobian-alone",
    "jacobian-lr",
    "fig9-bn",
    "fig9-pace",
    "bursts",
    "adam-precision",
}
PAPER = {"table1", "table2", "table3", *(f"fig{n}" for n in range(1, 10))}


def all_cells(tier, seeds=1, folder=None):
    return [c for name in artefacts() for c in cells(name, tier, seeds, searched_folder=folder)]


def the_cell(artefact, tier="full", **key):
    conditions = [f"{name}={value}" for name, value in key.items()]
    (cell,) = select(cells(artefact, tier), conditions)
    return cell


def run_ids(artefact, tier="short"):
    return {run.id for cell in cells(artefact, tier) for run in cell.runs}


def test_every_table_and_figure_of_the_paper_is_there_and_says_what_it_shows():
    assert set(artefacts()) == PAPER | OURS
    assert next(iter(artefacts())) == "table1"
    for artefact in artefacts().values():
        assert artefact.shows.endswith(".")
        keys = [tuple(cell.key.items()) for cell in cells(artefact.name, "short")]
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["table1", "table2", "table3"])
def test_each_number_of_the_papers_tables_belongs_to_one_cell(name):
    numbers = sorted(float(list(row.values())[-1]) for row in table(f"reference/{name}.csv"))
    assert sorted(cell.paper for cell in cells(name, "full")) == numbers


def test_the_published_settings_reach_the_specs():
    rows = table("reference/table1-hyperparameters.csv")
    assert len(rows) == len(cells("table1", "full")) == 64
    for row in rows:
        names = ("dataset", "network", "batch_norm", "augment", "optimizer")
        key = {name: row[name] for name in names} | {"weight_decay": row["weight_decay_on"]}
        (spec,) = the_cell("table1", **key).runs
        assert spec.lr == float(row["learning_rate"])
        assert spec.weight_decay == float(row["weight_decay"])
        assert spec.damping == (float(row["damping"]) if row["damping"] else None)
        assert (spec.kl_clip or 0.0) == float(row["kl_clip"] or 0.0)
        kfac = spec.optimizer.startswith("kfac")
        assert (spec.epochs, spec.lr_drop_every) == ((100, 40) if kfac else (200, 60))
        decay = "none" if row["weight_decay_on"] == "0" else "l2" if not kfac else "decoupled"
        assert spec.decay == (
            "decoupled" if spec.optimizer == "adam" and decay != "none" else decay
        )
        assert spec.curvature_scale == {"kfac-f": 1.0, "kfac-g": 2.0}.get(spec.optimizer)
        assert (spec.precision, spec.batch_size, spec.width) == ("bf16", 128, 1.0)
        assert spec.augment == (row["augment"] == "1")


def test_short_is_a_fifth_of_the_schedule_and_nothing_else():
    for short, full in zip(all_cells("short"), all_cells("full"), strict=True):
        if "epochs" in short.columns:  # the same few at every tier
            assert short.runs == full.runs
            continue
        for one, other in zip(short.runs, full.runs, strict=True):
            assert (one.epochs, one.lr_drop_every) == (other.epochs // 5, other.lr_drop_every // 5)
            assert one.lr_drop_steps == other.lr_drop_steps // 5
            fixed = {"epochs": 1, "lr_drop_every": 1, "lr_drop_steps": 0, "norm_source": ""}
            assert replace(one, **fixed) == replace(other, **fixed)


def test_large_batches_scale_lr_by_the_root_and_sgd_drops_later():
    for optimizer in ("sgd", "kfac-f"):
        key = {"dataset": "cifar10", "network": "vgg16", "optimizer": optimizer, "weight_decay": 1}
        small, large = (the_cell("table3", **key, batch_size=size).runs[0] for size in (128, 2000))
        assert large.lr == pytest.approx(small.lr * math.sqrt(2000 / 128), rel=1e-2)
        assert large.batch_size == 2000
        assert large.lr_drop_every == (80 if optimizer == "sgd" else 40)
    (constant,) = the_cell("fig9", network="vgg16", optimizer="kfac-g").runs
    assert (constant.batch_size, constant.lr_drop_every) == (640, constant.epochs)


def test_the_same_run_serves_every_artefact():
    table1 = run_ids("table1")
    assert run_ids("table2") <= table1
    assert run_ids("fig3") <= table1
    assert run_ids("fig7") <= table1
    planned = plan(all_cells("short"))
    assert len({run.spec.id for run in planned}) == len(planned)
    vgg = the_cell(
        "table1", "short", dataset="cifar10", network="vgg16", batch_norm=0, optimizer="sgd",
        weight_decay=0,
    )  # fmt: skip
    (shared,) = [run for run in planned if run.spec.id == vgg.runs[0].id]
    served = {"table1", "table2", "fig5", "fig9", "fig1", "fig8"}
    assert set(shared.purposes) == served | {"decay-alone", "jacobian-alone", "jacobian-lr"}
    probes = {"effective_lr", "damping", "jacobian", "kfac_gn"}  # the union
    assert set(shared.probes) == probes | {"jacobian_course", "train_pass"}


def test_pairs_stand_together_first_seeds_first_and_sources_before_their_dependents():
    planned = [run.spec for run in plan(all_cells("short", seeds=2))]
    assert [spec.seed for spec in planned] == sorted(spec.seed for spec in planned)
    first, second = planned[:2]
    assert (first.network, first.decay, second.decay) == ("vgg16", "none", "l2")
    position = {spec.id: n for n, spec in enumerate(planned)}
    dependents = [spec for spec in planned if spec.norm_source]
    assert len(dependents) == 8
    assert all(position[spec.norm_source] < position[spec.id] for spec in dependents)


def test_norm_transfer_takes_over_from_the_run_with_decay_of_the_same_seed():
    key = {"network": "resnet32", "optimizer": "sgd"}
    for seed in (0, 1):
        found = {c.key["scheme"]: c.runs[seed] for c in select(
            cells("fig4", "short", 2), [f"{k}={v}" for k, v in key.items()])}  # fmt: skip
        assert found["wn-conv"].norm_source == found["wd"].id
        assert found["wn-conv"].decay == "none"
        assert found["wd-fc+wn-conv"].norm_source == found["wd"].id
        assert found["wd-fc+wn-conv"].decay_scope == "fc"
    alone = select(cells("fig4", "short"), ["scheme=wn-conv", "network=vgg16"])
    assert [bool(run.spec.norm_source) for run in plan(alone)] == [False, True]


def test_digits_tiers_are_narrow_and_need_no_search_of_the_users():
    for tier in ("smoke", "quick"):
        found = all_cells(tier)
        assert not [cell.missing for cell in found if cell.missing]
        for spec in (run for cell in found for run in cell.runs):
            assert (spec.data, spec.width, spec.precision) == ("digits", 0.125, "fp32")
            assert spec.network in NETWORKS
            assert not spec.augment


def test_l2_of_adam_and_kfac_waits_for_its_search_and_sgds_is_its_weight_decay(tmp_path):
    key = {"dataset": "cifar10", "network": "vgg16", "batch_norm": 0, "augment": 0}
    adam = the_cell("fig1", **key, optimizer="adam", scheme="l2")
    if not table_has_search(key):
        assert not adam.runs
        assert "decaylab search dataset=cifar10 network=vgg16" in adam.missing
    sgd = the_cell("fig1", **key, optimizer="sgd", scheme="l2")
    assert sgd.runs == the_cell("fig1", **key, optimizer="sgd", scheme="wd").runs
    (tmp_path / "found.toml").write_text(
        '[cell]\ndataset = "cifar10"\nnetwork = "vgg16"\nbatch_norm = 0\naugment = 0\n'
        'optimizer = "adam"\nscheme = "l2"\nbatch_size = 128\n'
        "[winner]\nlr = 0.00017\nweight_decay = 0.00031\n[search]\ntier = 'short'\n"
    )
    for tier in ("short", "full"):
        conditions = [f"{k}={v}" for k, v in (key | {"optimizer": "adam", "scheme": "l2"}).items()]
        (cell,) = select(cells("fig1", tier, searched_folder=tmp_path), conditions)
        (spec,) = cell.runs
        assert (spec.decay, spec.lr, spec.weight_decay) == ("l2", 0.00017, 0.00031)
        assert "found.toml" in cell.note


def table_has_search(key):
    return searched(key | {"optimizer": "adam"}, "l2", ("full", "short")) is not None


def test_what_is_not_known_is_refused_with_what_is(tmp_path):
    with refuses(UnknownName, kind="artefact", name="table4"):
        cells("table4", "smoke")
    with refuses(UnknownName, kind="tier", name="tiny"):
        cells("table1", "tiny")
    with refuses(UnknownName, name="net"):
        select(cells("table1", "smoke"), ["net=vgg16"])
    with refuses(UnknownName, name="dataset", choices=("network", "optimizer", "scheme")):
        select(cells("fig4", "smoke"), ["dataset=cifar100"])
    with refuses(UnknownName, name="vgg99", choices=("resnet32", "vgg16")):
        select(cells("table1", "smoke"), ["network=vgg99"])
    (tmp_path / "odd.toml").write_text("winner = 3\n")
    with refuses(Damaged, what=str(tmp_path / "odd.toml")):
        cells("fig1", "short", searched_folder=tmp_path)


OWN = """title = "Own"
shows = "What the paper does not."
kind = "table"
keys = ["optimizer", "scheme"]
metric = "test/accuracy"
percent = true
probes = ["jacobian"]
[[cells]]
dataset = "cifar10"
network = "vgg16"
batch_norm = 0
augment = 0
optimizer = "sgd"
scheme = ["none", "wd"]
"""


@pytest.mark.parametrize(
    ("given", "instead", "kind", "fields"),
    [
        ('"table"', '"tables"', UnknownName, {"kind": "kind", "name": "tables"}),
        ('"table"', '"scatter"', Misplaced, {"settings": ["kind scatter"], "owner": "fig5"}),
        ('"jacobian"', '"jacobians"', UnknownName, {"kind": "probe", "name": "jacobians"}),
        ("scheme =", "sheme =", UnknownName, {"kind": "column", "name": "sheme"}),
        ('"scheme"]', '"sheme"]', UnknownName, {"kind": "key without a column", "name": "sheme"}),
        ("augment = 0\n", "", Lacks, {"owner": "a block of [[cells]]", "what": "augment"}),
        ('"wd"]', '"weight-decay"]', UnknownName, {"kind": "scheme", "name": "weight-decay"}),
        ("augment = 0", "augment = 0\nbatch_size = 256", UnknownName, {"name": 256}),
    ],
)
def test_an_artefact_of_ones_own_with_a_slip_in_it_is_refused(
    tmp_path, given, instead, kind, fields
):
    path = tmp_path / "of-ones-own.toml"
    path.write_text(OWN.replace(given, instead))
    with refuses(kind, **fields):
        cells(register_artefact(path).name, "smoke")
    artefacts().pop("of-ones-own", None)


def test_the_search_that_a_large_batch_needs_is_said_to_be_of_that_batch(tmp_path):
    path = tmp_path / "of-ones-own.toml"
    text = OWN.replace('"sgd"', '"adam"').replace('["none", "wd"]', '"l2"\nbatch_size = 640')
    path.write_text(text)
    (cell,) = cells(register_artefact(path).name, "short")
    artefacts().pop("of-ones-own")
    assert "optimizer=adam batch_size=640 --tier short" in cell.missing


def test_batches_are_whole_numbers():
    key = {"dataset": "cifar10", "network": "vgg16", "batch_norm": 0, "augment": 0}
    for size in ("abc", 0):
        with refuses(BadValue, name="batch_size", value=size):
            spec_for({**key, "optimizer": "sgd", "batch_size": size}, "wd", "full")


def test_decay_alone_differs_by_the_decay_alone():
    pairs: dict[str, list] = {}
    for cell in cells("decay-alone", "full"):
        pairs.setdefault(f"{cell.key['batch_norm']} {cell.key['optimizer']}", []).append(*cell.runs)
    assert len(pairs) == 8
    for without, decayed in pairs.values():
        kind, strength = decayed.decay, decayed.weight_decay
        assert strength > 0
        assert replace(without, decay=kind, weight_decay=strength) == decayed
        assert decayed.id in run_ids("table1", "full")


def test_the_authors_loop_is_three_fields_of_the_cell_of_table_1():
    ours, other_eps, authors = (cell.runs[0] for cell in cells("bursts", "full"))
    key = {"dataset": "cifar10", "network": "vgg16", "batch_norm": 1, "augment": 0}
    table1 = the_cell("table1", **key, optimizer="kfac-f", weight_decay=1).runs[0]
    assert ours == table1
    assert other_eps == replace(table1, batch_norm_eps=1e-5)
    loop = {"keep_last_batch": True, "lr_drop_steps": 16000, "late_refresh": True}
    assert authors == replace(table1, **loop)
    assert cells("bursts", "short")[2].runs[0].lr_drop_steps == 3200


def test_learning_rates_and_precisions_of_an_artefact_replace_the_published_ones():
    found = {tuple(cell.key.values()): cell.runs[0] for cell in cells("jacobian-lr", "full")}
    published = found["bf16", 0.03]
    key = {"network": "vgg16", "optimizer": "sgd", "weight_decay": 0}
    assert published == the_cell("table2", **key).runs[0]
    assert found["bf16", 0.003] == replace(published, lr=0.003)
    assert found["fp32", 0.03] == replace(published, precision="fp32")


def test_a_pace_is_that_of_the_first_epochs_of_figure_9():
    for tier in ("smoke", "short", "full"):
        runs = [cell.runs[0] for cell in cells("fig9", tier)]
        assert [pace_spec(run) for run in runs] == [c.runs[0] for c in cells("fig9-pace", tier)]


def test_a_tier_that_is_replaced_has_cells_of_its_own(monkeypatch):
    before = cells("table1", "smoke")[0].runs[0]
    smaller = {papers: ours // 2 for papers, ours in TIERS["smoke"].batches.items()}
    monkeypatch.setitem(TIERS, "smoke", replace(TIERS["smoke"], batches=smaller))
    assert cells("table1", "smoke")[0].runs[0].batch_size == before.batch_size // 2
