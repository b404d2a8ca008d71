"""Search of learning rate, weight decay and other settings on held-out training images.

Every trial is an ordinary run of a spec with `held_out`, in a store of its own; nothing else is
kept. What to try next and which settings won are functions of these records, so that a search can
be stopped anywhere, continued on another machine, and shared by several processes: each counts the
runs that the others have under way.

    FOLDER/NAME.toml              the winner, what was tried, and the cell it was searched for
           NAME/winner.toml       the winner as a spec, on all training images
           runs/                  the records of all trials
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

import decaylab
from decaylab.errors import POSITIVE, Damaged, DecaylabError, Lacks, check_name, needed
from decaylab.records import RunFolder, RunStore
from decaylab.records.files import replace_text
from decaylab.sweeps.plan import EpochProbe, PlannedRun, has_ended
from decaylab.sweeps.worker import Worker, WorkerOptions
from decaylab.training import Progress, RunSpec

Space = Mapping[str, Sequence[float]]
"""Field of the spec -> the values of the grid, or (their ends) the range of TPE; log scale."""
SEARCHED = ("lr", "weight_decay", "damping", "kl_clip")
ACCURACY, LOSS = "test/accuracy", "test/loss"  # of a trial: on held-out images
INSTEAD = {"train/pass_loss": "train/running_loss"}  # where the first was not recorded
FACTOR = math.sqrt(10)
MOST_WIDENINGS = 4


@dataclass(frozen=True)
class SearchPlan:
    """What is searched: `base` gives everything that is not in `space`.

    Attributes:
        name: of its files.
        method: `grid` (widened while the best lies on an edge), `lines` (the same, of weight decays
            at the base's lr, then of the others at the best of them) or `tpe` (Optuna's, pruned).
        trials: TPE only: how many, recorded ones included.
        cell: the cell of an artefact it is for; None for a spec of one's own.
        tier: of that cell; a label kept with the results.
        by: the row whose last value decides: the highest accuracy, or the lowest loss.
        widen: grids and lines: whether they grow.
    """

    name: str
    base: RunSpec
    space: Space
    method: Literal["grid", "lines", "tpe"] = "grid"
    trials: int = 30
    cell: Mapping[str, Any] | None = None
    tier: str = "custom"
    by: str = ACCURACY
    widen: bool = True

    def __post_init__(self) -> None:
        for name, values in self.space.items():
            check_name("setting to search", name, SEARCHED)
            for value in values or [math.nan]:
                POSITIVE.check(name, value)
            first: dict[str, Any] = {name: values[0]}
            replace(self.base, **first)  # an error if it does not apply
        check_name("method", self.method, ("grid", "lines", "tpe"))
        if self.method == "lines" and "weight_decay" not in self.space:
            raise Lacks("a search by lines", "weight decays to begin with", "give some")
        if not self.space:
            raise Lacks("the search", "values", "give some of lr, weight_decay or damping")
        if self.method == "tpe" and all(len({*values}) == 1 for values in self.space.values()):
            raise Lacks("a search by TPE", "range", "give two values or more of a setting")

    def score(self, value: float) -> float:
        """What the search maximises, from a value of the row `by`."""
        return value if self.by == ACCURACY else -value

    def spec(self, point: Mapping[str, float]) -> RunSpec:
        """The run of a point: on held-out images."""
        changes: dict[str, Any] = dict(point)
        return replace(self.base.resolved(), held_out=True, **changes)

    def point(self, spec: RunSpec) -> dict[str, float]:
        """The point of a run."""
        return {name: getattr(spec, name) for name in self.space}


@dataclass(frozen=True)
class Trial:
    """A recorded run of a search.

    Attributes:
        score: the last one of a finished run, else None: it diverged, was pruned or is under way.
        loss: the last held-out loss.
        course: (epoch, score).
    """

    spec: RunSpec
    status: str
    device: str
    score: float | None = None
    loss: float = math.inf
    course: tuple[tuple[int, float], ...] = field(default=(), repr=False)

    @property
    def ended(self) -> bool:
        """Whether it need not be made again; a run that was killed must."""
        return self.status in ("finished", "diverged", "pruned")


@dataclass(frozen=True)
class Winner:
    """The best settings of a search, their score, and what was tried."""

    values: Mapping[str, float]
    score: float
    tried: Mapping[str, Sequence[float]]
    trials: int


class Search:
    """One search; `rounds` are workers to be followed until nothing is left to try."""

    def __init__(
        self,
        plan: SearchPlan,
        folder: Path,
        options: WorkerOptions,
        epoch_probe: EpochProbe | None = None,
    ) -> None:
        self.plan, self.folder, self.options = plan, folder, options
        self.store = RunStore(folder / "runs")
        self._epoch_probe = epoch_probe
        self._read: dict[str, Trial] = {}  # those that have ended
        self._under_way: dict[str, Any] = {}  # Optuna's trials

    def rounds(self) -> Iterator[Worker]:
        """A worker for each set of runs; ends when nothing is left to try, or runs were left."""
        while specs := self.ask():
            planned = [
                PlannedRun(spec, (), ("search",), self.plan.tier, self._epoch_probe)
                for spec in specs
            ]
            worker = Worker(planned, self.store, replace(self.options, stay=True))
            worker.stop_early = self._is_hopeless if self._under_way else None
            yield worker
            if not all(self._trial(spec).ended for spec in specs):
                return

    def ask(self) -> list[RunSpec]:
        """What to run next: of a grid all that is missing, of TPE as many as run at once."""
        if self.plan.method == "tpe":
            return self._ask_tpe()
        return self._missing_and_grids()[0]

    def winner(self) -> Winner | None:
        """The best of what was recorded; None while something is left to try."""
        return None if self.ask() else self._best(self.trials())

    def trials(self) -> list[Trial]:
        """The recorded runs that differ from the base in searched fields alone."""
        base = self.plan.spec({})
        others = [item.name for item in fields(RunSpec) if item.name not in self.plan.space]
        trials = []
        for folder in self.store.runs():
            if folder.id in self._read:
                trials.append(self._read[folder.id])
                continue
            try:
                spec = RunSpec.of_run(folder).resolved()
            except DecaylabError:  # not one of ours, or damaged
                continue
            if all(getattr(spec, name) == getattr(base, name) for name in others):
                trials.append(self._trial(spec))
        return trials

    def write_winner(self, winner: Winner) -> Winner:
        """Keep a winner; returns what stands there now, which is the better one.

        A search that tried less than an earlier one of the same name does not replace its winner:
        only what was tried is added.
        """
        path = self.folder / f"{self.plan.name}.toml"
        standing = read_winner(path, self.plan)
        if standing is not None:
            names = dict.fromkeys([*winner.tried, *standing.tried])
            tried = {
                name: sorted({*winner.tried.get(name, ()), *standing.tried.get(name, ())})
                for name in names
            }
            better = standing if standing.score > winner.score else winner
            base = self.plan.base.resolved()
            values = {name: better.values.get(name, getattr(base, name)) for name in names}
            count = max(winner.trials, standing.trials)
            winner = Winner(values, better.score, tried, count)
        (self.folder / self.plan.name).mkdir(parents=True, exist_ok=True)
        spec = on_all_images(self.plan, winner.values)
        replace_text(self.folder / self.plan.name / "winner.toml", spec.to_toml())
        devices = dict.fromkeys(trial.device for trial in self.trials() if trial.ended)
        replace_text(path, _winner_text(self.plan, winner, ", ".join(devices)))
        return winner

    def _trial(self, spec: RunSpec) -> Trial:
        if spec.id not in self._read:
            trial = _read_trial(self.plan, spec, self.store.folder(spec.id))
            if not trial.ended:
                return trial
            self._read[spec.id] = trial
        return self._read[spec.id]

    def _best(self, trials: Sequence[Trial]) -> Winner:
        """The highest last score; of equals the one with the lower loss on held-out images."""
        finished = [(t.score, -t.loss, t) for t in trials if t.score is not None]
        if not finished:
            what = "run that came to its end"
            raise Lacks(f"search {self.plan.name}", what, "lower the learning rates")
        score, _, best = max(finished, key=lambda entry: entry[:2])
        points = [self.plan.point(trial.spec) for trial in trials if trial.ended]
        tried = {name: sorted({point[name] for point in points}) for name in self.plan.space}
        return Winner(self.plan.point(best.spec), score, tried, len(points))

    def _missing_and_grids(self) -> tuple[list[RunSpec], list[SearchPlan]]:
        """The runs that are missing, and the grids (of lines: two) as far as they have grown."""
        grids: list[SearchPlan] = []

        def grow(grid: SearchPlan) -> list[RunSpec]:
            grids.append(grid)
            for widenings in range(MOST_WIDENINGS + 1):
                specs = grid_specs(grids[-1])
                if missing := [spec for spec in specs if not self._trial(spec).ended]:
                    return missing
                may_grow = self.plan.widen and widenings < MOST_WIDENINGS
                wider = widened(grids[-1], best()) if may_grow else None
                if wider is None:
                    break
                grids[-1] = wider
            return []

        def best() -> Winner:
            specs = {spec.id: spec for grid in grids for spec in grid_specs(grid)}
            return self._best([self._trial(spec) for spec in specs.values()])

        missing = grow(first_line(self.plan) if self.plan.method == "lines" else self.plan)
        if self.plan.method == "lines" and not missing:
            missing = grow(second_line(self.plan, best().values["weight_decay"]))
        return missing, grids

    def _ask_tpe(self) -> list[RunSpec]:
        """Runs that were stopped, then new points; each follows from the records before it."""
        trials = self.trials()
        busy = [t for t in trials if not t.ended and self.store.folder(t.spec.id).locked()]
        stopped = [t.spec for t in trials if not t.ended and t not in busy]
        known = [trial for trial in trials if trial.ended] + busy
        wanted = min(self.plan.trials - len(known), self.options.at_once)
        if wanted <= 0:
            return []
        asked = stopped[:wanted]
        self._under_way = {}
        while len(asked) < wanted:
            optuna_trial, spec = self._ask_optuna(known, asked)
            asked.append(spec)
            self._under_way[spec.id] = optuna_trial
        return asked

    def _ask_optuna(self, known: list[Trial], asked: list[RunSpec]) -> tuple[Any, RunSpec]:
        optuna = needed("optuna", "search", "a search by TPE")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        states = optuna.trial.TrialState
        kinds = {"finished": states.COMPLETE, "pruned": states.PRUNED, "diverged": states.FAIL}
        distribution = optuna.distributions.FloatDistribution
        ranges = {
            name: distribution(min(values), max(values), log=True)
            for name, values in self.plan.space.items()
        }
        trials = [*known, *(Trial(spec, "running", "") for spec in asked)]
        taken = {trial.spec.id for trial in trials}
        warm_up = max(1, (self.plan.base.resolved().epochs or 0) // 3)
        seed = len(trials)
        while True:
            study = optuna.create_study(
                direction="maximize",
                sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
                pruner=optuna.pruners.MedianPruner(n_warmup_steps=warm_up),
            )
            for trial in trials:
                inside = {
                    name: value
                    for name, value in self.plan.point(trial.spec).items()
                    if ranges[name].low <= value <= ranges[name].high
                }
                study.add_trial(
                    optuna.trial.create_trial(
                        state=kinds.get(trial.status, states.RUNNING),
                        value=trial.score if trial.status == "finished" else None,
                        params=inside,
                        distributions={name: ranges[name] for name in inside},
                        intermediate_values=dict(trial.course),
                    )
                )
            chosen = study.ask(ranges)
            spec = self.plan.spec(chosen.params)
            if spec.id not in taken:
                return chosen, spec
            seed += len(taken)  # a point that is there already: draw another

    def _is_hopeless(self, run: PlannedRun, progress: Progress) -> bool:
        """Whether Optuna would prune a trial after the epoch that has just ended."""
        trial = self._under_way.get(run.spec.id)
        if trial is None:
            return False
        trial.report(self.plan.score(_value(progress.values, self.plan.by)), progress.epoch)
        return bool(trial.should_prune())


def grid_specs(plan: SearchPlan) -> list[RunSpec]:
    """The runs of a plan's grid, before any widening."""
    ordered = [sorted(values) for values in plan.space.values()]
    points = (dict(zip(plan.space, point, strict=True)) for point in product(*ordered))
    return [plan.spec(point) for point in points]


def first_specs(plan: SearchPlan) -> list[RunSpec]:
    """About what a search makes, for an estimate: of its second line, at some weight decay.

    Of TPE, which draws each point when its turn comes, as many points all over the ranges.
    """
    if plan.method == "tpe":
        shares = [(number + 0.5) / plan.trials for number in range(plan.trials)]
        ends = {name: (min(values), max(values)) for name, values in plan.space.items()}
        points = ({n: low ** (1 - s) * high**s for n, (low, high) in ends.items()} for s in shares)
        return [plan.spec(point) for point in points]
    if plan.method == "grid":
        return grid_specs(plan)
    decays = sorted(plan.space["weight_decay"])
    lines = first_line(plan), second_line(plan, decays[len(decays) // 2])
    return list({spec.id: spec for line in lines for spec in grid_specs(line)}.values())


def made_and_left(plan: SearchPlan, folder: Path) -> tuple[list[RunSpec], list[RunSpec]]:
    """What a search has made of `first_specs`, and about what it still makes.

    Of TPE, as many of them stand for what was drawn. A damaged run is left: what is wrong with it
    is said when its turn comes.
    """
    search, expected = Search(plan, folder, WorkerOptions(torch.device("cpu"))), first_specs(plan)
    made = [spec for spec in expected if has_ended(PlannedRun(spec), search.store)]
    left = [spec for spec in expected if spec not in made]
    with suppress(DecaylabError):
        if plan.method == "tpe":
            ended = sum(trial.ended for trial in search.trials())
            return expected[:ended], expected[ended:]
        missing = search.ask()
        if not set(missing) <= set(expected) or not missing:  # it has grown, or come to its end
            left = missing
    return made, left


def first_line(plan: SearchPlan) -> SearchPlan:
    """Every weight decay, at the base's own learning rate (and damping).

    >>> base = RunSpec(lr=0.1, decay="l2", weight_decay=0.1)
    >>> plan = SearchPlan("a", base, {"lr": [0.03, 0.1, 0.3], "weight_decay": [0.1, 1.0]}, "lines")
    >>> first_line(plan).space, second_line(plan, 1.0).space["weight_decay"]
    ({'lr': [0.1], 'weight_decay': [0.1, 1.0]}, [1.0])
    """
    fixed = {name: [value] for name, value in plan.point(plan.base.resolved()).items()}
    return replace(plan, space={**fixed, "weight_decay": plan.space["weight_decay"]})


def second_line(plan: SearchPlan, weight_decay: float) -> SearchPlan:
    """Everything else that is searched, at the best weight decay of the first line."""
    return replace(plan, space={**plan.space, "weight_decay": [weight_decay]})


def widened(plan: SearchPlan, best: Winner) -> SearchPlan | None:
    """The plan with one more value beyond each edge that the winner is on, or past it.

    None if it lies inside. Fields with one value are not searched.

    >>> base = RunSpec(decay="l2", weight_decay=0.1)
    >>> plan = SearchPlan("a", base, {"lr": [0.1, 1.0, 10.0], "weight_decay": [0.1, 1.0]})
    >>> widened(plan, Winner({"lr": 1.0, "weight_decay": 0.1}, 0.9, plan.space, 2)).space
    {'lr': [0.1, 1.0, 10.0], 'weight_decay': [0.0316, 0.1, 1.0]}
    """
    wider: dict[str, Sequence[float]] = {}
    for name, values in plan.space.items():
        low, value, high = min(values), best.values[name], max(values)
        if low < high and not low < value < high:
            outside = rounded(low / FACTOR if value <= low else high * FACTOR)
            wider[name] = sorted([*values, outside])
    return replace(plan, space={**plan.space, **wider}) if wider else None


def on_edge(chosen: Mapping[str, float], tried: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """The fields whose value is the smallest or the largest of several that were tried.

    >>> on_edge({"lr": 0.1, "weight_decay": 0.01}, {"lr": [0.1, 1], "weight_decay": [0.01]})
    ('lr',)
    """
    return tuple(
        name
        for name, values in tried.items()
        if min(values) < max(values) and chosen[name] in (min(values), max(values))
    )


def on_all_images(plan: SearchPlan, values: Mapping[str, Any]) -> RunSpec:
    """The plan's run with these values, trained on all training images."""
    return replace(plan.base.resolved(), held_out=False, **values)


def rounded(value: float) -> float:
    """To three digits, and to the half decade that it is within 1 % of.

    So a grid's values are the same wherever they are computed, and widening does not drift.

    >>> rounded(10 ** -2.5), rounded(0.00316 / FACTOR), rounded(0.1 / 3)
    (0.00316, 0.001, 0.0333)
    """
    half_decade = 10 ** (round(2 * math.log10(value)) / 2)
    exact = half_decade if abs(value / half_decade - 1) < 0.01 else value
    return float(f"{exact:.3g}")


def _value(values: Mapping[str, float], name: str) -> float:
    return values[name if name in values else INSTEAD.get(name, name)]


def _read_trial(plan: SearchPlan, spec: RunSpec, folder: RunFolder) -> Trial:
    manifest = folder.manifest()
    if manifest is None:
        return Trial(spec, "not started", "")
    rows = folder.rows()
    metric = plan.by if plan.by in rows.names() else INSTEAD.get(plan.by, plan.by)
    course = {row.epoch: plan.score(row.value) for row in rows.series(metric)}
    last = rows.last(metric) if manifest.status == "finished" else None
    loss = rows.last(LOSS)
    return Trial(
        spec,
        manifest.status,
        manifest.device,
        score=None if last is None else plan.score(last),
        loss=math.inf if loss is None else loss,
        course=tuple((epoch, score) for epoch, score in course.items() if math.isfinite(score)),
    )


def read_winner(path: Path, plan: SearchPlan) -> Winner | None:
    """The winner that stands in a file, if it was chosen by the same measure."""
    if not path.exists():
        return None
    try:
        entry = tomllib.loads(path.read_text(encoding="utf-8"))
        search, values = entry["search"], entry["winner"]
        if search.get("by", ACCURACY) != plan.by or search.get("epochs") != _epochs(plan):
            return None
        score = search["held_out_accuracy"] if plan.by == ACCURACY else -search["value"]
        tried = {name: search.get(f"{name}_tried", [value]) for name, value in values.items()}
        return Winner(values, score, tried, search["trials"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(path, error, "remove it, and search again") from error


def _epochs(plan: SearchPlan) -> int | None:
    """A search by training loss is one of its first epochs: how many is a part of it."""
    return None if plan.by == ACCURACY else plan.base.resolved().epochs


def _winner_text(plan: SearchPlan, winner: Winner, devices: str) -> str:
    measured: dict[str, Any] = {"held_out_accuracy": winner.score}
    if plan.by != ACCURACY:
        measured = {"by": plan.by, "value": -winner.score, "epochs": _epochs(plan)}
    tables: dict[str, Mapping[str, Any]] = {
        "cell": plan.cell or {},
        "winner": winner.values,
        "search": {
            "tier": plan.tier,
            "method": plan.method,
            "trials": winner.trials,
            **{f"{name}_tried": list(values) for name, values in winner.tried.items()},
            **measured,
            "on_edge": list(on_edge(winner.values, winner.tried)),
            "device": devices,
            "version": decaylab.__version__,
        },
    }
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(v)}\n" for key, v in table.items())
        for name, table in tables.items()
    )
