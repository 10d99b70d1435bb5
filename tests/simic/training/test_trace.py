from __future__ import annotations

import pytest
import torch

from esper.leyline.errors import CheckpointError, UsageError
from esper.simic.training.trace import Trace


def test_what_is_put_comes_back_by_row_and_step() -> None:
    trace = Trace(2, 3)
    for step in range(2):
        trace.put(
            step, {"a": torch.tensor([step, 10 + step]), "b": torch.full((2, 4), float(step))}
        )
    found = trace.read()
    assert found["a"].tolist() == [[0, 1], [10, 11]]
    assert found["b"].shape == (2, 2, 4)
    assert found["b"][:, 1].eq(1.0).all()


def test_a_new_round_starts_empty_and_may_have_another_shape() -> None:
    trace = Trace(1, 2)
    trace.put(0, {"stage": torch.ones(1, 3)})
    trace.start()
    assert trace.length == 0
    trace.put(0, {"stage": torch.zeros(1, 2)})
    assert trace.read()["stage"].shape == (1, 1, 2)


def test_what_was_read_does_not_change_afterwards() -> None:
    trace = Trace(1, 2)
    trace.put(0, {"a": torch.ones(1)})
    before = trace.read()["a"]
    trace.start()
    assert before.tolist() == [[1.0]]


def test_a_step_beyond_the_end_is_refused() -> None:
    with pytest.raises(UsageError, match="a trace of 2 steps has no step 2"):
        Trace(1, 2).put(2, {"a": torch.ones(1)})


def test_a_trace_goes_on_from_its_state() -> None:
    trace, other = Trace(2, 3), Trace(2, 3)
    trace.put(0, {"a": torch.tensor([1.0, 2.0])})
    other.load_state_dict(trace.state_dict())
    for each in (trace, other):
        each.put(1, {"a": torch.tensor([3.0, 4.0])})
    assert other.length == 2
    assert torch.equal(trace.read()["a"], other.read()["a"])


@pytest.mark.parametrize(("rows", "steps", "words"), [(1, 3, "2 rows"), (2, 1, "2 steps")])
def test_a_state_of_another_shape_is_refused(rows: int, steps: int, words: str) -> None:
    trace = Trace(2, 3)
    trace.put(1, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=words):
        Trace(rows, steps).load_state_dict(trace.state_dict())
