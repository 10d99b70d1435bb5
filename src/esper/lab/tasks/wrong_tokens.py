"""`WrongTokens`: the training targets of a text that are replaced by other tokens.

Nothing is stored per target. A hash of the sample's index and the position says whether a target is
wrong and which token replaces it. So a target is the same in every epoch, on every device and in
every strategy, and a task with few training samples has the wrong targets of the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lab.tasks.splits import SPLIT_SEED, Splits
from esper.leyline.errors import ConfigError
from esper.utils.randomness import derive_seed, words_at

_SEED = derive_seed(SPLIT_SEED, "label_noise", "tokens")
_STEPS = 1 << 16
"""Shares are multiples of 1 / _STEPS, so that one word decides everything about a target."""


@dataclass(frozen=True, slots=True, eq=False)
class WrongTokens:
    """Replaces targets of one task.

    Attributes:
        share: Share of the targets that are replaced.
        alphabet: int64 [A], sorted: the different tokens of the training split, two or more.
    """

    share: float
    alphabet: Tensor

    @property
    def limit(self) -> int:
        """The share in steps."""
        return round(self.share * _STEPS)

    def replace(self, targets: Tensor, samples: Tensor) -> Tensor:
        """Return int64 targets [..., T] of the training samples [...], some of them replaced.

        A higher share replaces the same targets by the same tokens, and further ones.
        """
        return replace_tokens(targets, samples, self.alphabet, self.limit, len(self.alphabet))

    def to(self, device: torch.device) -> WrongTokens:
        """Return the same on another device."""
        return WrongTokens(self.share, self.alphabet.to(device))


def choose_wrong_tokens(splits: Splits, share: float) -> WrongTokens:
    """Return what replaces this share of the training targets of a text."""
    counts = torch.bincount(splits.samples["train"].flatten())
    alphabet = counts.nonzero().flatten()
    if len(alphabet) < 2:
        raise ConfigError(
            f"label_noise needs two or more different tokens, but {splits.name} has one"
        )
    return WrongTokens(share, alphabet)


def replace_tokens(
    targets: Tensor,
    samples: Tensor,
    alphabets: Tensor,
    limit: Tensor | int,
    size: Tensor | int,
    first: Tensor | int = 0,
) -> Tensor:
    """Return int64 targets, some of them replaced; all arguments are broadcast together.

    Args:
        targets: Next tokens [..., T].
        samples: Index of each sample in its training split, without the last dimension.
        alphabets: The alphabets of one or more tasks, one after another.
        limit: `WrongTokens.limit`; nothing is replaced where it is 0.
        size: Number of tokens in the alphabet.
        first: Index of its first token in `alphabets`.
    """
    width = targets.shape[-1]
    positions = torch.arange(width, device=targets.device)
    words = words_at(_SEED, samples[..., None] * width + positions)
    # The upper bits of a word say whether the target is wrong, the lower ones by which of the
    # size - 1 other tokens: tokens from the right one on move up by one place.
    places = first + (((words & (_STEPS - 1)) * (size - 1)) >> 16)
    places = places + (alphabets[places] >= targets)
    return torch.where(words >> 16 < limit, alphabets[places], targets)
