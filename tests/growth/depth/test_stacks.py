from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.growth.depth.stacks import find
from esper.leyline.errors import UsageError
from tests.growth.depth.models import Block, Residual, images, make_gpt, make_resnet, tokens

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Alternating(nn.Module):
    """A residual block of one of two kinds, which only a setting tells apart."""

    def __init__(self, index: int, shift: int) -> None:
        super().__init__()
        self.index, self.shift, self.drop = index, shift, index / 10
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).roll(self.shift, 1)


class Paired(nn.Module):
    """A block that hands a bias on beside its hidden state, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, scale: int = 1, bias: Any = None) -> tuple[Any, ...]:
        return hidden + scale * self.linear(hidden) + bias, None, bias


class Caller(nn.Module):
    """Calls its layers in one way or another."""

    def __init__(self, layers: list[nn.Module], how: str = "chain") -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        bias = x.mean(-1, keepdim=True)
        for layer in self.layers:
            if self.how == "pairs":
                x, _, bias = layer(x, bias=bias)
            elif self.how == "scaled":
                x = layer(0.5 * x)
            elif self.how == "twice":
                x = layer(layer(x))
            else:
                x = layer(x)
        return x


class WithWeights(nn.Module):
    """A block that also returns a tensor which nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear(x), x.softmax(-1)


class Unpacking(Caller):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


def test_runs_of_like_blocks_are_found() -> None:
    assert esper.find_stacks(make_gpt(5), tokens(0)) == {"blocks": 5}
    # The first block of the second stage has a stride.
    model, state = make_resnet(), make_resnet().state_dict()
    assert esper.find_stacks(model, images(0)[0]) == {"stage1": 4, "stage2": 3}
    found = find(model, (images(0)[0],), {}).stacks["stage2"]
    assert found.blocks == ("stage2.1", "stage2.2", "stage2.3")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Feedforward(nn.Module):
    """A residual block with a list of layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def test_a_list_of_one_block_is_said_to_have_only_one() -> None:
    with pytest.raises(UsageError) as caught:
        find(Caller([Feedforward()]), (X,), {}).choose("auto")
    assert str(caught.value).endswith("(layers: it has only one block)")
    with pytest.raises(UsageError, match="'layers' cannot be deepened: it has only one block"):
        find(Caller([Feedforward()]), (X,), {}).choose("layers")
    # One stage with several blocks is a stack, and a single layer is nothing to speak of.
    stages = Caller([nn.Sequential(Feedforward(), Feedforward())])
    assert esper.find_stacks(stages, X) == {"layers.0": 2}
    assert find(nn.Sequential(nn.Sequential(nn.Linear(8, 8))), (X,), {}).reasons == {}


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_of_pytorch_are_found(norm_first: bool) -> None:
    options = {"batch_first": True, "norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    assert esper.find_stacks(encoder, X) == {"layers": 4}
    with warnings.catch_warnings():
        # About layers that put their norm first.
        warnings.simplefilter("ignore", UserWarning)
        both = nn.Transformer(8, 2, 3, 4, 16, **options)
    assert esper.find_stacks(both, (X, X)) == {"encoder.layers": 3, "decoder.layers": 4}


def test_blocks_that_alternate_keep_their_period() -> None:
    model = Caller([Alternating(index, index % 2) for index in range(6)])
    (stack,) = find(model, (X,), {}).stacks.values()
    assert (len(stack.blocks), stack.period) == (6, 2)
    depth = esper.Deepen(model, torch.optim.SGD(model.parameters(), 0.1), example=X)
    assert depth.awake == {"layers": 2}
    with pytest.raises(UsageError, match="2 kinds of blocks alternate; give a mult"):
        esper.Deepen(model, torch.optim.SGD(model.parameters(), 0.1), example=X, start=3)
    # Of one kind, numbered and with a rate of drop path that rises.
    (stack,) = find(Caller([Alternating(index, 1) for index in range(6)]), (X,), {}).stacks.values()
    assert stack.period == 1


def test_blocks_of_two_classes_may_alternate() -> None:
    model = nn.Sequential(*(m for _ in range(3) for m in (Alternating(0, 1), Block())))
    (stack,) = find(model, (X,), {}).stacks.values()
    assert (stack.name, len(stack.blocks), stack.period) == ("the model", 6, 2)


def test_one_list_may_hold_two_runs() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), *(Block() for _ in range(3)), *(Alternating(0, 1) for _ in range(2))
    )
    assert esper.find_stacks(model, X) == {"the model[1:4]": 3, "the model[4:6]": 2}


def test_what_is_inside_a_block_is_no_stack_of_its_own() -> None:
    inner = [nn.Sequential(Block(), Block()) for _ in range(3)]
    assert esper.find_stacks(Caller(inner), X) == {"layers": 3}
    assert esper.find_stacks(Caller([inner[0], Block()]), X) == {"layers.0": 2}


def test_sleeping_blocks_return_what_is_handed_on() -> None:
    model = Caller([Paired() for _ in range(4)], "pairs")
    short = Caller(list(model.layers)[:1], "pairs")
    esper.Deepen(model, torch.optim.SGD(model.parameters(), 0.1), example=X)
    assert torch.equal(model(X), short(X))
    hidden, nothing, bias = model.layers[2](X, 1, X)
    assert hidden is X
    assert nothing is None
    assert bias is X


shared = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Caller([Alternating(0, s) for s in (2, 1, 1, 3)][:2]), "differ: shift is 2 and 1"),
        (
            Caller([Block(), Block()], "scaled"),
            "the input of layers.1 is not the output of layers.0",
        ),
        (Caller([Block(), Block()], "twice"), "layers.0 is called 2 times in a pass, not once"),
        (Caller([block := Block(), block]), "layers.0 shares parameters"),
        (Caller([nn.Linear(8, 8) for _ in range(3)]), "layers.0 has no residual path"),
        (
            nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(8, 8), nn.ReLU()))),
            "0 has no residual path",
        ),
        (
            Unpacking([WithWeights() for _ in range(3)]),
            "that the next block does not take; let each block take",
        ),
    ],
    ids=["differ", "between", "twice", "tied", "linear", "pairs", "more"],
)
def test_the_reason_is_said_where_a_list_is_no_stack(model: nn.Module, reason: str) -> None:
    assert esper.find_stacks(model, X) == {}
    with pytest.raises(UsageError, match=f"no stack that can be deepened.*{reason}"):
        esper.Deepen(model, torch.optim.SGD(model.parameters(), 0.1), example=X)


def test_a_network_without_lists_of_blocks_is_told_what_else_there_is() -> None:
    with pytest.raises(UsageError, match=r"; other networks can grow modules \(esper\.grow\)$"):
        find(nn.Linear(8, 8), (X,), {}).choose("auto")


class Recurrent(nn.Module):
    """A block around one recurrent layer, as the message about `nn.LSTM` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


def test_layers_inside_one_recurrent_module_are_told_what_to_write() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, num_layers=4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    model, sequences = Whole(), torch.randn(2, 5, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError) as told:
        esper.Deepen(model, optimizer, example=sequences)
    assert "(lstm: its 4 layers are one nn.LSTM; " in str(told.value)
    assert str(told.value).endswith("a block of its own that returns x + self.rnn(x)[0])")
    better = nn.Sequential(*(Recurrent() for _ in range(4)))
    assert esper.find_stacks(better, sequences) == {"the model": 4}


def test_a_stride_in_the_first_block_is_said() -> None:
    stage = nn.Sequential(Residual(4, 2), Residual(4))
    stage[0].short = stage[1].short = nn.Conv2d(4, 4, 1)
    stage[0].short = nn.Conv2d(4, 4, 1, 2)
    model = nn.Sequential(nn.Conv2d(1, 4, 1), stage)
    with pytest.raises(
        UsageError, match=r"'1' cannot be deepened: 1\.0 and 1\.1 differ: conv\.str"
    ):
        esper.Deepen(
            model, torch.optim.SGD(model.parameters(), 0.1), stacks="1", example=images(0)[0]
        )
