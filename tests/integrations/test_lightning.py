"""Lightning itself: K-FAC steps as in a plain loop, and the callback records what happened."""

import warnings

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from decaylab.errors import Lacks, WrongType

pl = pytest.importorskip("pytorch_lightning")

from oracle.plain_kfac import KFAC  # noqa: E402

from decaylab import parameter_groups, watch  # noqa: E402
from decaylab.integrations.lightning import WatchCallback  # noqa: E402
from decaylab.optim.first_order import sgd  # noqa: E402
from decaylab.records.packing import read_rows  # noqa: E402

pytestmark = [
    # Lightning's own words about this machine, and about tests that give it neither logger nor GPU
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]
EXACT = {"outputs": "exact", "refresh_every": 2, "invert_every": 2, "damping": 1e-2}


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (24,), generator=generator)


def net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


def kfac(model):
    return KFAC(model, 0.05, curvature="gauss-newton", weight_decay=0.1, **EXACT)


def decoupled_sgd(model):
    return sgd(parameter_groups(model, weight_decay=0.1, decay="decoupled"), lr=0.05)


def plain_loop(make, epochs=2, accumulate=1):
    """The loop that Lightning is compared with."""
    model = net()
    optimizer = make(model)
    x, y = data()
    for _ in range(epochs):
        for i, (a, b) in enumerate(zip(x.split(8), y.split(8), strict=True)):
            (cross_entropy(model(a), b) / accumulate).backward()
            if (i + 1) % accumulate == 0 or i == 2:
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


class Module(pl.LightningModule):
    def __init__(self, make, manual=False, through_self=False):
        super().__init__()
        self.net = net()
        self.make, self.through_self = make, through_self
        self.automatic_optimization = not manual

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        loss = cross_entropy(self(x) if self.through_self else self.net(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def validation_step(self, batch, _):
        cross_entropy(self(batch[0]), batch[1])  # a forward pass that is not to be observed

    def configure_optimizers(self):
        return self.make(self if self.through_self else self.net)

    def train_dataloader(self):
        return DataLoader(TensorDataset(*data()), batch_size=8)

    val_dataloader = train_dataloader


def fit(module, folder, callbacks=(), ckpt_path=None, **options):
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def assert_same_weights(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [kfac, decoupled_sgd])
@pytest.mark.parametrize("manual", [False, True])
def test_steps_are_those_of_a_plain_loop(make, manual, tmp_path):
    module = Module(make, manual=manual)
    fit(module, tmp_path)
    model, _ = plain_loop(make)
    assert (model[0].weight - net()[0].weight).norm() > 1e-2
    assert_same_weights(module.net, model)


def test_kfac_of_the_whole_module_and_accumulated_gradients(tmp_path):
    module = Module(kfac, through_self=True)
    trainer = fit(module, tmp_path, accumulate_grad_batches=2)
    model, optimizer = plain_loop(kfac, accumulate=2)
    assert_same_weights(module.net, model)
    factors = trainer.optimizers[0].factors()
    assert factors.keys() == {f"net.{name}" for name in optimizer.factors()}
    for name, expected in optimizer.factors().items():
        torch.testing.assert_close(factors[f"net.{name}"].A, expected.A, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("each_its_own", [False, True])
def test_the_callback_records_what_watch_records(tmp_path, each_its_own):
    probes = ["weight_norm", "effective_lr", "movement"]
    callback = WatchCallback(every=2, probes=probes)
    if each_its_own:
        callback = WatchCallback(probes=dict.fromkeys(probes, 2))
    fit(Module(decoupled_sgd), tmp_path, [callback])
    model = net()
    optimizer = decoupled_sgd(model)
    x, y = data()
    with watch(model, optimizer, every=2) as watched:
        for _ in range(2):
            for a, b in zip(x.split(8), y.split(8), strict=True):
                cross_entropy(model(a), b).backward()
                optimizer.step()
                optimizer.zero_grad()
    for name in ("weight_norm/{}0", "effective_lr/{}0", "rotation/{}3", "update_norm/{}0"):
        found = callback.watched.records.series(name.format("net."))
        expected = watched.records.series(name.format(""))
        assert [row.step for row in found] == [1, 2, 4, 6]
        assert [row.epoch for row in found] == [0, 0, 1, 1]
        assert [row.value for row in found] == pytest.approx([row.value for row in expected])
    assert callback.watched.steps == 6
    assert not callback.watched.optimizer._optimizer_step_post_hooks  # off when it ends


@pytest.mark.parametrize("manual", [False, True])
def test_probes_of_kfac_and_with_inputs(manual, tmp_path):
    callback = WatchCallback(every=3, probes="diagnosis", inputs=data()[0][:8])
    module = Module(kfac, manual=manual)
    fit(module, tmp_path, [callback])
    records = callback.watched.records
    for name in (
        "second_order_share/0",
        "jacobian_norm",
        "weight_norm/3",
    ):  # named as K-FAC names them
        assert [row.step for row in records.series(name)] == [1, 3, 6]
    assert_same_weights(module.net, plain_loop(kfac)[0])


def test_lightnings_own_loggers_get_the_rows(tmp_path):
    from pytorch_lightning.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    callback = WatchCallback(every=2, probes=["weight_norm"], folder=tmp_path / "watch")
    fit(Module(kfac), tmp_path, [callback], logger=logger, log_every_n_steps=1)
    lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    header = lines[0].split(",")
    found = [dict(zip(header, line.split(","), strict=True)) for line in lines[1:]]
    norms = {int(row["step"]): float(row["weight_norm"]) for row in found if row["weight_norm"]}
    series = callback.watched.records.series("weight_norm")
    assert norms == pytest.approx({row.step: row.value for row in series})
    assert list(norms) == [1, 2, 4, 6]
    assert read_rows(tmp_path / "watch/rows.jsonl").series("weight_norm") == series


def test_a_dead_logger_does_not_stop_the_training(tmp_path):
    from pytorch_lightning.loggers import CSVLogger

    class Dead(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if "weight_norm" in metrics:
                raise ConnectionError("no route")

    module = Module(kfac)
    callback = WatchCallback(every=1, probes=["weight_norm"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, tmp_path, [callback], logger=Dead(tmp_path))
    said = [str(w.message) for w in caught if "no route" in str(w.message)]
    assert len(said) == 1
    assert len(callback.watched.records.series("weight_norm")) == 6
    assert_same_weights(module.net, plain_loop(kfac)[0])


def test_a_resumed_fit_is_the_uninterrupted_one_and_counts_on(tmp_path):
    whole = Module(kfac)
    fit(whole, tmp_path, max_epochs=3)
    first = fit(Module(kfac), tmp_path, max_epochs=1)
    first.save_checkpoint(tmp_path / "one.ckpt")
    callback, resumed = WatchCallback(every=2, probes=["weight_norm"]), Module(kfac)
    trainer = fit(resumed, tmp_path, [callback], ckpt_path=tmp_path / "one.ckpt", max_epochs=3)
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
    assert trainer.optimizers[0].steps == 9
    assert [row.step for row in callback.watched.records.series("weight_norm")] == [4, 6, 8]


class TwoOptimizers(Module):
    """The second takes every third step of the first, as in adversarial training."""

    def __init__(self):
        super().__init__(None, manual=True)

    def training_step(self, batch, i):
        first, second = self.optimizers()
        for optimizer in (first, second) if i == 0 else (first,):
            self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[part].parameters(), 0.1) for part in (0, 3)]


def test_a_resumed_fit_of_several_optimizers_counts_on(tmp_path):
    steps = [1, 2, 3, 4, 5, 6]

    def callback(folder):
        return WatchCallback(every=1, folder=tmp_path / folder, log=False)

    first = fit(TwoOptimizers(), tmp_path, [callback("a")], max_epochs=1)
    first.save_checkpoint(tmp_path / "one.ckpt")
    fit(TwoOptimizers(), tmp_path, [callback("a")], ckpt_path=tmp_path / "one.ckpt")
    found = read_rows(tmp_path / "a" / "rows.jsonl")
    assert [row.step for row in found.series("weight_norm/net.0")] == steps
    again = fit(TwoOptimizers(), tmp_path, [callback("b")], max_epochs=1)  # the same trainer
    again.fit_loop.max_epochs = 2
    again.fit(again.lightning_module)
    found = read_rows(tmp_path / "b" / "rows.jsonl")
    assert [row.step for row in found.series("weight_norm/net.0")] == steps


def test_hooks_come_off_when_training_fails(tmp_path):
    class Failing(Module):
        def training_step(self, batch, i):
            if i == 1:
                raise ValueError("stop")
            return super().training_step(batch, i)

    callback, module = WatchCallback(every=1), Failing(decoupled_sgd)
    with pytest.raises(ValueError, match="stop"):
        fit(module, tmp_path, [callback])
    assert callback.watched.steps == 1
    assert not callback.watched.optimizer._optimizer_step_post_hooks


def test_wrong_use_is_one_sentence(tmp_path):
    class OfTheWhole(Module):
        def configure_optimizers(self):
            return kfac(self)  # though the training step calls self.net

    with refuses(Lacks, owner="the forward pass of OfTheWhole"):
        fit(OfTheWhole(kfac), tmp_path)
    with refuses(Lacks, what="records yet"):
        _ = WatchCallback().watched
    with refuses(WrongType, name="inputs"):
        fit(Module(kfac), tmp_path, [WatchCallback(inputs=3)])


def test_a_module_without_forward_is_watched_in_the_part_that_has_one(tmp_path):
    class NoForward(Module):
        forward = pl.LightningModule.forward

        def validation_step(self, batch, _):
            pass

    inputs = data()[0]
    with refuses(Lacks, what="forward for the inputs"):
        fit(NoForward(decoupled_sgd), tmp_path, [WatchCallback(inputs=inputs)])
    callback = WatchCallback(inputs=inputs, probes="diagnosis", module="net")
    fit(NoForward(decoupled_sgd), tmp_path, [callback])
    assert callback.watched.records.last("jacobian_norm") > 0
