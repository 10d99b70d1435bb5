"""The contract check catches each way in which a host can break it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.hosts import HOSTS, register_host
from esper.leyline.config import Config, option
from esper.leyline.errors import UsageError
from esper.testing import check_host

Flaw = Literal["none", "twice", "never", "rank", "norm", "unused", "random", "tuple"]


@dataclass(frozen=True, kw_only=True)
class FlawedConfig(Config):
    flaw: Flaw = option("none", "What is wrong with the host.")


class Flawed(nn.Module):
    config_class = FlawedConfig
    topology = "vector"

    def __init__(self, config: FlawedConfig) -> None:
        super().__init__()
        self.flaw = config.flaw
        self.layer = nn.Sequential(nn.Linear(3, 3))
        self.spare = nn.BatchNorm1d(3) if config.flaw == "norm" else nn.Linear(3, 3)
        if config.flaw == "random":
            with torch.no_grad():
                self.spare.weight += torch.rand(1, generator=SHARED)  # outside the seeded stream
        self.slot_paths = {"r0c0": "layer"}

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor]:
        if self.flaw == "rank":
            x = self.layer(x[:, None])[:, 0]
        elif self.flaw != "never":
            x = self.layer(x)
        if self.flaw == "twice":
            x = self.layer(x)
        if self.flaw != "unused":
            x = self.spare(x)
        return (x,) if self.flaw == "tuple" else x


SHARED = torch.Generator().manual_seed(3)


@pytest.fixture(autouse=True)
def flawed() -> Iterator[None]:
    register_host("flawed")(Flawed)
    yield
    HOSTS.unregister("flawed")


def test_a_sound_host_passes() -> None:
    check_host("flawed", None, torch.randn(4, 3))


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("twice", "ran 2 times in one forward; it must run exactly once"),
        ("never", "ran 0 times in one forward"),
        ("rank", "does not fit the topology 'vector'"),
        ("norm", "spare is a BatchNorm"),
        ("unused", "no gradient reaches spare.weight"),
        ("random", "spare.weight differs between two builds"),
        ("tuple", "must return one tensor"),
    ],
)
def test_each_flaw_is_named(flaw: Flaw, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_host("flawed", FlawedConfig(flaw=flaw), torch.randn(4, 3))
