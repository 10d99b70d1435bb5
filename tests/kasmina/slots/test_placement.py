"""Finding where slots go, and saying what is wrong where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.garden import Garden
from esper.kasmina.slots.placement import matches, place_slots, slot_paths
from esper.kasmina.slots.probe import call_arguments, evaluating
from esper.kasmina.slots.selftest import check_slots
from esper.kasmina.slots.suggestion import suggest_slots
from esper.leyline.errors import SlotError, UsageError
from tests.kasmina.gardens import Stack

X = torch.zeros(2, 4)


class Odd(nn.Module):
    """One submodule with every habit that a slot cannot live with."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.layer = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.named = Named()
        self.flat = nn.Flatten(0)
        self.deep = nn.Unflatten(1, (1, 2, 1, 2))
        self.whole = Whole()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if self.habit == "twice":
            return self.layer(out)
        if self.habit == "named":
            return self.named(out)["out"]
        if self.habit in ("flat", "deep", "whole"):
            return getattr(self, self.habit)(out)
        return out


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": x}


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


def one_line(error: pytest.ExceptionInfo[SlotError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("habit", "slot", "words"),
    [
        ("", "layr", "no submodule 'layr', did you mean 'layer'?"),
        ("", "nothing.like.it", "it has: layer, spare"),
        ("", "", "no submodule ''"),
        ("", "spare", "was not called in a forward pass"),
        ("twice", "layer", "was called 2 times in one forward pass"),
        ("named", "named", "returns dict, not a tensor or a tuple that begins with one"),
        ("flat", "flat", "shape [8]; a slot needs floating-point [B, C]"),
        ("deep", "deep", "shape [2, 1, 2, 1, 2]; a slot needs"),
        ("whole", "whole", "torch.int64 of shape [2, 4]; a slot needs floating-point"),
    ],
)
def test_each_mistake_is_one_line_that_says_what_would_be_right(
    habit: str, slot: str, words: str
) -> None:
    with pytest.raises(SlotError) as error:
        Garden(Odd(habit), [slot], X)
    assert words in one_line(error)


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ("layer", "slots must be a list of submodule names, got the text 'layer'; esper.suggest"),
        ([], "slots is empty; name at least one submodule"),
        ({}, "slots is empty"),
        (None, "slots must be a list of submodule names, got NoneType"),
        ([3], "slots must be names of submodules, got 3"),
        (["blocks.*"], "no submodule matches 'blocks.*'; the model has: layer, spare"),
        (["layer", "layer"], "slot names must differ"),
    ],
)
def test_a_wrong_list_of_slots_is_refused(slots: Any, words: str) -> None:
    with pytest.raises(SlotError) as error:
        Garden(Odd(""), slots, X)
    assert words in one_line(error)


def test_an_activation_that_changes_its_width_or_rank_later_is_refused() -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    garden = Garden(Shifting(), ["layer"], torch.zeros(2, 4))
    assert garden.germinate("layer", "norm")
    garden.advance("layer")
    garden(torch.zeros(9, 4))
    for wrong in (torch.zeros(2, 5), torch.zeros(2, 3, 4)):
        with pytest.raises(SlotError) as error:
            garden(wrong)
        assert "was made for activations like [2, 4] (4 channels)" in one_line(error)


@pytest.mark.parametrize(
    ("layer", "x", "axes", "topology", "channels"),
    [
        (nn.Linear(4, 6), torch.zeros(2, 4), None, "vector", 6),
        (nn.Linear(4, 6), torch.zeros(2, 5, 4), "BTC", "sequence", 6),
        (nn.Conv2d(3, 6, 1), torch.zeros(2, 3, 5, 5), None, "cnn", 6),
    ],
)
def test_topology_and_width_come_from_one_batch(
    layer: nn.Module, x: Tensor, axes: str | None, topology: str, channels: int
) -> None:
    garden = Garden(nn.Sequential(layer), ["0"], x, axes=axes)
    assert (garden.seedbed[0].topology, garden.seedbed[0].channels) == (topology, channels)


def test_slots_may_have_names_of_their_own_and_keep_their_order() -> None:
    placements = place_slots(Stack(), {"late": "c", "early": "a"}, X).slots
    assert [(p.name, p.path, p.shape) for p in placements] == [
        ("late", "c", (2, 4)),
        ("early", "a", (2, 4)),
    ]
    assert slot_paths(["b", "a"]) == {"b": "b", "a": "a"}


def test_a_star_stands_for_any_part_of_a_name_between_dots() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Stack(), Stack()]), "head": nn.Linear(4, 2)})
    assert list(slot_paths(["blocks.*", "head"], model)) == ["blocks.0", "blocks.1", "head"]
    assert list(slot_paths(["blocks.*.a"], model)) == ["blocks.0.a", "blocks.1.a"]
    assert matches("layer12", "layer*")
    assert not matches("blocks.0.a", "blocks.*")


def test_an_example_is_a_tensor_a_tuple_or_a_dict() -> None:
    assert call_arguments(X) == ((X,), {})
    assert call_arguments((X, 3)) == ((X, 3), {})
    assert call_arguments({"x": X}) == ((), {"x": X})
    for example in (X, (X,), {"x": X}):
        assert place_slots(Stack(), ["a"], example).slots[0].topology == "vector"


def test_looking_leaves_no_hook_no_gradient_and_no_mode_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    model[1].eval()
    before = torch.get_rng_state()
    place_slots(model, ["0", "2"], X)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model] == [True, False, True]
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="broken"), evaluating(model):
        raise ValueError("broken")
    assert [module.training for module in model] == [True, False, True]


def test_a_failed_placement_leaves_no_hook_behind() -> None:
    model = Odd("twice")
    with pytest.raises(SlotError):
        Garden(model, ["layer"], X)
    with pytest.raises(UsageError):
        Garden(model, ["layer"], torch.zeros(2, 5))
    assert not any(module._forward_hooks for module in model.modules())


def test_to_place_slots_leaves_statistics_of_batch_norm_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    statistics = model[1].running_mean.clone()
    Garden(model, ["0"], torch.randn(8, 4))
    assert torch.equal(model[1].running_mean, statistics)


def test_a_garden_inside_a_garden_is_refused() -> None:
    garden = Garden(Stack(), ["a"], X)
    for model in (garden, nn.Sequential(garden)):
        with pytest.raises(SlotError, match="already holds a Garden"):
            Garden(model, ["model.a"], X)


def test_a_model_that_another_garden_has_grown_is_refused() -> None:
    model = Stack()
    garden = Garden(model, ["a"], X)
    # Nothing has grown: wrapping it anew is harmless.
    Garden(model, ["a"], X)
    assert garden.germinate("a", "norm")
    with pytest.raises(SlotError, match="already grows: seeds of an earlier run or Garden"):
        Garden(model, ["b"], X)


@pytest.mark.parametrize("look", [Garden, check_slots, lambda model, _, x: suggest_slots(model, x)])
@pytest.mark.parametrize(
    ("example", "told"),
    [
        (torch.zeros(2, 5), "[2, 5]: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (X.long(), "[2, 4]: RuntimeError: "),
        (X.numpy(), "ndarray: TypeError: "),
        ((X, X, torch.zeros(2)), "([2, 4], [2, 4], [2]): TypeError: "),
        ({"image": X}, "{image: [2, 4]}: TypeError: "),
    ],
    ids=["shape", "type", "array", "pair", "name"],
)
def test_an_example_that_the_model_cannot_take_is_one_line(
    look: Any, example: Any, told: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(UsageError) as raised:
        look(model, ["1"], example)
    message = str(raised.value)
    assert message.startswith(f"the model cannot take the example {told}")
    assert message.endswith("or a dict, such as next(iter(loader))[0]")
    assert "\n" not in message
    assert isinstance(raised.value.__cause__, RuntimeError | TypeError)
