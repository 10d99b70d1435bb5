"""`python -m esper.scripts.train`: the documents' own entry point, a thin alias of the commands.

    python -m esper.scripts.train ppo --episodes 5 --max-epochs 10 --seed 42
    python -m esper.scripts.train heuristic --max-epochs 75 --seed 42

`ppo` is `esper train` and `heuristic` is `esper grow --controller heuristic`: those commands have
more options. By default both use the embedded digits, so neither data nor a network is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from esper.cli.main import Parser
from esper.cli.main import main as esper
from esper.cli.options import add_out

RECIPE = "digits"
ENVS = 4
"""The documents' number of environments."""

POLICY_SETTINGS = {
    "v1": (
        "policy.lstm_hidden_dim=128",
        "policy.blueprint_layers=2",
        "policy.critic=state",
    ),
    "v2": ("policy.lstm_hidden_dim=512",),
}
"""What distinguishes the documents' two policies: width, blueprint head, the critic's input."""


def build_parser() -> Parser:
    """Return the parser of both subcommands."""
    parser = Parser(
        prog="python -m esper.scripts.train",
        description="Train a controller, or grow with the heuristic one, by the documents' names.",
    )
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    ppo = verbs.add_parser("ppo", help="train a controller: `esper train`")
    ppo.add_argument("--episodes", type=int, default=100, metavar="R", help="rounds of training")
    ppo.add_argument(
        "--max-epochs", type=int, default=60, metavar="L", help="decisions in an episode"
    )
    ppo.add_argument("--n-envs", type=int, default=ENVS, metavar="N", help="networks side by side")
    ppo.add_argument(
        "--policy-version",
        choices=tuple(POLICY_SETTINGS),
        default="v2",
        help="v1: 128 hidden, all heads of two layers, critic without the op; v2: 512 hidden",
    )
    ppo.add_argument("--obs-version", default="v3", metavar="V", help="observation: only v3 exists")
    ppo.add_argument("--seed", type=int, default=42, metavar="S", help="seed of the run")
    ppo.add_argument("--task", default="digits", metavar="T", help="a task of `esper tasks`")
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
        return esper(ppo_command(options))
    return max(esper(command) for command in heuristic_commands(options))


def ppo_command(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `esper train`."""
    settings = [
        part for setting in POLICY_SETTINGS[options.policy_version] for part in ("--set", setting)
    ]
    return [
        *("train", RECIPE, "--task", options.task, "--rounds", str(options.episodes)),
        *("--envs", str(options.n_envs), "--episode-length", str(options.max_epochs)),
        *("--seed", str(options.seed), *settings, "--device", options.device),
        *(("--out", options.out) if options.out else ()),
    ]


def heuristic_commands(options: argparse.Namespace) -> list[list[str]]:
    """Return the arguments of `esper grow`, one network after another."""
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
