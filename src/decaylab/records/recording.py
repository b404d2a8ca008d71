"""What was recorded of a run, in one form for our own runs, `watch` and older versions.

Everything that judges a run reads a `Recording` and nothing else.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decaylab.errors import Damaged, Lacks
from decaylab.records import migration
from decaylab.records.files import MALFORMED, TRAIN_AGAIN
from decaylab.records.packing import has_rows, read_contents
from decaylab.records.rows import PACKED, Contents, Event, Rows, SettingsChange
from decaylab.records.settings import LayerSettings
from decaylab.records.store import RunFolder

Series = tuple[tuple[int, float], ...]
"""(step, value), by step."""

LOGGED = "outcome/"
"""What the row names of logged outcomes begin with."""
# What our own trainer calls its outcomes.
OUTCOMES = {
    "train/running_loss": "loss",
    "train/running_accuracy": "accuracy",
    "train/loss": "train_loss",
    "train/accuracy": "train_accuracy",
    "test/loss": "test_loss",
    "test/accuracy": "test_accuracy",
}


@dataclass(frozen=True)
class Meta:
    """Facts of a recorded run; None if they are not known.

    Attributes:
        folder: where the records are. version: the decaylab version that made them.
        steps_per_epoch, batch_size: of the training. epochs: as planned.
        status, message: of a run of ours (`Manifest`); "" for others.
        spec: the spec of a run of ours, key by key.
        probes: by name, how each probe measured: mode of batch normalisation, examples, batch.
        inputs: the root mean squares of the tensors that `watch` was given to measure on.
    """

    folder: Path | None = None
    version: str | None = None
    steps_per_epoch: int | None = None
    batch_size: int | None = None
    epochs: int | None = None
    status: str = ""
    message: str = ""
    spec: Mapping[str, Any] | None = None
    probes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inputs: Sequence[float] | None = None


@dataclass(frozen=True)
class Recording:
    """Everything that was recorded of one run.

    Attributes:
        name: what to call it.
        rows: the numbers; `quantity`, or `quantity/layer` with layers named by `named_modules`.
        settings: by layer, (from step, how it is stepped), by step.
        outcomes: by name, losses and accuracies: as logged, and of our own runs `loss` and
            `accuracy` (running, in training), `train_loss`, `test_loss`, `train_accuracy` and
            `test_accuracy`.
        events: what happened to the recording itself.
        meta: facts of the run.
    """

    name: str
    rows: Rows
    settings: Mapping[str, tuple[tuple[int, LayerSettings], ...]] = field(default_factory=dict)
    outcomes: Mapping[str, Series] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    meta: Meta = field(default_factory=Meta)

    def series(self, name: str) -> Series:
        """(step, value) of one name, by step; empty if it was not recorded."""
        return self.rows.points(name)

    def settings_at(self, layer: str, step: int) -> LayerSettings | None:
        """How a layer was stepped at `step`; before the first record of it, as in that one."""
        timeline = self.settings.get(layer, ())
        passed = [settings for start, settings in timeline if start <= step]
        return passed[-1] if passed else timeline[0][1] if timeline else None


def read_recording(source: str | Path | RunFolder) -> Recording:
    """Read a run folder of ours, or one that `watch(folder=...)` wrote, of this version or older.

    A file of rows may be given instead of its folder.
    """
    path = source.path if isinstance(source, RunFolder) else Path(source)
    folder = path.parent if path.is_file() else path
    rows = path if path.is_file() and path.name != PACKED else folder / "rows.jsonl"
    by_trainer = (folder / "spec.toml").exists()
    if not (by_trainer or rows.exists() or has_rows(folder)):
        raise _no_records(path)
    with RunFolder(folder).reading(rows.name):
        contents = read_contents(rows)
    if path.is_file() and not contents.rows.rows:  # a folder's file may be one just begun
        raise _no_records(path)
    if not by_trainer:
        return recording_of(str(path), contents, folder=folder)
    run = RunFolder(folder)
    manifest, spec = run.manifest(), run.spec_values()
    facts: dict[str, Any] = {"status": "not started"}
    if manifest is not None:
        facts = {name: getattr(manifest, name) for name in ("version", "status", "message")}
    facts |= {"spec": spec, "batch_size": spec.get("batch_size"), "epochs": spec.get("epochs")}
    return recording_of(run.id, contents, folder=folder, **facts)


def _no_records(path: Path) -> Lacks:
    remedy = "give a run folder, or a folder that watch(folder=...) wrote"
    for inner in sorted(path.iterdir()) if path.is_dir() else ():
        if has_rows(inner):
            remedy = f"give one of its folders, such as {inner}"
            break
    return Lacks(path, "records", remedy)


def recording_of(name: str, contents: Contents, **facts: Any) -> Recording:
    """The recording of a file's contents; `facts` are further known fields of `Meta`."""
    rows, changes = contents.rows, list(contents.settings)
    known = {key: value for key, value in contents.meta.items() if key in Meta.__annotations__}
    meta = Meta(**(known | facts))
    if not changes and meta.spec is not None:
        try:
            changes = migration.settings_from_spec(meta.spec, rows)
        except MALFORMED as error:  # a spec that was cut off, say
            raise Damaged(f"the spec of {name}", error, TRAIN_AGAIN) from error
    elif not changes:
        rows, changes = migration.settings_from_rows(rows)
    if meta.steps_per_epoch is None:
        meta = replace(meta, steps_per_epoch=migration.steps_per_epoch(rows))
    return Recording(name, rows, _timelines(changes), _outcomes(rows), contents.events, meta)


def recording_from_rows(rows: Rows, name: str = "the watched run") -> Recording:
    """The recording of rows alone, as older versions returned them."""
    return recording_of(name, Contents(rows))


def _timelines(
    changes: Iterable[SettingsChange],
) -> dict[str, tuple[tuple[int, LayerSettings], ...]]:
    timelines: dict[str, list[tuple[int, LayerSettings]]] = {}
    for change in sorted(changes, key=lambda change: change.step):
        timeline = timelines.setdefault(change.layer, [])
        if not timeline or timeline[-1][1] != change.settings:
            timeline.append((change.step, change.settings))
    return {layer: tuple(timeline) for layer, timeline in timelines.items()}


def _outcomes(rows: Rows) -> dict[str, Series]:
    outcomes = {}
    for name in rows.names():
        logged = name.removeprefix(LOGGED) if name.startswith(LOGGED) else OUTCOMES.get(name)
        if logged is not None:
            outcomes[logged] = rows.points(name)
    return outcomes
