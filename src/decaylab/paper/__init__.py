"""The paper as experiments: every table and figure as runs, every claim judged from records."""

from decaylab.paper.finished_runs import FinishedRun, FinishedRuns
from decaylab.paper.suite import (
    Artefact,
    Cell,
    artefact_of,
    artefacts,
    cells,
    register_artefact,
    select,
)
from decaylab.paper.tiers import TIERS, tier_of

__all__ = [
    "TIERS",
    "Artefact",
    "Cell",
    "FinishedRun",
    "FinishedRuns",
    "artefact_of",
    "artefacts",
    "cells",
    "register_artefact",
    "select",
    "tier_of",
]
