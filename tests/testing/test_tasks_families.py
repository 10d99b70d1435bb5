from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from esper.lab.tasks import member as members
from esper.lab.tasks.family import FAMILIES, Axes, Family, register_family
from esper.leyline.errors import UsageError
from esper.testing import check_family


def axes(**changes: Any) -> Axes:
    plain: dict[str, Any] = {"data": ("digits",), "width": (2,), "depth": (2,), "train_size": (0,)}
    return Axes(**{**plain, **changes})


@pytest.fixture
def known() -> Iterator[str]:
    yield register_family(Family("some_family", "For tests.", axes(), axes(width=(3,)))).name
    FAMILIES.unregister("some_family")


def test_a_family_that_is_right_passes(known: str) -> None:
    check_family(known)


def test_a_split_without_members_is_refused() -> None:
    # More images than there are.
    register_family(Family("some_family", "For tests.", axes(), axes(train_size=(9_999,))))
    try:
        with pytest.raises(UsageError, match="'some_family' has no members to select"):
            check_family("some_family")
    finally:
        FAMILIES.unregister("some_family")


def test_a_size_that_the_data_does_not_have_is_found(
    known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(members.TRAIN_SIZES, "digits", 1_000)
    with pytest.raises(UsageError, match=r"digits has 1,079 training images, and .* says 1,000"):
        check_family(known)
