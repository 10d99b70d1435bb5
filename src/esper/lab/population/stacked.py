"""The stacked strategy: all rows of one architecture trained as one batch of networks.

The host runs once under `vmap` over the stacked parameters of all rows; at every slot a forward
hook runs the rows' seeds (`slot_forward`). `train_step` is one optimizer step, `validation` the
passes over validation data. On CUDA both are captured in graphs (`engine`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.kasmina.blueprints.kin import copy_block
from esper.kasmina.budget import Portion
from esper.kasmina.contribution import GradientSample, summarise
from esper.kasmina.engine import EpochResult, Moments, RowWeights, empty_sample
from esper.kasmina.optimizer import GRADIENT_STRIDE
from esper.kasmina.state import SlotState
from esper.lab.population.batches import BatchBuffers, RowSamples
from esper.lab.population.engine import Condition, CudaStreams, GraphReplay, SlotSpec, StackStream
from esper.lab.population.parameter_stack import ParameterStack, StackCapacity
from esper.lab.population.seed_stacks import ABSENT, GATE, HostBlocks, SeedStacks
from esper.lab.population.slot_forward import Integers, SlotForwards, apply_slot
from esper.lab.population.train_step import Reals, RowTraining, TrainStep, learning_entries
from esper.lab.population.validation import SelectedRows, ValidationPass
from esper.lab.population.vmap_rules import has_kernels, install_vmap_rules, stacked_attention
from esper.lab.tasks.splits import Split
from esper.leyline.stages import SeedStage
from esper.utils.process import Pending, to_device, to_host

_STREAMS = 8
"""Streams for seeds of different kinds: seven blueprints and the gates of a slot of images."""


_WORTH_LEAVING_OUT = 0.75
"""If at most this share of a step's rows goes on, the finished rows are left out of it."""

_PLANNED_SAMPLES = 2**24
"""Largest number of samples, over all rows, whose order is drawn at once."""


class Phase(NamedTuple):
    """The rows of a training step, until some of them have finished their epoch."""

    rows: Tensor | None
    """int64, on the device; None for all in order."""
    forwards: SlotForwards
    """The seeds at every slot."""
    replay: GraphReplay | None
    """Replays the captured step; None if steps are not captured."""


class StackedEngine:
    """Rows as stacked tensors; seeds grouped by blueprint."""

    def __init__(
        self,
        hosts: Sequence[nn.Module],
        slots: tuple[SlotSpec, ...],
        conditions: Sequence[Condition],
        keys: Sequence[int],
        *,
        use_bf16: bool = False,
        use_graphs: bool = True,
        turn: int = 0,
    ) -> None:
        """Stack the hosts; the first one is also used as the module that runs all of them.

        Args:
            hosts: the networks of the rows.
            slots: specification of every slot.
            conditions: condition of each row.
            keys: names of the rows' random streams.
            use_bf16: run hosts and seeds in BF16.
            use_graphs: capture steps on a device.
            turn: number of stacks of the population that run before this one.
        """
        self._stream = StackStream(conditions[0].data.device, turn)
        with self._stream.use():
            self._stack(hosts, slots, conditions, keys, use_bf16, use_graphs)

    def _stack(
        self,
        hosts: Sequence[nn.Module],
        slots: tuple[SlotSpec, ...],
        conditions: Sequence[Condition],
        keys: Sequence[int],
        use_bf16: bool,
        use_graphs: bool,
    ) -> None:
        self.slots = slots
        self.is_stacked = True
        shared = conditions[0].task
        self._objective = shared.objective
        self._batch_size = shared.config.batch_size
        self._template = hosts[0]
        # Copied now, while nothing hangs on them.
        blocks = {
            index: copy_block(hosts[0].get_submodule(slot.path))
            for index, slot in enumerate(slots)
            if not slot.kin.problem
        }
        first = dict(hosts[0].named_parameters())
        some = next(iter(first.values()))
        self._device, self._dtype = conditions[0].data.device, some.dtype
        # All activations are BF16: autocast would keep norms, and all later layers, in FP32.
        self._compute = torch.bfloat16 if use_bf16 else self._dtype
        frozen = [name for name, parameter in first.items() if not parameter.requires_grad]
        shapes = {name: parameter.shape for name, parameter in first.items()}
        has_squares = shared.config.optimizer == "adamw"
        self._hosts = ParameterStack(
            shapes, some.dtype, self._device, frozen, self._compute, has_squares=has_squares
        )
        self._hosts.resize([], len(hosts))
        self._hosts.fill([dict(host.named_parameters()) for host in hosts])
        self.host_params = sum(p.numel() for p in first.values() if p.requires_grad)
        self._take_rows(conditions, keys)
        self._batch = BatchBuffers(self._compute, self._device)
        self._state: SlotState | None = None
        self._phase = Phase(None, (), None)
        """The current phase of training."""
        self._selections: dict[int, tuple[SelectedRows, GraphReplay | None]] = {}
        """Selections of rows, by their number of positions."""
        self._active_forwards: SlotForwards | None = None
        """The seeds that the hooks run during a pass of the host."""
        self._row: Tensor | None = None
        self._step: TrainStep | None = None
        install_vmap_rules(self._template.to(self._device, self._compute))
        may_capture = use_graphs and self._stream.is_on_cuda
        self._replay = GraphReplay(self._stream) if may_capture else None
        streams = self._streams = CudaStreams(
            _STREAMS if has_kernels(self._hosts.used) else 0, self._stream.priority
        )
        self._capacity = StackCapacity(
            has_spares=self._replay is not None,
            rows=len(keys),
            sample_bytes=self._batch_size * self._compute.itemsize,
        )
        self._samples_at_once = self._batch_size * max(
            1, _PLANNED_SAMPLES // (len(keys) * self._batch_size)
        )
        self._seed_stacks = SeedStacks(
            slots,
            keys,
            self._dtype,
            self._device,
            self._compute,
            self._capacity,
            streams,
            has_squares=has_squares,
            blocks=HostBlocks(self._hosts, blocks),
        )
        self._validation = ValidationPass(
            self._hosts,
            self._seed_stacks,
            slots,
            [condition.data for condition in conditions],
            self._objective,
            self._compute,
            streams,
            self._forward_with_seeds,
            graph_stream=self._stream if may_capture else None,
        )
        for index, slot in enumerate(slots):
            host_module = self._template.get_submodule(slot.path)
            host_module.register_forward_hook(self._hook(index))

    @property
    def captures(self) -> int:
        """Number of step graphs captured so far."""
        return 0 if self._replay is None else self._replay.captures

    def renew(
        self, hosts: Sequence[nn.Module], conditions: Sequence[Condition], keys: Sequence[int]
    ) -> None:
        """Replace the rows by as many new hosts of the same architecture.

        Memory and captured graphs are kept if possible, because the conditions of rows are values
        in memory.
        """
        assert len(hosts) == len(self._keys), "a stack is renewed row by row"
        with self._stream.use():
            self._hosts.fill([dict(host.named_parameters()) for host in hosts])
            self._seed_stacks.renew(keys)
            self._take_rows(conditions, keys)
            self._validation.assign([condition.data for condition in conditions])
        self._state = None

    def _take_rows(self, conditions: Sequence[Condition], keys: Sequence[int]) -> None:
        """Store the conditions of the rows."""
        self._conditions, self._keys = list(conditions), list(keys)
        data = [condition.data for condition in conditions]
        self._samples = RowSamples(data, keys)

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and update seeds to match the state; return their sizes, int64 [R, S]."""
        self._state = state
        with self._stream.use():
            self._seed_stacks.sync(state)
            return self._seed_stacks.sizes(state)

    def train(self, portions: Sequence[Portion]) -> Pending[EpochResult]:
        """Train one epoch of every row that does not rest; on a device this is queued."""
        with self._stream.use(is_awaited=False):
            return self._train(portions)

    def _train(self, portions: Sequence[Portion]) -> Pending[EpochResult]:
        assert self._state is not None, "sync comes before train"
        self._template.train()
        training = RowTraining.of(
            [condition.task.config for condition in self._conditions],
            [portion.epoch for portion in portions],
            [condition.horizon for condition in self._conditions],
            self._state.learned.tolist(),
        )
        step = self._prepare_step(self._state, training)
        losses = torch.zeros(len(self._keys), dtype=torch.float64, device=self._device)
        samples = np.where(training.learns, [portion.samples for portion in portions], 0)
        total, size = int(samples.max()), self._batch_size
        if not total:
            # All rows are at rest.
            nothing = EpochResult(losses.cpu(), *empty_sample(len(self._keys), len(self.slots)))
            return lambda: nothing
        steps = -(-samples // size)
        last_sampled = np.maximum(steps - 1, 0) // GRADIENT_STRIDE * GRADIENT_STRIDE
        sampled, ending = set(last_sampled[training.learns].tolist()), set(steps.tolist())
        gradients: dict[int, Pending[tuple[Tensor, list[Tensor]]]] = {}
        plan, drawn = None, range(0)
        self._phase = Phase(None, self._seed_stacks.slot_forwards(self._state), self._replay)
        with stacked_attention():
            for number, start in enumerate(range(0, total, size)):
                stop = min(start + size, total)
                if number and number in ending:
                    step.rest(steps <= number)
                    self._leave_out(steps > number)
                if start >= drawn.stop:
                    drawn = range(start, min(start + self._samples_at_once, total))
                    plan = self._samples.draw(portions, drawn.start, drawn.stop)
                assert plan is not None
                rows = self._phase.rows
                own = plan if rows is None else plan.of(rows)
                self._batch.load(self._samples, own, start - drawn.start, stop - drawn.start)
                if self._phase.replay is not None and stop - start == size:
                    self._phase.replay.run(self._run_step)
                else:
                    self._run_step()
                losses += torch.where(step.learns, step.loss, 0.0)
                if number in sampled:
                    gradients[number] = step.keep_gradients()
        mean = to_host(losses / to_device(torch.from_numpy(np.maximum(steps, 1)), self._device))
        norms = step.join_gradients(gradients, last_sampled)
        return lambda: EpochResult(mean(), *self._summarise(*norms()))

    def _leave_out(self, going: NDArray[np.bool_]) -> None:
        """Leave out finished rows if few enough are `going`, bool [R]."""
        assert self._state is not None
        now = len(self._keys) if self._phase.rows is None else len(self._phase.rows)
        count = int(going.sum())
        if count > _WORTH_LEAVING_OUT * now:
            return
        rows = np.flatnonzero(going)
        size = self._capacity.positions(count)
        selected, replay = self._selections.get(size, (None, None))
        if selected is None:
            selected = SelectedRows(
                self._seed_stacks,
                self.slots,
                self._capacity,
                self._device,
                self._streams,
                for_training=True,
            )
            replay = None if self._replay is None else GraphReplay(self._stream)
            self._selections[size] = selected, replay
        version = selected.layout_version
        everything = np.ones((count, len(self.slots)), dtype=np.bool_)
        selected.select(rows, everything, self._state, spare=np.flatnonzero(~going))
        if replay is not None and selected.layout_version != version:
            replay.forget()
        self._phase = Phase(selected.rows, selected.forwards, replay)

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate every configuration of every row, in passes of limited size."""
        assert self._state is not None, "sync comes before measure"
        self._template.eval()
        with self._stream.use(), torch.no_grad(), stacked_attention():
            return self._validation.measure(plans, self._state)

    def score(self, split: Split) -> Tensor:
        """Return float64 [R, 2]: score in points and loss of every row on a whole split."""
        assert self._state is not None, "sync comes before score"
        self._template.eval()
        with self._stream.use(), torch.no_grad(), stacked_attention():
            return self._validation.score(split, self._state)

    def read(self, row: int) -> RowWeights:
        """Return copies of the whole state of a row."""
        with self._stream.use():
            host, moments = self._hosts.read(row)
            seeds, seed_moments = self._seed_stacks.read(row)
        return RowWeights(
            host, moments, seeds, seed_moments, germinations=self._seed_stacks.germinations[row]
        )

    def read_at_rest(self, rows: Sequence[int], seeds: Tensor) -> list[RowWeights]:
        """Return copies of some rows without optimizer state, with these `seeds`, bool [R, S]."""
        with self._stream.use():
            hosts = self._hosts.read_at_rest(rows)
            return [
                RowWeights(
                    host,
                    Moments(),
                    kept := self._seed_stacks.read_at_rest(row, seeds[row].tolist()),
                    {slot: Moments() for slot in kept},
                    germinations=self._seed_stacks.germinations[row],
                )
                for row, host in zip(rows, hosts, strict=True)
            ]

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row; `state` [1, S] is the state of its slots."""
        with self._stream.use():
            self._hosts.write(row, weights.host, weights.host_moments)
            self._seed_stacks.write(row, weights, state)

    def close(self) -> None:
        """There is nothing to free but memory."""

    def forward(self, leaves: dict[str, Tensor], x: Tensor, x_dim: int | None) -> Tensor:
        """Run every row's host on its inputs, or all on the same inputs (x_dim None)."""

        def one(parameters: dict[str, Tensor], inputs: Tensor, row: Tensor) -> Tensor:
            self._row = row
            result: Tensor = functional_call(self._template, parameters, (inputs,))
            return result

        which = torch.zeros(next(iter(leaves.values())).shape[0], device=x.device)
        out: Tensor = vmap(one, in_dims=(0, x_dim, 0))(leaves, x, which)
        return out

    def _prepare_step(self, state: SlotState, training: RowTraining) -> TrainStep:
        """Return the step for this epoch; the captured one if the layout has not changed."""
        if self._step is None or self._step.layout_version != self._seed_stacks.layout_version:
            self._step = TrainStep(self._hosts, self._seed_stacks, self._losses)
            if self._replay is not None:
                self._replay.forget()
        self._step.begin(state, training)
        return self._step

    def _run_step(self) -> None:
        assert self._step is not None
        self._step.run(self._batch.x, self._batch.y, self._phase.rows)

    def _forward_with_seeds(
        self, leaves: dict[str, Tensor], forwards: SlotForwards, x: Tensor
    ) -> Tensor:
        """Run hosts with seeds on shared inputs."""
        self._active_forwards = forwards
        outputs = self.forward(leaves, x, None)
        self._active_forwards = None
        return outputs

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        self._active_forwards, leaves = self._phase.forwards, self._hosts.leaves
        rows = self._phase.rows
        if rows is not None:
            leaves = {name: leaf.index_select(0, rows) for name, leaf in leaves.items()}
        outputs = self.forward(leaves, x, 0)
        self._active_forwards = None
        loss, _ = self._objective(outputs.flatten(0, 1), y.flatten(0, 1))
        return loss.reshape(x.shape[0], -1).mean(1)

    def _hook(self, index: int) -> Any:
        def run_slot(module: nn.Module, args: Any, output: Any) -> Any:
            forwards = self._active_forwards
            if forwards is None or forwards[index] is None or self._row is None:
                return None
            return apply_slot(output, self._row, index, forwards)

        return run_slot

    def _summarise(self, host: Tensor, seeds: list[Tensor]) -> tuple[GradientSample, Tensor]:
        """Convert gradient norms into one sample per row and slot."""
        assert self._state is not None
        assert self._step is not None
        sample, sampled = empty_sample(len(self._keys), len(self.slots))
        norms = {
            (stack.slot, stack.kind): each.numpy()
            for stack, each in zip(self._step.stacks, seeds, strict=True)
        }
        stages = (int(SeedStage.TRAINING), int(SeedStage.BLENDING))
        alike = list(group_seeds(self._seed_stacks, self._state, stages))
        if not alike:
            return sample, sampled
        found = [_norms_of(group, norms) for group in alike]
        most = max(each.shape[1] for each in found)
        padded = [np.pad(each, ((0, 0), (0, most - each.shape[1]))) for each in found]

        def spread(values: Sequence[int]) -> Tensor:
            return torch.from_numpy(np.repeat(values, [len(each) for each in found]))

        rows = torch.from_numpy(np.concatenate([group.rows for group in alike]))
        slots = spread([group.slot for group in alike])
        one = summarise(
            torch.from_numpy(np.concatenate(padded)),
            spread([group.size for group in alike]),
            host[rows],
            self.host_params,
            counts=spread([each.shape[1] for each in found]),
        )
        sample.put((rows, slots), one)
        sampled[rows, slots] = True
        return sample, sampled


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Rows whose seeds at a slot have the same blueprint, gate and training state."""

    slot: int
    kind: int
    rows: Integers
    entries: Integers
    gate_entries: Integers | None
    """Entries of their gates; None without gates."""
    size: int
    """Parameters of a seed with its gate."""
    is_learning: bool


def group_seeds(
    seed_stacks: SeedStacks, state: SlotState, stages: Sequence[int]
) -> Iterator[SeedGroup]:
    """Yield the seeds in one of these stages as groups of equal kind."""
    wanted = np.isin(state.stage.numpy(), stages)
    widths = {(stack.slot, stack.kind): stack.parameters.width for stack in seed_stacks.stacks}
    for stack in seed_stacks.stacks:
        if stack.kind == GATE:
            continue
        slot, moving = stack.slot, learning_entries(stack, state)
        rows = np.flatnonzero(wanted[:, slot] & (seed_stacks.kinds[:, slot] == stack.kind))
        entries, gates = seed_stacks.entries[rows, slot], seed_stacks.gate_entries[rows, slot]
        for has_gate in (False, True):
            for is_learning in (False, True):
                mine = ((gates != ABSENT) == has_gate) & (moving[entries] == is_learning)
                if mine.any():
                    yield SeedGroup(
                        slot,
                        stack.kind,
                        rows[mine],
                        entries[mine],
                        gates[mine] if has_gate else None,
                        widths[slot, stack.kind] + (widths[slot, GATE] if has_gate else 0),
                        is_learning,
                    )


def _norms_of(group: SeedGroup, norms: Mapping[tuple[int, int], Reals]) -> Reals:
    """Return [seeds, tensors]: gradient norms of a group's seeds and gates."""
    nothing = np.zeros((len(group.rows), 0))
    # A frozen seed has no gradient; that is not a vanished gradient.
    if not group.is_learning:
        return nothing
    both = ((group.kind, group.entries), (GATE, group.gate_entries))
    parts = [
        norms[group.slot, kind][entries]
        for kind, entries in both
        if entries is not None and (group.slot, kind) in norms
    ]
    return np.concatenate([nothing, *parts], 1)
