"""What the paper's artefacts want measured in a run, recorded by the training loop.

Everything here leaves model, optimizer and random streams as they were, so that what is measured is
no part of a run's id.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from decaylab import probes
from decaylab.data import Split, evaluation_batches
from decaylab.optim.kfac import KFAC
from decaylab.training import TrainingRun

Observer = Callable[[TrainingRun], dict[str, float]]

CHUNK = 250  # test images whose Jacobians are made together: 10,000 are a multiple of it
KFAC_BATCHES, KFAC_BATCH = 10, 128  # so many, of so many training images
COURSE_EVERY, COURSE_IMAGES = 10, 2000  # epochs between Jacobians, of the first test images
LONGEST_SIDE = 1200  # of factors whose eigenvalues are taken: longer ones take seconds each
# Images and draws of Fig. 7's traces, measured after every epoch; fewer on digits, a toy.
TRACES, TRACES_ON_DIGITS = (256, 8), (128, 4)


def observer(wanted: Iterable[str]) -> Observer | None:
    """A function for `Execution.observe` that measures `wanted`, names of `suite.PROBES`.

    - `effective_lr`: at the start and after each epoch, by layer (Eq. 9). No pass.
    - `traces`: at the start and after each epoch, tr F and tr G of the first layer's normalised
      weights (Fig. 7), sampled, on the first training images, BN in train mode on batches of 128.
    - `jacobian`: at the end, exact, on the whole test set (Table 2): the mean, and the median. A
      backward pass per class.
    - `jacobian_course`: at the start and every 10 epochs, the same on the first 2,000 test images.
    - `train_pass`: after each epoch, loss and accuracy of a pass over the training set in train
      mode (Fig. 9); batch norm's running statistics stay as they are.
    - `running_variance`: after each epoch, the largest and least running variance of the first
      batch normalisation.
    - `kfac_gn`: at the end, exact outputs, on the first 1,280 training images (Fig. 5). A backward
      pass per class.
    - `damping`: under K-FAC, at the start and at the end, effective damping (Eq. 14) and the share
      of second-order directions of layers whose factors are not long. No pass.
    """
    wanted = set(wanted)
    measures = [measure for probe, measure in MEASURES.items() if probe in wanted]
    if not measures:
        return None

    def observe(run: TrainingRun) -> dict[str, float]:
        values: dict[str, float] = {}
        for measure in measures:
            values |= measure(run)
        return values

    return observe


def _effective_lr(run: TrainingRun) -> dict[str, float]:
    return probes.effective_learning_rate(run.model, run.optimizer).rows()


def _traces(run: TrainingRun) -> dict[str, float]:
    images, draws = TRACES_ON_DIGITS if run.data.name == "digits" else TRACES
    inputs = next(_inputs(run, run.data.train, images))
    first = next(iter(probes.layers_of(run.model).weights))
    values = {}
    for curvature in ("fisher", "gauss-newton"):
        reading = probes.curvature_traces(
            run.model, inputs, curvature=curvature, samples=draws, batch_norm="train"
        )
        (name,) = (name for name in reading.rows() if name.endswith(f"_normalised_train/{first}"))
        values[name] = reading.normalised[first]
    return values


def _jacobian(run: TrainingRun) -> dict[str, float]:
    if not _at_end(run):
        return {}
    batches = _inputs(run, run.data.test, 8 * CHUNK)
    norms = torch.cat([probes.jacobian_norms(run.model, part, chunk=CHUNK) for part in batches])
    median = float(norms.median())
    return {"jacobian_norm": float(norms.mean()), "jacobian_norm_median": median}


def _jacobian_course(run: TrainingRun) -> dict[str, float]:
    if run.complete_epochs % COURSE_EVERY:
        return {}
    batch = next(_inputs(run, run.data.test, COURSE_IMAGES))
    norms = probes.jacobian_norms(run.model, batch, chunk=CHUNK)
    return {f"jacobian_norm_{COURSE_IMAGES}": float(norms.mean())}


def _train_pass(run: TrainingRun) -> dict[str, float]:
    if not run.step:
        return {}
    result = run.train_pass()
    return {"train/pass_loss": result.loss, "train/pass_accuracy": result.accuracy}


def _running_variance(run: TrainingRun) -> dict[str, float]:
    for module in run.model.modules():
        if isinstance(module, _NormBase) and module.running_var is not None:
            least, largest = (float(value) for value in module.running_var.aminmax())
            return {"running_variance_least": least, "running_variance_largest": largest}
    return {}


def _kfac_gn(run: TrainingRun) -> dict[str, float]:
    if not _at_end(run):
        return {}
    batches = list(islice(_inputs(run, run.data.train, KFAC_BATCH), KFAC_BATCHES))
    reading = probes.kfac_gauss_newton_norm(run.model, batches)
    return {"kfac_gn_norm": reading.total or 0.0}


def _damping(run: TrainingRun) -> dict[str, float]:
    optimizer = run.optimizer
    if not isinstance(optimizer, KFAC) or not (run.step == 0 or _at_end(run)):
        return {}
    factors = {
        layer: of
        for layer, of in optimizer.factors().items()
        if max(of.A.shape[-1], of.S.shape[-1]) <= LONGEST_SIDE and float(of.T) > 0
    }
    if not factors:
        return {}
    reading = probes.effective_damping(run.model, factors, optimizer.dampings())
    return {name: value for name, value in reading.rows().items() if name != reading.name}


MEASURES: dict[str, Observer] = {
    "effective_lr": _effective_lr,
    "traces": _traces,
    "jacobian": _jacobian,
    "jacobian_course": _jacobian_course,
    "train_pass": _train_pass,
    "running_variance": _running_variance,
    "kfac_gn": _kfac_gn,
    "damping": _damping,
}


def _at_end(run: TrainingRun) -> bool:
    return run.complete_epochs == run.epochs


def _inputs(run: TrainingRun, split: Split, batch_size: int) -> Iterator[Tensor]:
    data = run.data
    batches = evaluation_batches(split, batch_size=batch_size, mean=data.mean, std=data.std)
    return (images for images, _ in batches)
