"""A saved policy grows a network through the command line, and says why."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.growth.gardener import Gardener
from esper.kasmina.blueprints import BLUEPRINTS, register_blueprint
from esper.kasmina.garden import Garden
from esper.nissa.folder import GROWING, Checkpoints
from esper.tamiyo.controllers import new_policy, save_policy
from esper.tamiyo.networks.config import PolicyConfig
from tests.scripts.cli.terminal import esper

EAGER = (0.0, 3.0, 0.0, -3.0, 3.0, 3.0)
"""Initial logits of a policy that germinates, advances and fossilizes where it can."""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    config = PolicyConfig(lstm_hidden_dim=32, num_slots=8, initial_op_bias=EAGER)
    save_policy(folder, new_policy(config, seed=1))
    return folder


def grow(policy: Path, run: Path, *more: str) -> tuple[str, ...]:
    fixed = ("grow", "--task", "digits_mlp", "--no-twin", "--epochs", "6", "--seed", "3")
    return (*fixed, "--controller", str(policy), "--out", str(run), *more)


def test_a_saved_policy_grows_a_network_and_explains_itself(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = esper(capsys, *grow(policy, tmp_path / "run", "-v", "--json"))
    assert said.code == 0, said.err
    document = json.loads(said.out)
    assert document["controller"] == str(policy)
    assert document["seeds"]
    lines = said.err.splitlines()
    decisions = [at for at, line in enumerate(lines) if line.startswith("epoch 1: ")]
    assert len(decisions) == 1
    first = lines[decisions[0] + 1 : decisions[0] + 5]
    assert first[0].startswith("    ops: GERMINATE ")
    assert first[1].startswith("    then: slot ")
    assert "; blueprint " in first[1]
    assert first[2].startswith("    values: ")
    assert first[3].startswith("    because of (on log-probability): ")
    # Five decisions follow the first five of six epochs.
    assert sum(line.startswith("    because of (") for line in lines) == 5


def test_the_reasons_are_shown_only_when_asked_for(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = esper(capsys, *grow(policy, tmp_path / "run"))
    assert said.code == 0, said.err
    assert "because of" not in said.err + said.out


def test_the_memory_of_the_policy_is_in_the_state_of_the_run(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert esper(capsys, *grow(policy, tmp_path / "whole")).code == 0
    state = Checkpoints(tmp_path / "whole", GROWING).load()
    assert state is not None
    memory = state["gardener"]["controller"]
    assert memory["step"] == 5
    assert memory["state"].shape == (1, 1, 32)
    again = esper(capsys, "grow", "--resume", "--out", str(tmp_path / "whole"))
    assert again.code == 0, again.err


@pytest.mark.parametrize("what", ["nowhere", "."])
def test_a_wrong_path_is_one_line(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = esper(capsys, *grow(tmp_path / what, tmp_path / "run"))
    assert "saved state" in said.complaint()


def test_too_few_slots_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_policy(tmp_path / "small", new_policy(PolicyConfig(lstm_hidden_dim=16, num_slots=1)))
    said = esper(capsys, *grow(tmp_path / "small", tmp_path / "run"))
    assert "serves 1 slots, and the network has" in said.complaint()


@pytest.fixture
def stranger() -> Iterator[str]:
    """A blueprint that no policy has met."""

    @register_blueprint("scaled_map", topologies=("vector",), kind="lora")
    class ScaledMap(nn.Module):
        """Residual linear map that starts at nothing."""

        def __init__(self, channels: int, topology: str) -> None:
            super().__init__()
            self.inside = nn.Linear(channels, channels)
            nn.init.zeros_(self.inside.weight)
            nn.init.zeros_(self.inside.bias)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inside(x)

    yield "scaled_map"
    BLUEPRINTS.unregister("scaled_map")


def test_a_travelling_policy_grows_what_it_never_met(tmp_path: Path, stranger: str) -> None:
    """Saved without the blueprint, laid out for three slots; used with it, on a host of two."""
    config = PolicyConfig(
        layout="travelling", lstm_hidden_dim=16, slot_width=8, initial_op_bias=EAGER
    )
    known = new_policy(config, seed=1)
    assert stranger not in known.blueprint_names
    save_policy(tmp_path / "policy", known)
    host = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    grown: set[str] = set()
    for seed in range(12):
        garden = Garden(copy.deepcopy(host), ["0", "1"], torch.randn(4, 8))
        gardener = Gardener(garden, f"learned:{tmp_path / 'policy'}", 4, seed=seed)
        gardener.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            gardener.step(lambda model: (torch.ones(4), torch.tensor([1.0, 0.0, 1.0, 0.0])))
        grown |= {view.blueprint for view in garden.slots.values() if view.blueprint is not None}
    assert stranger in grown
