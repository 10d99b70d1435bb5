"""What the name of a device means."""

from __future__ import annotations

import pytest
import torch

from esper.leyline.devices import choose_device
from esper.leyline.errors import UsageError


@pytest.mark.parametrize("has_cuda", [False, True])
def test_auto_is_what_there_is(monkeypatch: pytest.MonkeyPatch, has_cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert choose_device("auto") == torch.device("cuda" if has_cuda else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UsageError, match="no CUDA device; use --device cpu"):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
