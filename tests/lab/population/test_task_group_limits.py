"""Limits of parameters and operations bind in every strategy, and signals say what is so."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from esper.kasmina.blueprints.registry import BLUEPRINTS, drawn_names, selectable
from esper.kasmina.costs import gate_flops, seed_flops, seed_parameters
from esper.kasmina.flops import count_flops
from esper.kasmina.garden import Garden
from esper.kasmina.training import rate_factor
from esper.lab.population.engine import Strategy
from esper.lab.population.population import Population
from esper.lab.population.sequential import find_slots
from esper.lab.population.task_group import condition_rates
from esper.lab.tasks.task import Task
from esper.leyline.actions import LifecycleOp, decode_actions
from esper.leyline.rules import Refusal
from esper.leyline.slots import TOPOLOGIES
from esper.leyline.stages import BlendStyle
from esper.tamiyo.controllers.registry import Choice, pack_choices
from tests.lab.population.tiny_tasks import (
    HORIZON,
    MIXED,
    TinyImages,
    TinyText,
    do,
    explore,
    germinate,
    make_config,
    make_population,
    populations,
)

pytestmark = pytest.mark.usefixtures("kept_processes")

STRATEGIES: tuple[Strategy, ...] = ("sequential", "stacked", "workers")
GATED = int(BlendStyle.GATED_GATE)
LIGHT, HEAVY = BLUEPRINTS.get("conv_light").id, BLUEPRINTS.get("conv_heavy").id


def cost_of(task: Task, blueprint: str, what: str, slot: int = 0) -> int:
    """The most that such a seed can come to cost, gate included."""
    place = find_slots(task.build_host(0), task, make_config())[slot]
    seed = BLUEPRINTS.get(blueprint)
    if what == "param":
        return seed_parameters(seed, place.channels, place.topology)
    return seed_flops(seed, place.topology, place.shape) + gate_flops(place.topology, place.shape)


def limited(what: str, room: int) -> TinyImages:
    """A task whose networks may cost exactly this much more than the host."""
    host = TinyImages().host_parameters if what == "param" else TinyImages().host_flops
    ratio = (host + room + 0.5) / host
    return TinyImages(TinyImages.defaults.replace(**{f"{what}_limit": ratio}))


def refusals(population: Population, *choices: Choice) -> list[Refusal]:
    """Ask for something in every row; return why it was refused."""
    (group,) = population.groups
    command = decode_actions(pack_choices(choices, population.masks()))
    return [Refusal(value) for value in group.act(command).refusal.tolist()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", ["param", "flop"])
def test_what_fits_exactly_is_allowed_and_one_more_is_refused(
    strategy: Strategy, what: str
) -> None:
    room = cost_of(TinyImages(), "conv_light", what)
    for spare, fits in ((0, True), (-1, False)):
        task = limited(what, room + spare)
        with populations(make_population([task], 2, strategy)) as (population,):
            signals = population.reset()
            limit = getattr(signals, f"{what}_limit")
            host = signals.host_params if what == "param" else signals.host_flops
            assert (limit - host).tolist() == [room + spare] * 2
            masks = population.masks()
            assert masks.blueprint_by_slot[:, 0, LIGHT].tolist() == [fits] * 2
            assert not bool(masks.blueprint_by_slot[:, 0, HEAVY].any())
            # The first row asks for what just fits or not, the second for what never does.
            asked = [germinate("conv_light", style=GATED), germinate("conv_heavy")]
            told = refusals(population, *asked)
            assert told[1] is Refusal.BLUEPRINT_DOES_NOT_FIT
            assert (told[0] is Refusal.NONE) is fits
            if not fits:
                assert told[0] is Refusal.BLUEPRINT_DOES_NOT_FIT
                continue
            signals = do(population)
            used = signals.params if what == "param" else signals.flops
            assert int(used[0]) == int(limit[0])
            assert not bool(population.masks().op[0, LifecycleOp.GERMINATE])


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_whatever_is_done_no_row_ever_exceeds_its_limits(strategy: Strategy) -> None:
    tasks = [task(task.defaults.replace(param_limit=2.5, flop_limit=3.0)) for task in MIXED]
    with populations(make_population(tasks, 6, strategy)) as (population,):
        script = explore(population, 30)
        grown = torch.zeros(6, dtype=torch.bool)
        for signals in script.seen:
            assert bool((signals.params <= signals.param_limit).all())
            assert bool((signals.flops <= signals.flop_limit).all())
            grown |= signals.params > signals.host_params
        assert bool(grown.all()), "limits that nobody tries prove nothing"


def test_rows_of_other_tasks_have_other_limits() -> None:
    bound = TinyImages(TinyImages.defaults.replace(param_limit=1.0))
    with populations(make_population([bound, TinyText], 2)) as (population,):
        signals = population.reset()
        assert signals.param_limit.tolist() == [bound.host_parameters, -1]
        assert signals.flop_limit.tolist() == [-1, -1]
        assert population.masks().op[:, LifecycleOp.GERMINATE].tolist() == [False, True]


def test_rows_of_one_stack_have_limits_of_their_own() -> None:
    room = cost_of(TinyImages(), "conv_light", "flop")
    tasks = [limited("flop", room), limited("flop", room - 1), TinyImages()]
    with populations(make_population(tasks, 3, "stacked")) as (population,):
        population.reset()
        assert len(population.groups) == 1
        assert population.masks().blueprint_by_slot[:, 0, LIGHT].tolist() == [True, False, True]
        assert population.masks().blueprint_by_slot[:, 0, HEAVY].tolist() == [False, False, True]


def flops_now(population: Population, row: int) -> int:
    """Operations of one sample, counted on a real network with the same seeds."""
    group, place = population.locate(row)
    task = population.tasks[population.task_of_row[row]]
    garden = Garden(task.build_host(0), task.slot_paths, task.example_input(1))
    garden.sync(group.state.select([place]))
    for slot in garden.seedbed:
        # Whatever a seed's stage is, it counts as it will when it is blended.
        slot.mode = 2 if slot.seed is not None else 0
        slot.alpha.fill_(0.5)
    return count_flops(garden, task.example_input(1)).total


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_signals_are_what_one_finds_by_looking(strategy: Strategy) -> None:
    with populations(make_population(MIXED, 3, strategy)) as (population,):
        population.reset()
        signals = do(
            population,
            germinate("conv_heavy", 2, GATED),
            germinate("attention", 1),
            germinate("lora", 0, GATED),
        )
        for row, task in enumerate(population.tasks):
            group, place = population.locate(row)
            data, slots = group.conditions[place].data, group.engine.slots
            count = len(slots)
            assert int(signals.host_flops[row]) == task.host_flops > 0
            assert int(signals.flops[row]) == flops_now(population, row)
            added = signals.flops[row] - signals.host_flops[row]
            assert int(signals.slot_flops[row].sum()) == int(added) > 0
            assert int(signals.train_samples[row]) == data.size("train")
            assert int(signals.samples_per_epoch[row]) == data.samples_per_step
            assert int(signals.num_classes[row]) == (task.config.num_classes or 0)
            assert math.isclose(
                float(signals.chance_loss[row]), task.config.baseline_loss, rel_tol=1e-6
            )
            assert math.isclose(
                float(signals.train_loss[row]), float(group.train_loss[place]), rel_tol=1e-6
            )
            assert signals.slot_channels[row, :count].tolist() == [s.channels for s in slots]
            topologies = [TOPOLOGIES[i] for i in signals.slot_topology[row, :count].tolist()]
            assert topologies == [slot.topology for slot in slots]
            for index, slot in enumerate(slots):
                positions = math.prod(slot.shape[1:]) // slot.channels
                assert int(signals.slot_positions[row, index]) == positions
                for choice, name in enumerate(drawn_names()):
                    wanted = (-1, -1)
                    if choice in selectable(slot.topology):
                        kinds = ("param", "flop")
                        wanted = tuple(cost_of(task, name, kind, index) for kind in kinds)  # type: ignore[assignment]
                    found = (signals.seed_params, signals.seed_flops)
                    assert tuple(int(cost[row, index, choice]) for cost in found) == wanted


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_signals_say_the_rate_of_the_next_epoch(schedule: Any) -> None:
    task = TinyImages(TinyImages.defaults.replace(schedule=schedule))
    with populations(make_population([task], 2)) as (population,):
        signals = population.reset()
        for epoch in range(1, 6):
            expected = rate_factor(task.config, epoch + 1, HORIZON)
            assert signals.rate_factor.tolist() == pytest.approx([expected] * 2)
            assert signals.learning_rate.tolist() == pytest.approx([0.05 * expected] * 2)
            signals = do(population)
        rates = condition_rates(population.groups[0].conditions)
    last = rate_factor(task.config, HORIZON, HORIZON)
    # Rows may be in different epochs, and after the end nothing moves.
    shares, _ = rates(torch.tensor([1, HORIZON + 5]))
    assert shares.tolist() == pytest.approx([rate_factor(task.config, 1, HORIZON), last])


def test_a_ratio_below_the_host_is_refused() -> None:
    for name in ("param_limit", "flop_limit"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            dataclasses.replace(TinyImages.defaults, **{name: 0.5})
