"""Advice in words."""

from collections.abc import Iterable

from decaylab.diagnosis.advice import GroupAdvice
from decaylab.diagnosis.reasons import Because
from decaylab.diagnosis.rules import RULES
from decaylab.diagnosis.words.phrases import names, three_digits
from decaylab.diagnosis.words.reasons import sentence


def group_text(group: GroupAdvice, budget: int) -> str:
    """The suggestion for a group of layers that are stepped alike."""
    low, high = group.spread
    spread = f" ({low:.3g} to {high:.3g} over layers)" if low != high else ""
    who = f"{group.optimizer}: " if group.optimizer else ""
    text = (
        f"suggested for {names(group.layers)}: {who}{group.decay} weight decay of"
        f" {group.weight_decay:.3g}{spread} at lr {group.lr:.3g}"
    )
    needed = steps_to_act(group.steps)
    if needed is None or needed < RULES.alike * budget:
        return f"{text}, to act within {budget} steps"
    return (
        f"{text}. It needs about {three_digits(needed)} steps to act, more than the {budget} of the"
        " budget"
    )


def steps_to_act(timescale: float | None) -> float | None:
    """After how many steps a decay of this timescale (`LayerAdvice.steps`) has acted."""
    return None if timescale is None else RULES.timescales * timescale


def note_texts(notes: Iterable[Because]) -> str:
    """Notes on a suggestion, as one string."""
    return "; ".join(sentence(note) for note in notes)
