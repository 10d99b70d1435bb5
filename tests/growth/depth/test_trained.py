"""Blocks with weights to keep: frozen ones are refused, and trained ones are named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth.depth.deepen import Deepen
from esper.growth.depth.stacks import find_by_example
from esper.growth.depth.trained import format_ranges, looks_trained
from esper.leyline.errors import EsperWarning, UsageError
from tests.growth.depth.models import (
    GPT,
    WIDTH,
    ResNet,
    image_loss,
    images,
    make_gpt,
    make_resnet,
    tokens,
    train,
)

EXAMPLE = tokens(0)[:, :-1]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)


# -- frozen blocks --------------------------------------------------------------------------------


def test_frozen_blocks_are_not_overwritten() -> None:
    model = make_gpt(8)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    problem = r"^blocks\.2 to blocks\.7 would sleep .* frozen; .*\(True\), or train without Deepen$"
    with pytest.raises(UsageError, match=problem):
        Deepen(model, sgd(model), total_steps=20, example=EXAMPLE)
    depth = Deepen(model, sgd(model), total_steps=20)
    with pytest.raises(UsageError, match=problem):
        model(EXAMPLE)
    assert depth.steps == 0


def test_a_stack_that_is_not_frozen_is_named() -> None:
    model, (x, _) = make_resnet(), images(0)
    model.stage1[2:].requires_grad_(False)
    problem = r"^stage1\.2 to stage1\.3 would .* or leave their stack out: stacks=\['stage2'\]$"
    with pytest.raises(UsageError, match=problem):
        Deepen(model, sgd(model), total_steps=20, example=x)
    # As the advice says.
    depth = Deepen(model, sgd(model), total_steps=20, example=x, stacks=["stage2"])
    assert depth.awake == {"stage2": 1}


def test_frozen_blocks_may_stay_awake() -> None:
    model = make_gpt(4)
    model.blocks[:2].requires_grad_(False)
    assert Deepen(model, sgd(model), total_steps=9, start=2, example=EXAMPLE).awake["blocks"] == 2


# -- trained blocks -------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """As many models define it; Gemma adds 1 to a weight of 0."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), start))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (WIDTH,)) * (1 + self.weight)


class TextEncoder(nn.Module):
    """The encoder of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


def make_rms(start: float) -> GPT:
    model = make_gpt(4)
    for block in model.blocks:
        block.norm1, block.norm2 = RMSNorm(start), RMSNorm(start)
    return model


def make_silent_resnet() -> ResNet:
    """Residual branches start at 0."""
    model = make_resnet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.zeros_(module.weight)
    return model


def make_random_resnet() -> ResNet:
    """Initialised as a DCGAN."""
    model = make_resnet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    return model


def make_run_resnet() -> ResNet:
    """Called in training mode before, to see that it runs."""
    model = make_resnet()
    model(images(0)[0])
    return model


TEXT: dict[str, Callable[[], Any]] = {
    "GPT": lambda: make_gpt(4),
    "bfloat16": lambda: make_gpt(4).bfloat16(),
    "RMSNorm of 1": lambda: make_rms(1.0),
    "RMSNorm of 0": lambda: make_rms(0.0),
    "nn.TransformerEncoder": TextEncoder,
}
PICTURES: dict[str, Callable[[], Any]] = {
    "ResNet": make_resnet,
    "silent ResNet": make_silent_resnet,
    "random ResNet": make_random_resnet,
    "run ResNet": make_run_resnet,
}


def first_step(model: Any, **options: Any) -> None:
    """Train one step with a Deepen; an EsperWarning is an error."""
    is_text = not isinstance(model, ResNet)
    optimizer = sgd(model)
    depth = Deepen(model, optimizer, total_steps=1_000, **options)
    own = {} if is_text else {"loss_of": image_loss}
    train(model, optimizer, 0, 1, depth=depth, **own)


@pytest.mark.parametrize("make", [*TEXT.values(), *PICTURES.values()], ids=[*TEXT, *PICTURES])
def test_a_fresh_network_is_no_cause_for_alarm(make: Callable[[], Any]) -> None:
    first_step(make())


@pytest.mark.parametrize("make", [*TEXT.values(), *PICTURES.values()], ids=[*TEXT, *PICTURES])
def test_a_trained_network_is_named_though_its_optimizer_is_new(make: Callable[[], Any]) -> None:
    trained, model = make(), make()
    is_text = not isinstance(model, ResNet)
    train(trained, sgd(trained), 0, 2, **({} if is_text else {"loss_of": image_loss}))
    model.load_state_dict(trained.state_dict())
    with pytest.warns(EsperWarning, match=r"sleep although they look trained .*leave Deepen out"):
        first_step(model)


def test_the_ranges_of_two_stacks_are_two() -> None:
    model, (x, _) = make_resnet(), images(0)
    stacks = find_by_example(model, x).stacks
    blocks = [name for stack in stacks.values() for name in stack.blocks]
    assert format_ranges(stacks, blocks[1:]) == ("stage1.1 to stage1.3 and stage2.1 to stage2.3")
    assert format_ranges(stacks, ["stage1.1", "stage1.3"]) == "stage1.1 and stage1.3"
    train(model, optimizer := sgd(model), 0, 1, loss_of=image_loss)
    depth = Deepen(model, optimizer, total_steps=100)
    with pytest.warns(EsperWarning, match=r"^stage1\.1 to stage1\.3 and stage2\.2 to stage2\.3 sl"):
        train(model, optimizer, 1, 2, depth=depth, loss_of=image_loss)


def test_blocks_without_norms_never_look_trained() -> None:
    assert not looks_trained(
        nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.BatchNorm1d(3, affine=False))
    )
    odd = nn.Linear(3, 3)
    odd.__class__ = type("NormalLinear", (nn.Linear,), {})
    assert not looks_trained(odd)


def test_the_warning_can_be_silenced_as_it_says(recwarn: pytest.WarningsRecorder) -> None:
    model = make_gpt(4)
    for block in model.blocks:
        nn.init.normal_(block.norm1.weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*look trained")
        first_step(model)
    assert len(recwarn) == 0


def test_a_finished_network_in_the_blocks_awake_is_no_cause_for_alarm() -> None:
    small = make_gpt(2)
    train(small, sgd(small), 0, 3)
    model = make_gpt(8)
    optimizer = sgd(model)
    depth = Deepen(model, optimizer, start=2, total_steps=1_000, example=EXAMPLE)
    with depth.export():
        model.load_state_dict(small.state_dict())
    train(model, optimizer, 0, 1, depth=depth)
