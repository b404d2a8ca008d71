"""The pages' numbers are those of the records; where there are none the pages say so."""

import importlib.util
import json
import math
import re
from dataclasses import replace

import pytest
from documented import ROOT
from PIL import Image
from refusals import refuses
from report.synthetic import everything, write_run

from decaylab.cli.demo import demo_specs
from decaylab.diagnosis import diagnose
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.runs import read_run
from decaylab.errors import UnknownName
from decaylab.paper import cells, select
from decaylab.records import RunStore


def loaded(name):
    """A module of docs/, which is no package: mkdocs loads it by its path too."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = loaded("from_records")
picture = loaded("picture")


def accuracy(store, cell, value, seed=0, exposure=2.0, tier="short", **more):
    tests = {**everything(seed), "test/accuracy": value, "exposure/stage": exposure, **more}
    write_run(store, cell.runs[seed], tests, tier=tier, device="test device")


def asking(name):
    return f"<!-- records: {name} -->\n<!-- end -->"


def asked_for():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    return {name for text in texts for name in pages.BLOCK.findall(text)}


def test_pages_ask_for_all_the_blocks_that_there_are():
    assert asked_for() == set(pages.BLOCKS)
    with refuses(UnknownName, kind="block", name="nothing"):
        pages.filled_in(asking("nothing"), None)


def test_the_pages_of_the_repository_have_the_text_of_their_blocks(tmp_path):
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert text.count("<!-- records: ") == len(pages.BLOCK.findall(text))
        for match in pages.BLOCK.finditer(text):
            assert match[0].count("\n") > 2, f"{path.name}, {match[1]}: run make results-pages"
    records = pages.Records(tmp_path)
    page = f"Before.\n{asking('table2')}\nAfter.\n"
    once = pages.written(page, records)
    assert pages.BLOCKS["table2"](records).strip() in once
    assert pages.written(once, records) == once
    assert pages.filled_in(once, records) == pages.filled_in(page, records)
    assert (once[:8], once[-7:]) == ("Before.\n", "After.\n")


@pytest.mark.parametrize("name", pages.BLOCKS)
def test_without_records_a_block_says_so(name, tmp_path):
    text = pages.BLOCKS[name](pages.Records(tmp_path))
    assert "not run yet" in text.lower()
    assert not re.search(r"\d\.\d", text)
    assert pages.figures(pages.Records(tmp_path))[0].markdown == ""


def test_what_is_left_is_what_the_queue_has_and_the_records_have_not(tmp_path):
    writes = {"A: a": "results/attribution/a", "A: b": "results/attribution/b", "c": "c"}
    entries = [
        f'[[entry]]\nname = "{name}"\ncommand = ["true"]\nminutes = 1\nwrites = "{path}.json"'
        for name, path in writes.items()
    ]
    (tmp_path / "queue.toml").write_text("\n".join(entries))
    assert ", not run yet: a, b." in pages.attributions(pages.Records(tmp_path))
    (tmp_path / "attribution").mkdir()
    record = next((ROOT / "results" / "attribution").glob("*.json"))
    (tmp_path / "attribution" / "a.json").write_text(record.read_text())
    assert ", not run yet: b." in pages.attributions(pages.Records(tmp_path))
    (tmp_path / "attribution" / "b.json").write_text(record.read_text())
    assert "not run yet" not in pages.attributions(pages.Records(tmp_path))


def test_gains_are_differences_of_recorded_accuracies(tmp_path):
    store = RunStore(tmp_path)
    none, conv, fc, everywhere = cells("fig2", "short")[:4]
    assert [c.key["scheme"] for c in (none, conv, fc)] == ["baseline", "wd-conv", "wd-fc"]
    accuracy(store, none, 0.50)
    accuracy(store, conv, 0.56)
    accuracy(store, fc, 0.505, exposure=0.5)
    accuracy(store, cells("fig2", "short", seeds=2)[2], 0.505, seed=1, exposure=0.5)
    text = pages.gains(pages.Records(tmp_path), "fig2")
    (row,) = [line for line in text.splitlines() if line.startswith("| VGG16 | SGD")]
    found = [part.strip() for part in row.strip("|").split("|")]
    assert found[2] == "50.00"
    noise = 100 * ((0.5 * 0.5 + 0.56 * 0.44) / 10_000) ** 0.5  # of two test sets' sampling
    assert found[3] == f"**+6.00 ± {noise:.2f}**"  # beyond twice the noise
    assert found[4].startswith("+0.50 ± ")
    assert found[4].endswith("†")  # too little decay to tell
    assert found[5] == "not run yet"
    assert found[-1] == "1 and 2"
    assert everywhere.key["scheme"] == "wd-all"
    assert "test device" in text
    assert "1 of 4 rows have been run, some in part." in text


@pytest.mark.parametrize("also", [False, True])
def test_a_row_is_shown_at_its_longest_schedule_and_where_a_shorter_one_has_more(tmp_path, also):
    store = RunStore(tmp_path)
    for tier, values in {"full": (0.6, 0.62), "short": (0.5, 0.56, 0.57)[: 2 + also]}.items():
        for cell, value in zip(cells("fig2", tier), values, strict=False):
            accuracy(store, cell, value, tier=tier)
    text = pages.gains(pages.Records(tmp_path), "fig2")
    assert [row.split(" | ")[2] for row in text.splitlines() if row.startswith("| VGG16")] == (
        ["60.00", "50.00"] if also else ["60.00"]
    )


@pytest.mark.parametrize("also", [False, True])
def test_so_are_its_curves_and_its_verdict(tmp_path, also):
    store = RunStore(tmp_path)
    for tier in ("full", "short"):
        row = [c for c in cells("table1", tier) if c.key["batch_norm"]][:2]
        accuracy(store, row[1], 0.9, tier=tier)
        if tier == "short" and also:
            accuracy(store, row[0], 0.9, tier=tier)
    records = pages.Records(tmp_path)
    name = "SGD: CIFAR-10, VGG16, BN"
    titles = [panel.title for panel in pages.effective_lr_figure(records).panels]
    assert titles == [f"{name} (full)", f"{name} (short)"][: 1 + also]
    (verdict,) = [line for line in pages.verdicts(records).splitlines() if "VGG16" in line]
    assert verdict.endswith("| full |")


def test_seeds_are_found_however_many_there_are(tmp_path):
    store = RunStore(tmp_path)
    without, decayed = cells("table1", "short", 3)[:2]
    for seed, value in enumerate((0.80, 0.81, 0.82)):
        accuracy(store, without, value, seed)
        accuracy(store, decayed, value + 0.02, seed)
    text = pages.gains(pages.Records(tmp_path), "table1")
    assert "| 81.00 ± 1 |" in text
    error = (1 / 3 + 1 / 3) ** 0.5  # seeds of a run with and one without decay are not alike
    assert f"| +2.00 ± {error:.2f} |" in text  # 2.4 errors, with four degrees of freedom
    assert "| 3 |" in text


def test_what_schedules_do_is_what_the_benchmark_printed(tmp_path):
    about = {"seeds": 2, "steps": 40, "device": "test device"}
    about |= {"date": "today", "torch": "1", "version": "0"}
    row = {"run": "SGD", "decay a step": 0.002, "layers": 6, "lr/|W|": [0.951, 1.234]}
    text = json.dumps({"about": about, "kfac": [row]})
    (tmp_path / "schedules.json").write_text(text, encoding="utf-8")
    found = pages.filled_in(asking("schedules-kfac"), pages.Records(tmp_path))
    assert "| run | decay a step | layers | lr/\\|W\\| |\n" in found
    assert "| SGD | 0.002 | 6 | 0.95 to 1.23 |\n" in found
    assert "2 seeds, 40 steps; test device, today" in found


def test_bursts_by_setting(tmp_path):
    assert "python benchmarks/bursts.py" in pages.bursts(pages.Records(tmp_path))
    about = {"seeds": 2, "epochs": 4, "device": "test device"}
    about |= {"date": "today", "torch": "1", "version": "0"}
    burst = {"epoch": 3, "before": 2.0}
    runs = [
        {"setting": "fixed damping", "seed": 0, "bursts": [burst, burst | {"before": 1.5}]},
        {"setting": "fixed damping", "seed": 1, "bursts": [burst]},
        {"setting": "scale-free damping", "seed": 0, "bursts": []},
    ]
    runs = [{**run, "norm": [3.0, 2.0, 4.0, 3.5], "test accuracy": 0.975} for run in runs]
    text = json.dumps({"about": about, "runs": runs})
    (tmp_path / "bursts.json").write_text(text, encoding="utf-8")
    found = pages.bursts(pages.Records(tmp_path))
    assert "| fixed damping | 2, 1 | 1.50 to 2.00 | 3.50 to 3.50 | 97.50 to 97.50 |" in found
    assert "| scale-free damping | 0 | — | 3.50 to 3.50 | 97.50 to 97.50 |" in found
    assert "figures/bursts-0.png" in found
    assert "2 seeds, 4 epochs; test device, today" in found
    (panel,) = pages.bursts_figure(pages.Records(tmp_path)).panels
    assert [(line.label, line.y) for line in panel.marks] == [
        ("fixed damping", [3.0, 2.0, 4.0, 3.5]),
        ("scale-free damping", [3.0, 2.0, 4.0, 3.5]),
    ]


def test_figures_are_drawn_for_what_there_is(tmp_path):
    store = RunStore(tmp_path)
    cell = next(c for c in cells("table1", "short") if c.key["batch_norm"])
    accuracy(store, cell, 0.9)
    records = pages.Records(tmp_path)
    figure = pages.effective_lr_figure(records)
    ((path, panel),) = figure.files()
    assert path == "figures/effective-lr-0.png"
    assert panel.title == "SGD: CIFAR-10, VGG16, BN (short)"
    (line,) = panel.marks
    assert line.y[-1] == pytest.approx(everything(0)["effective_lr/features.0"])
    assert path in pages.filled_in(asking("effective-lr"), records)


def test_the_demos_records_are_those_of_the_demo():
    """The settings of `decaylab demo` and results/demo are the same; else make the latter anew."""
    store = RunStore(pages.RESULTS / "demo")
    assert {spec.id for spec in demo_specs(seeds=3)} == {folder.id for folder in store.runs()}


def test_links_out_of_the_pages_become_words():
    text = pages.filled_in("See [the records](../results/README.md), [here](choose.md).", None)
    assert text == "See the records (`results/README.md` in the repository), [here](choose.md)."


def test_nothing_is_fetched():
    class Page:
        class file:  # noqa: N801 - as mkdocs has it
            src_uri = "page.md"

    fine = '<a href="https://example.org">x</a><img src="figures/x.png"><script src="a.js">'
    assert pages.on_post_page(fine, page=Page) == fine
    for tag in ('<script src="https://x/y.js">', "<link rel=stylesheet href=https://x/y.css>"):
        with pytest.raises(pages.DecaylabError, match=r"page.md would fetch"):
            pages.on_post_page(fine + tag, page=Page)


def test_docstrings_as_markdown():
    pytest.importorskip("griffe")
    text = "Shapes [N, C] [C].\n\n>>> 1 + 1\n2\n\nMore.\n\n    x = [a] [b]"
    markdown = loaded("docstrings").as_markdown(text)
    assert "[N, C] \\[C]" in markdown
    assert "```pycon\n>>> 1 + 1\n2\n```\n" in markdown
    assert markdown.index("More.") > markdown.index("```\n")


def test_one_run_tells_nearly_what_two_tell():
    """The factors that docs/diagnosis.md shows side by side, from the records that there are.

    Within 20 % of their logarithm: the more decay has changed a run, the less its gradients, which
    the reconstruction goes by, are those of the baseline.
    """
    text = pages.reconstructed(pages.Records())
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    assert rows
    for _, optimizer, exposure, alone, against, _ in rows:
        assert math.log(float(alone)) == pytest.approx(math.log(float(against)), rel=0.2)
        if optimizer == "SGD" and float(exposure) >= RULES.lower_estimate:
            assert float(alone) < float(against)


def test_runs_are_judged_against_baselines_that_are_not_table_1s(tmp_path):
    store = RunStore(tmp_path)
    chosen = ["batch_norm=1", "optimizer=sgd"]
    plain, decayed = select(cells("decay-alone", "short"), chosen)
    (theirs, _) = select(cells("table1", "short"), [*chosen, "network=vgg16", "augment=0"])[:2]
    assert theirs.runs[0].lr != decayed.runs[0].lr
    for cell in (theirs, decayed):
        accuracy(store, cell, 0.9)
    assert "| the run alone |" in pages.verdicts(pages.Records(tmp_path))
    accuracy(store, plain, 0.9)
    assert "| both runs |" in pages.verdicts(pages.Records(tmp_path))


def test_while_two_runs_are_alike_one_tells_the_norms_of_the_other():
    """Their norms without decay after one and two epochs, root mean square over the layers.

    Not of runs that have hardly begun to learn, whose loss is within 5 % of guessing, or whose
    losses differ by 15 % after one epoch: their steps throw them apart at once.
    """
    seen = 0
    for _, _, folders in pages._decayed(pages.Records()):
        if len(folders) < 2 or not diagnose(*folders).baselines:
            continue
        if not diagnose(folders[0]).findings[0].effect:
            continue  # one run tells nothing
        decayed_loss, loss = (
            folder.rows().series("train/running_loss")[1].value for folder in folders[:2]
        )
        if loss > 0.95 * math.log(100 if "cifar100" in folders[1].id else 10):
            continue
        if abs(math.log(decayed_loss / loss)) > 0.15:
            continue
        decayed, plain = map(read_run, folders)
        errors = {1: [], 2: []}
        for name, layer in decayed.layers.items():
            baseline = dict(plain.layers[name].norms)
            for epoch, (step, norm) in enumerate(layer.without_decay[1:3], 1):
                errors[epoch].append(math.log(norm / baseline[step]))
        for found in errors.values():
            assert math.hypot(*found) / math.sqrt(len(found)) < 0.05
            seen += len(found)
    assert seen > 100


def test_the_picture_of_fig_5_shows_the_records():
    drawn = picture.panels()
    with Image.open(picture.PICTURE) as image:
        assert image.text["numbers"] == picture.fingerprint(drawn), "run `make results-pages`"
    assert f"(images/{picture.PICTURE.name})" in (ROOT / "docs" / "reproduction.md").read_text()
    fewer = [replace(panel, marks=panel.marks[:-1]) for panel in drawn]
    assert picture.fingerprint(fewer) != picture.fingerprint(drawn)


def test_advice_followed_is_shown_best_first(tmp_path):
    rows = [
        {"decay": name, "seed": seed, "held_out": loss + 0.01 * seed, "norms": {"a": 2.0 + seed}}
        for name, loss in (("suggested", 1.2), ("0", 1.5), ("0.1", 1.1))
        for seed in range(2)
    ]
    group = {"layers": ["a"], "weight_decay": 0.7, "spread": [0.7, 0.7], "lr": 1e-3}
    layers = [{"layer": "a", "suggested": 0.7, "target": 2.0}]
    about = {"size": "10M", "lr": 1e-3, "steps": 9, "device": "D", "date": "", "torch": ""}
    record = {
        "about": {**about, "version": ""},
        "suggestion": {
            "groups": [group],
            "layers": [*layers, {"layer": "b", "suggested": None, "target": None}],
        },
        "rows": [*rows, {"decay": "1", "seed": 0, "error": "OutOfMemoryError"}],
    }
    (tmp_path / "advice").mkdir()
    (tmp_path / "advice" / "gpt.json").write_text(json.dumps(record))
    text = pages.BLOCKS["advice-followed"](pages.Records(tmp_path))
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| 0")]
    assert [cell[1] for cell in cells] == ["1.1050", "1.2050", "1.5050"]
    assert cells[1][0] == "0.7, on the 1 layers it is suggested for"
    assert cells[1][2:] == ["0.0071", "2"]
    assert "the single value is their mean." in text
    assert "1.00 to 1.50 times" in text
    assert "(median 1.25)" in text
