"""Members whose best depth cannot be known beforehand, drawn by a generator.

A `DepthMember` starts shallow and has a budget of training FLOPs. How many samples it has, how many
of their labels are wrong, and how hard its data is, decides whether more depth pays; no controller
is told. What may be known is `DepthMember.descriptors`: the kind and size of the network, the shape
of its input, and the budget in steps of the network that it starts with.

*train* and *select* members are drawn by seeds in this file. *claim* members are drawn by the
SHA-256 of the weights of the controller that is judged, so they exist only once it is final.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from esper.kasmina.flops import PASSES_OF_TRAINING
from esper.kasmina.hosts import ResnetConfig, TcnConfig, TransformerConfig, VitConfig
from esper.lab.tasks.data.text import FOLDED
from esper.lab.tasks.task import Task, TaskConfig, get_task
from esper.leyline.config import Config
from esper.utils.randomness import derive_seed, generator

NetworkKind = Literal["resnet", "vit", "gpt", "tcn"]
HOSTS_OF: dict[NetworkKind, str] = {
    "resnet": "resnet",
    "vit": "vit",
    "gpt": "transformer",
    "tcn": "tcn",
}
assert set(HOSTS_OF) == set(get_args(NetworkKind))

RATES: dict[NetworkKind, float] = {"resnet": 1e-2, "vit": 4e-3, "gpt": 4e-3, "tcn": 1e-2}
"""Learning rate of AdamW by kind of network."""

HORIZON = 60
"""Decisions of a run, at equal shares of its budget."""
BATCH: dict[NetworkKind, int] = {"resnet": 16, "vit": 16, "gpt": 4, "tcn": 4}
TEXT_KINDS: frozenset[NetworkKind] = frozenset({"gpt", "tcn"})
CONTEXT = 32
"""Tokens of a sample of text."""
KERNEL = 3
"""Tokens that a convolution over text sees: one block sees four back, four see sixteen."""
VALIDATION_SAMPLES: dict[NetworkKind, int] = {"resnet": 256, "vit": 256, "gpt": 8, "tcn": 8}
"""Samples that end an epoch; a text has 32 predictions in each."""
_TEXT_SHARES = {"val_fraction": 0.01, "test_fraction": 0.01}
"""A text has a hundred thousand samples; these shares are enough to score it."""
DEEPEST = 4.0
"""Largest network, as a multiple of the one that a member starts with: one block becomes four."""

SETTINGS: dict[str, Any] = {
    "play.param_limit": DEEPEST,
    "play.flop_limit": DEEPEST,
    "play.keep": "best",
    "play.population.copies": True,
    "play.population.ablate_every": 20,
}
"""Settings of searches, clones and proofs on these members."""
SEARCH_SETTINGS: dict[str, Any] = {
    "space": "doublings",
    "heuristics": 0,
    "depths": (2, 4),
    "hidden": 0.8,
    "lessons": 4,
    "lessons_from": 0.03,
    "price": 0.0,
}
"""The heuristic grows seeds of other kinds, so its settings are not searched. Compute is what a
plan costs, and all have the same, so that depth has no price."""
CLONE_SETTINGS: dict[str, Any] = {"policy.layout": "ratios", "smoothing": 0.02}
"""Observations tell no sizes, and PPO can go on from the clone."""
PROOF_SETTINGS: dict[str, Any] = {
    "wilcoxon": True,
    "reported": ("privileged", "static", "scratch"),
}
"""A few members with large effects must not carry a verdict; and rules that choose by descriptors
(`contextual`) are controls like any other."""


class DepthArchitecture(NamedTuple):
    """Values that members must share to run as one stack."""

    kind: NetworkKind
    width: int
    stages: int
    input_shape: tuple[int, ...]
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class DepthMember:
    """A network of one block a stage, its data, and a budget of compute.

    Attributes:
        kind: Residual CNN, vision transformer, or transformer for text.
        data: Name of the task whose data it uses.
        width: Channels of the first stage, or width of the residual stream.
        stages: Stages of a CNN, each with a slot; transformers have one.
        level: How hard a computed text is; 0 for the task's own, and for other data.
        classes: Classes to classify; empty for all.
        train_size: Training samples; 0 is all there are.
        label_noise: Share of the training labels, or next bytes, that are wrong.
        steps: The budget, in training steps of the network that it starts with.
    """

    kind: NetworkKind
    data: str
    width: int
    stages: int = 1
    level: int = 0
    classes: tuple[int, ...] = ()
    train_size: int = 0
    label_noise: float = 0.0
    steps: int

    @property
    def label(self) -> str:
        """A name that lists all values, usual ones left out."""
        size = f"{self.width}" if self.stages == 1 else f"{self.width}x{self.stages}"
        parts = [f"{self.data}{self.level or ''} {self.kind} {size}"]
        if self.classes:
            parts.append(f"classes {'-'.join(map(str, self.classes))}")
        parts.append(f"{self.train_size} samples" if self.train_size else "all samples")
        if self.label_noise:
            parts.append(f"noise {self.label_noise:g}")
        return ", ".join([*parts, f"{self.steps} steps"])

    @property
    def horizon(self) -> int:
        """Decisions of a run."""
        return HORIZON

    @property
    def num_slots(self) -> int:
        """Number of slots: one for each stage."""
        return self.stages

    @property
    def learning_rate(self) -> float:
        """Highest learning rate of a run."""
        return RATES[self.kind]

    @property
    def architecture(self) -> DepthArchitecture:
        """The values that its network depends on."""
        config = get_task(self.data).config
        assert config.num_classes is not None, "members classify, or predict bytes"
        classes, shape = len(self.classes) or config.num_classes, config.input_shape
        if self.kind in TEXT_KINDS:
            classes, shape = FOLDED, (CONTEXT,)
        return DepthArchitecture(self.kind, self.width, self.stages, shape, classes)

    def task(self, **changes: object) -> Task:
        """Return the task, with some fields of its configuration changed."""
        base = get_task(self.data)
        _, _, _, shape, classes = self.architecture
        config: TaskConfig = base.config.replace(
            host=HOSTS_OF[self.kind],
            host_options=self._host_options(),
            input_shape=shape,
            num_classes=classes,
            level=self.level or None,
            classes=self.classes or None,
            baseline_loss=max(math.log(classes), base.config.target_loss + 0.1),
            train_size=self.train_size or None,
            label_noise=self.label_noise,
            batch_size=BATCH[self.kind],
            samples_per_step=BATCH[self.kind],
            validation_samples=VALIDATION_SAMPLES[self.kind],
            horizon=HORIZON,
            optimizer="adamw",
            learning_rate=self.learning_rate,
            weight_decay=0.05,
            **(_TEXT_SHARES if self.kind in TEXT_KINDS else {}),
            schedule="wsd",
            warmup=0.02,
            decay=0.2,
            param_limit=DEEPEST,
            flop_limit=DEEPEST,
        )
        # Evaluations of the network that it starts with come on top, so that short budgets train.
        start = type(base)(config)
        samples = (
            PASSES_OF_TRAINING * BATCH[self.kind] * self.steps + HORIZON * config.validation_samples
        )
        return type(base)(config.replace(budget=float(samples * start.host_flops), **changes))

    def descriptors(self) -> dict[str, float]:
        """Return what may be known of it before it is trained; nothing tells about its data."""
        task, kinds = self.task(), get_args(NetworkKind)
        return {
            **{f"is_{kind}": float(kind == self.kind) for kind in kinds},
            "log_parameters": math.log2(task.host_parameters),
            "log_inputs": math.log2(math.prod(task.config.input_shape)),
            "slots": float(self.num_slots),
            "log_budget": math.log2(self.steps),
        }

    def _host_options(self) -> Config:
        _, width, stages, shape, classes = self.architecture
        if self.kind == "gpt":
            return TransformerConfig(
                vocab=classes, dim=width, heads=2, layers=1, context=CONTEXT, segments=1
            )
        if self.kind == "tcn":
            return TcnConfig(vocab=classes, dim=width, kernel_size=KERNEL)
        channels, side = shape[0], min(shape[1:])
        if self.kind == "vit":
            return VitConfig(
                image_size=side, patch=2, in_channels=channels, dim=width, num_classes=classes
            )
        widths = tuple(width * 2**stage for stage in range(stages))
        return ResnetConfig(channels=widths, in_channels=channels, num_classes=classes)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Members that a generator draws: equally many of every kind of network and its data sets.

    Attributes:
        key: What the draws depend on.
        count: Number of members.
        data: Names of tasks by kind of network.
        width: Widths by kind.
        stages: Stages of CNNs.
        levels: Levels of computed texts, by name of the task.
        classes: Classes of images.
        train_size: Training samples.
        label_noise: Shares of wrong labels.
        steps: Least and largest budget by kind, in steps; in between they are drawn by ratio.
    """

    key: str
    count: int
    data: Mapping[NetworkKind, tuple[str, ...]]
    width: Mapping[NetworkKind, tuple[int, ...]]
    stages: tuple[int, ...] = (1,)
    levels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    classes: tuple[tuple[int, ...], ...] = ((),)
    train_size: tuple[int, ...]
    label_noise: tuple[float, ...]
    steps: Mapping[NetworkKind, tuple[int, int]]

    def items(self) -> list[tuple[str, tuple[object, ...]]]:
        """Return every axis with its values."""
        found: list[tuple[str, tuple[object, ...]]] = [("kind", tuple(self.data))]
        for name in ("data", "width", "steps"):
            by_kind = getattr(self, name)
            found.append((name, tuple(dict.fromkeys(v for own in by_kind.values() for v in own))))
        found += [(f"level of {name}", values) for name, values in self.levels.items()]
        names = ("stages", "classes", "train_size", "label_noise")
        return found + [(name, getattr(self, name)) for name in names]

    def members(self) -> tuple[DepthMember, ...]:
        """Return the members; they depend on the fields alone."""
        found: dict[str, DepthMember] = {}
        kinds, number = list(self.data), 0
        first = derive_seed(self.key, "first data set")
        while len(found) < self.count:
            turn, place = divmod(len(found), len(kinds))
            known = self.data[kinds[place]]
            member = self._draw(kinds[place], known[(first + turn) % len(known)], number)
            found.setdefault(member.label, member)
            number += 1
        return tuple(found.values())

    def with_key(self, key: str) -> Draws:
        """Return the same generator with another key."""
        return dataclasses.replace(self, key=key)

    def _draw(self, kind: NetworkKind, data: str, number: int) -> DepthMember:
        stream = generator(0, self.key, number, "arena")
        draw = partial(_pick, stream)
        least, most = self.steps[kind]
        share = float(torch.rand((), generator=stream, dtype=torch.float64))
        steps = least * (most / least) ** share
        is_image = kind not in TEXT_KINDS
        return DepthMember(
            kind=kind,
            data=data,
            level=draw(self.levels.get(data, (0,))),
            width=draw(self.width[kind]),
            stages=draw(self.stages) if kind == "resnet" else 1,
            classes=draw(self.classes) if is_image else (),
            train_size=draw(self.train_size),
            label_noise=draw(self.label_noise),
            # Two digits, so that rounding of powers cannot differ between machines.
            steps=int(float(f"{steps:.1e}")),
        )


def _pick(stream: torch.Generator, values: tuple[Any, ...]) -> Any:
    return values[int(torch.randint(len(values), (), generator=stream))]
