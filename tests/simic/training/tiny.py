"""A training run of seconds: tiny networks on a few digits, and a policy that acts a lot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from esper.kasmina.hosts import CnnConfig
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.lab.population.engine import PopulationConfig
from esper.lab.tasks.presets import Digits
from esper.lab.tasks.task import TASKS, register_task
from esper.leyline.rules import RulesConfig
from esper.nissa.columns import TABLES
from esper.nissa.reader import open_run
from esper.simic.agent.config import PPOConfig
from esper.simic.training.config import TrainConfig
from esper.tamiyo.networks.config import PolicyConfig

NAME = "tiny_digits"

if NAME not in TASKS:

    @register_task(NAME)
    class TinyDigits(Digits):
        """Digits with a host of two narrow blocks and epochs of 32 samples."""

        defaults = Digits.defaults.replace(
            host_options=CnnConfig(channels=(2, 2), in_channels=1),
            samples_per_step=32,
            batch_size=16,
            validation_samples=32,
        )


def tiny_config(**changes: Any) -> TrainConfig:
    """Return a run of two rounds in which seeds live, are fossilized and are pruned."""
    quick = LifecycleConfig(
        gates=GateConfig(min_training_epochs=1, min_gradient_health=0.0),
        rules=RulesConfig(min_prune_age=5),
        embargo_ticks=1,
        auto_training=True,
        auto_blending=True,
        auto_holding=True,
    )
    config = TrainConfig(
        recipe="tiny",
        tasks=(NAME,),
        rounds=2,
        rows=4,
        rows_per_seed=2,
        episode_length=9,
        seed=3,
        device="cpu",
        strategy="sequential",
        policy=PolicyConfig(num_slots=2, lstm_hidden_dim=8, initial_op_bias=(0.0,) * 6),
        ppo=PPOConfig(epochs=2),
        population=PopulationConfig(lifecycle=quick),
    )
    return config.replace(**changes)


def stored_rows(run: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of a run's store, without what identical runs may differ in."""
    found = {}
    with open_run(run) as stored:
        for name, table in TABLES.items():
            kept = [column.name for column in table.columns if not column.is_volatile]
            found[name] = [
                tuple(str(getattr(row, column)) for column in kept)
                for row in stored.records(name)
                if not getattr(row, "volatile", False)
            ]
    return found
