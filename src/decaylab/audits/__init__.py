"""Audits of other people's optimizers: K-FAC steps against the exact block, decay operators."""

from decaylab.audits.decay import DecayAudit, DecayCheck, DecayReason, audit_decay
from decaylab.audits.kfac import audit
from decaylab.audits.report import Audit, AuditCheck, Reason

__all__ = [
    "Audit",
    "AuditCheck",
    "DecayAudit",
    "DecayCheck",
    "DecayReason",
    "Reason",
    "audit",
    "audit_decay",
]
