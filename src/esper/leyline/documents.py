"""Plain data out of the YAML and JSON that people write: settings, recipes, schedules, `--set`.

One border for all of it. What a text may hold is limited to what a person would write: plain
values, whole numbers of 64 bits, a bounded number of entries after all references are followed.
Whatever else is in it, and whatever the parsers make of it, is one `ConfigError`.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from esper.leyline.errors import ConfigError, UsageError, reason_of
from esper.leyline.files import read_regular

MOST_BYTES = 2**18
MOST_ENTRIES = 100_000
MOST_LEVELS = 50

_LEAST_INT, _MOST_INT = -(2**63), 2**63 - 1
_LONGEST_REASON = 300
_TRUTH = "tag:yaml.org,2002:bool"


def read_document(path: Path) -> Any:
    """Return the plain data in a file: JSON by its ending, else YAML.

    Raises:
        OSError: It cannot be read, or is no file.
        ConfigError: It is no such text, or more than anybody would write.
    """
    data = read_regular(path, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ConfigError(f"it is larger than {MOST_BYTES // 2**10} KiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return parse_document(text, "json" if path.suffix.lower() == ".json" else "yaml")


def read_named(path: str | Path, what: str) -> Any:
    """Return the plain data in a file that somebody named; `what` it should hold is for messages.

    Raises:
        UsageError: One line says why it cannot be read.
    """
    try:
        return read_document(Path(path))
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such {what} file") from None
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: cannot read the {what}: {reason}") from None


def parse_document(text: str, form: Literal["yaml", "json"] = "yaml") -> Any:
    """Return the plain data in a text.

    Raises:
        ConfigError: It is not valid, or holds more or other things than plain data.
    """
    try:
        data = json.loads(text) if form == "json" else _parse_yaml(text)
    # Not only their own errors: a date, a number or a tag that is none ends in KeyError,
    # IndexError, AttributeError, ValueError or RecursionError, as the parser happens to go.
    except Exception as error:
        raise ConfigError(f"not valid {form.upper()}: {_reason(error)}") from None
    _check_plain(data)
    return data


def _parse_yaml(text: str) -> Any:
    import yaml

    return yaml.load(text, _loader())


@cache
def _loader() -> Any:
    """Return PyYAML's safe loader with the truth values of YAML 1.2: true and false alone.

    YAML 1.1 also reads on, off, yes and no as such, and `off` is the name of a choice here.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TRUTH]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    truth = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")
    Loader.add_implicit_resolver(_TRUTH, truth, list("tTfF"))
    return Loader


def _check_plain(data: Any) -> None:
    """Refuse what is not plain, endless, or enormous once its references are followed."""
    entries = 0
    waiting = [(data, 0)]
    while waiting:
        value, level = waiting.pop()
        entries += 1
        if entries > MOST_ENTRIES:
            raise ConfigError(f"it has more than {MOST_ENTRIES:,} entries")
        if level > MOST_LEVELS:
            raise ConfigError(f"it is nested more than {MOST_LEVELS} levels deep")
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str | int | float | bool | None):
                    raise ConfigError(f"a key is a {type(key).__name__}; keys are text")
                waiting += ((key, level + 1), (item, level + 1))
        elif isinstance(value, list):
            waiting += ((item, level + 1) for item in value)
        elif isinstance(value, int):
            if not _LEAST_INT <= value <= _MOST_INT:
                # Not the number itself: Python refuses to write out one of thousands of digits.
                raise ConfigError("it has a whole number beyond 64 bits")
        elif not isinstance(value, str | float | bool | None):
            raise ConfigError(
                f"it has a {type(value).__name__}; use text, numbers, lists, mappings"
            )


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    line = reason_of(error)
    return line[:_LONGEST_REASON] or type(error).__name__
