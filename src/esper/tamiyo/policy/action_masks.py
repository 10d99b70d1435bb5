"""Masks of legal choices, and which heads have an effect.

`compute_action_masks` applies `leyline.rules`, the same rules that execution obeys. An action is
chosen op first, then the slot for that op, then the heads that the op uses: `HeadTable` lays out
the masks in that order, and `causal_heads` says which heads the op uses.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from esper.leyline.actions import causal_table
from esper.leyline.errors import EmptyMaskError, UsageError
from esper.leyline.rules import Masks, RulesConfig, RuleView, build_masks
from esper.leyline.signals import Signals
from esper.leyline.stages import AlphaMode, SeedStage
from esper.tamiyo.policy.distribution import chosen_log_probs, masked_log_probs, probabilities
from esper.tamiyo.policy.distribution import entropy as normalised_entropy
from esper.tamiyo.policy.distribution import sample as draw
from esper.tamiyo.policy.layout import refuse_unknown_stages


def compute_action_masks(signals: Signals, fits: Tensor, rules: RulesConfig | None = None) -> Masks:
    """Return what is legal in every row.

    Args:
        signals: what is known of every row.
        fits: bool [R, S, B], whether a blueprint may be germinated in a slot (topology, limits).
        rules: the constants of legality.

    Raises:
        EmptyMaskError: A row has no enabled slot, so that not even WAIT is legal.
        UsageError: A stage does not exist, or `fits` has another shape.
    """
    if fits.dim() != 3 or fits.shape[:2] != signals.stage.shape:
        raise UsageError(
            f"fits must be [{signals.rows}, {signals.num_slots}, blueprints], "
            f"got {list(fits.shape)}"
        )
    refuse_unknown_stages(signals)
    possible = signals.enabled.any(1)
    if not bool(possible.all()):
        row = int((~possible).nonzero()[0])
        raise EmptyMaskError(
            f"row {row}, head 'op': no action is legal because no slot is enabled "
            f"({describe_row(signals, row)}); enable one"
        )
    return build_masks(rule_view(signals, fits), rules or RulesConfig())


def rule_view(signals: Signals, fits: Tensor) -> RuleView:
    """Return the part of the signals that legality depends on."""
    occupied = signals.occupied
    return RuleView(
        stage=torch.where(occupied, signals.stage, int(SeedStage.DORMANT)),
        alpha_mode=torch.where(occupied, signals.alpha_mode, int(AlphaMode.HOLD)),
        age=torch.where(occupied, signals.age, 0),
        enabled=signals.enabled,
        copies=signals.copies,
        fits=fits,
    )


def describe_row(signals: Signals, row: int) -> str:
    """Return the state of a row's slots, as in 'slots: 0 TRAINING, 1 empty, 2 off'."""
    words = []
    for slot in range(signals.num_slots):
        stage = "empty"
        if bool(signals.occupied[row, slot]):
            stage = SeedStage(int(signals.stage[row, slot])).name
        words.append(f"{slot} {stage if bool(signals.enabled[row, slot]) else 'off'}")
    return "slots: " + ", ".join(words)


# ------------------------------------------------------------------------------ which heads count


def causal_heads(op: Tensor) -> Tensor:
    """Return bool [..., 8]: the heads that each op uses."""
    return _causal(op.device)[op]


def available_heads(masks: Masks) -> Tensor:
    """Return bool [R, 8]: the heads that at least one legal op uses."""
    return (masks.op.unsqueeze(-1) & _causal(masks.op.device)).any(1)


@lru_cache(maxsize=16)
def _causal(device: torch.device) -> Tensor:
    return causal_table().to(device)


# ----------------------------------------------------------------------------- one head by itself


class MaskedCategorical:
    """The distribution of a single head, by the functions of `esper.tamiyo.policy.distribution`.

    Args:
        logits: float [..., choices].
        mask: bool, broadcast to the logits; True is legal.
        floor: minimum probability of a legal choice, mixed in; at most 0.5 / k for k legal choices.

    Raises:
        EmptyMaskError: A row has no legal choice.
        NonFiniteError: A logit is NaN or infinite.
    """

    def __init__(self, logits: Tensor, mask: Tensor, floor: float | Tensor = 0.0) -> None:
        """Compute the log-probabilities that sampling and scoring share."""
        self.logits = logits
        self.mask = mask
        self.log_probs = masked_log_probs(logits, mask, floor)

    @property
    def probs(self) -> Tensor:
        """Probability of every choice, exactly 0 where it is not legal."""
        return probabilities(self.log_probs)

    def sample(
        self, generator: torch.Generator | None = None, *, uniforms: Tensor | None = None
    ) -> Tensor:
        """Return one legal choice per row, int64 [...], from a generator or from given draws."""
        return draw(self.log_probs, generator, uniforms=uniforms)

    def log_prob(self, choice: Tensor) -> Tensor:
        """Return the log-probability of these choices, [...]."""
        return chosen_log_probs(self.log_probs, choice)

    def entropy(self) -> Tensor:
        """Return the entropy without the floor divided by ln k of k legal choices, from 0 to 1."""
        return normalised_entropy(self.logits, self.mask)
