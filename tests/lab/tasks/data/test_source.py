"""A source refuses arrays that do not fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from esper.lab.tasks.data.source import Source
from esper.leyline.errors import DataError

X = np.zeros((4, 1, 2, 2), dtype=np.uint8)
Y = np.array([0, 1, 0, 1])


def test_kinds_and_targets() -> None:
    image = Source("s", "here", X, Y, num_classes=2)
    features = Source("s", "here", np.zeros((4, 3), np.float32), np.zeros((4, 1), np.float32))
    tokens = Source("s", "here", np.zeros((4, 9), np.uint8), None, num_classes=256)
    assert [(s.kind, s.target) for s in (image, features, tokens)] == [
        ("image", "class"),
        ("features", "real"),
        ("tokens", "next_token"),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": X[:0], "y": Y[:0]}, "the training part is empty"),
        ({"y": Y[:3]}, "4 samples but 3 labels"),
        ({"y": Y + 1}, "labels from 1 to 2; they must lie in 0 to 1"),
        ({"y": Y - 1}, "labels from -1 to 0"),
        ({"x": X[:, 0]}, "has samples of shape 2x2"),
        ({"x": np.full((4, 2), np.nan)}, "NaN or infinite values"),
        ({"y": np.array([0.0, 1.0, np.inf, 2.0])}, "NaN or infinite targets"),
        ({"x_test": X, "y_test": Y + 5}, "the test part has labels from 5 to 6"),
        ({"x_test": np.zeros((4, 1, 3, 3)), "y_test": Y}, "1x2x2 but test samples 1x3x3"),
    ],
)
def test_refusals_name_the_origin(changes: dict[str, Any], words: str) -> None:
    fields: dict[str, Any] = {"x": X, "y": Y, "num_classes": 2} | changes
    with pytest.raises(DataError, match=words) as caught:
        Source("s", "/some/place", **fields)
    assert str(caught.value).startswith("/some/place")
    assert "\n" not in str(caught.value)
