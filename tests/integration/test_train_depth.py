"""A controller trains on networks of one block that copies deepen, under a budget of compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.kasmina.blueprints.kin import KIN
from esper.lab.tasks.arena import Draws
from esper.lab.tasks.family import FAMILIES, Family, register_family
from esper.nissa.reader import open_run
from esper.simic.training.config import get_recipe
from esper.simic.training.recorded import start_training


@pytest.fixture
def family() -> Iterator[str]:
    """Register a family of seconds."""

    def draws(key: str, width: int) -> Draws:
        return Draws(
            key=key,
            count=2,
            data={"gpt": ("chain",)},
            width={"gpt": (width,)},
            train_size=(500,),
            label_noise=(0.0, 0.3),
            steps={"gpt": (80, 120)},
        )

    name = "tiny_depth"
    register_family(
        Family(name=name, summary="For tests.", train=draws("train", 8), select=draws("select", 6))
    )
    yield name
    FAMILIES.unregister(name)


def test_a_controller_trains_on_the_arena(family: str, tmp_path: Path) -> None:
    recipe = get_recipe("depth")
    config = recipe.replace(
        tasks=(family,),
        rounds=1,
        rows=4,
        architectures_per_round=1,
        episode_length=5,
        evaluation_seeds=2,
        device="cpu",
        strategy="sequential",
        policy=recipe.policy.replace(lstm_hidden_dim=8),
    )
    with start_training(tmp_path / "run", config, sinks=()) as run:
        assert run.carry_out()
        run.finish()
        assert KIN in run.trainer.policy.blueprint_names
    with open_run(tmp_path / "run") as stored:
        episodes = list(stored.records("episodes"))
        decisions = list(stored.records("decisions"))
    assert len(episodes) >= 4
    assert {row.task for row in episodes} <= {
        member.label
        for split in ("train", "select")
        for member in FAMILIES.get(family).members(split)
    }
    assert decisions
