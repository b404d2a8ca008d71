"""The paper as experiments: every table and figure as runs, every claim judged from records."""

from decaylab.paper.readings import Readings, RunReading, mean_and_spread
from decaylab.paper.suite import (
    Artefact,
    Cell,
    artefact_of,
    artefacts,
    cells,
    register_artefact,
    select,
)
from decaylab.paper.tiers import TIERS, Tier, tier_of

__all__ = [
    "TIERS",
    "Artefact",
    "Cell",
    "Readings",
    "RunReading",
    "Tier",
    "artefact_of",
    "artefacts",
    "cells",
    "mean_and_spread",
    "register_artefact",
    "select",
    "tier_of",
]
