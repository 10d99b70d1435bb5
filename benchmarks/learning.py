"""Measure the learner's share of the best possible return, on problems with a known optimum.

`python -m benchmarks learning --problem trap --seeds 5` trains with the learner of the `digits`
recipe; the problem's choices that pay are drawn from the same seeds as the learner. Options change
one thing each, for comparisons.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import get_args

import torch

from benchmarks.problems import PROBLEMS, Problem
from benchmarks.problems.learning import Mark, learn
from benchmarks.table import print_table
from esper.simic.agent.config import OpReference, RatioKind
from esper.simic.training.config import TrainConfig
from esper.tamiyo.networks.config import CriticKind
from esper.tamiyo.policy.distribution import FloorConfig
from esper.tamiyo.policy.observation import LayoutName

ROUNDS = {"graded": 120, "trap": 100, "scaffold": 150}
"""Rounds that each problem is given."""

SOLVED = 0.95
"""Share of the optimum at which a problem is solved."""


def main(arguments: Sequence[str]) -> int:
    """Train and print one row per seed."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    rounds = options.rounds or ROUNDS[options.problem]
    rows = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        started = time.perf_counter()
        marks = []
        for mark in learn(
            _problem(options, seed),
            rounds,
            seed=seed,
            enough=SOLVED if options.stop else None,
            change=lambda config: _changed(config, options),
        ):
            marks.append(mark)
            if options.verbose:
                print(_line(mark), flush=True)
        rows.append([seed, *_summary(marks), f"{time.perf_counter() - started:.0f}"])
        if not options.verbose:
            print(f"seed {seed}: {rows[-1][2]} after {marks[-1].round} rounds", flush=True)
    print_table(["seed", "solved at", "greedy", "best", "explained", "paid off", "seconds"], rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks learning", description=__doc__)
    parser.add_argument("--problem", choices=sorted(PROBLEMS), default="graded")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0, help="instead of the problem's own")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stop", action="store_true", help=f"stop at {SOLVED} of the optimum")
    parser.add_argument("--verbose", action="store_true", help="a line every ten rounds")
    change = parser.add_argument_group("differences from the recipe")
    change.add_argument("--layout", choices=get_args(LayoutName))
    change.add_argument("--hidden", type=int, default=128)
    change.add_argument("--critic", choices=get_args(CriticKind), default="op_marginal")
    change.add_argument("--ratio", choices=get_args(RatioKind))
    change.add_argument("--floor", choices=("mixture", "clamp", "off"))
    change.add_argument("--learning-rate", type=float)
    change.add_argument("--curiosity", type=float, help="weight of the op's curiosity")
    change.add_argument("--reference", choices=get_args(OpReference))
    change.add_argument("--sparse-entropy", type=float)
    change.add_argument("--sparse-curiosity", type=float, help="the same for the other heads")
    change.add_argument("--imitation", type=float, help="weight of self-imitation")
    change.add_argument("--document-floors", action="store_true", help="least probabilities of old")
    change.add_argument("--prior", type=float, nargs=6, help="initial op bias")
    change.add_argument("--clip", type=float)
    change.add_argument("--target-kl", type=float)
    change.add_argument("--epochs", type=int)
    change.add_argument("--gamma", type=float)
    change.add_argument("--gae-lambda", type=float)
    change.add_argument("--skip-forced", action="store_true", help="see ppo.skip_forced")
    change.add_argument("--no-prior", action="store_true", help="start with all ops alike")
    change.add_argument("--hindsight", type=float, help="scaffold: credit for A")
    return parser


def _problem(options: argparse.Namespace, seed: int) -> Problem:
    extra = {} if options.hindsight is None else {"hindsight": options.hindsight}
    return PROBLEMS[options.problem](options.rows, seed=seed, device=options.device, **extra)


def _changed(config: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    """Return the recipe with the differences that were asked for."""
    policy, ppo = config.policy, config.ppo
    policy = policy.replace(lstm_hidden_dim=options.hidden, critic=options.critic)
    policy = policy.replace(**_given({"layout": options.layout}))
    if options.no_prior:
        policy = policy.replace(initial_op_bias=(0.0,) * len(policy.initial_op_bias))
    if options.prior:
        policy = policy.replace(initial_op_bias=tuple(options.prior))
    if options.document_floors:
        policy = policy.replace(floor=FloorConfig())
    if options.floor is not None:
        policy = policy.replace(floor=policy.floor.replace(kind=options.floor))
    exploration = {
        "op_curiosity": options.curiosity,
        "op_reference": options.reference,
        "sparse_entropy": options.sparse_entropy,
        "sparse_curiosity": options.sparse_curiosity,
    }
    changes = {
        "ratio": options.ratio,
        "learning_rate": options.learning_rate,
        "clip": options.clip,
        "target_kl": options.target_kl,
        "epochs": options.epochs,
        "gamma": options.gamma,
        "gae_lambda": options.gae_lambda,
        "skip_forced": options.skip_forced or None,
        "exploration": ppo.exploration.replace(**_given(exploration)),
        "imitation": ppo.imitation.replace(**_given({"weight": options.imitation})),
    }
    reward = config.reward.replace(**_given({"gamma": options.gamma}))
    return config.replace(policy=policy, ppo=ppo.replace(**_given(changes)), reward=reward)


def _given(changes: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in changes.items() if value is not None}


def _summary(marks: Sequence[Mark]) -> list[object]:
    solved = [mark.round for mark in marks if mark.share >= SOLVED]
    last = marks[-1]
    quarter = [m.explained_variance or 0.0 for m in marks[-max(len(marks) // 4, 1) :]]
    return [
        solved[0] if solved else "never",
        f"{last.share:.0%}",
        f"{max(mark.share for mark in marks):.0%}",
        f"{sum(quarter) / len(quarter):.2f}",
        f"{last.paid_off:.2f}",
    ]


def _line(mark: Mark) -> str:
    explained = mark.explained_variance
    return (
        f"round {mark.round:4d} greedy {mark.share:+.0%} return {mark.return_mean:+.3f} "
        f"paid off {mark.paid_off:.2f} explained {'-' if explained is None else f'{explained:.2f}'}"
    )
