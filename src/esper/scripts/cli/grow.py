"""Train one network while a controller grows it.

Compares it with its twin: the same network, trained on the same batches, that never grows.

Examples:
  esper grow --task digits --out runs/first                       embedded data, CPU, one minute
  esper grow --task digits --controller heuristic:plateau_epochs=5
  esper grow --task digits --optimizer adamw --learning-rate 0.003
  esper grow --task digits --set growth.training.seed_warmup=2    any setting of the page Settings
  esper grow --task cifar_baseline --data ~/cifar-10-batches-py --device cuda --out runs/cifar
  esper grow --model mynet.py:make --slots layer1,layer2 --data images.npz --out runs/mine
  esper grow --task digits --budget 2x --out runs/equal           equal compute, however it grows
  esper grow --resume --out runs/first                            continue after a stop
  esper grow --resume --epochs 80 --out runs/first                train longer
  esper grow --resume --model mynet.py:make --out runs/mine
  esper grow --task sources --deepen --out runs/deeper            wake blocks instead of seeds
  esper grow --model gpt.py:make --data text.npz --deepen-start 3 --deepen-controller slope
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esper.leyline.errors import UsageError
from esper.scripts.cli.main import Parser
from esper.scripts.cli.options import (
    absolute,
    add_run_options,
    add_settings,
    chosen,
    chosen_out,
    chosen_sinks,
    refuse_beside_resume,
)
from esper.scripts.cli.output import answer, err_console, interrupted, naming_resume
from esper.utils.process import choose_device
from esper.utils.settings import change_settings, parse_settings

_CONTROLLERS = (
    "who decides what grows: tamiyo (the shipped learned policy, for 12 epochs or more), "
    "heuristic, trial, slope, plateau, periodic, random, wait (never grows), schedule:FILE, the "
    "folder of a policy or of a training run, or greedy:FOLDER (always its most likely action); "
    "settings follow a colon, as in heuristic:plateau_epochs=5,rest_epochs=2 or "
    "heuristic:tuned.json"
)


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    what = parser.add_argument_group("what to grow")
    what.add_argument("--task", metavar="T", help="a task of `esper tasks`")
    what.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="a model of your own: a module or .py file and the function in it that returns the "
        "model, as in mynet:make or nets/mynet.py:make",
    )
    what.add_argument(
        "--slots",
        metavar="A,B",
        help="names of submodules whose output seeds may add to, such as blocks.*; auto chooses "
        "them (default: those that the task or the model names, else auto)",
    )
    what.add_argument(
        "--axes",
        metavar="AXES",
        help="axes of the activations at slots where they cannot be inferred: BC, BTC, TBC, BCL, "
        "BCHW or BHWC for all slots, or A=BTC,B=TBC",
    )
    what.add_argument(
        "--data",
        metavar="PATH",
        help="file or folder of the data (default: see docs/data.md)",
    )
    how = parser.add_argument_group("how to train and grow it")
    how.add_argument("--controller", metavar="C", help=f"{_CONTROLLERS} (default: tamiyo)")
    how.add_argument("--epochs", type=int, metavar="E", help="epochs (default: the task's, or 60)")
    how.add_argument("--seed", type=int, metavar="S", help="random seed (default: 0)")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), help="device (default: auto)")
    how.add_argument(
        "--optimizer",
        choices=("sgd", "adamw"),
        help="optimizer; with adamw also give --learning-rate, such as 0.003 "
        "(default: the task's, or sgd)",
    )
    how.add_argument(
        "--learning-rate",
        type=float,
        metavar="LR",
        help="peak learning rate; 0.01 to 0.2 suits sgd, 0.001 to 0.005 suits adamw "
        "(default: the task's, or 0.01)",
    )
    how.add_argument(
        "--weight-decay",
        type=float,
        metavar="W",
        help="weight decay; 0.01 to 0.1 is usual for adamw (default: the task's, or 0.0005)",
    )
    how.add_argument(
        "--schedule",
        choices=("constant", "cosine", "wsd"),
        help="learning-rate schedule; wsd is warm-up, stable, decay (default: the task's, or "
        "constant)",
    )
    how.add_argument(
        "--batch-size", type=int, metavar="B", help="samples per batch (default: the task's, or 64)"
    )
    how.add_argument(
        "--twin",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also train the twin, at twice the cost (default: yes)",
    )
    how.add_argument(
        "--decide-every",
        type=int,
        metavar="N",
        help="optimizer steps per epoch, which ends with a validation and a decision "
        "(default: one pass over the data)",
    )
    how.add_argument(
        "--budget",
        metavar="FLOPS",
        help="training FLOPs of the whole run, such as 2e12, or a multiple of what the model would "
        "take for all epochs, such as 10x; every epoch is then an equal share of them "
        "(default: the task's, or none)",
    )
    how.add_argument(
        "--keep",
        choices=("best", "last"),
        help="keep the network of the best validated epoch or of the last (default: best)",
    )
    how.add_argument(
        "--patience",
        type=int,
        metavar="N",
        help="stop after this many epochs without a better validation score (default: never)",
    )
    add_settings(
        how,
        "such as growth.training.momentum=0.8; may be given again, and with --resume "
        "(default: none)",
    )
    depth = parser.add_argument_group("grow in depth instead of seeds")
    depth.add_argument(
        "--deepen",
        action="store_true",
        default=None,
        help="train only some blocks of the network at first and wake the others later as copies "
        "of trained ones; no seeds grow, and a twin is trained only with --twin; more by --set: "
        "growth.deepen.at={0.2: 6, 0.4: 12}, .order, .stacks, .weights (default: no)",
    )
    depth.add_argument(
        "--deepen-start",
        type=int,
        metavar="N",
        help="blocks of each stack that are awake at the start (default: a quarter)",
    )
    depth.add_argument(
        "--deepen-controller",
        choices=("schedule", "plateau", "slope"),
        help="when blocks wake: schedule at 20 and 40 %% of the run, plateau and slope by the "
        "training loss (default: schedule)",
    )
    limits = parser.add_argument_group("limits of growth (0: none, or the policy's own)")
    limits.add_argument(
        "--max-growth",
        metavar="X",
        help="parameters and FLOPs as a multiple of the host's, such as 2 or 2x; replaces the "
        "task's own limits (default: 0)",
    )
    for name, what_is_limited in (
        ("--max-seeds", "seeds in the network at once, fossilized ones included"),
        ("--max-parameters", "trainable parameters of the whole network"),
        ("--max-added-flops", "FLOPs per sample that seeds may add"),
    ):
        limits.add_argument(name, type=int, metavar="N", help=f"{what_is_limited} (default: 0)")
    where = add_run_options(
        parser,
        resume="continue the run in --out; --epochs, --keep, --patience and --set may change it; "
        "repeat --model, because a run folder never decides which code is run",
        verbose="also show waits and refused decisions, why a learned controller decided so, and "
        "informative alarms",
    )
    where.add_argument(
        "--export",
        choices=("onnx", "pt2"),
        help="also export the grown network to RUN/grown.FORMAT",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from esper.growth.grow import carry_out
    from esper.growth.grown import check_format
    from esper.lab.tasks.request import model_name
    from esper.nissa.folder import GROWING, resume_command
    from esper.nissa.recorded import Stopped
    from esper.scripts.cli.output import AlarmRelay
    from esper.scripts.cli.views import GrowthView, print_grown

    if options.export:
        check_format(options.export)
    if options.model is not None:
        options.model = _absolute_model(options.model)
    called = model_name(options.model or "grown").partition(":")[0]
    options.out = chosen_out(options, options.task or called)
    again = resume_command(options.out, GROWING, model=options.model)
    alarms = AlarmRelay()

    @contextmanager
    def watch(growth: Any) -> Iterator[Any]:
        view = GrowthView(
            err_console(),
            growth.config.epochs,
            growth.gardener.epoch,
            title=f"{'deepening' if growth.depth else 'growing'} {growth.name} "
            f"({growth.controller_name}, {growth.device.type}) into {options.out}",
            verbose=options.verbose,
        )
        alarms.show_by(view.alarm)
        with view, naming_resume(again):
            yield lambda record: view.show(record, _reasons(growth, record, options))

    try:
        grown, document = carry_out(
            _request(options),
            options.out,
            watch=watch,
            resume=(options.source or "latest") if options.resume else None,
            overwrite=options.overwrite,
            command=f"esper {shlex.join(options.arguments)}",
            sinks=chosen_sinks(options),
            on_alarm=alarms,
            export=options.export,
        )
    except Stopped as stop:
        return interrupted(again, f" after epoch {stop.epoch}")
    return answer(options.json, document, lambda: print_grown(grown, document))


def _request(options: argparse.Namespace) -> Any:
    """Return the request that the options describe: a new run, or one to continue."""
    from esper.lab.tasks.request import request_again

    settings = parse_settings(options.settings or ())
    anchors = {
        "data": _data_path,
        "controller": _controller,
        "growth.deepen.weights": absolute,
    }
    for name, anchored in anchors.items():
        if isinstance(settings.get(name), str):
            settings[name] = anchored(settings[name])
    if options.resume:
        _refuse_changes(options)
        if options.device is not None:
            settings["device"] = choose_device(options.device).type
        for name, value in chosen(options, "epochs", "keep", "patience").items():
            settings[f"growth.{name}"] = value
        return request_again(options.out, settings, model=options.model)
    if options.source is not None:
        raise UsageError("--from is for a run that is continued; add --resume")
    return change_settings(resolve(options), settings).request()


def resolve(options: argparse.Namespace) -> Any:
    """Return the complete settings of a new run."""
    from esper.growth.config import DEFAULT_CONTROLLER
    from esper.lab.tasks.request import GrowSettings, growth_of

    growth = growth_of(options.task, _depth(options))
    given = chosen(options, "optimizer", "learning_rate", "weight_decay", "batch_size", "schedule")
    if given.get("optimizer", growth.training.optimizer) != growth.training.optimizer:
        _need_rate(options, growth.training)
    training = growth.training.replace(**given)
    growth = growth.replace(
        training=training,
        **chosen(options, "epochs", "budget", "seed", "twin", "decide_every", "keep", "patience"),
    )
    limits = chosen(options, "max_growth", "max_seeds", "max_parameters", "max_added_flops")
    return GrowSettings(
        task=options.task,
        model=options.model,
        slots=tuple(part.strip() for part in (options.slots or "").split(",") if part.strip()),
        axes=options.axes,
        data=None if options.data is None else _data_path(options.data),
        controller=_controller(options.controller or DEFAULT_CONTROLLER),
        device="cuda" if choose_device(options.device or "auto").type == "cuda" else "cpu",
        growth=growth.replace(garden=growth.garden.limited(**limits)),
    )


def _depth(options: argparse.Namespace) -> Any:
    """Return the settings of growth in depth, None without it."""
    from esper.growth.depth.rules import DeepenConfig

    given = chosen(options, "deepen_start", "deepen_controller")
    if not options.deepen and not given:
        return None
    return DeepenConfig(**{name.removeprefix("deepen_"): value for name, value in given.items()})


def _need_rate(options: argparse.Namespace, training: Any) -> None:
    """Refuse an optimizer with the learning rate of another."""
    from esper.kasmina.training import GOOD_RATES

    if options.learning_rate is None:
        raise UsageError(
            f"--optimizer {options.optimizer} needs --learning-rate "
            f"({GOOD_RATES[options.optimizer]} suits it); the task's {training.learning_rate:g} "
            f"is for {training.optimizer}"
        )


def _controller(spec: str) -> str:
    """Return a controller whose file has an absolute path, so that any folder can resume it."""
    name, colon, argument = spec.partition(":")
    if argument and (name == "schedule" or os.path.isfile(argument)):
        return f"{name}{colon}{absolute(argument)}"
    return spec


def _absolute_model(spec: str) -> str:
    """Return a model whose file has an absolute path, so that any folder can resume it."""
    from esper.utils.process import is_file_name

    module, separator, factory = spec.rpartition(":")
    return f"{absolute(module) if is_file_name(module) else module}{separator}{factory}"


def _data_path(path: str) -> str:
    found = Path(absolute(path))
    try:
        found.exists()  # whether it does is for the reader to say
    except OSError as error:
        raise UsageError(f"--data cannot be {path!r}: {error.strerror}") from None
    return str(found)


def _refuse_changes(options: argparse.Namespace) -> None:
    kept = {"out", "resume", "source", "export", "json", "verbose", "run", "overwrite", "arguments"}
    kept |= {"settings", "model", "device", "epochs", "keep", "patience", "wandb"}
    names = [name for name in vars(options) if name not in kept]
    advice = ", or name what is to change, as in --set growth.training.learning_rate=0.01"
    refuse_beside_resume(options, names, advice)


def _reasons(growth: Any, record: Any, options: argparse.Namespace) -> list[str]:
    """Return why a learned controller decided as it did, with --verbose."""
    from esper.tamiyo.controllers import LearnedController

    controller = growth.gardener.controller
    asked = options.verbose and record.decision is not None
    if not asked or not isinstance(controller, LearnedController):
        return []
    return controller.explain().lines() if controller.decides() else []
