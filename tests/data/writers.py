"""Writers of every format that decaylab reads, for the tests: written from the formats' papers."""

import gzip
import io
import struct
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_idx(path, array):
    data = idx_bytes(array)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


def write_mnist(folder, splits, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    for stem, (images, labels) in (("train", splits["train"]), ("t10k", splits["test"])):
        write_idx(folder / f"{stem}-images-idx3-ubyte{suffix}", images[:, 0])
        write_idx(folder / f"{stem}-labels-idx1-ubyte{suffix}", labels.astype(np.uint8))


def cifar_bytes(images, labels, coarse=None):
    records = []
    for i in range(len(images)):
        if coarse is not None:
            records.append(bytes([coarse[i]]))
        records.append(bytes([labels[i]]) + images[i].tobytes())
    return b"".join(records)


def cifar_files(name, splits):
    """Path inside the archive -> bytes, in the official layout."""
    (images, labels), (test_images, test_labels) = splits["train"], splits["test"]
    if name == "cifar100":
        return {
            "cifar-100-binary/train.bin": cifar_bytes(images, labels, labels // 5),
            "cifar-100-binary/test.bin": cifar_bytes(test_images, test_labels, test_labels // 5),
            "cifar-100-binary/fine_label_names.txt": b"apple\n",
        }
    size = len(images) // 5
    files = {
        f"cifar-10-batches-bin/data_batch_{i + 1}.bin": cifar_bytes(
            images[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]
        )
        for i in range(5)
    }
    files["cifar-10-batches-bin/test_batch.bin"] = cifar_bytes(test_images, test_labels)
    files["cifar-10-batches-bin/batches.meta.txt"] = b"airplane\n"
    return files


def write_cifar_folder(folder, name, splits):
    for path, data in cifar_files(name, splits).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def write_archive(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def encoded(image, image_format):
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    stream = io.BytesIO()
    options = {"lossless": True} if image_format == "WEBP" else {}
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, image_format, **options)
    return stream.getvalue()


def write_shard(path, images, labels, columns=("img", "label"), image_format="PNG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": encoded(image, image_format), "path": None} for image in images]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {columns[0]: pa.array(rows, kind), columns[1]: pa.array(labels.tolist(), pa.int64())}
    )
    pq.write_table(table, path, row_group_size=7)


def write_parquet(folder, splits, shards=2, **options):
    for split, (images, labels) in splits.items():
        count = shards if split == "train" else 1
        parts = zip(np.array_split(images, count), np.array_split(labels, count), strict=True)
        for i, (some, theirs) in enumerate(parts):
            write_shard(folder / f"{split}-{i:05d}-of-{count:05d}.parquet", some, theirs, **options)
