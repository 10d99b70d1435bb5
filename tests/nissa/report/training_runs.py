"""A made-up training run, written through the store like a real one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES
from esper.nissa import EventKind, RunRow, open_store
from esper.nissa.columns import Row
from esper.nissa.schema import DecisionRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, UpdateHeadRow, UpdateRow

ROWS, LENGTH = 64, 60
OPS = ("WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE")
BLUEPRINTS = ("norm", "conv_light", "conv_heavy", "attention", "depthwise")
COMMAND = "esper train digits --rounds 120 --out runs/digits"


def train_row(rounds: int = 120, **changes: Any) -> RunRow:
    plain: dict[str, Any] = {
        "kind": "train",
        "name": "digits",
        "task": "digits",
        "recipe": "digits",
        "controller": "learned",
        "seed": 7,
        "device": "cpu",
        "rounds": rounds,
        "rows": ROWS,
        "epochs": LENGTH + 1,
        "slots": ["r0c0", "r0c1", "r0c2"],
        "config": {"recipe": "digits", "rounds": rounds, "ppo": {"gamma": 0.995, "clip": 0.2}},
        "command": COMMAND,
        "versions": {"esper": "0.1.0", "torch": "2.13.0"},
    }
    return RunRow(**{**plain, **changes})


def write_training(
    folder: Path,
    rounds: int = 120,
    *,
    planned: int | None = None,
    with_twin: bool = True,
    is_finished: bool = True,
    recorded_rows: int = 4,
    seed: int = 7,
) -> Path:
    """Write a run in which a controller slowly learns to germinate well and to keep."""
    draw = random.Random(seed)
    with open_store(folder, train_row(planned or rounds), sinks=(), watch=True) as store:
        store.event(
            EventKind.TRAINING_STARTED, "training begins", data={"blueprints": list(BLUEPRINTS)}
        )
        fates: dict[str, dict[str, int]] = {}
        for number in range(rounds):
            share = number / max(1, (planned or rounds) - 1)
            for row in range(min(recorded_rows, 4)):
                if number >= rounds - 2:
                    store.write(*episode_rows(draw, number, row, share))
            store.write(*update_rows(draw, number, share))
            store.write(round_row(draw, number, share, fates, with_twin=with_twin))
            if number == rounds // 2:
                store.event(
                    EventKind.SETTINGS_CHANGED,
                    "resumed with ppo.entropy_coef 0.05 → 0.08; fresh heads: blueprint, tempo",
                    round=number,
                )
        if is_finished:
            store.finish("finished", seconds=523.0)
    return folder


def learned(share: float) -> float:
    """How much has been learned by this share of the run, 0 to 1."""
    return 1 / (1 + math.exp(-10 * (share - 0.45)))


def round_row(
    draw: random.Random,
    number: int,
    share: float,
    fates: dict[str, dict[str, int]],
    *,
    with_twin: bool = True,
) -> RoundRow:
    skill = learned(share)
    mean = -0.8 + 1.7 * skill + draw.gauss(0, 0.08)
    spread = 1.1 - 0.4 * skill
    gain = {"p05": -1.6, "p25": -0.6, "p50": 0.0, "p75": 0.7, "p95": 1.7}
    germinated = int(90 - 20 * skill + draw.gauss(0, 4))
    kept = int(germinated * (0.05 + 0.45 * skill))
    for blueprint in BLUEPRINTS:
        known = fates.setdefault(blueprint, {"germinated": 0, "fossilized": 0, "pruned": 0})
        known["germinated"] += germinated // 5
        known["fossilized"] += kept // 5
        known["pruned"] += (germinated - kept) // 6
    counts = {
        "WAIT": int(ROWS * LENGTH * (0.86 + 0.08 * skill)),
        "GERMINATE": germinated,
        "SET_ALPHA_TARGET": 30,
        "PRUNE": germinated - kept,
        "FOSSILIZE": kept,
        "ADVANCE": germinated * 3,
    }
    gains = {f"gain_{name}": 0.3 + mean + spread * at for name, at in gain.items()}
    is_evaluated = number % 10 == 9
    return RoundRow(
        round=number,
        episodes=ROWS,
        env_steps=(number + 1) * ROWS * LENGTH,
        return_mean=mean,
        return_std=spread,
        **{f"return_{name}": mean + spread * at for name, at in gain.items()},
        score_mean=94.0 + mean,
        score_best=98.0,
        score_rolling=94.0 + mean,
        gain_mean=0.3 + mean if with_twin else None,
        **(gains if with_twin else {}),
        paid_off_share=0.2 + 0.6 * skill,
        paid_off_rolling=0.15 + 0.6 * skill,
        eval_episodes=8 if is_evaluated else None,
        eval_return=mean + 0.3 if is_evaluated else None,
        eval_gain=mean + 0.6 if is_evaluated and with_twin else None,
        free_steps=1800,
        forced_share=0.53,
        wait_share_free=0.7 + 0.25 * skill,
        op_counts=counts,
        reward_by_op={
            op: {"n": count, "mean": 0.01 * index + draw.gauss(0, 0.01)}
            for index, (op, count) in enumerate(counts.items())
        },
        reward_terms={
            "gain": {"mean": mean / LENGTH, "share": 0.86 - 0.1 * skill},
            "rent": {"mean": -0.002, "share": 0.08 + 0.1 * skill},
            "rollback": {"mean": -0.0001, "share": 0.06},
        },
        blueprint_fates={name: dict(counts) for name, counts in fates.items()},
        seeds_germinated=germinated,
        seeds_fossilized=kept,
        seeds_pruned=germinated - kept,
        fossilization_rate=kept / germinated,
        rollbacks=0,
        growth_ratio=1.2 + skill,
        obs_clamp_share=0.012,
        seconds=4.3,
        update_seconds=0.4,
        steps_per_s=900.0,
        time=1000.0 + 4.3 * number,
    )


def update_rows(draw: random.Random, number: int, share: float) -> Iterator[Row]:
    skill = learned(share)
    place: dict[str, Any] = {"round": number, "env_steps": (number + 1) * ROWS * LENGTH}
    for ordinal in range(2):
        for index, head in enumerate(HEAD_NAMES):
            usage = 1.0 if head == "op" else 0.05 + 0.01 * index
            conditional = max(0.05, 0.95 - 0.5 * skill - 0.03 * index + draw.gauss(0, 0.02))
            yield UpdateHeadRow(
                **place,
                ordinal=ordinal,
                head=head,
                usage=usage,
                free_steps=int(1800 * usage),
                valid_actions=float(HEAD_SIZES[head]),
                entropy=conditional * 0.6,
                entropy_conditional=conditional,
                entropy_nats=conditional * math.log(HEAD_SIZES[head]),
                ratio_min=0.8,
                ratio_max=1.2 + abs(draw.gauss(0, 0.2)),
                approx_kl=abs(draw.gauss(0.004, 0.002)),
                clipfrac=0.06,
                grad_norm=0.4 + abs(draw.gauss(0, 0.1)),
                choices=[60, 30, 10],
            )
        yield UpdateRow(
            **place,
            ordinal=ordinal,
            is_last=ordinal == 1,
            learning_rate=3e-4,
            policy_loss=-0.02,
            value_loss=0.6 - 0.4 * skill + abs(draw.gauss(0, 0.03)),
            entropy=0.7 - 0.3 * skill,
            approx_kl=abs(draw.gauss(0.009, 0.003)),
            clipfrac=0.1,
            ratio_min=0.6,
            ratio_max=1.5 + abs(draw.gauss(0, 0.2)),
            explained_variance=0.85 * skill + draw.gauss(0, 0.03),
            low_variance=False,
            advantage_std_raw=0.6,
            advantage_skew=0.4,
            advantage_kurtosis=2.0,
            advantage_positive=0.47,
            advantage_by_op={
                op: {
                    "n": 400,
                    "mean": draw.gauss(0, 0.05),
                    "std": 0.6,
                    "skew": 0.3,
                    "kurtosis": 1.1,
                    "positive": 0.48,
                }
                for op in OPS
            },
            return_mean=-0.5 + skill,
            return_std=1.0,
            value_mean=-0.5 + skill + draw.gauss(0, 0.05),
            value_std=0.7,
            value_return_correlation=0.9 * skill,
            value_loss_by_op={op: 0.3 for op in OPS},
            q_by_op={op: 0.2 * index - 0.3 for index, op in enumerate(OPS)},
            q_variance=0.05 + 0.1 * skill,
            q_op_spread=0.2 + skill,
            grad_norm=1.8 + abs(draw.gauss(0, 0.3)),
            lstm_h_rms=0.4,
            lstm_c_rms=0.8 + 0.4 * skill,
            lstm_by_step=[
                {"step": step, "h_rms": 0.3, "h_max": 0.9, "c_rms": 0.5 + step / 200, "c_max": 3.1}
                for step in (1, 10, 30, 60)
            ],
            feedback_dependence=0.08,
            usable_steps=1800,
            seconds=0.2,
        )


def episode_rows(draw: random.Random, number: int, row: int, share: float) -> Iterator[Row]:
    skill = learned(share)
    total = 0.0
    for step in range(1, LENGTH + 1):
        op, more = "WAIT", {}
        if step == 6 + row:
            op = "GERMINATE"
            more = {
                "slot": "r0c1",
                "blueprint": draw.choice(BLUEPRINTS),
                "style": "SIGMOID_ADD",
                "tempo": 5,
                "alpha_target": 1.0,
                "confidence_slot": 0.42,
                "confidence_blueprint": 0.31,
                "confidence_style": 0.28,
                "confidence_tempo": 0.4,
                "confidence_alpha_target": 0.5,
                "valid_slot": 3,
                "valid_blueprint": 7,
            }
        elif step in (7 + row, 14 + row):
            op, more = "ADVANCE", {"slot": "r0c1", "valid_slot": 1, "confidence_slot": 1.0}
        elif step == 30 + row:
            op = "FOSSILIZE" if row % 2 == 0 else "PRUNE"
            more = {"slot": "r0c1", "valid_slot": 1}
        reward = draw.gauss(0.02 * skill, 0.05)
        total += reward
        forced = 8 + row < step < 12 + row
        yield DecisionRow(
            round=number,
            row=row,
            step=step,
            op=op,
            outcome="done",
            took_effect=True,
            effective_op=op,
            forced=forced,
            valid_op=1 if forced else 3,
            confidence_op=1.0 if forced else 0.93 if op == "WAIT" else 0.05,
            alternatives=None
            if forced
            else {"op": [["GERMINATE", 0.05], ["ADVANCE", 0.02]], "slot": [["r0c0", 0.3]]},
            value=0.4 * skill,
            q_taken=0.45 * skill,
            reward=reward,
            reward_terms={"gain": reward + 0.002, "rent": -0.002},
            **more,
        )
    yield EpisodeRow(
        round=number,
        row=row,
        env_steps=(number + 1) * ROWS * LENGTH,
        env_seed=1000 + row,
        task="digits",
        length=LENGTH,
        episodic_return=total,
        final_score=95.0,
        twin_score=94.4,
        gain=0.6 - 0.4 * row,
        seeds_germinated=1,
        seeds_fossilized=1 if row % 2 == 0 else 0,
        seeds_pruned=row % 2,
        rolled_back=False,
    )
