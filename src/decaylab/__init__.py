"""decaylab: what weight decay does to a network, and a K-FAC that is right."""

from decaylab.attribution import attribute
from decaylab.audits import audit
from decaylab.diagnosis.verdict import diagnose
from decaylab.errors import DecaylabError
from decaylab.networks import invariance, roles
from decaylab.optim.captured import captured
from decaylab.optim.decay import parameter_groups
from decaylab.optim.kfac import KFAC
from decaylab.optim.kfac_options import KFACOptions
from decaylab.optim.table import decay_table
from decaylab.probes.watch import watch

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "DecaylabError",
    "KFACOptions",
    "__version__",
    "attribute",
    "audit",
    "captured",
    "decay_table",
    "diagnose",
    "invariance",
    "parameter_groups",
    "roles",
    "watch",
]
