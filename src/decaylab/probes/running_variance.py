"""The running variance of the first batch normalisation: its largest and its least channel."""

from torch.nn.modules.batchnorm import _NormBase

from decaylab.probes.reading import Reading
from decaylab.probes.registry import Moment, Probe, register


def _measure(moment: Moment) -> list[Reading]:
    for module in moment.model.modules():
        if isinstance(module, _NormBase) and module.running_var is not None:
            least, largest = (float(value) for value in module.running_var.aminmax())
            return [
                Reading("running_variance_least", "activation^2", total=least),
                Reading("running_variance_largest", "activation^2", total=largest),
            ]
    return []


register(Probe("running_variance", "many", _measure, unit="activation^2"))
