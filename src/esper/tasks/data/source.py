"""What every reader returns: arrays as they lie on disk, and how to normalise them.

Splitting, subsampling and moving to a device are not done here but in `tasks.dataset`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import DataError

Array = NDArray[Any]

Kind = Literal["image", "features", "tokens"]
"""Shape of one sample: [C, H, W], [F] or [T + 1] tokens."""

Target = Literal["class", "real", "next_token"]
"""What is predicted: a label, one or more real values, or each next token."""


MOST_CLASSES = 1_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """A data set before it is split; checked at construction.

    Attributes:
        name: What the data is, for people.
        origin: Where it came from; every complaint begins with it.
        x: Training samples, uint8 or float32: [N, C, H, W], [N, F] or tokens [N, T + 1].
        y: Their labels (int64) or values (float32); None for tokens.
        x_test: Samples of the official test split, or None where there is none.
        y_test: Their labels or values.
        x_val: Samples of a validation split of its owner's, or None where it is to be carved.
        y_val: Their labels or values.
        num_classes: Number of classes, or of distinct tokens; None for real values.
        scale: Divisor that brings raw values to the unit in which mean and std are given.
        mean: Mean per channel in that unit. None: bytes are standardised by what is measured on
            the training split, real numbers are taken as they are.
        std: Standard deviation per channel; None as above.
    """

    name: str
    origin: str
    x: Array
    y: Array | None
    x_test: Array | None = None
    y_test: Array | None = None
    num_classes: int | None = None
    scale: float = 1.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    x_val: Array | None = None
    y_val: Array | None = None

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit together."""
        _check_part(self, self.x, self.y, "training")
        for name, x, y in (
            ("validation", self.x_val, self.y_val),
            ("test", self.x_test, self.y_test),
        ):
            if x is None:
                continue
            _check_part(self, x, y, name)
            if x.shape[1:] != self.x.shape[1:]:
                raise DataError(
                    f"{self.origin}: training samples have shape {_shape(self.x)} but {name} "
                    f"samples {_shape(x)}; both must be alike"
                )

    @property
    def kind(self) -> Kind:
        """Shape of one sample."""
        if self.y is None:
            return "tokens"
        return "image" if self.x.ndim == 4 else "features"

    @property
    def target(self) -> Target:
        """What is predicted."""
        if self.y is None:
            return "next_token"
        return "real" if self.y.dtype.kind == "f" else "class"


def _shape(x: Array) -> str:
    return "x".join(map(str, x.shape[1:]))


def _check_part(source: Source, x: Array, y: Array | None, part: str) -> None:
    where = f"{source.origin}: the {part} part"
    if x.ndim < 2 or x.ndim == 3 or x.ndim > 4:
        raise DataError(
            f"{where} has samples of shape {_shape(x) or '()'}; "
            f"images are [N, C, H, W] and features [N, F]"
        )
    if x.size == 0:
        raise DataError(f"{where} is empty; at least one sample is needed")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise DataError(f"{where} has NaN or infinite values; clean them first")
    if y is None:
        return
    if len(y) != len(x):
        raise DataError(f"{where} has {len(x)} samples but {len(y)} labels; there must be as many")
    if y.dtype.kind == "f":
        if not np.isfinite(y).all():
            raise DataError(f"{where} has NaN or infinite targets; clean them first")
    elif source.num_classes is not None:
        if source.num_classes > MOST_CLASSES:
            raise DataError(
                f"{where} has labels up to {source.num_classes - 1:,}; number the classes from 0 "
                f"(at most {MOST_CLASSES:,} are possible)"
            )
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= source.num_classes:
            raise DataError(
                f"{where} has labels from {low} to {high}; "
                f"they must lie in 0 to {source.num_classes - 1}"
            )
