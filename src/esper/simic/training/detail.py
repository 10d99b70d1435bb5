"""Some rows in full: their decisions, epochs, slots, seeds and contributions as columns.

Everything is looked up in tables over whole tensors; nothing here is computed step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, LifecycleOp, causal_table
from esper.leyline.alpha import ALPHA_TARGETS, SPEED_TICKS, TEMPO_EPOCHS, AlphaCurve, BlendStyle
from esper.leyline.rules import is_in
from esper.leyline.stages import BLENDED_STAGES, MODULE_STAGES, SeedStage
from esper.nissa.columns import TABLES
from esper.simic.training.outcome import RoundOutcome

_ALTERNATIVES = 2

_MEANINGS: dict[str, Sequence[Any]] = {
    "style": [style.name for style in BlendStyle],
    "tempo": TEMPO_EPOCHS,
    "alpha_target": ALPHA_TARGETS,
    "alpha_speed": SPEED_TICKS,
    "alpha_curve": [curve.name for curve in AlphaCurve],
    "op": [op.name for op in LifecycleOp],
}
"""What the indices of a head mean, for heads that mean the same everywhere."""

_DECISION_COLUMNS = frozenset(TABLES["decisions"].names)
_STAGE_NAMES = {int(stage): stage.name for stage in SeedStage}


def detail_columns(outcome: RoundOutcome, blueprints: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the columns of every table that has whole episodes of the recorded rows, by table."""
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
    """Return what was decided, why and what it paid, one value per decision."""
    detail, decisions = outcome.recorded_decisions, outcome.decisions
    active = outcome.active[rows]
    row_index, step_index = active.nonzero(as_tuple=True)
    actions = detail["actions"][active]
    op = actions[:, HEAD_NAMES.index("op")]
    causal = causal_table()[op]
    success = decisions["success"][rows][active]
    effective = decisions["effective_op"][rows][active]
    names = [_slot_names(outcome, int(row)) for row in rows]
    columns: dict[str, Any] = {
        "round": outcome.round,
        "row": rows[row_index].tolist(),
        "step": (step_index + 1).tolist(),
        "success": success.tolist(),
        "outcome": ["done" if done else "gate_failed" for done in success.tolist()],
        "effective_op": [LifecycleOp(index).name for index in effective.tolist()],
        "forced": (~decisions["free"][rows][active]).tolist(),
        "log_prob": detail["log_probs"][active].sum(-1).tolist(),
        "value": detail["value"][active].tolist(),
        "q_taken": detail["q_taken"][active].tolist(),
    }
    chosen = _chosen_probabilities(detail["choice_log_probs"][active], actions)
    valid = detail["valid"][active]
    for head, name in enumerate(HEAD_NAMES):
        used, index = causal[:, head].tolist(), actions[:, head].tolist()
        if name == "slot":
            meant = [names[row][at] for row, at in zip(row_index.tolist(), index, strict=True)]
        else:
            meanings = blueprints if name == "blueprint" else _MEANINGS[name]
            meant = [meanings[at] for at in index]
        columns[name] = [
            what if is_used else None for what, is_used in zip(meant, used, strict=True)
        ]
        columns[f"valid_{name}"] = valid[:, head].tolist()
        columns[f"confidence_{name}"] = chosen[:, head].tolist()
    columns["alternatives"] = _alternatives(
        detail["choice_log_probs"][active], actions, causal, row_index, names, blueprints
    )
    reward = decisions["reward"]
    paid = {"reward": reward, "reward_normalized": reward / outcome.reward_units.reshape(-1, 1)}
    for place, name in enumerate(outcome.term_names):
        paid[f"reward_{name}"] = decisions["terms"][..., place]
    for place, name in enumerate(outcome.detail_names):
        paid[name] = decisions["details"][..., place]
    columns |= {
        name: values[rows][active].tolist()
        for name, values in paid.items()
        if name in _DECISION_COLUMNS
    }
    return columns


def _epochs(outcome: RoundOutcome, rows: Tensor, lived: Tensor) -> dict[str, Any]:
    states = outcome.recorded_states
    row_index, _ = lived.nonzero(as_tuple=True)
    with_module = is_in(states["stage"], MODULE_STAGES).sum(-1)
    return {
        "round": outcome.round,
        "row": rows[row_index].tolist(),
        "step": states["epoch"][lived].tolist(),
        "val_loss": states["val_loss"][lived].tolist(),
        "val_score": states["val_score"][lived].tolist(),
        "best_score": states["best_score"][lived].tolist(),
        "twin_score": states["twin_score"][lived].tolist(),
        "stabilized": states["stabilized"][lived].tolist(),
        "plateau_epochs": states["plateau_epochs"][lived].tolist(),
        "parameters": states["params"][lived].tolist(),
        "host_parameters": states["host_params"][lived].tolist(),
        "live_seeds": with_module[lived].tolist(),
    }


def _stages(
    outcome: RoundOutcome, rows: Tensor, lived: Tensor, blueprints: Sequence[str]
) -> dict[str, Any]:
    states = outcome.recorded_states
    stage = states["stage"]
    shown = lived.unsqueeze(-1) & states["occupied"]
    before = torch.cat([torch.full_like(stage[:, :1], -1), stage[:, :-1]], dim=1)
    row_index, _, slot = shown.nonzero(as_tuple=True)
    names = [_slot_names(outcome, int(row)) for row in rows]
    epoch = states["epoch"].unsqueeze(-1).expand_as(stage)

    def values(name: str) -> list[Any]:
        return states[name][shown].tolist()

    kinds = values("blueprint")
    return {
        "round": outcome.round,
        "row": rows[row_index].tolist(),
        "step": epoch[shown].tolist(),
        "ordinal": slot.tolist(),
        "slot": [names[r][s] for r, s in zip(row_index.tolist(), slot.tolist(), strict=True)],
        "stage": [_STAGE_NAMES[value] for value in values("stage")],
        "entered": (before != stage)[shown].tolist(),
        "blueprint": [blueprints[kind] if kind >= 0 else None for kind in kinds],
        "alpha": values("alpha"),
        "alpha_target": values("alpha_target"),
        "epochs_in_stage": values("epochs_in_stage"),
        "age": values("age"),
        "parameters": values("slot_params"),
        "contribution": values("contribution"),
        "contribution_se": values("contribution_se"),
        "interaction": states["interaction"].sum(-1)[shown].tolist(),
        "grad_norm": values("grad_norm"),
        "grad_health": values("grad_health"),
    }


def _contributions(outcome: RoundOutcome, rows: Tensor, lived: Tensor) -> dict[str, Any]:
    """Return what was measured in the epoch itself: seeds whose output reached the host."""
    states = outcome.recorded_states
    shown = lived.unsqueeze(-1) & is_in(states["stage"], BLENDED_STAGES)
    shown &= (states["counterfactual_age"] == 0) & ~states["contribution"].isnan()
    row_index, _, slot = shown.nonzero(as_tuple=True)
    names = [_slot_names(outcome, int(row)) for row in rows]
    epoch = states["epoch"].unsqueeze(-1).expand_as(states["stage"])
    return {
        "round": outcome.round,
        "row": rows[row_index].tolist(),
        "step": epoch[shown].tolist(),
        "ordinal": slot.tolist(),
        "kind": ["leave_one_out"] * len(slot),
        "slot": [names[r][s] for r, s in zip(row_index.tolist(), slot.tolist(), strict=True)],
        "value": states["contribution"][shown].tolist(),
        "se": states["contribution_se"][shown].tolist(),
    }


def _seeds(outcome: RoundOutcome, rows: Tensor, blueprints: Sequence[str]) -> dict[str, Any]:
    """Return the life of every seed of the recorded rows; there are few, so one by one."""
    states, seeds = outcome.recorded_states, outcome.seeds
    found: dict[str, list[Any]] = {
        name: []
        for name in (
            *("row", "ordinal", "slot", "blueprint", "germinated", "ended", "fate"),
            *("parameters", "contribution", "contribution_se", "improvement"),
        )
    }
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
            # After decision t the seed is in state t + 1; what was measured last counts.
            life = slice(step + 1, max(step, stop) + 2 if end != 0 else step + 2)
            worth = _last_known(states["contribution"][index, life, slot])
            error = _last_known(states["contribution_se"][index, life, slot])
            stage = int(states["stage"][index, stop if end is None else stop + 1, slot])
            fate = _STAGE_NAMES.get(stage, "DORMANT").lower()
            score = states["val_score"][index]
            found["row"].append(row)
            found["ordinal"].append(ordinal)
            found["slot"].append(names[slot])
            found["blueprint"].append(blueprints[int(seeds.blueprint[row, step, slot])])
            found["germinated"].append(step + 1)
            found["ended"].append(None if end is None else stop + 1)
            found["fate"].append(
                "fossilized" if fossil is not None else "pruned" if pruned is not None else fate
            )
            found["parameters"].append(int(states["slot_params"][index, life, slot].max()))
            found["contribution"].append(worth)
            found["contribution_se"].append(error)
            found["improvement"].append(float(score[min(stop, length)] - score[step + 1]))
    return {"round": outcome.round, **found}


def _first(events: Tensor) -> int | None:
    steps = events.nonzero()
    return int(steps[0]) if len(steps) else None


def _last_known(values: Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known[-1]) if len(known) else None


def _slot_names(outcome: RoundOutcome, row: int) -> Sequence[str]:
    return outcome.slot_names[outcome.tasks[row]]


def _chosen_probabilities(log_probs: Tensor, actions: Tensor) -> Tensor:
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1).exp()


def _alternatives(
    log_probs: Tensor,
    actions: Tensor,
    causal: Tensor,
    row_index: Tensor,
    names: Sequence[Sequence[str]],
    blueprints: Sequence[str],
) -> list[dict[str, list[list[Any]]]]:
    """Return, per decision and head that mattered, the two likeliest other choices."""
    others = log_probs.scatter(-1, actions.unsqueeze(-1), -torch.inf)
    best, index = others.topk(_ALTERNATIVES, dim=-1)
    chances = best.exp().tolist()
    picks, used = index.tolist(), causal.tolist()

    def meaning(row: int, head: str, choice: int) -> Any:
        if head == "slot":
            return names[row][choice]
        return blueprints[choice] if head == "blueprint" else _MEANINGS[head][choice]

    return [
        {
            head: [
                [meaning(row, head, choice), round(chance, 4)]
                for choice, chance in zip(picks[at][place], chances[at][place], strict=True)
                if chance > 1e-6
            ]
            for place, head in enumerate(HEAD_NAMES)
            if used[at][place]
        }
        for at, row in enumerate(row_index.tolist())
    ]
