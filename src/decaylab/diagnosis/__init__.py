"""Diagnosis: whether decay helped, through what, and what to try next."""

from decaylab.diagnosis.advice import (
    Stepping,
    Suggestion,
    convert_decay,
    scale_decay,
    suggest,
)
from decaylab.diagnosis.mechanisms import Finding
from decaylab.diagnosis.reasons import Because, Mechanism, Reason, Verdict
from decaylab.diagnosis.schedule import EquivalentSchedule, equivalent_schedule
from decaylab.diagnosis.verdict import Diagnosis, diagnose

__all__ = [
    "Because",
    "Diagnosis",
    "EquivalentSchedule",
    "Finding",
    "Mechanism",
    "Reason",
    "Stepping",
    "Suggestion",
    "Verdict",
    "convert_decay",
    "diagnose",
    "equivalent_schedule",
    "scale_decay",
    "suggest",
]
