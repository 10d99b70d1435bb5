"""Axes are found out by trying the model, and what cannot be told is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.garden import Garden
from esper.kasmina.slots.placement import place_slots
from esper.leyline.errors import EsperWarning, SlotError
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import bring, quick_config, stir


class Tagger(nn.Module):
    """Tokens [B, T] through layers of nn.Transformer in their default order, [T, B, C]."""

    def __init__(self, *, batch_first: bool = False, pooled: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first
        self.pooled = pooled

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.encoder(h)
        if self.pooled:
            h = h.mean(1 if self.batch_first else 0)
        return self.head(h)


class Waves(nn.Module):
    """Signals [B, 1, L] through convolutions in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 6, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1, stride=2), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean(2))


class ChannelsLast(nn.Module):
    """Images through a block that keeps its channels last, of as many as there are pixels."""

    def __init__(self, side: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, side, 3, padding=1)
        self.block = nn.Sequential(nn.LayerNorm(side), nn.Linear(side, side), nn.GELU())
        self.head = nn.Linear(side, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.stem(x).permute(0, 2, 3, 1))
        # As a user's code may: a view of a contiguous activation.
        return self.head(h.view(len(h), -1, h.shape[-1]).mean(1))


class Recurrent(nn.Module):
    """An LSTM, whose output is the first of a tuple."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=batch_first)
        self.head = nn.Linear(6, 2)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        out, (_, _) = self.lstm(x)
        return self.head(out[:, -1] if self.batch_first else out[-1])


class Patches(nn.Module):
    """An image as a sequence of patches with learned positions: it takes one resolution only."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, 4, 6))
        self.block = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.block(tokens).mean(1))


TOKENS = torch.arange(35).reshape(7, 5) % 11
CASES: list[tuple[nn.Module, str, Any, str, int]] = [
    (Tagger(), "encoder.layers.0", TOKENS, "TBC", 0),
    (Tagger(batch_first=True), "encoder.layers.1", TOKENS, "BTC", 0),
    (Tagger(batch_first=True), "embed", TOKENS, "BTC", 0),
    (Tagger(), "encoder.layers.0", torch.arange(16).reshape(4, 4) % 11, "TBC", 0),
    (nn.TransformerEncoderLayer(8, 2, 16), "linear2", torch.randn(5, 7, 8), "TBC", 1),
    (nn.TransformerEncoderLayer(8, 2, 16), "norm2", torch.randn(4, 4, 8), "TBC", 1),
    (Recurrent(batch_first=True), "lstm", torch.randn(3, 5, 4), "BTC", 0),
    (Recurrent(batch_first=False), "lstm", torch.randn(5, 3, 4), "TBC", 1),
    (Waves(), "first", torch.randn(2, 1, 6), "BCL", 0),
    (Waves(), "second", torch.randn(2, 1, 12), "BCL", 0),
    (ChannelsLast(), "block", torch.randn(2, 3, 8, 8), "BHWC", 0),
    (ChannelsLast(), "stem", torch.randn(2, 3, 8, 8), "BCHW", 0),
    (ChannelsLast(), "head", torch.randn(2, 3, 8, 8), "BC", 0),
    (Patches(), "block", torch.randn(2, 3, 8, 8), "BTC", 0),
]


def with_attention(garden: Garden, slot: str) -> None:
    """Blend in a seed that mixes whatever it takes for positions."""
    own = garden.seedbed.slots[garden.slot_names.index(slot)]
    kind = "norm" if own.topology == "vector" else "attention"
    bring(garden, slot, SeedStage.HOLDING, kind)
    stir(garden, slot)


@pytest.mark.parametrize(
    ("model", "slot", "example", "axes", "batch_axis"),
    CASES,
    ids=[f"{type(case[0]).__name__}-{case[1]}-{case[3]}" for case in CASES],
)
def test_axes_are_found_and_seeds_keep_samples_apart(
    model: nn.Module, slot: str, example: Tensor, axes: str, batch_axis: int
) -> None:
    garden = Garden(model, [slot], example, config=quick_config()).eval()
    assert garden.slots[slot].axes == axes
    assert garden.batch_axis == batch_axis
    plain = garden(example)
    with_attention(garden, slot)
    grown = garden(example)
    assert not torch.equal(plain, grown)
    changed = example.clone()
    last = example.shape[batch_axis] - 1
    changed.narrow(batch_axis, 0, last).copy_(changed.narrow(batch_axis, 0, last).flip(-1) + 1)
    changed = changed % 11 if not changed.is_floating_point() else changed
    where = batch_axis if isinstance(model, nn.TransformerEncoderLayer) else 0
    again = garden(changed)
    assert torch.equal(again.select(where, last), grown.select(where, last))
    assert not torch.equal(again, grown)


def test_a_default_transformer_layer_taken_for_batch_first_would_have_read_its_neighbours() -> None:
    torch.manual_seed(0)
    garden = Garden(Tagger(), ["encoder.layers.0"], TOKENS, config=quick_config()).eval()
    with_attention(garden, "encoder.layers.0")
    changed = TOKENS.clone()
    changed[:3] = (changed[:3] + 1) % 11
    assert torch.equal(garden(TOKENS)[3], garden(changed)[3])
    # What used to happen: the seed's attention ran over the samples.
    garden.seedbed[0].axes = "BTC"
    assert not torch.equal(garden(TOKENS)[3], garden(changed)[3])


def test_a_model_that_lets_samples_influence_each_other_is_refused() -> None:
    class Confused(Tagger):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.encoder(self.embed(tokens)).mean(1))

    with pytest.raises(SlotError, match=r"influence one another.*batch_first=True") as error:
        Garden(Confused(), ["encoder.layers.0"], TOKENS)
    assert "axes={'encoder.layers.0': 'BTC'}" in str(error.value)
    with pytest.warns(EsperWarning, match="influence one another at 'encoder.layers.0'"):
        Garden(Confused(), ["encoder.layers.0"], TOKENS, axes="BTC")


def test_what_nothing_in_the_model_tells_is_refused_with_the_line_to_write() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(SlotError, match=r"declare axes=\{'0': 'BTC'\} \(or 'TBC'\)"):
        Garden(model, ["0"], torch.randn(3, 5, 4))
    assert Garden(model, ["0"], torch.randn(3, 5, 4), axes={"0": "TBC"}).slots["0"].axes == "TBC"

    class Rigid(nn.Module):
        """Of one resolution, and with no layer that says where channels are."""

        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Identity()
            self.weight = nn.Parameter(torch.randn(4, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x * self.weight).flatten(1).cumsum(1)

    with pytest.raises(SlotError, match=r"could be BCHW or BHWC; declare axes=\{'block': 'BCHW'\}"):
        Garden(Rigid(), ["block"], torch.randn(2, 4, 4, 4))


def test_a_batch_that_is_regrouped_is_refused() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)

    with pytest.raises(SlotError, match="no axis has one entry per sample"):
        Garden(Windows(), ["layer"], torch.randn(2, 5, 3))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("BTD", "axes cannot be 'BTD', did you mean 'BTC'? they are one of BC, BTC, TBC"),
        ("BCHW", "declared BCHW, but its output has the shape [5, 7, 8]"),
        ("BTC", "declared BTC, but the samples of a batch are at ?B?"),
        ({"layers": "TBC"}, "declared for 'layers', which is no slot"),
        (3, "axes must be a name such as 'BTC' or a dict by slot, got int"),
    ],
)
def test_a_wrong_declaration_is_one_line(axes: Any, words: str) -> None:
    with pytest.raises(SlotError) as error:
        place_slots(Tagger(), ["encoder.layers.*"], TOKENS, axes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_axes_can_be_declared_by_slot_submodule_or_pattern() -> None:
    slots = {"a": "encoder.layers.0", "b": "encoder.layers.1"}
    for axes in ("TBC", {"a": "TBC", "b": "TBC"}, {"encoder.layers.*": "TBC"}):
        placed = place_slots(Tagger(), slots, TOKENS, axes)
        assert [slot.axes for slot in placed.slots] == ["TBC", "TBC"]
        # As a seed sees it: samples first.
        assert [slot.shape for slot in placed.slots] == [(7, 5, 8), (7, 5, 8)]


def test_looking_changes_nothing_and_draws_nothing() -> None:
    model = Tagger()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    place_slots(model, ["encoder.layers.0"], TOKENS)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_draws_in_evaluation_is_not_taken_for_one_that_mixes() -> None:
    class Noisy(Tagger):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + torch.randn(3)

    assert Garden(Noisy(), ["encoder.layers.0"], TOKENS).slots["encoder.layers.0"].axes == "TBC"
