"""docs/settings.md: every key that `--set` takes, with its type, its default and its meaning."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from esper.growth.depth.rules import DeepenConfig
from esper.growth.request import CHANGEABLE
from esper.lab.proof.clone import CloneConfig
from esper.lab.proof.prove import ProveConfig
from esper.lab.proof.search import SearchConfig
from esper.lab.tasks.request import GrowSettings
from esper.leyline.config import Config
from esper.simic.training.config import FIXED_SETTINGS, TrainConfig
from esper.tamiyo.controllers.baselines import PeriodicConfig, PlateauConfig
from esper.tamiyo.controllers.heuristic import HeuristicConfig
from esper.utils.settings import SettingInfo, list_settings

_INTRODUCTION = """\
# Settings

Every setting there is, with the keys that `--set KEY=VALUE` takes. Values are YAML: `0.1`, `true`,
`null` for nothing, `[a, b]` for a list. The same names are in `config.yaml` of a run, which says
what held there, and in Python: `GrowthConfig(training=TrainingConfig(momentum=0.8))` is
`growth.training.momentum`, and `esper.train(ppo={"clip": 0.1})` is `ppo.clip`.

A task (`esper grow`) and a recipe (`esper train`) have values of their own for some of these, and
options such as `--epochs` come after them. A key that does not exist is refused with the nearest
that does.

This page is made from the code by `python -m tools.pages`.
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
        "When a run is continued, all may change but "
        f"{', '.join(f'`{key}`' for key in FIXED_SETTINGS)}.",
    ),
    ("esper search", SearchConfig, ""),
    ("esper clone", CloneConfig, ""),
    ("esper prove", ProveConfig, ""),
)

_OPTIONAL: dict[type[Config], tuple[tuple[str, type[Config]], ...]] = {
    GrowSettings: (("growth.deepen", DeepenConfig),)
}
"""Parts that a configuration has only where they are asked for."""
_ASKED_FOR = "These are there only where the part is asked for: `--deepen`, in Python `deepen=`."

_CONTROLLERS: tuple[tuple[str, type[Config]], ...] = (
    ("heuristic", HeuristicConfig),
    ("plateau", PlateauConfig),
    ("periodic", PeriodicConfig),
)

_AFTER_A_COLON = """\
## Controllers

These follow the name of a controller, wherever one is named: `--controller
heuristic:plateau_epochs=5,rest_epochs=2`, or a file of them, `heuristic:FILE`.
"""


def render() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for name, config, note in _COMMANDS:
        parts.append("\n\n".join(part for part in (f"## `{name}`", _summary(config), note) if part))
        parts += _tables(config)
    parts.append(_AFTER_A_COLON)
    for name, config in _CONTROLLERS:
        parts += [f"### `{name}`\n\n{_summary(config)}", _table(list(list_settings(config)))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _tables(config: type[Config]) -> Iterator[str]:
    """Return a table for every part of a configuration, those of its own first."""
    parts: dict[str, list[SettingInfo]] = {}
    for each in list_settings(config):
        parts.setdefault(each.key.rpartition(".")[0], []).append(each)
    for part, settings in parts.items():
        yield (f"### `{part}`\n\n" if part else "") + _table(settings)
    for part, optional in _OPTIONAL.get(config, ()):
        own = [
            dataclasses.replace(each, key=f"{part}.{each.key}") for each in list_settings(optional)
        ]
        yield f"### `{part}`\n\n{_summary(optional)} {_ASKED_FOR}\n\n{_table(own)}"


def _table(settings: Sequence[SettingInfo]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for each in settings:
        meaning = each.help.replace("|", "\\|")
        kind = each.type.replace("|", "\\|")
        lines.append(f"| `{each.key}` | {kind} | {_shown(each.default)} | {meaning} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Return a default as `--set` would take it."""
    if value is dataclasses.MISSING:
        return "must be given"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{text}`"


def _summary(config: type[Config]) -> str:
    return (config.__doc__ or "").strip().splitlines()[0]
