"""Where words go: results to standard output, progress and complaints to standard error."""

from __future__ import annotations

import io
import json
import os
import select
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.leyline.errors import EsperError, UsageError
from esper.leyline.records import told_score

_LONGEST_LINE = 900


class _Results(Console):
    """A console whose reader may go away: `main` says what that means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Progress(Console):
    """A console whose reader may go away: the work goes on without one."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def out_console() -> Console:
    """Return the console of results; output that is no terminal gets room for whole tables."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's alphabet lacks is shown as a code, not a crash.
        sys.stdout.reconfigure(errors="backslashreplace")
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Results(width=None if is_known else 120, highlight=False)


def err_console() -> Console:
    """Return the console of progress."""
    return _Progress(stderr=True, highlight=False)


def somebody_reads() -> bool:
    """Return whether standard output has a reader; only of a pipe can it be known that it has not.

    Whoever writes learns it from the next line; this is for long work between two lines.
    """
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLERR)
    except (OSError, ValueError):  # not a file
        return True
    return not poll.poll(0)


def tell(console: Console, text: object) -> None:
    """Print a line whole, however narrow the terminal, so that paths in it can be copied."""
    console.print(safe(text), soft_wrap=True)


def new_table(
    title: object,
    columns: Iterable[str],
    *,
    numbers: Container[str] = (),
    whole: Container[str] = (),
) -> Table:
    """Return a table without rows; `numbers` are set right, `whole` columns stay on one line."""
    table = Table(title=safe(title), title_justify="left")
    for name in columns:
        table.add_column(
            name, justify="right" if name in numbers else "left", no_wrap=name in whole
        )
    return table


def find_store(folder: str) -> Path:
    """Return the store of a run, or say which folder would have one."""
    from esper.nissa.database import store_path
    from esper.nissa.listing import RESULTS, describe_run

    path = store_path(folder)
    if not os.path.isfile(path):
        played = describe_run(Path(folder))
        if played.kind in RESULTS:
            raise UsageError(
                f"{folder} is of `esper {played.kind}`, which keeps no run.db; what came of it is "
                f"in its {RESULTS[played.kind]}"
            )
        raise UsageError(f"{folder} has no run.db; give the folder of a run (see `esper runs`)")
    return path


def listed(lines: Mapping[str, str]) -> str:
    """Return names with a line about each, below one another."""
    width = max(map(len, lines), default=0)
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())


def name_width(names: Iterable[str]) -> int:
    """Return how wide a column of names must stay, whatever else is squeezed."""
    return min(40, max(map(len, names), default=0))


def print_json(document: Any) -> None:
    """Print one JSON document in ASCII; numbers that are not finite become null."""
    from esper.nissa.columns import plain_data

    print(json.dumps(plain_data(document), indent=2))


def answer(as_json: bool, document: Any, show: Callable[[], object]) -> int:
    """Print the document where JSON was asked for, show it to people otherwise; return 0."""
    if as_json:
        print_json(document)
    else:
        show()
    return 0


def interrupted(again: str, where: str = "") -> int:
    """Say by which command the run is continued; return the exit code."""
    from esper.runs.recorded import INTERRUPTED

    tell(err_console(), f"interrupted{where}; continue with: {again}")
    return INTERRUPTED


def safe(text: object) -> Text:
    """Return a value as text that can neither style nor steer the terminal."""
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))
    return Text(shown)


def one_line(text: object) -> str:
    """Return a message as one printable line; one that is far too long loses its middle."""
    line = safe(" ".join(str(text).split())).plain
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} … {line[-half:]}"


@contextmanager
def naming_resume(command: str) -> Iterator[None]:
    """Within the block a failure also says how the run is continued, where it does not already."""
    try:
        yield
    except EsperError as error:
        if "--resume" in str(error):
            raise
        raise type(error)(f"{error}; what was saved can be continued with: {command}") from error


def points(value: float | None) -> str:
    """Return a score in points, or the loss that it is, or a dash."""
    return "–" if value is None else told_score(value)
