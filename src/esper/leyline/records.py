"""What happened in a run, as plain records: written while it runs, read by reports.

Absent values are None, never 0. Every record turns into plain data and back.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)


def copy_fields(kind: type[T], source: object, /, **given: Any) -> T:
    """Return a record of another kind about the same thing.

    Fields of the same name are taken over from `source`, those `given` come first, and what
    `source` does not have keeps its default.
    """
    shared = {
        name: getattr(source, name)
        for name in _field_names(kind)
        if name not in given and hasattr(source, name)
    }
    return kind(**shared, **given)


@functools.cache
def _field_names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _checked(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a record of values that were saved.

    Raises:
        TypeError: A value is missing, unknown, or not of its field's type.
    """
    allowed = _field_types(kind)
    for name, value in values.items():
        if name in allowed and not isinstance(value, allowed[name]):
            raise TypeError(f"{name} of a {kind.__name__} is a {type(value).__name__}")
    return kind(**values)


@functools.cache
def _field_types(kind: type[DataclassInstance]) -> dict[str, tuple[type, ...]]:
    """Return which types the value of every field may have."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        allowed = tuple(typing.get_origin(option) or option for option in options)
        # A whole number is a number too.
        found[name] = (*allowed, int) if float in allowed else allowed
    return found


@dataclass(frozen=True, slots=True)
class Plain:
    """Base of records that are nothing but plain data."""

    def to_mapping(self) -> dict[str, Any]:
        """Return it as dicts, lists and numbers."""
        return dataclasses.asdict(self)


DEEPEN = "DEEPEN"
"""The op of a decision by which blocks wake; no controller of seeds takes it."""


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
    """Points that the network would lose now without the seed; not what the seed has brought."""
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
    alpha_target: float | None
    alpha_speed: int | None
    alpha_curve: str | None
    outcome: str
    """done, gate_failed or illegal."""
    reason: str
    """Why it had no effect; of a WAIT or a PRUNE that had, why the controller chose it; of a DEEPEN
    how many blocks woke when."""

    @property
    def is_act(self) -> bool:
        """Whether something was done, and not only waited for or tried."""
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
    """Blocks of one stack that woke, or were to wake."""

    stack: str
    before: int
    """Blocks awake before."""
    after: int
    """Blocks awake from then on; where it was refused, what was asked for."""
    step: int
    """Optimizer steps done by then."""
    outcome: str
    """done or illegal."""
    reason: str
    """What happened when, and by which rule, in words; where it was refused, why."""

    @property
    def decision(self) -> DecisionRecord:
        """The same as a decision about the stack."""
        return depth_decision(DEEPEN, self.stack, self.outcome, self.reason)


def depth_decision(
    op: str, stack: str | None = None, outcome: str = "done", reason: str = ""
) -> DecisionRecord:
    """Return a decision about the blocks of a stack; what seeds are decided by is None."""
    arguments = (field.name for field in dataclasses.fields(DecisionRecord))
    given = {"op": op, "slot": stack, "outcome": outcome, "reason": reason}
    return DecisionRecord(**{**dict.fromkeys(arguments), **given})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRecord:
    """How deep a network that is deepened was when an epoch was measured, and what that took."""

    step: int
    """Optimizer steps done."""
    flops: float
    """Training FLOPs spent so far, forward and backward."""
    static_flops: float
    """What the same steps would have taken with all blocks awake."""
    stacks: tuple[StackRecord, ...]
    deepenings: tuple[DeepeningRecord, ...] = ()
    """In this epoch, or decided at its end."""

    @property
    def awake(self) -> dict[str, int]:
        """Blocks awake, by stack."""
        return {stack.name: stack.awake for stack in self.stacks}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord(Plain):
    """One epoch: what was measured, and what was decided on it."""

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
    """Why the network went back to its last good state in this epoch: not_finite, lobotomy or
    divergence; None where it did not."""
    statistics_samples: int = 0
    """Training samples that running statistics (BatchNorm) were taken from anew before the epoch
    was measured; 0 where they were not."""
    depth: DepthRecord | None = None
    """None where no blocks sleep and wake."""

    @property
    def decisions(self) -> tuple[DecisionRecord, ...]:
        """What was decided: one thing at most, but for blocks, which may wake more than once."""
        woken = () if self.depth is None else self.depth.deepenings
        if woken:
            return tuple(each.decision for each in woken)
        return () if self.decision is None else (self.decision,)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> EpochRecord:
        """Rebuild what `to_mapping` returned."""
        slots = tuple(_checked(SlotRecord, slot) for slot in data["slots"])
        told = data["decision"]
        decision = None if told is None else _checked(DecisionRecord, told)
        depth = _depth_from(data.get("depth"))
        return _checked(cls, {**data, "slots": slots, "decision": decision, "depth": depth})


def _depth_from(data: Mapping[str, Any] | None) -> DepthRecord | None:
    if data is None:
        return None
    stacks = tuple(_checked(StackRecord, stack) for stack in data["stacks"])
    woken = tuple(_checked(DeepeningRecord, one) for one in data["deepenings"])
    return _checked(DepthRecord, {**data, "stacks": stacks, "deepenings": woken})


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
    """fossilized, pruned, dropped (in the network that is kept it has no effect yet, or is not
    there yet), or the stage it is in."""
    parameters: int
    flops: int
    """Operations per sample."""
    contribution: float | None
    """Last measured, in points."""
    contribution_se: float | None

    @property
    def has_no_effect(self) -> bool:
        """Whether its contribution is 0 ± 0 points: no sample is answered differently."""
        return self.contribution == 0 and self.contribution_se == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(Plain):
    """How a growing run ended."""

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
    """The epoch whose network is the result, and whose `val_score` this is."""
    twin_kept_epoch: int | None = None
    """The same of the twin, where one ran."""
    stopped: str = ""
    """Why the run ended before its last epoch; empty where it did not."""
    chance_loss: float | None = None
    """Loss of a network that only guesses; None where nobody knows."""
    stacks: tuple[StackRecord, ...] = ()
    """Of a network that was deepened: its stacks, as the result has them."""
    training_flops: float | None = None
    """Training FLOPs of the whole run, where a network was deepened."""
    static_flops: float | None = None
    """What its steps would have taken with all blocks awake."""


class SeedLives:
    """The lives of all seeds of a run, followed from one epoch to the next."""

    def __init__(self) -> None:
        """Begin before the first epoch."""
        self._lives: list[dict[str, Any]] = []
        self._open: dict[str, dict[str, Any]] = {}
        self._before: int | None = None

    def follow(self, record: EpochRecord) -> None:
        """Take in the next epoch."""
        # What an epoch shows was decided after the one before it.
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
        """Return every life so far, in the order of germination."""
        return tuple(SeedRecord(**life) for life in self._lives)


def seed_records(history: Iterable[EpochRecord]) -> tuple[SeedRecord, ...]:
    """Return the life of every seed, read off the epochs of a run in order."""
    lives = SeedLives()
    for record in history:
        lives.follow(record)
    return lives.records()


def seeds_at_end(
    history: Sequence[EpochRecord], kept_epoch: int | None = None
) -> tuple[SeedRecord, ...]:
    """Return the life of every seed of a run that is over, as the network that is kept has it.

    What was still inert then, or came later, is dropped, and so is what was held without effect.

    Args:
        history: all epochs of the run.
        kept_epoch: the epoch whose network is kept; the last by default.
    """
    last = history[-1].epoch
    kept = last if kept_epoch is None else kept_epoch
    lives = seed_records(history)
    then = seed_records(record for record in history if record.epoch <= kept)
    # Lives are told in the order in which they began.
    ended = (*then, *lives[len(then) :])
    return tuple(
        dataclasses.replace(seed, fate="dropped", ended=last)
        if seed.fate in _INERT
        or (seed.fate == _UNDECIDED and seed.has_no_effect)
        or (number >= len(then) and seed.fate != "pruned")
        else seed
        for number, seed in enumerate(ended)
    )


def kept_record(history: Sequence[EpochRecord], kept_epoch: int | None = None) -> EpochRecord:
    """Return the epoch whose network is kept, or the nearest before it that is told of."""
    past = [one for one in history if kept_epoch is None or one.epoch <= kept_epoch]
    return past[-1] if past else history[0]


def stacks_at_end(
    history: Sequence[EpochRecord], kept_epoch: int | None = None
) -> tuple[StackRecord, ...]:
    """Return the stacks of a network that was deepened as the network that is kept has them."""
    depth = kept_record(history, kept_epoch).depth if history else None
    return () if depth is None else depth.stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRecord:
    """The best that a network was at one of its sizes."""

    parameters: int
    """Of the host and of every seed whose output reached it."""
    flops: int
    """Operations of one sample's forward pass, likewise."""
    val_score: float
    epoch: int


def best_by_size(history: Sequence[EpochRecord]) -> tuple[SizeRecord, ...]:
    """Return the best validation score of every size a network had, the smallest first.

    A seed that learns in isolation changes no output yet, so that it is not counted.
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
    """Shape of its output for one sample; None where that is not one tensor."""
    slots: tuple[str, ...]

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> ModuleRecord:
        """Rebuild what `to_mapping` returned."""
        shape = data["shape"]
        return cls(
            path=str(data["path"]),
            kind=str(data["kind"]),
            parameters=int(data["parameters"]),
            shape=None if shape is None else tuple(int(size) for size in shape),
            slots=tuple(str(slot) for slot in data["slots"]),
        )


def decisions_of(history: Sequence[EpochRecord]) -> list[tuple[int, DecisionRecord]]:
    """Return every decision but WAIT with its epoch."""
    return [
        (record.epoch, decision)
        for record in history
        for decision in record.decisions
        if decision.op != "WAIT"
    ]
