"""Entry point of the `esper` command: finds the verb, runs it, turns errors into exit codes.

Exit codes: 0 done, 1 failed while running, 2 the request was wrong, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from esper._version import __version__
from esper.cli.parser import Parser

_DESCRIPTION = "Grow neural networks while they train."

_EPILOG = """\
examples:
  esper grow --task digits --out runs/first     grow the embedded digits network
  esper train digits --out runs/tamiyo          train a controller on many such networks
  esper tasks                                   what can be grown here
  esper blueprints                              what it can be grown with
"""


VERBS = {
    "grow": "train and grow one network",
    "train": "train a controller",
    "report": "write one self-contained HTML file about a run",
    "runs": "list runs: what they are about, how far they are, and how they ended",
    "query": "ask a run's store in SQL, as a table, CSV or JSON",
    "tasks": "list the tasks: host, slots, parameters, and whether their data was found",
    "blueprints": "list the kinds of seeds: where they fit and how large they are",
    "bench": "measure throughput on this machine, with ratios against a reference",
    "doctor": "show versions, devices, threads, data found, and what is missing",
}
"""What every command does; each is a module of this package with that name."""


def build_parser(arguments: Sequence[str] = ()) -> Parser:
    """Return the parser of the command line; only the command asked for knows its options."""
    parser = Parser(prog="esper", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"esper {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, line in VERBS.items():
        verb = verbs.add_parser(name, help=line)
        if name == asked:
            import_module(f"esper.cli.{name}").set_up(verb)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from esper.leyline.errors import DataError, EsperError, UsageError
    from esper.leyline.process import keep_freed_memory

    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = build_parser(given).parse_args(given)
        options.arguments = given
        if not getattr(options, "needs_no_torch", False):
            _limit_threads()
            keep_freed_memory()
        with _plain_warnings():
            code: int = options.run(options)
        sys.stdout.flush()
        return code
    except (UsageError, DataError) as error:
        # Data that is missing or unreadable was asked for: nothing has run yet.
        return _complain(error, 2)
    except EsperError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        print("esper: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`esper tasks | head`): not a failure, and nothing left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(error: Exception, code: int) -> int:
    from esper.cli.output import one_line

    print(one_line(f"esper: {error}"), file=sys.stderr)
    if os.environ.get("ESPER_DEBUG") == "1":
        raise error
    return code


def _limit_threads() -> None:
    """Use one thread: networks this small lose more to waiting than they gain."""
    import torch

    from esper.leyline.errors import UsageError

    wanted = os.environ.get("ESPER_THREADS", "1")
    if not wanted.isdecimal() or int(wanted) < 1:
        raise UsageError(f"ESPER_THREADS must be a whole number from 1, got {wanted!r}")
    torch.set_num_threads(int(wanted))


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Within the block our own warnings are lines for users, without the place in the code."""
    from esper.cli.output import one_line
    from esper.leyline.errors import EsperWarning

    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, EsperWarning):
                print(one_line(f"esper: warning: {message}"), file=sys.stderr)
            else:
                usual(message, category, *rest, **more)

        warnings.showwarning = show
        yield


if __name__ == "__main__":
    raise SystemExit(main())
