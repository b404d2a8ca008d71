"""Audits of other people's optimizers: K-FAC steps against the exact curvature block."""

from decaylab.audits.kfac import audit
from decaylab.audits.report import Audit, AuditCheck, Reason

__all__ = ["Audit", "AuditCheck", "Reason", "audit"]
