"""Test a change of the learner in minutes, on a model of the digits task.

`python -m benchmarks digits_model --set ppo.clip=0.2 --set reward.twin.open_seed_cost=0.2` trains
the learner of the `digits` recipe, with settings changed as in `esper train`, where nothing else is
trained: seeds live by the real lifecycle and are paid by the real reward, and what they bring is
drawn from figures measured on digits. A round takes seconds on one core, so a change can be tried
here first; whether it holds is for `esper train digits` and `digits_learning` to say.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.problems.base import BLUEPRINTS, Problem
from benchmarks.problems.learning import learner_config
from benchmarks.table import print_table
from esper.kasmina.blueprints import blueprint_by_id, count_parameters
from esper.kasmina.contribution import Measured
from esper.kasmina.lifecycle import LifecycleConfig
from esper.leyline.actions import LifecycleOp
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import EsperError, UsageError
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS, NUM_BLUEPRINTS, SlotConfig
from esper.leyline.stages import SeedStage
from esper.simic.rewards import Reward, RewardStep, Transition, make_reward
from esper.simic.rewards.contract import FINAL_EPOCHS
from esper.simic.training.config import TrainConfig
from esper.simic.training.evaluation import play_episodes
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.progress import RoundReport
from esper.simic.training.row_source import RoundPlan
from esper.simic.training.vectorized import Trainer
from esper.tamiyo.controllers.learned import LearnedController
from esper.tamiyo.controllers.policy_file import Policy
from esper.utils.process import Pending
from esper.utils.randomness import derive_seed, generator
from esper.utils.settings import change_settings, parse_settings

SLOTS = 3
STEPS = 60
"""Slots of the digits host, and decisions of an episode of the recipe."""

CHANNELS = 8
"""Channels that parameters are counted for; the first slot of digits has 4, the others have 8."""

POINTS = {
    "conv_light": (0.68, 0.60, 0.23),
    "norm": (-0.08, -0.08, -0.08),
    "depthwise": (0.38, 0.30, 0.15),
    "bottleneck": (0.90, 0.75, 0.30),
    "conv_heavy": (1.28, 0.38, 0.15),
}
"""Points of validation score that a grown-up seed brings, by slot; other blueprints bring none.

Added up over the slots they are about two thirds of what fixed schedules gained on digits.
"""

POINTS_SPREAD = 0.4
"""Relative deviation of the points: seeds of one kind do not all turn out alike."""

IDLE_EPOCHS = 8
GROWING_EPOCHS = 10.0
"""A seed brings nothing at first, and then grows up with this time constant."""

NOISE_KEPT = 0.7
NOISE_DEVIATION = 0.5
"""Noise of validation: the share of it that lasts into the next epoch, and the points it gains.

It varies by 0.7 points in the long run. A row in which no seed ever took part has none: it is its
own twin.
"""

CONTRIBUTION_DEVIATION = 0.4
CONTRIBUTION_ERROR = 0.5
"""Points by which a measured contribution is off, and the error that is told with it."""

JUDGED_ROWS = 32
"""Rows that the greedy policy plays; they have draws of their own."""

SETTABLE = ("policy", "ppo", "reward", "horizon")
"""What `--set` may change: the model has no use for the rest of a training run's settings."""


class DigitsModel(Problem):
    """Rows that score as digits does; several seeds may live at a time.

    Snapshots lack its noise and the draws to come, so a run on it cannot be continued.
    """

    name = "digits_model"

    def __init__(self, rows: int, *, seed: int) -> None:
        """Lay out the rows; their worths and their noise are drawn from the seed."""
        lifecycle = LifecycleConfig()
        super().__init__(
            rows,
            seed=seed,
            device="cpu",
            steps=STEPS,
            lifecycle=lifecycle,
            slots=SLOTS,
            blueprints=BLUEPRINTS,
            fee=0.0,
        )
        # Other problems let one seed live at a time; digits has no such limit.
        self.lifecycle = lifecycle
        self._draws = generator(seed, self.name)
        self._points = torch.zeros((NUM_BLUEPRINTS, SLOTS), dtype=torch.float64)
        self._parameters = torch.zeros(NUM_BLUEPRINTS, dtype=torch.int64)
        for number in self.blueprints:
            count = count_parameters(blueprint_by_id(number), CHANNELS, "cnn")
            self._parameters[number] = count
        for name, points in POINTS.items():
            self._points[BUILTIN_BLUEPRINTS.index(name)] = torch.tensor(points, dtype=torch.float64)

    def price(self, blueprint: Tensor, slot: Tensor, step: Tensor, scaffolded: Tensor) -> Tensor:
        """Return the points that these seeds will bring when they are grown up."""
        return self._points[blueprint, slot] * (1 + POINTS_SPREAD * self._draw(len(blueprint)))

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        """Start every row afresh, as its twin."""
        self.noise = torch.zeros(self.rows, dtype=torch.float64)
        self.has_parted = torch.zeros(self.rows, dtype=torch.bool)
        return super().reset(row_seeds)

    def twin_curves(self) -> Tensor:
        """Return float32 [R, epochs]: what a row that only waits scores after every epoch."""
        curve = self._host_score(torch.arange(1, self.steps + 2))
        return curve.to(torch.float32).expand(self.rows, -1)

    def seed_sizes(self) -> Tensor:
        """Return int64 [B]: the parameters of real seeds of this width."""
        return self._parameters

    def _measure(self, members: Tensor, which: Tensor | None) -> Pending[Measured]:
        """Imagine an epoch: the host learns, seeds grow, and validation is noisy."""
        state = self.state
        grown = 1 - torch.exp(-(state.age.double() - IDLE_EPOCHS).clamp(min=0) / GROWING_EPOCHS)
        shown = self.worth * grown * state.alpha * state.has_module
        self.has_parted |= (state.has_module & (state.alpha > 0)).any(1)
        self.noise = NOISE_KEPT * self.noise + NOISE_DEVIATION * self._draw(self.rows)
        score = self._host_score(self.tracker.epoch + 1) + shown.sum(1)
        score = score + torch.where(self.has_parted, self.noise, 0.0)
        seen = Measured(
            loss=1 - score / 100,
            score=score,
            worth=shown + CONTRIBUTION_DEVIATION * self._draw(*shown.shape),
            error=torch.full_like(shown, CONTRIBUTION_ERROR),
            interaction=torch.zeros_like(state.interaction),
        )
        return lambda: seen

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draws, dtype=torch.float64)


class ModelReward:
    """A reward whose twins' scores are in the signals: the model knows what waiting scores."""

    needs_twin = False

    def __init__(self, inner: Reward) -> None:
        self.inner = inner
        self.reset = inner.reset
        self.state_dict = inner.state_dict
        self.load_state_dict = inner.load_state_dict

    def step(self, transition: Transition) -> RewardStep:
        """Return what the step paid."""
        before, after = transition.before.twin_score, transition.after.twin_score
        return self.inner.step(
            dataclasses.replace(transition, twin_before=before.float(), twin_after=after.float())
        )


def main(arguments: Sequence[str]) -> int:
    """Train on the model and print one row every few rounds."""
    parser = _parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        model = DigitsModel(options.rows, seed=options.seed)
        config = configure(model, options)
    except EsperError as error:
        parser.error(str(error))
    trainer = Trainer(config, environment=model, reward=ModelReward(make_reward(config.reward)))
    judged = DigitsModel(JUDGED_ROWS, seed=derive_seed(config.seed, "judged rows"))
    rows = []
    for report in trainer.run():
        done = report.round + 1
        if done % options.every and done != config.rounds:
            continue
        greedy = play_greedily(judged, trainer.policy, make_reward(config.reward))
        rows.append([done, *_exploring_cells(report), *_greedy_cells(greedy)])
        print(" | ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    print(f"ops of an episode: {', '.join(op.name for op in LifecycleOp)}\n")
    print_table(
        [
            *("round", "return", "paid off", "explained", "by the potential", "KL", "ops"),
            *("greedy return", "greedy gain", "greedy fossils", "greedy ops"),
        ],
        rows,
    )
    return 0


def configure(model: DigitsModel, options: argparse.Namespace) -> TrainConfig:
    """Return the recipe's configuration for the model, with the settings that were asked for."""
    if options.every < 1:
        raise UsageError(f"--every must be at least 1, got {options.every}")
    recipe = learner_config(model, options.rounds, seed=options.seed)
    config = change_settings(recipe, parse_settings(options.settings))
    for field in dataclasses.fields(config):
        is_changed = getattr(config, field.name) != getattr(recipe, field.name)
        if is_changed and field.name not in SETTABLE:
            raise UsageError(
                f"--set cannot change {field.name} here, only {', '.join(SETTABLE)}; "
                "--rows, --rounds and --seed are options of their own"
            )
    return config


def play_greedily(model: DigitsModel, policy: Policy, reward: Reward) -> RoundOutcome:
    """Return one episode per row of the policy's likeliest actions, without floors."""
    slot_names = SlotConfig.of(model.num_slots).slot_ids
    context = ControllerContext(slot_names=slot_names, blueprint_names=BUILTIN_BLUEPRINTS)
    plan = RoundPlan(
        round=0,
        tasks=(model.name,) * model.rows,
        env_seeds=tuple(range(model.rows)),
        slot_names={model.name: slot_names},
    )
    controller = LearnedController(policy, context, greedy=True)
    return play_episodes(model, controller, reward, plan, model.twin_curves())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks digits_model", description=__doc__)
    parser.add_argument("--rows", type=int, default=256, help="episodes of a round (default: 256)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of training (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the learner")
    parser.add_argument("--every", type=int, default=5, help="rounds per table row (default: 5)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help=f"a setting within {', '.join(SETTABLE)}, as in `esper train`; may be given again",
    )
    return parser


def _exploring_cells(report: RoundReport) -> list[str]:
    return [
        f"{report.return_mean:+.3f}",
        f"{report.paid_off:.2f}",
        f"{report.explained_variance:.2f}",
        "–" if report.potential_share is None else f"{report.potential_share:.2f}",
        f"{report.update.approx_kl:.4f}",
        _ops(report.outcome),
    ]


def _greedy_cells(outcome: RoundOutcome) -> list[str]:
    gains = (outcome.states["val_score"] - outcome.states["twin_score"])[:, -FINAL_EPOCHS:]
    fossils = (outcome.at_end("stage") == int(SeedStage.FOSSILIZED)).sum(1)
    return [
        f"{outcome.return_mean:+.2f}",
        f"{float(gains.double().mean()):+.2f}",
        f"{float(fossils.double().mean()):.2f}",
        _ops(outcome),
    ]


def _ops(outcome: RoundOutcome) -> str:
    """Return how often every op was chosen in an episode, in the order of their numbers."""
    return " ".join(f"{count / outcome.rows:.1f}" for count in outcome.op_counts().values())
