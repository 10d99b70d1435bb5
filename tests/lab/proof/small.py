"""Members of seconds: tiny digits networks in which seeds live fast."""

from __future__ import annotations

from esper.kasmina.hosts import CnnConfig
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.lab.population.engine import PopulationConfig
from esper.lab.proof.play import PlayConfig
from esper.lab.tasks.member import GivenMember
from esper.lab.tasks.presets import Digits

QUICK = PopulationConfig(
    lifecycle=LifecycleConfig(gates=GateConfig(min_training_epochs=1, min_gradient_health=0.0))
)


def member(width: int = 2, train_size: int | None = None, horizon: int = 12) -> GivenMember:
    """Return a digits member with two narrow blocks and epochs of 64 samples."""
    config = Digits.defaults.replace(
        host_options=CnnConfig(channels=(width, width), in_channels=1),
        samples_per_step=64,
        batch_size=32,
        validation_samples=64,
        train_size=train_size,
        horizon=horizon,
        learning_rate=0.05,
    )
    return GivenMember(f"width {width}, {train_size or 'all'} images", Digits(config))


def play_config(**changes: object) -> PlayConfig:
    """Return settings for a CPU, with limits that let tiny hosts grow."""
    base = PlayConfig(
        device="cpu",
        strategy="sequential",
        param_limit=20.0,
        flop_limit=20.0,
        rows=16,
        population=QUICK,
    )
    return base.replace(**changes)
