"""Runs that take turns in one process."""

from dataclasses import replace

import pytest
import torch

from decaylab.data import load
from decaylab.errors import Diverged
from decaylab.records import RunStore
from decaylab.training import Execution, RunSpec, take_turns, train, train_to_end

BASE = RunSpec(hidden=(8, 8), batch_norm=True, batch_size=256, epochs=2, lr_drop_every=1)
SPECS = {
    "sgd": replace(BASE, augment=True),
    "adam": replace(BASE, optimizer="adam", decay="decoupled", weight_decay=0.1, seed=3, epochs=3),
    "kfac": replace(BASE, optimizer="kfac-g", refresh_every=3, invert_every=4, inversion_lag=2),
    "wild": replace(BASE, lr=1e30, batch_norm=False),
}
HOW = Execution(every_step=True, at_once=4)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def turns(data, store=None):
    return take_turns(
        {name: train(spec, data=data, store=store, execution=HOW) for name, spec in SPECS.items()}
    )


def test_each_gives_what_it_gives_alone_and_one_that_diverges_touches_nobody(digits):
    order, last = [], {}
    for name, given in turns(digits):
        order.append(name)
        last[name] = given
    assert order[:8] == [*SPECS, *SPECS]
    assert isinstance(last.pop("wild"), Diverged)
    for name, progress in last.items():
        alone = train_to_end(SPECS[name], data=digits)
        assert progress.kind == "finished"
        for key, value in alone.model.state_dict().items():
            assert torch.equal(progress.model.state_dict()[key], value), (name, key)


def test_leaving_saves_all(digits, tmp_path):
    store, leaving = RunStore(tmp_path), turns(digits, RunStore(tmp_path))
    for _ in range(6):
        next(leaving)
    leaving.close()
    for name in ("sgd", "adam", "kfac"):
        manifest = store.folder(SPECS[name].id).manifest()
        assert (manifest.status, manifest.at_once) == ("interrupted", 4)
        assert store.folder(SPECS[name].id).checkpoint.exists()


def test_an_interruption_ends_all(digits, tmp_path):
    def interrupted():
        yield from train(SPECS["sgd"], data=digits, execution=HOW)
        raise KeyboardInterrupt

    store = RunStore(tmp_path)
    other = train(SPECS["adam"], data=digits, store=store, execution=HOW)
    with pytest.raises(KeyboardInterrupt):
        list(take_turns({1: interrupted(), 2: other}))
    assert store.folder(SPECS["adam"].id).manifest().status == "interrupted"
