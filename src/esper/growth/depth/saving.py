"""Warns of incomplete saves while blocks sleep, and checks the state that `Deepen` loads."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

from torch import distributed as dist
from torch import nn

from esper.leyline.errors import CheckpointError, EsperWarning, warn

HOW_TO_SAVE = "because it is bound to its model and optimizer; save depth.state_dict()"


class SaveWatch:
    """Warns once if `model.state_dict()` was saved while blocks sleep, but `Deepen`'s own was not.

    A fresh model that loads such weights runs all blocks, and computes something else.

    Most loops read `model.state_dict()` first and `depth.state_dict()` after it. So whether a save
    is complete shows only later: at the next optimizer step, at the end of a notebook's cell, or
    when its `Deepen` is freed or the program ends. An earlier warning would also go to loops that
    save both.

    The hooks are on the sleeping blocks, not on the model. So they see a save through any wrapper
    (DDP, FSDP2, `torch.compile`, a `LightningModule`), and none inside `export()`, where sleeping
    blocks are not part of the model. Hooks of `state_dict` are not part of what is compiled.
    """

    def __init__(self) -> None:
        """Wait for a first step."""
        self._has_begun = False
        self._awake = ""
        self._problem = ""
        self._has_depth = False
        self._is_over = False
        self._is_stopped = False

    def follow(self, owner: object) -> None:
        """Call `end` when this object is freed, or the program ends."""
        weakref.finalize(owner, self.end)

    def set_awake(self, awake: Mapping[str, int], blocks: Mapping[str, int]) -> None:
        """Take the blocks awake, and all, by stack."""
        self._awake = f"{sum(awake.values())} of {sum(blocks.values())}"

    def stop(self) -> None:
        """Warn no more."""
        self._is_stopped, self._problem = True, ""

    def start_step(self) -> None:
        """Warn if the last save was not complete."""
        self._warn()
        self._has_begun, self._has_depth = True, False

    def see_model(self) -> None:
        """Note that `state_dict` has read the weights of a sleeping block."""
        if self._is_stopped or self._has_depth or not self._has_begun or self._problem:
            return
        # All processes gather sharded weights, but often only the first one saves the rest.
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        self._problem = (
            f"model.state_dict() was read while only {self._awake} blocks were awake; a fresh "
            "model that loads it runs all blocks and computes something else. Also save "
            "depth.state_dict() to resume the run, or save the network that is awake: with "
            "depth.export(): torch.save(model.state_dict(), FILE)"
        )
        if self._is_over:
            self._warn()
        elif shell := _notebook():
            shell.events.register("post_run_cell", self._after_cell)

    def see_depth(self) -> None:
        """Note that `Deepen.state_dict` was called, which completes a save."""
        self._problem, self._has_depth = "", True

    def end(self) -> None:
        """Warn if the last save was not complete; later ones cannot be."""
        self._is_over = True
        problem = self._problem
        try:
            self._warn()
        except EsperWarning:
            # What runs when an object is freed cannot raise.
            print(f"EsperWarning: {problem}", file=sys.stderr)

    def _after_cell(self, _: Any = None) -> None:
        _notebook().events.unregister("post_run_cell", self._after_cell)
        self._warn()

    def _warn(self) -> None:
        if problem := self._problem:
            self.stop()
            warn(problem)


def _notebook() -> Any:
    """Return the shell of IPython that runs this code, if one does."""
    ipython: Any = sys.modules.get("IPython")
    return ipython and ipython.get_ipython()


class OnSave:
    """Hook on a sleeping block that tells when its `state_dict` is read.

    Copies of a model copy its hooks; a copy of this one does nothing.
    """

    def __init__(self, watch: SaveWatch | None = None) -> None:
        """Tell this watch."""
        self._watch = watch

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OnSave, ()

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Tell the watch."""
        if self._watch is not None:
            self._watch.see_model()


def remove_save_hooks(module: nn.Module) -> None:
    """Remove hooks of this kind from a module, but not from those in it."""
    hooks = module._state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, OnSave)]:
        del hooks[key]


def check_depth_state(state: Any, keys: Mapping[str, Any]) -> None:
    """Refuse what is not from `Deepen.state_dict`, whose keys are given."""

    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and keys.keys() - {"controller"} <= value.keys()

    if fits(state):
        return
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"load_state_dict takes what depth.state_dict() returned, got a {type(state).__name__}"
        )
    inside = [key for key, value in state.items() if fits(value)]
    advice = f"give its part {inside[0]!r}" if inside else "save depth.state_dict() with the model"
    found = ", ".join(repr(key) for key in list(state)[:4]) or "none"
    raise CheckpointError(
        f"load_state_dict takes what depth.state_dict() returned, got one with the keys {found}; "
        f"{advice}"
    )
