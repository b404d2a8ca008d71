"""The paper as experiments: every table and figure as runs, every claim judged from records."""

from decaylab.paper.readings import Readings, RunReading
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
    "Readings",
    "RunReading",
    "artefact_of",
    "artefacts",
    "cells",
    "register_artefact",
    "select",
    "tier_of",
]
