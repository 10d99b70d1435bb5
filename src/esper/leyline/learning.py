"""Whether a network learns at all: what is said early in a run, and at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from esper.leyline.records import EpochRecord

_FEW_EPOCHS = 10
"""A run with fewer epochs is never reported as not learning."""
_EARLY_EPOCHS = 5
"""Fewest epochs, or a tenth of the run, after which it is said that a network does not learn."""
_LEARNED = 0.98
"""Share of the loss of guessing below which a network has learned something."""
_FALLEN = 0.001
"""Share of its first value by which the loss of a learning network falls at least."""
_MARGIN = 0.1
"""Share of the way from guessing to a perfect score that counts as luck."""


def why_not_learned(history: Sequence[EpochRecord], chance_loss: float | None) -> str:
    """Return a sentence if a network never became better than guessing, else an empty string.

    If the loss of guessing is not known, the sentence is about a loss that never fell.

    Args:
        history: all epochs of a run.
        chance_loss: loss of a network that only guesses; None if it is not known.
    """
    losses = [record.val_loss for record in history if math.isfinite(record.val_loss)]
    if len(losses) < _FEW_EPOCHS:
        return ""
    if not _has_not_learned(history, losses, chance_loss):
        return ""
    if not chance_loss:
        return (
            f"The validation loss did not fall: it was {losses[0]:.4g} after the first epoch and "
            f"{min(losses):.4g} at best in {len(losses)}; check the data, the loss and the "
            "learning rate before anything grows."
        )
    return (
        f"The network did not learn: its best validation loss in {len(losses)} epochs was "
        f"{min(losses):.4g}, and guessing gives {chance_loss:.4g}; check the data, the loss and "
        "the learning rate before anything grows."
    )


def _has_not_learned(
    history: Sequence[EpochRecord], losses: Sequence[float], chance_loss: float | None
) -> bool:
    """Return whether losses never were below that of guessing, or never fell if it is not known."""
    if not chance_loss:
        return min(losses) >= losses[0] - _FALLEN * abs(losses[0])
    scores = [record.val_score for record in history]
    guessed = math.exp(-chance_loss)
    # Overconfident wrong answers raise the loss of a network that does learn: look at scores too.
    # Negative scores are losses.
    is_score_of_chance = all(
        score < 0.0 or score <= 100.0 * (guessed + _MARGIN * (1.0 - guessed)) for score in scores
    )
    has_scores_of_chance = is_score_of_chance or len(set(scores)) == 1
    return min(losses) >= _LEARNED * chance_loss and has_scores_of_chance


def why_not_learning(
    history: Sequence[EpochRecord], chance_loss: float | None, horizon: int
) -> str:
    """Return a sentence if a network has learned nothing early in its run, else an empty string.

    That is after 5 epochs, or a tenth of the run. A loss that falls in every epoch after the second
    counts as learning, however slowly: many networks get worse at first. If the loss of guessing is
    not known, only one that stands still is no learning: a network that was trained before may not
    improve.

    Args:
        history: the epochs so far.
        chance_loss: loss of a network that only guesses; None if it is not known.
        horizon: epochs of the whole run.
    """
    count = max(_EARLY_EPOCHS, horizon // 10)
    first = history[:count]
    losses = [record.val_loss for record in first]
    if len(losses) < count or horizon < _FEW_EPOCHS or not all(map(math.isfinite, losses)):
        return ""
    if chance_loss:
        is_falling = all(after < before for before, after in pairwise(losses[1:]))
        if is_falling or not _has_not_learned(first, losses, chance_loss):
            return ""
        compared = f"its best validation loss is {min(losses):.4g}, and guessing gives "
        compared += f"{chance_loss:.4g}"
    elif max(losses) - min(losses) > _FALLEN * abs(losses[0]):
        return ""
    else:
        compared = f"its validation loss stands still at {losses[-1]:.4g}"
    return (
        f"The network has learned nothing in {count} epochs: {compared}; check the data, the loss "
        "and the learning rate."
    )
