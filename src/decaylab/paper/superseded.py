"""Runs whose numerics were fixed since (`superseded.toml`): which, and why."""

import tomllib
from functools import cache
from importlib import resources

from decaylab.records import Manifest


def superseded(manifest: Manifest) -> str:
    """What was wrong with the numerics that a run was made with; empty if nothing was.

    A run that was made again, by code of another commit, is not meant.
    """
    why, commits = _listed().get(manifest.id, ("", ()))
    commit = (manifest.commit or "").rstrip("+")
    return why if any(commit.startswith(start) for start in commits) else ""


def is_listed(name: str) -> bool:
    """Whether a run was ever made with numerics that were fixed since."""
    return name in _listed()


@cache
def _listed() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Run id -> why, and the commits (by their first digits) it was made by."""
    text = resources.files("decaylab.paper").joinpath("superseded.toml").read_text(encoding="utf-8")
    return {
        run: (fix["why"], tuple(fix["commits"]))
        for fix in tomllib.loads(text)["fix"]
        for run in fix["runs"]
    }
