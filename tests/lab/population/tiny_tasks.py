"""Tiny tasks of every topology and ways to drive and compare populations of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.engine import RowWeights
from esper.kasmina.hosts import CnnConfig, MlpConfig, TransformerConfig
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.lab.population.engine import PopulationConfig, Strategy
from esper.lab.population.population import Population
from esper.lab.tasks.data import Source
from esper.lab.tasks.task import DataPath, Task, TaskConfig
from esper.leyline.actions import CAUSAL_HEADS, LifecycleOp
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.registry import WAIT, Choice, head_mask, pack_choices

HORIZON = 60

QUICK = LifecycleConfig(gates=GateConfig(min_training_epochs=1), embargo_ticks=1)
"""A life in which a seed passes its gates after one epoch and a pruned slot is soon free."""


def make_config(**changes: Any) -> PopulationConfig:
    """Return settings under which life is fast."""
    return PopulationConfig(**{"lifecycle": QUICK, **changes})


class TinyImages(Task):
    """Images of 6 x 6 in three classes; three slots."""

    name = "tiny_images"
    defaults = TaskConfig(
        host="cnn",
        host_options=CnnConfig(channels=(4, 4, 4), num_classes=3, in_channels=1, pool_layers=1),
        input_shape=(1, 6, 6),
        num_classes=3,
        batch_size=8,
        samples_per_step=14,
        validation_samples=12,
        val_fraction=0.3,
        learning_rate=0.05,
        augment="crop_flip",
        horizon=HORIZON,
        baseline_loss=1.1,
    )

    def read(self, data_path: DataPath | None) -> Source:
        rng = np.random.default_rng(1)
        y = rng.integers(0, 3, 60)
        x = rng.integers(0, 160, (60, 1, 6, 6)) + 40 * (
            y[:, None, None, None] == np.arange(3)[None, None, None, :].repeat(2, -1)
        )
        return Source("tiny images", "memory", x.astype(np.uint8), y, num_classes=3)


class TinyText(Task):
    """Sequences of 5 tokens out of 7; two slots."""

    name = "tiny_text"
    defaults = TaskConfig(
        host="transformer",
        host_options=TransformerConfig(vocab=7, dim=8, heads=2, layers=2, context=5, segments=2),
        objective="language",
        input_shape=(5,),
        num_classes=7,
        batch_size=10,
        samples_per_step=18,
        validation_samples=9,
        val_fraction=0.3,
        learning_rate=0.1,
        weight_decay=0.0,
        horizon=HORIZON,
        baseline_loss=1.95,
    )

    def read(self, data_path: DataPath | None) -> Source:
        rng = np.random.default_rng(2)
        start, step = rng.integers(0, 7, (2, 160, 1))
        x = (start + (1 + step % 2) * np.arange(6)) % 7
        return Source("tiny text", "memory", x.astype(np.uint8), None, num_classes=7)


class TinyValues(Task):
    """Five features to two real values; one slot."""

    name = "tiny_values"
    defaults = TaskConfig(
        host="mlp",
        host_options=MlpConfig(in_features=5, hidden=(6, 8), num_outputs=2, slots=("r0c1",)),
        objective="regression",
        input_shape=(5,),
        num_classes=None,
        batch_size=8,
        samples_per_step=16,
        validation_samples=10,
        val_fraction=0.3,
        learning_rate=0.05,
        horizon=HORIZON,
        baseline_loss=1.0,
    )

    def read(self, data_path: DataPath | None) -> Source:
        rng = np.random.default_rng(3)
        x = rng.standard_normal((50, 5)).astype(np.float32)
        y = np.stack([np.tanh(x[:, 0] * x[:, 1]), np.abs(x[:, 2])], 1).astype(np.float32)
        return Source("tiny values", "memory", x, y)


MIXED: tuple[type[Task], ...] = (TinyImages, TinyText, TinyValues)
"""One task of every topology, with three, two and one slot."""


def make_population(
    tasks: Sequence[type[Task] | Task] = MIXED,
    rows: int | Sequence[int] = 3,
    strategy: Strategy = "sequential",
    *,
    seed: int = 3,
    row_seeds: Sequence[int] | None = None,
    **config: Any,
) -> Population:
    """Return a population of tiny tasks on the CPU."""
    made = [task if isinstance(task, Task) else task() for task in tasks]
    settings = make_config(**config)
    return Population(
        made, rows, seed, "cpu", strategy, config=settings, row_seeds=row_seeds, horizon=HORIZON
    )


@contextmanager
def populations(*made: Population) -> Iterator[tuple[Population, ...]]:
    """Close populations at the end of a block."""
    try:
        yield made
    finally:
        for one in made:
            one.close()


# -- acting ---------------------------------------------------------------------------------------

_LEANINGS = {
    LifecycleOp.WAIT: 1.0,
    LifecycleOp.GERMINATE: 6.0,
    LifecycleOp.SET_ALPHA_TARGET: 1.0,
    LifecycleOp.PRUNE: 0.3,
    LifecycleOp.FOSSILIZE: 0.7,
    LifecycleOp.ADVANCE: 6.0,
}


class Explorer:
    """Draws legal actions that lean towards growth; blueprints and styles take turns.

    `lived` collects what was really blended: {(topology, blueprint)}, and the styles of those.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._used: dict[tuple[str, str, int], int] = {}
        self._seeds: dict[tuple[int, int], tuple[str, int, int]] = {}
        self.lived: set[tuple[str, int]] = set()
        self.styles: set[int] = set()
        self.ops: set[int] = set()

    def act(self, population: Population, signals: Signals) -> dict[str, Tensor]:
        masks = population.masks()
        self._watch(signals)
        topologies = [population.tasks[index].topology for index in population.task_of_row]
        choices = [self._choose(masks, row, topologies[row]) for row in range(masks.rows)]
        return pack_choices(choices, masks)

    def _choose(self, masks: Masks, row: int, topology: str) -> Choice:
        ops = masks.op[row].nonzero().flatten().tolist()
        weights = torch.tensor([_LEANINGS[LifecycleOp(op)] for op in ops])
        op = ops[int(torch.multinomial(weights, 1, generator=self._generator))]
        self.ops.add(op)
        choice = {"op": op}
        for head in CAUSAL_HEADS[LifecycleOp(op)][1:]:
            allowed = head_mask(masks, row, head, op, choice.get("slot", 0)).nonzero().flatten()
            choice[head] = self._pick(allowed.tolist(), topology, head, op)
        if op == LifecycleOp.GERMINATE:
            self._seeds[row, choice["slot"]] = (topology, choice["blueprint"], choice["style"])
        return choice

    def _pick(self, allowed: list[int], topology: str, head: str, op: int) -> int:
        if op == LifecycleOp.GERMINATE and head in ("blueprint", "style"):
            turn = {index: self._turn(topology, head, index) for index in allowed}
            allowed = [index for index in allowed if turn[index] == min(turn.values())]
        drawn = int(torch.randint(len(allowed), (1,), generator=self._generator))
        if op == LifecycleOp.GERMINATE:
            key = (topology, head, allowed[drawn])
            self._used[key] = self._used.get(key, 0) + 1
        return allowed[drawn]

    def _turn(self, topology: str, head: str, index: int) -> tuple[bool, int]:
        lived = head == "blueprint" and (topology, index) in self.lived
        return lived, self._used.get((topology, head, index), 0)

    def _watch(self, signals: Signals) -> None:
        for row, slot in (signals.alpha > 0).nonzero().tolist():
            topology, blueprint, style = self._seeds[row, slot]
            self.lived.add((topology, blueprint))
            self.styles.add(style)


def explore(population: Population, steps: int, seed: int = 0) -> Script:
    """Live through random legal actions; return them with what was seen."""
    explorer, signals = Explorer(seed), population.reset()
    actions, seen = [], [signals]
    for _ in range(steps):
        actions.append(explorer.act(population, signals))
        signals = population.step(actions[-1])
        seen.append(signals)
    return Script(actions, seen, explorer)


@dataclasses.dataclass
class Script:
    """What a population did and saw."""

    actions: list[dict[str, Tensor]]
    seen: list[Signals]
    explorer: Explorer

    def replay(self, population: Population) -> list[Signals]:
        """Do the same in another population."""
        return [population.reset(), *(population.step(actions) for actions in self.actions)]


def do(population: Population, *choices: Choice) -> Signals:
    """Let the first rows do these things and the others wait, for one step."""
    rest = [WAIT] * (population.rows - len(choices))
    return population.step(pack_choices([*choices, *rest], population.masks()))


def germinate(blueprint: str, slot: int = 0, style: int = 0, **heads: int) -> Choice:
    return {
        "op": LifecycleOp.GERMINATE,
        "slot": slot,
        "blueprint": BLUEPRINTS.get(blueprint).id,
        "style": style,
        "tempo": 0,
        "alpha_target": 2,
        **heads,
    }


def advance(slot: int = 0) -> Choice:
    return {"op": LifecycleOp.ADVANCE, "slot": slot}


# -- comparing ------------------------------------------------------------------------------------

_EXACT = ("alpha", "alpha_start", "alpha_target", "blend_target")
"""Real numbers of a slot's state that no engine computes."""


def read_row(population: Population, row: int) -> RowWeights:
    group, place = population.locate(row)
    return group.engine.read(place)


def row_state(population: Population, row: int) -> dict[str, Tensor]:
    """Return everything remembered about a row but its weights."""
    group, place = population.locate(row)
    found = {f"slot {k}": v[0] for k, v in group.state.select([place]).state_dict().items()}
    found |= {f"tracker {k}": v[place] for k, v in group.tracker.state_dict().items()}
    found |= {f"governor {k}": v[place] for k, v in group.governor.state_dict().items()}
    for name in ("last_op", "last_success", "rolled_back", "train_loss"):
        found[name] = getattr(group, name)[place]
    return found


def row_tree(population: Population, row: int) -> dict[str, Any]:
    """Return all there is about a row, for a comparison bit by bit."""
    return {"state": row_state(population, row), "weights": read_row(population, row).to_tree()}


def assert_close(
    one: Tensor, other: Tensor, tolerance: float, what: str, scale: float = 0.0
) -> None:
    """Compare to a tolerance relative to the tensor's scale, or a larger one; NaN equals NaN."""
    assert one.shape == other.shape, what
    assert torch.equal(torch.isfinite(one), torch.isfinite(other)), what
    one, other = one.double().nan_to_num(0, 0, 0), other.double().nan_to_num(0, 0, 0)
    scale = max([scale, *one.abs().flatten().tolist(), *other.abs().flatten().tolist()])
    worst = float((one - other).abs().max()) if one.numel() else 0.0
    assert worst <= tolerance * scale, f"{what}: {worst:.3g} at a scale of {scale:.3g}"


def assert_rows_agree(
    one: Population,
    other: Population,
    tolerance: float,
    rows: Mapping[int, int] | None = None,
    *,
    least: float = 0.0,
) -> None:
    """Compare rows: whole numbers and amplitudes exactly, real numbers to the tolerance.

    It is relative to a tensor's scale, and to `least` where that scale is less (a parameter that
    has just left zero is a sum in which everything cancels).
    """
    for mine, theirs in (rows or {row: row for row in range(one.rows)}).items():
        a, b = row_state(one, mine), row_state(other, theirs)
        for name in a:
            if not a[name].is_floating_point() or name.removeprefix("slot ") in _EXACT:
                assert torch.equal(a[name], b[name]), (mine, name, a[name], b[name])
            else:
                # A difference of scores is as exact as the scores are.
                part = name.startswith(("slot contribution", "slot interaction"))
                scale = float(a["tracker best_score"].abs()) if part else least
                assert_close(a[name], b[name], tolerance, f"row {mine}, {name}", scale)
        x, y = read_row(one, mine), read_row(other, theirs)
        assert x.germinations == y.germinations
        a, b = x.to_tree(), y.to_tree()
        for name in ("host", "host_moments", "seeds", "seed_moments"):
            _assert_weights(a[name], b[name], tolerance, f"row {mine}, {name}", least)


def _assert_weights(one: Any, other: Any, tolerance: float, what: str, least: float) -> None:
    assert one.keys() == other.keys(), what
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert_close(value, other[name], tolerance, f"{what} {name}", least)
        elif isinstance(value, int):
            assert value == other[name], f"{what} {name}"
        else:
            _assert_weights(value, other[name], tolerance, f"{what} {name}", least)
