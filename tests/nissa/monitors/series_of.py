"""Hand-made series: a healthy learner, and what it takes to make it sick."""

from __future__ import annotations

import math
from typing import Any

from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES
from esper.nissa.columns import Row
from esper.nissa.monitors.monitor import MONITORS, Finding, Recent
from esper.nissa.schema import EpochRow, StageRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, RunRow, UpdateHeadRow, UpdateRow

ROUNDS = 40
RUN = RunRow(kind="train", rounds=ROUNDS, rows=64)


def healthy_head(head: str, round_number: int, **changes: Any) -> UpdateHeadRow:
    plain: dict[str, Any] = {
        "usage": 1.0 if head == "op" else 0.05,
        "free_steps": 400,
        "valid_actions": float(HEAD_SIZES[head]),
        "entropy": 0.6,
        "entropy_conditional": 0.7,
        "entropy_nats": 0.7 * math.log(HEAD_SIZES[head]),
        "ratio_min": 0.85,
        "ratio_max": 1.2,
        "approx_kl": 0.004,
    }
    return UpdateHeadRow(round=round_number, head=head, **{**plain, **changes})


def healthy_update(round_number: int, **changes: Any) -> UpdateRow:
    share = (round_number + 1) / ROUNDS
    plain: dict[str, Any] = {
        "approx_kl": 0.008,
        "clipfrac": 0.1,
        "entropy": 0.6,
        "ratio_min": 0.7,
        "ratio_max": 1.4,
        "explained_variance": -0.1 + share,
        "return_std": 1.5,
        "value_std": 1.0,
        "advantage_by_op": {
            "WAIT": {"mean": 0.01, "std": 1.0, "n": 9_000},
            "PRUNE": {"mean": -3.0, "std": 1.0, "n": 40},
        },
        "q_variance": 0.5,
        "q_op_spread": 0.8,
        "grad_norm": 2.0 + 0.3 * math.sin(round_number),
        "nonfinite": 0,
        "log_prob_min": -8.0,
        "lstm_h_rms": 0.4,
        "lstm_c_rms": 0.9,
        "lstm_c_rms_early": 0.8,
        "lstm_c_rms_late": 1.0,
        "usable_steps": 800,
        "was_skipped": False,
        "advantage_floored": False,
    }
    return UpdateRow(round=round_number, **{**plain, **changes})


def healthy_round(round_number: int, **changes: Any) -> RoundRow:
    score = 50.0 + 0.6 * round_number
    plain: dict[str, Any] = {
        "score_mean": score,
        "score_rolling": score - 3.0,
        # A sentinel: forced most of the time, waiting in 99 % of what is left.
        "forced_share": 0.92,
        "free_steps": 800,
        "wait_share_free": 0.99,
        "idle_share_free": 0.99,
        "growth_ratio": 1.4,
        "reward_terms": {"gain": {"share": 0.7}, "pbrs": {"share": 0.2}, "rent": {"share": 0.1}},
        "anti_gaming_share": 0.01,
        "attribution_ratio_max": 2.0,
        "ransomware_count": 0,
        "obs_clamp_share": 0.01,
        "gpu_memory_share": 0.5,
        "blueprint_fates": {"norm": {"germinated": 300, "fossilized": 12}},
        "time": 10.0 * round_number,
    }
    return RoundRow(round=round_number, **{**plain, **changes})


def healthy_records(rounds: int = ROUNDS) -> list[Row]:
    """Return a whole healthy training run, with one head that was never once free."""
    records: list[Row] = []
    for number in range(rounds):
        records.append(EpisodeRow(round=number, episodic_return=1.0, rolled_back=False))
        records.append(healthy_round(number))
        for head in HEAD_NAMES:
            changes: dict[str, Any] = {}
            if head == "alpha_curve":
                # Always masked: nothing was ever chosen, so nothing was measured, or all is 1.
                changes = {
                    "usage": 0.0,
                    "free_steps": 0,
                    "valid_actions": 1.0,
                    "entropy": 0.0,
                    "entropy_conditional": 0.0 if number % 2 else None,
                    "entropy_nats": 0.0,
                    "ratio_min": 1.0,
                    "ratio_max": 1.0,
                }
            elif head == "op":
                # What waiting 99 % of the time looks like.
                changes = {"entropy_conditional": 0.05, "entropy_nats": 0.09}
            records.append(healthy_head(head, number, **changes))
        records.append(healthy_update(number, ordinal=0, is_last=False, approx_kl=9.9))
        records.append(healthy_update(number, ordinal=1))
    return records


def healthy_epochs(count: int = 60) -> list[Row]:
    """Return the epochs of one network that grows well."""
    records: list[Row] = []
    for step in range(1, count + 1):
        if step > 10:
            records.append(
                StageRow(step=step, slot="r0c0", stage="HOLDING", contribution=1.5, improvement=4.0)
            )
        records.append(
            EpochRow(
                step=step,
                val_loss=2.0 / (1 + 0.1 * step),
                val_score=60.0 + 10 * math.log(step),
                parameters=7_000,
                host_parameters=6_418,
            )
        )
    return records


def seen(*records: Row, run: RunRow = RUN) -> Recent:
    recent = Recent(run)
    for record in records:
        recent.add(record)
    return recent


def findings(name: str, *records: Row, run: RunRow = RUN) -> list[Finding]:
    """Return what one monitor finds after these records."""
    found = MONITORS.get(name).check(seen(*records, run=run))
    return [each for each in found if each is not None]


def as_levels(severity: str | None, subject: str | None = None) -> dict[str | None, str]:
    """Return the levels of one finding with this severity, or of none."""
    return {} if severity is None else {subject: severity}


def levels(name: str, *records: Row, run: RunRow = RUN) -> dict[str | None, str]:
    """Return the severity of what one monitor finds, by subject."""
    return {found.subject: found.severity for found in findings(name, *records, run=run)}
