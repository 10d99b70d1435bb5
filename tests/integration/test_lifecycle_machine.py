"""Random legal and illegal operations drive a garden of three slots: nothing illegal ever happens.

`World` is a garden with its optimizer, and after whatever is done to it checks all that must hold.
Hypothesis drives it in short stories, which it can shrink; a soak drives it for 10,000 operations.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.contribution import participating
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig, Outcome
from esper.kasmina.optimizer import CarriedOptimizer
from esper.kasmina.slot import SlotMode
from esper.kasmina.slot_table import OperationResult
from esper.leyline.actions import HEAD_SIZES, LifecycleOp
from esper.leyline.errors import EsperWarning
from esper.leyline.rules import Masks
from esper.leyline.stages import (
    ALPHA_TARGETS,
    BLENDED_STAGES,
    COOLDOWN_STAGES,
    MODULE_STAGES,
    TRANSITIONS,
    AlphaAlgorithm,
    AlphaMode,
    SeedStage,
)
from tests.kasmina.gardens import ResidualStack, same_state, stages
from tests.plots import carry_out, record_epoch

SLOTS = ("a", "b", "c")
TICKS_TO_FREE = 7
"""An immediate prune at decision e ends with the tick of decision e + 6: free at e + 7."""

FORWARD = (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
DEVELOPING = (SeedStage.GERMINATED, SeedStage.TRAINING)
X = torch.linspace(-1, 1, 12).reshape(3, 4)
KIN_ID = BLUEPRINTS.get(KIN).id

Action = dict[str, int]


class World:
    """A garden, its optimizer, and what must be true of them."""

    def __init__(self, config: GardenConfig) -> None:
        self.config = config
        self.garden, self.carried = self.build()
        self.hooks = self.count_hooks()
        self.operations = 0
        self.ticks_left: dict[int, int] = {}
        self.check()

    def build(self) -> tuple[Garden, CarriedOptimizer]:
        garden = Garden(ResidualStack(), SLOTS, X, config=self.config)
        optimizer = torch.optim.SGD(garden.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
        return garden, CarriedOptimizer(garden, optimizer)

    # -- what can be done --------------------------------------------------------------------------

    def operate(self, action: Action) -> OperationResult:
        """Ask for an operation, legal or not."""
        self.operations += 1
        # Whether seeds were trained is looked up by any operation, legal or not.
        self.garden.notice_training()
        garden, before = self.garden, self.garden.state
        stages_before = stages(garden)
        keys, parameters = list(garden.state_dict()), list(garden.parameters())
        legal = is_legal(garden.table.masks(), action)
        heads = {head: torch.tensor([index]) for head, index in action.items()}
        with warnings.catch_warnings():
            # Some seeds blend before they were ever trained, which a shadowed garden remarks on.
            warnings.simplefilter("ignore", EsperWarning)
            result = carry_out(garden, heads)
        assert (result.outcome is not Outcome.ILLEGAL) == legal, (action, result)
        if not result.ok:
            assert result.reason.startswith(f"{LifecycleOp(action['op']).name} at ")
            assert same_state(garden.state, before), (action, result)
            assert list(garden.state_dict()) == keys
            assert all(one is two for one, two in zip(garden.parameters(), parameters, strict=True))
        self.check_transitions(stages_before, chain=False)
        for index, stage in enumerate(stages(garden)):
            if stage is SeedStage.PRUNED and stages_before[index] is not SeedStage.PRUNED:
                self.ticks_left[index] = TICKS_TO_FREE
        self.check()
        return result

    def tick(self) -> None:
        """End the decision."""
        before = stages(self.garden)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EsperWarning)
            self.garden.tick()
        self.check_transitions(before, chain=True)
        for index in self.ticks_left:
            self.ticks_left[index] -= 1
        for index, stage in enumerate(stages(self.garden)):
            if stage is SeedStage.PRUNED:
                assert before[index] is SeedStage.BLENDING
                self.ticks_left[index] = TICKS_TO_FREE
        self.check()
        self.ticks_left = {index: left for index, left in self.ticks_left.items() if left}

    def train(self) -> None:
        """Take one optimizer step."""
        self.carried.optimizer.zero_grad()
        loss = self.garden.training_loss(lambda model: model(X).square().mean())
        assert bool(loss.isfinite())
        loss.backward()
        self.carried.optimizer.step()
        self.check()

    def record(self, score: float, *, measured: bool) -> None:
        """End the epoch, with or without an ablation."""
        garden = self.garden
        record_epoch(garden, score)
        if measured:
            members = participating(garden.state)
            garden.table.state = garden.state.where(
                members, contribution=score - 50, contribution_se=0.1, counterfactual_age=0
            )
        self.check()

    def round_trip(self) -> None:
        """Save everything, load it into a new garden, and go on with that."""
        old, state = self.garden, self.garden.state_dict()
        optimizer = self.carried.state_dict()
        self.garden, self.carried = self.build()
        self.garden.load_state_dict(state)
        self.carried.load_state_dict(optimizer)
        assert same_state(self.garden.state, old.state)
        assert list(self.garden.state_dict()) == list(state)
        for name, value in self.garden.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert torch.equal(self.garden(X), old(X))
        again = self.carried.state_dict()
        assert [group["params"] for group in again["groups"]] == [
            group["params"] for group in optimizer["groups"]
        ]
        assert again["state"].keys() == optimizer["state"].keys()
        self.check()

    # -- what must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        for index in range(len(SLOTS)):
            self.check_slot(index)
        self.check_limits()
        self.check_optimizer()
        assert self.count_hooks() == self.hooks
        for index, left in self.ticks_left.items():
            stage = stages(self.garden)[index]
            assert stage in COOLDOWN_STAGES if left else stage is SeedStage.DORMANT, (stage, left)

    def check_slot(self, index: int) -> None:
        """The modules agree with the record, and the record with itself."""
        slot, state = self.garden.seedbed[index], self.garden.state
        stage = stages(self.garden)[index]
        alpha, mode = float(state.alpha[0, index]), AlphaMode(int(state.alpha_mode[0, index]))
        gated = int(state.algorithm[0, index]) == AlphaAlgorithm.GATE
        grown = stage in MODULE_STAGES
        assert (slot.seed is not None) == grown
        assert (slot.gate is not None) == (grown and gated)
        assert float(slot.alpha) == pytest.approx(alpha)
        assert 0 <= alpha <= 1
        if stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED):
            assert alpha == 1
        elif stage is not SeedStage.BLENDING:
            assert alpha == 0
        assert mode is AlphaMode.HOLD or stage is SeedStage.BLENDING
        modes = {SeedStage.TRAINING: SlotMode.ISOLATE}
        is_copy = int(state.blueprint[0, index]) == KIN_ID and grown
        copies = 2 ** (int(state.doublings[0, index]) + 1) - 1 if is_copy else 0
        assert slot.copies == len(slot.copied_blocks) == copies <= 7
        assert not slot.sources
        blends = stage in BLENDED_STAGES and alpha > 0
        replaces = is_copy and alpha == 1 and slot.algorithm == AlphaAlgorithm.ADD
        mixed = SlotMode.REPLACE if replaces else SlotMode.BLEND
        assert slot.mode == (mixed if blends else modes.get(stage, SlotMode.PASS))
        trainable = {parameter.requires_grad for parameter in slot.parameters()}
        assert trainable <= {mode is not AlphaMode.DOWN}
        size = sum(parameter.numel() for parameter in slot.parameters())
        assert int(state.params[0, index]) == size
        assert (int(state.blueprint[0, index]) >= 0) == (stage > SeedStage.DORMANT)
        assert (stage in COOLDOWN_STAGES) == (
            index in self.ticks_left and self.ticks_left[index] > 0
        )

    def check_limits(self) -> None:
        now, rules = stages(self.garden), self.config.lifecycle.rules
        assert sum(stage in DEVELOPING for stage in now) <= 1
        if rules.max_seeds:
            assert sum(stage in MODULE_STAGES for stage in now) <= rules.max_seeds
        if self.config.max_parameters:
            assert self.garden.count_parameters() <= self.config.max_parameters
        everything = sum(parameter.numel() for parameter in self.garden.parameters())
        assert self.garden.count_parameters() == everything

    def check_optimizer(self) -> None:
        """Exactly the parameters that exist, and state of no other."""
        held = [p for group in self.carried.optimizer.param_groups for p in group["params"]]
        present = {id(parameter) for parameter in self.garden.parameters()}
        assert len(held) == len(present)
        assert {id(parameter) for parameter in held} == present
        assert {id(parameter) for parameter in self.carried.optimizer.state} <= present

    def check_transitions(self, before: list[SeedStage], *, chain: bool) -> None:
        autos = self.config.lifecycle
        forwards = autos.auto_training or autos.auto_blending or autos.auto_holding
        for index, (old, new) in enumerate(zip(before, stages(self.garden), strict=True)):
            # Gates that forward themselves may pass several at one tick, each by a legal change.
            path = [old, new]
            if chain and forwards and old in FORWARD and new in FORWARD and old < new:
                path = [stage for stage in FORWARD if old <= stage <= new]
            elif old is SeedStage.DORMANT and new is SeedStage.BLENDING:
                # A copy passes two gates with its germination.
                assert self.config.lifecycle.immediate == "auto"
                assert int(self.garden.state.blueprint[0, index]) == KIN_ID
                path = [old, *FORWARD[:3]]
            for one, two in itertools.pairwise(path):
                assert one is two or two in TRANSITIONS[one], (old, new)

    def count_hooks(self) -> int:
        return sum(
            len(hooks)
            for module in self.garden.modules()
            for hooks in (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._load_state_dict_pre_hooks,
            )
        )


def is_legal(masks: Masks, action: Action) -> bool:
    """What the masks say about an action; slots and blueprints that do not exist are illegal."""
    op, slot = LifecycleOp(action["op"]), action["slot"]
    if op is LifecycleOp.WAIT:
        return True
    if not 0 <= slot < len(SLOTS) or not bool(masks.slot_by_op[0, op, slot]):
        return False
    assert bool(masks.op[0, op])
    if op is LifecycleOp.GERMINATE:
        fitting = masks.blueprint_by_slot[0, slot]
        return 0 <= action["blueprint"] < len(fitting) and bool(fitting[action["blueprint"]])
    return True


def make_config(**choices: Any) -> GardenConfig:
    gates = {
        "kind": choices["kind"],
        "min_training_epochs": choices["min_training_epochs"],
        "min_blending_epochs": choices["min_blending_epochs"],
    }
    lifecycle = {
        "gates": gates,
        "rules": {"max_seeds": choices["max_seeds"], "min_prune_age": choices["min_prune_age"]},
        "auto_training": choices["auto_training"],
        "auto_blending": choices["auto_blending"],
        "auto_holding": choices["auto_holding"],
        "immediate": choices["immediate"],
    }
    return GardenConfig.from_mapping(
        {
            "lifecycle": lifecycle,
            "training_mode": choices["training_mode"],
            "max_parameters": choices["max_parameters"],
        }
    )


CONFIG_CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": ("permissive", "permissive", "strict"),
    "min_training_epochs": (0, 0, 2),
    "min_blending_epochs": (0, 1),
    "max_seeds": (0, 0, 1, 2),
    "min_prune_age": (0, 1, 2),
    "auto_training": (False, False, True),
    "auto_blending": (False, False, True),
    "auto_holding": (False, False, True),
    "training_mode": ("straight_through", "shadow"),
    # The host has 60 parameters, a gate 49: room for everything, for some, for next to nothing.
    "max_parameters": (0, 0, 300, 130),
    "immediate": ("auto", "auto", "none"),
}

HEADS: dict[str, tuple[int, ...]] = {
    **{head: tuple(range(size)) for head, size in HEAD_SIZES.items()},
    "slot": (-1, 0, 1, 2, 3),
    "blueprint": tuple(range(-1, KIN_ID + 2)),
}


class LifecycleMachine(RuleBasedStateMachine):
    """The same world in stories that Hypothesis tells and shrinks."""

    world: World

    @initialize(
        choices=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in CONFIG_CHOICES.items()})
    )
    def start(self, choices: dict[str, Any]) -> None:
        self.world = World(make_config(**choices))

    @rule(action=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in HEADS.items()}))
    def operate(self, action: Action) -> None:
        self.world.operate(action)

    @rule(
        slot=st.sampled_from(range(3)),
        blueprint=st.sampled_from((3, 8, 10, KIN_ID)),
        style=st.sampled_from(range(4)),
    )
    def germinate(self, slot: int, blueprint: int, style: int) -> None:
        """Without this, a story seldom gets a seed to talk about."""
        heads = {head: 0 for head in HEADS}
        op = int(LifecycleOp.GERMINATE)
        self.world.operate(
            {**heads, "op": op, "slot": slot, "blueprint": blueprint, "style": style}
        )

    @rule(slot=st.sampled_from(range(3)))
    def advance(self, slot: int) -> None:
        heads = {head: 0 for head in HEADS}
        self.world.operate({**heads, "op": int(LifecycleOp.ADVANCE), "slot": slot})

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule()
    def train(self) -> None:
        self.world.train()

    @rule(score=st.floats(0, 100), measured=st.booleans())
    def record(self, score: float, measured: bool) -> None:
        self.world.record(score, measured=measured)

    @rule()
    def round_trip(self) -> None:
        self.world.round_trip()

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestLifecycleMachine = LifecycleMachine.TestCase
TestLifecycleMachine.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    # On a busy machine a story may be slow to tell; that says nothing about the garden.
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclasses.dataclass
class Tally:
    """That the soak really went everywhere."""

    operations: int = 0
    done: int = 0
    illegal: int = 0
    gate_failed: int = 0
    reached: set[SeedStage] = dataclasses.field(default_factory=set)
    copies: set[int] = dataclasses.field(default_factory=set)
    ops: set[LifecycleOp] = dataclasses.field(default_factory=set)


def draw_action(world: World, draw: np.random.Generator) -> Action:
    """Half of the time any action, half of the time one that the masks allow."""
    action = {head: int(draw.choice(choices)) for head, choices in HEADS.items()}
    if draw.random() < 0.5:
        return action
    masks = world.garden.table.masks()
    # Waiting is what happens between operations; pruning would end most lives too soon.
    weight = masks.op[0].numpy() * np.array([0.2, 1, 1, 0.5, 1, 1])
    op = int(draw.choice(len(weight), p=weight / weight.sum()))
    slot = int(draw.choice(masks.slot_by_op[0, op].nonzero().flatten()))
    action.update(op=op, slot=slot)
    if op == LifecycleOp.GERMINATE:
        action["blueprint"] = int(draw.choice(masks.blueprint_by_slot[0, slot].nonzero().flatten()))
        if bool(masks.blueprint_by_slot[0, slot, KIN_ID]) and draw.random() < 0.3:
            # Without this, copies seldom come at full amplitude, so that they can be doubled.
            action.update(blueprint=KIN_ID, alpha_target=ALPHA_TARGETS.index(1.0))
    return action


def soak(operations: int, seed: int) -> Tally:
    draw, tally = np.random.default_rng(seed), Tally()
    while tally.operations < operations:
        choices = {k: v[int(draw.integers(len(v)))] for k, v in CONFIG_CHOICES.items()}
        world = World(make_config(**choices))
        # A life from germination to the end takes some thirty decisions; then another garden.
        for _ in range(60):
            for _ in range(int(draw.integers(1, 4))):
                action = draw_action(world, draw)
                result = world.operate(action)
                tally.done += result.outcome is Outcome.DONE
                tally.illegal += result.outcome is Outcome.ILLEGAL
                tally.gate_failed += result.outcome is Outcome.GATE_FAILED
                tally.reached.update(stages(world.garden))
                tally.copies.update(slot.copies for slot in world.garden.seedbed)
                if result.ok:
                    tally.ops.add(LifecycleOp(action["op"]))
            world.tick()
            tally.reached.update(stages(world.garden))
            if draw.random() < 0.15:
                world.train()
            if draw.random() < 0.04:
                world.round_trip()
            world.record(float(draw.uniform(40, 60)), measured=bool(draw.random() < 0.5))
        tally.operations += world.operations
    return tally


def check_tally(tally: Tally) -> None:
    assert tally.reached == set(SeedStage) - {SeedStage.UNKNOWN}
    assert tally.ops == set(LifecycleOp)
    assert tally.copies >= {0, 1, 3}
    assert min(tally.done, tally.illegal) > tally.operations // 5
    assert tally.gate_failed > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_random_operations_reach_no_illegal_state(part: int) -> None:
    """In four parts, which may run side by side; the stories alone are for every change."""
    check_tally(soak(2_500, seed=part))


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_a_hundred_thousand_random_operations_reach_no_illegal_state() -> None:
    check_tally(soak(100_000, seed=99))
