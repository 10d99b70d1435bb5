from __future__ import annotations

import pytest
import torch

from esper.kasmina.blueprints.registry import blueprint_by_id, blueprint_names
from esper.kasmina.hosts import BuiltInSeed, CnnConfig, GrownConfig, MlpConfig, build_host
from esper.kasmina.hosts.registry import SeededModule
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.utils.randomness import seeded

BASE = CnnConfig(channels=(4, 4), in_channels=1)


def seed(slot: str = "r0c0", blueprint: str = "norm", algorithm: str = "ADD") -> BuiltInSeed:
    return BuiltInSeed(slot=slot, blueprint=blueprint, channels=4, algorithm=algorithm)


def grown(*seeds: BuiltInSeed) -> GrownConfig:
    return GrownConfig(host="cnn", host_options=BASE, seeds=seeds)


@pytest.mark.parametrize("algorithm", ["ADD", "MULTIPLY", "GATE"])
def test_seeds_learn_with_the_host_from_the_start(algorithm: str) -> None:
    host = build_host("grown_cnn", grown(seed("r0c1", "conv_heavy", algorithm)))
    host(torch.randn(3, 1, 8, 8)).square().sum().backward()
    inside = host.get_submodule("host.blocks.1")
    assert isinstance(inside, SeededModule)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in inside.module.parameters())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in inside.seed.parameters())
    assert (inside.gate is not None) == (algorithm == "GATE")


def test_an_identity_seed_leaves_the_host_as_it_is() -> None:
    identity = next(
        name
        for name in blueprint_names()[1:]
        if "cnn" in blueprint_by_id(blueprint_names().index(name)).identity_at_start
    )
    x = torch.randn(3, 1, 8, 8)
    with seeded(0, "host"):
        plain = build_host("cnn", BASE)
    with seeded(0, "host"):
        host = build_host("grown_cnn", grown(seed("r0c1", identity)))
    assert torch.allclose(plain(x), host(x), atol=1e-6)


def test_vector_hosts_grow_too_and_options_survive_plain_data() -> None:
    config = GrownConfig(
        host="mlp",
        host_options=MlpConfig(in_features=6, hidden=(4, 4)),
        seeds=(seed("r0c0", "mlp"),),
    )
    assert GrownConfig.from_mapping(config.to_mapping()) == config
    assert build_host("grown_vector", config)(torch.randn(2, 6)).shape == (2, 10)


def test_mistakes() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'norm'"):
        seed(blueprint="nrom")
    with pytest.raises(ConfigError, match=r"copies must be above 0 for kin .* got 0 for kin"):
        seed(blueprint="kin")
    with pytest.raises(ConfigError, match="got 3 for norm"):
        BuiltInSeed(slot="r0c0", blueprint="norm", channels=4, copies=3)
    with pytest.raises(UnknownNameError, match="unknown algorithm"):
        seed(algorithm="MIX")
    with pytest.raises(ConfigError, match="different slots"):
        grown(seed(), seed())
    with pytest.raises(ConfigError, match="must be a CnnConfig"):
        GrownConfig(host="cnn", host_options=MlpConfig())
    with pytest.raises(UnknownNameError, match="unknown slot 'r0c7'"):
        build_host("grown_cnn", grown(seed("r0c7")))
