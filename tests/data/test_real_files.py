"""The published data sets themselves, where their files are at hand."""

import gzip
import hashlib
import os
from pathlib import Path

import pytest
import torch
from refusals import refuses

from decaylab.data import DATA_SETS, find, load
from decaylab.data.facts import check
from decaylab.errors import Damaged

PLACES = [os.environ.get("DECAYLAB_DATA"), Path(__file__).parents[3] / "shared" / "data"]
REAL = next((Path(place) for place in PLACES if place and Path(place).is_dir()), None)


def needs(name):
    absent = REAL is None or not any((REAL / name).glob("*"))
    return pytest.mark.skipif(absent, reason=f"no {name} in DECAYLAB_DATA or ../shared/data")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("decoded")


@pytest.fixture
def real(shared_cache, monkeypatch):
    """Load a real data set; the tests of this module share one cache."""
    monkeypatch.setenv("DECAYLAB_CACHE", str(shared_cache))
    return lambda name: load(name, REAL)


@needs("mnist")
def test_mnist(real):
    data = real("mnist")
    assert data.train.images.shape == (60000, 1, 28, 28)
    assert data.test.images.shape == (10000, 1, 28, 28)
    assert data.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    pixels = data.train.images.double() / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (0.1307, 0.3081)
    assert (data.mean, data.std) == ((0.0,), (1.0,))


@needs("mnist")
def test_mnist_files_are_the_published_ones():
    # md5 of the unpacked files as LeCun's pages and its mirrors have them.
    published = {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    }
    for path in find("mnist", REAL).files:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert hashlib.md5(data).hexdigest() == published[path.name.removesuffix(".gz")]


@needs("cifar10")
def test_cifar10_and_its_files_are_decoded_once(real, monkeypatch):
    data = real("cifar10")
    assert data.train.images.shape == (50000, 3, 32, 32)
    assert data.test.images.shape == (10000, 3, 32, 32)
    mean = [round((data.train.images[:, c].double().mean() / 255).item(), 5) for c in range(3)]
    assert mean == [0.49140, 0.48216, 0.44653]
    assert data.train.labels.bincount().tolist() == [5000] * 10
    monkeypatch.setattr("decaylab.data.sources._checked", None)  # what reads the files
    again = real("cifar10")
    assert torch.equal(again.test.images, data.test.images)
    held = data.held_out()
    assert (len(held.train), len(held.test)) == (45000, 5000)


@needs("cifar100")
def test_cifar100_test_split():
    # The training split takes another six seconds to decode and goes the same way.
    check(DATA_SETS["cifar100"], "test", find("cifar100", REAL).read("test"))


@needs("cifar100")
def test_cifar100_files_under_the_name_of_cifar10(tmp_path):
    (tmp_path / "cifar10").mkdir()
    for path in find("cifar100", REAL).files:
        (tmp_path / "cifar10" / path.name).symlink_to(path.resolve())
    with pytest.raises(Damaged, match=r"train-00000"):
        load("cifar10", tmp_path)


@needs("cifar10")
def test_truncated_shard(tmp_path):
    for path in find("cifar10", REAL).files:
        (tmp_path / path.name).symlink_to(path.resolve())
    cut = tmp_path / "train-00000-of-00002.parquet"
    if not cut.exists():
        pytest.skip("not the parquet files")
    data = cut.read_bytes()
    cut.unlink()
    cut.write_bytes(data[: len(data) // 2])
    with refuses(Damaged, what=cut):
        load("cifar10", tmp_path)
