"""Networks made of PyTorch's own layers: what they cost, and that usual limits let them grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.growth.config import GrowthConfig
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import ConfigError, EsperWarning
from tests.plots import EAGER, TinyNet
from tests.scripts.cli.terminal import esper as command

CLASSES = 10


class LSTMClassifier(nn.Module):
    """The rows of an 8x8 image, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class Attending(nn.Module):
    """Self-attention over the 16 patches of an image, 2x2 pixels each, and a class token."""

    def __init__(self, body: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 12))
        self.body = body()
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(x), 16, 4).repeat(1, 1, 3)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1)
        scores: Tensor = self.head(self.attend(tokens)[:, 0])
        return scores

    def attend(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.body(tokens)
        return found


class AttentionClassifier(Attending):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.MultiheadAttention(12, 2, batch_first=True))

    def attend(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.body(tokens, tokens, tokens)[0]
        return found


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True)


class EncoderLayerClassifier(Attending):
    """One layer of a Transformer's encoder."""

    def __init__(self) -> None:
        super().__init__(encoder_layer)


class EncoderClassifier(Attending):
    """A Transformer's encoder of two layers."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.TransformerEncoder(encoder_layer(), 2))


class ViT(Attending):
    """Patches by a convolution, as in a vision Transformer."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.TransformerEncoder(encoder_layer(), 2))
        self.patches = nn.Conv2d(1, 12, 2, stride=2)
        self.place = nn.Parameter(torch.zeros(1, 17, 12))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x[:, None]).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.place
        scores: Tensor = self.head(self.body(tokens)[:, 0])
        return scores


HEAD_OF_8, HEAD = 2 * 8 * CLASSES, 2 * 12 * CLASSES
# Four projections of 17 tokens, queries with keys and weights with values.
ATTENTION = 4 * 2 * 17 * 12 * 12 + 2 * 2 * 17 * 17 * 12
LAYER = ATTENTION + 2 * 2 * 17 * 12 * 24

NETWORKS: dict[type[nn.Module], tuple[list[str], int]] = {
    # 8,352: four gates of 8 units see 8 pixels and 8 units, in 8 steps.
    LSTMClassifier: (["lstm"], 2 * 8 * 4 * 8 * (8 + 8) + HEAD_OF_8),
    # 33,696 and 53,280.
    AttentionClassifier: (["body"], ATTENTION + HEAD),
    EncoderLayerClassifier: (["body"], LAYER + HEAD),
    EncoderClassifier: (["body.layers.*"], 2 * LAYER + HEAD),
    # 16 patches of 4 pixels, 12 channels.
    ViT: (["body.layers.*"], 2 * 16 * 4 * 12 + 2 * LAYER + HEAD),
}


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_garden_knows_what_its_model_costs(network: type[nn.Module], is_training: bool) -> None:
    slots, flops = NETWORKS[network]
    garden = esper.Garden(network().train(is_training), slots, torch.randn(4, 8, 8))
    assert garden.host_flops == garden.count_flops() == flops
    assert garden.placed.is_counted


@pytest.mark.parametrize("network", NETWORKS)
def test_the_limits_of_the_default_controller_leave_room_for_seeds(
    network: type[nn.Module],
) -> None:
    slots, flops = NETWORKS[network]
    garden = esper.Garden(network(), slots, torch.randn(4, 8, 8))
    gardener = esper.Gardener(garden, horizon=60)
    assert garden.flop_limit == 2 * flops
    assert garden.param_limit == 2 * garden.count_host_parameters()
    assert bool(gardener.garden.table.masks().op[0, LifecycleOp.GERMINATE])
    assert bool(garden.table.fits()[0, :, BLUEPRINTS.get("lora").id].all())


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, 8, generator=draw)
    return [(part, part[:, :, :4].sum((1, 2)).gt(0).long()) for part in x.split(16)]


# Whether a seed has earned its place by the end is not the question here.
@pytest.mark.filterwarnings("ignore::esper.leyline.errors.EsperWarning")
@pytest.mark.parametrize("network", [LSTMClassifier, EncoderClassifier, ViT])
def test_networks_grow_within_twice_their_size(network: type[nn.Module], tmp_path: Path) -> None:
    slots, flops = NETWORKS[network]
    plan = tmp_path / "plan.yaml"
    plan.write_text("- {epoch: 1, op: grow, slot: 100%, blueprint: [mlp, lora], tempo: 3}\n")
    grown = esper.grow(
        network(),
        slots,
        train=batches(),
        val=batches(),
        epochs=14,
        controller=f"schedule:{plan}",
        max_growth="2x",
        config=GrowthConfig(garden=EAGER),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.02),
    )
    stages = {slot.stage for record in grown.history for slot in record.slots}
    assert {"TRAINING", "BLENDING"} <= stages
    most = max(record.flops for record in grown.history)
    assert grown.summary.flops_before == flops < most <= 2 * flops
    sizes = [record.parameters for record in grown.history]
    host = sum(p.numel() for p in network().parameters())
    assert host < max(sizes) <= 2 * host


class Mixer(TinyNet):
    """A network with an operator of its owner's."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = torch.library.custom_op(
            "esper_tests::mixer",
            lambda x: x @ x.T @ x,
            mutates_args=(),
            schema="(Tensor x) -> Tensor",
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = super().forward(x)
        return scores + 0.0 * self.kernel(x.detach()).sum()


def test_work_that_cannot_be_counted_sets_no_limit() -> None:
    with pytest.warns(EsperWarning, match="esper_tests::mixer cannot be counted"):
        garden = esper.Garden(Mixer(), ["body"], torch.randn(3, 4))
    esper.Gardener(garden, horizon=60)
    assert garden.flop_limit == -1
    assert garden.param_limit == 2 * garden.count_host_parameters()
    assert esper.Gardener(garden, "wait", max_growth=3).garden.flop_limit == -1
    # What seeds add is known all the same.
    esper.Gardener(garden, "wait", max_added_flops=100)
    assert garden.flop_limit == garden.host_flops + 100


@pytest.mark.parametrize(("given", "factor"), [(2.0, 2.0), (3, 3.0), ("2x", 2.0), ("1.5", 1.5)])
def test_one_factor_limits_parameters_and_operations(given: float | str, factor: float) -> None:
    garden = esper.Garden(TinyNet(), ["body"], torch.randn(3, 4))
    gardener = esper.Gardener(garden, "heuristic", max_growth=given)
    host, flops = garden.count_host_parameters(), garden.host_flops
    assert garden.param_limit == int(factor * host)
    assert garden.flop_limit == int(factor * flops)
    assert int(gardener.signals().flop_limit) == garden.flop_limit
    exact = esper.Gardener(garden, "heuristic", max_growth=given, max_parameters=host + 1).garden
    assert (exact.param_limit, exact.flop_limit) == (host + 1, int(factor * flops))
    assert esper.Gardener(garden, "heuristic", max_growth=0).garden.param_limit == -1


def test_what_is_frozen_counts_as_part_of_what_may_double() -> None:
    model = TinyNet()
    size = sum(p.numel() for p in model.parameters())
    model.requires_grad_(False)
    garden = esper.Garden(model, ["body"], torch.randn(3, 4))
    assert esper.Gardener(garden, "heuristic", max_growth=2.0).garden.param_limit == size


WRONG = [1.0, 0.5, -2, "x", "2y", "twice", float("nan"), float("inf"), True, [2.0]]


@pytest.mark.parametrize("wrong", WRONG, ids=map(str, WRONG))
def test_a_factor_that_is_none_gets_one_line(wrong: float) -> None:
    with pytest.raises(ConfigError, match=r"^max_growth must be a factor above 1, such as 2\.0 or"):
        esper.grow(TinyNet(), ["body"], train=[], val=[], max_growth=wrong)


def test_the_command_takes_the_factor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    grow = ("grow", "--task", "digits_mlp", "--epochs", 1, "--no-twin", "--controller", "wait")
    out = tmp_path / "run"
    assert command(capsys, *grow, "--max-growth", "3x", "--out", out).code == 0
    assert "max_growth: 3.0" in (out / "config.yaml").read_text()
    said = command(capsys, *grow, "--max-growth", "lots", "--out", tmp_path / "other")
    assert said.code == 2
    assert "max_growth must be a factor above 1, such as 2.0 or '2x'" in said.err
