"""The page Commands: every command with its options, as `--help` has them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from esper.scripts.cli.main import VERBS, Parser, build_parser

_INTRODUCTION = """\
# Commands

Everything the `esper` command can do; `esper COMMAND --help` says the same. `python -m esper` is
the same command where the script is not on the path. This page is made from the code by
`python -m tools.pages`.

A command answers on standard output and shows progress and errors on standard error. It exits with
0 when it is done, 1 when it failed while running, 2 when the request was wrong, and 130 when it was
interrupted. An error is one line that says what would be right.

`--import MODULE` (a module or a `.py` file, before or after the command, several times) imports
first what registers tasks, families, hosts, blueprints, controllers or rewards of your own.

| variable | meaning |
|---|---|
| `ESPER_DATA` | folder in which data is looked for ([data](data.md)) |
| `ESPER_THREADS` | threads of one process, 1 by default |
| `ESPER_DEBUG` | `1` shows where in the code an error came from, and checks more while running |
| `ESPER_DEBUG_STAGE` | `1` checks at every step that what a controller is shown exists and agrees |
"""

_DEFAULT_GROUPS = ("positional arguments", "options")


def render() -> str:
    """Return the whole page."""
    listed = [
        f"| [`esper {verb}`](#esper-{verb}) | {_prose(does)} |" for verb, does in VERBS.items()
    ]
    index = "\n".join(["| command | what it does |", "|---|---|", *listed])
    return "\n\n".join([_INTRODUCTION.strip(), index, *map(_section, VERBS)]) + "\n"


def command_parser(verb: str) -> Parser:
    """Return the parser of one command, with its options."""
    for action in build_parser([verb])._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser: Parser = action.choices[verb]
            return parser
    raise AssertionError("the command line has no commands")


def _section(verb: str) -> str:
    parser = command_parser(verb)
    # Which makes an end that takes time.
    parser.format_help()
    parts = [f"## `esper {verb}`", _prose(parser.description or VERBS[verb]), *_tables(parser)]
    if parser.epilog:
        parts.append(f"```\n{parser.epilog.strip()}\n```")
    return "\n\n".join(parts)


def _tables(parser: Parser) -> Iterator[str]:
    """Return a table for each group of options that has any."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        rows = [
            f"| `{_shown(action)}` | {_prose(formatter._expand_help(action))} |"
            for action in group._group_actions
            if not isinstance(action, argparse._HelpAction)
        ]
        if rows:
            name = "option" if group.title in _DEFAULT_GROUPS else str(group.title)
            is_positional = group.title == _DEFAULT_GROUPS[0]
            header = "argument" if is_positional else name
            yield "\n".join([f"| {header} | meaning |", "|---|---|", *rows])


def _shown(action: argparse.Action) -> str:
    """Return an option or argument with what follows it."""
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    choices = None if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"
    metavar = action.metavar or choices or action.dest.upper()
    value = metavar if isinstance(metavar, str) else " ".join(metavar)
    if action.nargs in ("*", "+"):
        value += " ..."
    if action.nargs in ("?", "*"):
        value = f"[{value}]"
    return f"{names} {value}".strip().replace("|", "\\|")


def _prose(text: str) -> str:
    """Return the words of a help text as Markdown; what is between backticks is code already."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    safe = [
        part if part.startswith("`") else re.sub(r"([*_<\[\]])", r"\\\1", part) for part in parts
    ]
    return "".join(safe).replace("|", "\\|")
