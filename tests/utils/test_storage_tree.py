"""What goes into a saved state comes out of it, to the bit."""

import math
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline.errors import UsageError
from esper.leyline.stages import SeedStage
from esper.utils.manifest import TENSORS_FILE
from tests.leyline.states import OLD, assert_same, load, save

DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
)


# ------------------------------------------------------------------------------------ round trip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.arange(math.prod(shape)).reshape(shape) % 5
    tensor = (values % 2 if dtype == torch.bool else values).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1 and tensor.numel():
        tensor.view(-1)[0] = draw(st.sampled_from([math.nan, math.inf, -0.0, 1.0]))
    if draw(st.booleans()):
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    if draw(st.booleans()) and tensor.dim() and dtype.itemsize > 1:
        tensor = tensor[..., ::2]
    return tensor


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(st.characters())
    | tensors()
)
KEYS = st.text(st.characters(), max_size=8) | st.sampled_from(["$tensor", "$dict", "$float", "a/b"])
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=4)
        ),
        max_leaves=12,
    ),
    max_size=5,
)


@settings(max_examples=100)
@given(TREES)
def test_what_goes_in_comes_out(tree: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as parent:
        save(Path(parent) / "state", tree)
        assert_same(load(Path(parent) / "state"), tree)
        assert os.listdir(parent) == ["state"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 0]]).to(dtype)
    tree = {
        "plain": values,
        "scalar": values[0, 1],
        "empty": values[:0],
        "transposed": values.t(),
        "expanded": values[:1].expand(4, 3),
        "part": values[1:],
    }
    save(tmp_path / "state", tree)
    assert_same(load(tmp_path / "state"), tree)


def test_parameters_and_lazy_views_are_saved_as_the_values_they_show(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    tree = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": number.conj(),
        "negative": number.conj().imag,
        "channels_last": torch.rand(1, 2, 3, 3).to(memory_format=torch.channels_last),
    }
    save(tmp_path / "state", tree)
    read = load(tmp_path / "state")
    assert torch.equal(read["conjugate"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(read["negative"], torch.tensor([-2.0, 4.0]))
    assert_same(read["parameter"], torch.ones(2))
    assert_same(read["channels_last"], tree["channels_last"].contiguous())


def test_shared_storage_reads_back_apart(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    save(tmp_path / "state", {"a": weight, "b": weight, "c": weight[2:], "d": weight.view(2, 3)})
    read = load(tmp_path / "state")
    read["a"].fill_(-1)
    assert torch.equal(read["b"], weight)
    assert torch.equal(read["c"], weight[2:])
    assert torch.equal(read["d"], weight.view(2, 3))


def test_a_large_storage_behind_a_small_view_is_not_saved(tmp_path: Path) -> None:
    save(tmp_path / "state", {"view": torch.zeros(100_000)[:3]})
    assert (tmp_path / "state" / TENSORS_FILE).stat().st_size < 1000


def test_places_that_look_alike_stay_apart(tmp_path: Path) -> None:
    one = iter(torch.arange(100.0))
    tree = {
        "a/b": next(one),
        "a": {"b": next(one), "": next(one)},
        "a~1b": next(one),
        "a~0": next(one),
        "a~": next(one),
        "list": [next(one), [next(one)]],
        "list/0": next(one),
        "\n": next(one),
        "\\n": next(one),
        "": next(one),
    }
    save(tmp_path / "state", tree)
    assert_same(load(tmp_path / "state"), tree)


def test_state_dicts_and_enums_are_plain_data(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    save(
        tmp_path / "state",
        {"model": model.state_dict(), "stage": SeedStage.HOLDING, "shape": torch.Size([1, 2])},
    )
    read = load(tmp_path / "state")
    assert type(read["stage"]) is int
    assert read["stage"] == 6
    assert read["shape"] == [1, 2]
    fresh = torch.nn.Linear(2, 3)
    fresh.load_state_dict(OrderedDict(read["model"]))
    assert torch.equal(fresh.weight, model.weight)


# --------------------------------------------------------------------------- what cannot be saved


def cycle() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    tree["self"] = [tree]
    return tree


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"a": {3: 1}}, "tree/a has the key 3; keys of a saved state must be text"),
        ({"a": [{None: 1}]}, "tree/a/0 has the key None"),
        ({"a": {1, 2}}, "tree/a is a builtins.set, which cannot be saved; use dicts, lists"),
        ({"a": np.float32(1)}, "tree/a is a numpy.float32"),
        ({"a": np.zeros(2)}, "tree/a is a numpy.ndarray"),
        ({"a": b"x"}, "tree/a is a builtins.bytes"),
        ({"a": print}, "tree/a is a builtins.builtin_function_or_method"),
        ({"a": torch.float32}, "tree/a is a torch.dtype"),
        ({"a": torch.eye(2).to_sparse()}, "tree/a is a sparse or meta tensor"),
        ({"a": torch.zeros(1, device="meta")}, "tree/a is a sparse or meta tensor"),
        ({"a": torch.zeros(1, dtype=torch.float8_e8m0fnu)}, "tree/a has the type torch.float8_e8"),
        ({"a": 1 << 5000}, "tree/a is a whole number of more than 4096 bits"),
        (cycle(), "tree/self/0/self"),
        ([1], "a saved state is a dict, got list"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_the_disk_is_touched(
    tree: Any, line: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        save(tmp_path / "state", tree)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_meta_holds_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="meta/a is a tensor; meta data is plain"):
        save(tmp_path / "state", OLD, meta={"a": torch.zeros(1)})
    assert os.listdir(tmp_path) == []


def test_the_deepest_tree_that_is_saved_can_be_loaded(tmp_path: Path) -> None:
    tree: Any = 1
    for _ in range(100):
        tree = {"$": tree}
    save(tmp_path / "state", tree)
    assert_same(load(tmp_path / "state"), tree)
    with pytest.raises(UsageError, match="deeper than 100 levels"):
        save(tmp_path / "state", {"$": tree})
