"""Every reader gives back what a writer wrote, and names the file that breaks its format."""

import gzip
import tarfile
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data import writers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from refusals import refuses

from decaylab.data import formats
from decaylab.errors import Damaged, DecaylabError, Mismatch, NotInstalled, NotRead

quick = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def images_of(channels, height, width, most=6):
    shapes = st.integers(1, most).map(lambda n: (n, channels, height, width))
    return shapes.flatmap(lambda shape: arrays.arrays(np.uint8, shape))


def labels_for(images, classes):
    return np.random.default_rng(len(images)).integers(0, classes, len(images))


@quick
@given(
    array=arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0)),
    suffix=st.sampled_from(["", ".gz"]),
)
def test_idx_reads_back_what_was_written(tmp_path, array, suffix):
    path = tmp_path / f"x-idx-ubyte{suffix}"
    writers.write_idx(path, array)
    read = formats.read_idx(path)
    assert read.shape == array.shape
    assert (read == array).all()


@quick
@given(images=images_of(1, 5, 7))
def test_mnist_pairs_images_with_labels(tmp_path, images):
    labels = labels_for(images, 10)
    writers.write_mnist(tmp_path, {"train": (images, labels), "test": (images, labels)})
    part = formats.read_mnist(
        tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    )
    assert (part.images == images).all()
    assert (part.labels == labels).all()


@quick
@given(images=images_of(3, 32, 32, most=3), name=st.sampled_from(["cifar10", "cifar100"]))
def test_cifar_reads_back_what_was_written(tmp_path, images, name):
    # Five equal files of CIFAR-10's training images need a multiple of five.
    train = np.concatenate([images] * 5)
    labels = labels_for(train, 100 if name == "cifar100" else 10)
    splits = {"train": (train, labels), "test": (images, labels[: len(images)])}
    writers.write_cifar_folder(tmp_path, name, splits)
    archive = tmp_path / "archive.tar.gz"
    writers.write_archive(archive, writers.cifar_files(name, splits))
    if name == "cifar100":
        folder, names, label_bytes = tmp_path / "cifar-100-binary", ["train.bin"], 2
    else:
        folder, names = tmp_path / "cifar-10-batches-bin", [f"data_batch_{i}.bin" for i in "12345"]
        label_bytes = 1
    for parts in (
        formats.read_cifar_folder(folder, names, label_bytes),
        formats.read_cifar_archive(archive, names, label_bytes),
    ):
        assert [part.path.name for part in parts] == names
        assert (np.concatenate([part.images for part in parts]) == train).all()
        assert (np.concatenate([part.labels for part in parts]) == labels).all()


@quick
@given(
    data=st.data(),
    image_format=st.sampled_from(["PNG", "WEBP", "BMP", "TIFF"]),
    channels=st.sampled_from([1, 3]),
    columns=st.sampled_from([("img", "label"), ("image", "label"), ("img", "fine_label")]),
)
def test_parquet_reads_back_what_was_written(tmp_path, data, image_format, channels, columns):
    images = data.draw(images_of(channels, 6, 5, most=9))
    labels = labels_for(images, 100)
    path = tmp_path / "train-00000-of-00001.parquet"
    writers.write_shard(path, images, labels, columns, image_format)
    part = formats.read_parquet(path, (channels, 6, 5), columns[1], 100)
    assert (part.images == images).all()
    assert (part.labels == labels).all()


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    """One small good file of each format, and its reader."""
    folder = tmp_path_factory.mktemp("whole")
    random = np.random.default_rng(3).integers(0, 256, (4, 3, 32, 32)).astype(np.uint8)
    writers.write_idx(folder / "a-idx", random[:, 0, :5, :5])
    writers.write_idx(folder / "a-idx.gz", random[:, 0, :5, :5])
    writers.write_archive(
        folder / "a.tar.gz", {"x/a.bin": writers.cifar_bytes(random, np.arange(4))}
    )
    for image_format in ("PNG", "WEBP", "JPEG", "GIF"):
        path = folder / f"{image_format}.parquet"
        writers.write_shard(path, random[..., :6, :6], np.arange(4), image_format=image_format)
    return {
        folder / "a-idx": formats.read_idx,
        folder / "a-idx.gz": formats.read_idx,
        folder / "a.tar.gz": lambda path: formats.read_cifar_archive(path, ["a.bin"], 1),
    } | {
        path: lambda path: formats.read_parquet(path, (3, 6, 6), "label", 100)
        for path in folder.glob("*.parquet")
    }


@settings(parent=quick, max_examples=300)
@given(data=st.data())
def test_a_corrupt_file_is_read_or_named_and_never_anything_else(tmp_path, whole_files, data):
    """Bytes changed or cut off anywhere: a reader may not notice, but must not break."""
    path, read = data.draw(st.sampled_from(sorted(whole_files.items(), key=str)))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.sampled_from([len(content), len(content) // 2, len(content) - 1])) :]
    damaged = tmp_path / path.name
    damaged.write_bytes(content)
    said = path.name
    try:
        read(damaged)
    except DecaylabError as error:
        said = str(error)
    assert path.name in said


@pytest.fixture
def idx(tmp_path):
    path = tmp_path / "images-idx3-ubyte"
    writers.write_idx(path, np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    return path


@pytest.mark.parametrize("length", [0, 2, 4, 9, 16, 39])
def test_truncated_idx_is_named(idx, length):
    idx.write_bytes(idx.read_bytes()[:length])
    with refuses(Damaged, what=idx):
        formats.read_idx(idx)


def test_idx_with_more_bytes_than_its_header_says(idx):
    idx.write_bytes(idx.read_bytes() + b"\0")
    with pytest.raises(Damaged, match=r"24 bytes \(2x3x4\) .*25"):
        formats.read_idx(idx)


@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: b"PK" + d[2:], lambda d: d[:5]])
def test_damaged_gzip_is_named(tmp_path, damage):
    path = tmp_path / "images-idx3-ubyte.gz"
    random = np.random.default_rng(0).integers(0, 256, (9, 9, 9)).astype(np.uint8)
    path.write_bytes(damage(gzip.compress(writers.idx_bytes(random))))
    with refuses(Damaged, what=path):
        formats.read_idx(path)


def test_mnist_files_that_do_not_belong_together(tmp_path):
    images, labels = tmp_path / "images", tmp_path / "labels"
    writers.write_idx(images, np.zeros((3, 2, 2), np.uint8))
    writers.write_idx(labels, np.zeros(4, np.uint8))
    with refuses(Mismatch, values={str(images): 3, str(labels): 4}):
        formats.read_mnist(images, labels)
    with refuses(Damaged, what=images):
        formats.read_mnist(images, images)
    with refuses(Damaged, what=labels):
        formats.read_mnist(labels, labels)


def test_missing_file_is_named(tmp_path):
    with refuses(NotRead, what=tmp_path / "absent-idx"):
        formats.read_idx(tmp_path / "absent-idx")


def test_cifar_records_of_the_other_data_set_are_recognised(tmp_path):
    images = np.zeros((4, 3, 32, 32), np.uint8)
    labels = np.arange(4)
    of_100 = writers.cifar_bytes(images, labels, coarse=labels)
    with pytest.raises(Damaged, match="CIFAR-100's"):
        formats.read_cifar_records(tmp_path / "x.bin", of_100, label_bytes=1)
    of_10 = writers.cifar_bytes(images, labels)
    with pytest.raises(Damaged, match="CIFAR-10's"):
        formats.read_cifar_records(tmp_path / "x.bin", of_10, label_bytes=2)
    with pytest.raises(Damaged, match="12291 bytes"):
        formats.read_cifar_records(tmp_path / "x.bin", of_10[:-1], label_bytes=1)
    with pytest.raises(Damaged, match="0 bytes"):
        formats.read_cifar_records(tmp_path / "x.bin", b"", label_bytes=1)


def test_damaged_archives_are_named(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    noise = np.random.default_rng(0).integers(0, 256, 40000).astype(np.uint8).tobytes()
    writers.write_archive(path, {"cifar-10-batches-bin/test_batch.bin": noise})
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not an archive", b""):
        path.write_bytes(damaged)
        with refuses(Damaged, what=path):
            formats.read_cifar_archive(path, ["test_batch.bin"], 1)
    writers.write_archive(path, {"cifar-100-binary/test.bin": noise})
    with pytest.raises(Damaged, match=r"test_batch\.bin"):
        formats.read_cifar_archive(path, ["test_batch.bin"], 1)


@pytest.mark.parametrize("wanted", [True, False])
def test_archives_that_unpack_to_more_than_a_data_set_are_refused(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr(formats, "MOST_BYTES", 500_000)
    path = tmp_path / "cifar-10-binary.tar.gz"
    name = "test_batch.bin" if wanted else "readme.html"
    writers.write_archive(path, {name: bytes(8_000_000)})
    assert path.stat().st_size < 20_000
    with pytest.raises(Damaged, match="1000000"):
        formats.read_cifar_archive(path, ["test_batch.bin"], 1)
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("test_batch.bin")
        member.pax_headers = {"comment": "x" * 8_000_000}  # read before a member is seen
        archive.addfile(member)
    with pytest.raises(Damaged, match="1000000"):
        formats.read_cifar_archive(path, ["test_batch.bin"], 1)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_larger_than_any_data_set_are_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(formats, "MOST_BYTES", 50_000)
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    writers.write_idx(path, np.zeros((300, 28, 28), np.uint8))
    with refuses(Damaged, what=path):
        formats.read_idx(path)


def test_python_archive_under_the_binary_name_is_refused(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    writers.write_archive(path, {"cifar-10-batches-py/test_batch": b"\x80\x02."})
    with refuses(NotRead, what=path) as caught:
        formats.read_cifar_archive(path, ["test_batch.bin"], 1)
    assert "cifar-10-binary.tar.gz" in caught.value.remedy


class TestParquetErrors:
    def write(self, path, **options):
        images = np.zeros((3, 3, 6, 6), np.uint8)
        writers.write_shard(path, images, np.arange(3), **options)
        return path

    def test_truncated(self, tmp_path):
        path = self.write(tmp_path / "a.parquet")
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(Damaged):
            formats.read_parquet(path, (3, 6, 6), "label", 100)

    def test_more_images_than_the_data_set_has(self, tmp_path):
        path = tmp_path / "a.parquet"
        writers.write_shard(path, np.zeros((30, 3, 6, 6), np.uint8), np.arange(30))
        with pytest.raises(Damaged, match="30 images"):
            formats.read_parquet(path, (3, 6, 6), "label", 2)

    @pytest.mark.parametrize("values", [1, 40])
    def test_a_small_file_that_asks_for_much_memory(self, tmp_path, values):
        """One long value that all rows share (a dictionary), and several long ones."""
        path = tmp_path / "a.parquet"
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        rows = [{"bytes": bytes([n % values]) * 100_000, "path": None} for n in range(400)]
        labels = pa.array([0] * 400, pa.int64())
        pq.write_table(pa.table({"img": pa.array(rows, kind), "label": labels}), path)
        assert path.stat().st_size < 200_000
        tracemalloc.start()
        try:
            with refuses(Damaged, what=path):
                formats.read_parquet(path, (3, 6, 6), "label", 400)
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
        finally:
            tracemalloc.stop()

    def test_wrong_columns(self, tmp_path):
        path = self.write(tmp_path / "a.parquet", columns=("img", "fine_label"))
        with pytest.raises(Damaged, match="'label'"):
            formats.read_parquet(path, (3, 6, 6), "label", 100)
        path = self.write(tmp_path / "b.parquet", columns=("pixels", "label"))
        with pytest.raises(Damaged, match="'img'"):
            formats.read_parquet(path, (3, 6, 6), "label", 100)

    def test_images_that_are_no_struct(self, tmp_path):
        path = tmp_path / "a.parquet"
        writers.pq.write_table(writers.pa.table({"img": [b"x"], "label": [1]}), path)
        with pytest.raises(Damaged):
            formats.read_parquet(path, (3, 6, 6), "label", 100)

    def test_labels_beyond_whole_numbers_of_64_bits(self, tmp_path):
        path, pa = tmp_path / "a.parquet", writers.pa
        labels = pa.array([2**63], pa.uint64())
        table = pa.table({"img": [{"bytes": b"x"}], "label": labels})
        writers.pq.write_table(table, path)
        with pytest.raises(Damaged):
            formats.read_parquet(path, (3, 6, 6), "label", 100)

    def test_wrong_size(self, tmp_path):
        path = self.write(tmp_path / "a.parquet")
        with pytest.raises(Damaged, match="6x6, not 7x7"):
            formats.read_parquet(path, (3, 7, 7), "label", 100)

    @pytest.mark.parametrize("data", [b"no image", b"", None])
    def test_bytes_that_are_no_image(self, tmp_path, data, monkeypatch):
        monkeypatch.setattr(writers, "encoded", lambda image, image_format: data)
        path = self.write(tmp_path / "a.parquet")
        with refuses(Damaged, what=f"image 0 of {path}"):
            formats.read_parquet(path, (3, 6, 6), "label", 100)

    def test_truncated_image(self, tmp_path, monkeypatch):
        whole = writers.encoded
        monkeypatch.setattr(writers, "encoded", lambda *arguments: whole(*arguments)[:-25])
        path = self.write(tmp_path / "a.parquet")
        with refuses(Damaged, what=f"image 0 of {path}"):
            formats.read_parquet(path, (3, 6, 6), "label", 100)

    def test_without_pyarrow(self, tmp_path, monkeypatch):
        path = self.write(tmp_path / "a.parquet")
        monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
        with refuses(NotInstalled, package="pyarrow", extra="data"):
            formats.read_parquet(path, (3, 6, 6), "label", 100)
