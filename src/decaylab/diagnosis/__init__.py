"""Diagnosis: which mechanism decay acts through in a run, and what to do about it."""

from decaylab.diagnosis.result import Diagnosis, Finding
from decaylab.diagnosis.verdict import diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]
