"""The embedded digits."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from esper.leyline.errors import DataError
from esper.tasks.data.digits import GREY_LEVELS, MEAN, STD, read_digits


def test_shape_and_labels() -> None:
    source = read_digits()
    assert source.x.shape == (1797, 1, 8, 8)
    assert source.x.dtype == np.uint8
    assert source.x.max() == GREY_LEVELS
    assert source.y is not None
    assert np.bincount(source.y).min() == 174
    assert source.x_test is None


def test_fixed_statistics_are_the_data_s() -> None:
    scaled = read_digits().x / GREY_LEVELS
    assert scaled.mean() == pytest.approx(MEAN, abs=1e-4)
    assert scaled.std() == pytest.approx(STD, abs=1e-4)


def test_missing_scikit_learn_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        read_digits()
