"""What every strategy of a population is, an engine with known slots; and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from esper.kasmina.engine import EvaluatedEngine
from esper.kasmina.row_group import RowConfig
from esper.kasmina.seedbed import TrainingMode
from esper.leyline.blueprints import Topology
from esper.leyline.config import option
from esper.leyline.errors import EsperError
from esper.leyline.symmetry import Symmetry
from esper.tasks.splits import Split


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
    symmetry: Symmetry = "bidirectional"
    """What the host makes of the order of positions."""


class PopulationEngine(EvaluatedEngine, Protocol):
    """An engine over rows of one architecture, each under its own condition.

    A row rests after the horizon of its task: an epoch beyond it changes nothing of the row.
    """

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """What flows at every slot of the host."""

    @property
    def is_stacked(self) -> bool:
        """Whether all rows are in memory at once, activations included."""

    def score(self, split: Split) -> Tensor:
        """Return float64 [R, 2]: score in points and loss of every row on a whole split.

        It is for the end of an evaluation; nothing that learns or decides may see the test split.
        """

    def close(self) -> None:
        """Free what must be freed by hand."""


Strategy = Literal["auto", "sequential", "stacked", "workers"]


@dataclass(frozen=True, kw_only=True)
class PopulationConfig(RowConfig):
    """Settings shared by all rows."""

    training_mode: TrainingMode = option(
        "straight_through", "How a seed in TRAINING learns while the host is left alone."
    )
    precision: Literal["float32", "float64"] = option("float32", "Precision of the weights.")
    use_bf16: bool = option(False, "Run hosts in BF16; weights and statistics stay as they are.")
    use_graphs: bool = option(True, "Capture training and validation in CUDA graphs.")
    rows_per_stack: int = option(
        1024,
        "Most rows trained as one stack; more are several stacks, one after another.",
        minimum=1,
    )
    workers: int = option(
        0, "Processes of the workers strategy; 0 is one for every core.", minimum=0
    )


EXECUTION_SETTINGS = frozenset({"use_bf16", "use_graphs", "rows_per_stack", "workers"})
"""Settings that change how rows are executed, not what they are."""
