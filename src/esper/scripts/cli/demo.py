"""`esper demo`: grow small networks on embedded data and compare them with static ones.

The first network is shown while it grows. Each grown network is compared with its twin, which never
grows, and with static networks of the same final size.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from esper.leyline.errors import UsageError
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import (
    err_console,
    new_table,
    out_console,
    print_json,
    print_line,
    safe,
)
from esper.utils.settings import changed_settings

if TYPE_CHECKING:
    from esper.growth.config import GrowthConfig
    from esper.lab.proof.arm import Standing
    from esper.leyline.records import RunSummary


TASK = "digits_narrow"
"""What is grown."""
CONTROLLER = "heuristic"
"""Who decides."""
FIRST_SEED = 10
"""Random seeds below this one were used to choose the task."""
PICTURE = "growth.svg"

_EXAMPLES = """\
examples:
  esper demo
  esper demo --seeds 2 --epochs 30              a shorter one
  esper report runs/demo                        the report of the first network again
"""


def set_up(parser: Parser) -> None:
    """Add the description, examples and options of the command."""
    parser.description = (
        f"Grow narrow networks on the embedded digits (task {TASK}, controller {CONTROLLER}) and "
        "compare each with its twin, which never grows, and with static networks of the same final "
        "size. Takes about two minutes on a CPU."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "--out", default="runs/demo", metavar="RUN", help="run folder of the first network"
    )
    parser.add_argument(
        "--seed", type=int, default=FIRST_SEED, metavar="S", help="random seed of the first network"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="K", help="networks to grow")
    parser.add_argument("--epochs", type=int, metavar="E", help="epochs (default: the task's)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from esper.lab.proof.arm import compare, grow_once, settings_of
    from esper.lab.tasks import get_task

    if options.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {options.seeds}")
    changes = {} if options.epochs is None else {"horizon": options.epochs}
    task = get_task(TASK, **changes)
    # Refuse a seed that is out of range before a folder is created.
    settings_of(task, options.seed + options.seeds - 1)
    data = task.load()
    started = time.process_time()
    console = err_console()
    settings = settings_of(task, options.seed)
    first, document = grow_live(options, settings)
    grown = [first]
    for seed in range(options.seed + 1, options.seed + options.seeds):
        console.print(f"growing a network with seed {seed}")
        grown.append(grow_once(task, data, seed, CONTROLLER))
    console.print("training static networks of the same size, each at four learning rates")
    arms = compare(task, grown, data)
    seconds = time.process_time() - started
    if options.json:
        print_json({**document, "cpu_s": seconds, "arms": [asdict(arm) for arm in arms]})
        return 0
    print_arms(arms, grown)
    out = out_console()
    print_line(out, f"picture: {document['picture']}")
    print_line(out, f"report:  {document['report']}")
    print_line(out, f"the first of them by hand: {by_hand(settings)}")
    out.print(f"done in {seconds:.0f} s of CPU time")
    return 0


def grow_live(options: argparse.Namespace, growth: Any) -> tuple[RunSummary, dict[str, Any]]:
    """Grow the first network into its folder, and show it while it grows."""
    from esper.growth.grow import carry_out
    from esper.lab.tasks.request import GrowSettings
    from esper.scripts.cli.views import GrowthView

    title = f"growing {TASK} ({CONTROLLER}, seed {options.seed})"

    @contextmanager
    def watch(_: Any) -> Iterator[Any]:
        with GrowthView(err_console(), growth.epochs, 0, title=title) as view:
            yield view.show

    grown, document = carry_out(
        GrowSettings(task=TASK, controller=CONTROLLER, growth=growth).request(),
        options.out,
        watch=watch,
        overwrite=True,
        command=f"esper {shlex.join(options.arguments)}",
    )
    picture = Path(options.out) / PICTURE
    grown.plot(picture)
    return grown.summary, {**document, "picture": str(picture)}


def by_hand(growth: GrowthConfig) -> str:
    """Return the `esper grow` command that repeats a network of the demo."""
    from esper.lab.tasks.request import growth_of

    usual = growth_of(TASK)
    given = ["--task", TASK, "--controller", CONTROLLER, "--seed", str(growth.seed)]
    if growth.epochs != usual.epochs:
        given += ["--epochs", str(growth.epochs)]
    same = usual.replace(seed=growth.seed, epochs=growth.epochs)
    for key, (_, value) in changed_settings(same.to_mapping(), growth.to_mapping()).items():
        given += ["--set", f"growth.{key}={value}"]
    return f"esper grow {shlex.join(given)}"


def print_arms(arms: Sequence[Standing], grown: Sequence[RunSummary]) -> None:
    """Print the table and its result in one sentence."""
    twin, tended, static = arms
    count = len(grown)
    of = f"median of {count} seeds" if count > 1 else "one seed"
    numbers = ("test accuracy", "over the twin", "parameters", "FLOPs")
    table = new_table(f"{TASK}, {of}", ("", *numbers), numbers=numbers)
    above = ("–", f"{tended.gain(twin):+.2f}", f"{static.lead(twin):+.2f}")
    for arm, gain in zip(arms, above, strict=True):
        table.add_row(
            safe(arm.name),
            f"{median(arm.test):.2f}",
            gain,
            f"{arm.parameters:,}",
            f"{arm.flops:,}",
        )
    console = out_console()
    console.print(table)
    print_line(console, verdict(twin, tended, static))
    console.print("With so few seeds, differences below about one point may be chance.")


def verdict(twin: Standing, grown: Standing, static: Standing) -> str:
    """Return the result in one sentence."""
    wins = sum(own > other for own, other in zip(grown.test, twin.test, strict=True))
    against_twin, against_static = grown.gain(twin), grown.lead(static)
    text = f"Growing beat waiting in {wins} of {len(grown.test)} runs ({_points(against_twin)})"
    if against_static > 0:
        return f"{text}, and a static network of that size by {_points(against_static)}."
    if against_static == 0:
        return f"{text}; a static network of that size is as good."
    return f"{text}; a static network of that size is better by {_points(-against_static)}."


def _points(gain: float) -> str:
    return f"{gain:+.2f} points"
