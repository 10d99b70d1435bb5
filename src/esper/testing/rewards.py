"""The conformance battery of rewards: what every reward must hold, whatever it pays for."""

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
from esper.testing.controllers import check_plain, require, same
from esper.utils.randomness import generator

_METHODS = ("reset", "step", "state_dict", "load_state_dict")
_ROUNDING = 1e-5
"""Vectorised and single values of the same function differ in their last bits."""


def check_reward(
    reward: str | Callable[[], Reward],
    *,
    rows: Sequence[int] = (1, 4),
    slots: int = 3,
    steps: int = 30,
    seed: int = 0,
) -> None:
    """Run a reward over random episodes and raise where it breaks the protocol.

    Checked are: terms that are finite float32 [rows] under the same names in every step, and their
    sum as the total; exactly 0 in rows whose episode is over; transitions left as they were; a
    memory of plain data and tensors that, loaded into a fresh reward in mid-episode, gives the
    same payments from then on; `reset`, after which everything repeats; and rows that do not
    depend on each other.

    Args:
        reward: Its name, or what returns a new one each time it is called.
        rows: Numbers of rows to try.
        slots: Number of slots.
        steps: Decisions per episode.
        seed: Names the random episodes.

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
    """Check one run with its memory and its repetition; return what it paid."""
    middle = len(transitions) // 2
    reward = factory()
    reward.reset(first)
    paid: list[RewardStep] = []
    state: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    for index, transition in enumerate(transitions):
        if index == middle:
            state = reward.state_dict()
            check_plain(state)
            saved = copy.deepcopy(state)
        paid.append(_checked_step(reward, transition, index))
        _check_names(paid[0], paid[-1], index)
    require(same(state, saved), "state_dict() changed while the reward went on; return copies")
    restored = factory()
    restored.load_state_dict(copy.deepcopy(saved))
    _require_repeat(restored, transitions[middle:], paid[middle:], "after load_state_dict")
    reward.load_state_dict(copy.deepcopy(saved))
    _require_repeat(reward, transitions[middle:], paid[middle:], "after going back to a state")
    reward.reset(first)
    _require_repeat(reward, transitions, paid, "after reset")
    return paid


def _checked_step(reward: Reward, transition: Transition, index: int) -> RewardStep:
    """Return one step's payment after checking it."""
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
    """Check that every row alone is paid what it is paid among others."""
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


def _require_repeat(
    reward: Reward, transitions: Sequence[Transition], paid: Sequence[RewardStep], when: str
) -> None:
    for index, (transition, before) in enumerate(zip(transitions, paid, strict=True)):
        again = reward.step(transition)
        require(
            same(dict(again.terms), dict(before.terms)),
            f"{when}, step {index} paid something else than before",
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
