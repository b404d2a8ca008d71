"""Blocks of results on pages: every number is recomputed here from what was written."""

import json
from dataclasses import replace

import pytest
from refusals import refuses
from report.synthetic import CLOCK, write_run, write_searched
from results_pages.__main__ import main
from results_pages.blocks import BLOCKS, because, decided, refreshed
from results_pages.results import Results

from decaylab.errors import UnknownName
from decaylab.paper import cells, select
from decaylab.records import RunStore

VGG = ["dataset=cifar10", "network=vgg16", "batch_norm=1", "augment=0"]
SGD = [*VGG, "optimizer=sgd"]


def write(store, spec, accuracy, *, tier="full", **more):
    values = {"test/accuracy": accuracy, "train/accuracy": 1.0, "exposure/stage": 2.0}
    return write_run(store, spec, values, tier=tier, device="a GPU", **more)


def set_accuracy(folder, spec, epoch, accuracy):
    """The synthetic curve only rises: another value in the middle of it."""
    with folder.writing(spec.to_toml()):
        lines = (folder.path / "rows.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        for entry in entries:
            if entry.get("epoch") == epoch and "test/accuracy" in entry["values"]:
                entry["values"]["test/accuracy"] = accuracy
        (folder.path / "rows.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path)


def block(name, store):
    return BLOCKS[name](Results(store.root))


@pytest.mark.parametrize("name", BLOCKS)
def test_without_records_no_number_is_printed(name, store):
    text = block(name, store)
    if name == "rest":
        assert "`decaylab reproduce table1 --tier short` | 64 |" in text
    elif name == "runs":
        assert "In all 0 runs; GPU-minutes: 0.0." in text
    elif name == "rules":  # of no records: how they are judged
        assert [row[0] for row in rows(text)] == [f"E{n}" for n in range(1, 18)]
    else:
        assert text.startswith("*")
        assert not any(sign.isdigit() for sign in text.replace("Table 1", ""))


def test_a_table_has_a_row_for_each_tier_it_was_run_at(store):
    for tier, accuracy in (("short", 0.85), ("full", 0.86)):
        write(store, select(cells("table1", tier), SGD)[1].runs[0], accuracy, tier=tier)
    both = [row for row in rows(block("table1", store)) if row[0].startswith("CIFAR")]
    assert [row[6] for row in both if row[1] == "SGD"] == ["86.00", "85.00"]


def test_what_was_seen_is_said_of_every_tier(store):
    for tier, gain in (("short", 0.02), ("full", 0.03)):
        without, decayed = select(cells("table1", tier), SGD)
        write(store, without.runs[0], 0.9, tier=tier)
        write(store, decayed.runs[0], 0.9 + gain, tier=tier)
    assert rows(block("claims", store))[0][-2:] == ["not enough runs"] * 2
    full, short = [line for line in block("explained", store).splitlines() if "E1," in line]
    assert full.startswith("- **E1, tier full: not enough runs.** Seen: with decay against without")
    assert "+3.00 points" in full
    assert "+2.00 points" in short
    assert full.endswith("Comparisons that lack runs: 31.")


def test_runs_with_superseded_numerics_are_listed_with_what_was_wrong(store):
    chosen = [*VGG[:-1], "augment=1", "optimizer=kfac-g"]
    spec = select(cells("table1", "full"), chosen)[1].runs[0]
    assert spec.id.endswith("d5e10be0")
    folder = write(store, spec, 0.9)
    assert "There are none" in block("superseded", store)
    assert "made again" not in block("misses", store)
    folder.write_manifest(replace(folder.manifest(), commit="04df10a7291a8f5231c7"))
    (row,) = rows(block("superseded", store))
    assert row == ["The first layer's A was rounded to bfloat16", f"`{spec.id}` (full)"]
    assert "1 of the 1 was made before a fix" in block("misses", store).splitlines()[0]


def test_decay_alone_shows_runs_without_decay_as_such(store):
    chosen = ["batch_norm=1", "optimizer=sgd"]
    without, decayed = select(cells("decay-alone", "short"), chosen)
    write(store, without.runs[0], 0.8, tier="short")
    write(store, decayed.runs[0], 0.85, tier="short")
    table = Results(store.root).filled("decay-alone", "short").table
    found = {entry.decayed: entry.ours.mean for entry in table.entries if entry.ours.n}
    assert found == {False: 80.0, True: 85.0}


def test_misses_are_what_is_over_a_point_off_and_own_settings_count_when_marked(store):
    searched = write_searched(store.root)
    plain, decayed = select(cells("table1", "full", searched_folder=searched), SGD)
    adam = select(cells("table1", "full"), [*VGG, "optimizer=adam"])[0]
    write(store, plain.runs[0], 0.8650)  # the paper: 86.99
    write(store, decayed.runs[0], 0.8566)  # 88.85
    write(store, decayed.searched_runs[0], 0.8840)
    write(store, adam.runs[0], 0.8845)
    text = block("misses", store)
    assert text.startswith("2 of the 3 cells that were run at tier full are within 1 point")
    assert "1 more at those of our own search" in text
    assert "not the paper's: CIFAR-10, VGG16, BN, SGD (-0.84 points, the paper's +1.86)" in text
    (row,) = rows(text)
    assert row == [
        "CIFAR-10, VGG16, BN, SGD",
        "yes",
        "88.85",
        "85.66",
        "-3.19",
        "88.40",
        "-0.45",
        "1",
    ]


def test_a_second_seed_does_not_take_a_miss_away(store):
    """Nor makes one: the paper has one seed, and ours of the same place is compared with it."""
    plain, decayed = select(cells("table1", "full", 2), SGD)
    for cell, accuracies in ((plain, (0.8585, 0.8815)), (decayed, (0.8885, 0.8585))):
        for spec, accuracy in zip(cell.runs, accuracies, strict=True):
            write(store, spec, accuracy)  # the paper: 86.99 and 88.85
    text = block("misses", store)
    assert text.startswith("1 of the 2 cells that were run at tier full are within 1 point")
    (row,) = rows(text)
    assert row[1:5] == ["no", "86.99", "85.85", "-1.14"]
    assert row[-1] == "2: 87.00 ± 1.6"


def test_without_seed_0_a_cell_is_not_counted(store):
    write(store, select(cells("table1", "full", 2), SGD)[0].runs[1], 0.87)
    assert block("misses", store).startswith("0 of the 0 cells")


def test_the_last_and_the_best_epoch_of_first_order_decay_under_bn(store):
    cell = select(cells("table1", "full"), SGD)[1]
    set_accuracy(write(store, cell.runs[0], 0.85), cell.runs[0], 2, 0.878)
    (row,) = rows(block("first-order", store))
    assert row[2:] == ["published", "0", "0.1", "0.001", "88.85", "85.00", "87.80", "2", "100.00"]


def test_figures_in_numbers_where_all_their_runs_are(store):
    """A mean over seeds by scheme. Under SGD, L2 is weight decay: no row of Fig. 1."""
    sgd = ["network=vgg16", "optimizer=sgd"]
    *first, last = select(cells("fig2", "full", seeds=2), sgd)
    for number, cell in enumerate(first):
        write(store, cell.runs[0], 0.80 + 0.01 * number)
    assert block("fig2", store) == "*No runs yet.*\n"
    for seed, accuracy in enumerate((0.83, 0.85)):
        write(store, last.runs[seed], accuracy)
    assert rows(block("fig2", store)) == [["VGG16, SGD", "80.00", "81.00", "82.00", "84.00 ± 1.4"]]
    assert "At the paper's schedule (tier full):" in block("fig2", store)
    for cell in select(cells("fig1", "full"), [*sgd, "dataset=cifar10", "batch_norm=0"]):
        write(store, cell.runs[0], 0.8)
    assert block("fig1", store) == "*No runs yet.*\n"


def test_minutes_of_runs_that_shared_a_device_add_up_to_the_time_there_was(store):
    ended = []
    for cell in select(cells("table1", "full"), SGD):
        folder = write(store, cell.runs[0], 0.85)
        manifest = replace(folder.manifest(), at_once=4, started=CLOCK)
        with folder.writing(cell.runs[0].to_toml()):
            folder.write_manifest(manifest)
        ended.append(folder.manifest().updated)
    text = block("runs", store)
    table1 = next(row for row in rows(text) if row[1].startswith("Table 1"))
    expected = f"{(max(ended) - CLOCK) / 60:.1f}"
    assert table1[2:] == ["2 of 64 cells", "a GPU", "2", expected, "2", expected]
    again = next(row for row in rows(text) if row[1].endswith("(fig9-bn)"))
    assert again[4:7] == ["0", "0.0", "1"]  # its run is counted with Table 1
    assert f"In all 2 runs; GPU-minutes: {expected}." in text


def test_minutes_are_shared_with_searches_that_went_on_beside(store):
    """A run and a trial that began and ended together: half of the time each."""
    spec = select(cells("table1", "full"), SGD)[0].runs[0]
    trial = replace(spec, held_out=True)
    for own, of in ((store, spec), (RunStore(store.root / "searched" / "runs"), trial)):
        folder = write(own, of, 0.85)
        with folder.writing(of.to_toml()):
            folder.write_manifest(replace(folder.manifest(), at_once=2, started=CLOCK))
    minutes = {row[1].split(":")[0]: float(row[5]) for row in rows(block("runs", store))}
    half = (store.folder(spec.id).manifest().updated - CLOCK) / 120
    assert minutes["Table 1"] == pytest.approx(half, rel=1e-3)
    assert minutes["searches on held-out images"] == pytest.approx(half, rel=1e-3)


def test_runs_that_no_table_shows_are_counted_too(store):
    spec = select(cells("table1", "full"), SGD)[0].runs[0]
    write(store, spec, 0.86)
    write(store, replace(spec, lr=0.7), 0.1)
    write(RunStore(store.root / "repeats"), spec, 0.86)
    text = block("runs", store)
    found = {row[1]: row[4] for row in rows(text)}
    assert found["in no table or figure"] == "1"
    assert found["made again, without `--compiled` or in TF32"] == "1"
    assert "In all 3 runs;" in text


def test_a_run_in_no_table_beside_the_run_of_one_that_is_nearest(store):
    plain, decayed = (cell.runs[0] for cell in select(cells("table1", "full"), SGD))
    short = select(cells("table1", "short"), SGD)[1].runs[0]
    for spec, tier in ((plain, "full"), (decayed, "full"), (short, "short")):
        write(store, spec, 0.9, tier=tier)
    odd = replace(decayed, lr=0.7, momentum=0.5)  # two off `decayed`, four off `plain`
    values = {"test/accuracy": 0.85, "jacobian_norm": 12.3456, "kfac_gn_norm": 7.0}
    folder = write_run(store, odd, values, tier="full")
    set_accuracy(folder, odd.resolved(), 2, 0.878)
    wild = replace(short, weight_decay=30.0)
    write(store, wild, 0.1, tier="short", status="diverged")
    given, other = decayed.resolved(), short.resolved()
    lr, momentum, decay = given.lr, given.momentum, other.weight_decay
    assert {row[0]: row[1:] for row in rows(block("variants", store))} == {
        odd.id: [
            *(
                "full",
                decayed.id[-8:],
                f"lr 0.7 instead of {lr}; momentum 0.5 instead of {momentum}",
            ),
            *("85.00", "87.80 (epoch 2)", "12.35"),
        ],
        wild.id: [
            *("short", short.id[-8:], f"weight_decay 30.0 instead of {decay}"),
            *("diverged, epoch 3", "—", "—"),
        ],
    }


def test_a_run_in_no_table_is_compared_within_its_tier(store):
    """Adam's at the short tier is nearer, but was trained for another time."""
    full, short = (
        select(cells("table1", tier), [*VGG, "optimizer=adam"])[0].runs[0]
        for tier in ("full", "short")
    )
    sgd = select(cells("table1", "full"), SGD)[0].runs[0]
    write(store, short, 0.9, tier="short")
    odd = replace(full, lr=0.7)
    write(store, odd, 0.8)
    write(store, replace(odd, network="mlp"), 0.8, tier="smoke")  # the first one by name
    assert block("variants", store) == "*There are none.*\n"  # beside which they could stand
    write(store, sgd, 0.9)
    (row,) = rows(block("variants", store))
    assert row[:3] == [odd.id, "full", sgd.id[-8:]]
    assert "optimizer adam instead of sgd; lr 0.7 instead of" in row[3]
    assert "epochs" not in row[3]


def test_minutes_on_a_cpu_are_no_gpu_minutes(store):
    first, second = (cell.runs[0] for cell in select(cells("table1", "full"), SGD))
    write(store, first, 0.85)
    write_run(store, second, {"test/accuracy": 0.86}, tier="full", device="cpu")
    text = block("runs", store)
    table1 = next(row for row in rows(text) if row[1].startswith("Table 1"))
    assert table1[4:6] == ["2", "0.1 (on a CPU: 0.1)"]
    assert "In all 2 runs; GPU-minutes: 0.1 (on a CPU: 0.1)." in text


def test_what_is_left_is_what_has_no_finished_run(store):
    spec = select(cells("table1", "full"), SGD)[0].runs[0]
    write(store, spec, 0.85)
    left = {row[0]: row for row in rows(block("rest", store))}
    assert left["`decaylab reproduce table1 --tier full`"][1] == "63"
    assert left["`decaylab reproduce fig1 --tier full`"][3] == "18"
    assert not any("table2" in command for command in left)  # its runs are Table 1's


def test_searched_settings_by_their_held_out_accuracy(store):
    spec = replace(select(cells("table1", "short"), SGD)[1].runs[0], held_out=True)
    held = RunStore(store.root / "searched" / "runs")
    write(held, replace(spec, weight_decay=1e-4), 0.87, tier="short")
    write(held, replace(spec, weight_decay=3e-4), 0.88, tier="short")
    write(held, replace(spec, lr=30.0), 0.1, tier="short", status="diverged")
    found = rows(block("searches", store))
    tried = "lr 0.1, decay 0.0001: 87.00, 0.0003: 88.00; lr 30, decay 0.001: diverged"
    assert [row[2:] for row in found] == [["3", "lr 0.1, decay 0.0003", "88.00", "—", tried]]
    assert f"nothing has won yet: {found[0][0]}." in block("searches", store)
    won = '[winner]\nlr = 0.1\nweight_decay = 0.0003\n[search]\ntier = "short"\n'
    cell = 'dataset = "cifar10"\nnetwork = "vgg16"\nbatch_norm = 1\naugment = AUG\n'
    cell = f'[cell]\n{cell}optimizer = "sgd"\nbatch_size = 128\nscheme = "wd"\nconstant_lr = 0\n'
    for augment, ended in ((1 - spec.augment, False), (int(spec.augment), True)):
        file = store.root / "searched" / f"{augment}.toml"
        file.write_text(cell.replace("AUG", str(augment)) + won, encoding="utf-8")
        assert ("won yet" not in block("searches", store)) == ended
    (line,) = [row for row in rows(block("runs", store)) if "held-out" in row[1]]
    assert line[2:6] == ["1 cells", "a GPU", "3", f"{3 * 7.5 / 60:.1f}"]


def test_searches_at_a_constant_lr_by_their_training_loss(store):
    cell = select(cells("fig9-bn", "short"), ["network=vgg16", "optimizer=kfac-g"])[0]
    spec = replace(cell.runs[0], held_out=True)
    held = RunStore(store.root / "searched" / "runs")
    for lr, accuracy, loss in ((0.03, 0.8, 0.12), (0.01, 0.7, 1e-4), (0.003, 0.75, 5e-4)):
        values = {"test/accuracy": accuracy, "train/running_loss": loss}
        write_run(held, replace(spec, lr=lr), values, tier="short")
    found = rows(block("searches", store))
    name = "CIFAR-10, VGG16, BN, batch 640, constant lr, K-FAC-G, no decay"
    tried = "lr 0.003: 0.0005, 0.01: 0.0001, 0.03: 0.12"
    assert found == [[name, "short", "3", "lr 0.01", "70.00", "0.0001", tried]]
    cell = 'dataset = "cifar10"\nnetwork = "vgg16"\nbatch_norm = 1\naugment = 0\nconstant_lr = 1\n'
    cell = f'[cell]\n{cell}optimizer = "kfac-g"\nscheme = "none"\nbatch_size = 640\n'
    won = '[winner]\nlr = 0.01\n[search]\ntier = "short"\n'
    (store.root / "searched" / "kfac.toml").write_text(cell + won, encoding="utf-8")
    assert "on the edge" not in block("searches", store)
    assert "won yet" not in block("searches", store)
    values = {"test/accuracy": 0.7, "train/running_loss": 1e-5}
    write_run(held, replace(spec, lr=0.001), values, tier="short")
    assert f"may lie beyond it: {found[0][0]} (lr 0.001)." in block("searches", store)


def test_a_search_of_the_kl_clip_shows_it_and_the_loss_that_decided(store):
    """A pass over the training set decides where it was recorded, as in the search itself."""
    cell = select(cells("fig9", "full"), ["network=vgg16", "optimizer=kfac-g"])[0]
    spec = replace(cell.runs[0], held_out=True, lr=0.01)
    held = RunStore(store.root / "searched" / "runs")
    for lr, clip, passed in ((0.01, 1e-4, 3e-4), (0.01, 1e-3, 1e-4), (0.03, 1e-3, 2e-4)):
        values = {"test/accuracy": 0.7, "train/pass_loss": passed, "train/running_loss": 1e-5}
        write_run(held, replace(spec, lr=lr, kl_clip=clip), values, tier="full")
    ((*_, best, accuracy, loss, tried),) = rows(block("searches", store))
    assert (best, accuracy, loss) == ("lr 0.01, KL clip 0.001", "70.00", "0.0001")
    assert tried == "lr 0.01, KL clip 0.0001: 0.0003, 0.001: 0.0001; lr 0.03, KL clip 0.001: 0.0002"


def test_a_misspelt_folder_does_not_empty_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- results: misses -->\nwritten by hand\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="reslts"):
        main([str(page), "--runs", str(tmp_path / "reslts")])
    assert "written by hand" in page.read_text()


def test_a_page_without_a_block_is_no_page_up_to_date(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- results: misses -->\nnever closed\n")
    with pytest.raises(SystemExit, match="<!-- end -->"):
        main([str(page), "--runs", str(tmp_path)])


def test_the_command_writes_blocks_and_nothing_else(store, tmp_path, capsys):
    def run(*words):
        main([str(word) for word in words])
        return capsys.readouterr().out.strip()

    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: misses -->\nstale\n<!-- end -->\nafter\n")
    write(store, select(cells("table1", "full"), SGD)[0].runs[0], 0.8699)

    assert run(page, "--runs", tmp_path) == "1 changed"
    text = page.read_text()
    assert "1 of the 1 cells" in text
    assert "stale" not in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert run(page, "--runs", tmp_path) == "0 changed"
    with pytest.raises(SystemExit, match=r"nothing\.md"):
        run(tmp_path / "nothing.md", "--runs", tmp_path)
    with refuses(UnknownName, kind="block", name="nothing"):
        refreshed("<!-- results: nothing -->\n<!-- end -->", Results(tmp_path))


def test_the_report_takes_the_fullest_schedule_that_settles_a_claim(store):
    """E14 needs all cells to fit their data: one that does not contradicts it, at any schedule."""
    full, short = (cells("table1", tier) for tier in ("full", "short"))
    write(store, select(full, SGD)[0].runs[0], 0.85)
    unfit = {"test/accuracy": 0.8, "train/running_accuracy": 0.5, "exposure/stage": 2.0}
    write_run(store, select(full, [*VGG, "optimizer=adam"])[0].runs[0], unfit, tier="full")
    fit = {**unfit, "train/running_accuracy": 1.0}
    write_run(store, select(short, SGD)[0].runs[0], fit, tier="short")
    claim = decided(Results(store.root))["E14"]
    assert (claim.tier, claim.verdict) == ("full", "contradicted")
    assert "**E14**" in block("report-contradicted", store)
    assert "**E14**" not in block("report-open", store) + block("report-supported", store)
    every = [block(f"report-{name}", store) for name in ("supported", "contradicted", "open")]
    assert sum(text.count("- **E") for text in every) == 17
    assert "3 runs" in block("report-effort", store)


@pytest.mark.parametrize(
    ("verdict", "tier"),
    [("not enough runs", "short"), ("not enough schedule", "short"), ("undecided", "full")],
)
def test_what_is_undecided_with_every_run_of_a_fuller_schedule_stays_open(
    store, monkeypatch, verdict, tier
):
    for name in ("full", "short"):
        write(store, select(cells("table1", name), SGD)[0].runs[0], 0.9, tier=name)
    results = Results(store.root)
    e6 = results.claims("full")["E6"]
    full = replace(e6, n=1, verdict=verdict)
    short = replace(e6, n=1, verdict="supported", tier="short")
    judged = {name: {**results.claims(name)} for name in ("full", "short")}
    judged["full"]["E6"], judged["short"]["E6"] = full, short
    monkeypatch.setattr(results, "claims", judged.__getitem__)
    assert decided(results)["E6"].tier == tier


def test_a_cause_is_said_only_of_the_part_it_explains(store):
    """E8 of VGG16: not where ResNet32 contradicts it, too, or instead."""
    judged = Results(store.root).claims("full")["E8"]
    for parts, explained in ((["vgg16"], True), (["resnet32"], False), ([*"ab"], False)):
        claim = replace(judged, verdict="contradicted", parts=dict.fromkeys(parts, "contradicted"))
        assert ("under SGD without decay" in because(claim)) == explained


def test_the_line_of_a_readme_counts_every_claim_once(store, monkeypatch):
    """And names the part of a claim that is contradicted in some of its parts."""
    write(store, select(cells("table1", "full"), SGD)[0].runs[0], 0.9)
    results = Results(store.root)
    judged = {
        name: replace(claim, verdict="supported" if name == "E3" else "not enough runs")
        for name, claim in results.claims("full").items()
    }
    parts = {"with decay": "supported", "without decay": "contradicted"}
    judged["E10"] = replace(judged["E10"], verdict="contradicted", parts=parts)
    monkeypatch.setattr(results, "claims", lambda tier: judged)
    line = BLOCKS["summary"](results)
    assert "1 is supported (E3), 1 is contradicted (E10: without decay), 15 are open (E1, " in line
