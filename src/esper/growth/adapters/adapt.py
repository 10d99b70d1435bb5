"""Adapt: trains a frozen model by low-rank changes of its weights, placed by their gradients."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.adapters.finding import (
    check_bare,
    check_modules,
    check_targets,
    find_weights,
    freeze,
    warn_of_recurrent,
)
from esper.growth.adapters.measuring import GradientSums, Use, measure, shared_seed
from esper.growth.adapters.placement import AdaptConfig, Planner, check_config
from esper.growth.adapters.state import check_settings, check_state, persistent_buffers
from esper.growth.adapters.weights import (
    AdaptedWeight,
    check_held,
    extend,
    inner_optimizers,
    renew,
    swap,
    table,
    watch_steps,
)
from esper.growth.batches import warn_of_moving_statistics
from esper.growth.depth.blocks import world_size
from esper.leyline.config import check_value
from esper.leyline.errors import UsageError, warn


class Adapt:
    """Low-rank adapters on the weights of a frozen model, under a budget of trainable parameters.

    Each adapter is a pair of matrices. Pairs that train both start at once, at the rank that an
    even budget buys. Over the first few steps gradients are measured. The rest of the budget then
    goes to the weights and directions with the largest gradients. With `total_steps`, useless
    ranks move later. The model stays your own object; `bake()` merges the adapters into it.

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
        total_steps: optimizer steps of the whole run, needed to move ranks; None never moves them.
        targets: names of modules to adapt, or the ends of their names; by default all that can be.
        trainable: names of modules to train in full, such as a new head; not part of the budget.
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
            raise UsageError("Adapt needs either budget=20_000 (trainable parameters) or rank=8")
        given = {"budget": budget, "rank": rank, "total_steps": total_steps}
        for name, value in given.items():
            if value is not None:
                check_value(name, value, int, minimum=1)
        self.model = model
        self.config = check_config(config)
        self._trainable = check_modules(model, trainable)
        chosen = find_weights(model, self._trainable).choose(check_targets(model, targets))
        if targets == "auto":
            warn_of_recurrent(model, self._trainable)
        self._had_gradient = {name: p.requires_grad for name, p in model.named_parameters()}
        freeze(model, self._trainable)
        self._weights = {
            name: AdaptedWeight(name, one.module, one.tensor, one.layout, self.config.scale)
            for name, one in chosen.items()
        }
        if rank is not None:
            budget = rank * sum(one.cost for one in self._weights.values())
        assert budget is not None
        self._budget = budget
        self._step, self._measured_steps = 0, 0
        self._is_placed, self._is_baked, self._has_warned = False, False, False
        self._is_new, self._is_resumed = True, False
        self._history: list[dict[str, Any]] = []
        self._asked: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._sums: GradientSums | None = None
        self._use: Use | None = None
        self._pending: list[int] = []
        self._seed = 0
        self._planner: Planner | None = None
        self._forgotten = watch_steps(self._weights, self.config.measure_steps)
        if rank is not None:
            self._place_evenly(rank)
            self._forgotten.stop()
            return
        # Random directions have a seed of their own, so that a resumed run draws the same.
        self._seed = shared_seed(next(iter(self._weights.values())).weight.device)
        self._planner = Planner(self._weights, budget, self.config, self._seed)
        least = min(one.cost for one in self._weights.values())
        if budget < least:
            self._give_back(merged=False)
            raise UsageError(
                f"budget={budget:,} is too small for a single rank; give {least:,} or more"
            )
        if total_steps is not None:
            self._pending = sorted(
                {max(1, round(share * total_steps)) for share in self.config.moves}
            )
        opened = {name: rows for name, rows in self._planner.start().items() if len(rows)}
        for name, rows in opened.items():
            renew(self._weights[name], rows, [])
        if opened:
            counts = {name: len(rows) for name, rows in opened.items()}
            self._history.append({"step": 0, "opened": counts, "settled": {}, "dropped": {}})
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
        """Every placement: its step, and how many components it opened, settled and dropped."""
        return [dict(event) for event in self._history]

    @property
    def is_placed(self) -> bool:
        """Whether the whole budget was handed out, by measured gradients."""
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
        """Yield what trains: the parameters of `trainable`, then the pair of every weight."""
        yield from self._own_parameters().values()
        for one in self._weights.values():
            yield from (getattr(one.pair, key) for key in one.pair.trained)

    def __repr__(self) -> str:
        placed = f"{self.count_parameters():,} of {self._budget:,} parameters in adapters"
        if not self._is_placed:
            placed += f", placed after {self.config.measure_steps} steps"
        used = self._used if self._use is None else self._use.by_weight() or self._used
        return table(self._weights, self._asked, used, placed)

    # -- what users do -----------------------------------------------------------------------------

    def step(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Count an optimizer step, and place or move ranks when due; call it after each step.

        Args:
            optimizer: what trains `parameters()`; new ranks are added to it.
        """
        self._check_not_baked()
        optimizers = inner_optimizers(optimizer)
        self._forgotten.stop()
        if self._step == 0 and self.model.training:
            warn_of_moving_statistics(self.model, has_own_loop=True)
        if self._is_new or not self._is_placed:
            check_held(self.parameters(), optimizers, is_resumed=self._is_resumed)
            self._is_new = False
        self._step += 1
        if self._use is not None:
            self._use.end_step()
        if self._sums is not None:
            self._measured_steps += self._sums.end_step(agrees=True)
            if not self._is_placed and self._measured_steps >= self.config.measure_steps:
                self._place(optimizers)
            elif not self._is_placed and self._step >= 10 * self.config.measure_steps:
                self._check_measured(self._sums.left_out)
        if self._is_placed and self._pending:
            self._look_ahead(optimizers)

    def measure(self, batches: Iterable[Any], loss: Callable[[Any], Tensor]) -> None:
        """Place ranks now, by gradients on some batches, instead of in the first steps.

        Make the optimizer afterwards. Before `DistributedDataParallel`, call it in every process.

        Args:
            batches: about as many as `measure_steps`.
            loss: returns the loss of a batch.
        """
        self._check_not_baked()
        if self._is_placed or self._sums is None:
            raise UsageError("ranks are already placed; call measure() before the first step")
        self._measured_steps += measure(self.model, self._sums, batches, loss)
        self._place([])
        if not self._pending:
            self._forgotten.stop()

    def bake(self) -> nn.Module:
        """Merge the adapters into the weights and return the model; nothing of Esper stays in it.

        Classes, `state_dict` keys and `requires_grad` are as they were.
        """
        self._check_not_baked()
        if self._step and not self._is_placed:
            warn(
                f"only {self.count_parameters():,} of {self._budget:,} parameters trained: ranks "
                f"are placed after {self.config.measure_steps} steps with finite gradients, and "
                f"this run had {self._measured_steps}; call adapters.measure(batches, loss) before "
                "training, or write config=esper.AdaptConfig(measure_steps=1)"
            )
        self._stop_watching()
        self._forgotten.stop()
        self._give_back(merged=True)
        self._is_baked = True
        return self.model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapters as a folder that `PeftModel.from_pretrained` loads.

        Args:
            folder: created if missing.
        """
        from esper.growth.adapters.peft import save_adapter

        self._check_not_baked()
        save_adapter(
            folder, self.model, self._weights, scale=self.config.scale, trainable=self._trainable
        )

    @classmethod
    def from_peft(cls, model: nn.Module, peft_config: Any, **options: Any) -> Adapt:
        """Adapt the targets of a PEFT `LoraConfig`, with as many parameters as its rank would have.

        Args:
            model: a trained network, as PEFT would get it.
            peft_config: a `LoraConfig`; target_modules, r, lora_alpha and modules_to_save are read.
            options: arguments of `Adapt` other than `budget`, `rank`, `targets` and `trainable`.
        """
        from esper.growth.adapters.peft import read_lora_config

        for name in ("budget", "rank", "targets", "trainable"):
            if name in options:
                raise UsageError(f"from_peft takes {name}= from the LoraConfig; leave it out")
        targets, trainable, r, scale = read_lora_config(model, peft_config)
        config = check_config(options.pop("config", None)).replace(scale=scale)
        found = find_weights(model, trainable).choose(targets)
        sizes = [one.module._parameters[one.tensor] for one in found.values()]
        budget = r * sum(p.shape[0] + p[0].numel() for p in sizes if p is not None)
        return cls(model, budget, targets=targets, trainable=trainable, config=config, **options)

    # -- stopping and going on ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that resuming needs, except the optimizer's own state."""
        return {
            "step": self._step,
            "measured_steps": self._measured_steps,
            "is_placed": self._is_placed,
            "budget": self._budget,
            "config": self.config.to_mapping(),
            "trained": {name: list(one.pair.trained) for name, one in self._weights.items()},
            "pending": list(self._pending),
            "seed": self._seed,
            "pairs": {
                name: {key: value.detach().clone() for key, value in one.pair.named_parameters()}
                for name, one in self._weights.items()
            },
            "trainable": {n: p.detach().clone() for n, p in self._own_parameters().items()},
            "buffers": {n: b.detach().clone() for n, b in persistent_buffers(self.model).items()},
            "asked": dict(self._asked),
            "used": dict(self._used),
            "use": None if self._use is None else self._use.state_dict(),
            "sums": None if self._sums is None else self._sums.state_dict(),
            "left_out": 0 if self._sums is None else self._sums.left_out,
            "history": self.history,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], optimizer: Optimizer | Sequence[Optimizer] = ()
    ) -> None:
        """Restore a `state_dict`; load the optimizer from its own state.

        Args:
            state: what `state_dict` returned, of the same model.
            optimizer: one made from `parameters()` before; leave it out if you make it afterwards.
        """
        self._check_not_baked()
        own = self._own_parameters()
        buffers = persistent_buffers(self.model)
        check_state(state, set(self.state_dict()), self._weights, own, buffers, self._budget)
        check_settings(state, self.config, self._weights)
        self._stop_watching()
        optimizers = inner_optimizers(optimizer)
        for name, pair in state["pairs"].items():
            one = self._weights[name]
            for key in ("A", "B"):
                old = getattr(one.pair, key)
                values = pair[key].to(old.device, old.dtype, copy=True)
                new = nn.Parameter(values, old.requires_grad)
                setattr(one.pair, key, new)
                swap(optimizers, old, new, keeps_state=True)
            for key in ("settled_A", "settled_B"):
                like = getattr(one.pair, key)
                values = pair[key].to(like.device, like.dtype, copy=True)
                setattr(one.pair, key, nn.Parameter(values, requires_grad=False))
        with torch.no_grad():
            for kind, into in (("trainable", own), ("buffers", buffers)):
                for name, values in state[kind].items():
                    into[name].copy_(values)
        self._is_new, self._is_resumed = True, True
        self._step, self._measured_steps = state["step"], state["measured_steps"]
        self._is_placed, self._seed = state["is_placed"], state["seed"]
        if self._planner is not None:
            self._planner = Planner(self._weights, self._budget, self.config, self._seed)
        self._pending = list(state["pending"])
        self._asked, self._used = dict(state["asked"]), dict(state["used"])
        self._history = [dict(event) for event in state["history"]]
        if state["use"] is not None:
            self._use = Use(self._weights)
            self._use.load_state_dict(state["use"])
        if state["sums"] is not None:
            self._sums = GradientSums(self._weights)
            self._sums.load_state_dict(state["sums"])
            self._sums.left_out = state["left_out"]

    # -- placing and moving ------------------------------------------------------------------------

    def _place_evenly(self, rank: int) -> None:
        """Give every weight this rank with random rows, as LoRA does."""
        for one in self._weights.values():
            rows = torch.empty(min(rank, one.rows, one.columns), one.columns)
            nn.init.kaiming_uniform_(rows, a=math.sqrt(5))
            renew(one, rows.to(one.pair.A), [])
        self._is_placed = True
        self._history.append({"step": 0, "opened": self.ranks, "settled": {}, "dropped": {}})

    def _place(self, optimizers: Sequence[Optimizer]) -> None:
        """Spend the budget by the measured gradients, for the first time or again."""
        assert self._sums is not None
        assert self._planner is not None
        use, gradients = self._use, self._sums.sums()
        self._stop_watching()
        self._used = {} if use is None else use.by_weight()
        event: dict[str, Any] = {"step": self._step, "opened": {}, "settled": {}, "dropped": {}}
        if not self._is_placed:
            self._drop_unreached(gradients, optimizers, event)
        chosen, self._asked = self._planner.plan(
            gradients, self._step, is_first=not self._is_placed
        )
        for name, directions in chosen.items():
            one = self._weights[name]
            if len(one.pair.trained) == 2:
                if len(directions):
                    event["opened"][name] = len(directions)
                    extend(one, directions, optimizers)
                continue
            used = [
                index
                for index in range(one.pair.rank)
                if use is None or not use.is_idle(name, index, self.config.idle)
            ]
            counts = len(directions), len(used), one.pair.rank - len(used)
            for key, count in zip(("opened", "settled", "dropped"), counts, strict=True):
                if count:
                    event[key][name] = count
            one.pair.settle(used)
            renew(one, directions, optimizers)
        self._history.append(event)
        self._is_placed = True
        self._use = Use(self._weights) if self._pending else None

    def _check_measured(self, left_out: int) -> None:
        """Refuse to go on without gradients; warn once if too few of them were finite."""
        if not left_out:
            raise UsageError(
                f"no gradient reached the weights in {self._step} steps; give Adapt the model "
                "that is trained, and call loss.backward() before adapters.step(optimizer)"
            )
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{left_out} backward passes in {self._step} steps had gradients that are not "
                f"finite, so only {self.count_parameters():,} of {self._budget:,} parameters "
                "train; ranks are placed after "
                f"{self.config.measure_steps - self._measured_steps} more finite steps: check that "
                "the loss is finite, and give a GradScaler a smaller init_scale="
            )

    def _drop_unreached(
        self, gradients: Mapping[str, Tensor], optimizers: Sequence[Optimizer], event: Any
    ) -> None:
        """Close pairs that started at once on weights that the loss does not depend on."""
        reached = {name for name, gradient in gradients.items() if bool((gradient != 0).any())}
        if not reached:
            raise UsageError(
                f"the gradients of all {len(self._weights)} weights are zero, so no rank can be "
                "placed; check that the loss depends on the model"
            )
        for name, one in self._weights.items():
            if one.pair.rank and name not in reached:
                event["dropped"][name] = one.pair.rank
                renew(one, one.pair.A.detach()[:0], optimizers)

    def _look_ahead(self, optimizers: Sequence[Optimizer]) -> None:
        """Measure gradients in the steps before a move, and move when it is time."""
        if world_size() > 1:
            raise UsageError(
                "ranks cannot move under DistributedDataParallel, which does not see parameters "
                "that come later; leave out total_steps="
            )
        steps = self.config.measure_steps
        if self._sums is None:
            if self._step >= self._pending[0] - steps:
                self._sums, self._measured_steps = GradientSums(self._weights), 0
        elif self._step >= self._pending[0] and self._measured_steps >= steps:
            self._pending.pop(0)
            self._place(optimizers)

    # -- the model ---------------------------------------------------------------------------------

    def _give_back(self, *, merged: bool) -> None:
        """Remove the pairs from the model; `merged` adds them to the weights first."""
        for one in self._weights.values():
            one.release(merged=merged)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._had_gradient[name])

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the modules that `trainable` names."""
        prefixes = tuple(f"{name}." for name in self._trainable)
        return {n: p for n, p in self.model.named_parameters() if n.startswith(prefixes)}

    def _stop_watching(self) -> None:
        for watcher in (self._sums, self._use):
            if watcher is not None:
                watcher.remove()
        self._sums = self._use = None

    def _check_not_baked(self) -> None:
        if self._is_baked:
            raise UsageError("the adapters are merged into the weights; make a new Adapt(...)")
