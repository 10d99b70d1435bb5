"""Speed of acting and learning of the policy, against a reference in the same run.

`PolicyWork` measures the policy as it is used: a rollout step from packed weights or a CUDA graph,
and the forward and backward pass of one update over whole episodes. The references do the same:
`PlainWork` step by step with the same network, `RecurrentPPOWork` by sb3-contrib.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import mean, median
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.hosts import CnnConfig
from esper.lab.bench import Comparison, compare, now, take_turns
from esper.lab.population.engine import PopulationConfig, Strategy
from esper.lab.population.population import Population
from esper.lab.tasks import DataCache, Task, get_task
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.simic.training.config import get_recipe
from esper.simic.training.row_source import TaskRows
from esper.simic.training.vectorized import Trainer
from esper.tamiyo.controllers import RandomController
from esper.tamiyo.networks.decision import Scores
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.policy_step import CapturedPolicyStep, rollout_step
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.reference import plain_reports
from esper.utils.process import choose_device

Situation = tuple[Signals, Masks]
"""Signals and masks of all rows at one step."""

_STEPS_TOGETHER = 40
"""Rollout steps timed together, because one is too short to time."""
_CLIP, _VALUE_WEIGHT, _ENTROPY_WEIGHT = 0.2, 0.5, 0.01


class Work(Protocol):
    """A policy that acts in rows of episodes and learns from them."""

    name: str
    parameters: int

    def step(self) -> None:
        """Choose the actions of all rows at one step."""

    def update(self) -> None:
        """Run the forward and backward pass of one update over the whole batch."""


class PolicyWork:
    """Esper's policy on recorded episodes.

    Args:
        situations: signals and masks of the rows, one entry per step.
        hidden: width of the network.
        device: where it runs.
    """

    name = "esper"

    def __init__(self, situations: Sequence[Situation], hidden: int, device: str = "cpu") -> None:
        """Act through the episodes once; the update scores these actions."""
        signals = situations[0][0]
        self.rows, self.steps = signals.rows, len(situations)
        self.hidden, self.device = hidden, device
        self.policy = FactoredRecurrentActorCriticV2(
            num_slots=signals.num_slots, lstm_hidden_dim=hidden
        ).to(device)
        self.inputs = self.policy.config.input_dim
        self.parameters = sum(weight.numel() for weight in self.policy.parameters())
        config = SlotConfig.of(signals.num_slots)
        seen = [batch_obs_to_features(each, config, device) for each, _ in situations]
        self.states = torch.stack([states for states, _ in seen], 1)
        self.blueprints = torch.stack([blueprints for _, blueprints in seen], 1)
        legal = [masks.to(device) for _, masks in situations]
        taken, memory = [], self.policy.initial_hidden(self.rows)
        for at, masks in enumerate(legal):
            taken.append(self._act(at, masks, memory))
            self.now = (masks, memory)
            memory = taken[-1].hidden
        self.actions = torch.stack([step.actions for step in taken], 1)
        self.masks = torch.stack([step.masks for step in taken], 1)
        self.log_probs = torch.stack([step.log_probs for step in taken], 1)
        self.advantages = torch.randn(self.rows, self.steps).to(device)
        self.returns = torch.randn(self.rows, self.steps).to(device)
        self._fast = rollout_step(self.policy, self.rows)

    def step(self) -> None:
        """Choose the last step's actions from packed weights, or on a GPU by a captured graph."""
        masks, memory = self.now
        self._fast(self.states[:, -1], masks, self.blueprints[:, -1], hidden=memory)

    def plain_step(self) -> None:
        """Choose the last step's actions by `get_action`."""
        self._act(-1, *self.now)

    def update(self) -> None:
        """Score all episodes in one call, and run the backward pass."""
        self.policy.zero_grad()
        scores = self.policy.score(
            self.states, self.blueprints, self.actions, self.masks, with_baseline=False
        )
        self.loss(scores).backward()

    def loss(self, scores: Scores) -> Tensor:
        """Return the loss of a first pass of PPO."""
        ratio = (scores.log_probs - self.log_probs).sum(-1).exp()
        errors, entropies = self.returns - scores.values, scores.entropies.sum(-1)
        return ppo_losses(ratio, self.advantages, errors, entropies).mean()

    def _act(self, at: int, masks: Masks, memory: Any) -> Any:
        return self.policy.get_action(
            self.states[:, at], masks, self.blueprints[:, at], hidden=memory
        )


PLAIN_STEPS = "plain steps"
"""Name of the reference without further packages: the same network, one step at a time."""


class PlainWork:
    """The same network without optimisations: `get_action`, and scoring step by step."""

    name = PLAIN_STEPS

    def __init__(self, work: PolicyWork) -> None:
        """Share the network and the episodes of another."""
        self._work = work
        self.parameters = work.parameters

    def step(self) -> None:
        """Choose the actions of one step by `get_action`."""
        self._work.plain_step()

    def update(self) -> None:
        """Score the episodes step by step, and run the backward pass."""
        work = self._work
        work.policy.zero_grad()
        scores = score_by_steps(
            work.policy.score, work.states, work.blueprints, work.actions, work.masks
        )
        work.loss(scores).backward()


def ppo_losses(ratio: Tensor, advantages: Tensor, errors: Tensor, entropies: Tensor) -> Tensor:
    """Return the loss of PPO at every step, from the joint ratio and the errors of the critic."""
    clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
    gain = torch.minimum(advantages * ratio, advantages * clipped)
    return _VALUE_WEIGHT * errors.square() - gain - _ENTROPY_WEIGHT * entropies


def score_by_steps(
    score: Callable[..., Scores],
    states: Tensor,
    blueprint_indices: Tensor,
    actions: Tensor,
    masks: Tensor,
) -> Scores:
    """Return the scores of whole episodes, without the baseline, computed step by step."""
    hidden, steps = None, []
    for at in range(states.shape[1]):
        here = (each[:, at : at + 1] for each in (states, blueprint_indices, actions, masks))
        steps.append(score(*here, hidden, with_baseline=False))
        hidden = steps[-1].hidden
    whole = {
        each.name: torch.cat([getattr(step, each.name) for step in steps], 1)
        for each in fields(Scores)
        if each.name != "hidden"
    }
    return Scores(**whole, hidden=steps[-1].hidden)


def compare_policies(ours: PolicyWork, reference: Work, *, rounds: int) -> list[Comparison]:
    """Compare step and update, and the plain step unless the reference is `PlainWork`."""
    pairs: dict[str, tuple[Callable[[], None], Callable[[], None], int]] = {
        "step": (ours.step, reference.step, _STEPS_TOGETHER),
        "plain_step": (ours.plain_step, reference.step, _STEPS_TOGETHER),
        "update": (ours.update, reference.update, 1),
    }
    if isinstance(reference, PlainWork):
        del pairs["plain_step"]
    return [
        compare(
            name,
            own,
            theirs,
            against=reference.name,
            rounds=rounds,
            calls=calls,
            device=ours.device,
        )
        for name, (own, theirs, calls) in pairs.items()
    ]


def compare_captured(ours: PolicyWork, *, rounds: int) -> Comparison:
    """Compare a step by a CUDA graph with `get_action`, with masks prepared for both."""
    masks, hidden = ours.now
    rows = ours.rows
    state, blueprints = ours.states[:, -1], ours.blueprints[:, -1]
    legal = ours.policy.table.row_masks(masks, (rows,))
    graph = CapturedPolicyStep(ours.policy, rows)
    return compare(
        "captured_step",
        lambda: graph(state, legal, blueprints, hidden=hidden),
        lambda: ours.policy.get_action(state, legal, blueprints, hidden=hidden),
        against="get_action",
        rounds=rounds,
        calls=100,
        device="cuda",
    )


# ---- Time of an observation: all rows together, against the readable reference row by row


_CALLS = 20
"""Extractions timed together; the reference is timed once in the same turn."""


@dataclass(frozen=True, slots=True)
class ExtractionTiming:
    """Time of one observation."""

    rows: int
    slots: int
    occupied: float
    """Share of slots with a seed; an empty slot costs the reference almost nothing."""
    extraction_us: float
    """Microseconds per row, of all rows together."""
    reference_us: float
    """Microseconds per row, one by one from plain floats."""
    ratio: float
    """Speed-up, the median over the turns."""


def time_extraction(signals: Signals, turns: int) -> ExtractionTiming:
    """Time both implementations on these signals."""
    slots = SlotConfig.of(signals.num_slots)
    reports = plain_reports(signals, slots)
    pairs = take_turns(
        lambda: batch_obs_to_features(signals, slots),
        lambda: batch_obs_to_features(*reports, slots),
        rounds=turns,
        calls=_CALLS,
    )
    per_row = 1e6 / signals.rows
    return ExtractionTiming(
        rows=signals.rows,
        slots=slots.num_slots,
        occupied=float(signals.occupied.float().mean()),
        extraction_us=per_row * median(ours.cpu for ours, _ in pairs),
        reference_us=per_row * median(theirs.cpu for _, theirs in pairs),
        ratio=median(theirs.cpu / ours.cpu for ours, theirs in pairs),
    )


# ---- Rows of several architectures against as many rows of one: the cost of a family


CHANNELS = ((2, 4, 4), (4, 8, 8), (6, 8), (8, 8))
"""Channels of the four hosts."""


def measure_family(
    task: str,
    *,
    rows: int | None = None,
    device: str = "auto",
    strategy: Strategy = "auto",
    use_bf16: bool = False,
    samples: int | None = None,
    rounds: int = 2,
    steps: int = 8,
) -> dict[str, Any]:
    """Time a population of a family and one of each host in turns; return times and ratio.

    Args:
        task: task with the data and settings of the hosts.
        rows: rows of every population; by default 16 on a CPU and 256 on a GPU.
        device: where rows run.
        strategy: how rows run.
        use_bf16: run hosts in BF16.
        samples: samples of an epoch; the task's by default.
        rounds: number of rounds; the first is not timed.
        steps: steps of every round.
    """
    here = choose_device(device)
    rows = rows or (16 if here.type == "cpu" else 256)
    cache = DataCache(device=here)
    casts: dict[str, Sequence[tuple[int, ...]]] = {
        "family": CHANNELS,
        **{"-".join(map(str, channels)): [channels] for channels in CHANNELS},
    }
    populations: dict[str, Population] = {}
    times: dict[str, list[float]] = {name: [] for name in casts}
    captures: dict[str, list[int]] = {name: [] for name in casts}
    try:
        for number in range(rounds):
            signals, controllers = {}, {}
            for name, cast in casts.items():
                tasks = make_tasks(task, cast, len(CHANNELS), number, samples)
                data = [cache.load(task) for task in tasks]
                if name not in populations:
                    populations[name] = Population(
                        tasks,
                        rows,
                        1,
                        str(here),
                        strategy,
                        data=data,
                        config=PopulationConfig(use_bf16=use_bf16),
                    )
                else:
                    populations[name].assign(tasks, rows, data)
                signals[name] = populations[name].reset(range(number * rows, (number + 1) * rows))
                controllers[name] = RandomController(5)
                controllers[name].reset(rows, here)
            for _ in range(steps):
                for name, population in populations.items():
                    started = now(here)
                    actions = controllers[name].act(signals[name], population.masks())
                    signals[name] = population.step(actions)
                    if number:
                        times[name].append(now(here) - started)
            for name, population in populations.items():
                captures[name].append(
                    sum(getattr(group.engine, "captures", 0) for group in population.groups)
                )
        ran = populations["family"].strategy
    finally:
        for population in populations.values():
            population.close()
    alone = [mean(step) for step in zip(*(times[name] for name in list(casts)[1:]), strict=True)]
    ratios = [mine / theirs for mine, theirs in zip(times["family"], alone, strict=True)]
    return {
        "device": str(here),
        "strategy": ran,
        "steps": len(ratios),
        "cost": median(ratios),
        "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "populations": [
            {
                "host": name,
                "rows": rows,
                "step_ms": 1e3 * median(times[name]),
                "row_epochs_per_s": rows / median(times[name]),
                "captures": captures[name][-1],
                "later_captures": captures[name][-1] - captures[name][0],
            }
            for name in casts
        ],
    }


def make_tasks(
    name: str,
    hosts: Sequence[tuple[int, ...]],
    conditions: int,
    number: int,
    samples: int | None = None,
) -> list[Task]:
    """Return the tasks of a round: every host under conditions that depend on the round."""
    base = get_task(name)
    options = base.config.host_options
    assert isinstance(options, CnnConfig), "hosts of this benchmark are convolutional"
    tasks = []
    for channels in hosts:
        for each in range(conditions):
            turn = number + each
            config = base.config.replace(
                host_options=CnnConfig(channels=channels, in_channels=options.in_channels),
                train_size=(None, 600, 200)[turn % 3],
                label_noise=(0.0, 0.1, 0.3, 0.0)[turn % 4],
                samples_per_step=samples or base.config.samples_per_step,
                learning_rate=base.config.learning_rate * (0.5, 1.0, 2.0)[turn % 3],
            )
            tasks.append(type(base)(config))
    return tasks


@dataclass(frozen=True, slots=True)
class RoundRate:
    """Times of a round of a recipe; medians over the timed rounds."""

    recipe: str
    rows: int
    rounds: int
    first_s: float
    """The first round, which compiles and captures graphs for the others."""
    round_s: float
    twins_s: float
    """Training of twins alone; on a GPU those of the next round train beside the episodes."""
    episodes_s: float
    update_s: float
    images: int
    """Training samples of rows and twins in a round."""

    @property
    def images_per_s(self) -> float:
        """Training samples per second."""
        return self.images / self.round_s

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "images_per_s": self.images_per_s}


def measure_rounds(
    recipe: str, rounds: int, device: str = "auto", rows: int | None = None
) -> RoundRate:
    """Train some rounds after a first one, and return their times; every round trains twins.

    Args:
        recipe: name of the recipe; its data must be available.
        rounds: number of timed rounds.
        device: where it runs.
        rows: parallel episodes; the recipe's by default.
    """
    # One round more than are played, so that the last one also trains twins of the next.
    config = get_recipe(recipe).replace(
        device=choose_device(device).type, rounds=rounds + 2, evaluate_every=0, twin_rounds=1
    )
    config = config if rows is None else config.replace(rows=rows)
    trainer = Trainer(config)
    times: list[float] = []
    parts: list[Mapping[str, float]] = []
    started = time.perf_counter()
    try:
        for report in trainer.run(rounds + 1):
            times.append(time.perf_counter() - started)
            parts.append(report.timings)
            started = time.perf_counter()
        images = count_images(trainer)
    finally:
        trainer.close()

    def typical(*names: str) -> float:
        return median(sum(part[name] for name in names) for part in parts[1:])

    return RoundRate(
        recipe=recipe,
        rows=config.rows,
        rounds=rounds,
        first_s=times[0],
        round_s=median(times[1:]),
        twins_s=typical("twins"),
        episodes_s=typical("population", "policy", "reward"),
        update_s=typical("update"),
        images=images,
    )


def count_images(trainer: Trainer) -> int:
    """Return the number of training samples of the rows of a round and their twins."""
    source, config = trainer.row_source, trainer.config
    assert isinstance(source, TaskRows), "a recipe trains on tasks"
    groups = {group.label: group.task for group in source.groups(0, 0)}
    plan = source.plan(0, 0)
    rows = list(zip(plan.tasks, plan.env_seeds, strict=True))
    twins = set(rows) if trainer.twins is not None else set()

    def samples(label: str) -> int:
        own = groups[label].config
        return min(own.horizon, config.epochs) * own.samples_per_step

    return sum(samples(label) for label, _ in [*rows, *twins])
