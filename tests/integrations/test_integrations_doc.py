"""The snippets of docs/integrations.md run as they stand there."""

import sys
from functools import partial

import documented
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

snippet = partial(documented.snippet, "integrations.md")


def language_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=6,
    )
    tokens = torch.randint(11, (16, 6))
    texts = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.LlamaForCausalLM(config), texts


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("WANDB_SILENT", "true"),
        ("WANDB_ERROR_REPORTING", "false"),
        ("WANDB__SERVICE_WAIT", "300"),  # its process starts late on a busy machine
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("ACCELERATE_USE_CPU", "true"),
    ):
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")
@pytest.mark.filterwarnings("ignore:.*number of training batches.*")
def test_lightning(here, capsys):
    pytest.importorskip("pytorch_lightning")
    loader = DataLoader(TensorDataset(torch.randn(96, 4), torch.randint(3, (96,))), batch_size=8)
    names = {"loader": loader}
    exec(snippet("lightning"), names)
    norms = names["watching"].watched.records.series("weight_norm")
    assert [row.step for row in norms] == [1, 10, 20]
    assert "effective learning rate" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_transformers(here, capsys):
    model, texts = language_model()
    names = {"model": model, "texts": texts, "folder": str(here)}
    exec(snippet("transformers"), names)
    assert names["watching"].watched.steps == names["optimizer"].steps == 2
    assert "effective learning rate" in capsys.readouterr().out


def test_accelerate(here):
    pytest.importorskip("accelerate")
    model, texts = language_model()
    names = {"model": model.train(), "loader": DataLoader(texts, batch_size=4)}
    exec(snippet("accelerate"), names)
    assert names["watched"].steps == 4


# MLflow's own use of SQLAlchemy and of sqlite
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_trackers(here):
    for library in ("tensorboard", "wandb", "mlflow", "sqlalchemy"):
        pytest.importorskip(library)
    sys.modules["wandb"].teardown()  # or it works in the folder of an earlier test
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for _ in range(20):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    database = f"sqlite:///{here}/mlflow.db"
    names = {"model": model, "optimizer": optimizer, "train": train}
    exec(snippet("trackers"), names | {"folder": str(here / "board"), "database": database})
    sys.modules["wandb"].teardown()  # its process has written all
    assert list(here.glob("board/events.*"))
    assert list(here.glob("wandb/offline-run-*/*.wandb"))
    assert (here / "mlflow.db").exists()
