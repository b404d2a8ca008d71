"""A run that is planned, and where it stands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from decaylab.errors import DecaylabError
from decaylab.records import RunStore
from decaylab.training import RunSpec, TrainingRun

State = Literal["finished", "diverged", "busy", "waiting", "ready"]
EpochProbe = Callable[[TrainingRun], Mapping[str, float]]


@dataclass(frozen=True)
class PlannedRun:
    """A run to make.

    Attributes:
        spec: what to train.
        probes: names of what is measured in it beyond what every run records.
        purposes: what it is for: artefacts, or a search.
        tier: a label kept with the results.
        epoch_probe: measures `probes` (see `Execution.epoch_probe`).
        record_paths: for runs that others follow step by step (see `Execution.record_paths`).
    """

    spec: RunSpec
    probes: tuple[str, ...] = ()
    purposes: tuple[str, ...] = ()
    tier: str = "custom"
    epoch_probe: EpochProbe | None = None
    record_paths: bool = False


def state_of(planned: PlannedRun, store: RunStore) -> State:
    """Where a run stands; `waiting` is for the run whose norms it takes over."""
    folder = store.folder(planned.spec.id)
    manifest = folder.manifest()
    if manifest is not None and manifest.status in ("finished", "diverged"):
        folder.check_same_spec(planned.spec.to_toml())
        return "finished" if manifest.status == "finished" else "diverged"
    if folder.locked():
        return "busy"
    source = planned.spec.norm_source
    if source and not store.folder(source).is_finished():
        return "waiting"
    return "ready"


def has_ended(planned: PlannedRun, store: RunStore) -> bool:
    """Whether a run is finished, or has diverged, which it would again.

    A damaged folder has not: what is wrong with it is said when its turn comes.
    """
    try:
        return state_of(planned, store) in ("finished", "diverged")
    except DecaylabError:
        return False
