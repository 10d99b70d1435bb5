"""Garden: any `nn.Module` with slots in which seeds grow.

A garden wraps a model without changing it: one forward hook per slot hands the activation to the
slot. It stays an ordinary module (train/eval, `.to`, `state_dict`, `deepcopy`, autocast, compile,
export). The lifecycle is a `SlotTable` of one row; after every change `_sync` builds, frees,
freezes and re-aims the modules so that they agree with it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_names, immediate_table
from esper.kasmina.contribution import GradientSample, sample_gradients
from esper.kasmina.costs import RowCosts, row_costs, slot_costs, with_copies
from esper.kasmina.lifecycle import Applied, GardenConfig
from esper.kasmina.operations import check_immediate, make_command, parse_choice
from esper.kasmina.saving import baked_copy, read_garden, save_garden
from esper.kasmina.seedbed import HostContext, Seedbed, find_untrained, remember_loaded
from esper.kasmina.slot import shadow_loss, straight_through
from esper.kasmina.slot_table import (
    OperationResult,
    SlotTable,
    SlotView,
    decode_lifecycle,
    describe_result,
    encode_lifecycle,
)
from esper.kasmina.slots.placement import DeclaredAxes, Placed, SlotNames, place_slots, with_kin
from esper.kasmina.state import SlotState, inert_seeds
from esper.kasmina.wrapping import (
    Ties,
    WholeSave,
    connect,
    refuse_unsuitable,
    watch,
)
from esper.leyline.actions import Command, LifecycleOp
from esper.leyline.config import check_config, check_value
from esper.leyline.errors import CheckpointError, SlotError, UsageError, instead, reason_of
from esper.leyline.stages import STYLE_OF_ALGORITHM, AlphaCurve, BlendStyle
from esper.utils.manifest import restoring


class Garden(nn.Module):
    """A model with slots; calling it calls the model.

    Args:
        model: the host; it is used as it is, not copied.
        slots: dotted names of submodules whose output may be augmented (`*` stands for any part
            of a name, as in "blocks.*"), {name: submodule}, or the result of `suggest_slots`.
        example_input: one batch (a tensor, a tuple of arguments or a dict of them); not needed for
            slots with known shapes, as `load_garden` gives them.
        axes: the axes of the activations, such as "BTC" or "TBC": one name for all slots, or by
            slot, submodule or pattern. By default they are found by running the model.
        config: the life of seeds and the limits of growth.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: SlotNames | Placed,
        example_input: Any = None,
        *,
        axes: DeclaredAxes | None = None,
        config: GardenConfig | None = None,
    ) -> None:
        """Place the slots; nothing grows yet."""
        super().__init__()
        refuse_unsuitable(model)
        if any(isinstance(module, Garden) for module in model.modules()):
            raise SlotError(
                "the model already holds a Garden; go on with that one, or give its plain copy, "
                "garden.bake()"
            )
        if not isinstance(slots, Placed):
            slots = with_kin(place_slots(model, slots, example_input, axes), model, example_input)
        placements = slots.slots
        self.placed = slots
        """Where the slots are; for another garden around a model of the same making."""
        self.batch_axis = slots.batch_axis
        """The axis of the model's inputs that holds the samples."""
        self.config = check_config(config, GardenConfig)
        self.model = model
        self.host_flops = slots.host_flops
        """Operations of one sample's forward pass through the model alone."""
        self.seedbed = Seedbed(placements, self.config.training_mode, self.config.seed)
        self.slot_names = tuple(p.name for p in placements)
        self.slot_paths = {p.name: p.path for p in placements}
        self._table = SlotTable(self.costs(), self.config.lifecycle.earning)
        self._table_made_for: tuple[object, ...] = ()
        """What the costs and rules of the table were last worked out from."""
        self.ties = Ties()
        self._samples: dict[int, GradientSample] = {}
        # Amplitudes follow from the lifecycle; DDP need not send them around in every pass.
        self._ddp_params_and_buffers_to_ignore = [
            f"seedbed.slots.{index}.alpha" for index in range(len(placements))
        ]
        self._whole_save = WholeSave()
        paths = (placement.path for placement in placements)
        connect(model, dict(zip(paths, self.seedbed, strict=True)), self._whole_save)
        self.register_load_state_dict_pre_hook(_grow_to_match)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(remember_loaded)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with whatever has grown in its slots."""
        return self.model(*args, **kwargs)

    def __repr__(self) -> str:
        """Return one line: the model's class, its size and what is in the slots."""
        slots = ", ".join(
            f"{name}: {view.blueprint} {view.stage.name.lower()}" if view.blueprint else name
            for name, view in self.slots.items()
        )
        size = f"{self.count_parameters():,} parameters"
        return f"Garden({type(self.model).__name__}, {size}, slots [{slots}])"

    def __str__(self) -> str:
        """Return that line and the printed model, with the seeds behind its submodules."""
        return f"{self!r}\n{self.model!r}"

    @property
    def slots(self) -> Mapping[str, SlotView]:
        """Every slot by name, with its stage, alpha, blueprint and contribution."""
        return {name: SlotView(self, index) for index, name in enumerate(self.slot_names)}

    @property
    def state(self) -> SlotState:
        """The lifecycle state, tensors [1, S]."""
        return self._table.state

    @property
    def table(self) -> SlotTable:
        """The slots' state and what may become of it, as the settings and the model are now."""
        slots, names = self.placed.slots, blueprint_names()
        frozen = tuple(self._is_frozen(slot.path) for slot in slots)
        made_for = (self.config, names, self.count_host_parameters(), frozen)
        if made_for != self._table_made_for:
            self._table_made_for = made_for
            self._table.costs = self.costs()
            self._table.lifecycle = life = self.config.lifecycle.earning
            kinds = [(slot.topology, one) for slot, one in zip(slots, frozen, strict=True)]
            self._table.immediate = immediate_table(kinds, life.immediate, names)
        return self._table

    def host_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the model itself."""
        return self.model.parameters()

    def slot_parameters(self, name: str) -> Iterator[nn.Parameter]:
        """Yield the parameters of the seed and the gate in a slot."""
        return self.seedbed[self._index(name)].parameters()

    def count_parameters(self) -> int:
        """Return the trainable parameters now; a seed being blended out still counts."""
        return self.count_host_parameters() + int(self.state.params.sum())

    def count_host_parameters(self) -> int:
        """Return the trainable parameters of the model itself."""
        return sum(p.numel() for p in self.host_parameters() if p.requires_grad)

    def count_flops(self) -> int:
        """Return the operations of one sample's forward pass now; `host_flops` is the model's."""
        return self.host_flops + int(self.slot_flops().sum())

    def slot_flops(self) -> Tensor:
        """Return int64 [1, S]: operations per sample of every seed and its gate."""
        return self._table.flops()

    def costs(self) -> RowCosts:
        """Return what the model costs, and every blueprint at every slot, with the limits."""
        seeds = with_copies(slot_costs(list(self.seedbed)), [p.kin for p in self.placed.slots])
        return row_costs(
            1,
            seeds,
            host_params=self.count_host_parameters(),
            host_flops=self.host_flops,
            param_limit=self.param_limit,
            flop_limit=self.flop_limit,
        )

    @property
    def param_limit(self) -> int:
        """Most trainable parameters of the whole network, -1 without a limit."""
        whole = sum(parameter.numel() for parameter in self.host_parameters())
        return self.config.most_parameters(self.count_host_parameters(), whole)

    @property
    def flop_limit(self) -> int:
        """Most operations per sample of the whole network, -1 without a limit."""
        return self.config.most_flops(self.host_flops, is_counted=self.placed.is_counted)

    # -- operations ------------------------------------------------------------------------------

    def germinate(
        self,
        slot: str,
        blueprint: str,
        *,
        style: str | BlendStyle = "sigmoid_add",
        tempo: int = 5,
        alpha_target: float = 1.0,
        immediate: bool | None = None,
    ) -> OperationResult:
        """Put a new seed into an empty slot.

        Args:
            slot: its name.
            blueprint: what to grow.
            style: how the seed is mixed in.
            tempo: ticks over which it is blended in.
            alpha_target: the amplitude that it is blended in to.
            immediate: whether it has that amplitude at once, without style and tempo, and learns
                from the loss itself; by default what `config.lifecycle.immediate` says.
        """
        check_value("tempo", tempo, int, minimum=1)
        check_value("alpha_target", alpha_target, float, above=0, maximum=1)
        chosen, how = BLUEPRINTS.get(blueprint), parse_choice(BlendStyle, style, "style")
        index = self._index(slot)
        if immediate is None:
            immediate = bool(self.table.immediate[index, chosen.id])
        check_value("immediate", immediate, bool)
        check_immediate(chosen, self.placed.slots[index].topology, how, immediate)
        command = make_command(
            LifecycleOp.GERMINATE,
            index,
            blueprint=chosen.id,
            style=how,
            tempo=tempo,
            target=alpha_target,
        )
        return self.carry_out(command, immediate=immediate)

    def advance(self, slot: str) -> OperationResult:
        """Move a seed to its next stage, if its gate passes."""
        return self.carry_out(make_command(LifecycleOp.ADVANCE, self._index(slot)))

    def set_alpha_target(
        self,
        slot: str,
        target: float,
        *,
        speed: int = 5,
        curve: str | AlphaCurve = "linear",
        style: str | BlendStyle | None = None,
    ) -> OperationResult:
        """Aim a blended seed's amplitude at another value; keeps its style unless one is given."""
        check_value("speed", speed, int, minimum=0)
        check_value("target", target, float, above=0, maximum=1)
        index = self._index(slot)
        if style is None:
            style = STYLE_OF_ALGORITHM[int(self.state.algorithm[0, index])]
        command = make_command(
            LifecycleOp.SET_ALPHA_TARGET,
            index,
            style=parse_choice(BlendStyle, style, "style"),
            target=target,
            speed=speed,
            curve=parse_choice(AlphaCurve, curve, "curve"),
        )
        return self.carry_out(command)

    def prune(
        self, slot: str, *, speed: int = 0, curve: str | AlphaCurve = "linear"
    ) -> OperationResult:
        """Remove a seed, at once or by fading it out over `speed` ticks."""
        check_value("speed", speed, int, minimum=0)
        shape = parse_choice(AlphaCurve, curve, "curve")
        command = make_command(LifecycleOp.PRUNE, self._index(slot), speed=speed, curve=shape)
        return self.carry_out(command)

    def fossilize(self, slot: str) -> OperationResult:
        """Make a holding seed a permanent part of the network."""
        return self.carry_out(make_command(LifecycleOp.FOSSILIZE, self._index(slot)))

    def carry_out(self, command: Command, *, immediate: bool | None = None) -> OperationResult:
        """Apply a command of one row, and build what it asks for; `immediate` as in `germinate`."""
        self.notice_training()
        table, before = self.table, self.state
        with table.undone_by_error(self._sync):
            applied = table.apply(command, immediate=immediate)
            self._sync()
        return self.describe(before, command, applied)

    def describe(self, before: SlotState, command: Command, applied: Applied) -> OperationResult:
        """Return the result of a command that was applied in the state `before`."""
        gates = self.config.lifecycle.earning.gates
        return describe_result(before, command, applied, self.placed.slots, gates)

    def tick(self) -> None:
        """End the decision: move amplitudes, count cooldowns, forward automatic gates."""
        self.notice_training()
        self.table.tick()
        self._sync()

    def sync(self, state: SlotState) -> Tensor:
        """Set the lifecycle state [1, S]; return the size of every seed, int64 [1, S]."""
        self._table.state = state
        self._sync()
        return self.state.params

    def drop_inert(self) -> tuple[str, ...]:
        """Take out seeds that make no difference (`inert_seeds`); return their slots."""
        self.notice_training()
        inert = inert_seeds(self.state)
        gone = (inert & self.state.has_module)[0].tolist()
        names = tuple(name for name, is_gone in zip(self.slot_names, gone, strict=True) if is_gone)
        self._table.state = self.state.clear(inert)
        self._sync()
        return names

    def notice_training(self) -> None:
        """Mark the seeds that no optimizer has trained yet, and warn of them."""
        is_carried = bool(self.ties.optimizers)
        self.table.state = find_untrained(self.model, self.seedbed, self.state, is_carried)

    def measure_gradients(self) -> None:
        """Sample the seeds' gradients; call it after backward and before clipping."""
        self._samples |= sample_gradients(self.state, self.model, list(self.seedbed))

    def take_gradients(self) -> dict[int, GradientSample]:
        """Return and forget the gradients sampled so far, by slot."""
        samples, self._samples = self._samples, {}
        return samples

    def training_loss(self, closure: Callable[[nn.Module], Tensor]) -> Tensor:
        """Return the loss to call backward on: `closure(model)` gives the loss of one batch.

        With `training_mode="shadow"` a seed in TRAINING also learns from a second pass, in which
        it is fully blended and everything else is frozen. The value returned is that of the first.
        In the other mode this is just `closure(self)`.
        """
        loss = closure(self)
        shadowed = self.seedbed.shadowed() if self.training and torch.is_grad_enabled() else None
        if shadowed is None:
            return loss
        # The value of the first pass, gradients of both: a seed's NaN cannot reach the loss.
        return straight_through(loss, shadow_loss(self, shadowed, closure))

    # -- being an ordinary module ----------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Return the lifecycle as a byte tensor, so that a state_dict holds tensors alone."""
        self.notice_training()
        return encode_lifecycle(self.slot_names, self.state, self.seedbed.germinations)

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing: `_grow_to_match` restores the lifecycle before weights are loaded."""

    def save(
        self,
        folder: str | Path,
        *,
        state: Mapping[str, Any] | None = None,
        epoch: int | None = None,
    ) -> None:
        """Write the grown network into a folder; `esper.load_garden` reads it back.

        An earlier `state_dict` may be written instead of the present one, and the epoch it is of.
        """
        meta = {
            "placed": self.placed.to_mapping(),
            "config": self.config.to_mapping(),
            "epoch": epoch,
        }
        save_garden(self.state_dict() if state is None else state, folder, meta)

    def bake(self) -> nn.Module:
        """Return the network as a plain copy: a module of the host's class, without Esper.

        Outputs are the same; seeds that change nothing are left out, and a partly blended one
        keeps its amplitude. The copy can be trained, pickled, exported and grown again.
        """
        hanging = zip(self.placed.slots, self.seedbed, strict=True)
        return baked_copy(self.model, {p.path: (slot, p) for p, slot in hanging})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Garden:
        """Move or cast as any module does; amplitudes keep their own precision."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._sync()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return weights and lifecycle; `load_state_dict` grows the same seeds from them."""
        with self._whole_save.entered():
            return super().state_dict(*args, **kwargs)

    def follow(self, garden: Garden) -> None:
        """From now on hold the same seeds as another garden, with own weights.

        For averages of weights (EMA): a new seed starts as a copy, and one that is pruned there
        is pruned here. A `torch.optim.swa_utils.AveragedModel` calls this by itself.
        """
        if garden is self or garden.slot_names != self.slot_names:
            raise UsageError(
                f"a garden follows another one with the same slots ({', '.join(self.slot_names)}); "
                "write copied = copy.deepcopy(garden), then copied.follow(garden)"
            )
        garden.ties.followers.add(self)
        self.ties.mirrored.clear()
        self._mirror(garden)

    def __deepcopy__(self, memo: dict[int, Any]) -> Garden:
        """Return an independent garden with a weak reference to its original."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        copied.ties.original = weakref.ref(self)
        return copied

    def _is_frozen(self, path: str) -> bool:
        """Whether the submodule trains nothing; one without parameters is as the model is."""
        own = list(self.model.get_submodule(path).parameters())
        return not any(parameter.requires_grad for parameter in own or self.host_parameters())

    def _index(self, name: str) -> int:
        if name not in self.slot_names:
            hint = instead(name, self.slot_names, "slots:")
            raise SlotError(f"no slot is called {name!r}{hint}")
        return self.slot_names.index(name)

    def _sync(self, *, inherits: bool = True) -> None:
        """Make the modules agree with the lifecycle state.

        Args:
            inherits: whether optimizers give new copies the state of what they are copied from.
        """
        changed = self.seedbed.sync(self.state, HostContext(self.model, self.slot_paths))
        if not inherits:
            self.seedbed.forget_sources()
        if changed:
            self._table.resize(self.seedbed.sizes())
            self.ties.reconcile()
        for follower in list(self.ties.followers):
            follower._mirror(self)
        self.seedbed.forget_sources()

    def _mirror(self, garden: Garden) -> None:
        """Hold the seeds of another garden; those held already keep their weights."""
        self.seedbed.mirror(
            garden.seedbed, self.ties.mirrored, HostContext(self.model, self.slot_paths)
        )
        self._table.state = garden.state
        self._sync()
        self.ties.reconcile()


watch(Garden)


def _grow_to_match(garden: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Before weights are loaded, build the seeds that they belong to."""
    encoded = state_dict.get(f"{prefix}_extra_state")
    if encoded is None:
        return
    assert isinstance(garden, Garden)
    state, germinations = decode_lifecycle(encoded, garden.slot_names)
    garden.seedbed.clear()
    garden.take_gradients()
    garden._table.state = state
    garden._sync(inherits=False)
    garden.ties.reconcile()
    garden.seedbed.germinations = germinations
    for slot in garden.seedbed:
        # How a saved seed was trained is unknown: do not warn.
        slot.was_shadowed = slot.seed is not None
        # The weights just drawn are about to be replaced.
        slot.drawn = None


def load_garden(folder: str | Path, *, model: nn.Module) -> Garden:
    """Rebuild a saved garden around a fresh model of the same architecture.

    The model is not run: places and shapes of the slots were saved.
    """
    state, meta = read_garden(folder)
    with restoring(Path(folder)):
        placed = Placed.from_mapping(meta["placed"])
        config = GardenConfig.from_mapping(meta["config"])
    try:
        garden = Garden(model, placed, config=config)
        garden.load_state_dict(state)
    except SlotError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = reason_of(error)
        raise CheckpointError(
            f"{folder}: the model does not match the saved one: {reason}"
        ) from None
    return garden
