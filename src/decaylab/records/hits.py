"""Which images of a test set a run classifies correctly: a bit for each image."""

import base64
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decaylab.errors import Damaged


@dataclass(frozen=True)
class TestHits:
    """The test images that a run classifies correctly at its end, in the order of the test set.

    Two runs are compared on the same images only if `order` and `images` agree: files of a data set
    (archive, parquet) may have its images in different orders.

    Attributes:
        images: how many there are.
        order: the CRC-32 of the labels (int64, in the order of the images).
        bits: one bit for each image, packed (first image: highest bit) and in base64.
    """

    __test__ = False  # not a test, whatever pytest makes of its name

    images: int
    order: int
    bits: str

    @classmethod
    def pack(cls, correct: NDArray[np.bool_], labels: NDArray[np.int64]) -> "TestHits":
        """Pack one boolean an image.

        >>> hits = TestHits.pack(np.array([True, False, True]), np.array([0, 1, 2]))
        >>> hits.bits, hits.unpack().tolist()
        ('oA==', [True, False, True])
        """
        order = zlib.crc32(np.ascontiguousarray(labels, dtype=np.int64).tobytes())
        bits = base64.b64encode(np.packbits(correct).tobytes()).decode()
        return cls(len(correct), order, bits)

    def unpack(self) -> NDArray[np.bool_]:
        """One boolean an image."""
        try:
            packed = np.frombuffer(base64.b64decode(self.bits, validate=True), dtype=np.uint8)
            if len(packed) != (self.images + 7) // 8:
                raise ValueError(f"{len(packed)} bytes")
        except ValueError as error:
            what = f"the list of hits among {self.images} test images"
            raise Damaged(what, error, "train the run again") from error
        return np.unpackbits(packed, count=self.images).astype(bool)

    def comparable(self, other: "TestHits") -> bool:
        """Whether both are of the same images in the same order."""
        return (self.images, self.order) == (other.images, other.order)
