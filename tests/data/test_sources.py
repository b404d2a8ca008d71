"""Where data sets are found, what is refused, and the cache of decoded ones."""

import os

import numpy as np
import pytest
import torch
from data import writers
from refusals import refuses

from decaylab.data import DATA_SETS, cache, find, formats, load, sources
from decaylab.errors import Conflict, Damaged, DecaylabError, Lacks, NoFolder, NotRead, UnknownName

WRITE = {
    "idx": lambda folder, name, splits: writers.write_mnist(folder, splits),
    "idx.gz": lambda folder, name, splits: writers.write_mnist(folder, splits, ".gz"),
    "folder": writers.write_cifar_folder,
    "archive": lambda folder, name, splits: writers.write_archive(
        folder / f"cifar-{name[5:]}-binary.tar.gz", writers.cifar_files(name, splits)
    ),
    "parquet": lambda folder, name, splits: writers.write_parquet(
        folder, splits, columns=("img", "fine_label" if name == "cifar100" else "label")
    ),
}
LAYOUTS = [
    ("mnist", "idx"),
    ("mnist", "idx.gz"),
    ("mnist", "parquet"),
    ("cifar10", "folder"),
    ("cifar10", "archive"),
    ("cifar10", "parquet"),
    ("cifar100", "folder"),
    ("cifar100", "archive"),
    ("cifar100", "parquet"),
]


def assert_holds(data, splits):
    for split, (images, labels) in splits.items():
        found = getattr(data, split)
        assert found.images.dtype == torch.uint8
        assert found.labels.dtype == torch.int64
        assert torch.equal(found.images, torch.from_numpy(images))
        assert torch.equal(found.labels, torch.from_numpy(labels))


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
@pytest.mark.parametrize("place", [".", "own"])
def test_every_layout_is_found_and_read_and_read_again(small, tmp_path, name, layout, place):
    splits = small(name)
    folder = tmp_path / "data" / (name if place == "own" else ".")
    WRITE[layout](folder, name, splits)
    for _ in range(2):  # the second time from the cache
        data = load(name, tmp_path / "data")
        assert_holds(data, splits)
        assert data.classes == DATA_SETS[name].classes
        assert (data.mean, data.std) == (DATA_SETS[name].mean, DATA_SETS[name].std)


def test_binary_files_directly_in_the_folder(small, tmp_path):
    splits = small("cifar10")
    writers.write_cifar_folder(tmp_path, "cifar10", splits)
    assert_holds(load("cifar10", tmp_path / "cifar-10-batches-bin"), splits)


def test_order_of_places(small, tmp_path, monkeypatch, own_cache):
    splits = small("mnist")
    given, environment = tmp_path / "given", tmp_path / "environment"
    for folder in (given, environment / "mnist", own_cache / "mnist"):
        writers.write_mnist(folder, splits)
    monkeypatch.setenv("DECAYLAB_DATA", str(environment))
    assert find("mnist", given).place == given
    assert find("mnist").place == environment / "mnist"
    for path in given.iterdir():
        path.unlink()
    assert find("mnist", given).place == environment / "mnist"
    monkeypatch.delenv("DECAYLAB_DATA")
    assert find("mnist").place == own_cache / "mnist"


def test_the_users_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("DECAYLAB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "decaylab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder() == tmp_path / ".cache" / "decaylab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == tmp_path / ".cache" / "decaylab"


def test_a_folder_of_another_data_set_is_passed_over(small, tmp_path):
    WRITE["parquet"](tmp_path / "cifar10", "cifar10", small("cifar10"))
    assert find("cifar10", tmp_path / "cifar10") is not None
    assert find("cifar100", tmp_path / "cifar10") is None


@pytest.mark.parametrize("file_is_there", [True, False])
def test_digits_is_always_there(tmp_path, monkeypatch, file_is_there):
    if not file_is_there:  # scikit-learn may move it
        monkeypatch.setattr(sources, "find_spec", lambda name: None)
    data = load("digits", tmp_path)
    assert data.train.images.shape == (1437, 1, 8, 8)
    assert data.test.images.shape == (360, 1, 8, 8)
    from sklearn.datasets import load_digits

    original = (load_digits().images * 15).astype(np.uint8).reshape(-1, 64)
    ours = torch.cat([data.train.images, data.test.images]).reshape(-1, 64).numpy()
    assert sorted(map(bytes, ours)) == sorted(map(bytes, original))
    mean = data.train.images.double().mean() / 255
    std = data.train.images.double().std() / 255
    assert abs(mean - data.mean[0]) < 1e-3
    assert abs(std - data.std[0]) < 1e-3


class TestNotFound:
    def test_unknown_name(self):
        with refuses(UnknownName, name="svhn"):
            load("svhn")

    def test_missing_folder(self, tmp_path):
        with refuses(NoFolder, path=tmp_path / "absent"):
            load("mnist", tmp_path / "absent")

    def test_nothing_there_names_every_place_and_the_remedy(self, tmp_path, monkeypatch, own_cache):
        monkeypatch.setenv("DECAYLAB_DATA", str(tmp_path / "environment"))
        with pytest.raises(DecaylabError) as caught:
            load("cifar10", tmp_path)
        for part in (tmp_path, tmp_path / "environment", own_cache, "data fetch cifar10"):
            assert str(part) in str(caught.value)

    def test_a_folder_that_may_not_be_read(self, tmp_path, monkeypatch):
        def denied(_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(type(tmp_path), "iterdir", denied)
        with refuses(NotRead, reason="Permission denied"):
            load("mnist", tmp_path)

    def test_missing_shard(self, small, tmp_path):
        WRITE["parquet"](tmp_path, "cifar10", small("cifar10"))
        (tmp_path / "train-00000-of-00002.parquet").unlink()
        with refuses(Lacks, what="train-00000-of-00002.parquet"):
            load("cifar10", tmp_path)
        (tmp_path / "train-00000-of-00002.parquet").symlink_to(tmp_path / "deleted")
        with refuses(Lacks, what="train-00000-of-00002.parquet"):
            load("cifar10", tmp_path)
        (tmp_path / "train-00001-of-00002.parquet").unlink()
        with refuses(Lacks, what="train-*.parquet"):
            load("cifar10", tmp_path)

    def test_shards_of_two_versions(self, small, tmp_path):
        splits = small("cifar10")
        writers.write_parquet(tmp_path, splits, shards=1)
        writers.write_parquet(tmp_path, splits, shards=2)
        one = str(tmp_path / "train-00000-of-00001.parquet")
        versions = [one, "train-00000-of-00002.parquet"]
        with refuses(Conflict, settings=versions):
            load("cifar10", tmp_path)

    @pytest.mark.parametrize(
        ("name", "layout", "file"),
        [
            ("mnist", "idx", "t10k-labels-idx1-ubyte"),
            ("cifar10", "folder", "cifar-10-batches-bin/data_batch_4.bin"),
            ("cifar100", "folder", "cifar-100-binary/test.bin"),
        ],
    )
    def test_missing_file(self, small, tmp_path, name, layout, file):
        WRITE[layout](tmp_path, name, small(name))
        (tmp_path / file).unlink()
        with refuses(Lacks, what=os.path.basename(file) + "[.gz]" * (layout == "idx")):
            load(name, tmp_path)


class TestPickle:
    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("cifar10", "cifar-10-python.tar.gz"),
            ("cifar10", "cifar-10-batches-py/data_batch_1"),
            ("cifar10", "data_batch_1"),
            ("cifar100", "cifar-100-python.tar.gz"),
            ("cifar100", "cifar-100-python/meta"),
        ],
    )
    def test_refused_naming_the_binary_archive(self, tmp_path, name, file):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"\x80\x02.")
        with refuses(NotRead, what=tmp_path / file) as caught:
            load(name, tmp_path)
        assert f"cifar-{name[5:]}-binary.tar.gz" in caught.value.remedy

    def test_passed_over_where_readable_files_exist(self, small, tmp_path, own_cache):
        splits = small("cifar10")
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
        WRITE["archive"](own_cache / "cifar10", "cifar10", splits)
        assert_holds(load("cifar10", tmp_path), splits)


class TestCheck:
    """Whole files that are not what their name says."""

    def refuse(self, folder, name, match):
        with pytest.raises(Damaged, match=match):
            load(name, folder)

    def test_a_test_shard_named_train(self, small, tmp_path):
        splits = small("cifar10")
        WRITE["parquet"](tmp_path, "cifar10", splits | {"train": splits["test"]})
        match = r"10 images instead of 20.*train-00000-of-00002.parquet 5, .*data fetch"
        self.refuse(tmp_path, "cifar10", match)

    def test_cifar100_in_the_place_of_cifar10(self, small, tmp_path):
        splits = small("cifar100")
        small("cifar10")
        WRITE["parquet"](tmp_path / "cifar10", "cifar100", splits)
        self.refuse(tmp_path, "cifar10", "fine_label and no 'label'")
        # Labels of the other set under the right column name.
        writers.write_parquet(tmp_path / "cifar10", splits)
        self.refuse(tmp_path, "cifar10", r"train-00000.*label \d\d at image \d+.* 0\.\.9")

    def test_a_negative_label(self, small, tmp_path):
        splits = small("cifar10")
        splits["test"][1][3] = -1
        writers.write_parquet(tmp_path, splits)
        self.refuse(tmp_path, "cifar10", r"test-00000-of-00001\.parquet .*label -1 at image 3")

    def test_classes_out_of_balance(self, small, tmp_path):
        splits = small("cifar10")
        labels = splits["train"][1]
        labels[labels == 4] = 5
        WRITE["folder"](tmp_path, "cifar10", splits)
        self.refuse(tmp_path, "cifar10", r"data_batch_1\.bin.*(0|4) images of class [45]")

    def test_swapped_channels(self, small, tmp_path):
        splits = small("cifar10")
        images, labels = splits["train"]
        WRITE["folder"](tmp_path, "cifar10", splits | {"train": (images[:, ::-1].copy(), labels)})
        self.refuse(tmp_path, "cifar10", r"data_batch_1\.bin.*mean per channel")

    def test_same_mean_other_std(self, small, tmp_path):
        splits = small("mnist")
        images, labels = splits["test"]
        # As flat as bytes can be with the same sum.
        flat = np.full_like(images, images.sum() // images.size)
        flat.reshape(-1)[: images.sum() % images.size] += 1
        assert flat.sum() == images.sum()
        WRITE["idx"](tmp_path, "mnist", splits | {"test": (flat, labels)})
        self.refuse(tmp_path, "mnist", r"t10k-images-idx3-ubyte .*std per channel")

    def test_other_shape(self, small, tmp_path):
        splits = small("mnist")
        images, labels = splits["test"]
        WRITE["idx"](tmp_path, "mnist", splits | {"test": (images[..., :-1].copy(), labels)})
        self.refuse(tmp_path, "mnist", "t10k-images.* 1x28x27, .*1x28x28")

    def test_nothing_refused_is_cached(self, small, tmp_path, own_cache):
        splits = small("mnist")
        splits["test"][1][:] = 3
        WRITE["idx"](tmp_path, "mnist", splits)
        self.refuse(tmp_path, "mnist", "class")
        assert not own_cache.exists()


class TestCache:
    @pytest.fixture
    def reads(self, small, tmp_path, monkeypatch):
        """Files of a small MNIST, and the list of the files read so far."""
        self.splits = small("mnist")
        self.folder = tmp_path / "data"
        writers.write_mnist(self.folder, self.splits)
        paths = []
        whole = formats.read_mnist

        def read(images, labels):
            paths.append(images)
            return whole(images, labels)

        monkeypatch.setattr(sources, "read_mnist", read)
        return paths

    def kept(self, own_cache):
        (path,) = (own_cache / "decoded").iterdir()
        return path

    def test_second_load_reads_no_source(self, reads):
        load("mnist", self.folder)
        assert len(reads) == 2
        assert_holds(load("mnist", self.folder), self.splits)
        assert len(reads) == 2

    @pytest.mark.parametrize("change", ["size", "mtime", "name"])
    def test_a_changed_source_is_read_again(self, reads, change):
        load("mnist", self.folder)
        path = self.folder / "t10k-labels-idx1-ubyte"
        if change == "mtime":
            os.utime(path, ns=(1, 1))
        elif change == "name":
            path.unlink()
            writers.write_idx(path.with_name(path.name + ".gz"), self.splits["test"][1].astype("B"))
        else:
            path.write_bytes(path.read_bytes()[:-1])
            with pytest.raises(Damaged):
                load("mnist", self.folder)
            return
        assert_holds(load("mnist", self.folder), self.splits)
        assert len(reads) == 4

    @pytest.mark.parametrize("where", ["header", "pixels", "end", "all", "other"])
    def test_a_damaged_cache_is_ignored_and_rebuilt(self, reads, own_cache, where):
        load("mnist", self.folder)
        kept = self.kept(own_cache)
        good = kept.read_bytes()
        damaged = bytearray(good)
        if where == "other":
            from safetensors.torch import save

            damaged = save({"train_images": torch.zeros(1)})
        elif where == "end":
            del damaged[-5:]
        elif where == "all":
            damaged.clear()
        else:
            damaged[2 if where == "header" else len(good) // 2] ^= 255
        kept.write_bytes(damaged)
        assert_holds(load("mnist", self.folder), self.splits)
        assert len(reads) == 4
        assert kept.read_bytes() == good

    def test_without_a_place_for_the_cache(self, reads, own_cache):
        own_cache.write_text("a file where the folder should be")
        for _ in range(2):
            assert_holds(load("mnist", self.folder), self.splits)
        assert len(reads) == 4

    def test_a_failed_write_leaves_nothing(self, reads, own_cache, monkeypatch):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(cache, "save_file", full)
        assert_holds(load("mnist", self.folder), self.splits)
        assert list((own_cache / "decoded").iterdir()) == []
