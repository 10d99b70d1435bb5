"""Deepen: trains some blocks of a network first, and wakes the rest as copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.depth.awake import (
    Compute,
    Costs,
    SleepingStacks,
    count_costs,
    default_start,
    double,
    fill_in,
    resolve,
    shorten,
)
from esper.growth.depth.blocks import (
    ORDERS,
    Order,
    Processes,
    check_held,
    inner_optimizers,
    unwrapped,
    wake_copies,
    world_size,
)
from esper.growth.depth.first_batch import unhook, wait_for_batch
from esper.growth.depth.report import describe_last_wake, describe_run, describe_unknown
from esper.growth.depth.rules import (
    Decision,
    DepthController,
    LossWindows,
    Plateau,
    Progress,
    Schedule,
    Slope,
    check_total_steps,
    make_rule,
    warn_of_short_resume,
    warn_past_end,
)
from esper.growth.depth.saving import HOW_TO_SAVE, SaveWatch, check_depth_state
from esper.growth.depth.stacks import FoundStacks, Stack, find, find_by_example
from esper.growth.depth.trained import check_not_frozen, warn_of_trained
from esper.growth.steps import ForgottenSteps
from esper.kasmina.slots.probe import call_arguments
from esper.leyline.errors import CheckpointError, UsageError, unknown_name


class Deepen:
    """Trains a network with only some of its blocks awake, and wakes the rest step by step.

    Build the network at its final size. Deepen puts most of its repeated blocks to sleep: they stay
    in place, cost nothing and pass their input on. Later they wake as copies of blocks that were
    awake, with weights, buffers and optimizer state. The model stays your own object, and its
    `state_dict` keys never change.

        depth = esper.Deepen(model, optimizer, total_steps=8_000)
        for batch in batches:
            loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            depth.step()

    Args:
        model: the network at its final size; it may be wrapped by DistributedDataParallel,
            fully_shard or torch.compile.
        optimizer: one or several that train it, with all parameters from the start.
        stacks: names of the lists of blocks, as `esper.find_stacks` gives them; by default all.
        example: inputs to find stacks and count FLOPs with now; by default the model's first batch.
        start: blocks awake at first, in every stack or by stack (a stack that is not named has all
            awake); by default a quarter.
        at: {step: blocks} for the schedule; by default blocks double at equal distances, the last
            time at 40 % of the run: from a quarter at 20 % and 40 %.
        total_steps: optimizer steps of the whole run.
        order: order of copies: 'stack' (a b c a b c) or 'interleave' (a a b b c c).
        controller: 'schedule', 'plateau', 'slope', or a function from a `Progress` to the number of
            blocks to be awake (None changes nothing). All but 'schedule' need `depth.step(loss)`.
        ema: averaged copies of the model, one or several, to deepen with it.
        batches_per_step: batches of one process in an optimizer step, to count FLOPs.
        max_parameters: most trainable parameters awake; at the limit no more blocks wake. 0 is no
            limit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        stacks: str | Sequence[str] = "auto",
        example: Any = None,
        start: int | Mapping[str, int] | None = None,
        at: Mapping[int, int | Mapping[str, int]] | None = None,
        total_steps: int | None = None,
        order: Order = "stack",
        controller: str | DepthController = "schedule",
        ema: nn.Module | Sequence[nn.Module] | None = None,
        batches_per_step: int = 1,
        max_parameters: int = 0,
    ) -> None:
        """Put blocks to sleep now, or on the first batch if no example is given."""
        if order not in ORDERS:
            raise unknown_name("order", order, ORDERS)
        self._wrappers = unwrapped(model)
        self._network = self._wrappers[-1]
        self._optimizers = inner_optimizers(optimizer)
        self._processes = Processes(self._wrappers)
        copies = [] if ema is None else [ema] if isinstance(ema, nn.Module) else list(ema)
        self._networks = [self._network, *(unwrapped(copy)[-1] for copy in copies)]
        for network in self._networks:
            wake_copies(network)
        self._chosen = stacks
        self._wanted_start = start
        self._order = order
        self._rule = make_rule(controller, at)
        self._total_steps = check_total_steps(total_steps, self._rule)
        self._compute = Compute(batches_per_step * world_size())
        self._stacks: dict[str, Stack] = {}
        self._sleeping: SleepingStacks
        self._start: dict[str, int] = {}
        self._awake: dict[str, int] = {}
        self._planned: list[tuple[int, Decision]] | None = None
        self._step = 0
        self.refused = ""
        """Why due blocks stay asleep; empty if none do."""
        self.is_finished = False
        """Whether no more blocks will wake."""
        self._losses = LossWindows()
        self._history: list[dict[str, Any]] = []
        self._loaded: dict[str, Any] | None = None
        self._max_parameters = max_parameters
        self._is_undecided = False
        self.saves = SaveWatch()
        """Warns of incomplete saves; `saves.stop()` ends that."""
        self.saves.follow(self)
        self._forgotten = ForgottenSteps(
            self._optimizers[:1].__contains__,
            # By default blocks first wake after a fifth of the run.
            100 if self._total_steps is None else max(1, self._total_steps // 5),
            "the optimizer steps but depth.step() was never called, so sleeping blocks stay "
            "asleep; call depth.step() after each optimizer.step()",
        )
        if example is None:
            self._wait_for_a_batch()
        else:
            self._begin(find_by_example(self._network, example))
            self.count_flops(example)
            if world_size() > 1:
                # The model may be inside a wrapper that Deepen does not know.
                self._wait_for_a_batch()

    # -- what users read ---------------------------------------------------------------------------

    @property
    def awake(self) -> dict[str, int]:
        """Blocks awake, by stack."""
        self._check_found("awake")
        return dict(self._awake)

    @property
    def blocks(self) -> dict[str, int]:
        """All blocks, by stack."""
        self._check_found("blocks")
        return {name: len(stack.blocks) for name, stack in self._stacks.items()}

    @property
    def flops(self) -> float:
        """Training FLOPs spent so far, forward and backward, in all processes."""
        return self._compute.after(self._step, self._awake)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every growth: the step after which blocks woke, the blocks awake then, and FLOPs."""
        return [dict(event) for event in self._history]

    @property
    def steps(self) -> int:
        """Optimizer steps counted so far."""
        return self._step

    @property
    def static_flops(self) -> float:
        """Training FLOPs of the steps so far if all blocks had been awake."""
        return self._step * self._compute.per_step(self.blocks)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; can be set before the first step."""
        return self._total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        if self._step:
            raise UsageError(
                f"total_steps can be set before the first step only, and {self._step} are done"
            )
        self._total_steps, self._planned = check_total_steps(steps, self._rule), None

    def count_flops(self, example: Any) -> Costs:
        """Count the FLOPs of a step on this batch, on which `flops` is based, and return them.

        Args:
            example: one batch: a tensor, a tuple of arguments or a dict of them.
        """
        self._check_found("count_flops(example)")
        self._count_flops(self._network, "", *call_arguments(example))
        assert self._compute.costs is not None
        return self._compute.costs

    def count_parameters(self, awake: Mapping[str, int] | None = None) -> int:
        """Return the trainable parameters with the blocks awake now, or with these."""
        self._check_found("count_parameters()")
        return self._sleeping.count_parameters(self._awake if awake is None else awake)

    def steps_for(self, flops: float) -> int:
        """Return the number of optimizer steps within a budget of training FLOPs."""
        self._check_found("steps_for")
        if not isinstance(self._rule, Schedule):
            raise UsageError("steps_for(flops) needs a fixed schedule; write controller='schedule'")
        return self._rule.steps_for(
            flops,
            self._start,
            self._compute.per_step,
            double=self._double,
            resolve=partial(resolve, self._stacks),
        )

    def __repr__(self) -> str:
        if not self._stacks:
            return describe_unknown(self._chosen, self._loaded)
        outlook = f"; no more blocks wake: {self.refused}" if self.refused else ""
        if not self._is_over():
            outlook = describe_last_wake(self._rule, self._total_steps, self._start, self._double)
        return describe_run(
            steps=self._step,
            total_steps=self._total_steps,
            outlook=outlook,
            awake=self._awake,
            blocks=self.blocks,
            start=self._start,
            history=self._history,
            flops=None if self._compute.costs is None else (self.flops, self.static_flops),
        )

    def __getstate__(self) -> Any:
        raise UsageError(f"a Deepen cannot be pickled or copied, {HOW_TO_SAVE}")

    # -- what users do -----------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None) -> None:
        """Count an optimizer step, and wake blocks when due; call it after each step.

        Args:
            loss: training loss of the step; 'plateau' and 'slope' need it.
        """
        self.count(loss)
        self.decide()

    def count(self, loss: Tensor | float | None = None) -> None:
        """Count an optimizer step: the first half of `step`, for measuring before blocks wake."""
        self.saves.start_step()
        self._step += 1
        self._forgotten.stop()
        warn_past_end(self._step, self._total_steps, self._rule)
        if self.is_finished:
            return
        if not self._stacks:
            raise UsageError(
                "the model was not called before depth.step(), or another Deepen of it is in use; "
                "keep one, made of the model that is trained, or give a batch: example=inputs"
            )
        if self._step == 1:
            warn_of_trained(self._network, self._stacks, self._awake, self._optimizers)
        self._is_undecided = isinstance(self._rule, Schedule) or self._take_loss(loss)

    def decide(self) -> None:
        """Wake blocks when due: the second half of `step`."""
        if not self._is_undecided:
            return
        self._is_undecided = False
        if isinstance(self._rule, Schedule):
            self._follow_plan()
        else:
            self._wake(self._rule(self._progress()))
        self.is_finished = self._is_over()

    def go_back(self, awake: Mapping[str, int]) -> None:
        """Put blocks to sleep again, for a network whose earlier weights are restored.

        Steps and FLOPs stay counted. The next decision wakes blocks again if they are due.
        """
        self._compute.change(self._step, self._awake)
        self._set_awake(resolve(self._stacks, awake, {}))
        self._planned, self.refused, self._losses.since_growth = None, "", 0
        self.is_finished = self._is_over()

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs besides the state of model and optimizer, as plain data."""
        self.saves.see_depth()
        return self._state() if self._loaded is None else dict(self._loaded)

    def _state(self) -> dict[str, Any]:
        saved: dict[str, Any] = {
            "step": self._step,
            "awake": dict(self._awake),
            "blocks": self.blocks if self._stacks else {},
            "start": dict(self._start),
            "total_steps": self._total_steps,
            "history": self.history,
            "refused": self.refused,
            "losses": self._losses.state_dict(),
            **self._compute.state_dict(),
        }
        if hasattr(self._rule, "state_dict"):
            saved["controller"] = self._rule.state_dict()
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; load model and optimizer from their own."""
        check_depth_state(state, self._state())
        if state["blocks"]:
            warn_of_short_resume(state["step"], self._total_steps, self._rule)
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if not self._stacks:
            self._loaded = dict(state)
            return
        if state["blocks"] != self.blocks:
            raise CheckpointError(
                f"this state belongs to a model with blocks {state['blocks']}, but this one has "
                f"{self.blocks}; build the model with as many"
            )
        self._loaded = None
        self._step = state["step"]
        self._compute.load_state_dict(state)
        self._start = dict(state["start"])
        self._total_steps = state["total_steps"] if self._total_steps is None else self._total_steps
        self._planned = None
        self.refused = str(state["refused"])
        self._history = [dict(event) for event in state["history"]]
        self._losses.load_state_dict(state["losses"])
        if "controller" in state:
            self._rule.load_state_dict(state["controller"])
        self._set_awake(dict(state["awake"]))
        self.is_finished = self._is_over()

    @contextmanager
    def export(self, *, has_config: bool = True) -> Iterator[None]:
        """Make the model the smaller network that is awake, within a `with` block, to save or load.

        Sleeping blocks are removed from their lists, and configurations of Hugging Face have the
        smaller depth (`has_config`). So `save_pretrained` and `state_dict` write a network that
        loads by itself, and `load_state_dict` of a shallower network fills the blocks awake.
        """
        self._check_found("export()")
        put_back = shorten(self._networks, self._stacks, self._awake, has_config=has_config)
        try:
            yield
        finally:
            put_back()

    def shorten(self) -> Callable[[], None]:
        """Remove sleeping blocks from the model; return a function that puts them back.

        The model is then the network that is awake, with nothing of Esper in it.
        """
        self._check_found("shorten()")
        return shorten(self._networks, self._stacks, self._awake, has_config=True)

    # -- the first batch ---------------------------------------------------------------------------

    def _wait_for_a_batch(self) -> None:
        wait_for_batch(self._wrappers, self._chosen, self._on_call)

    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find stacks on the first call, and count FLOPs on the first training call."""
        if module in self._wrappers:
            module = self._network
        if "forward" in vars(module) and hasattr(module, "training_step"):
            # Lightning replaces `forward` by the training step, which calls the network.
            return
        path = next(name for name, one in self._network.named_modules() if one is module)
        trains = torch.is_grad_enabled()
        if self._stacks and not trains:
            return
        unhook(self._wrappers[0])
        # Validation before training may run in inference mode; weights made there cannot train.
        with torch.inference_mode(False):
            self._processes.check(is_asleep=bool(self._stacks))
            if not self._stacks:
                self._begin(find(module, args, kwargs, path))
            if trains and self._compute.costs is None:
                self._count_flops(module, path, args, kwargs)
        if not trains:
            self._wait_for_a_batch()

    def _begin(self, found: FoundStacks) -> None:
        """Put blocks of the chosen stacks to sleep, and check the schedule."""
        self._stacks = stacks = found.choose(self._chosen)
        names = [name for stack in stacks.values() for name in stack.blocks]
        check_held(names, self._network, self._optimizers)
        for copy in self._networks[1:]:
            unhook(copy)
        self._sleeping = SleepingStacks(self._networks, stacks, self._processes, self.saves)
        start = self._wanted_start
        self._start = resolve(stacks, default_start(stacks) if start is None else start, {})
        awake = self._start
        if isinstance(self._rule, Schedule):
            for decision in (self._rule.at or {}).values():
                awake = resolve(stacks, decision, awake)
        if problem := self._sleeping.excess(self._max_parameters, self._start):
            raise UsageError(f"{problem}; write a smaller start=")
        awake = {**self._start, **(self._loaded or {}).get("awake", {})}
        check_not_frozen(self._network, stacks, awake)
        self._set_awake(self._start)
        if self._loaded is not None:
            self._restore(self._loaded)

    def _count_flops(
        self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        with self._sleeping.all_awake(self._awake):
            self._compute.costs = count_costs(module, path, self._stacks, args, kwargs)

    def _check_found(self, what: str) -> None:
        if not self._stacks:
            raise UsageError(
                f"depth.{what} needs a first batch; write Deepen(..., example=batch), or read it "
                "after the model was called"
            )

    # -- growth ------------------------------------------------------------------------------------

    def _take_loss(self, loss: Tensor | float | None) -> bool:
        """Add the loss of a step; return whether the controller has to decide."""
        compares = isinstance(self._rule, Plateau | Slope)
        has_ended = self._losses.add(
            loss, self._total_steps, lambda: self.flops, is_needed=compares
        )
        # Rules that compare windows decide only at the end of one.
        return has_ended or not compares

    def _wake(self, decision: Decision) -> None:
        """Wake blocks as copies of those awake, unless that exceeds the limit."""
        awake = self._awake if decision is None else resolve(self._stacks, decision, self._awake)
        if awake == self._awake or self.refused:
            return
        self.refused = self._sleeping.excess(self._max_parameters, awake)
        if self.refused:
            return
        flops = self._compute.change(self._step, self._awake)
        self._sleeping.copy(self._awake, awake, self._order, self._optimizers)
        self._set_awake(awake)
        self._losses.since_growth = 0
        self._history.append({"step": self._step, "awake": dict(awake), "flops": flops})

    def _set_awake(self, awake: dict[str, int]) -> None:
        self._awake = awake
        self._sleeping.set_awake(awake)
        self.saves.set_awake(awake, self.blocks)

    def _follow_plan(self) -> None:
        """Wake the blocks that are due by the schedule."""
        if self._planned is None:
            moments = self._rule.moments(self._total_steps, self._start, self._double)
            self._planned = sorted(moments.items())
        while self._planned and self._planned[0][0] <= self._step:
            wanted = fill_in(self._stacks, self._planned.pop(0)[1], self._awake)
            # A run resumed under another schedule may be ahead of it.
            self._wake({name: max(count, self._awake[name]) for name, count in wanted.items()})

    def _double(self, awake: Mapping[str, int]) -> dict[str, int]:
        return double(self._stacks, awake)

    def _is_over(self) -> bool:
        return self._awake == self.blocks or self._planned == [] or bool(self.refused)

    # -- what controllers see ----------------------------------------------------------------------

    def _progress(self) -> Progress:
        doubled = self._double(self._awake)
        return Progress(
            step=self._step,
            total_steps=self._total_steps,
            awake=self._awake,
            blocks=self.blocks,
            doubled=doubled,
            flops=self.flops,
            flops_per_step=self._compute.per_step(self._awake),
            flops_per_step_doubled=self._compute.per_step(doubled),
            losses=self._losses.over,
            windows_since_growth=self._losses.since_growth,
        )
