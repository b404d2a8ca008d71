"""Data sets as uint8 tensors on the training device, and the batches made from them there."""

from decaylab.data.batches import Batches, evaluation_batches
from decaylab.data.downloads import fetch
from decaylab.data.facts import DATA_SETS, Facts
from decaylab.data.sets import DataSet, Split
from decaylab.data.sources import find, load

__all__ = [
    "DATA_SETS",
    "Batches",
    "DataSet",
    "Facts",
    "Split",
    "evaluation_batches",
    "fetch",
    "find",
    "load",
]
