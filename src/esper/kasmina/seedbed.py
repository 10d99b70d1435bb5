"""The modules of all slots: builds, frees, freezes and blends seeds to match the lifecycle."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.kin import as_seed, grow_copies
from esper.kasmina.blueprints.registry import Blueprint, blueprint_by_id
from esper.kasmina.costs import count_copies
from esper.kasmina.lifecycle import TrainingMode
from esper.kasmina.slot import MIXING, GateNetwork, Slot, SlotMode
from esper.kasmina.slots.placement import Placement
from esper.kasmina.state import SlotState
from esper.leyline.errors import SlotError, reason_of, warn
from esper.leyline.slots import Symmetry, Topology, is_causal
from esper.leyline.stages import BLENDED_STAGES, AlphaAlgorithm, AlphaMode, SeedStage
from esper.utils.randomness import seeded

# ---- Seeds that nothing trains: their parameters stay as they were initialised


def fingerprint(seed: nn.Module) -> Tensor | None:
    """Return numbers that change with any parameter of a seed; None where there are none."""
    values = [p.detach().double() for p in seed.parameters() if not p.is_meta]
    if not values:
        return None
    # An optimizer that moves anything changes one sum or the other.
    return torch.stack([torch.stack([v.sum(), v.square().sum()]).cpu() for v in values])


def find_untrained(
    host: nn.Module, slots: Iterable[Slot], state: SlotState, is_carried: bool
) -> SlotState:
    """Return the state with untrained seeds marked; warn of those that no optimizer trains.

    Args:
        host: the model; where it is trained and a seed is not, a warning is due.
        slots: the slots with their seeds.
        state: the lifecycle, one row.
        is_carried: whether an optimizer is kept in step with growth, so that no warning is due.
    """
    untrained = state.untrained.clone()
    learning = [p for p in host.parameters() if p.requires_grad and not p.is_inference()]
    version = sum(parameter._version for parameter in learning)
    for index, slot in enumerate(slots):
        if slot.seed is None or slot.drawn is None:
            continue
        now = fingerprint(slot.seed)
        is_same = now is not None and torch.equal(now, slot.drawn)
        untrained[0, index] = is_same
        if not is_same:
            slot.drawn = slot.host_version = None
            continue
        if int(state.stage[0, index]) > int(SeedStage.GERMINATED) and not is_carried:
            _look_for_optimizer(slot, version, is_host_frozen=not learning)
        slot.host_version = version
    return state.where(torch.ones_like(untrained), untrained=untrained)


def remember_loaded(garden: Any, _: Any) -> None:
    """After weights were loaded, take those of untrained seeds for their initial ones."""
    for index, slot in enumerate(garden.seedbed):
        if slot.seed is not None and bool(garden.state.untrained[0, index]):
            slot.drawn = fingerprint(slot.seed)


def _look_for_optimizer(slot: Slot, version: int, *, is_host_frozen: bool) -> None:
    """Warn, once, where the host was trained since the seed came, but the seed was not."""
    was_trained = slot.host_version is not None and version > slot.host_version
    if is_host_frozen:
        # Nothing of the host moves; a gradient that is still there tells the same.
        was_trained = any(parameter.grad is not None for parameter in slot.parameters())
    if was_trained and not slot.is_known_untrained:
        slot.is_known_untrained = True
        warn(
            f"nothing trains the seed in slot {slot.name!r}: the network was trained, but the "
            "seed's parameters are in no optimizer that did; make the optimizer by "
            "gardener.optimizer(torch.optim.AdamW, lr=...), or add "
            f"garden.slot_parameters({slot.name!r}) to yours"
        )


Key = tuple[int, int, int]
"""(run seed, slot, germinations so far)."""


def draw_seed(
    blueprint: Blueprint, channels: int, topology: Topology, symmetry: Symmetry, key: Key
) -> nn.Module:
    """Return a fresh seed on the CPU."""
    with seeded(*key, "seed"):
        return blueprint.build(channels, topology, is_causal=is_causal(symmetry))


def draw_gate(channels: int, topology: Topology, key: Key) -> nn.Module:
    """Return a fresh gate network on the CPU."""
    with seeded(*key, "gate"):
        return GateNetwork(channels, topology)


def draw_probe(shape: tuple[int, ...], key: Key) -> Tensor:
    """Return random activations of this shape, to try a fresh seed on."""
    with seeded(*key, "probe"):
        return torch.randn((2, *shape[1:]))


@dataclass(frozen=True, slots=True)
class HostContext:
    """The host around the slots: gives new seeds their device, precision and blocks to copy."""

    model: nn.Module
    paths: Mapping[str, str]
    """The submodule in front of every slot."""

    def block(self, slot: str) -> nn.Module:
        """Return the submodule in front of a slot."""
        return self.model.get_submodule(self.paths[slot])

    def reference(self, slot: str) -> Tensor | None:
        """Return a host tensor near the slot: its device and precision are the seed's."""
        near = next(self.block(slot).parameters(), None)
        return near if near is not None else next(self.model.parameters(), None)


class Seedbed(nn.Module):
    """All slots of one garden, in action order."""

    def __init__(
        self, placements: Sequence[Placement], training_mode: TrainingMode, seed: int
    ) -> None:
        """Create empty slots; `seed` names the random streams of initial weights."""
        super().__init__()
        self.slots = nn.ModuleList(Slot(p.name, p.axes, p.shape, p.symmetry) for p in placements)
        self.training_mode: TrainingMode = training_mode
        self.run_seed = seed
        self.germinations = 0
        for slot in self:
            slot.is_straight_through = training_mode == "straight_through"

    def __iter__(self) -> Iterator[Slot]:
        for slot in self.slots:
            assert isinstance(slot, Slot)
            yield slot

    def __getitem__(self, index: int) -> Slot:
        slot = self.slots[index]
        assert isinstance(slot, Slot)
        return slot

    def sizes(self) -> Tensor:
        """Return int64 [1, S]: parameters of every seed with its gate."""
        return torch.tensor([[sum(p.numel() for p in slot.parameters()) for slot in self]])

    def clear(self) -> None:
        """Free every module, so that another topology can be built from nothing."""
        for slot in self:
            slot.seed = slot.gate = None
            slot.copies = 0
            slot.mode = int(SlotMode.PASS)
            slot.frozen = slot.drawn = slot.host_version = None
            slot.sources = []

    def sync(self, state: SlotState, host: HostContext) -> bool:
        """Make the modules agree with the state; return whether parameters came or went."""
        changed = False
        for index, slot in enumerate(self):
            changed |= self._sync_seed(index, slot, state, host)
            changed |= self._sync_gate(index, slot, state, host)
            _settle_amplitude(slot, host.reference(slot.name))
            self._sync_mode(index, slot, state)
            _sync_freeze(index, slot, state)
        return changed

    def mirror(self, other: Seedbed, known: weakref.WeakSet[nn.Module], host: HostContext) -> None:
        """Hold what another seedbed holds: copies of its modules, of each new one once.

        Where the other has just copied blocks, those of this host and seedbed are copied.

        Args:
            other: the seedbed that is followed.
            known: its modules of which there are copies here; new ones are added.
            host: what stands around this seedbed.
        """
        for mine, theirs in zip(self, other, strict=True):
            for name in ("seed", "gate"):
                own, module = getattr(mine, name), getattr(theirs, name)
                if own is module is None or (own is not None and module in known):
                    continue
                if module is not None:
                    known.add(module)
                    if name == "seed" and theirs.sources:
                        block = host.block(mine.name)
                        copies, _ = grow_copies(block, mine.copied_blocks, theirs.copies)
                        module = as_seed(copies)
                    else:
                        module = self._settle(copy.deepcopy(module), host.reference(mine.name))
                setattr(mine, name, module)
                if name == "seed":
                    mine.copies = theirs.copies
                mine.frozen = theirs.frozen
                mine.drawn = None
        self.germinations = other.germinations

    def sources(self) -> dict[int, nn.Parameter]:
        """Return the source of every parameter of new copies, by the id of the copy."""
        return {id(new): old for slot in self for new, old in slot.sources}

    def forget_sources(self) -> None:
        """Forget where copies come from, once optimizers have copied their state."""
        for slot in self:
            slot.sources = []

    def shadowed(self) -> Slot | None:
        """Return the slot whose seed learns from a shadow pass, if there is one."""
        isolated = (slot for slot in self if slot.mode == SlotMode.ISOLATE)
        return next(isolated, None) if self.training_mode == "shadow" else None

    @contextmanager
    def configured(self, configurations: Tensor, samples: int | None) -> Iterator[None]:
        """Within the block, a batch of K x samples runs configuration k on its k-th part.

        `configurations` is bool [K, S]; a slot that is on keeps its amplitude. With one
        configuration and samples=None it holds for batches of any size.
        """
        changed: list[Slot] = []
        try:
            for index, slot in enumerate(self):
                on = configurations[:, index]
                if slot.mode not in MIXING or bool(on.all()):
                    continue
                alphas = torch.where(on.to(slot.alpha.device), slot.alpha, 0.0)
                slot.sample_alphas = alphas.repeat_interleave(samples) if samples else alphas
                changed.append(slot)
            yield
        finally:
            for slot in changed:
                slot.sample_alphas = None

    def _sync_seed(self, index: int, slot: Slot, state: SlotState, host: HostContext) -> bool:
        present = bool(state.has_module[0, index])
        wanted = count_copies(int(state.doublings[0, index])) if slot.copies else 0
        if present and (slot.seed is None or slot.copies != wanted):
            slot.seed = self._build(index, slot, state, host)
            slot.was_shadowed = False
            slot.drawn, slot.host_version = fingerprint(slot.seed), None
            slot.is_known_untrained = False
            return True
        if not present and slot.seed is not None:
            slot.copies = 0
            slot.seed = slot.frozen = slot.drawn = slot.host_version = None
            return True
        return False

    def _sync_gate(self, index: int, slot: Slot, state: SlotState, host: HostContext) -> bool:
        gated = int(state.algorithm[0, index]) == int(AlphaAlgorithm.GATE)
        wanted = gated and slot.seed is not None
        if wanted and slot.gate is None:
            gate = draw_gate(slot.channels, slot.topology, self._key(index))
            slot.gate = self._settle(gate, host.reference(slot.name))
            return True
        if not wanted and slot.gate is not None:
            slot.gate = None
            return True
        return False

    def _build(self, index: int, slot: Slot, state: SlotState, host: HostContext) -> nn.Module:
        """Build a seed from its own random stream and check its output shape, or copy blocks."""
        blueprint = blueprint_by_id(int(state.blueprint[0, index]))
        if blueprint.is_copy:
            return self._copy(slot, count_copies(int(state.doublings[0, index])), host)
        key = self._key(index)
        seed = draw_seed(blueprint, slot.channels, slot.topology, slot.symmetry, key)
        probe = draw_probe(slot.shape, self._key(index))
        with torch.no_grad():
            out = seed.eval()(probe)
        if not isinstance(out, Tensor) or out.shape != probe.shape:
            shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise SlotError(
                f"blueprint {blueprint.name!r} turns {list(probe.shape)} into {shape}; "
                "a seed must keep the shape of its input"
            )
        self.germinations += 1
        return self._settle(seed, host.reference(slot.name))

    def _copy(self, slot: Slot, count: int, host: HostContext) -> nn.Module:
        """Return copies of the block in front of a slot; note the source of each new parameter."""
        block = host.block(slot.name)
        try:
            copies, slot.sources = grow_copies(block, slot.copied_blocks, count)
        except Exception as error:
            raise SlotError(
                f"the block in front of slot {slot.name!r} cannot be copied: {reason_of(error)}"
            ) from error
        slot.copies = count
        self.germinations += 1
        return as_seed(copies)

    def _key(self, index: int) -> Key:
        return self.run_seed, index, self.germinations

    def _settle(self, module: nn.Module, like: Tensor | None) -> nn.Module:
        """Give a new module the device, precision and mode of the host."""
        if like is not None:
            module = module.to(device=like.device, dtype=_precision(like))
        return module.train(self.training)

    def _sync_mode(self, index: int, slot: Slot, state: SlotState) -> None:
        stage = SeedStage(int(state.stage[0, index]))
        alpha = float(state.alpha[0, index])
        before = slot.mode
        slot.algorithm = int(state.algorithm[0, index])
        slot.stage = stage.name.lower()
        if slot.seed is not None:
            slot.blueprint = blueprint_by_id(int(state.blueprint[0, index])).name
        if stage is SeedStage.TRAINING:
            slot.mode = int(SlotMode.ISOLATE)
        elif stage in BLENDED_STAGES and alpha > 0:
            is_whole = slot.copies > 0 and alpha == 1 and slot.algorithm == int(AlphaAlgorithm.ADD)
            # h + 1 * (s - h) would differ from s in its last bits, and a deeper network computes s.
            slot.mode = int(SlotMode.REPLACE if is_whole else SlotMode.BLEND)
        else:
            slot.mode = int(SlotMode.PASS)
        slot.alpha.fill_(alpha)
        starts_blending = before == SlotMode.ISOLATE and stage is SeedStage.BLENDING
        if starts_blending and self.training_mode == "shadow" and not slot.was_shadowed:
            warn(
                f"the seed in slot {slot.name!r} was never trained: with training_mode='shadow' "
                "compute the loss by garden.training_loss(closure)"
            )


def _sync_freeze(index: int, slot: Slot, state: SlotState) -> None:
    """Freeze a seed while it is blended out; gradients still pass through to the host.

    Afterwards exactly the parameters that were trainable before are trainable again.
    """
    fading = int(state.alpha_mode[0, index]) == int(AlphaMode.DOWN)
    if fading and slot.frozen is None:
        slot.frozen = tuple(name for name, p in slot.named_parameters() if p.requires_grad)
        for parameter in slot.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
    elif not fading and slot.frozen is not None:
        for name, parameter in slot.named_parameters():
            if name in slot.frozen:
                parameter.requires_grad_(True)
        slot.frozen = None


def _settle_amplitude(slot: Slot, like: Tensor | None) -> None:
    """Keep the amplitude on the host's device, in float64 whatever the host's precision."""
    device = slot.alpha.device if like is None else like.device
    # Apple's GPUs have no float64.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if slot.alpha.device != device or slot.alpha.dtype != dtype:
        slot.alpha = slot.alpha.to(device=device, dtype=dtype)


def _precision(like: Tensor) -> torch.dtype:
    return like.dtype if like.is_floating_point() else torch.float32
