from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from esper.growth.depth.blocks import Output, Sleeper, Source
from esper.growth.depth.saving import OnSave

FIRST = Output((Source(0, "input"),), None)


def test_a_block_sleeps_and_wakes_in_place() -> None:
    block, x = nn.Linear(2, 2), torch.randn(3, 2)
    awake = block(x)
    before = set(vars(block))
    sleeper = Sleeper(block, FIRST, OnSave())
    sleeper.set_awake(False)
    sleeper.set_awake(False)
    assert block(x) is x
    assert block(input=x) is x
    assert pickle.loads(pickle.dumps(block))(x) is x
    assert copy.deepcopy(block)(x) is x
    sleeper.set_awake(True)
    assert torch.equal(block(x), awake)
    assert set(vars(block)) == before


def test_what_was_compiled_or_patched_is_put_back() -> None:
    block, x = nn.Linear(2, 2), torch.randn(3, 2)
    block.forward = own = lambda value: value + 1  # type: ignore[method-assign]
    block._compiled_call_impl = compiled = lambda value: value + 2
    sleeper = Sleeper(block, FIRST, OnSave())
    sleeper.set_awake(False)
    assert block(x) is x
    sleeper.set_awake(True)
    assert block.forward is own
    assert block._compiled_call_impl is compiled


def test_outputs_of_several_parts() -> None:
    block = nn.Identity()
    output = Output((Source(0, "a"), Source(None, "b"), Source(value=3), Source(7, None)), tuple)
    Sleeper(block, output, OnSave()).set_awake(False)
    assert block(1, b=2) == (1, 2, 3, None)
    Sleeper(listed := nn.Identity(), Output((Source(1),), list), OnSave()).set_awake(False)
    assert listed(1, 2) == [2]
