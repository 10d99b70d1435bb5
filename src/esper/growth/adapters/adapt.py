"""Adapt: trains a frozen model by low-rank changes of its weights, placed by their gradients."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.adapters.carrying import check_held, inner_optimizers, resize_state, swap
from esper.growth.adapters.measuring import GradientSums, Use
from esper.growth.adapters.placement import (
    AdaptConfig,
    Offer,
    allocate,
    components_of,
    shares,
)
from esper.growth.adapters.weights import AdaptedWeight, check_bare, find_weights, inside_peft
from esper.growth.depth.blocks import world_size
from esper.leyline.errors import CheckpointError, UsageError


class Adapt:
    """Low-rank adapters on the weights of a frozen model, under a budget of trainable parameters.

    The first few steps only measure gradients. Then the budget goes where they ask for it, weight
    by weight and rank by rank, and the adapters begin in the directions that the gradients have.
    Later idle ranks move. The model stays your own object; `bake()` merges the adapters into it.

        adapters = esper.Adapt(model, budget=20_000, total_steps=1_000)
        optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-3)
        for batch in batches:
            loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            adapters.step(optimizer)
        adapters.bake()

    Args:
        model: a trained network, not wrapped; its parameters are frozen.
        budget: most trainable parameters of all adapters together.
        rank: the same rank for every weight instead of a budget: plain LoRA, with random rows.
        total_steps: optimizer steps of the whole run, by which ranks move; None: they never do.
        targets: names of modules to adapt, or the ends of their names; all that can be by default.
        trainable: names of modules that train as they are, a new head above all; beside the budget.
        config: how ranks are measured, placed and moved.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: int | None = None,
        *,
        rank: int | None = None,
        total_steps: int | None = None,
        targets: str | Sequence[str] = "auto",
        trainable: str | Sequence[str] = (),
        config: AdaptConfig | None = None,
    ) -> None:
        """Freeze the model and put a pair of rank 0 on every weight; with `rank`, one of that."""
        check_bare(model)
        if (budget is None) == (rank is None):
            raise UsageError("say either how much may be trained, budget=20_000, or rank=8")
        self.model = model
        self.config = config or AdaptConfig()
        self._trainable = [trainable] if isinstance(trainable, str) else list(trainable)
        known = dict(model.named_modules())
        for name in self._trainable:
            if name not in known:
                raise UsageError(f"trainable= names {name!r}, which is no module of the model")
        chosen = find_weights(model, self._trainable).choose(targets)
        self._had_gradient = {name: p.requires_grad for name, p in model.named_parameters()}
        self._freeze()
        self._weights = {
            name: AdaptedWeight(name, one.module, one.tensor, one.layout, self.config.scale)
            for name, one in chosen.items()
        }
        if rank is not None:
            budget = rank * sum(one.cost for one in self._weights.values())
        assert budget is not None
        self._budget = budget
        self._total_steps = total_steps
        self._step, self._measured_steps = 0, 0
        self._is_placed, self._is_baked = False, False
        self._history: list[dict[str, Any]] = []
        self._asked: dict[str, float] = {}
        self._sums: GradientSums | None = None
        self._use: Use | None = None
        self._pending: list[int] = []
        if rank is not None:
            self._place_evenly(rank)
            return
        least = min(one.cost for one in self._weights.values())
        if budget < least:
            raise UsageError(
                f"budget={budget:,} is too small for one rank anywhere; the least is {least:,}"
            )
        if total_steps is not None:
            self._pending = sorted(
                {max(1, round(share * total_steps)) for share in self.config.moves}
            )
        self._sums = GradientSums(self._weights)

    # -- what users read ---------------------------------------------------------------------------

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of every weight that can be adapted, by name."""
        return {name: one.pair.rank for name, one in self._weights.items()}

    @property
    def budget(self) -> int:
        """Most trainable parameters of all adapters together."""
        return self._budget

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every placement: the step after which it happened, ranks opened and closed by weight."""
        return [dict(event) for event in self._history]

    @property
    def is_placed(self) -> bool:
        """Whether ranks were handed out; before that nothing but `trainable` learns."""
        return self._is_placed

    @property
    def steps(self) -> int:
        """Optimizer steps counted so far."""
        return self._step

    @property
    def weights(self) -> Mapping[str, AdaptedWeight]:
        """The adapted weights, by name."""
        return dict(self._weights)

    def count_parameters(self) -> int:
        """Return the trainable parameters of all adapters."""
        return sum(one.pair.rank * one.cost for one in self._weights.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what trains: modules named by `trainable`, then the pair of every weight."""
        yield from self._own_parameters().values()
        for one in self._weights.values():
            yield one.pair.A
            yield one.pair.B

    def __repr__(self) -> str:
        placed = f"{self.count_parameters():,} of {self._budget:,} parameters in adapters"
        if not self._is_placed:
            placed += f", placed after {self.config.measure_steps} steps"
        ranked = [(n, one) for n, one in self._weights.items() if one.pair.rank]
        if not ranked:
            return f"Adapt({placed})"
        used = {} if self._use is None else self._use.by_weight(self.ranks)
        lines = [
            f"{'weight':40} {'shape':>12} {'rank':>5} {'parameters':>11} {'gradient':>9} {'use':>6}"
        ]
        for name, one in ranked:
            asked = f"{self._asked[name]:.1%}" if name in self._asked else ""
            use = f"{used[name]:.1%}" if name in used else ""
            shape = f"{one.rows}×{one.columns}"
            size = one.pair.rank * one.cost
            lines.append(
                f"{name:40} {shape:>12} {one.pair.rank:>5} {size:>11,} {asked:>9} {use:>6}"
            )
        without = len(self._weights) - len(ranked)
        rest = f"; {without} other weights have no rank" if without else ""
        return "\n".join([*lines, f"{placed}{rest}"])

    # -- what users do -----------------------------------------------------------------------------

    def step(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Count an optimizer step, and place or move ranks when it is time; call it after each.

        Args:
            optimizer: what trains `parameters()`; new ranks join it.
        """
        self._check_not_baked()
        optimizers = inner_optimizers(optimizer)
        if self._step == 0 or not self._is_placed:
            check_held(self.parameters(), optimizers)
        self._step += 1
        if self._use is not None:
            self._use.end_step()
        if self._sums is not None:
            self._measured_steps += self._sums.end_step()
            if not self._is_placed and self._measured_steps >= self.config.measure_steps:
                self._place(optimizers)
            elif not self._is_placed and self._step >= 10 * self.config.measure_steps:
                raise UsageError(
                    f"no gradient reached the weights in {self._step} steps; give Adapt the model "
                    "that is trained, and call loss.backward() before adapters.step(optimizer)"
                )
        if self._is_placed and self._pending:
            self._look_ahead(optimizers)

    def measure(self, batches: Iterable[Any], loss: Callable[[Any], Tensor]) -> None:
        """Place ranks now, by gradients on some batches, instead of in the first steps.

        Make the optimizer afterwards. Needed before `DistributedDataParallel`, in every process.

        Args:
            batches: about as many as `measure_steps`.
            loss: returns the loss of a batch.
        """
        self._check_not_baked()
        if self._is_placed or self._sums is None:
            raise UsageError("ranks are placed already; measure() comes before training")
        own = list(self._own_parameters().values())
        kept = [p.grad for p in own]
        for batch in batches:
            loss(batch).backward()
            self._measured_steps += self._sums.end_step()
        for parameter, gradient in zip(own, kept, strict=True):
            parameter.grad = gradient
        if not self._measured_steps:
            raise UsageError(
                "measure() saw no gradient; give it batches, and the loss of the model"
            )
        self._place([])

    def bake(self) -> nn.Module:
        """Merge the adapters into the weights and return the model, which is all your own again.

        Classes, `state_dict` keys and what requires gradients are as they were.
        """
        self._check_not_baked()
        self._stop_watching()
        for one in self._weights.values():
            one.release(merged=True)
        self._is_baked = True
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._had_gradient[name])
        return self.model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapters as a folder that `PeftModel.from_pretrained` loads.

        Args:
            folder: made where it is not there.
        """
        from esper.growth.adapters.peft import save_adapter

        self._check_not_baked()
        save_adapter(
            folder, self.model, self._weights, scale=self.config.scale, trainable=self._trainable
        )

    @classmethod
    def from_peft(cls, model: nn.Module, peft_config: Any, **options: Any) -> Adapt:
        """Adapt what a `LoraConfig` of PEFT targets, with the parameters that its rank would have.

        Args:
            model: a trained network, as PEFT would get it.
            peft_config: a `LoraConfig`: target_modules, r, lora_alpha and modules_to_save count.
            options: of `Adapt`, but `budget`, `targets` and `trainable`.
        """
        from esper.growth.adapters.peft import read_lora_config

        targets, trainable, r, scale = read_lora_config(model, peft_config)
        config = (options.pop("config", None) or AdaptConfig()).replace(scale=scale)
        if "rank" in options:
            raise UsageError("from_peft takes the rank from the configuration; leave rank= out")
        found = find_weights(model, trainable).choose(targets)
        sizes = [one.module._parameters[one.tensor] for one in found.values()]
        budget = r * sum(p.shape[0] + p[0].numel() for p in sizes if p is not None)
        return cls(model, budget, targets=targets, trainable=trainable, config=config, **options)

    # -- stopping and going on ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that was trained and what resuming needs, beside the optimizer's state."""
        return {
            "step": self._step,
            "measured_steps": self._measured_steps,
            "is_placed": self._is_placed,
            "budget": self._budget,
            "pending": list(self._pending),
            "pairs": {
                name: {"A": one.pair.A.detach().clone(), "B": one.pair.B.detach().clone()}
                for name, one in self._weights.items()
            },
            "trainable": {n: p.detach().clone() for n, p in self._own_parameters().items()},
            "asked": dict(self._asked),
            "use": None if self._use is None else self._use.state_dict(),
            "sums": None if self._sums is None else self._sums.state_dict(),
            "history": self.history,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], optimizer: Optimizer | Sequence[Optimizer] = ()
    ) -> None:
        """Go on from a `state_dict`; the optimizer is loaded from its own.

        Args:
            state: what `state_dict` returned, of the same model.
            optimizer: made from `parameters()` before; not needed where it is made afterwards.
        """
        self._check_not_baked()
        own = self._own_parameters()
        for told, names, there in (
            ("weights", state["pairs"], self._weights),
            ("trainable parameters", state["trainable"], own),
        ):
            if names.keys() != there.keys():
                odd = sorted(names.keys() ^ there.keys())[0]
                raise CheckpointError(
                    f"this state is of a model with other {told}: {odd} is in one of them only"
                )
        self._stop_watching()
        optimizers = inner_optimizers(optimizer)
        for name, pair in state["pairs"].items():
            one = self._weights[name]
            for key in ("A", "B"):
                old = getattr(one.pair, key)
                new = nn.Parameter(pair[key].to(old.device, old.dtype, copy=True))
                setattr(one.pair, key, new)
                swap(optimizers, old, new)
        with torch.no_grad():
            for name, values in state["trainable"].items():
                own[name].copy_(values)
        self._step, self._measured_steps = state["step"], state["measured_steps"]
        self._is_placed, self._budget = state["is_placed"], state["budget"]
        self._pending, self._asked = list(state["pending"]), dict(state["asked"])
        self._history = [dict(event) for event in state["history"]]
        if state["use"] is not None:
            self._use = Use(self._weights)
            self._use.load_state_dict(state["use"])
        if state["sums"] is not None:
            self._sums = GradientSums(self._weights)
            self._sums.load_state_dict(state["sums"])

    # -- placing and moving ------------------------------------------------------------------------

    def _place_evenly(self, rank: int) -> None:
        """Give every weight this rank with random rows, as LoRA does."""
        for one in self._weights.values():
            rows = torch.empty(min(rank, one.rows, one.columns), one.columns)
            nn.init.kaiming_uniform_(rows, a=math.sqrt(5))
            self._open(one, [], rows.to(one.pair.A), [])
        self._is_placed = True
        self._remember(dict.fromkeys(self._weights, 0))

    def _place(self, optimizers: Sequence[Optimizer]) -> None:
        """Spend the budget by the gradients that were measured."""
        before = self.ranks
        opened = self._spend(self._budget, optimizers, {name: [] for name in self._weights})
        if not opened:
            raise UsageError(
                "the gradients of all weights are zero, so ranks cannot be placed; check the loss"
            )
        self._is_placed = True
        self._remember(before)
        if self._pending:
            self._use = Use(self._weights)

    def _look_ahead(self, optimizers: Sequence[Optimizer]) -> None:
        """Measure gradients in the steps before a move, and move when it is time."""
        if world_size() > 1:
            raise UsageError(
                "ranks cannot move under DistributedDataParallel, which does not know parameters "
                "that come later; leave total_steps= out"
            )
        steps = self.config.measure_steps
        if self._sums is None:
            if self._step >= self._pending[0] - steps:
                self._sums, self._measured_steps = GradientSums(self._weights), 0
        elif self._step >= self._pending[0] and self._measured_steps >= steps:
            self._pending.pop(0)
            self._move(optimizers)

    def _move(self, optimizers: Sequence[Optimizer]) -> None:
        """Return idle components to the budget, and open others where gradients ask for them."""
        assert self._use is not None
        before = self.ranks
        closed = self._use.idle(self._weights, self.config.idle, self.config.share * self._budget)
        kept = {
            name: [i for i in range(one.pair.rank) if i not in closed.get(name, ())]
            for name, one in self._weights.items()
        }
        spent = sum(len(kept[name]) * one.cost for name, one in self._weights.items())
        self._spend(self._budget - spent, optimizers, kept)
        self._remember(before, closed)
        self._use = Use(self._weights) if self._pending else None

    def _spend(
        self, budget: int, optimizers: Sequence[Optimizer], kept: Mapping[str, Sequence[int]]
    ) -> int:
        """Keep these components, open others within the budget; return how many were opened."""
        assert self._sums is not None
        gradients = self._sums.means()
        self._stop_watching()
        most = self._most_rank()
        found = {}
        for name, gradient in gradients.items():
            own = self._weights[name].pair
            beside = own.A.detach()[list(kept[name])]
            found[name] = components_of(gradient, most[name] - len(kept[name]), name, beside)
        self._asked = shares({name: one.gains for name, one in found.items()})
        offers = {n: Offer(one.gains, self._weights[n].cost) for n, one in found.items()}
        ranks = allocate(offers, budget, self.config.power)
        for name, count in ranks.items():
            rows = self.config.size * found[name].rows[:count]
            self._open(self._weights[name], kept[name], rows, optimizers)
        return sum(ranks.values())

    def _most_rank(self) -> dict[str, int]:
        """Return the most rank that each weight may have."""
        evenly = self._budget / sum(one.cost for one in self._weights.values())
        most = max(1, math.ceil(self.config.most * evenly))
        return {name: min(most, one.rows, one.columns) for name, one in self._weights.items()}

    @torch.no_grad()
    def _open(
        self,
        one: AdaptedWeight,
        kept: Sequence[int],
        rows: Tensor,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Give a weight the components that are kept and new ones with these rows."""
        if len(kept) == one.pair.rank and not len(rows):
            return
        for key, dim in (("A", 0), ("B", 1)):
            old = getattr(one.pair, key)
            indices = torch.tensor(list(kept), dtype=torch.long, device=old.device)
            new = rows if key == "A" else rows.new_zeros(one.rows, len(rows))
            grown = nn.Parameter(
                torch.cat([old.detach().index_select(dim, indices), new.to(old)], dim)
            )
            setattr(one.pair, key, grown)
            swap(optimizers, old, grown)
            resize_state(optimizers, old, grown, indices, dim)

    def _remember(
        self, before: Mapping[str, int], closed: Mapping[str, Iterable[int]] | None = None
    ) -> None:
        gone = {name: len(list(some)) for name, some in (closed or {}).items() if some}
        opened = {
            name: rank - before[name] + gone.get(name, 0)
            for name, rank in self.ranks.items()
            if rank - before[name] + gone.get(name, 0)
        }
        self._history.append({"step": self._step, "opened": opened, "closed": gone})

    # -- the model ---------------------------------------------------------------------------------

    def _freeze(self) -> None:
        inside = tuple(f"{name}." for name in (*self._trainable, *inside_peft(self.model)))
        for name, parameter in self.model.named_parameters():
            if not name.startswith(inside):
                parameter.requires_grad_(False)
        for parameter in self._own_parameters().values():
            parameter.requires_grad_(True)

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of modules that train as they are, by name."""
        inside = tuple(f"{name}." for name in self._trainable)
        return {n: p for n, p in self.model.named_parameters() if n.startswith(inside)}

    def _stop_watching(self) -> None:
        for watcher in (self._sums, self._use):
            if watcher is not None:
                watcher.remove()
        self._sums = self._use = None

    def _check_not_baked(self) -> None:
        if self._is_baked:
            raise UsageError("the adapters are merged into the weights; make Adapt(...) anew")
