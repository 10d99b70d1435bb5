"""What is packed comes out as it was, to the last bit."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

from esper.lab.population.ray_actor import pack, unpack

LEAST, MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def bits(tensor: Tensor) -> Tensor:
    """The tensor as whole numbers, so that NaN is equal to itself and 0 is not -0."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return tensor.contiguous().view(kinds.get(tensor.dtype, tensor.dtype))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(bits(found[name]), bits(tensor)), name


def all_sorts(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(rows, 3, generator=generator)
    real[0] = torch.tensor([math.nan, -0.0, -math.inf])
    return {
        "whole": torch.randint(-300, 300, (rows, 2, 2), generator=generator),
        "real": real,
        "truth": torch.rand(rows, 13, generator=generator) < 0.5,
        "more": torch.randint(0, 2**40, (rows,), generator=generator),
        "double": torch.randn(rows, dtype=torch.float64, generator=generator),
        "none": torch.zeros(rows, 0, dtype=torch.int64),
    }


def test_tensors_come_back_bit_for_bit() -> None:
    tensors = all_sorts(5)
    assert_same(unpack([pickle.loads(pickle.dumps(pack(tensors)))]), tensors)


def test_rows_of_several_parts_are_put_in_order() -> None:
    parts = [all_sorts(rows, seed) for seed, rows in enumerate((3, 1, 4))]
    order = [7, 0, 3, 1, 6, 2, 5, 4]
    found = unpack([pack(part) for part in parts], order)
    assert_same(
        found, {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
    )
    # The next step of the same rows has other numbers and the same places.
    parts = [all_sorts(rows, seed) for seed, rows in enumerate((3, 1, 4), start=10)]
    again = unpack([pack(part) for part in parts], order)
    assert torch.equal(again["more"], torch.cat([part["more"] for part in parts])[order])


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        ([-128, 127], 1),
        ([-129, 0], 2),
        ([0, 128], 2),
        ([-32768, 32767], 2),
        ([0, 32768], 4),
        ([-(2**31), 2**31 - 1], 4),
        ([0, 2**31], 8),
        ([LEAST, MOST], 8),
    ],
)
def test_whole_numbers_take_as_few_bytes_as_they_need(numbers: list[int], size: int) -> None:
    tensors = {"small": torch.tensor([1, 2]), "own": torch.tensor(numbers)}
    packed = pack(tensors)
    assert sum(map(len, packed.whole)) == 2 * 1 + 2 * size
    assert_same(unpack([packed]), tensors)


def test_truths_take_a_bit_each() -> None:
    packed = pack({"truth": torch.ones(64, 3, 13, dtype=torch.bool)})
    assert len(packed.bits) == 64 * 3 * 13 // 8
    assert bool(unpack([packed])["truth"].all())


@pytest.mark.gpu
def test_tensors_of_a_device_come_back_there() -> None:
    tensors = all_sorts(5)
    packed = pack({name: tensor.cuda() for name, tensor in tensors.items()})
    assert packed == pack(tensors)
    found = unpack([packed], device="cuda")
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    assert_same({name: tensor.cpu() for name, tensor in found.items()}, tensors)
