"""DepthGardener: a gardener that wakes blocks instead of growing seeds.

Like any gardener it measures epochs, lets the governor judge them and keeps the history. A rule
decides after every optimizer step, except between the last step of an epoch and its measurement, so
that no blocks are measured untrained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.config import GardenerConfig
from esper.growth.depth.awake import format_blocks
from esper.growth.depth.deepen import Deepen
from esper.growth.depth.rules import DeepenConfig, as_decision
from esper.growth.depth.stacks import Stack, find_by_example
from esper.growth.gardener import Gardener
from esper.kasmina.garden import Garden
from esper.kasmina.saving import read_garden
from esper.kasmina.slots.probe import call_arguments, evaluating, tensors_in
from esper.leyline.errors import UsageError, describe_exception, reason_of, warn
from esper.leyline.records import (
    DecisionRecord,
    DeepeningRecord,
    DepthRecord,
    StackRecord,
    depth_decision,
)

# ---- Weights of a finished, smaller network to start from


GROWN = "grown"
"""Folder of the finished network in a run folder."""

_MODEL = "model."

_LONGEST = 200
"""Characters of another library's error that are shown."""


def network_folder(path: Path) -> Path:
    """Return the folder of a run's finished or best network; for another folder the path itself."""
    places = (path / GROWN, path / "checkpoints" / "best")
    return next((place for place in places if os.path.isdir(place)), path)


def holds_seeds(state: Mapping[str, Any]) -> bool:
    """Return whether the `state_dict` of a garden has weights of seeds."""
    return any(not name.startswith((_MODEL, "_extra_state")) for name in state)


def read_weights(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict: the one given, or that of a file or a run folder."""
    if not isinstance(source, str):
        return dict(source)
    path = Path(source)
    if not os.path.exists(path):
        raise UsageError(
            f"there is no file or folder {source}; give a run folder, or a file of "
            "model.state_dict()"
        )
    if os.path.isdir(path):
        state, _ = read_garden(network_folder(path))
        if holds_seeds(state):
            raise UsageError(
                f"the network in {source} has seeds; write its plain weights by "
                "torch.save(load_garden(folder, model=model).bake().state_dict(), FILE)"
            )
        own = {name: value for name, value in state.items() if name.startswith(_MODEL)}
        return {name.removeprefix(_MODEL): value for name, value in own.items()}
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Reading bytes that are no weights raises whatever these bytes happen to lead to.
        raise UsageError(_describe_unreadable(source, error)) from None
    if not isinstance(found, Mapping) or not any(isinstance(v, Tensor) for v in found.values()):
        held = type(found).__name__
        if isinstance(found, Mapping):
            held = f"mapping of {', '.join(map(repr, list(found)[:5]))}"
        raise UsageError(
            f"{source} holds a {held}, not a state_dict; write torch.save(model.state_dict(), FILE)"
        )
    return dict(found)


def _describe_unreadable(source: str, error: Exception) -> str:
    found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if found:
        return (
            f"{source} holds a {found[1]}, and only weights are read; write "
            "torch.save(model.state_dict(), FILE)"
        )
    # Readers of bytes report whatever they stumble over; only the system's errors say more.
    reason = reason_of(error)[:_LONGEST] if isinstance(error, OSError) else ""
    reason = reason or f"its {Path(source).stat().st_size:,} bytes cannot be read"
    return (
        f"{source} is damaged or holds no weights ({reason}); give a run folder, or write the file "
        "again by torch.save(model.state_dict(), FILE)"
    )


def describe_misfit(weights: Mapping[str, Any], network: nn.Module) -> str:
    """Return how weights differ from those of a network, and what to give instead.

    Args:
        weights: a state_dict that the network refuses.
        network: the network.
    """
    own = network.state_dict()
    missing = [name for name in own if name not in weights]
    strange = [name for name in weights if name not in own]
    other = [
        f"{name}, {_shape(weights[name])} instead of {_shape(here)}"
        for name, here in own.items()
        if name in weights and _shape(weights[name]) != _shape(here)
    ]
    kinds = {
        "of the model's are not there": missing,
        "are not the model's": strange,
        "have another shape": other,
    }
    parts = [f"{len(names)} {what} (first {names[0]})" for what, names in kinds.items() if names]
    advice = "give a model of the same architecture"
    is_wrapped = bool(missing and strange) and strange[0].endswith(missing[0])
    prefix = strange[0].removesuffix(missing[0]) if is_wrapped else ""
    if any(f".{GROWN}." in name for name in strange):
        advice = "they are of a network that has grown, so give the folder of grown.save"
    elif prefix and all(name.startswith(prefix) for name in weights):
        advice = f"save the state_dict without the wrapper that puts {prefix!r} before every name"
    elif missing and not strange:
        advice += ", or write deepen=True if it has more blocks"
    return f"{', '.join(parts) or 'PyTorch cannot load them'}; {advice}"


def blocks_within(
    weights: Mapping[str, Any], network: nn.Module, stacks: Mapping[str, Stack]
) -> dict[str, int]:
    """Return how many blocks of every stack these weights have; unclear stacks are left out."""
    containers = [stack.container for stack in stacks.values()]
    found = {}
    for name, stack in stacks.items():
        if containers.count(stack.container) > 1:
            continue
        prefix = f"{stack.container}." if stack.container else ""
        there = {
            key.removeprefix(prefix).partition(".")[0] for key in weights if key.startswith(prefix)
        }
        children = network.get_submodule(stack.container).named_children()
        others = [c for key, c in children if f"{prefix}{key}" not in stack.blocks]
        count = len(there) - sum(bool(child.state_dict()) for child in others)
        if 1 <= count <= len(stack.blocks):
            found[name] = count
    return found


def _refuse_complete(start: Mapping[str, int] | None, stacks: Mapping[str, Stack]) -> None:
    """Refuse weights that have all blocks of a network, in which none is left to wake."""
    if start == {name: len(stack.blocks) for name, stack in stacks.items()}:
        most = max(start.values())
        raise UsageError(
            f"the weights have all {most} blocks of the model, so none is left to wake; build the "
            f"model with more, such as {2 * most}, or leave out deepen="
        )


def load_weights(weights: Mapping[str, Any], network: nn.Module, depth: str) -> None:
    """Load weights into a network of the same depth; refuse those that do not fit.

    Args:
        weights: a state_dict.
        network: the network.
        depth: number of blocks awake, as text for the error.
    """
    own = network.state_dict()
    for name in {**own, **weights}:
        here, there = (_shape(state.get(name)) for state in (own, weights))
        if here != there:
            raise UsageError(
                f"the weights do not fit the network with {depth} awake: {name} is {there} in the "
                f"weights and {here} in the network; change start= or the weights"
            )
    network.load_state_dict(dict(weights))


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else "missing" if value is None else value


class DepthGardener(Gardener):
    """Measures a network epoch by epoch while a rule wakes its blocks.

    Args:
        garden: the network, without slots.
        deepen: which blocks sleep at first, and when they wake.
        horizon: epochs of the whole run.
        steps_per_epoch: optimizer steps of an epoch.
        example: one batch of inputs.
        seed: seed of the run.
        config: further settings.
    """

    def __init__(
        self,
        garden: Garden,
        deepen: DeepenConfig,
        horizon: int,
        *,
        steps_per_epoch: int,
        example: Any,
        seed: int = 0,
        config: GardenerConfig | None = None,
    ) -> None:
        """Bind the network; blocks are put to sleep when the optimizer is made."""
        super().__init__(garden, "wait", horizon, seed=seed, config=config)
        self.deepen = deepen
        self.depth: Deepen
        """What wakes blocks; set when the optimizer is made."""
        self._example = example
        self._steps_per_epoch = steps_per_epoch
        self._woken: list[DeepeningRecord] = []
        self._engine.before_write = self._fall_back

    def optimizer(
        self,
        factory: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> Optimizer:
        """Make the optimizer, then put blocks to sleep."""
        optimizer = super().optimizer(factory, params, **options)
        config, network = self.deepen, self.garden.model
        start, weights = as_decision(config.start), None
        if config.weights is not None:
            weights = read_weights(config.weights)
            if start is None:
                stacks = find_by_example(network, self._example).choose(self._stacks)
                start = blocks_within(weights, network, stacks) or None
                _refuse_complete(start, stacks)
        self.depth = Deepen(
            network,
            optimizer,
            stacks=self._stacks,
            example=self._example,
            start=start,
            at=config.steps(self._planned),  # type: ignore[arg-type]
            total_steps=self._planned,
            order=config.order,
            controller=config.controller,
            max_parameters=self.garden.config.max_parameters,
        )
        # Checkpoints of the run have the weights and the state of `depth`.
        self.depth.saves.stop()
        self._costs = self.depth.count_flops(self._example)
        """FLOPs of the example; those of a training step are counted on the first batch."""
        if weights is not None:
            with self.depth.export(has_config=False):
                load_weights(weights, network, format_blocks(self.depth.awake))
        self.first_awake = self.depth.awake
        # A rollback of the first epoch returns to these weights.
        self._group.start()
        return optimizer

    # -- in the training loop ----------------------------------------------------------------------

    def start_batch(self, inputs: Any) -> None:
        """Let the rule decide on the last step, before the next one."""
        if not self.depth.steps:
            self.depth.count_flops(inputs)
        self._wake()

    def end_batch(self, loss: Tensor) -> None:
        """Count an optimizer step and its loss."""
        self.depth.count(loss)

    def _wake(self) -> None:
        depth = self.depth
        if depth.is_finished:
            return
        before, refused = depth.awake, depth.refused
        depth.decide()
        assert depth.total_steps is not None
        share = 100.0 * depth.steps / depth.total_steps
        when = f"after step {depth.steps:,}, at {share:.0f} % of the run"
        for name, awake in depth.awake.items():
            if awake != before[name]:
                self._woken.append(
                    DeepeningRecord(
                        stack=name,
                        before=before[name],
                        after=awake,
                        step=depth.steps,
                        outcome="done",
                        reason=f"{self.deepen.rule}: {before[name]} to {awake} blocks {when}",
                    )
                )
        if depth.refused != refused:
            name = next(name for name, count in depth.blocks.items() if before[name] < count)
            self._woken.append(
                DeepeningRecord(
                    stack=name,
                    before=before[name],
                    after=before[name],
                    step=depth.steps,
                    outcome="illegal",
                    reason=depth.refused,
                )
            )

    # -- what others read --------------------------------------------------------------------------

    def sizes(self) -> tuple[int, int]:
        """Return the trainable parameters and operations per sample with the blocks awake now."""
        return self.depth.count_parameters(), self.flops_with(self.depth.awake)

    def flops_with(self, awake: dict[str, int]) -> int:
        """Return the operations per sample of the network with these blocks awake."""
        whole = self._costs.per_batch(self.depth.blocks)
        share = self._costs.per_batch(awake) / whole if whole else 1.0
        return round(share * self.garden.host_flops)

    @contextmanager
    def as_of_epoch(self, epoch: int | None = None) -> Iterator[None]:
        """Leave only the blocks that were awake in an epoch, or now, within a `with` block."""
        if epoch is not None:
            self.depth.go_back(self._awake_in(epoch))
        with self.depth.export(has_config=False):
            yield

    def remove_sleeping(self) -> None:
        """Remove blocks that still sleep from the model.

        A model that cannot run without them keeps them asleep, with a warning.
        """
        if self.depth.awake == self.depth.blocks:
            return
        try:
            before = self._outputs()
            put_back = self.depth.shorten()
        except UsageError as error:
            warn(_KEPT.format(error))
            return
        try:
            is_same = _same(before, self._outputs())
            problem = "" if is_same else "its outputs change without them"
        except Exception as error:
            problem = describe_exception(error)
        if problem:
            put_back()
            warn(_KEPT.format(problem))

    def memory(self) -> dict[str, Any]:
        """Return the state of the gardener without its garden and optimizer."""
        depth = {"planned": self._planned, "state": self.depth.state_dict()}
        return {**super().memory(), "depth": depth}

    def recall(self, state: dict[str, Any]) -> None:
        """Restore what `memory` returned; garden and optimizer stay as they are."""
        super().recall(state)
        saved = state["depth"]["state"]
        total = saved["total_steps"]
        if state["depth"]["planned"] != self._planned:
            # The run was extended or has other batches, so count the steps that are left.
            total = saved["step"] + (self.horizon - self.epoch) * self._steps_per_epoch
        if total != self.depth.total_steps:
            self.depth.total_steps = total
        self.depth.load_state_dict(saved)

    # -- hooks of Gardener -------------------------------------------------------------------------

    @property
    def _planned(self) -> int:
        """Optimizer steps of a run of this length."""
        return self.horizon * self._steps_per_epoch

    @property
    def _stacks(self) -> str | tuple[str, ...]:
        return self.deepen.stacks or "auto"

    def _decide(self, signals: Any, before_action: Any) -> DecisionRecord:
        """Let the rule decide on the last step of the epoch; no seeds grow."""
        self._wake()
        return depth_decision("WAIT")

    def _depth_now(self) -> DepthRecord:
        depth, awake = self.depth, self.depth.awake
        return DepthRecord(
            step=depth.steps,
            flops=depth.flops,
            static_flops=depth.static_flops,
            stacks=tuple(
                StackRecord(name=name, awake=awake[name], blocks=count)
                for name, count in depth.blocks.items()
            ),
        )

    def _take_deepenings(self) -> tuple[DeepeningRecord, ...]:
        woken, self._woken = tuple(self._woken), []
        return woken

    def _awake_in(self, epoch: int) -> dict[str, int]:
        """Return the blocks that were awake when an epoch was measured; epoch 0 is the start."""
        shown = self.history[epoch - 1].depth if epoch else None
        return self.first_awake if shown is None else shown.awake

    def _fall_back(self) -> None:
        """Put the blocks to sleep that slept in the last safe epoch."""
        self.depth.go_back(self._awake_in(int(self._group.safe_epoch[0])))

    def _outputs(self) -> list[Tensor]:
        args, kwargs = call_arguments(self._example)
        model = self.garden.model
        with evaluating(model), torch.no_grad():
            return list(tensors_in(model(*args, **kwargs)))


_KEPT = (
    "the model keeps its sleeping blocks because it cannot run without them ({}); it computes what "
    "was measured, but unpickling it needs Esper"
)


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Return whether a model computes the same, up to rounding."""
    return len(before) == len(after) and all(
        one.shape == other.shape
        and torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-4, equal_nan=True)
        for one, other in zip(before, after, strict=True)
    )
