"""What the pages tell a reader to run, runs."""

import re
from collections import OrderedDict
from unittest import mock

import pytest
import torch
import typer
from documented import PAGES, ROOT, blocks, commands, snippet, snippet_text
from refusals import refuses
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from decaylab import diagnose, networks, watch
from decaylab.cli import app
from decaylab.errors import Failed, Lacks, NameTaken, NotRead, UnknownName
from decaylab.optim.decay import OPTIMIZERS
from decaylab.paper import artefacts
from decaylab.records import RunFolder
from decaylab.training.build import BUILDERS
from decaylab.training.spec import PUBLISHED

# A reader waits for these; a test takes the short way through the same command.
SHORTER = {
    "demo": ["--seeds", "1", "--epochs", "1", "--no-report"],
    "reproduce table2 --tier quick": ["--only", "network=vgg16", "--only", "optimizer=sgd"],
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to run in; what a page registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    registries = (networks.NETWORKS, OPTIMIZERS, BUILDERS, PUBLISHED, artefacts())
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        patches = [mock.patch.dict(registry) for registry in registries]
        for patch in patches:
            patch.start()
        yield tmp_path
        for patch in patches:
            patch.stop()
    torch.set_num_threads(threads)  # the demo and reproduce set it


def small_net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(model, optimizer):
    for _ in range(50):
        inputs, labels = torch.randn(16, 4), torch.randint(3, (16,))
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def ran(words):
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, (words, done.output)
    return done.output


def final_accuracy(said):
    """Of `train`, in percent: a reader should not meet a net at chance level."""
    return float(re.search(r"finished: test accuracy ([\d.]+) %", said)[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_exists(page):
    """Parsed, not run: a renamed option is found on any page."""
    for words in commands(page):
        command, name = typer.main.get_command(app), "decaylab"
        while isinstance(command, typer.core.TyperGroup):
            name, *words = words
            assert name in command.commands, name
            command = command.commands[name]
        command.make_context(name, [word for word in words if word != "--debug"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_run(page):
    """It has a name (`<!-- run: NAME -->`), and a test runs the block of that name."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*doc*/*.py"))
    tests += "".join(path.read_text() for path in (ROOT / "tests").rglob("*_doc.py"))
    for name, language, text in blocks(page):
        if language == "python" and "main()" not in text:  # lab.py's end: run as commands below
            assert name, text
            assert f'"{name}"' in tests, name


def test_the_checks_see_commands_and_blocks():
    assert len(commands(ROOT / "docs" / "quickstart.md")) > 5
    assert sum(bool(name) for page in PAGES for name, _, _ in blocks(page)) >= 16


@pytest.mark.slow
@pytest.mark.usefixtures("without_theory")
def test_the_quick_start_from_top_to_bottom(here, capsys):
    script = snippet("quickstart.md", "own script")
    exec(script, {})
    said = capsys.readouterr().out
    for title in (
        *("Decay raises the effective learning rate", "Jacobian norm: cannot tell yet"),
        "No effective damping",
    ):
        assert f"\n{title}\n" in said
    plain = snippet_text("quickstart.md", "own script")
    plain = plain.replace("weight_decay=0.003", "weight_decay=0").replace("decayed", "plain")
    exec(plain, {})
    words = commands(ROOT / "docs" / "quickstart.md")
    assert [line[0] for line in words] == [
        *("demo", "diagnose", "train", "runs", "probe", "reproduce", "reproduce"),
        *("report", "claims"),
    ]
    said = {line[0]: ran([*line, *SHORTER.get(" ".join(line), [])]) for line in words}
    for verdict in (
        "Decay raises the effective learning rate",
        "Decay shrinks the Jacobian norm",
    ):
        assert verdict in said["diagnose"]
    assert final_accuracy(said["train"]) > 90
    assert (here / "runs" / "report" / "index.html").exists()


def test_steps_in_all_directions():
    layers = {"tokens": nn.Embedding(7, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 3)}
    known = {"model": nn.Sequential(OrderedDict(layers))}
    exec(snippet("kfac.md", "spectral"), known)
    coverage = known["optimizer"].coverage()
    assert {name for name, part in coverage.items() if part.block} == {"body.weight", "body.bias"}


def test_the_loop_that_is_captured(here):
    model, images = small_net(), torch.randn(64, 4)
    loader = list(zip(images.split(16), torch.arange(64).remainder(3).split(16), strict=True))
    known = {"model": model, "loader": loader, "torch": torch}
    exec(snippet("kfac-in-practice.md", "captured"), known)
    assert known["loss"].isfinite()
    assert known["optimizer"].param_groups[0]["lr"] < 1e-8  # the schedule's end


def test_the_audit_of_ones_own_k_fac(here, monkeypatch):
    (here / "my_optimizers.py").write_text(snippet_text("audit.md", "my_optimizers.py"))
    monkeypatch.syspath_prepend(here)
    ran(commands(ROOT / "docs" / "audit.md")[0])


def test_the_diagnosis_page_from_top_to_bottom(here, capsys):
    batch, model = torch.randn(8, 4), small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    exec(
        snippet("diagnosis.md", "record"), {"model": model, "optimizer": optimizer, "batch": batch}
    )
    assert "Next: " in capsys.readouterr().out
    with watch(model, optimizer, every=10, folder="records/with-decay"):
        train(model, optimizer)
    for line in commands(ROOT / "docs" / "diagnosis.md"):
        ran([*line, *(["--epochs", "3"] if line[0] == "train" else [])])
    net = networks.build(
        "mlp", classes=10, in_channels=1, image_size=8, hidden=(64, 64), batch_norm=True
    )
    names = {"model": net, "torch": torch}
    exec(snippet("diagnosis.md", "schedule"), names)
    names["optimizer"].step()
    names["scheduler"].step()
    assert len(names["optimizer"].param_groups) > 1
    decayed = next((here / "mine").glob("digits-mlp-bn-sgd-l2-*"))
    transfer = snippet_text("diagnosis.md", "norm transfer").replace("runs/RUN", str(decayed))
    rows = RunFolder(decayed).rows()
    last = rows.series("weight_norm/features.0")[-1]
    exec(transfer, {"model": net, "step": last.step})
    assert float(net.features[0].weight.detach().norm()) == pytest.approx(last.value, rel=1e-5)


def test_the_readmes_settings_train_a_net_without_normalisation(here, capsys):
    """Without kl_clip the loss is not finite after ten steps."""
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    batches = [torch.randint(len(images), (64,)) for _ in range(60)]
    loader = [(images[i].float() / 16, labels[i]) for i in batches]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    exec(snippet("../README.md", "kfac"), {"model": model, "loader": loader, "F": F})
    loss, blocks = re.search(
        r"training loss ([\d.]+); K-FAC has (\d) blocks", capsys.readouterr().out
    ).groups()
    assert float(loss) < 1.5  # 2.3 at the start
    assert int(blocks) == 4  # weights and biases


def test_scopes(capsys):
    model = small_net()
    names = {"model": model, "torch": torch}
    exec(snippet("choose.md", "scopes"), names)
    assert [group["names"] for group in names["groups"]] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias", "3.weight", "3.bias"],
    ]
    assert names["only_invariant"][0]["names"] == ["0.weight"]
    assert "'0.weight': 'invariant'" in capsys.readouterr().out


def test_what_weight_decay_means_in_ones_optimizer(capsys):
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)
    exec(snippet("choose.md", "decay table"), {"model": model, "optimizer": optimizer})
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.split() == ["parameter", "role", "decay", "a", "step", "long", "run"]
    assert first.split()[2:] == ["decoupled", "0.25", "0.875", "0.875"]


def test_probes(capsys):
    names = {"model": small_net(), "train": train, "batch": torch.randn(8, 4)}
    exec(snippet("three-mechanisms.md", "probes"), names)
    assert 0 <= float(capsys.readouterr().out) <= 1
    assert names["watched"].records.last("jacobian_norm") > 0


def test_a_probe_of_ones_own(capsys):
    model = small_net()
    names = {"model": model, "train": train, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    exec(snippet("extend.md", "probe"), names)
    exec(snippet("extend.md", "probe in a loop"), names)
    ranks = names["watched"].records.series("stable_rank/0")
    assert [row.step for row in ranks] == [1, 10, 20, 30, 40, 50]
    square = model[0].weight.detach().square().sum()
    largest = torch.linalg.matrix_norm(model[0].weight.detach(), 2).square()
    assert ranks[-1].value == pytest.approx(float(square / largest), rel=1e-5)
    assert 1 <= ranks[-1].value <= 4


def test_an_optimizer_of_ones_own_is_watched_and_diagnosed(capsys):
    names = {}
    exec(snippet("extend.md", "optimizer"), names)
    exec(snippet("extend.md", "try the optimizer"), names)
    assert capsys.readouterr().out in (ROOT / "docs" / "extend.md").read_text()
    model = small_net()
    optimizer = names["Signum"](model.parameters(), lr=0.01, weight_decay=3.0)
    with watch(model, optimizer, every=5, inputs=torch.randn(8, 4)) as watched:
        train(model, optimizer)
    norm = float(model[0].weight.detach().norm())
    last = watched.records.last("effective_lr/0")
    assert last == pytest.approx(0.01 / norm, rel=1e-5)
    found = diagnose(watched)["effective l"]
    assert found.verdict == "acts"
    before = model[3].weight.detach().clone()
    model[3].weight.grad = torch.zeros_like(before)
    optimizer.state[model[3].weight]["momentum"].zero_()
    optimizer.step()
    torch.testing.assert_close(model[3].weight.detach(), before * (1 - 0.01 * 3.0))


@pytest.mark.usefixtures("without_theory")
def test_ones_own_command(here):
    (here / "scopes_without_bn.toml").write_text(
        snippet_text("extend.md", "scopes_without_bn.toml")
    )
    names = {}
    for name in ("optimizer", "register the optimizer", "network", "experiment"):
        exec(snippet("extend.md", name), names)
    lines = commands(ROOT / "docs" / "extend.md", "python lab.py")
    assert [line[0] for line in lines] == ["train", "diagnose", "reproduce", "report"]
    said = {line[0]: ran(line) for line in lines}
    assert final_accuracy(said["train"]) > 80
    assert "Decay raises the effective learning rate" in said["diagnose"]
    assert "scopes_without_bn 8/8" in said["report"]
    page = (here / "runs" / "report" / "index.html").read_text()
    assert "Which layers to decay, without batch normalisation (scopes_without_bn)" in page
    assert "digits-allconv-bn-signum-decoupled-" in page


def test_what_is_registered_twice_or_wrongly_is_refused(here):
    from decaylab.paper import register_artefact
    from decaylab.training import RunSpec, register_optimizer

    settings = {"lr": 1.0, "epochs": 1, "lr_drop_every": 1}
    with refuses(NameTaken, name="adam"):
        register_optimizer("adam", None, law="adam", settings=settings)
    with refuses(UnknownName, kind="law", name="lion"):
        register_optimizer("lion", None, law="lion", settings=settings)
    with refuses(UnknownName, kind="setting", name="rho"):
        register_optimizer("lion", None, law="adam", settings={**settings, "rho": 1})
    for key, value in (("weight_decay", 0.1), ("batch_size", 64), ("hidden", (8,))):
        with refuses(UnknownName, kind="setting", name=key):
            register_optimizer("lion", None, law="adam", settings={**settings, key: value})
    assert RunSpec(optimizer="sgd", hidden=(8,)).resolved().batch_size == 128
    with refuses(Lacks, what="setting 'epochs'"):
        register_optimizer("lion", None, law="adam", settings={"lr": 1.0})
    with refuses(NameTaken, name="mlp"):
        networks.register("mlp", None)
    with refuses(UnknownName, kind="optimizer", name="lion"):
        RunSpec(optimizer="lion")
    for name, text, kind, fields in (
        ("table1", "title = 'x'", NameTaken, {"name": "table1"}),
        ("all", "title = 'x'", NameTaken, {"name": "all"}),
        ("own", "title = ", NotRead, {"what": here / "own.toml"}),
        (
            "own",
            "title = 'x'\n[[cells]]\nnetwork = 'vgg16'",
            Failed,
            {"what": "reading it as an artefact"},
        ),
        ("own", "title = 'x'", Failed, {"what": "reading it as an artefact"}),
    ):
        path = here / f"{name}.toml"
        path.write_text(text)
        with refuses(kind, **fields):
            register_artefact(path)
    with refuses(NotRead, what=here / "missing.toml"):
        register_artefact(here / "missing.toml")
