"""Where a model could grow, what no slot covers, and a rehearsal in every slot."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.kasmina.slots.placement import place_slots
from esper.kasmina.slots.suggestion import uncovered_parts
from esper.leyline.errors import SlotError, UsageError
from tests.kasmina.slots.test_placement_inference import TOKENS, Patches, Recurrent, Tagger, Waves


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1)
        self.second = nn.Conv2d(out, out, 3, 1, 1)
        self.short = nn.Conv2d(width, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))


class Stages(nn.Module):
    """Stages of blocks, as residual networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.layer1 = nn.Sequential(Block(4, 4), Block(4, 4))
        self.layer2 = nn.Sequential(Block(4, 8, 2), Block(8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    with warnings.catch_warnings():
        # PyTorch recommends batch_first; here it is the point that it is not.
        warnings.simplefilter("ignore", UserWarning)
        return nn.Transformer(8, 2, 1, 1, 16)


CASES: list[tuple[Any, Any, dict[str, str], tuple[str, ...]]] = [
    (
        Stages,
        torch.randn(2, 3, 8, 8),
        {"layer1.0": "BCHW", "layer2.0": "BCHW", "layer2.1": "BCHW"},
        ("stem", "layer1.1", "head"),
    ),
    (plain, torch.randn(2, 1, 14, 14), {"2": "BCHW", "4": "BCHW"}, ("6",)),
    (
        Tagger,
        TOKENS,
        {"encoder.layers.0": "TBC", "encoder.layers.1": "TBC"},
        ("embed", "head"),
    ),
    (Waves, torch.randn(2, 1, 12), {"first": "BCL", "second": "BCL"}, ("head",)),
    (Patches, torch.randn(2, 3, 8, 8), {"block": "BTC"}, ("patch", "head")),
    (lambda: Recurrent(batch_first=True), torch.randn(3, 5, 4), {"lstm": "BTC"}, ("head",)),
    (
        transformer,
        (torch.randn(5, 3, 8), torch.randn(4, 3, 8)),
        {"encoder.layers.0": "TBC", "decoder.layers.0": "TBC"},
        ("encoder.norm", "decoder.norm"),
    ),
]


@pytest.mark.parametrize(("make", "example", "axes", "uncovered"), CASES)
def test_blocks_are_suggested_and_every_slot_passes_its_rehearsal(
    make: Any, example: Any, axes: dict[str, str], uncovered: tuple[str, ...]
) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = esper.suggest_slots(model, example)
    assert found.axes == axes
    assert list(found) == list(axes)
    assert found.uncovered == uncovered
    checks = esper.check_slots(model, found, example)
    assert [check.problem for check in checks] == [None] * len(axes)
    assert all(check.parameters > 0 for check in checks)
    # The rehearsal was on a copy.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_suggestions_are_slots_and_say_what_they_are() -> None:
    found = esper.suggest_slots(Stages(), torch.randn(2, 3, 8, 8), most=2)
    assert found[-1] == "layer2.1"
    assert found[:1] == [found[0]]
    assert {slot.path for slot in (*found.slots, *found.others)} == {
        "layer1.0",
        "layer1.1",
        "layer2.0",
        "layer2.1",
    }
    text = str(found)
    assert text.startswith("slots=['")
    assert "also possible: " in text
    # A place that is also possible is not named a second time.
    assert set(found.uncovered) >= {"layer1.0", "stem"}
    (without,) = [line for line in text.splitlines() if line.startswith("parts without a slot: ")]
    assert "stem" in without
    assert "layer1.0" not in without
    placed = place_slots(Stages(), found, torch.randn(2, 3, 8, 8), found.axes)
    assert [slot.path for slot in placed.slots] == list(found)


def test_a_model_without_a_hidden_layer_is_told_what_to_write() -> None:
    model, example = nn.Sequential(nn.Flatten(), nn.Linear(36, 10)), torch.randn(2, 6, 6)
    words = (
        "no slot can be suggested for this Sequential: none of .*; give it a hidden layer, as in "
    )
    with pytest.raises(SlotError, match=words) as told:
        esper.suggest_slots(model, example)
    line = str(told.value).partition("as in ")[2]
    better = eval(line, {"nn": nn, "inputs": 36, "classes": 10})
    assert list(esper.suggest_slots(better, example)) == ["2"]


def test_what_cannot_hold_a_slot_is_named_with_its_reason() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.inner(x)}

    with pytest.raises(SlotError, match="no slot can be suggested for this Linear"):
        esper.suggest_slots(nn.Linear(4, 2), torch.randn(2, 4))
    pointwise = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(SlotError, match=r"declare axes=\{'1': 'BTC'\}"):
        esper.suggest_slots(pointwise, torch.randn(3, 5, 4))
    found = esper.suggest_slots(pointwise, torch.randn(3, 5, 4), axes="BTC")
    assert found.axes == {"1": "BTC"}
    with pytest.raises(UsageError, match=r"cannot take the example \[.*\]: RuntimeError"):
        esper.suggest_slots(Stages(), torch.randn(2, 4, 8, 8))
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module"):
        esper.suggest_slots(3, torch.randn(2))  # type: ignore[arg-type]


def test_what_no_gradient_comes_back_to_is_not_suggested() -> None:
    class LastState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(99, 4)
            self.gru = nn.GRU(4, 4, batch_first=True)
            self.neck = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.head = nn.Linear(4, 2)
            # Zero on the way is no reason: it will be learned.
            nn.init.zeros_(self.head.weight)

        def forward(self, tokens: Tensor) -> Tensor:
            _, state = self.gru(self.embed(tokens))
            scores: Tensor = self.head(self.neck(state[-1]))
            return scores

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
            self.inner = LastState()

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(tokens).T, self.encoder[0](torch.ones(3, 4)).detach().sum()

    found = esper.suggest_slots(LastState(), TOKENS)
    assert list(found) == ["neck"]
    found = esper.suggest_slots(Around(), TOKENS)
    assert list(found) == ["inner.neck"]
    assert "no gradient reaches 'encoder.0'" in found.refused["encoder.0"]


def test_a_block_whose_parts_stand_in_a_row_is_one_block() -> None:
    class Attending(nn.Sequential):
        pass

    class Mixing(nn.Sequential):
        pass

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = Attending(nn.Linear(4, 4), nn.Tanh()), Mixing(nn.Linear(4, 4), nn.ReLU())
            self.parts = nn.ModuleList(parts)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = x + part(x)
            return x

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"layers": nn.Sequential(Layer(), Layer())})
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.body["layers"](x))
            return scores.T

    found = esper.suggest_slots(Stack(), torch.randn(3, 4))
    assert list(found) == ["body.layers.0", "body.layers.1"]


def test_parts_are_covered_by_slots_at_in_or_around_them() -> None:
    model = Stages()
    assert uncovered_parts(model, ["layer1", "layer2.0.first"]) == (
        "stem",
        "layer2.0.second",
        "layer2.0.short",
        "layer2.1",
        "head",
    )


def test_a_rehearsal_finds_an_output_that_is_not_used() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 4)
            self.idle = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.idle(x)
            return self.used(x)

    used, idle = esper.check_slots(Idle(), ["used", "idle"], torch.randn(3, 4))
    assert used.problem is None
    assert idle.problem == "a seed there changes nothing: the output of the submodule is not used"
    assert "idle (BC, mlp_small): a seed there changes nothing" in str(idle)


def test_a_rehearsal_finds_wrong_axes() -> None:
    class Square(nn.Module):
        """As many positions as channels: declared the wrong way round, nothing fails."""

        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Conv1d(6, 6, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x).mean(2)

    (check,) = esper.check_slots(Square(), ["block"], torch.randn(2, 6, 6))
    assert (check.axes, check.problem) == ("BCL", None)


@pytest.mark.parametrize(
    ("layers", "example"),
    [
        ([nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)], (4, 1, 8, 8)),
        ([nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool1d(1)], (4, 2, 9)),
    ],
    ids=["images", "waves"],
)
def test_no_slot_is_suggested_where_everything_is_pooled_away(
    layers: list[nn.Module], example: tuple[int, ...]
) -> None:
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))
    assert list(esper.suggest_slots(model, torch.rand(example))) == ["1"]


def test_a_block_that_ends_in_pooling_has_slots_inside() -> None:
    class Classifier(nn.Module):
        """Features that are pooled inside their block, and a head."""

        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
                *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            )
            self.fc = nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.features(x).flatten(1))
            return out

    found = esper.suggest_slots(Classifier(), torch.randn(50, 1, 8, 8))
    assert list(found) == ["features.2", "features.4"]
    assert set(found.axes.values()) == {"BCHW"}


class Regressor(nn.Module):
    """One number for each sample, in one of the ways that answers are returned."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.relu = nn.ReLU()
        self.last = nn.Linear(8, 1 if end == "squeeze" else 3)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        out = self.last(self.relu(self.first(x)))
        ends = {
            "squeeze": lambda: out.squeeze(-1),
            "sigmoid": lambda: out.sigmoid(),
            "log_softmax": lambda: out.log_softmax(-1),
            "dict": lambda: {"loss": out.mean(), "logits": out},
        }
        return ends[self.end]()


@pytest.mark.parametrize("end", ["squeeze", "sigmoid", "log_softmax", "dict"])
def test_answers_are_no_slots(end: str) -> None:
    found = esper.suggest_slots(Regressor(end), torch.randn(6, 4))
    assert [slot.path for slot in (*found.slots, *found.others)] == ["relu"]
    assert found.uncovered == ("last",)


def test_suggested_sequences_say_whether_they_are_causal() -> None:
    model = nn.Sequential()
    model.add_module("layer", nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    model.add_module("head", nn.Linear(8, 3))
    found = esper.suggest_slots(model, torch.randn(3, 5, 8))
    assert "layer: TransformerEncoderLayer, BTC, equivariant, 8 channels" in str(found)
