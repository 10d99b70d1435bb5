"""`python -m esper.scripts.train`: the entry point of the design documents, an alias of commands.

    python -m esper.scripts.train ppo --episodes 5 --max-epochs 10 --seed 42
    python -m esper.scripts.train ppo --resume --set ppo.entropy_coef=0.1 --out runs/digits
    python -m esper.scripts.train heuristic --max-epochs 75 --seed 42

`ppo` is `esper train` and `heuristic` is `esper grow --controller heuristic`; those commands have
more options. By default both use the embedded digits, so no data is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from esper.scripts.cli.main import Parser
from esper.scripts.cli.main import main as esper
from esper.scripts.cli.options import add_out

RECIPE = "digits"
ENVS = 4
"""The documents' number of environments."""


class Option(NamedTuple):
    """An option of `ppo` in the words of `esper train`."""

    option: str
    setting: str
    """The setting that it is, for a run that is continued."""
    default: object


OPTIONS = {
    "task": Option("--task", "tasks", "digits"),
    "episodes": Option("--rounds", "rounds", 100),
    "n_envs": Option("--envs", "rows", ENVS),
    "max_epochs": Option("--episode-length", "episode_length", 60),
    "seed": Option("--seed", "seed", 42),
}

POLICY_SETTINGS = {
    "v1": (
        "policy.lstm_hidden_dim=128",
        "policy.blueprint_layers=2",
        "policy.critic=state",
    ),
    "v2": ("policy.lstm_hidden_dim=512",),
}
"""Settings of the two policies of the design documents."""


def build_parser() -> Parser:
    """Return the parser of both subcommands."""
    parser = Parser(
        prog="python -m esper.scripts.train",
        description="Train a controller, or grow with the heuristic one, by the documents' names.",
    )
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    ppo = verbs.add_parser("ppo", help="train a controller: `esper train`")
    # No defaults here: a continued run keeps its settings.
    ppo.add_argument("--episodes", type=int, metavar="R", help="rounds of training (default: 100)")
    ppo.add_argument(
        "--max-epochs", type=int, metavar="L", help="decisions in an episode (default: 60)"
    )
    ppo.add_argument(
        "--n-envs", type=int, metavar="N", help=f"networks side by side (default: {ENVS})"
    )
    ppo.add_argument(
        "--policy-version",
        choices=tuple(POLICY_SETTINGS),
        help="v1: 128 hidden, all heads of two layers, critic without the op; v2: 512 hidden "
        "(default: v2)",
    )
    ppo.add_argument("--obs-version", default="v3", metavar="V", help="observation: only v3 exists")
    ppo.add_argument("--seed", type=int, metavar="S", help="seed of the run (default: 42)")
    ppo.add_argument("--task", metavar="T", help="a task of `esper tasks` (default: digits)")
    ppo.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other setting (page Settings of the documentation); may be given again",
    )
    ppo.add_argument("--resume", action="store_true", help="continue the run in --out")
    _add_place(ppo)
    heuristic = verbs.add_parser("heuristic", help="grow with the heuristic: `esper grow`")
    heuristic.add_argument(
        "--episodes",
        type=positive,
        default=1,
        metavar="K",
        help="networks, with seeds from --seed on",
    )
    heuristic.add_argument("--max-epochs", type=int, default=75, metavar="E", help="epochs of each")
    heuristic.add_argument("--seed", type=int, default=42, metavar="S", help="seed of the first")
    heuristic.add_argument("--task", default="digits", metavar="T", help="a task of `esper tasks`")
    heuristic.add_argument(
        "--max-seeds", type=int, default=0, metavar="N", help="seeds alive or fossilized; 0: any"
    )
    heuristic.add_argument(
        "--plateau-epochs",
        type=int,
        metavar="N",
        help="epochs without progress before a seed is germinated (default: the heuristic's own)",
    )
    _add_place(heuristic)
    return parser


def _add_place(parser: Parser) -> None:
    add_out(parser)
    devices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", choices=devices, default="auto", help="where it runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Translate a command and carry it out; return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    options = parser.parse_args(given)
    if options.command == "ppo":
        if options.obs_version != "v3":
            parser.error(f"there is no observation {options.obs_version!r}; only v3 exists")
        if options.resume and not options.out:
            parser.error("--resume needs the run to continue: --out RUN")
        return esper(ppo_command(options))
    return max(esper(command) for command in heuristic_commands(options))


def ppo_command(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `esper train`; with --resume they change the run."""
    given = {name: getattr(options, name) for name in OPTIONS}
    known = {name: value for name, value in given.items() if value is not None}
    settings = [*options.set]
    if options.policy_version or not options.resume:
        settings = [*POLICY_SETTINGS[options.policy_version or "v2"], *settings]
    words = ["train", "--resume"] if options.resume else ["train", RECIPE]
    if options.resume:
        settings = [f"{OPTIONS[name].setting}={value}" for name, value in known.items()] + settings
    else:
        for name, (option, _, default) in OPTIONS.items():
            words += [option, str(known.get(name, default))]
    words += [word for setting in settings for word in ("--set", setting)]
    if not (options.resume and options.device == "auto"):
        words += ["--device", options.device]
    return [*words, *(("--out", options.out) if options.out else ())]


def heuristic_commands(options: argparse.Namespace) -> list[list[str]]:
    """Return the arguments of `esper grow` for each network."""
    out, count = options.out, options.episodes
    folders = [f"{out}/{number}" if out and count > 1 else out for number in range(count)]
    controller = "heuristic"
    if options.plateau_epochs is not None:
        controller = f"heuristic:plateau_epochs={options.plateau_epochs}"
    return [
        [
            *("grow", "--task", options.task, "--controller", controller),
            *("--epochs", str(options.max_epochs), "--seed", str(options.seed + number)),
            *("--max-seeds", str(options.max_seeds), "--device", options.device),
            *(("--out", folder) if folder else ()),
        ]
        for number, folder in enumerate(folders)
    ]


def positive(text: str) -> int:
    """Return a count from 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it must be a whole number from 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
