"""Seeds keep the symmetry of their host: causal models stay causal, graphs have no first node."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_by_id, register_blueprint
from esper.kasmina.garden import Garden, load_garden
from esper.kasmina.slots.placement import place_slots
from esper.kasmina.slots.selftest import check_slots
from esper.leyline.slots import Topology
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import bring, quick_config, stir

WIDTH = 8


class GraphNet(nn.Module):
    """Messages along weighted edges: features [B, N, F] and edges [B, N, N] to classes of nodes."""

    def __init__(self, *, pooled: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 2)
        self.pooled = pooled

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        share = edges.softmax(-1)
        h = self.first(share @ x)
        h = self.second(h + share @ h)
        return self.head(h.mean(1) if self.pooled else h)


class PointCloud(nn.Module):
    """Points [B, 3, N, 1] through convolutions that look at one point each, and a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Conv2d(3, WIDTH, 1), nn.ReLU())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax((2, 3)))


class Block(nn.Module):
    """A Transformer block with a projection that starts at zero."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.proj.weight)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return x + self.proj(mixed)


class LanguageModel(nn.Module):
    """Tokens [B, T] to scores of tokens [B, T, V], causal or not, by attention or recurrence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.positions = nn.Parameter(torch.randn(12, WIDTH))
        self.kind = kind
        both = kind == "both ways"
        mixers: dict[str, nn.Module] = {
            "causal": Block(is_causal=True),
            "encoder": Block(is_causal=False),
            "gru": nn.GRU(WIDTH, WIDTH, batch_first=True),
            "both ways": nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=both),
            "convolution": nn.Conv1d(WIDTH, WIDTH, 3),
            "alone": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            "set": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        }
        self.mixer = mixers[kind]
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tokens(tokens)
        if self.kind not in ("alone", "set"):
            h = h + self.positions[: tokens.shape[1]]
        is_convolution = self.kind == "convolution"
        h = self.mixer(F.pad(h.mT, (2, 0))).mT if is_convolution else self.mixer(h)
        h = self.block(h[0] if isinstance(h, tuple) else h)
        return self.head(h.mean(1) if self.kind == "set" else h)


class Translator(nn.Module):
    """Two sequences: an encoder that sees all of the first, a decoder that is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.encoder = Block(is_causal=False)
        self.decoder = Block(is_causal=True)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source))
        h = self.decoder(F.embedding(target, self.embed.weight))
        return self.head(h + F.scaled_dot_product_attention(h, memory, memory))


class Vit(nn.Module):
    """Patches of an image behind a class token; it takes one resolution only."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(h[:, 0])


TOKENS = torch.arange(24).reshape(3, 8) % 11
GRAPH = (torch.randn(2, 6, 3), torch.randn(2, 6, 6))
IMAGES = torch.randn(2, 3, 8, 8)

CASES: list[tuple[str, nn.Module, str, Any, str]] = [
    ("graph of nodes", GraphNet(), "first", GRAPH, "equivariant"),
    ("graph, second layer", GraphNet(), "second", GRAPH, "equivariant"),
    ("graph as a whole", GraphNet(pooled=True), "second", GRAPH, "equivariant"),
    ("points", PointCloud(), "points", torch.randn(2, 3, 6, 1), "equivariant"),
    ("set of tokens", LanguageModel("set"), "block", TOKENS, "equivariant"),
    ("decoder", LanguageModel("causal"), "block", TOKENS, "causal"),
    ("decoder, as wide as long", LanguageModel("causal"), "tokens", TOKENS, "causal"),
    ("recurrence", LanguageModel("gru"), "block", TOKENS, "causal"),
    ("in front of a recurrence", LanguageModel("gru"), "tokens", TOKENS, "causal"),
    ("causal convolution", LanguageModel("convolution"), "block", TOKENS, "causal"),
    ("encoder", LanguageModel("encoder"), "block", TOKENS, "bidirectional"),
    ("encoder, at its start", LanguageModel("encoder"), "tokens", TOKENS, "bidirectional"),
    ("recurrence both ways", LanguageModel("both ways"), "block", TOKENS, "bidirectional"),
    ("every token alone", LanguageModel("alone"), "block", TOKENS, "pointwise"),
    ("translator's source", Translator(), "encoder", (TOKENS, TOKENS + 0), "equivariant"),
    ("translator's target", Translator(), "decoder", (TOKENS, TOKENS + 0), "causal"),
    ("class token, first block", Vit(), "blocks.0", IMAGES, "bidirectional"),
    ("class token, last block", Vit(), "blocks.1", IMAGES, "bidirectional"),
    ("one token", LanguageModel("encoder"), "block", TOKENS[:, :1], "causal"),
    ("image", nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), "0", IMAGES, "bidirectional"),
    ("vector", nn.Sequential(nn.Linear(4, 8), nn.ReLU()), "0", torch.randn(3, 4), "bidirectional"),
]


@pytest.mark.parametrize(
    ("model", "slot", "example", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_the_symmetry_of_a_host_is_found(
    model: nn.Module, slot: str, example: Any, expected: str
) -> None:
    axes = {"points": "BCHW", "0": None}.get(slot, "BTC")
    placed = place_slots(model, [slot], example, axes)
    assert placed.slots[0].symmetry == expected


def offered(garden: Garden, slot: str) -> list[str]:
    index = garden.slot_names.index(slot)
    return [
        blueprint_by_id(i).name for i in garden.table.fits()[0, index].nonzero().flatten().tolist()
    ]


def grown(model: nn.Module, slot: str, example: Any, blueprint: str, axes: str = "BTC") -> Garden:
    garden = Garden(copy.deepcopy(model), [slot], example, axes=axes, config=quick_config()).eval()
    plain = garden(*example) if isinstance(example, tuple) else garden(example)
    bring(garden, slot, SeedStage.HOLDING, blueprint)
    stir(garden, slot)
    after = garden(*example) if isinstance(example, tuple) else garden(example)
    assert not torch.equal(plain, after), "the seed must change something"
    return garden


GRAPH_SEEDS = ["attention", "norm", "lora", "lora_large", "mlp_small", "mlp", "flex_attention"]


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("blueprint", GRAPH_SEEDS)
def test_a_graph_network_has_no_first_node_with_any_seed(blueprint: str, pooled: bool) -> None:
    torch.manual_seed(0)
    model = GraphNet(pooled=pooled)
    garden = grown(model, "first", GRAPH, blueprint)
    assert sorted(offered(Garden(model, ["first"], GRAPH), "first")) == sorted(GRAPH_SEEDS)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    x, edges = GRAPH
    with torch.no_grad():
        straight = garden(x, edges)
        turned = garden(x[:, order], edges[:, order][:, :, order])
    expected = straight if pooled else straight[:, order]
    assert float((turned - expected).abs().max()) < 1e-5 * float(straight.abs().max())


def test_points_are_offered_no_convolution_that_looks_at_neighbours() -> None:
    torch.manual_seed(0)
    example = torch.randn(2, 3, 6, 1)
    garden = Garden(PointCloud(), ["points"], example)
    names = offered(garden, "points")
    assert names == ["attention", "norm", "conv_small"]
    refused = garden.germinate("points", "conv_light")
    assert not refused
    assert "symmetry" in refused.reason
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    for name in names:
        with torch.no_grad():
            one = grown(PointCloud(), "points", example, name, "BCHW")
            assert torch.allclose(one(example[:, :, order]), one(example), atol=1e-5)


@pytest.mark.parametrize("slot", ["blocks.0", "blocks.1"])
@pytest.mark.parametrize("blueprint", ["attention", "flex_attention"])
def test_a_class_token_in_front_sees_the_patches_through_a_seed(blueprint: str, slot: str) -> None:
    torch.manual_seed(0)
    garden = grown(Vit(), slot, IMAGES, blueprint)
    seed = garden.seedbed[0].seed
    assert seed is not None
    h = torch.randn(2, 5, WIDTH)
    other = torch.cat([h[:, :1], torch.randn(2, 4, WIDTH)], 1)
    with torch.no_grad():
        difference = (seed(h) - seed(other))[:, 0].abs().max()
    assert float(difference) > 1e-3


@pytest.mark.parametrize("blueprint", GRAPH_SEEDS)
@pytest.mark.parametrize("kind", ["causal", "gru"])
def test_a_causal_model_stays_causal(kind: str, blueprint: str) -> None:
    torch.manual_seed(0)
    garden = grown(LanguageModel(kind), "block", TOKENS, blueprint)
    changed = TOKENS.clone()
    changed[:, 5:] = (changed[:, 5:] + 3) % 11
    with torch.no_grad():
        one, other = garden(TOKENS), garden(changed)
    assert torch.equal(one[:, :5], other[:, :5])
    assert not torch.equal(one[:, 5:], other[:, 5:])


def test_what_was_grown_is_saved_baked_and_exported_with_its_symmetry(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for kind in ("causal", "encoder"):
        model = LanguageModel(kind)
        garden = grown(model, "block", TOKENS, "attention")
        garden.save(tmp_path / kind)
        loaded = load_garden(tmp_path / kind, model=copy.deepcopy(model)).eval()
        expected = garden(TOKENS)
        assert loaded.slots["block"].symmetry == garden.slots["block"].symmetry
        assert torch.equal(loaded(TOKENS), expected)
        assert torch.equal(garden.bake()(TOKENS), expected)
        exported = torch.export.export(garden, (TOKENS,)).module()
        assert torch.allclose(exported(TOKENS), expected, atol=1e-6)


def test_check_slots_says_what_is_not_offered_and_why() -> None:
    (alone,) = check_slots(LanguageModel("alone"), ["block"], TOKENS, axes="BTC")
    assert alone.problem is None
    assert alone.symmetry == "pointwise"
    assert alone.withheld == ("attention", "flex_attention")
    assert "attention and flex_attention are not offered: no position sees another" in str(alone)
    (points,) = check_slots(PointCloud(), ["points"], torch.randn(2, 3, 6, 1))
    assert points.withheld == ("conv_light", "depthwise", "bottleneck", "conv_heavy")
    assert "the order of positions does not matter" in str(points)
    (encoder,) = check_slots(LanguageModel("encoder"), ["block"], TOKENS, axes="BTC")
    assert encoder.withheld == ()
    assert "not offered" not in str(encoder)


class NextDoor(nn.Module):
    """A registered seed that looks one position ahead, whatever it is told."""

    def __init__(self, channels: int, topology: Topology) -> None:
        super().__init__()
        self.mix = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.roll(-1, 1))


@pytest.fixture
def next_door() -> Iterator[str]:
    register_blueprint("next_door", topologies=("sequence",), identity_at_start=())(NextDoor)
    yield "next_door"
    del BLUEPRINTS._items["next_door"]


def test_a_registered_seed_is_offered_where_it_keeps_the_symmetry(next_door: str) -> None:
    found = {
        kind: next_door
        in offered(Garden(LanguageModel(kind), ["block"], TOKENS, axes="BTC"), "block")
        for kind in ("encoder", "causal", "set")
    }
    assert found == {"encoder": True, "causal": False, "set": False}
