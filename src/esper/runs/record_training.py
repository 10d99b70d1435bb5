"""What a training run writes into its store: rounds, updates, episodes, and some rows in full.

Everything but times and memory is a function of the run alone, so that a resumed run leaves what an
uninterrupted one does. A round is written when it is finished, all of it together. The rows in full
(decisions, epochs, slots, seeds, contributions) are columns looked up over whole tensors; only the
few seeds are gone through one by one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
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
from esper.leyline.process import gpu_memory_share, resident_bytes, software_versions
from esper.leyline.rules import is_in
from esper.leyline.settings import SettingChanges
from esper.leyline.stages import BLENDED_STAGES, MODULE_STAGES, SeedStage
from esper.nissa.columns import Row
from esper.nissa.schema import EpisodeRow, EventKind, EventRow, RoundRow, RunRow
from esper.nissa.store import RunStore
from esper.population.cluster import ActorWork
from esper.simic.training.outcome import RoundOutcome, panic_names
from esper.simic.training.progress import RoundReport
from esper.simic.training.trainer import Trainer

REACHED_SCORE = 80.0
"""Final score, in points, from which `reached_score` is set in the table of episodes."""

_QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


def run_row(trainer: Trainer, *, name: str, command: str) -> RunRow:
    """Return what the store says of a run that begins."""
    config = trainer.config
    return RunRow(
        kind="train",
        name=name,
        recipe=config.recipe,
        task=", ".join(dict.fromkeys(task for stage in config.stages for task in stage.tasks)),
        controller="learned",
        seed=config.seed,
        device=trainer.device.type,
        rounds=config.rounds,
        rows=trainer.buffer.rows,
        epochs=config.epochs,
        slots=list(trainer.policy.slot_config.slot_ids),
        config=config.to_mapping(),
        command=command,
        versions=software_versions(),
    )


def record_start(store: RunStore, trainer: Trainer) -> None:
    """Write down what is about to be trained."""
    network = trainer.policy.network
    store.event(
        EventKind.TRAINING_STARTED,
        "training begins",
        data={
            "parameters": sum(weight.numel() for weight in network.parameters()),
            "blueprints": list(trainer.policy.blueprint_names),
        },
    )


def record_changes(
    store: RunStore, trainer: Trainer, changes: SettingChanges, reset_heads: Sequence[str]
) -> None:
    """Write down what is different about a run from here on."""
    words = [changes.describe()] if changes else []
    words += [f"fresh heads: {', '.join(reset_heads)}"] if reset_heads else []
    store.event(
        EventKind.SETTINGS_CHANGED,
        "; ".join(words),
        round=trainer.round,
        severity="warning",
        data={
            "settings": {key: [old, new] for key, (old, new) in changes.settings.items()},
            "reset_heads": list(reset_heads),
            "restarts_round": changes.restarts_round,
        },
    )


def record_round(store: RunStore, trainer: Trainer, report: RoundReport) -> None:
    """Write everything a finished round has to say."""
    outcome = report.outcome
    for table, columns in detail_columns(outcome, trainer.policy.blueprint_names).items():
        store.write_columns(table, columns)
    # The round before its update: whoever watches the heads asks how much the round waited.
    rows: list[Row] = [*episode_rows(report), *_rollbacks(outcome), round_row(report, trainer)]
    store.write(*rows, *report.update.rows(report.round, report.env_steps))
    if trainer.cluster is not None:
        store.write(*_work(report.round, trainer.cluster.take_work()))


def _work(number: int, work: Sequence[ActorWork]) -> Iterator[EventRow]:
    """Return events for what every actor of a cluster has done, and where actors were lost."""
    for each in work:
        for node in each.losses:
            yield EventRow(
                round=number,
                row=each.actor,
                step=-1,
                volatile=True,
                kind=EventKind.ACTOR_LOST,
                severity="warning",
                message=f"actor {each.actor} was lost on {node}; its rows were played again",
            )
        yield EventRow(
            round=number,
            row=each.actor,
            step=-1,
            volatile=True,
            kind=EventKind.ACTOR_WORKED,
            message=f"actor {each.actor} on {each.node}: {each.epochs} epochs of networks",
            data=dataclasses.asdict(each),
        )


def _rollbacks(outcome: RoundOutcome) -> Iterator[EventRow]:
    """Return an event for every row that the governor ended."""
    for row, reason in enumerate(outcome.rollback_reasons):
        if bool(outcome.rolled_back[row]):
            yield EventRow(
                round=outcome.round,
                row=row,
                step=int(outcome.lengths[row]),
                kind=EventKind.GOVERNOR_ROLLBACK,
                severity="warning",
                message=f"the episode ended{'' if reason is None else f': {reason}'}",
            )


def round_row(report: RoundReport, trainer: Trainer) -> RoundRow:
    """Return what the round's episodes were like, taken together."""
    outcome, seeds = report.outcome, report.outcome.seeds
    decisions, free = outcome.env_steps, int(outcome.free.sum())
    growth = outcome.states["params"].double() / outcome.states["host_params"].double()
    exploration = trainer.config.ppo.exploration
    evaluation = report.evaluation
    seconds = report.seconds
    columns: dict[str, Any] = {
        **_quantiles("return", outcome.returns),
        **_quantiles("gain", outcome.gains),
        **_anti_gaming(outcome),
        **_hindsight(outcome),
    }
    if evaluation is not None:
        columns |= {
            "eval_episodes": len(evaluation.returns),
            "eval_return": evaluation.return_mean,
            "eval_gain": evaluation.val_gain_mean,
        }
    return RoundRow(
        round=report.round,
        episodes=outcome.rows,
        env_steps=report.env_steps,
        return_mean=outcome.return_mean,
        return_std=outcome.return_std,
        score_mean=outcome.score_mean,
        score_best=float(outcome.final_scores.max()),
        score_rolling=report.score_rolling,
        gain_mean=outcome.gain_mean,
        paid_off_share=float((outcome.returns > exploration.paid_off_return).double().mean()),
        paid_off_rolling=report.paid_off,
        free_steps=free,
        forced_share=1.0 - free / decisions,
        wait_share_free=outcome.wait_share_free,
        idle_share_free=outcome.idle_share_free,
        op_counts=outcome.op_counts(),
        reward_by_op=outcome.reward_by_op(),
        reward_terms=outcome.term_table(),
        blueprint_fates={name: dict(counts) for name, counts in trainer.tally.fates.items()},
        seeds_germinated=int(seeds.germinated.sum()),
        seeds_fossilized=int(seeds.fossilized.sum()),
        seeds_pruned=int(seeds.pruned.sum()),
        fossilization_rate=outcome.fossilization_rate,
        rollbacks=int(outcome.rolled_back.sum()),
        growth_ratio=float(growth.max()),
        obs_clamp_share=outcome.obs_clamp_share,
        obs_clamp_features=dict(outcome.obs_clamp_features),
        seconds=seconds,
        update_seconds=report.timings["update"],
        twin_seconds=report.timings["twins"],
        steps_per_s=decisions / seconds if seconds else None,
        memory_bytes=resident_bytes(),
        gpu_memory_share=gpu_memory_share(trainer.device),
        **columns,
    )


def episode_rows(report: RoundReport) -> list[EpisodeRow]:
    """Return how every episode ended."""
    outcome, seeds = report.outcome, report.outcome.seeds
    added = (outcome.parameters - outcome.host_parameters).double()
    best = outcome.running_best
    columns: dict[str, list[Any]] = {
        "env_seed": list(outcome.env_seeds),
        "task": list(outcome.tasks),
        "length": (outcome.lengths + 1).tolist(),
        "episodic_return": outcome.returns.tolist(),
        "return_normalized": outcome.normalized_returns.tolist(),
        "reward_terms": outcome.term_sums(),
        "final_score": outcome.final_scores.tolist(),
        "best_score": best.tolist(),
        "twin_score": outcome.twin_scores.tolist(),
        "gain": outcome.gains.tolist(),
        "parameters": outcome.parameters.tolist(),
        "host_parameters": outcome.host_parameters.tolist(),
        "parameter_ratio": (added / outcome.host_parameters.double()).tolist(),
        "flops": outcome.flops.tolist(),
        "host_flops": outcome.host_flops.tolist(),
        "flop_ratio": outcome.added_flops.tolist(),
        "seeds_germinated": seeds.germinated.sum((1, 2)).tolist(),
        "seeds_fossilized": seeds.fossilized.sum((1, 2)).tolist(),
        "seeds_contributing": outcome.contributing.tolist(),
        "seeds_pruned": seeds.pruned.sum((1, 2)).tolist(),
        "forced_steps": (outcome.lengths - outcome.free.sum(1)).tolist(),
        "op_counts": outcome.op_counts_by_row(),
        "stability": outcome.stability.tolist(),
        "reached_score": (outcome.final_scores >= REACHED_SCORE).tolist(),
        "rolled_back": outcome.rolled_back.tolist(),
        "rollback_reason": outcome.rollback_reasons,
    }
    return [
        EpisodeRow(
            round=report.round,
            row=row,
            env_steps=report.env_steps,
            **{name: values[row] for name, values in columns.items()},
        )
        for row in range(outcome.rows)
    ]


def record_end(store: RunStore, trainer: Trainer) -> None:
    """Write down how the run ended: what networks and their twins scored in the last rounds."""
    score, merit = trainer.tally.score_rolling, trainer.tally.merit_rolling
    # Without twins the merit is a return, which is on another scale.
    is_gain = trainer.twins is not None
    twin = score - merit if is_gain and score is not None and merit is not None else None
    store.finish("finished", val_score=score, twin_val_score=twin)


def _quantiles(name: str, values: Tensor) -> dict[str, float | None]:
    known = values[~values.isnan()]
    if not len(known):
        return {}
    points = known.quantile(torch.tensor(list(_QUANTILES.values()), dtype=known.dtype))
    return {f"{name}_{mark}": float(point) for mark, point in zip(_QUANTILES, points, strict=True)}


def _anti_gaming(outcome: RoundOutcome) -> dict[str, Any]:
    """Return what the guards against gaming found."""
    found: dict[str, Any] = {}
    penalty, ratio = outcome.detail("ransomware_penalty"), outcome.detail("attribution_ratio")
    if penalty is not None:
        punished = outcome.active & (penalty < 0)
        found["anti_gaming_share"] = int(punished.sum()) / outcome.env_steps
        if ratio is not None and bool((punished & ~ratio.isnan()).any()):
            found["attribution_ratio_max"] = float(ratio[punished & ~ratio.isnan()].max())
    hostages = outcome.detail("ransomware_seeds")
    if hostages is not None:
        found["ransomware_count"] = int(torch.where(outcome.active, hostages, 0.0).amax(1).sum())
    return found


def _hindsight(outcome: RoundOutcome) -> dict[str, Any]:
    """Return the distribution of the credit that scaffolds earned, paid or not."""
    credit, delay = outcome.detail("hindsight_credit"), outcome.detail("scaffold_delay")
    if credit is None:
        return {}
    earned = outcome.active & (credit > 0)
    found: dict[str, Any] = {"hindsight_count": int(earned.sum())}
    if bool(earned.any()):
        found["hindsight_mean"] = float(credit[earned].double().mean())
        quantiles = _quantiles("credit", credit[earned].double())
        found["hindsight_quantiles"] = {
            mark.removeprefix("credit_"): value for mark, value in quantiles.items()
        }
        if delay is not None:
            found["hindsight_delay"] = float(delay[earned].double().nanmean())
    return found


# ----------------------------------------------------------------------------------- rows in full

_ALTERNATIVES = 2

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
    likely = _chosen_probabilities(detail["choice_log_probs"][active], actions)
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
    """Return one mapping per decision from [decisions, names]; what is absent (NaN) is left out.

    Seven digits are all that a float32 holds; adding 0 turns a minus 0 into 0.
    """
    return [
        {
            name: float(f"{value:.7g}") + 0.0
            for name, value in zip(names, row, strict=True)
            if not math.isnan(value)
        }
        for row in values.tolist()
    ]


def _epochs(outcome: RoundOutcome, rows: Tensor, lived: Tensor) -> dict[str, Any]:
    states = outcome.recorded_states
    row_index, _ = lived.nonzero(as_tuple=True)
    with_module = is_in(states["stage"], MODULE_STAGES).sum(-1)
    return {
        "round": outcome.round,
        "row": rows[row_index].tolist(),
        "step": states["epoch"][lived].tolist(),
        "train_loss": states["train_loss"][lived].tolist(),
        "val_loss": states["val_loss"][lived].tolist(),
        "val_score": states["val_score"][lived].tolist(),
        "best_score": states["best_score"][lived].tolist(),
        "twin_score": states["twin_score"][lived].tolist(),
        "stabilized": states["stabilized"][lived].tolist(),
        "plateau_epochs": states["plateau_epochs"][lived].tolist(),
        "parameters": states["params"][lived].tolist(),
        "host_parameters": states["host_params"][lived].tolist(),
        "flops": states["flops"][lived].tolist(),
        "host_flops": states["host_flops"][lived].tolist(),
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
    row_index, _, slot = shown.nonzero(as_tuple=True)
    names = [_slot_names(outcome, int(row)) for row in rows]
    epoch = states["epoch"].unsqueeze(-1).expand_as(stage)

    def values(name: str) -> list[Any]:
        return states[name][shown].tolist()

    kinds = values("blueprint")
    improvement = _improvement(outcome, rows)
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
        "flops": values("slot_flops"),
        "contribution": values("contribution"),
        "contribution_se": values("contribution_se"),
        "improvement": improvement[shown].tolist(),
        "interaction": states["interaction"].sum(-1)[shown].tolist(),
        "grad_norm": values("grad_norm"),
        "grad_health": values("grad_health"),
    }


def _improvement(outcome: RoundOutcome, rows: Tensor) -> Tensor:
    """Return [recorded rows, states, slots]: the score since germination, NaN without a seed."""
    germinated, score = outcome.seeds.germinated[rows], outcome.recorded_states["val_score"]
    steps = torch.arange(germinated.shape[1]).view(1, -1, 1)
    born = torch.where(germinated, steps, -1).cummax(1).values
    # A seed of decision t is there from state t + 1 on.
    born = torch.cat([torch.full_like(born[:, :1], -1), born], dim=1)
    scores = score.unsqueeze(-1).expand_as(born)
    return torch.where(born >= 0, scores - scores.gather(1, born.clamp(min=0)), torch.nan)


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
            *("parameters", "flops", "contribution", "contribution_se", "improvement"),
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
            found["flops"].append(int(states["slot_flops"][index, life, slot].max()))
            found["contribution"].append(worth)
            found["contribution_se"].append(error)
            found["improvement"].append(float(score[min(stop, length)] - score[step]))
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
    meanings: Sequence[Mapping[str, Sequence[HeadValue]]],
) -> list[dict[str, list[list[Any]]]]:
    """Return, per decision and head that mattered, the two likeliest other choices."""
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
