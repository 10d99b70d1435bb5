import pytest
import torch

from esper.leyline.slots import (
    BUILTIN_BLUEPRINTS,
    NOOP,
    NUM_BLUEPRINTS,
    TOPOLOGIES,
    TOPOLOGY_BY_RANK,
    Topology,
    channel_axis,
)


def test_ids_are_fixed_because_checkpoints_hold_them() -> None:
    assert dict(enumerate(BUILTIN_BLUEPRINTS)) == {
        0: "noop",
        1: "conv_light",
        2: "attention",
        3: "norm",
        4: "depthwise",
        5: "bottleneck",
        6: "conv_small",
        7: "conv_heavy",
        8: "lora",
        9: "lora_large",
        10: "mlp_small",
        11: "mlp",
        12: "flex_attention",
    }
    assert NUM_BLUEPRINTS == 13
    assert NOOP == 0


@pytest.mark.parametrize(
    ("topology", "shape"), [("cnn", (2, 7, 5, 5)), ("sequence", (2, 5, 7)), ("vector", (2, 7))]
)
def test_rank_names_the_topology_and_its_channel_axis(
    topology: Topology, shape: tuple[int, ...]
) -> None:
    activation = torch.zeros(shape)
    assert TOPOLOGY_BY_RANK[activation.dim()] == topology
    assert activation.shape[channel_axis(topology)] == 7


def test_every_topology_has_a_rank() -> None:
    assert set(TOPOLOGY_BY_RANK.values()) == set(TOPOLOGIES)
