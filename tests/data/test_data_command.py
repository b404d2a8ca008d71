"""`decaylab data list` and `decaylab data fetch`."""

import hashlib
import json

from data import writers
from refusals import refuses
from typer.testing import CliRunner

from decaylab.cli.data import data_app
from decaylab.data import downloads
from decaylab.errors import UnknownName


def run(*words):
    return CliRunner().invoke(data_app, list(words), catch_exceptions=False)


def test_list_as_json(small, tmp_path):
    writers.write_mnist(tmp_path / "mnist", small("mnist"))
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    result = run("list", "--data-dir", str(tmp_path), "--json")
    entries = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert list(entries) == ["digits", "mnist", "cifar10", "cifar100"]
    assert entries["digits"]["train"] + entries["digits"]["test"] == 1797
    assert entries["mnist"]["place"] == str(tmp_path / "mnist")
    assert entries["mnist"]["format"] == "idx"
    assert "pickle" in entries["cifar10"]["problem"]
    assert entries["cifar100"]["place"] is entries["cifar100"]["problem"] is None
    assert entries["cifar100"]["shape"] == [3, 32, 32]
    assert entries["cifar100"]["classes"] == 100
    assert (entries["cifar100"]["train"], entries["cifar100"]["test"]) == (50000, 10000)


def test_list_as_a_table_of_one_line_each(small, tmp_path):
    writers.write_mnist(tmp_path / "mnist", small("mnist"))
    heading, *lines = run("list", "--data-dir", str(tmp_path)).stdout.splitlines()
    assert heading.split() == ["name", "images", "classes", "shape", "where"]
    assert [line.split()[0] for line in lines] == ["digits", "mnist", "cifar10", "cifar100"]
    assert lines[1].rstrip().endswith(f"{tmp_path / 'mnist'} (idx)")
    assert lines[2].rstrip().endswith("fetch it: decaylab data fetch cifar10")


def test_fetch_says_what_it_got(small, tmp_path, monkeypatch, own_cache):
    writers.write_mnist(tmp_path / "made", small("mnist"), ".gz")
    files = [
        downloads.Download(
            path.name,
            (path.as_uri(),),
            hashlib.md5(path.read_bytes()).hexdigest(),
            size=path.stat().st_size,
        )
        for path in sorted((tmp_path / "made").iterdir())
    ]
    monkeypatch.setitem(downloads.DOWNLOADS, "mnist", tuple(files))
    lines = run("fetch", "mnist").stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [file.file for file in files]
    assert lines[-1].startswith("mnist: 20 + 10 images, 10 classes, checked, in ")
    assert lines[-1].endswith(str(own_cache / "mnist"))


def test_fetch_of_digits_and_of_nothing():
    assert "ships with scikit-learn" in run("fetch", "digits").stdout
    with refuses(UnknownName, name="svhn"):
        run("fetch", "svhn")
