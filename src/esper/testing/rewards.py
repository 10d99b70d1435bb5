"""The conformance checks of rewards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper.lab.imagined import random_episode
from esper.leyline.signals import Signals
from esper.simic.rewards import RewardConfig, make_reward
from esper.simic.rewards.contract import Reward, RewardStep, Transition
from esper.testing.controllers import check_memory, require, same
from esper.utils.randomness import generator

_METHODS = ("reset", "step", "state_dict", "load_state_dict")
_ROUNDING = 1e-5
"""Tolerance for the last bits, which depend on the number of rows."""


def check_reward(
    reward: str | Callable[[], Reward],
    *,
    rows: Sequence[int] = (1, 4),
    slots: int = 3,
    steps: int = 30,
    seed: int = 0,
) -> None:
    """Run a reward on random episodes and raise if it breaks the protocol.

    The checks: terms are finite float32 [rows] with the same names in every step, and their sum is
    the total; rows whose episode is over get exactly 0; transitions are not changed; the memory is
    plain data and tensors, and a new reward that loads it continues with the same terms; after
    `reset` everything repeats; rows do not depend on each other.

    Args:
        reward: Its name, or a function that returns a new reward.
        rows: Numbers of rows to try.
        slots: Number of slots.
        steps: Decisions per episode.
        seed: Seed of the random episodes.

    Raises:
        AssertionError: The reward breaks the protocol; the message says where.
    """
    if isinstance(reward, str):
        factory: Callable[[], Reward] = partial(make_reward, RewardConfig(mode=reward))
    else:
        factory = reward
    made = factory()
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    require(not missing, f"{made!r} lacks the methods {', '.join(missing)}")
    require(isinstance(getattr(made, "needs_twin", None), bool), "needs_twin must be true or false")
    for count in rows:
        stream = generator(seed, count, slots, "check_reward")
        first, transitions = random_episode(count, slots, steps, stream)
        paid = _check_run(factory, first, transitions)
        _check_rows(factory, first, transitions, paid)


def _check_run(
    factory: Callable[[], Reward], first: Signals, transitions: Sequence[Transition]
) -> list[RewardStep]:
    """Check one run, its memory and its repetition; return what it paid."""
    paid: list[RewardStep] = []

    def play(reward: Reward, index: int) -> dict[str, Tensor]:
        paid.append(_checked_step(reward, transitions[index], index))
        _check_names(paid[0], paid[-1], index)
        return dict(paid[-1].terms)

    check_memory(
        factory,
        lambda reward: reward.reset(first),
        play,
        lambda reward, index: dict(reward.step(transitions[index]).terms),
        len(transitions),
    )
    return paid


def _checked_step(reward: Reward, transition: Transition, index: int) -> RewardStep:
    """Return the result of one step after checking it."""
    before = copy.deepcopy(transition)
    step = reward.step(transition)
    require(_same_fields(transition, before), f"step {index}: step() changed its transition")
    require(bool(step.terms), f"step {index}: a reward needs at least one term")
    for name, values in step.terms.items():
        where = f"step {index}, term {name!r}"
        require(
            isinstance(name, str) and bool(name) and name.isprintable(),
            f"{where}: the name of a term must be printable text, for it is shown to people",
        )
        _check_values(values, len(transition.active), where)
        require(bool(values.isfinite().all()), f"{where} is not finite: {values.tolist()}")
        idle = values[~transition.active]
        require(bool((idle == 0).all()), f"{where} pays rows whose episode is over")
    for name, values in step.details.items():
        _check_values(values, len(transition.active), f"step {index}, detail {name!r}")
    total = torch.stack(list(step.terms.values())).sum(0)
    require(torch.equal(step.total, total), f"step {index}: the total is not the sum of the terms")
    return step


def _check_names(first: RewardStep, step: RewardStep, index: int) -> None:
    """Check that a step has the terms and details that the first one had."""
    for what in ("terms", "details"):
        before, now = tuple(getattr(first, what)), tuple(getattr(step, what))
        require(
            now == before,
            f"step {index} has the {what} {', '.join(now)}, the first had {', '.join(before)}; "
            "give the same ones in every step, 0 where there is nothing",
        )


def _check_values(values: Tensor, rows: int, where: str) -> None:
    require(
        values.dtype == torch.float32 and tuple(values.shape) == (rows,),
        f"{where} must be float32 [{rows}], got {values.dtype} {list(values.shape)}",
    )


def _check_rows(
    factory: Callable[[], Reward],
    first: Signals,
    transitions: Sequence[Transition],
    paid: Sequence[RewardStep],
) -> None:
    """Check that every row is paid the same alone as among others."""
    for row in range(first.rows):
        reward = factory()
        reward.reset(first.select([row]))
        for index, transition in enumerate(transitions):
            alone = reward.step(_row(transition, row)).total
            among = paid[index].total[row : row + 1]
            require(
                torch.allclose(alone, among, rtol=_ROUNDING, atol=_ROUNDING),
                f"step {index}: row {row} is paid {alone.item():.6g} alone and "
                f"{among.item():.6g} among {first.rows} rows",
            )


def _row(transition: Transition, row: int) -> Transition:
    """Return one row of a transition."""

    def pick(value: Any) -> Any:
        if isinstance(value, Signals):
            return value.select([row])
        if isinstance(value, Tensor):
            return value[row : row + 1]
        return {name: pick(each) for name, each in value.items()}

    return Transition(
        **{each.name: pick(getattr(transition, each.name)) for each in fields(transition)}
    )


def _same_fields(one: Transition, other: Transition) -> bool:
    return all(
        same(_flat(getattr(one, field.name)), _flat(getattr(other, field.name)))
        for field in fields(one)
    )


def _flat(value: Any) -> Any:
    """Return signals as a dict, anything else as it is."""
    return value.state_dict() if isinstance(value, Signals) else value
