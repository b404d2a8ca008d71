import numpy as np
import pytest

from decaylab.data import DATA_SETS
from decaylab.data.facts import Facts, SplitFacts


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache or data folder."""
    monkeypatch.setenv("DECAYLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DECAYLAB_DATA", raising=False)
    return tmp_path / "cache"


def _split(shape, classes, per_class, seed):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (classes * per_class, *shape))
    # Channels that differ, so that the check can tell them apart.
    images //= np.arange(1, shape[0] + 1)[:, None, None]
    labels = random.permutation(np.repeat(np.arange(classes), per_class))
    return images.astype(np.uint8), labels


def _split_facts(images, labels):
    pixels = images.astype(np.float64) / 255
    return SplitFacts(
        tuple(int((labels == label).sum()) for label in range(labels.max() + 1)),
        tuple(float(pixels[:, channel].mean()) for channel in range(images.shape[1])),
        tuple(float(pixels[:, channel].std()) for channel in range(images.shape[1])),
    )


@pytest.fixture
def small(monkeypatch):
    """Replace a published data set by a small random one: its splits, {split: (images, labels)}."""

    def make(name):
        shape, classes = DATA_SETS[name].shape, DATA_SETS[name].classes
        splits = {
            "train": _split(shape, classes, 2, seed=1),
            "test": _split(shape, classes, 1, seed=2),
        }
        facts = {split: _split_facts(*arrays) for split, arrays in splits.items()}
        old = DATA_SETS[name]
        monkeypatch.setitem(DATA_SETS, name, Facts(name, shape, old.mean, old.std, facts))
        return splits

    return make
