"""How a population lives: lifecycle, measurement, governor, and the strategy that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.seedbed import TrainingMode
from esper.kasmina.tracking import TrackerConfig
from esper.leyline.config import Config, option
from esper.population.governor import GovernorConfig

Strategy = Literal["auto", "sequential", "stacked", "workers"]


@dataclass(frozen=True, kw_only=True)
class PopulationConfig(Config):
    """Settings shared by all rows."""

    lifecycle: LifecycleConfig = option(LifecycleConfig, "The life of a seed.")
    tracker: TrackerConfig = option(TrackerConfig, "When a host counts as stuck or settled.")
    governor: GovernorConfig = option(GovernorConfig, "When a row is rolled back.")
    training_mode: TrainingMode = option(
        "straight_through", "How a seed in TRAINING learns while the host is left alone."
    )
    precision: Literal["float32", "float64"] = option("float32", "Precision of the weights.")
    use_bf16: bool = option(False, "Run hosts in BF16; weights and statistics stay as they are.")
    use_graphs: bool = option(True, "Capture training and validation in CUDA graphs.")
    rows_per_stack: int = option(
        128,
        "Most rows trained as one stack; more are several stacks, one after another.",
        minimum=1,
    )
    workers: int = option(
        0, "Processes of the workers strategy; 0 is one for every core.", minimum=0
    )


EXECUTION_SETTINGS = frozenset({"use_bf16", "use_graphs", "rows_per_stack", "workers"})
"""Settings that change how rows are executed, not what they are."""
