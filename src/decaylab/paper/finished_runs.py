"""What the records say about a cell: the finished runs, their last values and their curves."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from decaylab.errors import DecaylabError
from decaylab.paper.suite import PROBES, Cell
from decaylab.paper.superseded import superseded
from decaylab.records import Manifest, Rows, RunStore
from decaylab.training import RunSpec

REPEATS = "repeats"
TRAINED = 0.999  # the paper's 100 % training accuracy, printed without decimals


@dataclass(frozen=True)
class FinishedRun:
    """One finished run: its spec, how it went, its rows.

    `superseded` says what was wrong with the numerics it was made with, where that was fixed since:
    no claim is judged by it.
    """

    spec: RunSpec
    manifest: Manifest
    rows: Rows
    superseded: str = ""

    def final(self, name: str) -> float | None:
        """The last value of a name, None if it was not recorded."""
        return self.rows.last(name)

    @property
    def trained(self) -> bool:
        """Whether it ended at what counts as 100 % training accuracy."""
        return (self.final("train/accuracy") or 0.0) >= TRAINED

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(epoch, value) of a name, by epoch; epoch 0 is before the first step."""
        return [(row.epoch, row.value) for row in self.rows.series(name)]

    def timed_curve(self, name: str) -> list[tuple[float, float]]:
        """(seconds of training, value) of a name: evaluation, probes and checkpoints apart.

        Nothing for a run that shared its device with others, whose seconds are not its own, or that
        was compiled, which is among them.
        """
        if self.manifest.at_once > 1 or self.manifest.compiled:
            return []
        seconds = {row.step: row.value for row in self.rows.series("train/seconds")}
        series = self.rows.series(name)
        return [(seconds[row.step], row.value) for row in series if row.step in seconds]

    def first_layer(self, quantity: str) -> str | None:
        """The row name of a quantity of the first layer, e.g. `effective_lr/features.0`."""
        return next((n for n in self.rows.names() if n.startswith(f"{quantity}/")), None)

    def first_layer_curve(self, quantity: str) -> list[tuple[int, float]]:
        """(epoch, value) of a quantity of the first layer; empty if it was not recorded."""
        return self.curve(self.first_layer(quantity) or "")

    @property
    def generalization_gap(self) -> float | None:
        """Test loss - training loss at the end."""
        test, train = self.final("test/loss"), self.final("train/loss")
        return None if test is None or train is None else test - train

    def lacking(self, probes: Sequence[str]) -> list[str]:
        """The probes it should have recorded and has not.

        Effective lr exists under BN only, damping under K-FAC only.
        """
        none = {
            "effective_lr": not self.spec.batch_norm,
            "damping": not self.spec.optimizer.startswith("kfac"),
        }
        names = self.rows.names()
        return [
            probe
            for probe in probes
            if not any(name.startswith(PROBES[probe]) for name in names) and not none.get(probe)
        ]

    def first_stage_exposure(self) -> float:
        """The decay summed over the first stage: `exposure/stage` where lr first drops.

        (Sum of lr*wd over steps, SGD's L2: / (1 - momentum).)
        """
        every = self.spec.resolved().lr_drop_every or 0
        values = [value for epoch, value in self.curve("exposure/stage") if epoch <= every]
        return max(values, default=0.0)


class FinishedRuns:
    """The finished runs of a store, read once. What cannot be read is left out and named."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.left_out: list[str] = []
        self._known: dict[str, FinishedRun | None] = {}
        self._repeats: FinishedRuns | None = None

    def exists(self, spec: RunSpec) -> bool:
        """Whether the run of a spec was begun."""
        return (self.store.root / spec.id).is_dir()

    @property
    def repeats(self) -> "FinishedRuns":
        """Runs that were made once more (`repeats/` in the folder): alone on the device, say."""
        if self._repeats is None:
            self._repeats = FinishedRuns(RunStore(self.store.root / REPEATS))
        return self._repeats

    def of(self, spec: RunSpec) -> FinishedRun | None:
        """The run of a spec, if it is finished and readable."""
        if spec.id not in self._known:
            self._known[spec.id] = self._read(spec)
        return self._known[spec.id]

    def of_cell(self, cell: Cell) -> list[FinishedRun]:
        """The finished runs of a cell, by seed.

        Those with superseded numerics only where there are no others.
        """
        return self._current(cell.runs)

    def _current(self, specs: Iterable[RunSpec]) -> list[FinishedRun]:
        finished = [run for spec in specs if (run := self.of(spec)) is not None]
        return [run for run in finished if not run.superseded] or finished

    def values(self, specs: Iterable[RunSpec], metric: str) -> list[float]:
        """The last value of a metric in each run that is finished and recorded it."""
        finals = (run.final(metric) for run in self._current(specs))
        return [value for value in finals if value is not None]

    def lacking(self, cells: Sequence[Cell]) -> Iterator[tuple[str, list[str]]]:
        """Run id and missing probes of the finished runs that lack what an artefact wants."""
        wanted: dict[str, tuple[FinishedRun, dict[str, None]]] = {}
        for cell in cells:
            for run in self.of_cell(cell):
                probes = wanted.setdefault(run.spec.id, (run, {}))[1]
                probes.update(dict.fromkeys(cell.probes))
        for run_id, (run, probes) in wanted.items():
            if lacking := run.lacking(list(probes)):
                yield run_id, lacking

    def _read(self, spec: RunSpec) -> FinishedRun | None:
        folder = self.store.folder(spec.id)
        try:
            manifest = folder.manifest()
            if manifest is None or manifest.status != "finished":
                return None
            folder.check_same_spec(spec.to_toml())
            rows = folder.rows()
        except DecaylabError as error:
            self.left_out.append(str(error))
            return None
        self.left_out += [f"{spec.id}: {note}" for note in rows.damaged]
        return FinishedRun(spec, manifest, rows, superseded(manifest))
