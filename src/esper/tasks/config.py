"""`TaskConfig`: everything that defines a task apart from the data itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from esper.kasmina.hosts import HOSTS
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError
from esper.tasks.augment import Augmentation
from esper.tasks.dataset import VALIDATION_SAMPLES
from esper.tasks.objective import ObjectiveName


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Config):
    """A host, how it is trained, and how its data is prepared."""

    host: str = option(help="Name of the host.")
    host_options: Config = option(help="Options of the host, in its own class.")
    input_shape: tuple[int, ...] = option(
        help="Shape of one sample: channels, height, width; or features; or tokens.", minimum=1
    )
    num_classes: int | None = option(
        10, "Number of classes or distinct tokens; empty for real targets.", minimum=1
    )
    objective: ObjectiveName = option("classification", "What is predicted.")

    batch_size: int = option(64, "Samples in one optimizer step.", minimum=1)
    samples_per_step: int = option(4096, "Samples in one epoch, that is, one decision.", minimum=1)
    horizon: int = option(150, "Epochs of one whole run.", minimum=1)
    learning_rate: float = option(0.01, "Learning rate of SGD.", above=0.0)
    momentum: float = option(0.9, "Momentum of SGD.", minimum=0.0, maximum=0.9999)
    weight_decay: float = option(5e-4, "Weight decay of SGD.", minimum=0.0)
    max_grad_norm: float = option(
        1.0, "Gradient norm to which the host and each seed are clipped, apart.", above=0.0
    )

    augment: Augmentation = option("none", "How training images are varied.")
    train_size: int | None = option(
        None, "Keep only this many training samples; all if empty.", minimum=1
    )
    label_noise: float = option(
        0.0, "Share of the training labels replaced by another class.", minimum=0.0, maximum=1.0
    )
    val_fraction: float = option(
        0.1, "Share of the training data set aside for validation.", above=0.0, maximum=0.9
    )
    test_fraction: float = option(
        0.1,
        "Share set aside for testing where no official test split exists.",
        above=0.0,
        maximum=0.9,
    )
    validation_samples: int = option(
        VALIDATION_SAMPLES, "Fixed validation samples scored after every epoch.", minimum=1
    )

    param_budget: int = option(500_000, "Parameters that count as a full budget.", minimum=1)
    baseline_loss: float = option(2.3, "Loss of a network that knows nothing.", above=0.0)
    target_loss: float = option(0.3, "Loss that counts as solved.", minimum=0.0)

    def __post_init__(self) -> None:
        """Check the rules that span several fields."""
        super().__post_init__()
        expected = HOSTS.get(self.host).config_class
        if not isinstance(self.host_options, expected):
            raise ConfigError(
                f"TaskConfig.host_options of host {self.host!r} must be a {expected.__name__}, "
                f"got a {type(self.host_options).__name__}"
            )
        if (self.num_classes is None) != (self.objective == "regression"):
            raise ConfigError(
                f"TaskConfig.num_classes must be empty for regression and only there, "
                f"got {self.num_classes!r} for {self.objective}"
            )
        if self.baseline_loss <= self.target_loss:
            raise ConfigError(
                f"TaskConfig.target_loss must be below baseline_loss ({self.baseline_loss}), "
                f"got {self.target_loss}"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build the configuration from plain data; the host's own class reads its options."""
        values = dict(mapping)
        options, host = values.get("host_options"), values.get("host")
        if isinstance(options, Mapping) and isinstance(host, str):
            values["host_options"] = HOSTS.get(host).config_class.from_mapping(options)
        return super().from_mapping(values)
