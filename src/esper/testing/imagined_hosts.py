"""Hosts that live by the real lifecycle while every measurement is made up.

Stages, amplitudes, cooldowns and legality are the real ones; losses, gradients and contributions
come from a generator. So signals of any number of hosts in the middle of their lives cost
milliseconds, for measuring and for tests of whatever reads signals. Nothing here trains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names, selectable
from esper.kasmina.contribution import participating, record_contributions
from esper.kasmina.gates import GateConfig
from esper.kasmina.gradients import GradientSample, record_gradients
from esper.kasmina.lifecycle import (
    Applied,
    LifecycleConfig,
    apply_command,
    record_epoch,
    rule_view,
    tick,
)
from esper.kasmina.signals import TrackerConfig, read_signals, start_tracking, track_epoch
from esper.kasmina.state import empty_state
from esper.leyline.actions import (
    HEAD_NAMES,
    PLACEHOLDERS,
    Actions,
    LifecycleOp,
    causal_table,
    decode_actions,
)
from esper.leyline.blueprints import Topology
from esper.leyline.randomness import generator
from esper.leyline.rules import Masks, build_masks, is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage

HORIZON = 60
_HOST_PARAMS = 6_418
_BUDGET = 500_000
_FREE_HEADS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""The heads whose masks depend on no other choice."""
_QUICK = LifecycleConfig(gates=GateConfig(min_training_epochs=2))


class ImaginedHosts:
    """R hosts with S slots each; `step` carries out one action per host and lives one epoch.

    Args:
        rows: number of hosts.
        slots: slots of each.
        seed: names the stream of made-up measurements.
        topology: decides which blueprints fit.
        enabled: bool [R, S], the slots in use; all by default.
        lifecycle: the constants of a seed's life; by default seeds may blend after two epochs.
    """

    def __init__(
        self,
        rows: int,
        slots: int = 3,
        seed: int = 0,
        *,
        topology: Topology = "cnn",
        enabled: Tensor | None = None,
        lifecycle: LifecycleConfig = _QUICK,
    ) -> None:
        """Start with empty slots, after a first epoch."""
        self.lifecycle = lifecycle
        self.state = empty_state(rows, slots)
        self.enabled = torch.ones(rows, slots, dtype=torch.bool) if enabled is None else enabled
        self.fits = torch.zeros(rows, slots, len(blueprint_names()), dtype=torch.bool)
        self.fits[:, :, list(selectable(topology))] = True
        self.last_op = torch.full((rows,), int(LifecycleOp.WAIT))
        self.last_success = torch.ones(rows, dtype=torch.bool)
        self._random = generator(seed, "imagined hosts")
        self._worth = torch.zeros(rows, slots, dtype=torch.float64)
        self._tracking = TrackerConfig()
        self.tracker = start_tracking(rows, self._tracking)
        self.live()

    @property
    def rows(self) -> int:
        """Number of hosts."""
        return self.state.rows

    def signals(self) -> Signals:
        """Return what a controller would see now."""

        def same(value: int) -> Tensor:
            return torch.full((self.rows,), value)

        return read_signals(
            self.state,
            self.tracker,
            enabled=self.enabled,
            max_epochs=same(HORIZON),
            host_params=same(_HOST_PARAMS),
            budget=same(_BUDGET),
            last_op=self.last_op,
            last_success=self.last_success,
            rolled_back=torch.zeros(self.rows, dtype=torch.bool),
            twin_score=torch.full((self.rows,), torch.nan),
        )

    def masks(self) -> Masks:
        """Return what is legal now."""
        view = rule_view(self.state, self.enabled, self.fits)
        return build_masks(view, self.lifecycle.effective_rules)

    def random_actions(self, prune_chance: float = 1.0) -> dict[str, Tensor]:
        """Return one legal action per host: a uniform op, then each head uniformly.

        PRUNE takes part in this share of the draws only: uniform ops prune nearly every seed
        before it has lived.
        """
        masks = self.masks()
        allowed = masks.op.clone()
        may_prune = torch.rand(self.rows, generator=self._random) < prune_chance
        allowed[:, LifecycleOp.PRUNE] &= may_prune
        rows = torch.arange(self.rows)
        op = self._draw(allowed)
        slot = self._draw(masks.slot_by_op[rows, op])
        legal = {head: getattr(masks, head) for head in _FREE_HEADS}
        legal["blueprint"] = masks.blueprint_by_slot[rows, slot]
        drawn = {head: self._draw(mask) for head, mask in legal.items()}
        drawn = {**drawn, "op": op, "slot": slot}
        counts = causal_table()[op].unbind(-1)
        return {
            head: torch.where(counts[at], drawn[head], int(PLACEHOLDERS[head]))
            for at, head in enumerate(HEAD_NAMES)
        }

    def step(self, actions: Actions) -> Applied:
        """Carry the actions out, tick, and live one epoch; return what became of them."""
        applied = self.apply(actions)
        self.state = tick(self.state, self.lifecycle)
        self.live()
        return applied

    def apply(self, actions: Actions) -> Applied:
        """Carry the actions out and nothing else."""
        self.state, applied = apply_command(
            self.state,
            decode_actions(actions),
            enabled=self.enabled,
            fits=self.fits,
            config=self.lifecycle,
        )
        self.last_op, self.last_success = actions["op"], applied.took_effect
        sizes = 100 * (1 + self.state.blueprint.clamp(min=0))
        self.state = self.state.where(self.state.has_module, params=sizes)
        return applied

    def live(self) -> None:
        """Make up one epoch's measurements and record them."""
        epoch = self.tracker.epoch.to(torch.float64) + 1
        state = self.state
        self._worth = torch.where(
            state.has_module, self._worth + self._normal(0.3), self._normal(1.0)
        )
        gain = (state.alpha * self._worth).sum(1)
        noise = self._normal(0.5)[:, 0]
        score = (90 * (1 - torch.exp(-epoch / 15)) + gain + noise).clamp(0, 100)
        loss = (2.3 * torch.exp(-epoch / 20) - 0.02 * gain + 0.02 * noise).clamp(min=0.01)
        state = record_epoch(state, score)
        learning = is_in(state.stage, (SeedStage.TRAINING, SeedStage.BLENDING))
        state = record_gradients(state, learning, self._gradients())
        members = participating(state)
        pairs = self._normal(0.5).unsqueeze(-1) * self._normal(1.0).unsqueeze(-2)
        both = members.unsqueeze(-1) & members.unsqueeze(-2)
        both &= ~torch.eye(state.num_slots, dtype=torch.bool)
        self.state = record_contributions(
            state,
            members,
            state.alpha * self._worth,
            self._normal(0.2).abs(),
            torch.where(both, pairs + pairs.transpose(1, 2), 0.0),
        )
        self.tracker = track_epoch(self.tracker, loss, score, self._tracking)

    def _gradients(self) -> GradientSample:
        vanishing, exploding = self._normal(1.0) > 1.5, self._normal(1.0) > 2.0
        return GradientSample(
            norm=self._normal(1.0).exp(),
            health=(1 - 0.2 * vanishing.double() - 0.8 * exploding.double()).clamp(0, 1),
            vanishing=vanishing,
            exploding=exploding,
            ratio=self._normal(0.3).exp(),
        )

    def _normal(self, scale: float) -> Tensor:
        shape = self.state.stage.shape
        return scale * torch.randn(shape, generator=self._random, dtype=torch.float64)

    def _draw(self, mask: Tensor) -> Tensor:
        """Return one choice per row that the mask allows, or any where it allows none."""
        weights = (mask | ~mask.any(-1, keepdim=True)).float()
        return torch.multinomial(weights, 1, generator=self._random).squeeze(-1)


def middle_aged_hosts(rows: int, slots: int = 3, seed: int = 0, epochs: int = 30) -> ImaginedHosts:
    """Return hosts that have acted at random for some epochs, pruning now and then."""
    hosts = ImaginedHosts(rows, slots, seed)
    for _ in range(epochs):
        hosts.step(hosts.random_actions(prune_chance=0.1))
    return hosts


def random_lives(
    rows: int, epochs: int, slots: int = 3, seed: int = 0
) -> list[tuple[Signals, Masks]]:
    """Return what hosts that act at random see, and what is legal for them, epoch by epoch."""
    hosts, seen = ImaginedHosts(rows, slots, seed), []
    for _ in range(epochs):
        seen.append((hosts.signals(), hosts.masks()))
        hosts.step(hosts.random_actions(prune_chance=0.1))
    return seen
