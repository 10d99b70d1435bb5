"""Records of what happened in a run: written while it runs, read by reports.

Absent values are None, never 0. Records can be turned into plain data and back.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

_type_hints = functools.cache(typing.get_type_hints)


def copy_fields(kind: type[T], source: object, /, **given: Any) -> T:
    """Return a record of another class with the fields that both have.

    Values in `given` replace those of `source`. Fields that are in neither keep their default.
    """
    shared = {
        field.name: getattr(source, field.name)
        for field in dataclasses.fields(kind)
        if field.name not in given and hasattr(source, field.name)
    }
    return kind(**shared, **given)


def _read(value: Any, hint: Any, where: str) -> Any:
    """Return a value of plain data in its declared type.

    Raises:
        TypeError: A value is missing, unknown, or has another type.
    """
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            kind: Any = option
            hints = _type_hints(kind)
            fields = {
                name: _read(item, hints.get(name, object), f"{name} of a {kind.__name__}")
                for name, item in value.items()
            }
            return kind(**fields)
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_read(item, typing.get_args(option)[0], where) for item in value)
    # A whole number is a number too.
    allowed = (*options, int) if float in options else options
    if not isinstance(value, tuple(option for option in allowed if isinstance(option, type))):
        raise TypeError(f"{where} is a {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class Plain:
    """Base of records that consist of plain data."""

    def to_mapping(self) -> dict[str, Any]:
        """Return the record as dicts, lists and numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild what `to_mapping` returned."""
        record: Self = _read(data, cls, cls.__name__)
        return record


DEEPEN = "DEEPEN"
"""The op of a decision that wakes blocks; controllers of seeds never take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """One slot at the end of one epoch, as the controller saw it."""

    name: str
    stage: str
    """Name of a `SeedStage`."""
    blueprint: str | None
    alpha: float
    alpha_target: float
    parameters: int
    flops: int
    """Operations per sample of the seed and its gate."""
    epochs_in_stage: int
    age: int
    contribution: float | None
    """Points that the network would lose now without the seed, which is not what it has gained."""
    contribution_se: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What the controller did after one epoch."""

    op: str
    slot: str | None
    """None for WAIT."""
    blueprint: str | None
    style: str | None
    tempo: int | None
    """Epochs of the first blend; 0 for a seed at full amplitude from the first step."""
    alpha_target: float | None
    alpha_speed: int | None
    alpha_curve: str | None
    outcome: str
    """done, gate_failed or illegal."""
    reason: str
    """Why the decision had no effect; for a WAIT or a PRUNE that had one, why the controller chose
    it; for a DEEPEN, how many blocks woke when."""

    @property
    def is_act(self) -> bool:
        """Whether the decision changed the network."""
        return self.op != "WAIT" and self.outcome == "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """One stack of blocks when an epoch was measured."""

    name: str
    awake: int
    """Blocks that are awake; the others sleep and cost nothing."""
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepeningRecord:
    """Blocks of one stack that woke, or a refused attempt to wake them."""

    stack: str
    before: int
    """Blocks awake before."""
    after: int
    """Blocks awake from then on; if it was refused, the number asked for."""
    step: int
    """Optimizer steps done by then."""
    outcome: str
    """done or illegal."""
    reason: str
    """What happened when, and by which rule; if it was refused, why."""

    @property
    def decision(self) -> DecisionRecord:
        """The same as a decision about the stack."""
        return depth_decision(DEEPEN, self.stack, self.outcome, self.reason)


def depth_decision(
    op: str, stack: str | None = None, outcome: str = "done", reason: str = ""
) -> DecisionRecord:
    """Return a decision about the blocks of a stack; the fields about seeds are None."""
    arguments = (field.name for field in dataclasses.fields(DecisionRecord))
    given = {"op": op, "slot": stack, "outcome": outcome, "reason": reason}
    return DecisionRecord(**{**dict.fromkeys(arguments), **given})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRecord:
    """Depth of a network when an epoch was measured, and the FLOPs spent so far."""

    step: int
    """Optimizer steps done."""
    flops: float
    """Training FLOPs spent so far, forward and backward."""
    static_flops: float
    """FLOPs of the same steps with all blocks awake."""
    stacks: tuple[StackRecord, ...]
    deepenings: tuple[DeepeningRecord, ...] = ()
    """Those of this epoch, or decided at its end."""

    @property
    def awake(self) -> dict[str, int]:
        """Blocks awake, by stack."""
        return {stack.name: stack.awake for stack in self.stacks}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord(Plain):
    """One epoch: its measurements, and the decision made on them."""

    epoch: int
    """Epochs done, starting at 1."""
    train_loss: float | None
    val_loss: float
    val_score: float
    """Points: accuracy 0 to 100, or the negative loss."""
    twin_score: float | None
    """The score of the twin that only waits, where one runs."""
    stabilized: bool
    plateau_epochs: int
    parameters: int
    flops: int
    """Operations of one sample's forward pass."""
    slots: tuple[SlotRecord, ...]
    decision: DecisionRecord | None
    """None after the last epoch, when the controller only observes."""
    seconds: float
    rollback: str | None = None
    """Why the network was rolled back to its last good state in this epoch: not_finite, lobotomy
    or divergence; None if it was not."""
    statistics_samples: int = 0
    """Training samples that BatchNorm statistics were recomputed from before the epoch was
    measured; 0 if they were not."""
    depth: DepthRecord | None = None
    """None for a network that is not deepened."""
    training_flops: float | None = None
    """Training FLOPs spent so far: of a deepened network, or, with evaluation, of one that has a
    budget."""

    @property
    def decisions(self) -> tuple[DecisionRecord, ...]:
        """The decisions of this epoch: at most one, or every deepening."""
        woken = () if self.depth is None else self.depth.deepenings
        if woken:
            return tuple(each.decision for each in woken)
        return () if self.decision is None else (self.decision,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRecord:
    """The whole life of one seed."""

    slot: str
    blueprint: str
    germinated: int
    """Epoch of the decision that germinated it."""
    ended: int | None
    """Epoch of its fossilization or removal, None while it lives."""
    fate: str
    """fossilized, pruned, dropped (in the network that is kept it has no effect, or does not exist
    yet), or the name of its stage."""
    parameters: int
    flops: int
    """Operations per sample."""
    contribution: float | None
    """Last measured, in points."""
    contribution_se: float | None

    @property
    def has_no_effect(self) -> bool:
        """Whether its contribution is 0 ± 0 points: no prediction changes without it."""
        return self.contribution == 0 and self.contribution_se == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(Plain):
    """The result of a growing run."""

    task: str
    controller: str
    seed: int
    epochs: int
    parameters_before: int
    parameters_after: int
    flops_before: int
    """Operations of one sample's forward pass."""
    flops_after: int
    val_score: float
    test_score: float | None
    twin_val_score: float | None
    twin_test_score: float | None
    seeds: tuple[SeedRecord, ...]
    seconds: float
    kept_epoch: int
    """The epoch whose network is the result; `val_score` is that of this epoch."""
    twin_kept_epoch: int | None = None
    """The same for the twin, if one ran."""
    stopped: str = ""
    """Why the run ended before its last epoch; empty if it did not."""
    chance_loss: float | None = None
    """Loss of a network that only guesses; None if it is not known."""
    stacks: tuple[StackRecord, ...] = ()
    """The stacks of a deepened network, as the result has them."""
    training_flops: float | None = None
    """Training FLOPs of the whole run: of a deepened network, or, with evaluation, of one that has
    a budget."""
    static_flops: float | None = None
    """FLOPs of the same steps with all blocks awake."""
    compute_budget: float | None = None
    """Training FLOPs that the run could spend; None if it had no budget."""


class SeedLives:
    """Builds the records of all seeds of a run, epoch by epoch."""

    def __init__(self) -> None:
        self._lives: list[dict[str, Any]] = []
        self._open: dict[str, dict[str, Any]] = {}
        self._before: int | None = None

    def follow(self, record: EpochRecord) -> None:
        """Add the next epoch."""
        # Changes that an epoch shows were decided after the epoch before it.
        decided = record.epoch if self._before is None else self._before
        self._before = record.epoch
        for slot in record.slots:
            life = self._open.get(slot.name)
            alive = slot.blueprint is not None and slot.stage not in _GONE
            if alive and life is None:
                life = {
                    "slot": slot.name,
                    "blueprint": slot.blueprint,
                    "germinated": decided,
                    "ended": None,
                    "contribution": None,
                    "contribution_se": None,
                }
                self._open[slot.name] = life
                self._lives.append(life)
            if life is None:
                continue
            if not alive:
                life.update(fate="pruned", ended=decided)
                del self._open[slot.name]
                continue
            life.update(
                fate="fossilized" if slot.stage == "FOSSILIZED" else slot.stage.lower(),
                parameters=slot.parameters,
                flops=slot.flops,
            )
            if slot.contribution is not None:
                life.update(contribution=slot.contribution, contribution_se=slot.contribution_se)
            if slot.stage == "FOSSILIZED" and life["ended"] is None:
                life["ended"] = decided

    def records(self) -> tuple[SeedRecord, ...]:
        """Return a record of every seed so far, in the order of germination."""
        return tuple(SeedRecord(**life) for life in self._lives)


def seed_records(history: Iterable[EpochRecord]) -> tuple[SeedRecord, ...]:
    """Return a record of every seed from the epochs of a run."""
    lives = SeedLives()
    for record in history:
        lives.follow(record)
    return lives.records()


def seeds_at_end(
    history: Sequence[EpochRecord], kept_epoch: int | None = None
) -> tuple[SeedRecord, ...]:
    """Return a record of every seed of a finished run, as of the network that is kept.

    A seed that was inert in that network, was HOLDING without effect, or came later is `pruned` if
    the run pruned it afterwards, else `dropped`.

    Args:
        history: all epochs of the run.
        kept_epoch: the epoch whose network is kept; the last by default.
    """
    last = history[-1].epoch
    kept = last if kept_epoch is None else kept_epoch
    lives = seed_records(history)
    then = seed_records(record for record in history if record.epoch <= kept)
    # Both are in the order of germination.
    ended = (*then, *lives[len(then) :])
    found = []
    for number, (seed, life) in enumerate(zip(ended, lives, strict=True)):
        has_no_effect = seed.fate == _UNDECIDED and seed.has_no_effect
        if seed.fate in _INERT or has_no_effect or number >= len(then):
            seed = (
                life
                if life.fate == "pruned"
                else dataclasses.replace(seed, fate="dropped", ended=last)
            )
        found.append(seed)
    return tuple(found)


def removed_later(
    history: Sequence[EpochRecord], kept_epoch: int | None = None
) -> tuple[SeedRecord, ...]:
    """Return the seeds of the network that is kept which the run removed afterwards, as pruned.

    Args:
        history: all epochs of the run.
        kept_epoch: the epoch whose network is kept; the last by default.
    """
    last = history[-1]
    pruned = {
        decision.slot
        for decision in last.decisions
        if decision.op == "PRUNE" and decision.outcome == "done"
    }
    found = []
    for then, now in zip(seeds_at_end(history, kept_epoch), seed_records(history), strict=True):
        if then.fate in ("pruned", "dropped"):
            continue
        if now.fate == "pruned":
            found.append(now)
        elif now.slot in pruned and now.fate != "fossilized":
            # The run stopped before an epoch without the seed was measured.
            found.append(dataclasses.replace(now, fate="pruned", ended=last.epoch))
    return tuple(found)


def kept_record(history: Sequence[EpochRecord], kept_epoch: int | None = None) -> EpochRecord:
    """Return the record of the epoch whose network is kept, or the last one before it."""
    past = [one for one in history if kept_epoch is None or one.epoch <= kept_epoch]
    return past[-1] if past else history[0]


def stacks_at_end(
    history: Sequence[EpochRecord], kept_epoch: int | None = None
) -> tuple[StackRecord, ...]:
    """Return the stacks of a deepened network in the epoch that is kept."""
    depth = kept_record(history, kept_epoch).depth if history else None
    return () if depth is None else depth.stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRecord:
    """The best epoch of a network at one of its sizes."""

    parameters: int
    """Parameters of the host and of every seed that affects its output."""
    flops: int
    """Operations of their forward pass of one sample."""
    val_score: float
    epoch: int


def best_by_size(history: Sequence[EpochRecord]) -> tuple[SizeRecord, ...]:
    """Return the best validation score at every size a network had, the smallest first.

    A seed that trains in isolation changes no output yet and is not counted.
    """
    best: dict[tuple[int, int], SizeRecord] = {}
    for record in history:
        inert = [slot for slot in record.slots if slot.stage.lower() in _INERT]
        size = SizeRecord(
            parameters=record.parameters - sum(slot.parameters for slot in inert),
            flops=record.flops - sum(slot.flops for slot in inert),
            val_score=record.val_score,
            epoch=record.epoch,
        )
        key = (size.parameters, size.flops)
        if key not in best or size.val_score > best[key].val_score:
            best[key] = size
    return tuple(best[key] for key in sorted(best))


_INERT = ("germinated", "training")
_UNDECIDED = "holding"
_GONE = ("PRUNED", "EMBARGOED", "RESETTING", "DORMANT", "UNKNOWN")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord(Plain):
    """One submodule of a host, with the slots that sit on its output."""

    path: str
    """Dotted name within the host."""
    kind: str
    """Name of its class."""
    parameters: int
    """Trainable parameters that no other part counts."""
    shape: tuple[int, ...] | None
    """Shape of its output for one sample; None if the output is not one tensor."""
    slots: tuple[str, ...]


def decisions_of(history: Sequence[EpochRecord]) -> list[tuple[int, DecisionRecord]]:
    """Return every decision but WAIT with its epoch."""
    return [
        (record.epoch, decision)
        for record in history
        for decision in record.decisions
        if decision.op != "WAIT"
    ]
