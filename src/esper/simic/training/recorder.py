"""Writes a training run into its store: rounds, updates, episodes, and some rows in full.

Everything but times and memory depends on the run alone, so a resumed run stores the same as an
uninterrupted one. A round is written as a whole when it is finished.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper.lab.population.ray_population import ActorWork
from esper.nissa.columns import Row
from esper.nissa.schema import EventKind, EventRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, RunRow
from esper.nissa.store import RunStore
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.progress import RoundReport
from esper.simic.training.recorder_rows import detail_columns
from esper.simic.training.vectorized import Trainer
from esper.utils.process import gpu_memory_share, resident_bytes, software_versions
from esper.utils.settings import SettingChanges

REACHED_SCORE = 80.0
"""Final score, in points, from which `reached_score` is set in the table of episodes."""

_QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


def run_row(trainer: Trainer, *, name: str, command: str) -> RunRow:
    """Return the row of the table `runs` for a new run."""
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
    """Record the start of training."""
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
    """Record changes of settings, and heads that were reset."""
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
    """Write a finished round."""
    outcome = report.outcome
    for table, columns in detail_columns(outcome, trainer.policy.blueprint_names).items():
        store.write_columns(table, columns)
    # The round before its update: monitors of the heads read the round's share of WAIT.
    events = [*_rollbacks(outcome), *_initiations(outcome)]
    rows: list[Row] = [*episode_rows(report), *events, round_row(report, trainer)]
    store.write(*rows, *report.update.rows(report.round, report.env_steps))
    if trainer.cluster is not None:
        store.write(*_work(report.round, trainer.cluster.take_work()))


def _work(number: int, work: Sequence[ActorWork]) -> Iterator[EventRow]:
    """Return events about the work of every Ray actor, and about lost actors."""
    for each in work:
        event = partial(EventRow, round=number, row=each.actor, step=-1, volatile=True)
        for node in each.losses:
            line = f"actor {each.actor} was lost on {node}; its rows were played again"
            yield event(kind=EventKind.ACTOR_LOST, severity="warning", message=line)
        line = f"actor {each.actor} on {each.node}: {each.epochs} epochs of networks"
        yield event(kind=EventKind.ACTOR_WORKED, message=line, data=dataclasses.asdict(each))


def _rollbacks(outcome: RoundOutcome) -> Iterator[EventRow]:
    """Return an event for every row that the governor rolled back."""
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


def _initiations(outcome: RoundOutcome) -> Iterator[EventRow]:
    """Return an event for every recorded row, at the epoch at which its host stabilized."""
    for index, row in enumerate(outcome.recorded_rows):
        lived = outcome.recorded_states["stabilized"][index, : int(outcome.lengths[row]) + 1]
        if bool(lived.any()):
            first = int(lived.int().argmax())
            yield EventRow(
                round=outcome.round,
                row=row,
                step=int(outcome.recorded_states["epoch"][index, first]),
                kind=EventKind.TAMIYO_INITIATED,
                message="the host has settled",
            )


def round_row(report: RoundReport, trainer: Trainer) -> RoundRow:
    """Return the figures of a round over all its episodes."""
    outcome, seeds = report.outcome, report.outcome.seeds
    decisions, free = outcome.env_steps, int(outcome.free.sum())
    growth = outcome.states["params"].double() / outcome.states["host_params"].double()
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
        paid_off_share=float(outcome.paid_off.double().mean()),
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
    """Return the figures of every episode."""
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
    """Record the end of the run, with the scores of networks and twins in the last rounds."""
    score, merit = trainer.tally.score_rolling, trainer.tally.merit_rolling
    # Without twins the merit is a return, not points.
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
    """Return the findings of the guards against reward gaming."""
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
    """Return the distribution of hindsight credit, paid or not."""
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
