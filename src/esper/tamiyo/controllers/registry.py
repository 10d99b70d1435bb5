"""The registry of controllers, and tools for controllers that decide row by row.

A controller is named like 'heuristic', 'schedule:plan.yaml' or 'heuristic:rest_epochs=3', on the
command line and in Python. After the colon comes its argument: a file, a folder, or settings.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.config import Config
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import ConfigError, UsageError
from esper.leyline.reasons import Why
from esper.leyline.registry import Registry
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.stages import COOLDOWN_STAGES, AlphaMode, SeedStage
from esper.utils.randomness import generator
from esper.utils.settings import parse_settings, read_named, split_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class ControllerPlugin(Controller, Protocol):
    """A controller that `register_controller` takes: it can be built from its name."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> Controller:
        """Return a controller; `argument` is the text after the colon, None without a colon."""


@runtime_checkable
class ControllerMaker(Protocol):
    """An object that makes a controller for any host, such as `esper.Tamiyo`."""

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
        spec: 'name', 'name:argument', the folder of a saved policy, an `esper.Tamiyo`, or a
            controller, which is returned as it is.
        context: The slots, blueprints and seed of the run.

    Returns:
        A controller; call its `reset` before the first decision.
    """
    if isinstance(spec, os.PathLike):
        spec = os.fspath(spec)
    if not isinstance(spec, str):
        # A class has the methods of the protocol too, but passing one is a mistake.
        if isinstance(spec, Controller) and not isinstance(spec, type):
            return spec
        if isinstance(spec, ControllerMaker) and not isinstance(spec, type):
            return spec.controller(context)
        raise UsageError(
            "a controller must be a name or an object with reset, act, state_dict and "
            f"load_state_dict, got {spec!r}"
        )
    name, colon, argument = spec.partition(":")
    # os.path.exists is False for text that cannot be a path.
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
    """Return the settings of a controller from 'a=1,b=[x,y]' or a file, or the defaults.

    Args:
        name: the controller, for messages.
        argument: the text after its colon.
        config: class of its settings.
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


# ---- The choice of one row, and packing choices into action tensors


Choice: TypeAlias = Mapping[str, int]
"""The action of one row: {head: index} with at least 'op'; missing heads get their placeholder."""

WAIT: Choice = {"op": LifecycleOp.WAIT}


def head_mask(masks: Masks, row: int, head: str, op: int, slot: int) -> Tensor:
    """Return bool [choices]: the legal choices of a head in a row, given op and slot."""
    if head == "slot":
        return masks.slot_by_op[row, op]
    if head == "blueprint":
        return masks.blueprint_by_slot[row, slot]
    mask: Tensor = getattr(masks, head)
    return mask[row]


def draw_heads(*keys: int) -> Tensor:
    """Return one draw from [0, 1) per head, float64 [8], from the random stream of these keys."""
    stream = generator(*keys, "policy")
    return torch.rand(len(HEAD_NAMES), generator=stream, dtype=torch.float64)


def pack_choices(choices: Sequence[Choice], masks: Masks) -> dict[str, Tensor]:
    """Return the actions {head: int64[R]} for one choice per row, on the masks' device."""
    first_slots = masks.slot_by_op.to(torch.uint8).argmax(-1).tolist()
    table = [
        [_value(choice, head, first_slots[row]) for head in HEAD_NAMES]
        for row, choice in enumerate(choices)
    ]
    packed = torch.tensor(table, dtype=torch.int64, device=masks.op.device)
    packed = packed.reshape(len(choices), len(HEAD_NAMES))
    return {head: packed[:, index].clone() for index, head in enumerate(HEAD_NAMES)}


def _value(choice: Choice, head: str, first_slot_by_op: list[int]) -> int:
    op = LifecycleOp(choice["op"])
    if head in CAUSAL_HEADS[op] and head in choice:
        return int(choice[head])
    return first_slot_by_op[op] if head == "slot" else int(PLACEHOLDERS[head])


# ---- Signals and masks of one row as plain numbers


_FULL_ALPHA = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class RowView:
    """The signals and masks of one row; lists are over slots."""

    epoch: int
    horizon: int
    score: float
    best_score: float
    loss_history: list[float]
    train_loss: float
    plateau_epochs: int
    stabilized: bool
    rolled_back: bool
    last_op: int
    last_success: bool
    host_params: int
    flops: int
    compute_budget: int
    compute_spent: int
    enabled: list[bool]
    stage: list[int]
    blueprint: list[int]
    copies: list[int]
    algorithm: list[int]
    alpha_mode: list[int]
    alpha: list[float]
    alpha_target: list[float]
    epochs_in_stage: list[int]
    age: list[int]
    counterfactual_age: list[int]
    contribution: list[float]
    contribution_se: list[float]
    seed_flops: list[list[int]]
    """Most operations that a seed of each blueprint adds, -1 where it is not for the slot."""
    legal: list[list[bool]]
    """Whether each op is legal at each slot."""
    fits: list[list[bool]]
    """Whether each blueprint fits each slot."""

    def is_fully_blended(self, slot: int) -> bool:
        """Return whether a seed holds at full amplitude."""
        return (
            self.alpha_mode[slot] == AlphaMode.HOLD
            and self.alpha[slot] >= _FULL_ALPHA
            and self.alpha_target[slot] >= _FULL_ALPHA
        )


def read_rows(signals: Signals, masks: Masks) -> list[RowView]:
    """Return one view per row; every tensor is copied from its device once."""
    others = {
        "horizon": signals.max_epochs,
        "score": signals.val_score,
        "legal": masks.slot_by_op,
        "fits": masks.blueprint_by_slot,
    }
    names = [field.name for field in fields(RowView)]
    columns = [others[name] if name in others else getattr(signals, name) for name in names]
    return [RowView(*row) for row in zip(*(each.tolist() for each in columns), strict=True)]


def check_rows(who: str, known: int, signals: Signals) -> None:
    """Raise if a controller was reset for another number of rows."""
    rows = len(signals.epoch)
    if rows != known:
        raise UsageError(
            f"the {who} was reset for {known} rows but is shown {rows}; "
            f"call reset({rows}, device) first"
        )


LOSS_POINTS = 100.0
"""Points of the whole loss, where scores are negative losses: 1 % of it counts as one point."""


def unit_of(score: float) -> str:
    """Return the unit of contributions beside a score: points, or a share of the loss."""
    return "points" if score >= 0 else "% of the loss"


Verdict: TypeAlias = tuple[Choice, str]
"""A choice and the reason for it; the reason may be empty."""

M = TypeVar("M", bound="DataclassInstance")


class RowController(ABC, Generic[M]):
    """Base of controllers that decide row by row, each row with a memory of its own."""

    memory: type[M]
    """A dataclass of plain data; its defaults are the memory of a row at the start."""

    def __init__(self) -> None:
        self._rows: list[M] = []
        self._reasons: list[str] = []

    @abstractmethod
    def decide(self, row: RowView, memory: M) -> Verdict:
        """Return the choice of a row with its reason, and update its memory."""

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Give every row an empty memory."""
        self._rows = [self.memory() for _ in range(rows)]
        self._reasons = [""] * rows

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return the decision of every row."""
        check_rows("controller", len(self._rows), signals)
        verdicts = []
        for index, row in enumerate(read_rows(signals, masks)):
            if row.rolled_back:
                # What the memory holds did not happen in the restored host.
                self._rows[index] = self.memory()
            verdicts.append(self.decide(row, self._rows[index]))
        self._reasons = [reason for _, reason in verdicts]
        return pack_choices([choice for choice, _ in verdicts], masks)

    def reasons(self) -> Sequence[str]:
        """Return why each row waited or pruned at its last decision."""
        return self._reasons

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of every row as plain data."""
        return {"rows": [asdict(memory) for memory in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memory of every row."""
        self._rows = [self.memory(**copy.deepcopy(row)) for row in state["rows"]]


# ---- Why a row waits, with its figures


def describe_waiting(row: RowView, slot: int) -> str:
    """Return that a row waits for the seed in a slot, with its stage and amplitude."""
    stage, epochs = SeedStage(row.stage[slot]).name.lower(), row.epochs_in_stage[slot]
    return (
        f"{Why.DEVELOPING} ({stage} for {epochs} epoch{'s' * (epochs != 1)}, at "
        f"{row.alpha[slot]:.0%} of full amplitude)"
    )


def describe_resting(row: RowView) -> str:
    """Return that a row waits until the slots of pruned seeds are free again."""
    cooling = sum(stage in COOLDOWN_STAGES for stage in row.stage)
    return f"{Why.RESTING} ({cooling} of {len(row.stage)} slots cooling down)"


# ---- Advance and fossilize seeds without judging them


def advance_seeds(row: RowView, slots: Iterable[int]) -> list[Choice]:
    """Return the legal ADVANCE and FOSSILIZE operations for the seeds in these slots.

    A seed with a target amplitude below 1 can neither hold nor fossilize; it is left as it is.
    """
    advances: list[Choice] = []
    fossilizes: list[Choice] = []
    for slot in slots:
        stage = row.stage[slot]
        is_blended = stage == SeedStage.BLENDING and row.is_fully_blended(slot)
        if stage in (SeedStage.GERMINATED, SeedStage.TRAINING) or is_blended:
            if row.legal[LifecycleOp.ADVANCE][slot]:
                advances.append({"op": int(LifecycleOp.ADVANCE), "slot": slot})
        elif stage == SeedStage.HOLDING and row.legal[LifecycleOp.FOSSILIZE][slot]:
            fossilizes.append({"op": int(LifecycleOp.FOSSILIZE), "slot": slot})
    return [*advances, *fossilizes]


def first_untried(choices: list[Choice], failed: Choice | None) -> Choice | None:
    """Return the first choice, but the one that has just failed only if there is no other."""
    return min(choices, key=lambda choice: choice == failed, default=None)
