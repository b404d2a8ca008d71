"""Why: every reason that a diagnosis or an advice can give, with its data. Words: `words`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any


class Verdict(StrEnum):
    """On one mechanism or one layer."""

    ACTS = "acts"
    DOES_NOT_ACT = "does not act"
    CANNOT_TELL = "cannot tell"


class Mechanism(StrEnum):
    """The paper's three, in its order."""

    EFFECTIVE_LR = "effective learning rate"
    JACOBIAN = "Jacobian norm"
    DAMPING = "effective damping"


class Reason(Enum):
    """Grouped by what they are said of."""

    # the records as a whole, said first
    DAMAGED = auto()
    DIVERGED = auto()
    RUN_DIVERGED = auto()
    NOT_FINITE = auto()
    PROBABLY_DIVERGED = auto()
    UNFINISHED = auto()
    NOTHING_RECORDED = auto()
    BEGINS_LATE = auto()
    OPTIMIZER_CHANGED = auto()
    OPTIMIZER_JOINED = auto()
    SHARED_PARAMETERS = auto()
    UNSTEPPED_PARAMETERS = auto()
    NO_SETTINGS = auto()
    TOO_FEW_NORMS = auto()
    GRADIENTS_ALONG = auto()
    EPS_COUNTS = auto()
    COLLAPSED = auto()
    NO_DECAY = auto()
    LOST_TO_ROUNDING = auto()
    SWAPPED = auto()
    UNWATCHED = auto()
    # runs that do not belong together
    BASELINE_DECAYS = auto()
    OTHER_SPEC = auto()
    OTHER_LAYERS = auto()
    OTHER_OPTIMIZER = auto()
    OTHER_SIZE = auto()
    OTHER_START = auto()
    OTHER_SETTING = auto()
    OTHER_LR = auto()
    OTHER_GROWTH = auto()
    SEED_LEFT_OUT = auto()
    DIFFERS = auto()
    STEPS_DIFFER = auto()
    # a layer that cannot be judged
    FROZEN = auto()
    NOT_STEPPED = auto()
    NO_LAYER_SETTINGS = auto()
    RECORDED_ONCE = auto()
    ZEROS = auto()
    NEVER_MOVED = auto()
    # what decay takes of a layer is not known
    L2_RESCALED = auto()
    KIND_UNKNOWN = auto()
    ROUNDED_AWAY = auto()
    TAKES_ALL = auto()
    # a layer's part in a mechanism
    SIZE_COUNTS = auto()
    GAIN = auto()
    ADAPTER = auto()
    INVARIANCE_UNKNOWN = auto()
    SIZE_IN_DOUBT = auto()
    INVARIANT = auto()
    NOT_DECAYED = auto()
    NOT_KFAC = auto()
    NO_COMMON_STEP = auto()
    NEEDS_BASELINE = auto()
    GRADIENTS_CLIPPED = auto()
    NO_SHARES = auto()
    FEW_SHARES = auto()
    OLD_FACTORS = auto()
    LAW_UNKNOWN = auto()
    # a mechanism
    ALL_FROZEN = auto()
    NONE_JUDGEABLE = auto()
    NO_LAYER_DECAYS = auto()
    TOO_LITTLE = auto()
    NO_INVARIANT_DECAYS = auto()
    NO_INVARIANT = auto()
    CLIPPED = auto()
    OLD_CURVATURE = auto()
    UNDAMPED_BY_LR = auto()
    BY_LR = auto()
    ONLY_KFAC_DAMPS = auto()
    NO_KFAC_LAYER = auto()
    SCALE_FREE = auto()
    SHARE_UNKNOWN = auto()
    DAMPING_NEGLIGIBLE = auto()
    SHARES = auto()
    SAME_SHARES = auto()
    ALL_INVARIANT = auto()
    JACOBIAN_ALONE = auto()
    NO_SENSITIVITY = auto()
    THROUGH_OTHERS = auto()
    NOTHING_TO_COMPARE = auto()
    CHANGED = auto()
    OPPOSITE = auto()
    SOME_LAYERS_MORE = auto()
    BETWEEN = auto()
    TOO_EARLY = auto()
    MORE_THAN_DECAY = auto()
    SEEDS_DISAGREE = auto()
    # what would decide it
    GIVE_BASELINE = auto()
    RECORD_IN_BOTH = auto()
    RECORD_SAME_WAY = auto()
    RECORD_SHARE = auto()
    SAME_STEPS = auto()
    RECORD_FURTHER = auto()
    SAME_DATA = auto()
    MORE_SEEDS = auto()
    ATTRIBUTE = auto()
    NAME_THE_LAW = auto()
    NO_CLIPPING = auto()
    RENEW_CURVATURE = auto()
    RECORD_MORE = auto()
    TRAIN_LONGER = auto()
    GIVE_INPUTS = auto()
    WATCH_ALL = auto()
    # what follows
    DIRECTION_ONLY = auto()
    MATTERS = auto()
    NO_MORE_SECOND_ORDER = auto()
    NO_EFFECT = auto()
    SCHEDULE = auto()
    FUNCTION = auto()
    ADAPTERS = auto()
    NOTHING_YET = auto()
    NOTHING_TO_DROP = auto()
    BURST = auto()
    DAMPING_DOMINATES = auto()
    # advice on a layer
    CHOOSE_BY_OUTCOME = auto()
    DAMPENED_OUT = auto()
    NO_LR = auto()
    TAKEN = auto()
    DOES_NOT_GROW = auto()
    NO_ROTATION = auto()
    ASK_FOR_LESS = auto()
    NOTHING_HOLDS = auto()
    TURNS_BY_LR = auto()
    ROUGH = auto()
    MIXED = auto()
    ON_ITS_WAY = auto()
    FAR_BALANCE = auto()
    FOR_THE_BUDGET = auto()
    # advice on all of them
    NO_ONE_VALUE = auto()
    NO_SUGGESTION = auto()
    NO_CANDIDATE = auto()


@dataclass(frozen=True)
class Because:
    """One reason, with the numbers and names that belong to it."""

    reason: Reason
    data: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]


def because(reason: Reason, **data: Any) -> Because:
    """`Because`, written short."""
    return Because(reason, data)


def has(reasons: tuple[Because, ...], reason: Reason) -> bool:
    """Whether one of them is this."""
    return any(item.reason is reason for item in reasons)
