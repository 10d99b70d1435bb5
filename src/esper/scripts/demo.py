"""`make demo`: train a small controller, grow a network with it, and say how it compares.

    python -m esper.scripts.demo

It trains the recipe `demo` on the embedded digits, grows one network with the result, and plays
fresh seeds greedily against the same networks that only wait. It prints what came of it, whatever
that is: a few minutes of training are few.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from esper.cli.main import Parser
from esper.cli.main import main as esper
from esper.cli.output import err_console, out_console, safe

TRAINED, GROWN = "tamiyo", "grown"
"""Folders of the two runs, below that of the demo."""

GREEDY = "trained, greedy"
"""Name of the controller the verdict is about."""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(prog="python -m esper.scripts.demo", description=__doc__)
    parser.add_argument("--recipe", default="demo", metavar="R", help="recipe to train")
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="folder of both runs")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of both runs")
    parser.add_argument(
        "--seeds", type=int, default=8, metavar="K", help="fresh networks of the comparison"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, grow, compare and print; return the exit code of the first part that fails."""
    options = build_parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
    started = time.monotonic()
    out, seed = Path(options.out), str(options.seed)
    trained, grown = out / TRAINED, out / GROWN
    where = ("--seed", seed, "--device", "cpu", "--overwrite", "--out")
    err_console().print("1. training a controller", style="bold")
    code = esper(["train", options.recipe, *where, str(trained)])
    if code:
        return code
    err_console().print("2. growing a network with it", style="bold")
    epochs = str(episode_epochs(trained))
    controller = ("--controller", str(trained))
    code = esper(["grow", "--task", "digits", *controller, "--epochs", epochs, *where, str(grown)])
    if code:
        return code
    err_console().print(f"3. comparing it on {options.seeds} fresh networks", style="bold")
    results = compare(trained, options.seeds)
    print_comparison(results, options.seeds)
    console = out_console()
    console.print(safe(f"report of the training: {trained / 'report.html'}"), soft_wrap=True)
    console.print(safe(f"report of the growth:   {grown / 'report.html'}"), soft_wrap=True)
    console.print(f"done in {time.monotonic() - started:.0f} s")
    return 0


def episode_epochs(run: Path) -> int:
    """Return the epochs of an episode the controller was trained for."""
    return int(_config(run).epochs)


def compare(run: Path, seeds: int) -> dict[str, Any]:
    """Return how the controller of a run and a random one do on fresh seeds, by name.

    A young policy draws actions long before one of them is its likeliest, so both ways are shown.
    """
    from esper.simic.training.evaluation import Evaluator
    from esper.tamiyo.controllers.policy_file import load_policy

    evaluator = Evaluator(_config(run), seeds)
    policy = load_policy(run)
    return {
        GREEDY: evaluator.evaluate(policy),
        "trained, drawing": evaluator.evaluate(policy, greedy=False),
        "random": evaluator.evaluate("random"),
    }


def print_comparison(results: dict[str, Any], seeds: int) -> None:
    """Print each controller beside the networks that only waited, and say what it shows."""
    from esper.simic.training.evaluation import paired_interval

    table = Table(title=f"Test score of {seeds} fresh networks", title_justify="left")
    for name in ("controller", "test", "gain over WAIT-only", "parameters", "FLOPs", "seeds kept"):
        table.add_column(name, justify="left" if name == "controller" else "right")
    first = next(iter(results.values()))
    waiting = float(first.twin_test_scores.mean())
    table.add_row("WAIT-only", f"{waiting:.2f}", "–", "1.00 ×", "1.00 ×", "–")
    intervals = {}
    for name, result in results.items():
        intervals[name] = interval = paired_interval(result.test_gains)
        kept, begun = int(result.fossilized.sum()), int(result.germinated.sum())
        table.add_row(
            name,
            f"{float(result.test_scores.mean()):.2f}",
            f"{interval.mean:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]",
            f"{float(result.parameter_ratios.mean()):.2f} ×",
            f"{float(result.flop_ratios.mean()):.2f} ×",
            f"{kept} of {begun}",
        )
    console = out_console()
    console.print(table)
    has_grown = bool(results[GREEDY].germinated.any())
    console.print(safe(verdict(intervals[GREEDY], has_grown)), soft_wrap=True)


def verdict(interval: Any, has_grown: bool = True) -> str:
    """Return in one sentence what the comparison shows, in either direction."""
    if not has_grown:
        return (
            "The controller only waited: after so short a training waiting is still its likeliest "
            "choice everywhere; `esper train digits` trains longer."
        )
    told = f"{interval.mean:+.2f} points on average, 95 % interval {interval.low:+.2f} to "
    told += f"{interval.high:+.2f}"
    if interval.low > 0:
        return f"The controller beats waiting ({told})."
    if interval.high < 0:
        return f"The controller is worse than waiting ({told}); `esper train digits` trains longer."
    return (
        f"The controller is level with waiting within chance ({told}); `esper train digits` "
        "trains longer."
    )


def _config(run: Path) -> Any:
    from esper.runs.folder import RunFolder
    from esper.runs.training import read_run_config

    return read_run_config(RunFolder(run))


if __name__ == "__main__":
    raise SystemExit(main())
