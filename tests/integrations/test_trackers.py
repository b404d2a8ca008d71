"""Trackers against the real libraries, offline; and what happens when one is dead."""

import builtins
import json
import math
import warnings

import pytest
import torch
from oracle.tiny_nets import tiny_net, train
from refusals import refuses

from decaylab import watch
from decaylab.errors import NotInstalled
from decaylab.integrations.trackers import MLflow, TensorBoard, WandB
from decaylab.records import Row

ROWS = [
    Row(1, 0, 0.1, "weight_norm/0", 2.0),
    Row(1, 0, 0.1, "weight_norm", 3.0),
    Row(5, 0, 0.2, "weight_norm/0", 1.5),
    Row(5, 0, 0.2, "weight_norm", math.nan),
]


def watched_run(tracker, steps=4):
    model, inputs, labels = tiny_net("bn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    with watch(model, optimizer, every=2, trackers=[tracker]) as watched:
        train(model, optimizer, inputs, labels, steps)
    return watched


def same(found, expected):
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, a), (_, b) in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-6, nan_ok=True)


def series(rows, name):
    return [(row.step, row.value) for row in rows if row.name == name]


# -- TensorBoard --


def scalars(folder, name):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_what_was_recorded(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path / "board")
    watched = watched_run(tracker)
    for name in ("weight_norm/0", "effective_lr/0", "decay_exposure/0"):
        expected = series(watched.records.rows, name)
        assert [step for step, _ in expected] == [1, 2, 4]
        same(scalars(tmp_path / "board", name), expected)  # before it is closed
    tracker.close()


def test_a_writer_of_ones_own_is_left_open(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        tracker = TensorBoard(writer)
        tracker.log(ROWS)
        tracker.close()
        writer.add_scalar("mine", 1.0, 1)
    same(scalars(tmp_path, "weight_norm"), series(ROWS, "weight_norm"))
    same(scalars(tmp_path, "mine"), [(1, 1.0)])


# -- Weights & Biases --


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # its process starts late on a busy machine
    return pytest.importorskip("wandb")


def log_records(data):
    """The records of a file in LevelDB's log format, behind W&B's header of seven bytes."""
    position, pieces = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # the rest of a block that no record header fits in
            position += 32768 - position % 32768
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""


def offline_rows(folder):
    """What `wandb sync` would upload: a dict per call of `log`, and the metrics' step metrics."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # a finished run may not be on disk before W&B's process has ended
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    logged, axes = [], {}
    for data in log_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            logged.append(
                {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            )
        elif record.WhichOneof("record_type") == "metric":
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return logged, axes


def test_wandb_offline_has_what_was_recorded(wandb, tmp_path):
    # by argument: W&B reads the environment once in a process
    tracker = WandB(project="decaylab-test", mode="offline", dir=str(tmp_path))
    watched = watched_run(tracker)
    tracker.close()
    assert wandb.run is None
    found, axes = offline_rows(tmp_path)
    assert [row["decaylab/step"] for row in found] == [1, 2, 4]
    for name in ("weight_norm/0", "weight_norm", "effective_lr/0"):
        same(
            [(row["decaylab/step"], row[name]) for row in found],
            series(watched.records.rows, name),
        )
    assert axes["weight_norm"] == axes["weight_norm/*"] == "decaylab/step"


def test_the_active_wandb_run_is_used_and_left_open(wandb, tmp_path):
    with wandb.init(project="decaylab-test", mode="offline", dir=str(tmp_path)) as run:
        tracker = WandB()
        tracker.log(ROWS)
        tracker.close()
        assert wandb.run is run
        run.log({"mine": 1.0})
    logged, _ = offline_rows(tmp_path)
    assert [row.get("decaylab/step") for row in logged] == [1, 5, None]
    assert logged[1]["weight_norm/0"] == 1.5
    assert logged[2]["mine"] == 1.0


# -- MLflow --


@pytest.fixture
def client(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    return mlflow.MlflowClient()


def history(client, run_id, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


# MLflow's own use of SQLAlchemy and of sqlite
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_mlflow_has_what_was_recorded(client):
    import mlflow

    tracker = MLflow(experiment="mine")
    assert tracker.run_id is None
    watched = watched_run(tracker)
    assert client.get_run(tracker.run_id).info.status == "RUNNING"
    tracker.close()
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    for name in ("weight_norm/0", "weight_norm", "effective_lr/0"):
        same(history(client, tracker.run_id, name), series(watched.records.rows, name))

    with mlflow.start_run() as active:  # one that is there is used, and left open
        shared = MLflow()
        shared.log([*ROWS, Row(7, 0, 0.3, "weight_norm/a[b]", 1.0)])
        shared.close()
        assert client.get_run(active.info.run_id).info.status == "RUNNING"
        same(history(client, active.info.run_id, "weight_norm"), series(ROWS, "weight_norm"))
        same(history(client, active.info.run_id, "weight_norm/a_b_"), [(7, 1.0)])

    many = [Row(step, 0, 0.0, "weight_norm", float(step)) for step in range(1, 1502)]
    long = MLflow(experiment="mine")  # more than one request holds
    long.log(many)
    same(history(client, long.run_id, "weight_norm"), series(many, "weight_norm"))


# -- dead ones --


class Dead:
    def __init__(self):
        self.calls = 0

    def log(self, rows):
        self.calls += 1
        raise ConnectionError("no route")


def test_a_dead_tracker_warns_once_and_training_is_what_it_would_have_been(tmp_path):
    def run(trackers):
        model, inputs, labels = tiny_net("bn")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, every=1, trackers=trackers) as watched:
            train(model, optimizer, inputs, labels, 4)
        return watched, list(model.state_dict().values())

    class Alive:
        def __init__(self):
            self.rows = []

        def log(self, rows):
            self.rows.extend(rows)

    dead, alive = Dead(), Alive()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched, weights = run([dead, alive])
    assert [str(warning.message) for warning in caught] == [
        "watch: Dead is dropped at step 1: ConnectionError: no route"
        " (shown once; training continues)"
    ]
    assert dead.calls == 1
    assert tuple(alive.rows) == watched.records.rows  # the one behind it misses nothing
    for a, b in zip(weights, run([])[1], strict=True):
        assert torch.equal(a, b)


def test_a_server_that_is_not_there(monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = MLflow(tracking_uri="http://127.0.0.1:9")  # building it does not connect
    with pytest.warns(UserWarning, match="MLflow is dropped at step 1: .*training continues"):
        watched = watched_run(tracker)
    assert [row.step for row in watched.records.series("weight_norm")] == [1, 2, 4]
    tracker.close()


def test_a_folder_that_cannot_be_written(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="TensorBoard is dropped at step 1"):
        watched = watched_run(TensorBoard(tmp_path / "file"))
    assert len(watched.records.series("weight_norm")) == 3


def test_closing_a_run_that_has_died_only_warns():
    pytest.importorskip("wandb")

    class Run:
        def define_metric(self, *_, **__): ...

        def log(self, _): ...

        def finish(self):
            raise ConnectionError("no route")

    tracker = WandB()
    tracker._library = type("library", (), {"run": None, "init": staticmethod(Run)})
    tracker.log(ROWS)
    with pytest.warns(UserWarning, match=r"WandB .*ConnectionError: no route"):
        tracker.close()


@pytest.mark.parametrize(
    ("make", "library"),
    [(lambda: TensorBoard("x"), "tensorboard"), (WandB, "wandb"), (MLflow, "mlflow")],
)
def test_a_missing_library_is_named_with_its_extra(make, library, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == library or name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr("importlib.import_module", without)
    with refuses(NotInstalled, extra=library):
        make()


# -- counting on --


def test_resume_counts_on_and_voids_what_came_after(tmp_path):
    from decaylab.records.packing import read_rows

    model, inputs, labels = tiny_net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for resumed_from, steps in ((0, 6), (4, 4)):  # killed after 6 steps, checkpoint at 4
        with watch(model, optimizer, every=2, folder=tmp_path) as watched:
            if resumed_from:
                watched.resume(resumed_from)
            train(model, optimizer, inputs, labels, steps)
    kept = read_rows(tmp_path / "rows.jsonl")
    for name in ("weight_norm", "rotation/0"):
        assert [row.step for row in kept.series(name)] == [1, 2, 4, 6, 8]
    assert watched.records.rows == kept.rows
