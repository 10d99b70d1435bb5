"""Train a controller with PPO on many networks at once.

Each round grows many networks, one episode each, and then updates the policy.

Examples:
  esper train smoke --out runs/smoke                     a few seconds: does it run here?
  esper train digits --out runs/digits                   the embedded digits, 60 decisions
  esper train digits --set ppo.clip=0.1 --out runs/clip  the same with one setting changed
  esper train runs/digits/config.yaml --seed 1 --out runs/again
  esper train --resume --out runs/digits                 continue exactly where it stopped
  esper train --resume --set ppo.entropy_coef=0.1 --reset-heads blueprint,tempo --out runs/digits
  esper train cifar --engine ray --address auto --out runs/cifar    on all GPUs of a Ray cluster
  esper grow --task digits --controller runs/digits --out runs/grown    use the trained policy
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from esper.leyline.errors import UsageError
from esper.leyline.reasons import round_number
from esper.scripts.cli.main import Parser
from esper.scripts.cli.options import (
    absolute,
    add_engine_options,
    add_run_options,
    add_settings,
    chosen_cluster,
    chosen_out,
    chosen_sinks,
    given,
    refuse_beside_resume,
)
from esper.scripts.cli.output import (
    answer,
    err_console,
    interrupted,
    listed,
    naming_resume,
    out_console,
)
from esper.utils.process import choose_device
from esper.utils.settings import parse_settings

_RECIPES = "(default: the recipe's)"


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.late_epilog = _recipes
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help="a recipe of the list below, or the config.yaml of a run (default: digits)",
    )
    what = parser.add_argument_group("what to train on")
    for name, kind, metavar, meaning in (
        ("--task", str, "T", "a task of `esper tasks`, or several: A,B"),
        ("--data", str, "PATH", "file or folder of the data"),
        ("--rounds", int, "R", "rounds of training"),
        ("--envs", int, "N", "networks per round"),
        ("--episode-length", int, "L", "decisions per episode"),
        ("--seed", int, "S", "random seed"),
    ):
        what.add_argument(name, type=kind, metavar=metavar, help=f"{meaning} {_RECIPES}")
    what.add_argument("--device", choices=("auto", "cpu", "cuda"), help=f"device {_RECIPES}")
    add_settings(what, "such as ppo.clip=0.1; may be given again (default: none)")
    add_engine_options(parser)
    where = add_run_options(
        parser,
        resume="continue the run in --out; --set and --reset-heads may change it",
        verbose="show every round and every alarm",
    )
    where.add_argument(
        "--reset-heads",
        metavar="H,H",
        help="with --resume: heads to initialise again, such as blueprint,tempo (default: none)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from esper.nissa.folder import TRAINING, resume_command
    from esper.nissa.recorded import stop_signals
    from esper.scripts.cli.output import AlarmRelay
    from esper.scripts.cli.views import TrainView, print_trained

    _check_request(options)
    request = None if options.resume else resolve(options)
    options.out = chosen_out(options, "" if request is None else request.recipe)
    alarms = AlarmRelay()
    # A signal that arrives while the run opens takes effect after the first step, which is saved.
    with (
        stop_signals() as stopped,
        chosen_cluster(options) as cluster,
        _open(options, request, alarms, cluster) as training,
    ):
        config, trainer = training.config, training.trainer
        where = f"{', '.join(config.tasks)}, {trainer.device.type}"
        title = f"training {config.recipe} ({where}) into {options.out}"
        view = TrainView(
            err_console(),
            config.rounds,
            trainer.round,
            title=title,
            verbose=options.verbose,
            evaluate_every=config.evaluate_every,
        )
        alarms.show_by(view.alarm)
        again = resume_command(options.out, TRAINING)
        with view, naming_resume(again):
            is_done = training.carry_out(view.show, lambda: bool(stopped))
        if is_done:
            document = training.finish().summary
    if not is_done:
        return interrupted(again, f" in round {round_number(trainer.round)}")
    return answer(options.json, document, lambda: print_trained(out_console(), document))


def _open(options: argparse.Namespace, request: Any, on_alarm: Any, cluster: Any) -> Any:
    """Start a new run, or open one to continue."""
    from esper.simic.training.recorded import resume_training, start_training

    if request is not None:
        return start_training(
            options.out,
            request,
            overwrite=options.overwrite,
            command=f"esper {shlex.join(options.arguments)}",
            sinks=chosen_sinks(options),
            on_alarm=on_alarm,
            cluster=cluster,
        )
    settings = parse_settings(options.settings or ())
    if options.device is not None:
        settings["device"] = choose_device(options.device).type
    return resume_training(
        options.out,
        settings=settings,
        reset_heads=_names(options.reset_heads or ""),
        checkpoint=options.source or "latest",
        sinks=chosen_sinks(options),
        on_alarm=on_alarm,
        cluster=cluster,
    )


def resolve(options: argparse.Namespace) -> Any:
    """Return the complete configuration of a new run."""
    from esper.simic.training.train import DEFAULT_RECIPE, resolve_recipe

    named = {
        "tasks": None if options.task is None else _names(options.task),
        "data": None if options.data is None else absolute(options.data),
        "rounds": options.rounds,
        "rows": options.envs,
        "episode_length": options.episode_length,
        "seed": options.seed,
        "device": options.device,
    }
    settings = {**parse_settings(options.settings or ()), **given(named)}
    return resolve_recipe(options.recipe or DEFAULT_RECIPE, settings)


def _check_request(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if not options.resume:
        for name, value in (("--from", options.source), ("--reset-heads", options.reset_heads)):
            if value is not None:
                raise UsageError(f"{name} is for a run that is continued; add --resume")
        return
    names = ("recipe", "task", "data", "rounds", "envs", "episode_length", "seed")
    advice = ", or name what is to change, as in --set rounds=200"
    refuse_beside_resume(options, names, advice)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _recipes() -> str:
    from esper.simic.training.config import describe_recipes

    return f"recipes:\n{listed(describe_recipes())}"
