"""One optimizer step of all rows: forward, backward, clipping and SGD or AdamW over every stack.

All tensors of a step keep their addresses over batches and epochs, as long as no stack changes its
number of entries. So `StackedEngine` can capture a step in a CUDA graph once and replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.state import SlotState
from esper.kasmina.training import EPSILON, SECOND_BETA, TrainingConfig, epoch_rates
from esper.lab.population.parameter_stack import ParameterStack, flatten_gradients, reached_columns
from esper.lab.population.seed_stacks import ABSENT, GATE, IS_BLENDED, SeedStack, SeedStacks
from esper.lab.population.slot_forward import Integers
from esper.lab.population.vmap_rules import has_kernels
from esper.leyline.stages import AlphaMode, SeedStage
from esper.utils.process import Pending, to_host, write_to

if TYPE_CHECKING:
    from esper.lab.population.kernels.optimizer import Optimizer


# ---- Clipping and one step of SGD or AdamW for stacked networks, as `torch.optim` takes it for one


@dataclass(frozen=True, slots=True)
class OwnerTraining:
    """Optimizer settings of every owner: tensors [owners] at fixed addresses."""

    rates: Tensor
    decays: Tensor
    momenta: Tensor
    clips: Tensor
    """Norm to which a gradient is clipped; 0 is off."""
    first: Tensor
    """Bias correction of AdamW's mean of gradients; not used by SGD."""
    second: Tensor
    """Bias correction of the root of its mean of squares."""

    @classmethod
    def zeros(cls, owners: int, like: Tensor) -> OwnerTraining:
        """Return zeros for some owners."""
        return cls(*(like.new_zeros(owners) for _ in range(6)))

    def of(self, owners: slice) -> OwnerTraining:
        """Return the settings of some owners, as columns [n, 1]."""
        return OwnerTraining(
            *(getattr(self, name)[owners][:, None] for name in OwnerTraining.__slots__)
        )

    def correct(self, steps: Tensor) -> None:
        """Set the bias corrections after so many steps, int64 [owners]."""
        # In double precision: in single, 1 - 0.999 has four digits. The minimum of one step avoids
        # an infinity for owners that do not train yet.
        taken = steps.clamp(min=1).to(torch.float64)
        self.first.copy_(1 / (1 - self.momenta.to(torch.float64) ** taken))
        self.second.copy_((1 - torch.full_like(taken, SECOND_BETA) ** taken).rsqrt())


def clip_coefficient(square_norm: Tensor, max_norm: Tensor) -> Tensor:
    """Return the factor [n] that clips each network's gradient to its norm; 0 is off."""
    factor = (max_norm / (square_norm.sqrt() + 1e-6)).clamp(max=1.0)
    return torch.where(max_norm > 0, factor, torch.ones_like(factor))


@torch.no_grad()
def move(stack: ParameterStack, gradient: Tensor, active: Tensor, how: OwnerTraining) -> None:
    """Take one optimizer step where `active` ([n, 1] or [n, width]) is True.

    `how` has columns [n, 1]. A stack that keeps squares uses AdamW, any other SGD.
    """
    if stack.squares is None:
        _sgd(stack, gradient, active, how)
    else:
        _adamw(stack, stack.squares, gradient, active, how)


def _sgd(stack: ParameterStack, gradient: Tensor, active: Tensor, how: OwnerTraining) -> None:
    gradient = gradient + how.decays * stack.flat
    # `where`, not a product: zero times NaN would be NaN in a network without momentum.
    carried = torch.where(how.momenta > 0, how.momenta * stack.momentum, 0.0)
    velocity = carried + gradient
    _put(stack.momentum, velocity, active)
    _put(stack.flat, stack.flat - how.rates * velocity, active)


def _adamw(
    stack: ParameterStack, squares: Tensor, gradient: Tensor, active: Tensor, how: OwnerTraining
) -> None:
    momentum = torch.lerp(stack.momentum, gradient, 1 - how.momenta)
    square = SECOND_BETA * squares + (1 - SECOND_BETA) * gradient.square()
    step = how.first * momentum / (how.second * square.sqrt() + EPSILON)
    _put(stack.momentum, momentum, active)
    _put(squares, square, active)
    # The decay is no part of the gradient: it does not enter the moments.
    _put(stack.flat, stack.flat * (1 - how.rates * how.decays) - how.rates * step, active)


def _put(where: Tensor, values: Tensor, active: Tensor) -> None:
    where.copy_(torch.where(active, values, where))


Reals = NDArray[np.float64]

Losses = Callable[[Tensor, Tensor], Tensor]
"""Maps inputs and targets to the mean loss [R] of every row, with autograd."""


@dataclass(frozen=True, slots=True)
class RowTraining:
    """Optimizer settings of every row in an epoch: float64 [R]."""

    learns: NDArray[np.bool_]
    """bool [R], whether it trains; after its horizon a row rests and does not change."""
    rates: Reals
    """Learning rate of the host."""
    decays: Reals
    """Weight decay."""
    momenta: Reals
    """Momentum of SGD, first beta of AdamW."""
    clips: Reals
    """Norm to which gradients are clipped; 0 is off."""
    seed_rates: Reals
    """[R, S], learning rate of the seed in every slot and of its gate."""

    @classmethod
    def of(
        cls,
        settings: Sequence[TrainingConfig],
        epochs: Sequence[int],
        horizons: Sequence[int],
        learned: Sequence[Sequence[int]],
    ) -> RowTraining:
        """Return the settings in these epochs; `learned` [R, S] counts the seeds' epochs."""
        rates = list(map(epoch_rates, settings, epochs, horizons, learned))
        return cls(
            learns=np.array(epochs) <= np.array(horizons),
            rates=np.array([host for host, _ in rates]),
            decays=np.array([each.weight_decay for each in settings]),
            momenta=np.array([each.momentum for each in settings]),
            clips=np.array([each.max_grad_norm for each in settings]),
            seed_rates=np.array([seeds for _, seeds in rates]),
        )


class TrainStep:
    """Optimizer steps of hosts and seeds, for the current layout of the stacks."""

    def __init__(
        self,
        hosts: ParameterStack,
        seed_stacks: SeedStacks,
        losses: Losses,
    ) -> None:
        """Use these stacks; `losses` runs them. Stacks that keep squares use AdamW."""
        self._seed_stacks = seed_stacks
        self._losses = losses
        self.layout_version = seed_stacks.layout_version
        self.stacks = [stack for stack in seed_stacks.stacks if stack.parameters.width]
        self._parameters = [hosts, *(stack.parameters for stack in self.stacks)]
        sizes = [len(stack) for stack in self._parameters]
        self._first = np.cumsum([0, *sizes])
        owners = int(self._first[-1])
        device = hosts.flat.device
        self._active = torch.ones(owners, dtype=torch.int64, device=device)
        self._training = OwnerTraining.zeros(owners, hosts.flat)
        self._counts_steps = hosts.squares is not None
        self._steps = torch.cat([stack.steps for stack in self._parameters])
        # All stacks share one tensor, so that one addition counts the steps of all owners.
        for stack, steps in zip(self._parameters, self._steps.split(sizes), strict=True):
            stack.steps = steps
        self._partner = torch.full((owners,), -1, dtype=torch.int64, device=device)
        self._reached: list[list[bool]] = []
        self._gradients: list[Tensor] = []
        self._uses_kernels = has_kernels(hosts.used) and hosts.flat.dtype == torch.float32
        self._optimizer: Optimizer | None = None
        self._piece_spots: Integers = np.zeros(0, dtype=np.int64)
        self.loss = torch.zeros(len(hosts), dtype=torch.float32, device=device)
        """Mean loss of every row in its last step."""
        self._row_of: Integers = np.arange(owners)
        self._learning: Integers = np.ones(owners, dtype=np.int64)

    def begin(self, state: SlotState, rows: RowTraining) -> None:
        """Set which seeds train in this epoch, their settings, and the pairs of seeds and gates."""
        numbers = {id(stack): number for number, stack in enumerate(self.stacks, start=1)}
        active = np.ones(self._first[-1], dtype=np.int64)
        partner = np.full(self._first[-1], -1, dtype=np.int64)
        row_of = np.arange(self._first[-1])
        rates = np.zeros(self._first[-1])
        rates[self._entries(0)] = rows.rates
        active[self._entries(0)] = rows.learns
        for number, stack in enumerate(self.stacks, start=1):
            entries = self._entries(number)
            # An unused entry belongs to no row, and does not learn.
            row_of[entries] = np.maximum(np.array(stack.rows, dtype=np.int64), 0)
            active[entries] = learning_entries(stack, state) & rows.learns[row_of[entries]]
            # Copies learn as what they are copies of.
            own = rows.rates if stack.are_copies else rows.seed_rates[:, stack.slot]
            rates[entries] = own[row_of[entries]]
        for gates, seeds, here, there in gate_pairs(self._seed_stacks):
            if id(gates) in numbers and id(seeds) in numbers:
                one = self._first[numbers[id(gates)]] + here
                other = self._first[numbers[id(seeds)]] + there
                partner[one], partner[other] = other, one
        mine = self._training
        self._row_of, self._learning = row_of, active
        for place, values in (
            (self._active, active),
            (self._partner, partner),
            (mine.rates, rates),
            (mine.decays, rows.decays[row_of]),
            (mine.momenta, rows.momenta[row_of]),
            (mine.clips, rows.clips[row_of]),
        ):
            write_to(place, torch.from_numpy(values))
        for parameters in self._parameters:
            parameters.refresh()

    @property
    def learns(self) -> Tensor:
        """Bool [R], on the device: the rows that train now."""
        return self._active[self._entries(0)] > 0

    def rest(self, rows: NDArray[np.bool_]) -> None:
        """Stop training these rows, bool [R], and their seeds until the next epoch."""
        self._learning = np.where(rows[self._row_of], 0, self._learning)
        write_to(self._active, torch.from_numpy(self._learning))

    def run(self, x: Tensor, y: Tensor, rows: Tensor | None = None) -> None:
        """Take one step on these inputs and targets of all rows, or of some, int64.

        Rows that are left out must rest.
        """
        leaves = [list(stack.leaves.values()) for stack in self._parameters]
        learning = [leaf for each in leaves for leaf in each if leaf.requires_grad]
        with torch.enable_grad():
            per_row = self._losses(x, y)
            given = iter(torch.autograd.grad(per_row.sum(), learning, allow_unused=True))
        if rows is None:
            self.loss.copy_(per_row.detach())
        else:
            self.loss.index_copy_(0, rows, per_row.detach())
        found = [[next(given) if leaf.requires_grad else None for leaf in s] for s in leaves]
        if not self._reached:
            self._reached = [[grad is not None for grad in each] for each in found]
        if self._counts_steps:
            self._steps += self._active
            self._training.correct(self._steps)
        if self._uses_kernels:
            self._update_by_kernels(found)
        else:
            self._store_gradients(list(map(flatten_gradients, leaves, found)))
            self._update(leaves, found)

    def keep_gradients(self) -> Pending[tuple[Tensor, list[Tensor]]]:
        """Return the gradient norms of the last step, safe from later steps.

        They are measured before clipping: float64 [R] for the hosts, and float64 [entries, tensors]
        for every stack, for all tensors that get a gradient.
        """
        if self._optimizer is not None:
            squares = to_host(self._optimizer.squares)
            return lambda: self._norms_of_pieces(squares())
        return self._norms_of_stacks()

    def join_gradients(
        self, kept: Mapping[int, Pending[tuple[Tensor, list[Tensor]]]], wanted: Integers
    ) -> Pending[tuple[Tensor, list[Tensor]]]:
        """Return each row's norms from `keep_gradients` after its own step `wanted`, int64 [R]."""
        if len(kept) == 1:
            return next(iter(kept.values()))
        of_owner = torch.from_numpy(wanted[self._row_of])
        places = [of_owner[self._entries(number)] for number in range(len(self._parameters))]

        def joined() -> tuple[Tensor, list[Tensor]]:
            found = {number: each() for number, each in kept.items()}
            host, stacks = next(iter(found.values()))
            for number, (own, others) in found.items():
                host = torch.where(places[0] == number, own, host)
                stacks = [
                    torch.where((place == number)[:, None], here, before)
                    for place, here, before in zip(places[1:], others, stacks, strict=True)
                ]
            return host, stacks

        return joined

    def _entries(self, number: int) -> slice:
        return slice(int(self._first[number]), int(self._first[number + 1]))

    # -- in PyTorch ----------------------------------------------------------------------------

    def _update(self, leaves: Sequence[list[Tensor]], found: Sequence[list[Tensor | None]]) -> None:
        """Clip each host and each seed (with its gate) separately, then step."""
        own = torch.cat([gradient.square().sum(1) for gradient in self._gradients])
        both = own + own.index_select(0, self._partner.clamp(min=0))
        squares = torch.where(self._partner >= 0, both, own)
        learns = (self._active > 0)[:, None]
        for number, stack in enumerate(self._parameters):
            entries = self._entries(number)
            gradient, active = self._gradients[number], learns[entries]
            clips = self._training.clips[entries]
            # A tensor without a gradient does not change, not even by decay, as in `torch.optim`.
            reached = reached_columns(leaves[number], found[number])
            active = active if reached is None else active & reached
            gradient = gradient * clip_coefficient(squares[entries], clips)[:, None]
            move(stack, gradient, active, self._training.of(entries))
            stack.refresh()

    def _store_gradients(self, gradients: list[Tensor]) -> None:
        """Write gradients to the same addresses, because a replay runs no Python code."""
        if not self._gradients:
            self._gradients = gradients
            return
        for mine, each in zip(self._gradients, gradients, strict=True):
            mine.copy_(each)

    def _norms_of_stacks(self) -> Pending[tuple[Tensor, list[Tensor]]]:
        host = to_host(self._gradients[0].to(torch.float64).square().sum(1).sqrt())
        norms = [
            to_host(stack.tensor_norms(gradient))
            for stack, gradient in zip(self._parameters[1:], self._gradients[1:], strict=True)
        ]
        return lambda: (
            host(),
            [
                each()[:, torch.tensor(reached)]
                for each, reached in zip(norms, self._reached[1:], strict=True)
            ],
        )

    # -- in kernels ----------------------------------------------------------------------------

    def _update_by_kernels(self, found: Sequence[list[Tensor | None]]) -> None:
        if self._optimizer is None:
            self._make_optimizer()
        assert self._optimizer is not None
        gradients = [
            torch.zeros_like(leaf) if grad is None else grad
            for stack, each, reached in zip(self._parameters, found, self._reached, strict=True)
            for leaf, grad, is_reached in zip(stack.leaves.values(), each, reached, strict=True)
            # A step of some rows may have no seeds of a kind.
            if is_reached
        ]
        whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._optimizer.step(whole)

    def _make_optimizer(self) -> None:
        from esper.lab.population.kernels.optimizer import Optimizer, Owners

        stacks = []
        for stack, reached in zip(self._parameters, self._reached, strict=True):
            copy = None if stack.used is stack.flat else stack.used
            columns = [
                c for c, is_reached in zip(stack.columns(), reached, strict=True) if is_reached
            ]
            stacks.append(Owners(stack.flat, stack.momentum, stack.squares, copy, columns))
        self._optimizer = Optimizer(stacks, self._active, self._partner, self._training)
        self._piece_spots = self._find_piece_spots(self._optimizer)

    def _find_piece_spots(self, optimizer: Optimizer) -> Integers:
        """Return the addresses of all pieces, by stack, entry and tensor."""
        tensors = np.array([sum(reached) for reached in self._reached])
        sizes = np.diff(self._first) * tensors
        first_spot, first_tensor = np.cumsum(sizes) - sizes, np.cumsum(tensors) - tensors
        owner = optimizer.piece_owner
        stack = np.searchsorted(self._first, owner, side="right") - 1
        entry = owner - self._first[stack]
        column = optimizer.piece_tensor - first_tensor[stack]
        spots: Integers = first_spot[stack] + entry * tensors[stack] + column
        return spots

    def _norms_of_pieces(self, squares: Tensor) -> tuple[Tensor, list[Tensor]]:
        shapes = [(len(s), sum(r)) for s, r in zip(self._parameters, self._reached, strict=True)]
        sizes = [entries * tensors for entries, tensors in shapes]
        values = squares.to(torch.float64).numpy()
        sums = np.bincount(self._piece_spots, weights=values, minlength=sum(sizes))
        parts = torch.from_numpy(np.sqrt(sums)).split(sizes)
        host, *seeds = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        spoiled = [torch.where(torch.isfinite(each), each, torch.nan) for each in seeds]
        return host.square().sum(1).sqrt(), spoiled


def learning_entries(stack: SeedStack, state: SlotState) -> NDArray[np.bool_]:
    """Return bool [entries]: the seeds whose parameters train in this epoch."""
    rows = np.array(stack.rows, dtype=np.int64)
    stage, alpha = state.stage.numpy()[:, stack.slot], state.alpha.numpy()[:, stack.slot]
    moving = IS_BLENDED[stage] & (alpha > 0)
    moving |= stage == int(SeedStage.TRAINING)
    moving &= state.alpha_mode.numpy()[:, stack.slot] != int(AlphaMode.DOWN)
    return np.where(rows == ABSENT, False, moving[np.maximum(rows, 0)])


def gate_pairs(
    seed_stacks: SeedStacks,
) -> Iterator[tuple[SeedStack, SeedStack, Integers, Integers]]:
    """Yield (gates, seeds, gates' entries, seeds' entries): pairs are clipped together."""
    for gates in seed_stacks.stacks:
        if gates.kind != GATE:
            continue
        slot = gates.slot
        for seeds in seed_stacks.at_slot(slot):
            rows = np.array(seeds.rows, dtype=np.int64)
            has_gate = seed_stacks.gate_entries[np.maximum(rows, 0), slot] != ABSENT
            there = np.flatnonzero((rows != ABSENT) & has_gate)
            if len(there):
                yield gates, seeds, seed_stacks.gate_entries[rows[there], slot], there
