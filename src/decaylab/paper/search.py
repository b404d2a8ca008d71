"""Search of learning rate, weight decay and damping on held-out training images (recipe line 15).

Every trial is an ordinary run of a spec with `held_out`, kept in a store of its own; Optuna chooses
and prunes, and its study lies in an SQLite file, so that a search that was stopped goes on.

    FOLDER/NAME.toml              the winner, for the cell it was searched for
           NAME/study.db          the study
           NAME/winner.toml       the winner as a spec, on all training images
           runs/                  the records of all trials
"""

import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

import decaylab
from decaylab.data import DataSet
from decaylab.errors import DecaylabError, Diverged, needed
from decaylab.paper.settings import on_edge
from decaylab.records import RunFolder, RunStore
from decaylab.records.files import replace_text
from decaylab.training import Execution, RunSpec, train
from decaylab.training.loop import device_name

Space = Mapping[str, Sequence[float]]
"""Field of the spec -> the values of the grid, or (their ends) the range of TPE; log scale."""
SEARCHED = ("lr", "weight_decay", "damping")
ACCURACY, LOSS = "test/accuracy", "test/loss"  # of a trial: on held-out images
FACTOR = math.sqrt(10)
MOST_WIDENINGS = 4


@dataclass(frozen=True)
class SearchPlan:
    """What is searched: `base` gives everything that is not in `space`.

    Attributes:
        name: of its files.
        method: `grid` (widened while the best lies on an edge), `lines` (the same, of weight decays
            at the base's lr, then of the others at the best of them) or `tpe`.
        trials: TPE only: how many.
        cell: the cell of an artefact it is for; None for a spec of one's own.
        tier: of that cell; a label kept with the results.
        by: the row whose last value decides: the highest accuracy, or the lowest loss.
    """

    name: str
    base: RunSpec
    space: Space
    method: Literal["grid", "lines", "tpe"] = "grid"
    trials: int = 30
    cell: Mapping[str, Any] | None = None
    tier: str = "custom"
    by: str = ACCURACY

    def __post_init__(self) -> None:
        for field, values in self.space.items():
            if field not in SEARCHED:
                raise DecaylabError(f"cannot search {field!r}: only {', '.join(SEARCHED)}")
            if not values or not all(0 < value < math.inf for value in values):
                raise DecaylabError(f"the values of {field} must be positive numbers")
            first: dict[str, Any] = {field: values[0]}
            replace(self.base, **first)  # an error where it does not apply
        if self.method not in ("grid", "lines", "tpe"):
            raise DecaylabError(f"unknown method {self.method!r}: choose grid, lines or tpe")
        if self.method == "lines" and "weight_decay" not in self.space:
            raise DecaylabError("a search by lines begins with weight decays: give some")
        if not self.space:
            raise DecaylabError("nothing to search: give values of lr, weight_decay or damping")

    def score(self, value: float) -> float:
        """What the search maximises, from a value of the row `by`."""
        return value if self.by == ACCURACY else -value


def default_space(spec: RunSpec, scheme: str, on_digits: bool = False) -> dict[str, list[float]]:
    """Recipe line 15: lr x {1/3, 1, 3}; L2 from 1e-6 to 1e-2 by sqrt(10); weight decay around it.

    On digits, whose runs are short, L2 from 1e-4 to 1e-1 by 10.
    """
    lr = spec.resolved().lr or 0.0
    space = {"lr": [rounded(lr / 3), lr, rounded(3 * lr)]}
    if scheme == "l2":
        strong = [10.0**power for power in range(-4, 0)]
        space["weight_decay"] = (
            strong if on_digits else [rounded(10 ** (n / 2)) for n in range(-12, -3)]
        )
    elif spec.decay != "none":
        if not spec.weight_decay:
            raise DecaylabError("its weight_decay is 0: give values, --weight-decay A,B,...")
        around = (spec.weight_decay / FACTOR, spec.weight_decay, spec.weight_decay * FACTOR)
        space["weight_decay"] = [rounded(value) for value in around]
    return space


def grid_specs(plan: SearchPlan) -> list[RunSpec]:
    """The runs of a plan's grid, before any widening, just as its search would make them.

    A search takes over those that it finds finished, so they can be made elsewhere, without Optuna.
    """
    return [replace(_held_out(plan), **point) for point in _grid_points(plan)]


def _grid_points(plan: SearchPlan) -> list[dict[str, Any]]:
    ordered = [sorted(values) for values in plan.space.values()]
    return [dict(zip(plan.space, point, strict=True)) for point in product(*ordered)]


def _held_out(plan: SearchPlan) -> RunSpec:
    return replace(plan.base.resolved(), held_out=True)


@dataclass(frozen=True)
class Trial:
    """A trial that ended: its settings, and its held-out accuracy where it got that far."""

    number: int
    values: Mapping[str, float]
    state: str
    accuracy: float | None


class Search:
    """One search; `run` yields its trials as they end and can be stopped anywhere."""

    def __init__(
        self,
        plan: SearchPlan,
        folder: Path,
        data: DataSet,
        device: str | torch.device = "cpu",
        *,
        compiled: bool = False,
    ) -> None:
        self.plan, self.folder, self._data, self._device = plan, folder, data, device
        self._execution = Execution(tier=plan.tier, compiled=compiled)
        self.base = _held_out(plan)
        self._own = RunFolder(folder / plan.name)
        self._store = RunStore(folder / "runs")
        self._optuna = _optuna()

    def run(self) -> Iterator[Trial]:
        """Make what is missing; the winner is written at the end."""
        with self._own.writing(self.base.to_toml()):
            study = self._study()
            under_way = (self._states.RUNNING, self._states.WAITING)
            for trial in study.get_trials(deepcopy=False, states=under_way):  # its process is gone
                waits = trial.state == self._states.WAITING
                study.tell(study.ask() if waits else trial.number, state=self._states.FAIL)
            if self.plan.method == "grid":
                yield from self._grid(study)
            else:
                while len(self._ended(study)) < self.plan.trials:
                    yield self._trial(study, study.ask(self._ranges(self.plan.space)))
            where = device_name(torch.device(self._device))
            write_winner(self.plan, self.folder, self._found(study), where)

    def _grid(self, study: Any) -> Iterator[Trial]:
        plan = self.plan
        for _ in range(MOST_WIDENINGS + 1):
            done = [trial.params for trial in self._ended(study)]
            for point in _grid_points(plan):
                if point not in done:
                    study.enqueue_trial(point)
                    yield self._trial(study, study.ask(self._ranges(plan.space)))
            wider = widened(plan, self._found(study))
            if wider is None:
                return
            plan = wider

    def _trial(self, study: Any, trial: Any) -> Trial:
        """One run, reported epoch by epoch."""
        spec = replace(self.base, **trial.params)
        folder = self._store.folder(spec.id)
        accuracy: float | None = None
        state = "complete"
        try:
            with closing(self._epochs(spec, folder)) as epochs:
                for epoch, values in epochs:
                    accuracy = values[ACCURACY]
                    trial.report(self.plan.score(values[self.plan.by]), epoch)
                    if epoch < (spec.epochs or 0) and trial.should_prune():
                        state = "pruned"
                        break
            trial.set_user_attr("test_loss", values[LOSS])
        except Diverged:
            state = "diverged"
            trial.set_user_attr("diverged", True)
        folder.checkpoint.unlink(missing_ok=True)
        states = {"complete": self._states.COMPLETE, "pruned": self._states.PRUNED}
        told = states.get(state, self._states.FAIL)
        score = self.plan.score(values[self.plan.by]) if state == "complete" else None
        study.tell(trial, score, state=told)
        return Trial(trial.number, dict(trial.params), state, accuracy)

    def _epochs(
        self, spec: RunSpec, folder: RunFolder
    ) -> Generator[tuple[int, dict[str, float]], None, None]:
        """(epoch, its values), of the records where the run is finished."""
        if folder.is_finished():
            by_epoch: dict[int, dict[str, float]] = {}
            for name in {ACCURACY, LOSS, self.plan.by}:
                for row in folder.rows().series(name):
                    by_epoch.setdefault(row.epoch, {})[name] = row.value
            yield from sorted(by_epoch.items())
            return
        training = train(
            spec,
            data=self._data,
            device=self._device,
            store=self._store,
            execution=self._execution,
        )
        for progress in training:
            yield progress.epoch, progress.values

    @property
    def _states(self) -> Any:
        return self._optuna.trial.TrialState

    def _study(self) -> Any:
        epochs = self.base.epochs or 0
        return self._optuna.create_study(
            storage=f"sqlite:///{self._own.path / 'study.db'}",
            study_name=self.plan.name,
            direction="maximize",
            sampler=self._optuna.samplers.TPESampler(seed=0),
            pruner=self._optuna.pruners.MedianPruner(
                n_startup_trials=5, n_warmup_steps=max(1, epochs // 3)
            ),
            load_if_exists=True,
        )

    def _ranges(self, space: Space) -> dict[str, Any]:
        distribution = self._optuna.distributions.FloatDistribution
        return {f: distribution(min(v), max(v), log=True) for f, v in space.items()}

    def _ended(self, study: Any) -> list[Any]:
        """Trials of these fields that need not be made again; one that was killed does."""
        good = (self._states.COMPLETE, self._states.PRUNED)
        return [
            trial
            for trial in study.get_trials(deepcopy=False)
            if (trial.state in good or trial.user_attrs.get("diverged"))
            and trial.params.keys() == self.plan.space.keys()
        ]

    def _found(self, study: Any) -> "Winner":
        """The highest last score; of equals the one with the lower loss."""
        ended = self._ended(study)
        complete = [trial for trial in ended if trial.state == self._states.COMPLETE]
        if not complete:
            raise DecaylabError(
                f"no trial of {self.plan.name} came to its end: lower the learning rates"
            )
        best = max(complete, key=lambda trial: (trial.value, -trial.user_attrs["test_loss"]))
        tried = {field: sorted({trial.params[field] for trial in ended}) for field in best.params}
        return Winner(dict(best.params), best.value, tried, len(ended))

    def found(self) -> "Winner":
        """The best settings so far, and what was tried."""
        return self._found(self._study())


@dataclass(frozen=True)
class Winner:
    """The best settings of a search, their score, and what was tried."""

    values: Mapping[str, float]
    score: float
    tried: Mapping[str, Sequence[float]]
    trials: int


def widened(plan: SearchPlan, found: Winner) -> SearchPlan | None:
    """The plan with one more value beyond each edge that the winner is on, or past it.

    None where it lies inside. Fields with one value are not searched.

    >>> base = RunSpec(decay="l2", weight_decay=0.1)
    >>> plan = SearchPlan("a", base, {"lr": [0.1, 1.0, 10.0], "weight_decay": [0.1, 1.0]})
    >>> widened(plan, Winner({"lr": 1.0, "weight_decay": 0.1}, 0.9, plan.space, 2)).space
    {'lr': [0.1, 1.0, 10.0], 'weight_decay': [0.0316, 0.1, 1.0]}
    """
    wider: dict[str, Sequence[float]] = {}
    for field, values in plan.space.items():
        low, best, high = min(values), found.values[field], max(values)
        if low < high and not low < best < high:
            outside = rounded(low / FACTOR if best <= low else high * FACTOR)
            wider[field] = sorted([*values, outside])
    return replace(plan, space={**plan.space, **wider}) if wider else None


def on_all_images(plan: SearchPlan, values: Mapping[str, Any]) -> RunSpec:
    """The plan's run with these values, trained on all training images."""
    return replace(plan.base.resolved(), held_out=False, **values)


def write_winner(plan: SearchPlan, folder: Path, found: Winner, device: str) -> None:
    """Keep a winner: as a spec on all training images, and for the cell it was searched for."""
    (folder / plan.name).mkdir(parents=True, exist_ok=True)
    replace_text(folder / plan.name / "winner.toml", on_all_images(plan, found.values).to_toml())
    if plan.cell is None:
        return
    tables: dict[str, Mapping[str, Any]] = {
        "cell": plan.cell,
        "winner": found.values,
        "search": {
            "tier": plan.tier,
            "method": plan.method,
            "trials": found.trials,
            **{f"{field}_tried": list(values) for field, values in found.tried.items()},
            **(
                {"held_out_accuracy": found.score}
                if plan.by == ACCURACY
                else {"by": plan.by, "value": -found.score}
            ),
            "on_edge": list(on_edge(found.values, found.tried)),
            "device": device,
            "version": decaylab.__version__,
        },
    }
    text = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(v)}\n" for key, v in table.items())
        for name, table in tables.items()
    )
    replace_text(folder / f"{plan.name}.toml", text)


def rounded(value: float) -> float:
    """To three digits, and to the half decade that it is within 1 % of.

    So a grid's values are the same wherever they are computed, and widening does not drift.

    >>> rounded(10 ** -2.5), rounded(0.00316 / FACTOR), rounded(0.1 / 3)
    (0.00316, 0.001, 0.0333)
    """
    half_decade = 10 ** (round(2 * math.log10(value)) / 2)
    exact = half_decade if abs(value / half_decade - 1) < 0.01 else value
    return float(f"{exact:.3g}")


def _optuna() -> Any:
    optuna = needed("optuna", "search", "a search without --runs-only")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
