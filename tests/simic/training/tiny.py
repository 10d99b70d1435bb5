"""A training run of seconds: tiny networks on a few digits, and a policy that acts a lot.

As a program (`python -m tests.simic.training.tiny [STRATEGY] RUN`) it starts the run in a folder,
or continues the one that is there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from esper.kasmina.gates import GateConfig
from esper.kasmina.hosts import CnnConfig
from esper.kasmina.lifecycle import LifecycleConfig
from esper.leyline.errors import EsperError
from esper.leyline.rules import RulesConfig
from esper.nissa.columns import TABLES
from esper.nissa.reader import open_run
from esper.population.engine import PopulationConfig
from esper.runs.training import resume_training, start_training
from esper.simic.agent.config import PPOConfig
from esper.simic.training.config import TrainConfig
from esper.tamiyo.networks.config import PolicyConfig
from esper.tasks.presets import Digits
from esper.tasks.task import TASKS, register_task

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


def main() -> None:
    """Start or continue the run in the folder that is named."""
    torch.set_num_threads(1)
    strategy, folder = sys.argv[1:] if len(sys.argv) > 2 else ("sequential", sys.argv[1])
    config = tiny_config(checkpoint_seconds=0.01, strategy=strategy)
    try:
        if (Path(folder) / "config.yaml").exists():
            run = resume_training(folder, sinks=())
        else:
            run = start_training(folder, config, sinks=())
        with run:
            if run.carry_out():
                run.finish()
    except EsperError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
