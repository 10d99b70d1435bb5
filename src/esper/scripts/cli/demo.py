"""Train a small GPT that grows and static ones, at equal compute; two minutes.

All learn the sources of Python's own library. The static networks have 2 and 4 blocks; the one that
grows starts with 1 block and wakes the others. Takes about two minutes on two cores.

Examples:
  esper demo
  esper demo --compute 2                        twice as long
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from esper.leyline.errors import EsperError, UsageError
from esper.nissa.recorded import INTERRUPTED, stop_signals
from esper.scripts.cli.main import Parser
from esper.scripts.cli.output import (
    LiveView,
    err_console,
    new_table,
    out_console,
    print_json,
    print_line,
    safe,
    sparkline,
)
from esper.utils.files import atomic_write_bytes

BUDGET = 1.2e12
"""Training FLOPs of every network: less than a minute on one core."""
_SAME = 0.05
"""Relative difference of training FLOPs up to which compute counts as equal."""
_LONG_GAP = re.compile(r" {17,}")
PROMPT = "def "
"""Prompt from which every network writes text."""
PICTURE = "depth.svg"
REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the networks that are compared."""

    name: str
    start: int
    """Blocks that are awake at first."""
    blocks: int
    learning_rate: float
    """Learning rate; `python -m benchmarks demo --rates` tries others."""


ARMS = (
    Arm("static, 2 blocks", start=2, blocks=2, learning_rate=0.004),
    Arm("static, 4 blocks", start=4, blocks=4, learning_rate=0.004),
    Arm("grown 1→2→4 blocks", start=1, blocks=4, learning_rate=0.004),
)


@dataclass(frozen=True, slots=True)
class Point:
    """State of a network after a part of its training."""

    share: float
    """Share of its training that is done, 0 to 1."""
    flops: float
    """Training FLOPs spent."""
    blocks: int
    """Blocks awake."""
    loss: float
    """Validation loss, in nats per byte."""


@dataclass(slots=True)
class Outcome:
    """Results of a network; the test loss is None if training was stopped before the test."""

    name: str
    curve: list[Point] = field(default_factory=list)
    parameters: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    test_loss: float | None = None
    text: str = ""
    report: str = ""
    """Path of the report; only the network that grows has one."""
    problem: str = ""
    """Why the report could not be written."""


Outcomes = Mapping[str, Outcome]
"""Results by name of the network; static ones first."""


def set_up(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--out", default="runs/demo", metavar="FOLDER", help="folder for picture and report"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of all networks")
    parser.add_argument(
        "--compute",
        type=float,
        default=1.0,
        metavar="X",
        help=f"training compute of each network, in multiples of {BUDGET:.3g} FLOPs",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.set_defaults(needs_no_torch=True)


def run(options: argparse.Namespace) -> int:
    """Train, compare and print."""
    from esper.scripts.cli.demo_picture import draw_front

    if not 0.0 < options.compute < float("inf"):
        raise UsageError(f"--compute must be above 0, got {options.compute:g}")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed must be at least 0 and below 2**63, got {options.seed}")
    folder = Path(options.out)
    began = time.monotonic()
    with stop_signals() as noted, DemoView(err_console(), ARMS) as view:
        outcomes = train_side_by_side(
            ARMS, options.seed, options.compute, folder / REPORT, view.show, noted
        )
    grown = outcomes[ARMS[-1].name]
    problems = [f"{one.name}: {one.problem}" for one in outcomes.values() if one.problem]
    report = str(folder / REPORT) if grown.report else ""
    picture = ""
    if any(one.curve for one in outcomes.values()):
        try:
            atomic_write_bytes(folder / PICTURE, draw_front(outcomes).encode())
            picture = str(folder / PICTURE)
        except EsperError as error:
            problems.append(str(error))
    is_whole = all(one.test_loss is not None for one in outcomes.values())
    if options.json:
        document = {
            "seed": options.seed,
            "compute": options.compute,
            "interrupted": bool(noted),
            "networks": [asdict(one) for one in outcomes.values()],
            "picture": picture,
            "report": report,
            "problems": problems,
        }
        print_json(document)
    else:
        print_outcomes(outcomes, options.seed, is_interrupted=bool(noted))
        out = out_console()
        for name, path in (("picture", picture), ("report", report)):
            if path:
                print_line(out, f"{name}: {path}")
        spent = sum(one.cpu_s for one in outcomes.values())
        print_line(out, f"done in {time.monotonic() - began:.0f} s, {spent:.0f} s of CPU time")
    for problem in problems:
        print_line(err_console(), f"esper: {problem}")
    return INTERRUPTED if noted else 0 if is_whole else 1


def train_side_by_side(
    arms: Sequence[Arm],
    seed: int,
    compute: float,
    report: Path,
    on_point: Callable[[str, Point], None],
    noted: Sequence[int],
) -> dict[str, Outcome]:
    """Train each network in its own process, and return the results.

    Args:
        arms: the networks.
        seed: of all of them.
        compute: training FLOPs, as a multiple of the usual.
        report: path of the report of the network that grows.
        on_point: called with the name of a network and every point of its curve.
        noted: signals so far. After the first one, training stops and networks are tested as they
            are. A second one raises KeyboardInterrupt without a test.
    """
    context = multiprocessing.get_context("spawn")
    outcomes = {arm.name: Outcome(arm.name) for arm in arms}
    running = {}
    processes = {}
    for arm in arms:
        ours, theirs = context.Pipe()
        written = report.absolute() if arm.start < arm.blocks else None
        process = context.Process(
            target=_work, args=(theirs, arm, seed, compute, written), daemon=True
        )
        process.start()
        theirs.close()
        running[ours] = arm.name
        processes[arm.name] = process
    is_told = False
    try:
        while running:
            if noted and not is_told:
                is_told = True
                for pipe in running:
                    with suppress(OSError):  # one that is done has closed it
                        pipe.send("stop")
            ready = wait(list(running), timeout=0.2)
            for pipe in [pipe for pipe in running if pipe in ready]:
                name = running[pipe]
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    processes[name].join()
                    code = processes[name].exitcode
                    # Killed, as by a system that is out of memory.
                    advice = "; is memory scarce?" if code == -9 else ""
                    answer = EsperError(f"its process ended with code {code}{advice}")
                if isinstance(answer, Point):
                    outcomes[name].curve.append(answer)
                    on_point(name, answer)
                    continue
                if isinstance(answer, Outcome):
                    outcomes[name] = answer
                else:
                    outcomes[name].problem = str(answer)
                del running[pipe]
    except KeyboardInterrupt:
        if not noted:
            raise
    finally:
        for process in processes.values():
            process.terminate()
            process.join()
    return outcomes


def _work(pipe: Connection, *request: Any) -> None:
    """Train a network in its own process; only that process loads PyTorch."""
    from esper.scripts.cli.demo_networks import work

    work(pipe, *request)


# ---- Live: one row for each network, or plain lines without a terminal


_NARROW = 72
_SPARKS = 24


class DemoView(LiveView):
    """Shows progress and losses of the networks."""

    def __init__(self, console: Console, arms: Sequence[Arm]) -> None:
        """Show these networks."""
        super().__init__(console, title="three networks", total=len(arms), done=0)
        self._arms = arms
        self._curves: dict[str, list[Point]] = {arm.name: [] for arm in arms}

    def show(self, name: str, point: Point) -> None:
        """Update the progress of a network."""
        before = self._curves[name]
        has_grown = bool(before) and point.blocks > before[-1].blocks
        before.append(point)
        done = sum(curve[-1].share for curve in self._curves.values() if curve)
        self._progress.update(self._bar, completed=done)
        if self._live is not None:
            self._draw(self._table())
            return
        if has_grown:
            print_line(
                self._console, f"{name}: {point.blocks} blocks, {point.share:.0%} of its steps"
            )
        is_over = done > len(self._arms) - 1e-9
        if self._is_line_due(time.monotonic(), matters=is_over):
            told = [f"{arm.name} {self._latest(arm)}" for arm in self._arms]
            print_line(self._console, "; ".join(told))

    def _latest(self, arm: Arm) -> str:
        curve = self._curves[arm.name]
        return f"{curve[-1].share:.0%} loss {curve[-1].loss:.3f}" if curve else "starts"

    def _table(self) -> Table:
        is_wide = self._console.width >= _NARROW
        table = Table(box=None, pad_edge=False)
        table.add_column("network", no_wrap=True)
        table.add_column("blocks", no_wrap=True)
        table.add_column("done", justify="right", no_wrap=True)
        table.add_column("loss", justify="right", no_wrap=True)
        if is_wide:
            table.add_column("validation loss so far", no_wrap=True)
        for arm in self._arms:
            curve = self._curves[arm.name]
            awake = curve[-1].blocks if curve else arm.start
            cells = [arm.name, "█" * awake + "░" * (arm.blocks - awake)]
            cells += [f"{curve[-1].share:.0%}", f"{curve[-1].loss:.3f}"] if curve else ["", ""]
            if is_wide:
                cells.append(sparkline([point.loss for point in curve[-_SPARKS:]]))
            table.add_row(*cells)
        return table


# ---- The end: a table, a sentence, and what every network writes


def print_outcomes(outcomes: Outcomes, seed: int, *, is_interrupted: bool) -> None:
    """Print the table, a sentence about it, and text that every network wrote."""
    console = out_console()
    numbers = ("parameters", "steps", "training FLOPs", "CPU s", "validation loss", "test loss")
    title = f"Python's own sources, byte by byte, at equal compute; one seed ({seed})"
    table = new_table(title, ("network", *numbers), numbers=numbers)
    for one in outcomes.values():
        last = one.curve[-1] if one.curve else None
        table.add_row(
            safe(one.name),
            f"{one.parameters:,}" if one.parameters else "–",
            f"{one.steps:,}" if one.steps else "–",
            "–" if last is None else f"{last.flops:.3g}",
            f"{one.cpu_s:.0f}" if one.cpu_s else "–",
            "–" if last is None else f"{last.loss:.4f}",
            "–" if one.test_loss is None else f"{one.test_loss:.4f}",
        )
    console.print(table)
    print_line(console, verdict(outcomes, is_interrupted=is_interrupted))
    for one in outcomes.values():
        if one.text:
            print_line(console, f"\n{one.name} writes, after {PROMPT.strip()!r}:".strip())
            for line in filter(str.strip, one.text.splitlines()):
                # Small networks write long runs of spaces, which would push the words off the line.
                text = f"    {_LONG_GAP.sub(' … ', line.rstrip())}"
                whole = len(text) <= console.width
                print_line(console, text if whole else f"{text[: console.width - 1]}…")


def verdict(outcomes: Outcomes, *, is_interrupted: bool) -> str:
    """Return a sentence that compares the grown network with the best static one."""
    *static, grown = outcomes.values()
    if is_interrupted:
        shares = [one.curve[-1].share if one.curve else 0.0 for one in outcomes.values()]
        return (
            f"Stopped after {min(shares):.0%} to {max(shares):.0%} of the training: learning rates "
            "have not fallen yet, so the losses say little."
        )
    known = [one for one in static if one.test_loss is not None]
    if not known or grown.test_loss is None:
        return "Not all networks were trained, so there is nothing to compare."
    best = min(known, key=lambda one: one.test_loss or 0.0)
    assert best.test_loss is not None
    change = 100.0 * (grown.test_loss / best.test_loss - 1.0)
    word = "lower" if change < 0 else "higher"
    spent = grown.curve[-1].flops / best.curve[-1].flops
    # Very short runs cannot be cut into windows of equal compute.
    compute = "the same" if abs(spent - 1) <= _SAME else f"{spent:.0%} of the"
    return (
        f"For {compute} compute the grown network has a test loss {abs(change):.1f} % {word} than "
        f"the best static one ({best.name})."
    )
