"""Compare the variants of the design documents on a problem with a known optimum.

`python -m benchmarks comparisons` trains every variant on the same seeds of `graded` and writes one
table: share of the best possible return, explained variance, time of a round, memory. Each row
changes one thing in the learner of the `digits` recipe. `--list` names the variants, and says why
some proposals of the documents are not among them.

The problem costs next to nothing, so its round times are those of the learner alone. What a wider
policy costs where networks are really trained is a second table: rounds of digits, on the CPU or
with `--device cuda --task-rows 256` as in the recipe.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from benchmarks.problems import PROBLEMS
from benchmarks.problems.learning import learn, learner_config
from benchmarks.table import print_table
from esper.simic.agent.config import PerHead
from esper.simic.training.config import TrainConfig, get_recipe
from esper.simic.training.vectorized import Trainer
from esper.tamiyo.controllers.policy_file import new_policy

Change = Callable[[TrainConfig], TrainConfig]


@dataclass(frozen=True)
class Variant:
    """One thing that is different, and what asks for it."""

    name: str
    asked_by: str
    change: Change


def _policy(**changes: object) -> Change:
    return lambda config: config.replace(policy=config.policy.replace(**changes))


def _floor(kind: str) -> Change:
    return lambda config: config.replace(
        policy=config.policy.replace(floor=config.policy.floor.replace(kind=kind))
    )


def _ppo(**changes: object) -> Change:
    return lambda config: config.replace(ppo=config.ppo.replace(**changes))


def _exploration(**changes: object) -> Change:
    return lambda config: config.replace(
        ppo=config.ppo.replace(exploration=config.ppo.exploration.replace(**changes))
    )


def _accept_collapse(config: TrainConfig) -> TrainConfig:
    config = _floor("off")(config)
    config = _ppo(entropy_coef=0.0, entropy_coef_end=0.0, exploration_kl=0.0)(config)
    return _exploration(sparse_entropy=0.0, op_curiosity=0.0, sparse_curiosity=0.0)(config)


def _faster_sparse_heads(config: TrainConfig) -> TrainConfig:
    rates = config.ppo.lr_multipliers.replace(blueprint=3.0, tempo=3.0)
    return _ppo(lr_multipliers=rates)(config)


VARIANTS = (
    Variant("as in the recipe", "hidden 128, marginal baseline", lambda config: config),
    Variant("V1", "what 000 replaced", _policy(critic="state", blueprint_layers=2)),
    Variant("hidden 256", "001", _policy(lstm_hidden_dim=256)),
    Variant("hidden 512", "000", _policy(lstm_hidden_dim=512)),
    Variant("baseline Q(s, sampled op)", "000: critic", _policy(critic="op_sampled")),
    Variant("baseline Q(s, probabilities)", "001: critic", _policy(critic="op_soft")),
    Variant("encoded op", "000: op encoder", _policy(op_encoder=True)),
    Variant("BF16 updates", "000: BF16", _ppo(use_bf16=True)),
    Variant("joint ratio", "000: ratio", _ppo(ratio="joint")),
    Variant("all heads alike", "000: losses", _ppo(head_weights="equal")),
    Variant("clamped floors", "004: option C", _floor("clamp")),
    Variant("no floors", "000: floors", _floor("off")),
    Variant("stronger entropy", "004: option D", _ppo(entropy_coef=0.1, entropy_coef_end=0.1)),
    Variant("nothing against collapse", "004: option F", _accept_collapse),
    Variant("faster sparse heads", "000: per-head learning rates", _faster_sparse_heads),
    Variant("one pass per update", "0008", _ppo(epochs=1)),
    Variant("no sentinel prior", "0008", _policy(initial_op_bias=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))),
    Variant("no curiosity", "0008", _exploration(op_curiosity=0.0, sparse_curiosity=0.0)),
    Variant(
        "no entropy floors",
        "000: entropy floor penalty",
        _ppo(entropy_floor_penalty=PerHead.same(0.0)),
    ),
)
"""Every variant; the first is what the others are compared with."""

WIDTHS = ("V1", "hidden 256", "hidden 512")
"""Variants whose rounds are timed on digits; the first is what the others are compared with."""

NOT_TRIED = {
    "004: option A, temperature": "a constant temperature is a factor of the logits, which the "
    "last layer learns away; the exploration KL pulls on the logits themselves",
    "004: option B, noise on logits": "what is sampled would not be what is scored: the ratio is "
    "biased from the first step",
    "004: option E, REINFORCE on the entropy": "its expectation is the gradient of the entropy, "
    "which is exact already and dies at collapse all the same",
    "000: learned embedding of the op": "a one-hot before a linear layer is an embedding: the "
    "columns of the critic's first layer that the op selects are learned",
}
"""What the documents propose and a table cannot answer better than a sentence."""


def main(arguments: Sequence[str]) -> int:
    """Train the variants and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks comparisons",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--problem", choices=sorted(PROBLEMS), default="graded")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of every variant (default: 2)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of training (default: 60)")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=[each.name for each in VARIANTS],
        metavar="NAME",
        help="names of variants to train; without any, none",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for digits")
    parser.add_argument(
        "--task-rows", type=int, default=8, help="rows of digits; 0 leaves the second table out"
    )
    parser.add_argument("--list", action="store_true", help="name the variants and train nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.list:
        print_table(["variant", "asked by"], [[each.name, each.asked_by] for each in VARIANTS])
        print_table(["not tried", "because"], [list(pair) for pair in NOT_TRIED.items()])
        return 0
    chosen = [each for each in VARIANTS if options.only is None or each.name in options.only]
    rows = []
    for variant in chosen:
        rows.append(_measure(variant, options))
        print(" | ".join(map(str, rows[-1])), flush=True)
    print_table(
        [
            *("variant", "asked by", "greedy at the end", "greedy, last half", "return"),
            *("explained", "s per round", "policy MiB", "optimizer MiB"),
        ],
        rows,
    )
    if options.task_rows:
        timed = [_time_rounds(each, options) for each in VARIANTS if each.name in WIDTHS]
        first = timed[0][0]
        print_table(
            ["variant", "s per round of digits", "of it the update", "round over the first"],
            [
                [name, f"{seconds:.2f}", f"{update / seconds:.1%}", f"{seconds / first:.2f}"]
                for name, (seconds, update) in zip(WIDTHS, timed, strict=True)
            ],
        )
    return 0


def _time_rounds(variant: Variant, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of a round on digits, twins aside, and of its update; the faster of two.

    The round before them is not counted: processes start in it, and kernels are made.
    """
    config = variant.change(get_recipe("digits")).replace(
        rounds=3, rows=options.task_rows, device=options.device, recorded_rows=0, evaluate_every=0
    )
    trainer = Trainer(config)
    try:
        timings = [report.timings for report in trainer.run()][1:]
    finally:
        trainer.close()
    return min(
        (sum(spent for part, spent in each.items() if part != "twins"), each["update"])
        for each in timings
    )


def _measure(variant: Variant, options: argparse.Namespace) -> list[object]:
    """Return one row of the table: means over the seeds."""
    ends, halves, returns, explained, seconds = [], [], [], [], []
    for seed in range(options.seeds):
        problem = PROBLEMS[options.problem](64, seed=seed)
        started = time.perf_counter()
        marks = list(learn(problem, options.rounds, seed=seed, every=5, change=variant.change))
        seconds.append((time.perf_counter() - started) / options.rounds)
        late = marks[len(marks) // 2 :]
        ends.append(marks[-1].share)
        halves.append(fmean(mark.share for mark in late))
        returns.append(marks[-1].return_mean)
        explained.append(fmean(mark.explained_variance or 0.0 for mark in late))
    config = variant.change(learner_config(problem, options.rounds))
    policy = new_policy(config.policy)
    size = sum(weight.numel() for weight in policy.network.parameters()) * 4 / 2**20
    return [
        variant.name,
        variant.asked_by,
        " ".join(f"{share:.0%}" for share in ends),
        f"{fmean(halves):.0%}",
        f"{fmean(returns):.2f}",
        f"{fmean(explained):.2f}",
        f"{fmean(seconds):.2f}",
        f"{size:.1f}",
        f"{2 * size:.1f}",
    ]
