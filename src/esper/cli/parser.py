"""Argument parsing with one-line errors and help that shows every default."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from esper.leyline.errors import nearest


class Formatter(argparse.HelpFormatter):
    """Shows defaults and keeps the examples at the end of a help text as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default in (None, False, argparse.SUPPRESS)
        return text if silent or "%(default)" in text else f"{text} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser whose every error is one line on standard error and exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a parser; abbreviated options are refused, so that names stay free to grow."""
        kwargs.setdefault("formatter_class", Formatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print one line that says what is wrong and what would be right."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            stray = message[len(prefix) :].split()[0]
            options = [name for action in self._actions for name in action.option_strings]
            message = f"unknown option {stray!r}{nearest(stray, options)}"
        line = " ".join(message.split())
        print(f"{self.prog}: {line}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)
