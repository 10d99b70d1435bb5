"""Columns of the tables with every step of recorded rows: decisions, epochs, slots, seeds.

They are read from whole tensors; only the few seeds are visited one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import (
    HEAD_NAMES,
    HEAD_VALUES,
    HeadValue,
    causal_table,
    describe_action,
    head_values,
)
from esper.leyline.rules import is_in
from esper.leyline.stages import BLENDED_STAGES, MODULE_STAGES, SeedStage
from esper.simic.training.outcome import RoundOutcome, panic_names

_ALTERNATIVES = 2

_STAGE_NAMES = {int(stage): stage.name for stage in SeedStage}


def detail_columns(outcome: RoundOutcome, blueprints: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the columns of recorded rows, by table."""
    rows = torch.tensor(list(outcome.recorded_rows), dtype=torch.int64)
    if not len(rows):
        return {}
    states = outcome.recorded_states
    steps = torch.arange(states["epoch"].shape[1])
    lived = steps <= outcome.lengths[rows].unsqueeze(1)
    return {
        "seed_stages": _stages(outcome, rows, lived, blueprints),
        "contributions": _contributions(outcome, rows, lived),
        "seeds": _seeds(outcome, rows, blueprints),
        "decisions": _decisions(outcome, rows, blueprints),
        "epochs": _epochs(outcome, rows, lived),
    }


def _decisions(outcome: RoundOutcome, rows: Tensor, blueprints: Sequence[str]) -> dict[str, Any]:
    """Return the columns of `decisions`, one value per decision."""
    detail, decisions = outcome.recorded_decisions, outcome.decisions
    active = outcome.active[rows]
    row_index, step_index = active.nonzero(as_tuple=True)
    actions = detail["actions"][active]
    causal = causal_table()[actions[:, HEAD_NAMES.index("op")]]
    took_effect = decisions["took_effect"][rows][active].tolist()
    effective = decisions["effective_op"][rows][active].tolist()
    meanings = [head_values(_slot_names(outcome, int(row)), blueprints) for row in rows]
    columns: dict[str, Any] = {
        "round": outcome.round,
        "row": rows[row_index].tolist(),
        "step": (step_index + 1).tolist(),
        "took_effect": took_effect,
        "outcome": ["done" if done else "gate_failed" for done in took_effect],
        "effective_op": [HEAD_VALUES["op"][index] for index in effective],
        "forced": (~decisions["free"][rows][active]).tolist(),
        "log_prob": detail["log_probs"][active].sum(-1).tolist(),
        "value": detail["value"][active].tolist(),
        "q_taken": detail["q_taken"][active].tolist(),
        "potential": detail["potential"][active].tolist(),
        "reward": decisions["reward"][rows][active].tolist(),
        "reward_normalized": outcome.rewards_in_units[rows][active].tolist(),
        "reward_terms": _by_name(outcome.term_names, decisions["terms"][rows][active]),
    }
    if outcome.detail_names:
        columns["reward_details"] = _by_name(
            outcome.detail_names, decisions["details"][rows][active]
        )
    chosen = [
        describe_action(dict(zip(HEAD_NAMES, indices, strict=True)), meanings[row])
        for row, indices in zip(row_index.tolist(), actions.tolist(), strict=True)
    ]
    log_probs = detail["choice_log_probs"][active].gather(-1, actions.unsqueeze(-1))
    likely = log_probs.squeeze(-1).exp()
    valid = detail["valid"][active]
    for place, head in enumerate(HEAD_NAMES):
        columns[head] = [choice[head] for choice in chosen]
        columns[f"valid_{head}"] = valid[:, place].tolist()
        columns[f"confidence_{head}"] = likely[:, place].tolist()
    columns["alternatives"] = _alternatives(
        detail["choice_log_probs"][active],
        actions,
        causal,
        [meanings[row] for row in row_index.tolist()],
    )
    return columns


def _by_name(names: Sequence[str], values: Tensor) -> list[dict[str, float]]:
    """Return one mapping per decision from [decisions, names], without NaN.

    A float32 has seven digits; adding 0 turns -0 into 0.
    """
    return [
        {
            name: float(f"{value:.7g}") + 0.0
            for name, value in zip(names, row, strict=True)
            if not math.isnan(value)
        }
        for row in values.tolist()
    ]


_SAME = ("train_loss", "val_loss", "val_score", "best_score", "twin_score", "stabilized")
_OF_EPOCHS = {
    "step": "epoch",
    **{name: name for name in (*_SAME, "plateau_epochs", "flops", "host_flops")},
    "parameters": "params",
    "host_parameters": "host_params",
}
"""Columns of `epochs` and the states that they hold."""

_OF_STAGES = {
    **{name: name for name in ("alpha", "alpha_target", "epochs_in_stage", "age")},
    **{name: name for name in ("contribution", "contribution_se", "grad_norm", "grad_health")},
    "parameters": "slot_params",
    "flops": "slot_flops",
}
"""Columns of `seed_stages` and the states that they hold."""


def _epochs(outcome: RoundOutcome, rows: Tensor, lived: Tensor) -> dict[str, Any]:
    states = outcome.recorded_states
    row_index, _ = lived.nonzero(as_tuple=True)
    with_module = is_in(states["stage"], MODULE_STAGES).sum(-1)
    return {
        "round": outcome.round,
        "row": rows[row_index].tolist(),
        **{column: states[name][lived].tolist() for column, name in _OF_EPOCHS.items()},
        "live_seeds": with_module[lived].tolist(),
        "rollback_reason": panic_names(outcome.states["panic"][rows][lived]),
    }


def _stages(
    outcome: RoundOutcome, rows: Tensor, lived: Tensor, blueprints: Sequence[str]
) -> dict[str, Any]:
    states = outcome.recorded_states
    stage = states["stage"]
    shown = lived.unsqueeze(-1) & states["occupied"]
    before = torch.cat([torch.full_like(stage[:, :1], -1), stage[:, :-1]], dim=1)

    def values(name: str) -> list[Any]:
        return states[name][shown].tolist()

    return {
        **_places(outcome, rows, shown),
        "stage": [_STAGE_NAMES[value] for value in values("stage")],
        "entered": (before != stage)[shown].tolist(),
        "blueprint": [blueprints[kind] if kind >= 0 else None for kind in values("blueprint")],
        **{column: values(name) for column, name in _OF_STAGES.items()},
        "improvement": _improvement(outcome, rows)[shown].tolist(),
        "interaction": states["interaction"].sum(-1)[shown].tolist(),
    }


def _places(outcome: RoundOutcome, rows: Tensor, shown: Tensor) -> dict[str, Any]:
    """Return row, epoch and slot of each chosen entry of [recorded rows, states, slots]."""
    row_index, _, slot_index = shown.nonzero(as_tuple=True)
    epoch = outcome.recorded_states["epoch"].unsqueeze(-1).expand_as(shown)
    row, slots = rows[row_index].tolist(), slot_index.tolist()
    return {
        "round": outcome.round,
        "row": row,
        "step": epoch[shown].tolist(),
        "ordinal": slots,
        "slot": [_slot_names(outcome, r)[s] for r, s in zip(row, slots, strict=True)],
    }


def _improvement(outcome: RoundOutcome, rows: Tensor) -> Tensor:
    """Return [recorded rows, states, slots]: change of the score since germination, or NaN."""
    germinated, score = outcome.seeds.germinated[rows], outcome.recorded_states["val_score"]
    steps = torch.arange(germinated.shape[1]).view(1, -1, 1)
    born = torch.where(germinated, steps, -1).cummax(1).values
    # A seed that germinates by decision t is present from state t + 1 on.
    born = torch.cat([torch.full_like(born[:, :1], -1), born], dim=1)
    scores = score.unsqueeze(-1).expand_as(born)
    return torch.where(born >= 0, scores - scores.gather(1, born.clamp(min=0)), torch.nan)


def _contributions(outcome: RoundOutcome, rows: Tensor, lived: Tensor) -> dict[str, Any]:
    """Return the contributions measured in each epoch, of seeds that are blended."""
    states = outcome.recorded_states
    shown = lived.unsqueeze(-1) & is_in(states["stage"], BLENDED_STAGES)
    shown &= (states["counterfactual_age"] == 0) & ~states["contribution"].isnan()
    return {
        **_places(outcome, rows, shown),
        "kind": ["leave_one_out"] * int(shown.sum()),
        "value": states["contribution"][shown].tolist(),
        "se": states["contribution_se"][shown].tolist(),
    }


def _seeds(outcome: RoundOutcome, rows: Tensor, blueprints: Sequence[str]) -> dict[str, Any]:
    """Return the columns of `seeds`, one value per seed of the recorded rows."""
    states, seeds = outcome.recorded_states, outcome.seeds
    found: list[dict[str, Any]] = []
    for index, row in enumerate(rows.tolist()):
        names, length = _slot_names(outcome, row), int(outcome.lengths[row])
        born = seeds.germinated[row].nonzero().tolist()
        for ordinal, (step, slot) in enumerate(born):
            later = [other for other, place in born if place == slot and other > step]
            until = min(later, default=length)
            fossil = _first(seeds.fossilized[row, step:until, slot])
            pruned = _first(seeds.pruned[row, step:until, slot])
            end = fossil if fossil is not None else pruned
            stop = until if end is None else step + end
            # State t + 1 follows decision t; the last measurement counts.
            life = slice(step + 1, max(step, stop) + 2 if end != 0 else step + 2)
            worth = _last_known(states["contribution"][index, life, slot])
            error = _last_known(states["contribution_se"][index, life, slot])
            stage = int(states["stage"][index, stop if end is None else stop + 1, slot])
            fate = _STAGE_NAMES.get(stage, "DORMANT").lower()
            score = states["val_score"][index]
            if end is not None:
                fate = "pruned" if fossil is None else "fossilized"
            found.append(
                {
                    "row": row,
                    "ordinal": ordinal,
                    "slot": names[slot],
                    "blueprint": blueprints[int(seeds.blueprint[row, step, slot])],
                    "germinated": step + 1,
                    "ended": None if end is None else stop + 1,
                    "fate": fate,
                    "parameters": int(states["slot_params"][index, life, slot].max()),
                    "flops": int(states["slot_flops"][index, life, slot].max()),
                    "contribution": worth,
                    "contribution_se": error,
                    "improvement": float(score[min(stop, length)] - score[step]),
                }
            )
    columns = {name: [seed[name] for seed in found] for name in (found[0] if found else ())}
    return {"round": outcome.round, "row": [], **columns}


def _first(events: Tensor) -> int | None:
    steps = events.nonzero()
    return int(steps[0]) if len(steps) else None


def _last_known(values: Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known[-1]) if len(known) else None


def _slot_names(outcome: RoundOutcome, row: int) -> Sequence[str]:
    return outcome.slot_names[outcome.tasks[row]]


def _alternatives(
    log_probs: Tensor,
    actions: Tensor,
    causal: Tensor,
    meanings: Sequence[Mapping[str, Sequence[HeadValue]]],
) -> list[dict[str, list[list[Any]]]]:
    """Return the two likeliest other choices, by decision and by head that it used."""
    others = log_probs.scatter(-1, actions.unsqueeze(-1), -torch.inf)
    best, index = others.topk(_ALTERNATIVES, dim=-1)
    chances = best.exp().tolist()
    picks, used = index.tolist(), causal.tolist()
    return [
        {
            head: [
                [meaning[head][choice], round(chance, 4)]
                for choice, chance in zip(picks[at][place], chances[at][place], strict=True)
                if chance > 1e-6
            ]
            for place, head in enumerate(HEAD_NAMES)
            if used[at][place]
        }
        for at, meaning in enumerate(meanings)
    ]
