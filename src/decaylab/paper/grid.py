"""A grid search read from the records of its runs: no Optuna, nothing pruned (recipe line 15).

The runs are those that `Search` would make, in the same store, so that they can be made several at
once, on a machine without Optuna, and stopped anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decaylab.errors import DecaylabError
from decaylab.paper.search import LOSS, SearchPlan, Winner, grid_specs
from decaylab.records import RunStore
from decaylab.training import RunSpec


@dataclass(frozen=True)
class Point:
    """A run of the grid that ended: its score, None if it diverged, and its last held-out loss."""

    spec: RunSpec
    device: str
    score: float | None
    loss: float | None


def points(plan: SearchPlan, store: RunStore) -> list[Point]:
    """The runs of a plan's grid that ended."""
    found = []
    for spec in grid_specs(plan):
        folder = store.folder(spec.id)
        manifest = folder.manifest()
        if manifest is None or manifest.status not in ("finished", "diverged"):
            continue
        rows = folder.rows()
        value = rows.last(plan.by) if manifest.status == "finished" else None
        score = None if value is None else plan.score(value)
        found.append(Point(spec, manifest.device, score, rows.last(LOSS)))
    return found


def winner(plans: Sequence[SearchPlan], store: RunStore) -> Winner:
    """The highest last score; of equals the one with the lower loss on held-out images.

    Among the runs of one grid, or of the lines of a search. An error while some are missing: a
    choice among the others is another search.
    """
    first = plans[0]
    ended = {point.spec.id: point for plan in plans for point in points(plan, store)}
    missing = len({spec.id for plan in plans for spec in grid_specs(plan)}) - len(ended)
    if missing:
        raise DecaylabError(f"{missing} runs of {first.name} are missing: make them first")
    complete = [(p.score, p.loss, p.spec) for p in ended.values() if p.score is not None]
    if not complete:
        raise DecaylabError(f"no run of {first.name} came to its end: lower the learning rates")
    score, _, spec = max(complete, key=lambda entry: (entry[0], -(entry[1] or 0.0)))
    values = {field: getattr(spec, field) for field in first.space}
    tried = {field: sorted({v for plan in plans for v in plan.space[field]}) for field in values}
    return Winner(values, score, tried, len(ended))


def first_line(plan: SearchPlan) -> SearchPlan:
    """Every weight decay, at the base's own learning rate (and damping).

    >>> base = RunSpec(lr=0.1, decay="l2", weight_decay=0.1)
    >>> plan = SearchPlan("a", base, {"lr": [0.03, 0.1, 0.3], "weight_decay": [0.1, 1.0]}, "lines")
    >>> first_line(plan).space, second_line(plan, 1.0).space["weight_decay"]
    ({'lr': [0.1], 'weight_decay': [0.1, 1.0]}, [1.0])
    """
    own = {field: [getattr(plan.base.resolved(), field)] for field in plan.space}
    return replace(plan, space={**own, "weight_decay": plan.space["weight_decay"]})


def second_line(plan: SearchPlan, weight_decay: float) -> SearchPlan:
    """Everything else that is searched, at the best weight decay of the first line."""
    return replace(plan, space={**plan.space, "weight_decay": [weight_decay]})
