"""Paths: what each layer of a run went through, step by step, for other runs to follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from decaylab.errors import AT_LEAST_ONE, Lacks, Mismatch, NotFinished, check_name
from decaylab.records import RunFolder, RunStore
from decaylab.training import checkpoint


@dataclass(frozen=True)
class LayerPaths:
    """What happened to each held layer, step by step, on the host in float64.

    Attributes:
        layers: their names, in the order of the columns.
        sizes: [steps + 1, layers], |W_l| before each step, and after the last.
        angles: [steps, layers], radians by which each step turned W_l.
        dampings: [steps + 1, layers], K-FAC's lambda_l |W_l|^2 (nan for layers it does not
            cover); None under other optimizers.
    """

    layers: tuple[str, ...]
    sizes: Tensor
    angles: Tensor
    dampings: Tensor | None = None

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return len(self.angles)

    def finite(self) -> bool:
        """Whether the weights stayed finite all along."""
        return bool(self.sizes.isfinite().all() and self.angles.isfinite().all())

    def as_state(self) -> dict[str, Any]:
        """Lists and tensors."""
        state = {"layers": list(self.layers), "sizes": self.sizes, "angles": self.angles}
        return {**state, "dampings": self.dampings}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "LayerPaths":
        """Undo `as_state`."""
        return cls(tuple(state["layers"]), state["sizes"], state["angles"], state["dampings"])

    def save(self, path: Path) -> None:
        """Write the paths as one safetensors file."""
        checkpoint.Snapshot(self.as_state()).write(path)

    @classmethod
    def load(cls, path: Path) -> "LayerPaths":
        """Read what `save` wrote."""
        state = checkpoint.load(path)
        with checkpoint.fitting(path):
            return cls.of_state(state)


@dataclass(frozen=True)
class Targets:
    """The runs whose paths are followed; None leaves a path free.

    `size_every`: the size is set at this interval of steps (an epoch, say), and free in between.
    """

    size: LayerPaths | None = None
    rotation: LayerPaths | None = None
    damping: LayerPaths | None = None
    size_every: int = 1

    def check(self, layers: Sequence[str], steps: int) -> None:
        """Refuse paths of other layers or of fewer steps."""
        for paths in (self.size, self.rotation, self.damping):
            if paths is None:
                continue
            for layer in layers:
                check_name("layer of the recorded paths", layer, paths.layers)
            if paths.steps < steps:
                counts = {"the recorded paths": paths.steps, "this run": steps}
                remedy = "record a run of at least as many steps at the same batch size"
                raise Mismatch("number of steps", counts, remedy)
        if self.damping is not None and self.damping.dampings is None:
            raise Lacks("the recorded path", "damping", "record it under K-FAC")
        AT_LEAST_ONE.check("size_every", self.size_every)


def paths_file(folder: RunFolder) -> Path:
    """Where a run's paths are, if they were recorded; they are not committed."""
    return folder.path / "paths.safetensors"


def followed_paths(store: RunStore | None, followed: Mapping[str, str]) -> Targets:
    """What a run follows: size, rotation, damping -> the id of a finished run in the store."""
    known = {source: source_paths(store, source) for source in set(followed.values())}
    size, rotation, damping = (
        known[followed[path]] if path in followed else None
        for path in ("size", "rotation", "damping")
    )
    return Targets(size, rotation, damping)


def source_paths(store: RunStore | None, source: str) -> LayerPaths:
    """The recorded paths of the finished run `source`, which another one follows."""
    if store is None:
        raise Lacks("a run that follows another", "store", f"give the one with run {source}")
    folder = store.folder(source)
    if folder.is_finished() and paths_file(folder).exists():
        return LayerPaths.load(paths_file(folder))
    remedy = "`decaylab attribute` trains it, with its paths, before those that follow it"
    raise NotFinished(source, f"{remedy} in {store.root}")
