"""Registration, lookup, the checks on a host's slots, and the how-to page."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from esper.kasmina.hosts import HOSTS, build_host, host_slots, pick_slots, register_host
from esper.kasmina.hosts.cnn import CnnConfig
from esper.kasmina.hosts.mlp import MlpConfig
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, SlotError, UnknownNameError, UsageError

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "add-a-host.md"


@dataclass(frozen=True, kw_only=True)
class TinyConfig(Config):
    path: str = option("layer", "Which submodule the slot names.")
    slot: str = option("r0c0", "What the slot is called.")


class Tiny(nn.Module):
    config_class = TinyConfig
    topology = "vector"

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.slot_paths = {config.slot: config.path}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


@pytest.fixture
def tiny() -> Iterator[None]:
    register_host("tiny")(Tiny)
    yield
    HOSTS.unregister("tiny")


def test_built_in_hosts_are_registered() -> None:
    topologies = {
        "cnn": "cnn",
        "residual": "cnn",
        "resnet": "cnn",
        "mlp": "vector",
        "tcn": "sequence",
        "transformer": "sequence",
        "vit": "sequence",
    }
    assert {name: HOSTS.get(name).topology for name in topologies} == topologies


@pytest.mark.usefixtures("tiny")
def test_a_registered_class_is_built_by_name() -> None:
    assert isinstance(build_host("tiny"), Tiny)
    assert isinstance(build_host("tiny", TinyConfig()), Tiny)
    assert host_slots(build_host("tiny")) == {"r0c0": "layer"}


def test_unknown_host_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'cnn'"):
        build_host("cnnn")


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'channels'"):
        build_host("cnn", {"chanels": [4]})


def test_a_foreign_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a CnnConfig, got a MlpConfig"):
        build_host("cnn", MlpConfig())


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "leyer"}, "which does not exist, did you mean 'layer'"),
        ({"slot": "early"}, "slot id must look like 'r0c2'"),
    ],
)
def test_wrong_slots_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_host("tiny", options)


def test_slots_must_be_listed_row_by_row() -> None:
    host = build_host("cnn", CnnConfig(slots=("r0c0", "r1c0")))
    host.slot_paths = {"r1c0": "pools.0", "r0c0": "blocks.0"}  # type: ignore[assignment]
    with pytest.raises(SlotError, match="row by row"):
        host_slots(host)


def test_a_module_without_slots_is_refused() -> None:
    with pytest.raises(SlotError, match="needs an attribute slot_paths"):
        host_slots(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"topology": "cnn"}, "config_class"),
        ({"config_class": TinyConfig, "topology": "graph"}, "one of cnn, sequence, vector"),
    ],
)
def test_an_incomplete_class_is_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        register_host("broken")(type("Broken", (nn.Module,), attributes))
    assert "broken" not in HOSTS


def test_pick_slots_sorts_and_defaults_to_row_zero() -> None:
    every = {"r0c0": "a", "r0c1": "b", "r1c0": "c"}
    assert list(pick_slots(every, None)) == ["r0c0", "r0c1"]
    assert list(pick_slots(every, ("r1c0", "r0c1"))) == ["r0c1", "r1c0"]
    for wrong in ((), ("r0c0", "r0c0"), ("r7c7",)):
        with pytest.raises(ConfigError):
            pick_slots(every, wrong)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("cnn", {"channels": [4, 32]}, (3, 5, 3, 8, 8)),
        ("residual", {"channels": [4, 8]}, (3, 5, 3, 8, 8)),
        ("resnet", {"channels": [4, 8]}, (3, 5, 3, 8, 8)),
        ("mlp", {"in_features": 6, "hidden": [4, 4]}, (3, 5, 6)),
    ],
)
def test_hosts_run_stacked(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    hosts = [build_host(name, options) for _ in range(3)]
    parameters, _ = stack_module_state(hosts)
    x = torch.randn(shape)
    stacked = torch.vmap(lambda own, inputs: functional_call(hosts[0], own, inputs))(parameters, x)
    for row, host in enumerate(hosts):
        assert torch.allclose(stacked[row], host(x[row]), atol=1e-5)


def test_the_how_to_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = HOW_TO.read_text(encoding="utf-8").split("```python\n")[1:]
    code = "".join(block.split("```")[0] for block in blocks)
    (tmp_path / "how_to_add_a_host.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("how_to_add_a_host")
    assert build_host("resnet_tiny")(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    HOSTS.unregister("resnet_tiny")
