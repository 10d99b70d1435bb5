"""`esper grow`: train and grow one network."""

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

_EPILOG = """\
examples:
  esper grow --task digits
  esper grow --task digits --optimizer adamw --learning-rate 0.003 --out runs/adamw
  esper grow --task digits --set growth.training.seed_warmup=2 --out runs/gently
  esper grow --task cifar_baseline --data ~/cifar-10-batches-py --device cuda --out runs/cifar
  esper grow --model mynet.py:make --slots layer1,layer2 --data images.npz --out runs/mine
  esper grow --task digits --controller heuristic:plateau_epochs=5 --out runs/patient
  esper grow --task sources --deepen --out runs/deeper
  esper grow --model gpt.py:make --data text.npz --deepen-start 3 --deepen-controller slope
  esper grow --resume --out runs/first
  esper grow --resume --epochs 80 --out runs/first
  esper grow --resume --model mynet.py:make --out runs/mine
"""

_CONTROLLERS = (
    "tamiyo (the learned one that comes along, for 12 epochs or more), heuristic, plateau, "
    "periodic, random, wait, schedule:FILE, the folder of a saved policy or of a training run, or "
    "greedy:FOLDER, which draws nothing; settings follow a colon, as in "
    "heuristic:plateau_epochs=5,rest_epochs=2, or lie in a file, as in heuristic:tuned.json"
)


def set_up(parser: Parser) -> None:
    """Describe the verb and its options."""
    parser.description = (
        "Train a network while a controller grows it, and compare it with its twin."
    )
    parser.epilog = _EPILOG
    what = parser.add_argument_group("what to grow")
    what.add_argument("--task", metavar="T", help="a task of `esper tasks`")
    what.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="a model of your own: a module or a .py file, and the function in it that returns the "
        "model, as in mynet:make or nets/mynet.py:make",
    )
    what.add_argument(
        "--slots",
        metavar="A,B",
        help="submodules whose output may grow, such as blocks.*, or auto for those that look "
        "best (default: those the task or the model names, else auto)",
    )
    what.add_argument(
        "--axes",
        metavar="AXES",
        help="axes of activations at slots where they cannot be found out: BC, BTC, TBC, BCL, BCHW "
        "or BHWC for all, or A=BTC,B=TBC",
    )
    what.add_argument(
        "--data", metavar="PATH", help="file or folder of the data (default: the usual places)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--controller", metavar="C", help=f"{_CONTROLLERS} (default: tamiyo)")
    how.add_argument("--epochs", type=int, metavar="E", help="length (default: the task's, or 60)")
    how.add_argument("--seed", type=int, metavar="S", help="seed of the run (default: 0)")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where (default: auto)")
    how.add_argument(
        "--optimizer",
        choices=("sgd", "adamw"),
        help="what moves the weights; adamw needs a --learning-rate of its own, such as 0.003 "
        "(default: the task's, or sgd)",
    )
    how.add_argument(
        "--learning-rate",
        type=float,
        metavar="LR",
        help="where it is highest; good ones are 0.01 to 0.2 for sgd, 0.001 to 0.005 for adamw "
        "(default: the task's, or 0.01)",
    )
    how.add_argument(
        "--weight-decay",
        type=float,
        metavar="W",
        help="how much weights shrink; 0.01 to 0.1 is usual for adamw "
        "(default: the task's, or 0.0005)",
    )
    how.add_argument(
        "--schedule",
        choices=("constant", "cosine", "wsd"),
        help="how the learning rate moves over the run: not, along a cosine, or up, level and down "
        "(default: the task's, or constant)",
    )
    how.add_argument(
        "--batch-size", type=int, metavar="B", help="samples in a step (default: the task's, or 64)"
    )
    how.add_argument(
        "--twin",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also train the network that only waits (default: yes; twice the cost)",
    )
    how.add_argument(
        "--decide-every",
        type=int,
        metavar="N",
        help="training steps that count as an epoch (default: one pass over the data)",
    )
    how.add_argument(
        "--keep",
        choices=("best", "last"),
        help="which network is the result, of the twin alike: the best validated, or the last "
        "(default: best)",
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
    depth = parser.add_argument_group("depth, instead of seeds")
    depth.add_argument(
        "--deepen",
        action="store_true",
        default=None,
        help="let most blocks of the network sleep at first, and wake them as copies of trained "
        "ones; no seeds grow, and no twin is trained unless asked for. More by --set: "
        "growth.deepen.at={0.2: 6, 0.4: 12}, .order, .stacks, .weights (default: no)",
    )
    depth.add_argument(
        "--deepen-start",
        type=int,
        metavar="N",
        help="blocks of every stack that are awake at first (default: a quarter)",
    )
    depth.add_argument(
        "--deepen-controller",
        choices=("schedule", "plateau", "slope"),
        help="when blocks wake: at 20 and 40 %% of the run, or as the training loss says "
        "(default: schedule)",
    )
    limits = parser.add_argument_group("limits of growth (0: none, or the controller's own)")
    limits.add_argument(
        "--max-growth",
        metavar="X",
        help="parameters and operations as a multiple of the host's, such as 2 or 2x; takes the "
        "place of the task's own limits (default: 0)",
    )
    for name, what_is_limited in (
        ("--max-seeds", "seeds alive or fossilized"),
        ("--max-parameters", "trainable parameters"),
        ("--max-added-flops", "operations that seeds add for one sample"),
    ):
        limits.add_argument(name, type=int, metavar="N", help=f"{what_is_limited} (default: 0)")
    where = add_run_options(
        parser,
        resume="continue the run in --out, or extend it by a larger --epochs, with --keep, "
        "--patience and --set if asked for; give --model again where it had one, as no code is run "
        "because a folder names it",
        verbose="show every decision, and alarms that only inform",
    )
    where.add_argument("--export", choices=("onnx", "pt2"), help="also write the grown network")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command."""
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
    """Return what is to be grown, or continued."""
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
    """Turn options into complete settings."""
    from esper.growth.config import DEFAULT_CONTROLLER
    from esper.lab.tasks.request import GrowSettings, growth_of

    growth = growth_of(options.task, _depth(options))
    given = chosen(options, "optimizer", "learning_rate", "weight_decay", "batch_size", "schedule")
    if given.get("optimizer", growth.training.optimizer) != growth.training.optimizer:
        _need_rate(options, growth.training)
    training = growth.training.replace(**given)
    growth = growth.replace(
        training=training,
        **chosen(options, "epochs", "seed", "twin", "decide_every", "keep", "patience"),
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
    """Return how the network is deepened; None where it is not."""
    from esper.growth.depth.rules import DeepenConfig

    given = chosen(options, "deepen_start", "deepen_controller")
    if not options.deepen and not given:
        return None
    return DeepenConfig(**{name.removeprefix("deepen_"): value for name, value in given.items()})


def _need_rate(options: argparse.Namespace, training: Any) -> None:
    """Refuse to train by one optimizer at the learning rate of another."""
    from esper.kasmina.training import GOOD_RATES

    if options.learning_rate is None:
        raise UsageError(
            f"--optimizer {options.optimizer} needs a --learning-rate of its own "
            f"({GOOD_RATES[options.optimizer]} are good ones); {training.learning_rate:g} is for "
            f"{training.optimizer}"
        )


def _controller(spec: str) -> str:
    """Return a controller whose file is found from wherever the run is resumed."""
    name, colon, argument = spec.partition(":")
    if argument and (name == "schedule" or os.path.isfile(argument)):
        return f"{name}{colon}{absolute(argument)}"
    return spec


def _absolute_model(spec: str) -> str:
    """Return a model whose file is found from wherever the run is resumed."""
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
    """Return why a learned controller decided as it did, where every decision is shown."""
    from esper.tamiyo.controllers import LearnedController

    controller = growth.gardener.controller
    asked = options.verbose and record.decision is not None
    if not asked or not isinstance(controller, LearnedController):
        return []
    return controller.explain().lines() if controller.decides() else []
