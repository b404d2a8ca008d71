"""Probes: every quantity of the paper on any model, and a watch that records them in any loop."""

from decaylab.curvature.preserve import untouched
from decaylab.probes.damping import DampingReading, LayerDamping, effective_damping, spectrum
from decaylab.probes.effective_lr import EffectiveLearningRate, effective_learning_rate
from decaylab.probes.gap import generalization_gap
from decaylab.probes.gauss_newton import (
    fisher_rao_norm,
    gauss_newton_norm,
    kfac_gauss_newton_norm,
    kfac_norm,
)
from decaylab.probes.jacobian import jacobian_norm, jacobian_norms
from decaylab.probes.kronecker import measured_factors
from decaylab.probes.layers import Layers, layers_of
from decaylab.probes.moments import second_moments
from decaylab.probes.movement import rotations, snapshot, update_norms
from decaylab.probes.reading import NonFiniteWarning, Reading, row_name
from decaylab.probes.registry import PROBES, Moment, Probe, free_probes, load_all, register
from decaylab.probes.spectra import head_ranks, spectra
from decaylab.probes.traces import TraceReading, curvature_traces, kfac_traces
from decaylab.probes.watch import watch
from decaylab.probes.watching import Watch
from decaylab.probes.weight_norm import weight_norms

load_all(__name__, __path__)
FREE = free_probes()

__all__ = [
    "FREE",
    "PROBES",
    "DampingReading",
    "EffectiveLearningRate",
    "LayerDamping",
    "Layers",
    "Moment",
    "NonFiniteWarning",
    "Probe",
    "Reading",
    "TraceReading",
    "Watch",
    "curvature_traces",
    "effective_damping",
    "effective_learning_rate",
    "fisher_rao_norm",
    "gauss_newton_norm",
    "generalization_gap",
    "head_ranks",
    "jacobian_norm",
    "jacobian_norms",
    "kfac_gauss_newton_norm",
    "kfac_norm",
    "kfac_traces",
    "layers_of",
    "measured_factors",
    "register",
    "rotations",
    "row_name",
    "second_moments",
    "snapshot",
    "spectra",
    "spectrum",
    "untouched",
    "update_norms",
    "watch",
    "weight_norms",
]
