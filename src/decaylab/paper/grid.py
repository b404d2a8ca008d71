"""A grid search read from the records of its runs: no Optuna, nothing pruned (recipe line 15).

The runs are those that `Search` would make, in the same store, so that they can be made several at
once, on a machine without Optuna, and stopped anywhere.
"""

from dataclasses import dataclass, replace

from decaylab.errors import DecaylabError
from decaylab.paper.search import FACTOR, SearchPlan, Winner, grid_specs, rounded
from decaylab.records import RunStore
from decaylab.training import RunSpec


@dataclass(frozen=True)
class Point:
    """A run of the grid that ended; accuracy and loss, on held-out images, None if it diverged."""

    spec: RunSpec
    device: str
    accuracy: float | None
    loss: float | None


def points(plan: SearchPlan, store: RunStore) -> list[Point]:
    """The runs of a plan's grid that ended."""
    found = []
    for spec in grid_specs(plan):
        folder = store.folder(spec.id)
        manifest = folder.manifest() if folder.path.exists() else None
        if manifest is None or manifest.status not in ("finished", "diverged"):
            continue
        rows = folder.rows()
        finished = manifest.status == "finished"
        last = (rows.last("test/accuracy"), rows.last("test/loss")) if finished else (None, None)
        found.append(Point(spec, manifest.device, *last))
    return found


def winner(plan: SearchPlan, store: RunStore) -> Winner:
    """The highest last accuracy on held-out images; of equals the one with the lower loss.

    An error while runs of the grid are missing: a choice among some of them is another search.
    """
    ended = points(plan, store)
    missing = len(grid_specs(plan)) - len(ended)
    if missing:
        raise DecaylabError(f"{missing} runs of {plan.name} are missing: make them first")
    complete = [(p.accuracy, p.loss, p.spec) for p in ended if p.accuracy is not None]
    if not complete:
        raise DecaylabError(f"no run of {plan.name} came to its end: lower the learning rates")
    accuracy, _, spec = max(complete, key=lambda entry: (entry[0], -(entry[1] or 0.0)))
    values = {field: getattr(spec, field) for field in plan.space}
    tried = {field: sorted(given) for field, given in plan.space.items()}
    return Winner(values, accuracy, tried, len(ended))


def widened(plan: SearchPlan, found: Winner) -> SearchPlan | None:
    """The plan with one more weight decay beyond the edge that the winner lies on; None if inside.

    >>> base = RunSpec(decay="l2", weight_decay=0.1)
    >>> plan = SearchPlan("a", base, {"weight_decay": [0.1, 1.0]})
    >>> widened(plan, Winner({"weight_decay": 0.1}, 0.9, plan.space, 2)).space
    {'weight_decay': [0.032, 0.1, 1.0]}
    """
    decays = sorted(plan.space.get("weight_decay", ()))
    if len(decays) < 2 or found.interior:
        return None
    best = found.values["weight_decay"]
    outside = rounded(best / FACTOR if best == decays[0] else best * FACTOR)
    return replace(plan, space={**plan.space, "weight_decay": sorted([*decays, outside])})
