"""Compare the learning curve of sb3-contrib's MaskablePPO with that of Esper's learner.

    python -m benchmarks maskable_ppo cifar16 --seconds 240 --device cuda --out ppo.json
    esper train cifar16 --device cuda --set evaluate_every=0 --out runs/cifar16
    python -m benchmarks maskable_ppo --summary ppo.json runs/cifar16 --picture curves.svg

The first plays the very rounds of the second: the same seeds, waiting twins and reward, updates
after as many episodes. Returns and gains (final validation score over the twin's, in points) are
those of the exploring policies, round by round. Training needs `esper-grow[sb3]`, a summary not.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import print_table, require_results

PINNED = ("tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""Heads that keep their default, which leaves 154 whole actions of 2,083 for three slots."""

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "n_epochs": 6,
    "ent_coef": 0.01,
    "policy_kwargs": {"net_arch": [128, 128]},
}
"""What is not Stable-Baselines3's default; observations and rewards are standardised as it does."""

_MINIBATCHES = 4
_RECENT = 3
"""Rounds that a point of the summary is the mean of."""

Round = dict[str, float]
"""As in the table `rounds` of a store: env_steps since the start, return_mean, gain_mean, and
seconds, of the round."""


def main(arguments: Sequence[str]) -> int:
    """Train and write the curve, or compare curves."""
    options = _parser().parse_args(arguments)
    if options.summary:
        require_results(*options.summary)
        stems = [path.stem for path in options.summary]
        names = stems if len(set(stems)) == len(stems) else map(str, options.summary)
        curves = dict(zip(names, map(read_curve, options.summary), strict=True))
        print_table(["learner", "rounds", "decisions", "seconds", *_POINTS], summarise(curves))
        if options.picture:
            options.picture.write_text(draw(curves), encoding="utf-8")
        return 0
    if options.device == "cpu":
        torch.set_num_threads(1)
    train(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks maskable_ppo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("recipe", nargs="?", default="cifar16", help="of `esper train`")
    parser.add_argument("--seconds", type=float, default=240.0, help="for training (default: 240)")
    parser.add_argument("--rounds", type=int, help="at most (default: as many as there is time)")
    parser.add_argument("--rows", type=int, help="networks side by side (default: the recipe's)")
    parser.add_argument("--length", type=int, help="decisions of an episode (default: its)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default: 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--data", help="where data files lie (default: the usual places)")
    parser.add_argument("--out", type=Path, default=Path("maskable_ppo.json"), help="the curve")
    parser.add_argument(
        "--summary",
        type=Path,
        nargs="+",
        metavar="CURVE_OR_RUN",
        help="compare curves written before and runs of `esper train`, instead of training",
    )
    parser.add_argument("--picture", type=Path, help="with --summary: SVG file for the curves")
    return parser


def train(options: argparse.Namespace) -> None:
    """Train for some time; the curve is written anew after every round."""
    # Extras, which a list of the benchmarks and a summary do without.
    from esper.lab.envs import GrowVectorEnv, LegalVectorActions
    from esper.lab.envs.stable_baselines import GrowVecEnv

    # isort: split
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import VecNormalize

    given = {"episode_length": options.length, "data": options.data}
    settings = {"device": options.device, "seed": options.seed}
    settings |= {name: value for name, value in given.items() if value is not None}
    grow = GrowVectorEnv(options.rows, options.recipe, settings)
    config = grow.rows.config
    discount = {"gamma": config.ppo.gamma}
    env = VecNormalize(GrowVecEnv(LegalVectorActions(grow, PINNED)), **discount)
    steps = config.rows * config.episode_length
    model = MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=config.episode_length,  # an update per round, as in our learner
        batch_size=steps // _MINIBATCHES,
        gae_lambda=config.ppo.gae_lambda,
        seed=options.seed,
        device="cpu",  # where a small network is fastest; the rows are where --device says
        **discount,
        **SETTINGS,
    )
    about = {
        "learner": "MaskablePPO",
        "recipe": config.recipe,
        "rows": config.rows,
        "episode_length": config.episode_length,
        "seed": options.seed,
        "device": str(config.device),
        "actions": int(env.action_space.n),
        "settings": SETTINGS,
    }
    curve = _make_curve(options, about)
    # There is always time for another round until the callback says that there is not.
    model.learn(steps * (options.rounds or 1_000_000), callback=curve)
    env.close()


def _make_curve(options: argparse.Namespace, about: dict[str, Any]) -> Any:
    """Return a callback that counts as our trainer does; its base class is an extra."""
    import numpy as np
    from stable_baselines3.common.callbacks import BaseCallback

    class Curve(BaseCallback):
        """Writes what every round came to, and ends the training when its time is over."""

        def __init__(self) -> None:
            super().__init__()
            self.rounds: list[Round] = []
            self._returns = np.zeros(about["rows"])
            self._gains = np.zeros(about["rows"])
            self._is_active = np.ones(about["rows"], dtype=bool)
            self._decisions = 0
            self._started = self._begun = time.perf_counter()

        def _on_step(self) -> bool:
            self._returns += self.training_env.get_original_reward()
            self._decisions += int(self._is_active.sum())
            infos, dones = self.locals["infos"], self.locals["dones"]
            goes_on = np.array([info["active"] for info in infos])
            # A row that the governor took back stays as it was when its episode ended.
            for row in np.flatnonzero(self._is_active & ~goes_on):
                self._gains[row] = infos[row]["score"] - infos[row]["twin_score"]
            self._is_active = goes_on
            if not dones.all():  # the rows of a population end together
                return True
            self._finish_round()
            return time.perf_counter() - self._begun < options.seconds

        def _finish_round(self) -> None:
            # The rows have begun their next episode already, so that is in the time.
            now = time.perf_counter()
            found = {
                "env_steps": self._decisions,
                "return_mean": float(self._returns.mean()),
                "gain_mean": float(self._gains.mean()),
                "seconds": now - self._started,
            }
            self.rounds.append(found)
            self._started = now
            self._returns[:], self._is_active[:] = 0.0, True
            written = json.dumps({**about, "rounds": self.rounds}, indent=1)
            options.out.write_text(written + "\n", encoding="utf-8")
            shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
            print(f"round {len(self.rounds)}: {shown}", flush=True)

    return Curve()


def read_curve(path: Path) -> list[Round]:
    """Return the rounds of a curve that was written here, or of a run of `esper train`."""
    if path.is_dir():
        import esper

        columns = ("env_steps", "return_mean", "gain_mean", "seconds")
        with esper.open_run(path) as stored:
            found = stored.rows("rounds", columns=columns)
        # Without twins there is no gain.
        return [
            {name: math.nan if row[name] is None else row[name] for name in columns}
            for row in found
        ]
    rounds: list[Round] = json.loads(path.read_text(encoding="utf-8"))["rounds"]
    return rounds


_POINTS = (
    "return, gain after as many decisions",
    "return, gain after as many seconds",
    "return, gain at the end",
)


def summarise(curves: dict[str, list[Round]]) -> list[list[object]]:
    """Return a line for every curve: after what all of them have had, and at its own end."""
    steps = min(rounds[-1]["env_steps"] for rounds in curves.values())
    seconds = min(sum(each["seconds"] for each in rounds) for rounds in curves.values())
    table: list[list[object]] = []
    for name, rounds in curves.items():
        spent = list(accumulate(each["seconds"] for each in rounds))
        by_steps = [each for each in rounds if each["env_steps"] <= steps]
        by_seconds = [each for each, at in zip(rounds, spent, strict=True) if at <= seconds]
        points = [_recent(part) for part in (by_steps, by_seconds, rounds)]
        table.append([name, len(rounds), rounds[-1]["env_steps"], f"{spent[-1]:.0f}", *points])
    return table


def _recent(rounds: Sequence[Round]) -> str:
    """Return the mean return and gain of the last rounds."""
    if not rounds:
        return "no round yet"
    last = rounds[-_RECENT:]
    means = (sum(each[name] for each in last) / len(last) for name in ("return_mean", "gain_mean"))
    return ", ".join(f"{mean:+.2f}" for mean in means)


_STYLE = """
.chart text{font:12px system-ui,sans-serif;fill:#19212a}.chart .strong{font-weight:650}
.chart text.muted{fill:#56616d}.chart .grid{stroke:#dde2e8}.chart .axis{stroke:#56616d}
.chart .line{fill:none;stroke-width:1.8}.chart .reference{stroke:#56616d;stroke-dasharray:2 3}
.chart .column{fill-opacity:0}
.chart .c1{stroke:#0a62b4}.chart .c2{stroke:#c75300}.chart .c3{stroke:#00805c}
.chart .c4{stroke:#a8327f}.chart .c5{stroke:#8f6a00}.chart .c6{stroke:#2f97dc}
"""


def draw(curves: dict[str, list[Round]]) -> str:
    """Return an SVG: return and gain, over decisions and over seconds."""
    from esper.nissa.report.chart import COLORS, Chart, Line, draw_chart, make_point
    from esper.nissa.report.markup import element

    width, height = 480, 250
    parts = [element("style", _STYLE), element("rect", width="100%", height="100%", fill="#fff")]
    for column, axis in enumerate(("decisions", "seconds")):
        for row, (name, unit) in enumerate((("return", "reward"), ("gain", "points"))):
            lines = []
            for color, (curve, rounds) in zip(COLORS, curves.items(), strict=False):
                places = [each["env_steps"] for each in rounds]
                if axis == "seconds":
                    places = list(accumulate(each["seconds"] for each in rounds))
                values = (each[f"{name}_mean"] for each in rounds)
                points = [make_point(*each) for each in zip(places, values, strict=True)]
                lines.append(Line(name=curve, points=points, kind=color))
            title = f"{name} over {axis}"
            chart = Chart(title=title, lines=lines, unit=unit, axis=axis, reference=0.0)
            x, y = 10 + column * width, 10 + row * height
            parts.append(
                element("svg", draw_chart(chart), x=x, y=y, width=width - 20, height=height - 10)
            )
    size = {"width": 2 * width, "height": 2 * height + 10}
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", **size)
