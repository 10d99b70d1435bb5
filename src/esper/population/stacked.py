"""The stacked strategy: all rows of one architecture trained as one batch of networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.kasmina.gradients import GradientSample, summarise
from esper.kasmina.optimizer import GRADIENT_STRIDE
from esper.kasmina.state import SlotState
from esper.leyline.stages import BLENDED_STAGES, SeedStage
from esper.population.engine import (
    EpochResult,
    RowWeights,
    SlotSpec,
    TrainSettings,
    empty_sample,
)
from esper.population.feed import EpochPlan, Feed
from esper.population.grafts import Grafts, graft
from esper.population.nursery import Member, Nursery
from esper.population.replay import Replay
from esper.population.shortcuts import shorten
from esper.population.stack import (
    Stack,
    clip_coefficient,
    flatten_gradients,
    reached_columns,
    sgd_step,
)
from esper.population.stackable import stacked_attention
from esper.tasks.dataset import TaskData
from esper.tasks.objective import Objective

_VALIDATION_SAMPLES_CPU = 512
_VALIDATION_SAMPLES_ACCELERATOR = 131_072


class StackedEngine:
    """Rows as stacked tensors; seeds grouped by blueprint."""

    def __init__(
        self,
        hosts: Sequence[nn.Module],
        slots: tuple[SlotSpec, ...],
        data: TaskData,
        objective: Objective,
        settings: TrainSettings,
        keys: Sequence[int],
        *,
        use_bf16: bool = False,
        use_graphs: bool = True,
    ) -> None:
        """Stack the hosts; each is used once, the first also as the shape of them all."""
        self.slots = slots
        self.is_stacked = True
        self._data = data
        self._objective = objective
        self._settings = settings
        self._keys = list(keys)
        self._template = hosts[0]
        first = dict(hosts[0].named_parameters())
        some = next(iter(first.values()))
        self._device, self._dtype = data.device, some.dtype
        frozen = [name for name, parameter in first.items() if not parameter.requires_grad]
        shapes = {name: parameter.shape for name, parameter in first.items()}
        self._hosts = Stack(shapes, some.dtype, self._device, frozen)
        for host in hosts:
            self._hosts.append(dict(host.named_parameters()), None)
        self.host_params = sum(p.numel() for p in first.values() if p.requires_grad)
        self._feed = Feed(data, keys, settings.batch_size)
        self._state: SlotState | None = None
        self._grafts: Grafts | None = None
        self._row: Tensor | None = None
        # In BF16 every activation is: autocast would keep norms, and all that follows, in FP32.
        self._compute = torch.bfloat16 if use_bf16 else self._dtype
        shorten(self._template.to(self._device, self._compute))
        self._nursery = Nursery(slots, keys, self._dtype, self._device, self._compute)
        self._replay = Replay() if use_graphs and self._device.type == "cuda" else None
        for index, slot in enumerate(slots):
            host_module = self._template.get_submodule(slot.path)
            host_module.register_forward_hook(self._hook(index))

    @property
    def captures(self) -> int:
        """How many step graphs were captured so far."""
        return 0 if self._replay is None else self._replay.captures

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and re-aim seeds as the state says; return their sizes, int64 [R, S]."""
        self._state = state
        self._nursery.sync(state)
        return self._nursery.sizes(state)

    def train(self, epochs: Sequence[int]) -> EpochResult:
        """Train one epoch of every row."""
        assert self._state is not None, "sync comes before train"
        plan = self._feed.epoch(epochs)
        self._template.train()
        grafts = self._make_grafts(range(len(self._keys)), None, is_training=True)
        step = _Step(self, grafts)
        losses = torch.zeros(len(self._keys), dtype=torch.float64, device=self._device)
        total, size = self._data.samples_per_step, self._settings.batch_size
        starts = list(range(0, total, size))
        last_sampled = ((len(starts) - 1) // GRADIENT_STRIDE) * GRADIENT_STRIDE
        sample, sampled = empty_sample(len(self._keys), len(self.slots))
        with stacked_attention():
            for number, start in enumerate(starts):
                stop = min(start + size, total)
                runner = self._replay if stop - start == size and len(starts) > 3 else None
                loss = step(plan, start, stop, runner)
                losses += loss.to(torch.float64)
                if number == last_sampled:
                    sample, sampled = step.sample_gradients()
        if self._replay is not None:
            self._replay.forget()
        return EpochResult((losses / len(starts)).cpu(), sample, sampled)

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate every configuration of every row, as many at a time as a pass should hold."""
        pairs = [(row, on) for row, plan in enumerate(plans) for on in plan.tolist()]
        data, samples = self._data, self._data.subset
        on_cpu = self._device.type == "cpu"
        limit = _VALIDATION_SAMPLES_CPU if on_cpu else _VALIDATION_SAMPLES_ACCELERATOR
        piece = min(len(samples), 256) if on_cpu else len(samples)
        width = max(1, limit // piece)
        losses, corrects = [], []
        self._template.eval()
        with torch.no_grad(), stacked_attention():
            batches = [data.batch("val", part) for part in samples.split(piece)]
            for first in range(0, len(pairs), width):
                part = pairs[first : first + width]
                rows = [row for row, _ in part]
                grafts = self._make_grafts(rows, [on for _, on in part], is_training=False)
                chosen = torch.tensor(rows, device=self._device)
                leaves = {n: v.index_select(0, chosen) for n, v in self._hosts.leaves.items()}
                results = [self._evaluate(leaves, grafts, len(rows), x, y) for x, y in batches]
                losses.append(torch.cat([loss for loss, _ in results], 1))
                right = [correct for _, correct in results if correct is not None]
                if right:
                    corrects.append(torch.cat(right, 1))
        return torch.cat(losses), torch.cat(corrects) if corrects else None

    def read(self, row: int) -> RowWeights:
        """Return copies of everything this engine knows about a row."""
        host, momentum = self._hosts.read(row)
        seeds, seed_momentum = self._nursery.read(row)
        return RowWeights(
            host, momentum, seeds, seed_momentum, germinations=self._nursery.germinations[row]
        )

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] says what lives in its slots."""
        self._hosts.write(row, weights.host, weights.host_momentum)
        self._nursery.write(row, weights, state)

    def close(self) -> None:
        """Stop drawing epochs."""
        self._feed.close()

    def forward(self, leaves: dict[str, Tensor], x: Tensor, x_dim: int | None) -> Tensor:
        """Run every row's host on its inputs, or all on the same inputs (x_dim None)."""

        def one(parameters: dict[str, Tensor], inputs: Tensor, row: Tensor) -> Tensor:
            self._row = row
            result: Tensor = functional_call(self._template, parameters, (inputs,))
            return result

        if x.is_floating_point():
            x = x.to(self._compute)
        leaves = {name: leaf.to(self._compute) for name, leaf in leaves.items()}
        rows = next(iter(leaves.values()))
        which = torch.zeros(rows.shape[0], device=rows.device)
        out: Tensor = vmap(one, in_dims=(0, x_dim, 0))(leaves, x, which)
        return out

    def _evaluate(
        self, leaves: dict[str, Tensor], grafts: Grafts, rows: int, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        self._grafts = grafts
        outputs = self.forward(leaves, x, None)
        self._grafts = None
        targets = y.expand(rows, *y.shape).flatten(0, 1)
        loss, correct = self._objective(outputs.flatten(0, 1), targets)
        shape = (rows, len(y))
        return loss.reshape(shape), None if correct is None else correct.reshape(shape)

    def _hook(self, index: int) -> Any:
        def attend(module: nn.Module, args: Any, output: Any) -> Any:
            grafts = self._grafts
            if grafts is None or grafts[index] is None or self._row is None:
                return None
            return graft(output, self._row, index, grafts)

        return attend

    def _make_grafts(
        self, rows: Sequence[int], on: list[list[bool]] | None, *, is_training: bool
    ) -> Grafts:
        """Group the seeds that take part: rows are (repeated) rows of the population."""
        assert self._state is not None
        state = self._state
        stage, alpha = state.stage.tolist(), state.alpha.tolist()
        blueprint, algorithm = state.blueprint.tolist(), state.algorithm.tolist()
        slots = []
        for slot in range(len(self.slots)):
            members: list[Member] = []
            for position, row in enumerate(rows):
                isolated = stage[row][slot] == SeedStage.TRAINING
                blended = stage[row][slot] in BLENDED_STAGES and alpha[row][slot] > 0
                if not (blended or (isolated and is_training)):
                    continue
                if on is not None and not on[position][slot]:
                    continue
                members.append(
                    Member(
                        position,
                        row,
                        blueprint[row][slot],
                        algorithm[row][slot],
                        1.0 if isolated else alpha[row][slot],
                        isolated,
                    )
                )
            slots.append(self._nursery.grafts(slot, members, len(rows)))
        return tuple(slots)


class _Step:
    """One optimizer step of all rows, for one topology."""

    def __init__(self, engine: StackedEngine, grafts: Grafts) -> None:
        self._engine = engine
        self._grafts = grafts
        settings = engine._settings
        self._rates = {
            "learning_rate": settings.learning_rate,
            "momentum": settings.momentum,
            "weight_decay": settings.weight_decay,
        }
        self._max_norm = settings.max_grad_norm
        assert engine._state is not None
        self._stacks = engine._nursery.active(engine._state)
        self._shared = engine._nursery.shared(self._stacks)
        everyone = torch.ones((len(engine._keys), 1), dtype=torch.bool, device=engine._device)
        self._active = [everyone, *(entry.active for _, entry in self._stacks)]
        self._reached: list[list[bool]] = []
        self._gradients: list[Tensor] = []

    def __call__(self, plan: EpochPlan, start: int, stop: int, replay: Replay | None) -> Tensor:
        x, y = plan.batch(self._engine._data, start, stop)
        if replay is None:
            return self._run(x, y)
        return replay.run(self._run, x, y)

    def _run(self, x: Tensor, y: Tensor) -> Tensor:
        engine = self._engine
        stacks = [engine._hosts, *(stack for stack, _ in self._stacks)]
        learning = [leaf for s in stacks for leaf in s.leaves.values() if leaf.requires_grad]
        with torch.enable_grad():
            engine._grafts = self._grafts
            outputs = engine.forward(engine._hosts.leaves, x, 0)
            engine._grafts = None
            loss, _ = engine._objective(outputs.flatten(0, 1), y.flatten(0, 1))
            per_row = loss.reshape(x.shape[0], -1).mean(1)
            given = iter(torch.autograd.grad(per_row.sum(), learning, allow_unused=True))
        leaves = [list(stack.leaves.values()) for stack in stacks]
        found = [[next(given) if leaf.requires_grad else None for leaf in s] for s in leaves]
        if not self._reached:
            self._leave_alone(leaves, found)
        self._gradients = list(map(flatten_gradients, leaves, found))
        self._move(self._gradients)
        return per_row.detach()

    def _leave_alone(self, leaves: list[list[Tensor]], found: list[list[Tensor | None]]) -> None:
        """What no gradient reaches stays as it is, without decay, as in `torch.optim`."""
        for number, reached in enumerate(map(reached_columns, leaves, found)):
            if reached is not None:
                self._active[number] = self._active[number] & reached
        self._reached = [[grad is not None for grad in each] for each in found]

    def _move(self, gradients: list[Tensor]) -> None:
        """Clip each row's host and each of its seeds (with its gate) apart, then step."""
        engine = self._engine
        host = gradients[0]
        if self._max_norm:
            host = host * clip_coefficient(host.square().sum(1), self._max_norm)[:, None]
        sgd_step(engine._hosts, host, self._active[0], **self._rates)
        own = [gradient.square().sum(1) for gradient in gradients[1:]]
        squares = list(own)
        for gates, seeds, here, there in self._shared:
            both = own[gates][here] + own[seeds][there]
            squares[gates] = squares[gates].index_copy(0, here, both)
            squares[seeds] = squares[seeds].index_copy(0, there, both)
        for (stack, _), active, gradient, square in zip(
            self._stacks, self._active[1:], gradients[1:], squares, strict=True
        ):
            if self._max_norm:
                gradient = gradient * clip_coefficient(square, self._max_norm)[:, None]
            sgd_step(stack, gradient, active, **self._rates)

    def sample_gradients(self) -> tuple[GradientSample, Tensor]:
        """Summarise the gradients of the last step, before clipping, per row and slot."""
        engine = self._engine
        rows, slots = len(engine._keys), len(engine.slots)
        sample, sampled = empty_sample(rows, slots)
        host = self._gradients[0].to(torch.float64).square().sum(1).sqrt().cpu()
        for index, row, norms, size in engine._nursery.seed_norms(
            self._stacks, self._gradients[1:], self._reached[1:], engine._state
        ):
            one = summarise(norms, size, host[row], engine.host_params)
            for name in ("norm", "health", "vanishing", "exploding", "ratio"):
                getattr(sample, name)[row, index] = getattr(one, name)
            sampled[row, index] = True
        return sample, sampled
