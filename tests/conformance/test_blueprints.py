"""Every built-in blueprint passes the battery, and the battery notices every kind of bad seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import (
    BLUEPRINTS,
    count_parameters,
    group_norm,
    register_blueprint,
)
from esper.leyline.errors import UnknownNameError
from esper.leyline.slots import BUILTIN_BLUEPRINTS, Topology
from esper.testing import check_blueprint

WIDTHS = (8, 64, 384)

PARAMETERS: dict[tuple[str, Topology], tuple[int, int, int]] = {
    ("noop", "cnn"): (0, 0, 0),
    ("noop", "sequence"): (0, 0, 0),
    ("noop", "vector"): (0, 0, 0),
    # 2C + 1
    ("norm", "cnn"): (17, 129, 769),
    ("norm", "sequence"): (17, 129, 769),
    ("norm", "vector"): (17, 129, 769),
    # C²/2 + C
    ("attention", "cnn"): (40, 2_112, 74_112),
    # C² + 11C
    ("depthwise", "cnn"): (152, 4_800, 151_680),
    # 2Cb + 9b² + 2C with b = max(8, C/4)
    ("bottleneck", "cnn"): (720, 4_480, 157_440),
    # C² + 2C
    ("conv_small", "cnn"): (80, 4_224, 148_224),
    # 9C² + 2C
    ("conv_light", "cnn"): (592, 36_992, 1_327_872),
    # 18C² + 4C
    ("conv_heavy", "cnn"): (1_184, 73_984, 2_655_744),
    # 16C and 64C
    ("lora", "sequence"): (128, 1_024, 6_144),
    ("lora", "vector"): (128, 1_024, 6_144),
    ("lora_large", "sequence"): (512, 4_096, 24_576),
    ("lora_large", "vector"): (512, 4_096, 24_576),
    # 4C² + 4C
    ("attention", "sequence"): (288, 16_640, 591_360),
    ("flex_attention", "sequence"): (288, 16_640, 591_360),
    # 4C² + 3C and 8C² + 5C
    ("mlp_small", "sequence"): (280, 16_576, 590_976),
    ("mlp_small", "vector"): (280, 16_576, 590_976),
    ("mlp", "sequence"): (552, 33_088, 1_181_568),
    ("mlp", "vector"): (552, 33_088, 1_181_568),
}


def test_the_table_names_every_blueprint_in_every_topology() -> None:
    known = {
        (name, topology)
        for name in BUILTIN_BLUEPRINTS
        for topology in BLUEPRINTS.get(name).topologies
    }
    assert set(PARAMETERS) == known


@pytest.mark.parametrize(("name", "topology"), list(PARAMETERS), ids=lambda value: str(value))
def test_parameter_counts(name: str, topology: Topology) -> None:
    blueprint = BLUEPRINTS.get(name)
    counts = tuple(count_parameters(blueprint, width, topology) for width in WIDTHS)
    assert counts == PARAMETERS[name, topology]


@pytest.mark.parametrize("name", BUILTIN_BLUEPRINTS)
def test_every_built_in_blueprint_passes_the_battery(name: str) -> None:
    check_blueprint(name)


def test_copies_pass_the_battery_too() -> None:
    check_blueprint("kin", channels=(4, 8))


@pytest.mark.parametrize(("name", "topology"), list(PARAMETERS))
def test_a_blueprint_promises_the_identity_exactly_where_it_starts_as_one(
    name: str, topology: Topology
) -> None:
    blueprint = BLUEPRINTS.get(name)
    shape = {"cnn": (4, 8, 5, 5), "sequence": (4, 5, 8), "vector": (4, 8)}[topology]
    x = torch.randn(shape)
    is_identity = torch.equal(blueprint.build(8, topology)(x), x)
    assert is_identity == (topology in blueprint.identity_at_start)


# -- bad seeds ------------------------------------------------------------------------------------


class Seed(nn.Module):
    """The constructor of every seed below, which only differ in their layers and forward."""

    topologies: tuple[Topology, ...] = ("cnn",)

    def __init__(self, channels: int, topology: Topology) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.make(channels))

    def make(self, channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, channels, 1)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Vector(Seed):
    topologies = ("vector",)

    def make(self, channels: int) -> list[nn.Module]:
        return [nn.Linear(channels, channels)]


def zero_convolution(channels: int, kernel: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False)
    nn.init.zeros_(convolution.weight)
    return convolution


class Stillborn(Seed):
    """The zero in front of norm and ReLU: no gradient in any parameter, for ever."""

    def make(self, channels: int) -> list[nn.Module]:
        return [zero_convolution(channels), group_norm(channels), nn.ReLU()]


class ZeroIntoNorm(Seed):
    """The zero in front of a norm: the first gradient is hundreds of times too large."""

    def make(self, channels: int) -> list[nn.Module]:
        return [zero_convolution(channels, 3), group_norm(channels)]


class ZeroBottleneckIntoNorm(Seed):
    """The same behind three layers, which hide a part of it."""

    def make(self, channels: int) -> list[nn.Module]:
        width = max(8, channels // 4)
        up = nn.Conv2d(width, channels, 1, bias=False)
        nn.init.zeros_(up.weight)
        down, middle = nn.Conv2d(channels, width, 1), nn.Conv2d(width, width, 3, padding=1)
        return [down, nn.ReLU(), middle, nn.ReLU(), up, group_norm(channels)]


class Lame(Seed):
    """Two zeros in a row: the scale learns at first, and what feeds it never does."""

    def make(self, channels: int) -> list[nn.Module]:
        dead = nn.Conv2d(channels, channels, 1)
        nn.init.constant_(dead.bias, -1e4)
        return [dead, nn.ReLU(), nn.Conv2d(channels, channels, 1)]


class NarrowSqueeze(Seed):
    """Two rectified units behind a pool: both are dead in one draw of four, alive in the others."""

    def make(self, channels: int) -> list[nn.Module]:
        down, up = nn.Conv2d(channels, 2, 1, bias=False), nn.Conv2d(2, channels, 1)
        return [nn.AdaptiveAvgPool2d(1), down, nn.ReLU(), up]


class ShapeChanging(Vector):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return torch.cat([x, out], -1)


class Falling(Vector):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return (x + out).float()


class FalseIdentity(Vector):
    """Promises to start as the identity, as every blueprint does that says nothing."""


class LookingAhead(Seed):
    topologies = ("sequence",)

    def make(self, channels: int) -> list[nn.Module]:
        return [nn.Linear(channels, channels)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.mean(-2, keepdim=True))
        return x + out


class Detaching(Vector):
    """Fully blended it takes the host's gradient away."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.detach())
        return x.detach() + out


class InPlace(Vector):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.clamp_(min=0)
        out: Tensor = x + self.layers(x)
        return out


class Statistical(Seed):
    def make(self, channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)]


class Random(Vector):
    def make(self, channels: int) -> list[nn.Module]:
        return [nn.Linear(channels, channels), nn.Dropout(0.5)]


class Unseeded(Vector):
    stream = torch.Generator().manual_seed(0)

    def make(self, channels: int) -> list[nn.Module]:
        layer = nn.Linear(channels, channels)
        with torch.no_grad():
            if not layer.weight.is_meta:
                layer.weight.normal_(generator=self.stream)
        return [layer]


class Sharing(Vector):
    def __deepcopy__(self, memo: object) -> Sharing:
        return self


class Forgetful(Vector):
    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:  # type: ignore[override]
        return {name: torch.zeros_like(p) for name, p in self.named_parameters()}


class Nothing(Vector):
    def make(self, channels: int) -> list[nn.Module]:
        return [nn.Identity()]


class Uncounted(Vector):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x) @ torch.linalg.matrix_exp(torch.eye(x.shape[1]).to(x))
        return out


class Doubled(torch.autograd.Function):
    """An operation without a rule for stacked tensors."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
        return None

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Unmapped(Vector):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + Doubled.apply(self.layers(x))
        return out


class Excused(Unmapped):
    no_vmap = "its operation has no rule for stacked tensors"


class Measuring(Vector):
    """Looks at values while it is built, which cannot be done without memory."""

    def make(self, channels: int) -> list[nn.Module]:
        layer = nn.Linear(channels, channels)
        if float(layer.weight.detach().norm()) > 1e9:
            raise AssertionError
        return [layer]


class Single(Vector):
    """Only in float32: breaks when it is cast."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise TypeError("bfloat16 is not for me")
        out: Tensor = x + self.layers(x)
        return out


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    module: type[Seed] = request.param
    name = module.__name__.lower()
    identity = module.topologies if module is FalseIdentity else ()
    register_blueprint(name, topologies=module.topologies, identity_at_start=identity)(module)
    yield name
    BLUEPRINTS.unregister(name)


@pytest.mark.parametrize("registered", [Seed, Vector, Excused], indirect=True)
def test_a_sound_seed_passes(registered: str) -> None:
    check_blueprint(registered)


@pytest.mark.parametrize("registered", [NarrowSqueeze], indirect=True)
@pytest.mark.parametrize("channels", [4, 9])
def test_a_seed_is_not_refused_for_the_luck_of_one_draw(registered: str, channels: int) -> None:
    check_blueprint(registered, channels=(channels,))


@pytest.mark.parametrize(
    ("registered", "words"),
    [
        (Stillborn, "no parameter has a gradient at the first batch: it can never learn"),
        (ZeroIntoNorm, "times the host's, at most 20 is sound; does a zero feed a norm?"),
        (ZeroBottleneckIntoNorm, "times the host's, at most 20 is sound; does a zero feed a norm?"),
        (Lame, "no gradient within 3 optimizer steps for seed.layers.0.bias, seed.layers.0.weight"),
        (ShapeChanging, "it turns [8, 4] into [8, 8]"),
        (Falling, "it turns torch.float64 into torch.float32"),
        (FalseIdentity, "it promises the identity at the start but changes its input"),
        (LookingAhead, "it looks into the future"),
        (Detaching, "no gradient for stem.weight at alpha = 1"),
        (InPlace, "it changes its input in place"),
        (Statistical, "a forward pass changes its buffers"),
        (Random, "a forward pass draws random numbers"),
        (Unseeded, "two builds from one random stream differ"),
        (Sharing, "a deepcopy shares its parameters"),
        (Forgetful, "outputs differ after a state_dict"),
        (Nothing, "it has no trainable parameter"),
        (Uncounted, "the operations of aten::linalg_matrix_exp cannot be counted"),
        (Unmapped, "vmap: raised RuntimeError"),
        (Measuring, "parameters: raised"),
        (Single, "bfloat16: raised TypeError: bfloat16 is not for me"),
    ],
    indirect=["registered"],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_battery_notices(registered: str, words: str) -> None:
    with pytest.raises(AssertionError) as error:
        check_blueprint(registered)
    message = str(error.value)
    assert words in message
    assert message.startswith(f"blueprint {registered!r} on a ")
    assert "\n" not in message


def test_a_leak_through_the_style_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that pools over time would show early tokens their own future."""
    from esper.kasmina.slot import GateNetwork

    def pooled(self: GateNetwork, x: Tensor) -> Tensor:
        mean = x.mean(-2, keepdim=True)
        return torch.sigmoid(self.out(torch.relu(self.hidden(mean))))

    monkeypatch.setattr(GateNetwork, "forward", pooled)
    with pytest.raises(AssertionError, match=r"style gated_gate, blended: .* into the future"):
        check_blueprint("lora")


def test_an_unknown_name_is_an_error_of_its_own() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'conv_light'"):
        check_blueprint("convlight")
