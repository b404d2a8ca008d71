"""decaylab: what weight decay does to a network, and a K-FAC tested against exact curvature.

Public names are imported when they are first used: `from decaylab import KFAC` does not load the
trainer.
"""

import importlib
from typing import TYPE_CHECKING, Any

from decaylab.errors import DecaylabError

if TYPE_CHECKING:
    from decaylab.attribution import attribute
    from decaylab.audits import audit, audit_decay
    from decaylab.diagnosis.verdict import diagnose
    from decaylab.networks import invariance, measure_invariance, roles
    from decaylab.optim.captured import captured
    from decaylab.optim.decay import parameter_groups
    from decaylab.optim.kfac import KFAC
    from decaylab.optim.options import KFACOptions
    from decaylab.optim.table import decay_table
    from decaylab.probes.watch import watch

__version__ = "0.2.0"

__all__ = [
    "KFAC",
    "DecaylabError",
    "KFACOptions",
    "__version__",
    "attribute",
    "audit",
    "audit_decay",
    "captured",
    "decay_table",
    "diagnose",
    "invariance",
    "measure_invariance",
    "parameter_groups",
    "roles",
    "watch",
]

# Public name -> the module that has it.
_HOMES = {
    "KFAC": "optim.kfac",
    "KFACOptions": "optim.options",
    "attribute": "attribution",
    "audit": "audits",
    "audit_decay": "audits",
    "captured": "optim.captured",
    "decay_table": "optim.table",
    "diagnose": "diagnosis.verdict",
    "invariance": "networks",
    "measure_invariance": "networks",
    "parameter_groups": "optim.decay",
    "roles": "networks",
    "watch": "probes.watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'decaylab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"decaylab.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
