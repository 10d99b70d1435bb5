"""Which controllers exist, and how 'schedule:plan.yaml' or 'heuristic:rest_epochs=3' becomes one.

What follows the colon is the controller's argument: a file, a folder, or settings of its own by
name. Wherever a controller can be named, on the command line or in Python, it is named like this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from esper.leyline.config import Config
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.documents import read_named
from esper.leyline.errors import ConfigError, UsageError
from esper.leyline.registry import Registry
from esper.leyline.settings import parse_settings, split_settings


class ControllerPlugin(Controller, Protocol):
    """A controller that can also be built from its name: what `register_controller` takes."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> Controller:
        """Return a controller; `argument` is what followed the colon, None without a colon."""


@runtime_checkable
class ControllerMaker(Protocol):
    """What has a controller for every host, such as `esper.Tamiyo`."""

    def controller(self, context: ControllerContext) -> Controller:
        """Return the controller for a host."""


P = TypeVar("P", bound=ControllerPlugin)
C = TypeVar("C", bound=Config)

CONTROLLERS: Registry[type[ControllerPlugin]] = Registry("controller")
"""Every controller by name; third parties add theirs through the group `esper.controllers`."""

_METHODS = ("build", "reset", "act", "state_dict", "load_state_dict")


def register_controller(name: str) -> Callable[[type[P]], type[P]]:
    """Make the decorated class available as `name`, or as `name:argument` if it takes one."""

    def decorate(plugin: type[P]) -> type[P]:
        missing = [method for method in _METHODS if not callable(getattr(plugin, method, None))]
        if missing or not isinstance(plugin, type):
            raise UsageError(
                f"controller {name!r} must be a class with the methods {', '.join(_METHODS)}; "
                f"missing {', '.join(missing) or 'the class itself'}"
            )
        CONTROLLERS.register(name, plugin)
        return plugin

    return decorate


def make_controller(
    spec: str | os.PathLike[str] | Controller | ControllerMaker, context: ControllerContext
) -> Controller:
    """Return the controller `spec` asks for.

    Args:
        spec: 'name', 'name:argument', the folder of a saved policy, `esper.Tamiyo`, or an object
            that already is a controller, which is returned as it is.
        context: The slots, blueprints and seed the controller will work with.

    Returns:
        A controller; call its `reset` before the first decision.
    """
    if isinstance(spec, os.PathLike):
        spec = os.fspath(spec)
    if not isinstance(spec, str):
        # A class also has every method of the protocol; passing one is a forgotten call.
        if isinstance(spec, Controller) and not isinstance(spec, type):
            return spec
        if isinstance(spec, ControllerMaker) and not isinstance(spec, type):
            return spec.controller(context)
        raise UsageError(
            "a controller must be a name or an object with reset, act, state_dict and "
            f"load_state_dict, got {spec!r}"
        )
    name, colon, argument = spec.partition(":")
    # false, not an error, for what cannot be a path
    if name not in CONTROLLERS and (os.path.exists(spec) or os.sep in spec):
        return CONTROLLERS.get("learned").build(spec, context)
    return CONTROLLERS.get(name).build(argument if colon else None, context)


def refuse_argument(name: str, argument: str | None) -> None:
    """Raise if an argument was given to the controller `name`, which takes none."""
    if argument is not None:
        raise UsageError(
            f"controller {name!r} takes no argument, got {argument!r}; write just {name!r}"
        )


def read_settings(name: str, argument: str | None, config: type[C]) -> C:
    """Return the settings of a controller: 'a=1,b=[x,y]', a file that holds them, or the defaults.

    Args:
        name: the controller, for messages.
        argument: what followed its colon.
        config: what it can be told; a key it does not have is refused.
    """
    if argument is None:
        return config()
    if "=" in argument:
        first = next(iter(config.describe()))
        given = parse_settings(split_settings(argument), f"{name}:{first}=...")
    elif argument and os.path.exists(argument):
        given = read_named(argument, "settings")
    else:
        raise UsageError(
            f"controller {name!r} takes settings or a file of them, got {argument!r}; write "
            f"{name}:KEY=VALUE,KEY=VALUE with keys of {', '.join(config.describe())}"
        )
    try:
        return config.from_mapping(given)
    except ConfigError as error:
        raise UsageError(f"controller {name}:{argument}: {error}") from None
