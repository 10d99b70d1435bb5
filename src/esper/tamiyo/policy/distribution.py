"""The distribution of a factored action: masked log-probabilities, sampling, entropy, KL.

Every function takes all heads in one tensor [..., heads, choices]. Cells that a head does not have
are masked like illegal choices. A single head is the case [..., choices]. Sampling and scoring both
use `masked_log_probs`, so they cannot disagree.

A floor gives every legal choice a minimum probability, so that each keeps producing data. A floor
has no gradient. Entropies are therefore those of the softmax without the floor, and
`exploration_kl` is the term whose gradient survives a collapsed softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.config import Config, is_debugging, option
from esper.leyline.controller import PROBABILITY_FLOOR_PER_HEAD
from esper.leyline.errors import EmptyMaskError, NonFiniteError, UsageError

FloorKind = Literal["mixture", "clamp", "off"]
"""How a floor is enforced: mixed with the uniform, by raising what is below it, or not at all."""

MASKED_LOGIT = -1e4
"""Logit of an illegal choice, relative to the best legal one."""

MIN_LOG_PROB = -100.0
"""Smallest log-probability; illegal choices have exactly this one."""

_MIXTURE_SHARE = 0.5
"""Largest share of the probability that a mixture floor takes."""

_CLAMP_SHARE = 0.99
"""Largest share of the probability that a clamped floor takes."""

_TINY = torch.finfo(torch.float32).tiny


def _floor(head: str, help: str) -> Any:
    return option(PROBABILITY_FLOOR_PER_HEAD[head], help, minimum=0, maximum=1)


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
        floor: minimum probability of a legal choice; a tensor is broadcast to [...]. With k legal
            choices a mixture keeps at most 0.5 / k, a clamp at most 0.99 / k.
        floor_kind: how the floor is enforced.
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
    """Return `masked_log_probs` without its checks.

    A row without a legal choice gets finite numbers without meaning. `HeadTable` needs that: its
    tensor holds rows that are never selected.
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

    Illegal choices get -1e4. A row without a legal choice gets finite numbers without meaning.
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
    """Return one legal choice per distribution, int64 [...].

    Args:
        log_probs: what `masked_log_probs` returned, [..., choices].
        generator: source of the draws; PyTorch's global one by default.
        uniforms: draws from [0, 1), broadcast to [...], used in place of the generator.
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
    # Take the first choice whose cumulative probability exceeds the draw. Rounding may lift a draw
    # to the total itself; the second condition then stops at the last choice that is possible.
    passed = (mass <= uniforms.unsqueeze(-1) * total) & (mass < total)
    return passed.sum(-1)


def chosen_log_probs(log_probs: Tensor, choices: Tensor) -> Tensor:
    """Return the log-probability of the taken choices, [...]."""
    return log_probs.gather(-1, choices.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the normalised entropy of the softmax without a floor, [...], from 0 to 1.

    The entropy is divided by ln k for k legal choices; it is 0 where only one is legal.
    """
    shifted, weight, total = _softmax_parts(logits, mask)
    mean = (weight * shifted).sum(-1, keepdim=True) / total
    nats = (total.log() - mean).squeeze(-1)
    legal = _count(mask, logits)
    return torch.where(legal > 1, nats / legal.clamp(min=2).log(), 0.0)


def exploration_kl(logits: Tensor, mask: Tensor) -> Tensor:
    """Return KL(uniform over the legal choices, softmax without a floor) in nats, [...].

    Its gradient with respect to a legal logit is pi - 1/k. It is largest where the softmax has
    collapsed, which is where the gradients of the entropy and of floored probabilities vanish.
    """
    shifted, _, total = _softmax_parts(logits, mask)
    legal = _count(mask, logits).clamp(min=1)
    return total.squeeze(-1).log() - shifted.sum(-1) / legal - legal.log()


def masked_kl(logits: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Return KL(softmax of `logits`, softmax of `other`) over the legal choices in nats, [...]."""
    own, theirs = masked_log_softmax(logits, mask), masked_log_softmax(other, mask)
    return (torch.where(mask, own.exp() * (own - theirs), 0.0)).sum(-1)


def must_check(check: bool, tensor: Tensor) -> bool:
    """Return whether to check values now; never while a graph is compiled or captured."""
    if torch.compiler.is_compiling():
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return check or is_debugging()


def check_choices(logits: Tensor, mask: Tensor, heads: Sequence[str] | None = None) -> None:
    """Raise where a mask allows nothing or a logit is not finite, naming row and head."""
    # One synchronisation in the good case; the place of an error is searched for only after it.
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
    """Return shifted logits, their exponentials, and the sum of those, [..., 1].

    Logits are relative to the best legal one. Masked cells are 0 and never enter an exponential,
    so nothing underflows.
    """
    logits = logits.float()
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
    """Raise probabilities below the floor to it, and scale the others to the rest.

    Scaling can push a further choice below the floor. So the likeliest j choices are scaled, for
    the largest j whose j-th scaled probability still reaches the floor; all others are raised.
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
