"""Trees from a folder are compared with what they must be like."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.leyline.errors import CheckpointError
from esper.utils.storage import check_count, check_like, check_range, check_tensors

LIKE = {"a": torch.zeros(2, 3), "b": {"n": 1, "text": "x"}}


def test_values_may_differ() -> None:
    check_like({"a": torch.ones(2, 3), "b": {"n": 7, "text": "y"}}, LIKE, "tree")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a": torch.zeros(2, 4)}, r"tree.a is of shape \[2, 4\] where \[2, 3\] is needed"),
        ({"a": torch.zeros(2, 3).long()}, "tree.a is of type torch.int64 where torch.float32"),
        ({"a": [0.0]}, "tree.a must be a tensor, got list"),
        ({"b": {"n": 1}}, "tree.b.text is missing"),
        ({"b": {"n": 1, "text": "x", "more": 1}}, "tree.b.more is unknown"),
        ({"b": None}, "tree.b must be a mapping, got NoneType"),
        ({"b": {"n": True, "text": "x"}}, "tree.b.n must be of type int, got bool"),
    ],
)
def test_forms_may_not(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"the saved state is damaged: {said}"):
        check_like({**LIKE, **changes}, LIKE, "tree")


def test_tensors_by_name() -> None:
    found = {"w": torch.ones(1)}
    assert check_tensors(found, "host") == found
    for wrong in ([], {"w": [1.0]}, {3: torch.ones(1)}, None):
        with pytest.raises(CheckpointError, match=r"host.* must be a"):
            check_tensors(wrong, "host")


def test_counts_and_ranges() -> None:
    assert check_count(3, "n") == 3
    for wrong in (-1, True, 1.0, "1", 2**63, None):
        with pytest.raises(CheckpointError, match="n must be a whole number from 0"):
            check_count(wrong, "n")
    check_range(torch.tensor([0.0, 1.0]), 0, 1, "alpha")
    for value in (-0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match="alpha has values outside of 0 to 1"):
            check_range(torch.tensor([0.5, value]), 0, 1, "alpha")
