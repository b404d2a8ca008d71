"""Audits of other people's optimizers: K-FAC steps against the exact block, decay operators."""

from decaylab.audits.decay import audit_decay
from decaylab.audits.kfac import audit
from decaylab.audits.report import Audit, AuditCheck, DecayAudit, DecayReason, Reason

__all__ = ["Audit", "AuditCheck", "DecayAudit", "DecayReason", "Reason", "audit", "audit_decay"]
