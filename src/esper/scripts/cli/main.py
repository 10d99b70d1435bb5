"""Entry point of the `esper` command: finds the verb, runs it, turns errors into exit codes.

Exit codes: 0 done, 1 failed while running, 2 the request was wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from esper._version import __version__
from esper.leyline.errors import DataError, EsperError, EsperWarning, UsageError, instead, nearest
from esper.utils.process import find_module, is_debugging, keep_freed_memory


class Formatter(argparse.HelpFormatter):
    """Shows defaults and keeps the examples at the end of a help text as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "(default: " in text or action.default is argparse.SUPPRESS:
            return text
        if action.required:
            return f"{text} (required)"
        told = "none" if action.default is None else "no" if action.default is False else None
        return f"{text} (default: {told or '%(default)s'})"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser whose every error is one line on standard error and exit code 2."""

    late_epilog: Callable[[], str] | None = None
    """Makes the end of the help text when it is asked for, where that takes time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a parser; abbreviated options are refused, so that names stay free to grow."""
        kwargs.setdefault("formatter_class", Formatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def format_help(self) -> str:
        """Return the help text."""
        if self.late_epilog is not None:
            self.epilog = self.late_epilog()
        return super().format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what is left over here: a command knows its own options, `esper` does not."""
        found, strays = super().parse_known_args(args, namespace)
        if strays:
            self._refuse_stray(strays[0])
        return found, []

    def error(self, message: str) -> NoReturn:
        """Print one line that says what is wrong and what would be right."""
        from esper.scripts.cli.output import one_line

        print(one_line(f"{self.prog}: {message}; see `{self.prog} --help`"), file=sys.stderr)
        raise SystemExit(2)

    def _refuse_stray(self, stray: str) -> NoReturn:
        if not stray.startswith("-"):
            self.error(f"unexpected argument {stray!r}; values follow the option they are for")
        name = stray.partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        self.error(f"unknown option {name!r}{nearest(name, options)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            told = instead(value, known, "choose from")
            raise argparse.ArgumentError(action, f"{value!r} is not known{told}")


_DESCRIPTION = "Grow neural networks while they train."

_EPILOG = """\
examples:
  esper demo                                    two minutes: what growing brings, and what it costs
  esper grow --task digits --out runs/first     grow the embedded digits network
  esper train digits --out runs/tamiyo          train a controller on many such networks
  esper dashboard                               watch runs in a browser
  esper tasks                                   what can be grown here
  esper blueprints                              what it can be grown with
"""


VERBS = {
    "demo": "the first two minutes: grow narrow networks on data that comes along, and compare",
    "grow": "train and grow one network",
    "train": "train a controller",
    "search": "look for schedules of growth, and for settings of the heuristic",
    "clone": "teach a policy what the best schedules of a search do",
    "prove": "say which controller beats which, by how much, with what certainty",
    "dashboard": "show runs in a browser, live: curves, the garden, decisions, alarms",
    "watch": "show a run in the terminal, live or finished",
    "report": "write one self-contained HTML file about a run",
    "runs": "list runs: what they are about, how far they are, and how they ended",
    "compare": "put runs side by side: scores, twins, sizes, what grew; or two trainings",
    "query": "ask a run's store in SQL, as a table, CSV or JSON",
    "tasks": "list the tasks: how large, with which slots, and whether their data was found",
    "blueprints": "list the kinds of seeds: where they fit and how large they are",
    "bench": "measure throughput on this machine, with ratios against a reference",
    "doctor": "show versions, devices, threads, data found, and what is missing",
}
"""What every command does; each is a module of this package with that name."""


def build_parser(arguments: Sequence[str] = ()) -> Parser:
    """Return the parser of the command line; only the command asked for knows its options."""
    parser = Parser(prog="esper", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"esper {__version__}")
    parser.add_argument(
        "--import",
        dest="plugins",
        default=argparse.SUPPRESS,
        metavar="MODULE",
        help="import a module or a .py file first, so that the tasks, families, hosts, blueprints, "
        "controllers and rewards it registers can be used by name; also after the command, and "
        "several times",
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, line in VERBS.items():
        verb = verbs.add_parser(name, help=line)
        if name == asked:
            import_module(f"esper.scripts.cli.{name}").set_up(verb)
    for choice in verbs._choices_actions:
        # A line of the list, to which a default means nothing.
        choice.default = argparse.SUPPRESS
    return parser


def take_plugins(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules that `--import` names, before or after the command, and all the rest."""
    found, rest, words = [], [], iter(arguments)
    for word in words:
        if word == "--import":
            found.append(next(words, ""))
        elif word.startswith("--import="):
            found.append(word.partition("=")[2])
        else:
            rest.append(word)
    return found, rest


def import_plugin(name: str) -> None:
    """Import a module by its dotted name or by the path of its file; importing it registers."""
    if not name:
        raise UsageError("--import needs the name of a module or the path of a .py file")
    try:
        module = find_module(name)
    except UsageError as error:
        raise UsageError(f"--import {name}: {error}") from None
    try:
        import_module(module)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--import {name}: {type(error).__name__}: {error}; it must import without errors"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    try:
        # Before anything else: help texts and choices list what the modules register.
        plugins, asked = take_plugins(given)
        for plugin in plugins:
            import_plugin(plugin)
        options = build_parser(asked).parse_args(asked)
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
        _forget_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # What a run writes says so itself: this is the file that output was sent to.
        _forget_output()
        print(f"esper: cannot write all of the output: {error.strerror}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Have somewhere to write where the caller has closed standard output or standard error.

    The work is done all the same. Else the next file that is opened would take their place.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _forget_output() -> None:
    """Send what is still to be written nowhere, so that the end of the process cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: Exception, code: int) -> int:
    from esper.scripts.cli.output import one_line

    print(one_line(f"esper: {error}"), file=sys.stderr)
    if is_debugging():
        raise error
    return code


def _limit_threads() -> None:
    """Use one thread: networks this small lose more to waiting than they gain."""
    import torch

    wanted = os.environ.get("ESPER_THREADS", "1")
    if not wanted.isdecimal() or int(wanted) < 1:
        raise UsageError(f"ESPER_THREADS must be a whole number from 1, got {wanted!r}")
    torch.set_num_threads(int(wanted))


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Within the block our own warnings are lines for users, without the place in the code."""
    from esper.scripts.cli.output import one_line

    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, EsperWarning):
                # A run goes on when nobody reads what it says, as with Python's own warnings.
                with suppress(OSError):
                    print(one_line(f"esper: warning: {message}"), file=sys.stderr, flush=True)
            else:
                usual(message, category, *rest, **more)

        warnings.showwarning = show
        yield


if __name__ == "__main__":
    raise SystemExit(main())
