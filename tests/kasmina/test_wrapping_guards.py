"""The model inside a garden cannot be saved or wrapped without what has grown in it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.garden import Garden
from esper.kasmina.slots.suggestion import suggest_slots
from esper.kasmina.wrapping import disconnect, slots_behind
from esper.leyline.errors import SlotError
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import LIVING, Stack, bring, quick_config, stack_garden, stir

X = torch.randn(5, 4)


@pytest.mark.parametrize("stage", LIVING)
def test_weights_of_the_model_alone_are_refused_while_seeds_are_there(stage: SeedStage) -> None:
    garden = stack_garden()
    plain = Stack()
    plain.load_state_dict(garden.model.state_dict())
    bring(garden, "b", stage)
    with pytest.raises(SlotError, match=r"of the Stack inside a garden .* seeds at b would"):
        garden.model.state_dict()
    with pytest.raises(SlotError, match="of the Linear inside"):
        garden.model.b.state_dict()
    # Behind the first layer nothing has grown.
    assert set(garden.model.a.state_dict()) == {"weight", "bias"}
    assert "model.b.weight" in garden.state_dict()


def test_weights_are_there_again_when_the_seed_is_gone() -> None:
    garden = stack_garden(lifecycle={"rules": {"min_prune_age": 0}})
    bring(garden, "b", SeedStage.TRAINING)
    assert garden.prune("b")
    assert "b.weight" in garden.model.state_dict()


def test_a_garden_within_a_larger_module_is_saved_with_it() -> None:
    garden = stack_garden()
    bring(garden, "b", SeedStage.HOLDING)
    stir(garden, "b")
    larger = nn.Sequential(garden, nn.Linear(4, 2))
    other = nn.Sequential(stack_garden(), nn.Linear(4, 2))
    other.load_state_dict(larger.state_dict())
    assert torch.equal(other(X), larger(X))


def test_a_failed_attempt_leaves_the_guard_in_place() -> None:
    garden = stack_garden()
    bring(garden, "b", SeedStage.HOLDING)
    with pytest.raises(SlotError):
        garden.model.state_dict()
    garden.state_dict()
    with pytest.raises(SlotError):
        garden.model.state_dict()


def test_a_copy_is_guarded_by_its_own_seeds() -> None:
    garden = stack_garden()
    copied = copy.deepcopy(garden)
    bring(copied, "b", SeedStage.HOLDING)
    assert "b.weight" in garden.model.state_dict()
    with pytest.raises(SlotError):
        copied.model.state_dict()
    assert len(copied.state_dict()) > len(garden.state_dict())


class Pretrained(Stack):
    """Saves itself as models of Hugging Face do: its own state_dict, read back leniently."""

    def save_pretrained(self, file: io.BytesIO) -> None:
        torch.save(self.state_dict(), file)

    @classmethod
    def from_pretrained(cls, file: io.BytesIO) -> Pretrained:
        model = cls()
        model.load_state_dict(torch.load(file), strict=False)
        return model


def test_save_pretrained_on_the_model_is_refused_before_anything_is_written() -> None:
    garden = stack_garden(Pretrained())
    model: Any = garden.model
    file = io.BytesIO()
    bring(garden, "a", SeedStage.HOLDING)
    with pytest.raises(SlotError, match=r"garden\.bake\(\)"):
        model.save_pretrained(file)
    assert not file.getvalue()


def test_a_compiled_garden_is_saved_whole_and_its_compiled_model_is_refused() -> None:
    garden = stack_garden()
    bring(garden, "b", SeedStage.HOLDING)
    stir(garden, "b")
    saved = torch.compile(garden, backend="eager").state_dict()
    other = torch.compile(stack_garden(), backend="eager")
    other.load_state_dict(saved)
    assert torch.equal(other._orig_mod(X), garden(X))
    with pytest.raises(SlotError):
        torch.compile(garden.model, backend="eager").state_dict()


def test_the_compiled_model_inside_a_garden_sees_every_change() -> None:
    torch._dynamo.reset()
    garden = stack_garden()
    compiled = torch.compile(garden.model, backend="eager")
    before = compiled(X)
    bring(garden, "b", SeedStage.HOLDING)
    stir(garden, "b")
    assert not torch.allclose(compiled(X), before)
    torch.testing.assert_close(compiled(X), garden(X))
    torch._dynamo.reset()


def test_disconnecting_leaves_nothing_behind() -> None:
    garden = stack_garden()
    bring(garden, "b", SeedStage.HOLDING)
    stir(garden, "b")
    kept: list[Tensor] = []
    garden.model.b.register_forward_hook(lambda module, args, out: kept.append(out))
    model = copy.deepcopy(garden).model
    assert len(slots_behind(model)) == 3
    disconnect(model)
    assert not slots_behind(model)
    plain = Stack()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(X), plain(X))
    # A hook of its owner's stays.
    assert len(kept) == 1


def test_slots_in_nested_parts_guard_everything_above_them() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Stack()
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.block(x))
            return out

    garden = Garden(Nested(), ["block.a"], X, config=quick_config())
    bring(garden, "block.a", SeedStage.HOLDING)
    model: Any = garden.model
    for part in (model, model.block, model.block.a):
        with pytest.raises(SlotError):
            part.state_dict()
    for part in (model.head, model.block.b):
        assert len(part.state_dict()) == 2


class Padded(nn.Module):
    """An encoder as PyTorch makes it, which packs padded batches in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        result: Tensor = self.encoder(x, src_key_padding_mask=is_padding)
        return result


def test_a_layer_that_gets_padded_batches_can_have_a_slot() -> None:
    model = Padded()
    x, is_padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [4], [2]])
    assert "encoder.layers.0" in suggest_slots(model, (x, is_padding))
    assert model.encoder.use_nested_tensor
    garden = Garden(model, ["encoder.layers.0"], (x, is_padding), config=quick_config())
    bring(garden, "encoder.layers.0", SeedStage.HOLDING)
    stir(garden, "encoder.layers.0")
    trained = garden.train()(x, is_padding)
    with torch.no_grad():
        assert torch.allclose(garden.eval()(x, is_padding), trained, atol=1e-6)
        assert torch.allclose(garden.bake()(x, is_padding), trained, atol=1e-6)
