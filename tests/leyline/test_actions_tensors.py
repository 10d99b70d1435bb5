from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from esper.leyline.actions import TensorRecord


@dataclass(frozen=True, slots=True)
class Rows(TensorRecord):
    numbers: Tensor
    flags: Tensor


def rows() -> Rows:
    return Rows(torch.arange(6).reshape(3, 2), torch.tensor([True, False, True]))


@pytest.mark.parametrize(
    ("which", "numbers"),
    [
        ([2, 0], [[4, 5], [0, 1]]),
        (torch.tensor([1]), [[2, 3]]),
        (torch.tensor([True, False, True]), [[0, 1], [4, 5]]),
    ],
)
def test_rows_are_chosen_in_every_field(which: list[int] | Tensor, numbers: list[int]) -> None:
    some = rows().select(which)
    assert isinstance(some, Rows)
    assert some.numbers.tolist() == numbers
    assert len(some.flags) == len(numbers)


def test_a_choice_is_a_copy() -> None:
    all_rows = rows()
    all_rows.select([0]).numbers.zero_()
    assert all_rows.numbers.tolist() == rows().numbers.tolist()


def test_every_tensor_is_changed_and_moved() -> None:
    assert rows().map(lambda value: value[:1]).numbers.tolist() == [[0, 1]]
    moved = rows().to("meta")
    assert {value.device.type for value in moved.state_dict().values()} == {"meta"}


def test_what_was_saved_is_rebuilt_and_a_missing_field_is_found() -> None:
    saved = rows().state_dict()
    assert list(saved) == ["numbers", "flags"]
    again = Rows.from_state_dict({**saved, "another": torch.zeros(1)})
    assert again.numbers is saved["numbers"]
    with pytest.raises(KeyError, match="flags"):
        Rows.from_state_dict({"numbers": saved["numbers"]})
