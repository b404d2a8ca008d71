"""Pieces of sentences: numbers, names, and what changed by how much."""

from collections.abc import Callable, Iterable, Sequence

from decaylab.diagnosis.effects import Change, ComparedWith, Effect

QUANTITIES = {
    "effective_lr": "effective learning rate",
    "rotation": "angle per step",
    "jacobian_norm": "squared Jacobian norm",
    "kfac_gn_norm": "K-FAC Gauss-Newton norm",
    "gn_norm": "Gauss-Newton norm",
    "effective_damping": "effective damping",
    "weight_norm": "layer's own norm",
}
LARGER = {"effective_lr", "rotation"}  # decay makes these grow and the others shrink
MOST_NAMES = 4


def three_digits(value: float) -> str:
    """Three significant digits, without an exponent below a million.

    >>> [three_digits(x) for x in (1.854, 0.012345, 1574.2, 2.3e7)]
    ['1.85', '0.0123', '1570', '2.3e+07']
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if 1000 <= rounded < 1e6 else f"{rounded:.3g}"


def step_count(value: float) -> str:
    """About how many steps: a whole number, at least one."""
    return three_digits(max(round(value), 1))


def factor(value: float) -> str:
    """A factor without its x; near one with two decimals, which count there.

    >>> [factor(x) for x in (0.0123, 0.84, 1.0412, 3.97, 12.4, 1574.2)]
    ['0.012', '0.84', '1.04', '4.0', '12', '1570']
    """
    if value < 0.0995:
        return f"{value:.2g}"
    if value < 9.95:
        return f"{value:.{2 if value < 1.995 else 1}f}"
    return f"{value:.0f}" if value < 999.5 else three_digits(value)


def times(value: float) -> str:
    """A factor: 1.60x, 0.62x, 4.0x."""
    return f"{factor(value)}x"


def percent(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:z.0f} %"


def outputs_percent(value: float) -> str:
    """Percent of the outputs; 0 for what rounding and eps leave of exact invariance."""
    return "0" if value < 5e-4 else f"{value:.2g}"


def outputs_per_percent(response: float) -> str:
    """How the outputs respond to a layer's size."""
    return f"outputs change {outputs_percent(response)} % per percent"


def range_of(values: Sequence[float], written: Callable[[float], str]) -> str:
    """From the smallest to the largest; one value if both are written alike."""
    low, high = written(min(values)), written(max(values))
    return low if low == high else f"{low} to {high}"


def names(layers: Iterable[str]) -> str:
    """Some of them, and how many more."""
    shown = list(layers)
    rest = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    return ", ".join(shown[:MOST_NAMES]) + rest


def layer_name(name: str) -> str:
    """A layer in a sentence; the number that is its whole name in an nn.Sequential needs a word."""
    return f"layer {name}" if name.isdigit() else name


def as_sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def effect_range(effect: Effect) -> str:
    """The factor and its range: 1.85x (1.80 to 1.91 over layers)."""
    return f"{times(effect.value)}{_spread(effect)}"


def effect_times(effect: Effect) -> str:
    """The factor, and whether it is a lower estimate: "22x", "at least 22x"."""
    return f"at least {times(effect.value)}" if effect.least else times(effect.value)


def change_words(change: Change, *, spread: bool = True) -> str:
    """What a quantity is with decay: "The angle per step is 1.54x larger with decay"."""
    effect, grows = change.effect, change.quantity in LARGER
    if effect.value < 1:
        effect, grows = effect.inverse(), not grows
    kind = "larger" if grows else "smaller"
    alone = effect.source is not ComparedWith.BASELINE
    than = " than a reconstruction without it" if alone else ""
    quantity = QUANTITIES[change.quantity]
    text = f"The {quantity} is {times(effect.value)} {kind} with decay{than}"
    return f"{text}{_spread(effect)}" if spread else text


def _spread(effect: Effect) -> str:
    if effect.low is None or effect.high is None:
        return ""
    low, high = factor(effect.low), factor(effect.high)
    return f" ({low} to {high} over {effect.spread})" if low != high else ""
