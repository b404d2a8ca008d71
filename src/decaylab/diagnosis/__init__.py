"""Diagnosis: which mechanism decay acts through in a run, and what to do about it."""

from decaylab.diagnosis.advise import Stepping, Suggestion, convert_decay, suggest
from decaylab.diagnosis.result import Diagnosis, Finding
from decaylab.diagnosis.schedule import EquivalentSchedule, equivalent_schedule
from decaylab.diagnosis.transfer import NormTransfer
from decaylab.diagnosis.verdict import diagnose

__all__ = [
    "Diagnosis",
    "EquivalentSchedule",
    "Finding",
    "NormTransfer",
    "Stepping",
    "Suggestion",
    "convert_decay",
    "diagnose",
    "equivalent_schedule",
    "suggest",
]
