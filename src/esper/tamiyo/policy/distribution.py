"""The distribution of a factored action: from logits, mask and floor to everything one asks of it.

Every function takes all heads at once in one rectangular tensor, [..., heads, choices], where cells
that a head does not have are masked like those that are not legal; a single head is the case
[..., choices]. What is sampled from is what is scored: both read `masked_log_probs`.

A floor gives every legal choice a least probability, so that all of them keep producing data. It
gives no gradient. Entropies and the exploration term are therefore those of the softmax without
the floor, and `exploration_kl` is the term whose gradient survives a collapse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.config import Config, option
from esper.leyline.controller import PROBABILITY_FLOOR_PER_HEAD
from esper.leyline.errors import EmptyMaskError, NonFiniteError, UsageError
from esper.utils.process import is_debugging

FloorKind = Literal["mixture", "clamp", "off"]
"""How a floor is kept: mixed with the uniform, by raising what is below it, or not at all."""

MASKED_LOGIT = -1e4
"""What a choice that is not legal has as its logit, relative to the best legal one."""

MIN_LOG_PROB = -100.0
"""Least log-probability; choices that are not legal have exactly this one."""

_MIXTURE_SHARE = 0.5
"""Most of the mass that a mixture floor takes, whatever the number of legal choices."""

_CLAMP_SHARE = 0.99
"""Most of the mass that a clamped floor takes."""

_TINY = torch.finfo(torch.float32).tiny


def _floor(head: str, told: str) -> Any:
    return option(PROBABILITY_FLOOR_PER_HEAD[head], told, minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class FloorConfig(Config):
    """The least probability of a legal choice while exploring, by head."""

    kind: FloorKind = option(
        "mixture",
        "mixture: (1 - e k) softmax + e over the k legal choices; clamp: what is below the floor "
        "is raised to it and the rest scaled down; off: the softmax alone.",
    )
    slot: float = _floor("slot", "Of a slot.")
    blueprint: float = _floor("blueprint", "Of a blueprint.")
    style: float = _floor("style", "Of a style.")
    tempo: float = _floor("tempo", "Of a tempo.")
    alpha_target: float = _floor("alpha_target", "Of an alpha target.")
    alpha_speed: float = _floor("alpha_speed", "Of an alpha speed.")
    alpha_curve: float = _floor("alpha_curve", "Of an alpha curve.")
    op: float = _floor("op", "Of an op.")

    def by_head(self) -> tuple[float, ...]:
        """Return the floor of every head in the order of `HEAD_NAMES`."""
        return tuple(float(getattr(self, head)) for head in HEAD_NAMES)


def masked_log_probs(
    logits: Tensor,
    mask: Tensor,
    floor: float | Tensor = 0.0,
    *,
    floor_kind: FloorKind = "mixture",
    check: bool = True,
    heads: Sequence[str] | None = None,
) -> Tensor:
    """Return the log-probability of every choice, float32 [..., choices].

    Args:
        logits: [..., choices].
        mask: bool, broadcast to the logits; True is legal.
        floor: least probability of a legal choice; a tensor is broadcast to [...]. With k legal
            choices a mixture keeps at most 0.5 / k, a clamp at most 0.99 / k.
        floor_kind: how the floor is kept.
        check: look for empty masks and logits that are not finite; ESPER_DEBUG=1 always does.
        heads: names of the second-to-last axis, for messages.

    Raises:
        EmptyMaskError: A row has no legal choice.
        NonFiniteError: A logit is NaN or infinite.
    """
    if must_check(check, logits):
        check_choices(logits, mask, heads)
    return unchecked_log_probs(logits, mask, floor, floor_kind)


def unchecked_log_probs(
    logits: Tensor, mask: Tensor, floor: float | Tensor, floor_kind: FloorKind
) -> Tensor:
    """Return what `masked_log_probs` does, and for a row without a legal choice anything finite.

    It is for rectangles that hold more rows than will count.
    """
    if floor_kind == "mixture":
        log_probs = _mix(logits, mask, floor).clamp(min=_TINY).log()
    elif floor_kind == "clamp":
        log_probs = _clamp(masked_log_softmax(logits, mask), mask, floor)
    elif floor_kind == "off":
        log_probs = masked_log_softmax(logits, mask)
    else:
        raise UsageError(f"floor_kind must be 'mixture', 'clamp' or 'off', got {floor_kind!r}")
    return torch.where(mask, log_probs, MIN_LOG_PROB).clamp(min=MIN_LOG_PROB)


def masked_log_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the log-softmax over the legal choices, without floor, clamp or check.

    Masked choices have -1e4, however low the legal logits are. A row without any legal choice is
    finite and means nothing.
    """
    shifted, _, total = _softmax_parts(logits, mask)
    return torch.where(mask, shifted - total.log(), MASKED_LOGIT)


def probabilities(log_probs: Tensor) -> Tensor:
    """Return the probability of every choice, exactly 0 where it is not legal."""
    possible = log_probs > MIN_LOG_PROB
    return torch.where(possible, log_probs, 0.0).exp() * possible


def sample(
    log_probs: Tensor,
    generator: torch.Generator | None = None,
    *,
    uniforms: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return one choice per distribution, int64 [...]; never one that is not legal.

    Args:
        log_probs: what `masked_log_probs` returned, [..., choices].
        generator: where the draws come from; PyTorch's own numbers without one.
        uniforms: draws from [0, 1), broadcast to [...]; the generator is then not used.
        deterministic: return the likeliest choice instead of a draw.
    """
    if deterministic:
        return log_probs.argmax(-1)
    if uniforms is None:
        uniforms = torch.rand(
            log_probs.shape[:-1], generator=generator, device=log_probs.device, dtype=torch.float32
        )
    mass = probabilities(log_probs).cumsum(-1)
    total = mass[..., -1:]
    # The draw falls on the first choice whose cumulated mass exceeds it. Rounding may lift a draw
    # to the total itself; the second condition then stops at the last choice that has any mass.
    passed = (mass <= uniforms.unsqueeze(-1) * total) & (mass < total)
    return passed.sum(-1)


def chosen_log_probs(log_probs: Tensor, choices: Tensor) -> Tensor:
    """Return the log-probability of the taken choices, [...]."""
    return log_probs.gather(-1, choices.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy of the softmax without a floor, [...], from 0 to 1.

    It is divided by ln k, with k the number of legal choices, and 0 where there is only one.
    """
    shifted, weight, total = _softmax_parts(logits, mask)
    mean = (weight * shifted).sum(-1, keepdim=True) / total
    nats = (total.log() - mean).squeeze(-1)
    legal = _count(mask, logits)
    return torch.where(legal > 1, nats / legal.clamp(min=2).log(), 0.0)


def exploration_kl(logits: Tensor, mask: Tensor) -> Tensor:
    """Return KL(uniform over the legal choices, softmax without a floor) in nats, [...].

    Its gradient with respect to a legal logit is pi - 1/k: it pulls hardest where the softmax has
    collapsed, where the gradient of the entropy and of every floored probability has vanished.
    """
    shifted, _, total = _softmax_parts(logits, mask)
    legal = _count(mask, logits).clamp(min=1)
    return total.squeeze(-1).log() - shifted.sum(-1) / legal - legal.log()


def masked_kl(logits: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Return KL(softmax of `logits`, softmax of `other`) over the legal choices in nats, [...]."""
    own, theirs = masked_log_softmax(logits, mask), masked_log_softmax(other, mask)
    return (torch.where(mask, own.exp() * (own - theirs), 0.0)).sum(-1)


def must_check(check: bool, tensor: Tensor) -> bool:
    """Return whether values are looked at now: not while a graph is compiled or captured."""
    if torch.compiler.is_compiling():
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return check or is_debugging()


def check_choices(logits: Tensor, mask: Tensor, heads: Sequence[str] | None = None) -> None:
    """Raise where a mask allows nothing or a logit is not finite, naming row and head."""
    # One number decides whether all is well; where it went wrong is looked for only then.
    if bool(mask.any(-1).all() & torch.isfinite(logits.detach().sum())):
        return
    legal = mask.expand_as(logits).any(-1)
    if not bool(legal.all()):
        where = _place(~legal, heads)
        raise EmptyMaskError(f"{where} allows no choice; a mask must allow at least one")
    finite = torch.isfinite(logits)
    if not bool(finite.all()):
        where = _place(~finite.all(-1), heads)
        raise NonFiniteError(
            f"{where} has a logit that is not finite; the weights or the observation have diverged"
        )


def _place(wrong: Tensor, heads: Sequence[str] | None) -> str:
    """Return the first wrong place as 'row 3, step 7, head op'."""
    index: list[int] = wrong.nonzero()[0].tolist()
    head = "" if heads is None else f"head {heads[index.pop()]!r}"
    words = [f"{axis} {at}" for axis, at in zip(("row", "step"), index, strict=False)]
    return ", ".join([*words, head] if head else words) or "the only row"


def _softmax_parts(logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return legal logits relative to the best, their exponentials, and the sum of those, [..., 1].

    Masked cells are 0 in both: they never enter an exponential, so nothing underflows on the way.
    """
    logits = logits.float()
    # Relative to the best legal logit, so that no legal choice can fall to a masked one.
    best = torch.where(mask, logits.detach(), -math.inf).amax(-1, keepdim=True)
    shifted = torch.where(mask, logits - best, 0.0)
    weight = shifted.exp() * mask
    # At least 1 wherever anything is legal.
    return shifted, weight, weight.sum(-1, keepdim=True).clamp(min=1.0)


def _count(mask: Tensor, logits: Tensor) -> Tensor:
    """Return how many choices are legal, float32 [...]."""
    return mask.expand_as(logits).sum(-1, dtype=torch.float32)


def _effective_floor(floor: float | Tensor, legal: Tensor, share: float) -> Tensor:
    """Return min(floor, share / k), float32 [..., 1]."""
    most = share / legal.clamp(min=1)
    least = torch.minimum(most, floor) if isinstance(floor, Tensor) else most.clamp(max=floor)
    return least.unsqueeze(-1)


def _mix(logits: Tensor, mask: Tensor, floor: float | Tensor) -> Tensor:
    """Mix with the uniform: p = (1 - e k) softmax + e over the k legal choices."""
    _, weight, total = _softmax_parts(logits, mask)
    legal = _count(mask, logits).unsqueeze(-1)
    least = _effective_floor(floor, legal.squeeze(-1), _MIXTURE_SHARE)
    share = (1.0 - least * legal) / total
    return torch.addcmul(least, weight, share)


def _clamp(log_probs: Tensor, mask: Tensor, floor: float | Tensor) -> Tensor:
    """Raise what is below the floor to it, and scale the rest to the mass that is left.

    Scaling can push a choice below the floor that was above it, so the set of raised choices is
    the smallest one that leaves none there: the likeliest j choices are kept for the largest j
    whose scaled j-th probability still reaches the floor.
    """
    legal = _count(mask, log_probs).unsqueeze(-1)
    least = _effective_floor(floor, legal.squeeze(-1), _CLAMP_SHARE)
    ranked = log_probs.sort(dim=-1, descending=True).values
    kept = torch.arange(1, log_probs.shape[-1] + 1, device=log_probs.device)
    left = (1.0 - least * (legal - kept)).clamp(min=_TINY)
    scale = left.log() - ranked.logcumsumexp(-1)
    reaches = (ranked + scale >= least.log()) & (kept <= legal)
    # The likeliest choice always reaches the floor.
    last = (reaches * kept).argmax(-1, keepdim=True)
    is_kept = log_probs >= ranked.gather(-1, last)
    return torch.where(is_kept, log_probs + scale.gather(-1, last), least.log())
