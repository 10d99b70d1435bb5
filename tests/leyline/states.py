"""Saving, loading and comparing states, for the tests of both halves of the storage."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.utils.storage import load_tree, save_tree

OLD = {"name": "old", "weight": torch.arange(6.0)}
NEW = {"name": "new", "weight": torch.arange(60.0)}


def save(folder: Path, tree: dict[str, Any], **options: Any) -> None:
    save_tree(folder, tree, **{"kind": "test", "version": 1, **options})


def load(folder: Path, **options: Any) -> dict[str, Any]:
    return load_tree(folder, **{"kind": "test", "version": 1, **options})[0]


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(read: Any, written: Any) -> None:
    """Equal to the bit, and of the same types; tuples read back as lists."""
    if isinstance(written, Tensor):
        assert type(read) is Tensor
        assert (read.dtype, read.shape) == (written.dtype, written.shape)
        assert not read.requires_grad
        assert bits(read) == bits(written)
    elif isinstance(written, dict):
        assert type(read) is dict
        assert list(read) == list(written)
        for key in written:
            assert_same(read[key], written[key])
    elif isinstance(written, list | tuple):
        assert type(read) is list
        assert len(read) == len(written)
        for one, other in zip(read, written, strict=True):
            assert_same(one, other)
    elif isinstance(written, float) and not math.isnan(written):
        assert type(read) is float
        assert struct.pack("d", read) == struct.pack("d", written)
    elif isinstance(written, float):
        assert math.isnan(read)
    else:
        assert type(read) is type(written)
        assert read == written
