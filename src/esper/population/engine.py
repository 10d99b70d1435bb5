"""The one interface behind every strategy, and how a population lives.

An engine owns modules, weights and optimizer state and nothing else. Lifecycle, measurement and
signals are the population's; they are the same functions whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.kasmina.governor import GovernorConfig
from esper.kasmina.gradients import GradientSample
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.seedbed import TrainingMode
from esper.kasmina.signals import TrackerConfig
from esper.kasmina.state import SlotState
from esper.leyline.blueprints import Topology
from esper.leyline.config import Config, option
from esper.leyline.errors import EsperError


class StrategyError(EsperError, RuntimeError):
    """A host or blueprint cannot run in the strategy that was asked for."""


class MemoryLimitError(EsperError, MemoryError):
    """The rows do not fit into the device's memory."""


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """What flows at a slot of the host."""

    name: str
    path: str
    topology: Topology
    shape: tuple[int, ...]
    channels: int


@dataclass(frozen=True, slots=True)
class EpochResult:
    """What training one epoch said; tensors on the CPU."""

    loss: Tensor
    """float64 [R], mean training loss."""
    gradients: GradientSample
    """[R, S], of the last sampled batch."""
    sampled: Tensor
    """bool [R, S], where `gradients` holds."""


@dataclass(slots=True)
class RowWeights:
    """Everything an engine knows about one row, in a form every engine can take over."""

    host: dict[str, Tensor]
    host_momentum: dict[str, Tensor]
    """Empty for a network at rest; so is `seed_momentum` of a seed at rest."""
    seeds: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By slot: parameters of the seed under 'seed.' and of its gate under 'gate.'."""
    seed_momentum: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    host_buffers: dict[str, Tensor] = field(default_factory=dict)
    """What is no parameter and yet part of the network, such as running statistics."""
    seed_buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    germinations: int = 0

    def at_rest(self, seeds: Sequence[bool]) -> RowWeights:
        """Return the same without momentum, and of the seeds by slot only those named."""

        def kept(values: dict[int, Any]) -> dict[int, Any]:
            return {slot: value for slot, value in values.items() if seeds[slot]}

        own = kept(self.seeds)
        return replace(
            self,
            host_momentum={},
            seeds=own,
            seed_momentum={slot: {} for slot in own},
            seed_buffers=kept(self.seed_buffers),
        )

    def to_tree(self) -> dict[str, Any]:
        """Return plain data and tensors for a checkpoint."""
        return {
            "host": self.host,
            "host_momentum": self.host_momentum,
            "seeds": {str(slot): values for slot, values in self.seeds.items()},
            "seed_momentum": {str(slot): values for slot, values in self.seed_momentum.items()},
            "host_buffers": self.host_buffers,
            "seed_buffers": {str(slot): values for slot, values in self.seed_buffers.items()},
            "germinations": self.germinations,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RowWeights:
        """Rebuild what `to_tree` returned."""
        return cls(
            host=tree["host"],
            host_momentum=tree["host_momentum"],
            seeds={int(slot): values for slot, values in tree["seeds"].items()},
            seed_momentum={int(slot): values for slot, values in tree["seed_momentum"].items()},
            host_buffers=tree["host_buffers"],
            seed_buffers={int(slot): values for slot, values in tree["seed_buffers"].items()},
            germinations=int(tree["germinations"]),
        )


class Engine(Protocol):
    """Trains and evaluates a group of rows that share host architecture and data."""

    slots: tuple[SlotSpec, ...]
    host_params: int
    is_stacked: bool
    """Whether all rows are in memory at once, activations included."""

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and re-aim seeds as the state says; return their sizes, int64 [R, S]."""
        ...

    def train(self, epochs: Sequence[int]) -> EpochResult:
        """Train one epoch; `epochs` says which one it is for every row."""
        ...

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate plans[r] (bool [K_r, S]) of every row; return loss and correct [sum K, M].

        A row whose plan is empty is left out.
        """
        ...

    def read(self, row: int) -> RowWeights:
        """Return copies of everything this engine knows about a row."""
        ...

    def read_at_rest(self, rows: Sequence[int], seeds: Tensor) -> list[RowWeights]:
        """Return copies of some rows without momentum, with those of their `seeds`, bool [R, S].

        They may share memory with each other, not with the engine.
        """
        ...

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] says what lives in its slots."""
        ...

    def close(self) -> None:
        """Free what must be freed by hand."""
        ...


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine whose rows live elsewhere: it need not be waited for at once."""

    def announce(self, epochs: Sequence[int]) -> None:
        """Let the epoch begin that `train` is going to be asked for."""
        ...

    def read_rows(self, rows: Sequence[int]) -> list[RowWeights]:
        """Return what `read` does of several rows at once."""
        ...


def empty_sample(rows: int, slots: int) -> tuple[GradientSample, Tensor]:
    """Return a gradient sample in which nothing was sampled."""

    def none() -> Tensor:
        return torch.zeros((rows, slots), dtype=torch.bool)

    def zero() -> Tensor:
        return torch.zeros((rows, slots), dtype=torch.float64)

    return GradientSample(zero(), zero() + 1, none(), none(), zero()), none()


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
