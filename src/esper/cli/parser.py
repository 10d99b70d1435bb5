"""Argument parsing with one-line errors and help that shows every default."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from esper.leyline.errors import nearest


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
        from esper.cli.output import one_line

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
            raise argparse.ArgumentError(
                action,
                f"{value!r} is not known{nearest(str(value), known) or ';'} "
                f"choose from {', '.join(known)}",
            )
