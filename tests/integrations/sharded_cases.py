"""Sharded models in Lightning, accelerate and Trainer: `... FOLDER RANK SIZE DEVICE [CASE]`."""

import logging
import os
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
if __name__ == "__main__":
    _, FOLDER, RANK, SIZE, *_ = sys.argv
    os.environ |= {"RANK": RANK, "LOCAL_RANK": RANK, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "here"}
    os.environ |= {"GROUP_RANK": "0", "ACCELERATE_USE_CPU": "true"}

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from oracle.two_ranks import run_cases
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from decaylab import watch
from decaylab.integrations import lightning as lightning_watch
from decaylab.integrations import transformers as transformers_watch
from decaylab.probes import FREE, Probe
from decaylab.records import read_recording

CASES = {}
EXAMPLES, WIDTH, CLASSES = 32, 4, 3


def case(function):
    CASES[function.__name__] = function
    return function


def network():
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, CLASSES))
    return nn.Sequential(*layers).double()


def examples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.2)


def expected():
    """Two epochs of batches of 8, unshuffled, in one process."""
    model, (x, y) = network(), examples()
    optimizer = adamw(model)
    with watch(model, optimizer, every=2, probes="diagnosis", inputs=x[:4]) as watched:
        for _ in range(2):
            for at in range(0, EXAMPLES, 8):
                F.cross_entropy(model(x[at : at + 8]), y[at : at + 8]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return values(watched.records.rows)


def values(rows, prefix=""):
    """By step and name, without outcomes; layers are within `prefix`."""
    kept = [row for row in rows if not row.name.startswith("outcome/")]
    return {(row.step, row.name.replace(f"/{prefix}", "/")): row.value for row in kept}


def assert_same(found, wanted):
    differ = {k: (found.get(k), wanted.get(k)) for k in found.keys() ^ wanted.keys()}
    assert not differ, differ
    wrong = {
        key: (found[key], value)
        for key, value in wanted.items()
        if not abs(found[key] - value) <= 1e-8 * max(1.0, abs(value))
    }
    assert not wrong, wrong


@case
def lightning(rank):
    """`ModelParallelStrategy`, which has `configure_model` shard."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def configure_model(self):
            if not isinstance(self.net[0].weight, DTensor):
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.net[0], mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch, _):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return adamw(self.net)

    x, y = examples()
    options = {"every": 2, "probes": "diagnosis", "inputs": x[:4]}
    callback = lightning_watch.WatchCallback(
        **options, folder=f"{FOLDER}/lightning", module="net", log=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(SIZE),
        strategy=ModelParallelStrategy(data_parallel_size=int(SIZE), tensor_parallel_size=1),
        max_epochs=2,
        callbacks=[callback],
        default_root_dir=FOLDER,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        use_distributed_sampler=False,
    )
    own = TensorDataset(x[rank :: int(SIZE)], y[rank :: int(SIZE)])
    trainer.fit(Module(), DataLoader(own, batch_size=4))
    assert_same(values(callback.watched.records.rows), expected())
    if rank == 0:
        recording = read_recording(f"{FOLDER}/lightning")
        assert values(recording.rows.rows) == values(callback.watched.records.rows)
        assert "train_loss" in recording.outcomes


@case
def lightning_data_parallel(rank):
    """The first one alone writes, and warns."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return adamw(self)

    def broken(moment):
        raise ZeroDivisionError

    x, y = examples()
    folder = f"{FOLDER}/lightning-parallel"
    callback = lightning_watch.WatchCallback(
        every=2, probes=[*FREE, Probe("broken", "free", broken)], inputs=x[:4], folder=folder
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(SIZE),
        strategy="ddp",
        max_steps=4,
        callbacks=[callback],
        default_root_dir=FOLDER,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        use_distributed_sampler=False,
    )
    own = TensorDataset(x[rank :: int(SIZE)], y[rank :: int(SIZE)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(), DataLoader(own, batch_size=4))
    assert sum("ZeroDivisionError" in str(w.message) for w in caught) == (rank == 0)
    found = values(callback.watched.records.rows)
    assert (4, "weight_norm/net.0") in found
    if rank == 0:
        rows = read_recording(folder).rows
        assert rows.superseded == 0
        assert values(rows.rows) == found


@case
def lightning_interrupted_on_one_rank(rank):
    """Amid a round of two optimizers: it waits for nobody."""
    model = network()
    fully_shard(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[3])]
    callback = lightning_watch.WatchCallback()
    callback._watched = watch(model, optimizers, every=1)
    if rank == 0:
        optimizers[0].step()
        callback.on_exception(None, model, KeyboardInterrupt())
        assert not callback.watched.records.rows
        optimizers[0].step()
        assert callback.watched.steps == 0
    dist.barrier()


BY_SIZE = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20}
BY_BLOCK = {
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
}


def sharding(accelerator, wrapping):
    """accelerate shards on accelerators alone, unless it is told what it has found."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrapping)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    assert accelerator.is_fsdp2
    return accelerator


@case
def accelerate(rank):
    accelerator = sharding(Accelerator(cpu=True), BY_SIZE)
    model, (x, y) = network(), examples()
    batches = DataLoader(TensorDataset(x, y), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches)
    folder = f"{FOLDER}/accelerate"
    options = {"every": 2, "probes": "diagnosis", "inputs": x[:4], "folder": folder}
    with watch(model, optimizer, **options) as watched:
        for _ in range(2):
            for inputs, labels in loader:
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_same(values(watched.records.rows), expected())
    if rank == 0:
        written = read_recording(folder).rows.rows
        assert values(written) == values(watched.records.rows)


def language_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=6,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).double()


class Sharded(transformers.Trainer):
    """Trainer under accelerate's FSDP2."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        sharding(self.accelerator, BY_BLOCK)
        self.is_fsdp_enabled = True


@case
def hugging_face_trainer(rank):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(11, (24, 6), generator=generator)
    texts = [{"input_ids": row, "labels": row} for row in tokens]
    inputs = {"input_ids": tokens[:3]}
    model = language_model()
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    with watch(model, optimizer, every=2, inputs=inputs) as alone:
        for at in range(0, 24, 8):
            batch = tokens[at : at + 8]
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model = language_model()
    callback = transformers_watch.WatchCallback(every=2, inputs=inputs, folder=f"{FOLDER}/trainer")
    arguments = transformers.TrainingArguments(
        output_dir=f"{FOLDER}/output",
        use_cpu=True,
        max_grad_norm=0,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        learning_rate=0.02,
        weight_decay=0.1,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    trainer = Sharded(
        model,
        arguments,
        train_dataset=texts,
        callbacks=[callback],
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    )
    trainer.train()
    assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    found = values(callback.watched.records.rows)
    assert any(name.startswith("size_response") for _, name in found)
    assert_same(found, values(alone.records.rows))
    if rank == 0:
        recording = read_recording(f"{FOLDER}/trainer")
        assert values(recording.rows.rows) == found
        assert "loss" in recording.outcomes


def main(folder, rank, size, device, *chosen):
    warnings.simplefilter("ignore")  # of these libraries
    logging.disable(logging.WARNING)
    run_cases(CASES, folder, int(rank), int(size), chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
