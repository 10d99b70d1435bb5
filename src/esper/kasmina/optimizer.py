"""Keeping an optimizer in step with a network that grows.

The optimizer stays the user's own `torch.optim` object, with its own groups: parameters of a new
seed join the group that names their slot (`slot_groups`), else that of the host module they stand
behind; norms and biases join the one that holds those of the host, usually without weight decay.
Parameters of a copied block (`kin`) join the group of the block's own, with their state.
Parameters of a removed seed leave with their state, and everybody else's state is untouched. So
schedulers, gradient accumulation and gradient scaling go on working.

`optimizer.state_dict()` also holds the names of its parameters, and `load_state_dict` matches by
name. PyTorch alone matches by order, which depends on when a seed came. So a trainer that saves and
loads the optimizer gives every parameter its own state back.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from esper.kasmina.garden import Garden
from esper.leyline.errors import CheckpointError, UsageError

SLOT = "slot"
"""The option by which a parameter group names the slot whose seed it is for."""

GRADIENT_STRIDE = 10
"""Seeds' gradients are sampled at every this many optimizer steps."""

NAMES = "parameter_names"
"""Key of a carried optimizer's `state_dict` for the names of its parameters, by group."""


class CarriedOptimizer:
    """Binds an optimizer to a garden for as long as this object lives."""

    def __init__(self, garden: Garden, optimizer: Optimizer) -> None:
        """Register hooks on the optimizer; parameters of present seeds join it."""
        _refuse_closure(optimizer)
        self.garden = garden
        self.optimizer = optimizer
        self.measures_itself = True
        self._steps = 0
        self._seeds: dict[int, nn.Parameter] = {}
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name in garden.slot_names:
            for parameter in garden.slot_parameters(name):
                if id(parameter) in known:
                    self._seeds[id(parameter)] = parameter
        self.reconcile()
        garden.ties.optimizers.add(self)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_state_dict_post_hook(self._add_names)
        optimizer.register_load_state_dict_pre_hook(self._match_names)

    def reconcile(self) -> None:
        """Add the parameters of new seeds and remove those of pruned ones."""
        present = {
            id(parameter): (name, parameter)
            for name in self.garden.slot_names
            for parameter in self.garden.slot_parameters(name)
        }
        for key in [key for key in self._seeds if key not in present]:
            self._remove(self._seeds.pop(key))
        sources = self.garden.seedbed.sources()
        for key, (name, parameter) in present.items():
            if key not in self._seeds:
                self._seeds[key] = parameter
                self._add(self._home(name, parameter, sources.get(key)), parameter)
                if key in sources:
                    copy_state(self.optimizer, sources[key], parameter)

    def sample_gradients(self) -> None:
        """Measure the seeds' gradients on every `GRADIENT_STRIDE`th call, before clipping."""
        if self._steps % GRADIENT_STRIDE == 0:
            self.garden.measure_gradients()
        self._steps += 1

    def start_epoch(self) -> None:
        """Start counting steps anew, so that every epoch samples its first step."""
        self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state by parameter name, as plain data and tensors."""
        names = self._names()
        groups = [
            {
                "options": {key: value for key, value in group.items() if key != "params"},
                "params": order,
            }
            for group, order in zip(self.optimizer.param_groups, self._order(), strict=True)
        ]
        state = {names[id(p)]: dict(entry) for p, entry in self.optimizer.state.items()}
        return {"class": type(self.optimizer).__name__, "groups": groups, "state": state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the garden must have its topology already."""
        kind = type(self.optimizer).__name__
        if saved["class"] != kind:
            raise CheckpointError(
                f"the saved optimizer is a {saved['class']}, this one a {kind}; use the same class"
            )
        self._arrange([group["params"] for group in saved["groups"]])
        by_name = {name: p for p, name in self._named()}
        for group, entry in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update(entry["options"])
            if isinstance(group.get("betas"), list):
                group["betas"] = tuple(group["betas"])
        self.optimizer.state.clear()
        for name, entry in saved["state"].items():
            parameter = by_name[name]
            self.optimizer.state[parameter] = {
                key: _like(value, parameter, key) for key, value in entry.items()
            }
        self.start_epoch()

    def _arrange(self, order: list[list[str]]) -> None:
        """Order the parameters of all groups by these names, or refuse other names."""
        groups = self.optimizer.param_groups
        if len(order) != len(groups):
            raise CheckpointError(
                f"the saved optimizer has {len(order)} parameter groups, this one {len(groups)}; "
                "make it with the same groups"
            )
        by_name = {name: p for p, name in self._named()}
        saved = [name for names in order for name in names]
        missing = [name for name in saved if name not in by_name]
        if missing:
            raise CheckpointError(
                f"the saved optimizer knows parameters this network lacks: "
                f"{', '.join(missing[:5])}; load the garden's state before the optimizer's"
            )
        dropped = [name for names in self._order() for name in names if name not in set(saved)]
        if dropped:
            raise CheckpointError(
                f"the saved optimizer lacks parameters this one has: {', '.join(dropped[:5])}; "
                "make it with the same parameters"
            )
        for group, names in zip(groups, order, strict=True):
            group["params"] = [by_name[name] for name in names]

    def _add_names(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state[NAMES] = self._order()

    def _match_names(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Before PyTorch loads by order, bring the parameters into the saved order."""
        if NAMES in state:
            self._arrange(state[NAMES])
        elif self._seeds:
            raise CheckpointError(
                "the saved optimizer does not name its parameters, so those of seeds cannot be "
                "told apart; save the state of an optimizer made by gardener.optimizer(...)"
            )

    def _before_step(self, *_: Any) -> None:
        if self.measures_itself:
            self.sample_gradients()

    def _home(
        self, slot: str, parameter: nn.Parameter, source: nn.Parameter | None
    ) -> dict[str, Any]:
        """Return the group in which a seed's parameter belongs.

        That is the group of the parameter it was copied from, else the slot's own group, else the
        group of the host module in front of it, else the first. Among several, norms and biases go
        with norms and biases, which often have no weight decay.
        """
        groups = self.optimizer.param_groups
        for group in groups:
            if any(one is source for one in group["params"]):
                return group
        own = [group for group in groups if group.get(SLOT) == slot]
        # Norms and biases prefer a group without weight decay.
        pick = min if _is_flat(parameter) else max
        if own:
            return pick(own, key=_decays)
        host = self.garden.model.get_submodule(self.garden.slot_paths[slot])
        behind = {id(p) for p in host.parameters()}
        near = [g for g in groups if any(id(p) in behind for p in g["params"])] or groups[:1]
        shared = [group for group in groups if SLOT not in group]
        for candidates, known in ((near, behind), (shared, None)):
            alike = [g for g in candidates if _holds_kind(g, parameter, known)]
            if alike:
                return pick(alike, key=_decays)
        return near[0]

    def _add(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        group["params"].append(parameter)
        if "param_names" in group:
            group["param_names"].append(self._names()[id(parameter)])

    def _remove(self, parameter: nn.Parameter) -> None:
        for group in self.optimizer.param_groups:
            kept = [index for index, p in enumerate(group["params"]) if p is not parameter]
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [group[key][index] for index in kept]
        self.optimizer.state.pop(parameter, None)

    def _named(self) -> Iterable[tuple[Tensor, str]]:
        """Yield every parameter of the optimizer or the garden with a stable name."""
        seen: set[int] = set()
        for name, parameter in self.garden.named_parameters():
            seen.add(id(parameter))
            yield parameter, name
        for number, group in enumerate(self.optimizer.param_groups):
            outside = [p for p in group["params"] if id(p) not in seen]
            for position, parameter in enumerate(outside):
                yield parameter, f"outside.{number}.{position}"

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for parameter, name in self._named()}

    def _order(self) -> list[list[str]]:
        """Return the names of the parameters of each group, in their order."""
        names = self._names()
        return [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]


def copy_state(optimizer: Optimizer, source: Tensor, target: Tensor) -> None:
    """Copy the optimizer state of one parameter to another; groups stay."""
    if source in optimizer.state:
        # Shared tensors, `step` above all, would be counted up twice.
        optimizer.state[target] = tree_map(_clone, optimizer.state[source])
    else:
        optimizer.state.pop(target, None)


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _is_flat(parameter: Tensor) -> bool:
    """Return whether a parameter is a bias, or the scale of a norm."""
    return parameter.dim() < 2


def _decays(group: dict[str, Any]) -> bool:
    return bool(group.get("weight_decay"))


def _holds_kind(group: dict[str, Any], parameter: Tensor, known: set[int] | None) -> bool:
    """Return whether a group has a parameter of this kind, among the known ones if given."""
    return any(
        _is_flat(p) == _is_flat(parameter) and (known is None or id(p) in known)
        for p in group["params"]
    )


def slot_groups(garden: Garden) -> list[dict[str, Any]]:
    """Return a garden's parameters as groups: one for the host and one for every slot.

    So a later seed can have a learning rate of its own.
    """
    slots = [
        {"params": list(garden.slot_parameters(name)), SLOT: name} for name in garden.slot_names
    ]
    return [{"params": list(garden.host_parameters())}, *slots]


def make_optimizer(
    garden: Garden,
    factory: Callable[..., Optimizer],
    params: Iterable[Any] | None,
    options: dict[str, Any],
) -> CarriedOptimizer:
    """Build an optimizer over the garden (or over the given groups) and carry it."""
    chosen = list(garden.parameters()) if params is None else params
    return CarriedOptimizer(garden, factory(chosen, **options))


def _refuse_closure(optimizer: Optimizer) -> None:
    """Refuse an optimizer such as LBFGS, whose step computes the loss itself, several times."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} cannot train a network that grows: its step(closure) "
            "computes the loss several times and it takes no new parameters; use SGD, AdamW or "
            "another optimizer whose step() needs no closure"
        )


def _like(value: Any, parameter: Tensor, key: str) -> Any:
    """Put a restored state tensor on its parameter's device; step counters stay on theirs."""
    if not isinstance(value, Tensor):
        return value
    # The step counter of Adam lives on the CPU unless the optimizer is capturable.
    return value.clone() if key == "step" else value.to(parameter.device, copy=True)
