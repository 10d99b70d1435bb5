"""The page Settings: every key that `--set` takes, with its type, its default and its meaning."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from esper.growth.depth.rules import DeepenConfig
from esper.growth.request import CHANGEABLE
from esper.lab.proof.clone import CloneConfig
from esper.lab.proof.prove import ProveConfig
from esper.lab.proof.search import SearchConfig
from esper.lab.tasks.request import GrowSettings
from esper.leyline.config import Config, describe_type, plain_value
from esper.simic.agent.config import PerHead
from esper.simic.training.config import FIXED_SETTINGS, TrainConfig
from esper.tamiyo.controllers.baselines import PeriodicConfig, PlateauConfig
from esper.tamiyo.controllers.heuristic import HeuristicConfig
from esper.tamiyo.controllers.slope import SlopeConfig
from esper.tamiyo.controllers.trial import TrialConfig
from esper.utils.settings import changed_settings

_INTRODUCTION = """\
# Settings

All settings, with the keys that `--set KEY=VALUE` takes. Values are YAML: `0.1`, `true`,
`null` for nothing, `[a, b]` for a list. The same names are in the `config.yaml` of a run, which has
its complete settings, and in Python: `GrowthConfig(training=TrainingConfig(momentum=0.8))` is
`growth.training.momentum`, and `esper.train(ppo={"clip": 0.1})` is `ppo.clip`.

A task (`esper grow`) and a recipe (`esper train`) set some of these values; options such as
`--epochs` override them. The error for an unknown key names the nearest known one. Parts that
several commands share are listed once, at the end ([shared parts](#shared-parts)), with the prefix
of their keys.

This page is made from the code when the site is built.
"""

_COMMANDS: tuple[tuple[str, type[Config], str], ...] = (
    (
        "esper grow",
        GrowSettings,
        "When a run is continued (`--resume`), these may change: "
        f"{', '.join(f'`{key}`' for key in CHANGEABLE)}.",
    ),
    (
        "esper train",
        TrainConfig,
        "When a run is continued, all settings may change except "
        f"{', '.join(f'`{key}`' for key in FIXED_SETTINGS)}.",
    ),
    ("esper search", SearchConfig, ""),
    ("esper clone", CloneConfig, ""),
    ("esper prove", ProveConfig, ""),
)

_OPTIONAL: dict[type[Config], tuple[tuple[str, type[Config]], ...]] = {
    GrowSettings: (("growth.deepen", DeepenConfig),)
}
"""Optional parts of configurations."""
_ASKED_FOR = "Only for runs with `--deepen`, in Python `deepen=`."

_CONTROLLERS: tuple[tuple[str, type[Config]], ...] = (
    ("heuristic", HeuristicConfig),
    ("plateau", PlateauConfig),
    ("periodic", PeriodicConfig),
    ("trial", TrialConfig),
    ("slope", SlopeConfig),
)

_SHARED_PARTS = """\
## Shared parts

Several commands have these parts. Each entry gives the prefix of its keys: `gates.kind` of the
lifecycle is `growth.garden.lifecycle.gates.kind` for `esper grow` and
`population.lifecycle.gates.kind` for `esper train`.
"""

_BY_HEAD = "a number for every head; `.op`, `.slot` … after the key set one"

_LEAST_TABLE = 3
"""A part with fewer settings stands in the table of the part around it."""

_AFTER_A_COLON = """\
## Controllers

Settings of a controller follow its name and a colon: `--controller
heuristic:plateau_epochs=5,rest_epochs=2`, or a file with settings, `heuristic:FILE`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting before it is set."""

    key: str
    """Dotted, from the configuration that is walked through."""
    type: str
    """What it may be, in words."""
    default: Any
    """Plain data; `MISSING` where it must be given."""
    help: str
    """One sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A configuration within another one that stands elsewhere on the page."""

    key: str
    config: type[Config]
    changes: Mapping[str, Any]
    """Defaults that are other ones here, by their keys within the part."""


def render() -> str:
    """Return the whole page."""
    shared = _shared([config for _, config, _ in _COMMANDS])
    parts = [_INTRODUCTION]
    for name, config, note in _COMMANDS:
        parts += ["\n\n".join(part for part in (f"## `{name}`", _summary(config), note) if part)]
        parts += _tables(config, shared)
    parts.append(_SHARED_PARTS)
    for config in shared:
        parts += [f"### {_title(shared[config])}", f"{_summary(config)} {_places(config, shared)}"]
        parts += _tables(config, shared, headings=False)
    parts.append(_AFTER_A_COLON)
    for name, config in _CONTROLLERS:
        parts += [f"### `{name}`\n\n{_summary(config)}", *_tables(config, shared)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _shared(commands: Sequence[type[Config]]) -> dict[type[Config], str]:
    """Return the configurations that several others have, with the name they have there."""
    owners: dict[type[Config], dict[type[Config], str]] = {}
    waiting, known = list(commands), set(commands)
    while waiting:
        config = waiting.pop(0)
        for field in dataclasses.fields(config):
            value = _default(field)
            if isinstance(value, Config) and not isinstance(value, PerHead):
                owners.setdefault(type(value), {})[config] = field.name
                waiting += {type(value)} - known
                known.add(type(value))
    return {
        config: next(iter(names.values())) for config, names in owners.items() if len(names) > 1
    }


def _walk(
    config: type[Config], shared: Mapping[type[Config], str], default: Config | None = None
) -> Iterator[Setting | Part]:
    """Return every setting of a configuration and of those within it, in their order.

    Args:
        config: the configuration.
        shared: those that are only named.
        default: where the values come from; the declared ones where there is none.
    """
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        value = _default(field) if default is None else getattr(default, field.name)
        if isinstance(value, Config) and type(value) in shared:
            changes = changed_settings(type(value)().to_mapping(), value.to_mapping())
            yield Part(
                key=field.name,
                config=type(value),
                changes={key: now for key, (_, now) in changes.items()},
            )
        elif isinstance(value, Config) and not isinstance(value, PerHead):
            for inner in _walk(type(value), shared, value):
                yield dataclasses.replace(inner, key=f"{field.name}.{inner.key}")
        else:
            by_head = isinstance(value, PerHead)
            yield Setting(
                key=field.name,
                type=_BY_HEAD if by_head else describe_type(hints[field.name], field.metadata),
                default=plain_value(value),
                help=field.metadata.get("help", ""),
            )


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _tables(
    config: type[Config], shared: Mapping[type[Config], str], headings: bool = True
) -> Iterator[str]:
    """Return a table for every part of a configuration, those of its own first."""
    found = list(_walk(config, shared))
    settings = [each for each in found if isinstance(each, Setting)]
    parts: dict[str, list[Setting]] = {}
    for each in settings:
        parts.setdefault(_table_of(each.key, settings) if headings else "", []).append(each)
    if "" in parts:
        yield _table(parts.pop(""))
    named = [_reference(each, shared) for each in found if isinstance(each, Part)]
    if named:
        yield "Shared parts:\n\n" + "\n".join(named)
    for part, own in parts.items():
        yield f"### `{part}`\n\n{_table(own)}"
    for part, optional in _OPTIONAL.get(config, ()):
        own = [
            dataclasses.replace(each, key=f"{part}.{each.key}")
            for each in _walk(optional, shared)
            if isinstance(each, Setting)
        ]
        yield f"### `{part}`\n\n{_summary(optional)} {_ASKED_FOR}\n\n{_table(own)}"


def _table_of(key: str, settings: Sequence[Setting]) -> str:
    """Return the part in whose table a key stands: its own, or one around it if that is small."""
    part = key.rpartition(".")[0]
    while part and sum(each.key.startswith(f"{part}.") for each in settings) < _LEAST_TABLE:
        part = part.rpartition(".")[0]
    return part


def _reference(part: Part, shared: Mapping[type[Config], str]) -> str:
    """Return the line that says where a shared part stands, and what is different here."""
    title = _title(shared[part.config])
    line = f"* `{part.key}.`: [{title}](#{title.lower()})"
    changes = [f"`{key}` is {_shown(value)}" for key, value in part.changes.items()]
    return f"{line}; here {', '.join(changes)}" if changes else line


def _places(config: type[Config], shared: Mapping[type[Config], str]) -> str:
    """Return what the keys of a shared part begin with in every command."""
    places: dict[str, list[str]] = {}
    for name, command, _ in _COMMANDS:
        for prefix in _prefixes(config, command, shared):
            places.setdefault(prefix, []).append(f"`{name}`")
    told = [f"`{prefix}.` ({', '.join(names)})" for prefix, names in places.items()]
    return f"The keys begin with {', '.join(told)}."


def _prefixes(
    config: type[Config], within: type[Config], shared: Mapping[type[Config], str]
) -> Iterator[str]:
    for each in _walk(within, shared):
        if isinstance(each, Part):
            if each.config is config:
                yield each.key
            for inner in _prefixes(config, each.config, shared):
                yield f"{each.key}.{inner}"


def _title(name: str) -> str:
    return name.capitalize()


def _table(settings: Sequence[Setting]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for each in settings:
        meaning = each.help.replace("|", "\\|")
        kind = each.type.replace("|", "\\|")
        lines.append(f"| `{each.key}` | {kind} | {_shown(each.default)} | {meaning} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Return a default as `--set` would take it."""
    if value is MISSING:
        return "must be given"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{text}`"


def _summary(config: type[Config]) -> str:
    return (config.__doc__ or "").strip().splitlines()[0]
