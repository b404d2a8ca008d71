"""What the paper's artefacts want measured in a run, recorded by the training loop.

Everything here leaves model, optimizer and random streams as they were, so that what is measured is
no part of a run's id.
"""

from collections.abc import Callable, Iterable

from decaylab import probes
from decaylab.probes.jacobian import CHUNK
from decaylab.training import TrainingRun
from decaylab.training.run import RunImages

EpochProbe = Callable[[TrainingRun], dict[str, float]]

COURSE_EVERY, COURSE_IMAGES = 10, 2000  # epochs between Jacobians, of the first test images

# By its name in `suite.PROBES`, the probes of the registry that it is; these say when they are due.
REGISTERED: dict[str, tuple[str, ...]] = {
    "effective_lr": ("effective_lr",),  # by layer (Eq. 9)
    "traces": ("fisher_trace", "gn_trace"),  # of the first layer's normalised weights (Fig. 7)
    "jacobian": ("jacobian_norm",),  # exact, on the whole test set (Table 2)
    "running_variance": ("running_variance",),  # of the first batch normalisation
    "kfac_gn": ("kfac_gn_norm",),  # on the first 1,280 training images (Fig. 5)
    "damping": ("second_order_share",),  # under K-FAC, with the effective damping (Eq. 14)
}


def epoch_probe(wanted: Iterable[str]) -> EpochProbe | None:
    """A function for `Execution.epoch_probe` that measures `wanted`, names of `suite.PROBES`.

    Beside the registered ones:
    - `jacobian_course`: at the start and every 10 epochs, on the first 2,000 test images.
    - `train_pass`: after each epoch, loss and accuracy of a pass over the training set in train
      mode (Fig. 9); batch norm's running statistics stay as they are.
    """
    wanted = set(wanted)
    names = [name for probe, names in REGISTERED.items() if probe in wanted for name in names]
    measures = [measure for probe, measure in MEASURES.items() if probe in wanted]
    if not (names or measures):
        return None

    def measure_all(run: TrainingRun) -> dict[str, float]:
        values = run.measured(names)
        for measure in measures:
            values |= measure(run)
        return values

    return measure_all


def _jacobian_course(run: TrainingRun) -> dict[str, float]:
    if run.complete_epochs % COURSE_EVERY:
        return {}
    batch = next(RunImages(run.data).test(COURSE_IMAGES))
    norms = probes.jacobian_norms(run.model, batch, chunk=CHUNK)
    return {f"jacobian_norm_{COURSE_IMAGES}": float(norms.mean())}


def _train_pass(run: TrainingRun) -> dict[str, float]:
    if not run.step:
        return {}
    result = run.train_pass()
    return {"train/pass_loss": result.loss, "train/pass_accuracy": result.accuracy}


MEASURES: dict[str, EpochProbe] = {"jacobian_course": _jacobian_course, "train_pass": _train_pass}
