"""Which choices are legal, and which of them matter: masks as tensors over rows.

`compute_action_masks` reads signals by the rules that execution itself obeys. An action is chosen
op first, then the slot from that op's row, then the heads that op uses; `heads_mask` gives the
mask by which each head was chosen, and the rest of the module says which heads count. Rectangles
are bool [R, 8, K]: one row per head in the order of `HEAD_NAMES`, K the size of the largest, False
where a head has no such choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import HEAD_NAMES, PLACEHOLDERS, LifecycleOp, causal_table
from esper.leyline.errors import EmptyMaskError, UsageError
from esper.leyline.rules import Masks, RulesConfig, RuleView, build_masks
from esper.leyline.signals import Signals
from esper.leyline.slots import NOOP
from esper.leyline.stages import AlphaMode, SeedStage
from esper.tamiyo.policy.distribution import chosen_log_probs, masked_log_probs, probabilities
from esper.tamiyo.policy.distribution import entropy as normalised_entropy
from esper.tamiyo.policy.distribution import sample as draw
from esper.tamiyo.policy.layout import must_not_wait, refuse_unknown_stages

_SINGLE_HEADS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op")
"""The heads whose mask depends on nothing that is chosen."""


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
    """Return what legality depends on."""
    occupied = signals.occupied
    return RuleView(
        stage=torch.where(occupied, signals.stage, int(SeedStage.DORMANT)),
        alpha_mode=torch.where(occupied, signals.alpha_mode, int(AlphaMode.HOLD)),
        age=torch.where(occupied, signals.age, 0),
        enabled=signals.enabled,
        fits=fits,
    )


def describe_row(signals: Signals, row: int) -> str:
    """Return the slots of a row in words: '0 TRAINING, 1 empty, 2 off'."""
    words = []
    for slot in range(signals.num_slots):
        stage = "empty"
        if bool(signals.occupied[row, slot]):
            stage = SeedStage(int(signals.stage[row, slot])).name
        words.append(f"{slot} {stage if bool(signals.enabled[row, slot]) else 'off'}")
    return "slots: " + ", ".join(words)


# ------------------------------------------------------------------------------ which heads count


def causal_heads(op: Tensor) -> Tensor:
    """Return bool [..., 8]: the heads whose choice has an effect when this op is taken."""
    return _causal(op.device)[op]


def available_heads(masks: Masks) -> Tensor:
    """Return bool [R, 8]: the heads that some legal op would use."""
    return (masks.op.unsqueeze(-1) & _causal(masks.op.device)).any(1)


# ----------------------------------------------------------------------------- masks of the heads


def head_sizes(masks: Masks) -> dict[str, int]:
    """Return the number of choices of every head."""
    sizes = {head: getattr(masks, head).shape[-1] for head in _SINGLE_HEADS}
    sizes["slot"] = masks.slot_by_op.shape[-1]
    sizes["blueprint"] = masks.blueprint_by_slot.shape[-1]
    return {head: sizes[head] for head in HEAD_NAMES}


def base_mask(masks: Masks) -> Tensor:
    """Return bool [R, 8, K]: what each head could take before anything is chosen.

    The slot has all enabled ones, the blueprint whatever fits in any of them; where nothing fits
    it has its placeholder alone.
    """
    enabled = masks.slot_by_op[:, LifecycleOp.WAIT]
    blueprints = (masks.blueprint_by_slot & enabled.unsqueeze(-1)).any(1)
    idle = _placeholder(head_sizes(masks)["blueprint"], NOOP, blueprints.device)
    nothing = ~blueprints.any(-1, keepdim=True)
    parts = {head: getattr(masks, head) for head in _SINGLE_HEADS}
    return _rectangle({**parts, "slot": enabled, "blueprint": blueprints | (nothing & idle)})


def heads_mask(masks: Masks, op: Tensor, slot: Tensor, *, signals: Signals | None = None) -> Tensor:
    """Return bool [R, 8, K]: what each head may take once op and slot are chosen.

    The slot has the row of its op, the blueprint that of its slot. A head the op does not use has
    its placeholder alone, so that its log-probability is exactly 0; that of the slot is the first
    one enabled.

    Args:
        masks: what is legal.
        op: int64 [R], the chosen op.
        slot: int64 [R], the chosen slot; any where the op uses none.
        signals: for the message of an error.

    Raises:
        EmptyMaskError: A head has no legal choice, as with an op that is not legal in its row.
    """
    rows = torch.arange(masks.rows, device=op.device)
    enabled = masks.slot_by_op[:, LifecycleOp.WAIT]
    sizes = head_sizes(masks)
    chosen = {head: getattr(masks, head) for head in _SINGLE_HEADS}
    chosen["slot"] = masks.slot_by_op[rows, op]
    chosen["blueprint"] = masks.blueprint_by_slot[rows, slot]
    idle = {
        head: _placeholder(sizes[head], int(PLACEHOLDERS[head]), op.device).expand_as(mask)
        for head, mask in chosen.items()
    }
    idle["slot"] = enabled & (enabled.cumsum(1) == 1)
    causal = causal_heads(op).unsqueeze(-1)
    mask = torch.where(causal, _rectangle(chosen), _rectangle(idle))
    _refuse_empty(mask, masks, op, slot, signals)
    return mask


def by_head(rectangle: Tensor, masks: Masks) -> dict[str, Tensor]:
    """Return a rectangle [..., 8, K] as {head: [..., choices]}."""
    return {
        head: rectangle[..., index, :size]
        for index, (head, size) in enumerate(head_sizes(masks).items())
    }


def _refuse_empty(
    mask: Tensor, masks: Masks, op: Tensor, slot: Tensor, signals: Signals | None
) -> None:
    filled = mask.any(-1)
    if must_not_wait(filled.device):
        torch._assert_async(filled.all(), "a head has no legal choice; ESPER_DEBUG=1 says where")
        return
    if bool(filled.all()):
        return
    row, head = (~filled).nonzero()[0].tolist()
    legal = [each.name for each in LifecycleOp if bool(masks.op[row, each])]
    state = "" if signals is None else f"; {describe_row(signals, row)}"
    raise EmptyMaskError(
        f"row {row}, head {HEAD_NAMES[head]!r}: {LifecycleOp(int(op[row])).name} at slot "
        f"{int(slot[row])} leaves no legal choice; legal ops here: {', '.join(legal)}{state}"
    )


def _rectangle(parts: Mapping[str, Tensor]) -> Tensor:
    """Return bool [R, 8, K] from one mask [R, choices] per head."""
    flat = torch.cat([parts[head] for head in HEAD_NAMES], dim=-1)
    sizes = tuple(parts[head].shape[-1] for head in HEAD_NAMES)
    cells = _cells(sizes, flat.device)
    filled = F.pad(flat, (0, 1)).index_select(-1, cells.flatten())
    return filled.view(-1, *cells.shape)


@lru_cache(maxsize=64)
def _cells(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 [8, K]: the entry of all masks side by side that each cell shows.

    Cells without a choice show the entry after the last, which is False.
    """
    *starts, end = accumulate(sizes, initial=0)
    column = torch.arange(max(sizes))
    cells = torch.tensor(starts)[:, None] + column
    exists = column < torch.tensor(sizes)[:, None]
    return torch.where(exists, cells, end).to(device)


@lru_cache(maxsize=64)
def _placeholder(size: int, choice: int, device: torch.device) -> Tensor:
    """Return bool [size] with one choice alone."""
    return (torch.arange(size) == choice).to(device)


@lru_cache(maxsize=16)
def _causal(device: torch.device) -> Tensor:
    return causal_table().to(device)


# ----------------------------------------------------------------------------- one head by itself


class MaskedCategorical:
    """The distribution of a single head: one face of `esper.tamiyo.policy.distribution`.

    Args:
        logits: float [..., choices].
        mask: bool, broadcast to the logits; True is legal.
        floor: least probability of a legal choice, mixed in; with k legal choices at most 0.5 / k.

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
