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
from esper.leyline.config import is_debugging
from esper.leyline.errors import (
    DataError,
    EsperError,
    EsperWarning,
    UsageError,
    as_command,
    instead,
    nearest,
)
from esper.utils.process import find_module, keep_freed_memory


class Formatter(argparse.HelpFormatter):
    """Help formatter that shows defaults and keeps the line breaks of the examples."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "(default: " in text or action.default is argparse.SUPPRESS:
            return text
        if action.required:
            return f"{text} (required)"
        words = "none" if action.default is None else "no" if action.default is False else None
        return f"{text} (default: {words or '%(default)s'})"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser whose every error is one line on standard error and exit code 2."""

    late_epilog: Callable[[], str] | None = None
    """Returns the end of the epilog, if that is slow to make."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a parser that refuses abbreviated options, so that new ones can be added."""
        kwargs.setdefault("formatter_class", Formatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def format_help(self) -> str:
        """Return the help text."""
        if self.late_epilog is not None:
            self.epilog = f"{self.epilog}\n{self.late_epilog()}"
            self.late_epilog = None
        return super().format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown options here, where the options of the command are known."""
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
            self.error(f"unexpected argument {stray!r}; a value follows its option")
        name = stray.partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        self.error(f"unknown option {name!r}{nearest(name, options)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            text = instead(value, known, "choose from")
            raise argparse.ArgumentError(action, f"{value!r} is not known{text}")


_DESCRIPTION = "Grow neural networks while they train."

_EPILOG = """\
examples:
  esper demo                                    two minutes: a GPT that grows, and static ones
  esper grow --task digits --out runs/first     grow one network on the embedded digits
  esper dashboard                               watch the run in a browser
  esper train digits --out runs/tamiyo          train a controller on many such networks

`esper COMMAND --help` explains every option of a command.
"""


VERBS = {
    "demo": "train a small GPT that grows and static ones, at equal compute; two minutes",
    "grow": "train one network while a controller grows it",
    "train": "train a controller with PPO on many networks at once",
    "search": "search for the best fixed growth schedule and heuristic settings",
    "clone": "train a policy to imitate the schedules that a search found",
    "prove": "compare controllers on paired seeds, with confidence intervals and verdicts",
    "dashboard": "show runs in a browser, live: curves, slots, decisions, alarms",
    "watch": "show one run in the terminal, live or finished",
    "report": "write one self-contained HTML file about a run",
    "runs": "list runs with their state, progress and scores",
    "compare": "compare runs side by side: scores, sizes, what grew, settings that differ",
    "query": "run one SQL SELECT on what a run recorded",
    "tasks": "list the tasks and families with their sizes, slots and data",
    "blueprints": "list the blueprints of seeds with their parameters and FLOPs",
    "bench": "measure throughput on this machine, relative to a reference",
    "doctor": "show versions, devices, threads, data found, and what is missing",
}
"""What every command does in one line; each is a module of this package with that name."""


def build_parser(arguments: Sequence[str] = ()) -> Parser:
    """Return the parser of the command line, with the options of the requested command only."""
    parser = Parser(prog="esper", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"esper {__version__}")
    parser.add_argument(
        "--import",
        dest="plugins",
        default=argparse.SUPPRESS,
        metavar="MODULE",
        help="module or .py file to import first; the tasks, families, hosts, blueprints, "
        "controllers and rewards that it registers can then be used by name; may also follow the "
        "command, and be given again",
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, line in VERBS.items():
        verb = verbs.add_parser(name, help=line)
        if name == asked:
            module = import_module(f"esper.scripts.cli.{name}")
            # The docstring of a command is its help: what it does, then examples.
            text, _, examples = (module.__doc__ or "").partition("Examples:\n")
            verb.description, verb.epilog = " ".join(text.split()), f"examples:\n{examples}"
            verb.set_defaults(run=module.run)
            module.set_up(verb)
    for choice in verbs._choices_actions:
        # The list of commands shows no defaults.
        choice.default = argparse.SUPPRESS
    return parser


def take_plugins(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules that `--import` names, and the other arguments."""
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
    """Import a plug-in by its module name or the path of its file."""
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
    with as_command():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(given: list[str]) -> int:
    """Run one command; errors are printed in one line."""
    _open_closed_streams()
    try:
        # First of all: help texts and choices list what plug-ins register.
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
        # The reader closed the pipe (`esper tasks | head`), which is not a failure.
        _forget_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # The disk of the file that standard output was redirected to is full.
        _forget_output()
        print(f"esper: cannot write all of the output: {error.strerror}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Replace a closed standard output or standard error by the null device.

    Otherwise the next file that is opened would take its descriptor.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _forget_output() -> None:
    """Discard pending output, so that the process can exit without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: Exception, code: int) -> int:
    from esper.scripts.cli.output import one_line

    print(one_line(f"esper: {error}"), file=sys.stderr)
    if is_debugging():
        raise error
    return code


def _limit_threads() -> None:
    """Set the number of torch threads: one by default, which is fastest for small networks."""
    import torch

    wanted = os.environ.get("ESPER_THREADS", "1")
    if not wanted.isdecimal() or int(wanted) < 1:
        raise UsageError(f"ESPER_THREADS must be a whole number from 1, got {wanted!r}")
    torch.set_num_threads(int(wanted))


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Within the block, print warnings of Esper as one line without a source location."""
    from esper.scripts.cli.output import one_line

    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, EsperWarning):
                # A closed standard error must not stop a run.
                with suppress(OSError):
                    print(one_line(f"esper: warning: {message}"), file=sys.stderr, flush=True)
            else:
                usual(message, category, *rest, **more)

        warnings.showwarning = show
        yield


if __name__ == "__main__":
    raise SystemExit(main())
