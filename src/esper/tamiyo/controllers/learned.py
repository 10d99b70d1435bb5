"""The learned policy as a controller, greedy or sampling, and explanations of its decisions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, LifecycleOp, choice_text, head_values
from esper.leyline.controller import CALM_SHARE, ControllerContext, GrowthLimits, is_too_short
from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.reasons import Why, describe_progress
from esper.leyline.records import Plain
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import NOOP
from esper.leyline.stages import TEMPO_EPOCHS
from esper.tamiyo.controllers.policy_file import Policy, find_policy, load_policy
from esper.tamiyo.controllers.registry import check_rows, draw_heads, register_controller
from esper.tamiyo.networks import Network
from esper.tamiyo.networks.decision import OP, PolicyStep
from esper.tamiyo.networks.layers import Hidden, clear_rows
from esper.tamiyo.policy.distribution import masked_log_softmax, probabilities
from esper.tamiyo.policy.observation import padded_slots
from esper.utils.manifest import MANIFEST_FILE

# ---- Explanations: probabilities, values, and the most influential features


CONTRIBUTORS = 3
"""Number of features in an explanation."""

_SHOWN = 3
"""Number of choices of a head in a line of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """One feature and its influence on a decision."""

    feature: str
    value: float
    """The feature before standardisation; a blueprint by its id."""
    influence: float
    """Drop of the op's log-probability, or of the value, when the feature is set to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Plain):
    """One decision of one row: choices, probabilities, values and influential features."""

    op: str
    choices: dict[str, str]
    """The choice of every head that the op uses."""
    probabilities: dict[str, dict[str, float]]
    """Probability of every choice of every head; 0 for illegal ones."""
    values: dict[str, float]
    """Expected return of every op; empty if the critic does not see the op."""
    value: float
    """The baseline."""
    contributors: tuple[Contributor, ...]
    """The most influential features, strongest first."""
    measured_on: Literal["op", "value"]
    """What the influence is measured on: the op taken, or the value if no other op was legal."""

    def lines(self) -> list[str]:
        """Return the explanation as lines of text."""
        chances = self.probabilities["op"]
        legal = {op: value for op, value in self.values.items() if chances[op] > 0}
        how = [
            f"{head} {_words(self.probabilities[head], '{:.0%}', most=_SHOWN)}"
            for head in self.choices
        ]
        about = "log-probability" if self.measured_on == "op" else "value"
        because = [
            f"{each.feature} {each.value:.2f} ({each.influence:+.2g})" for each in self.contributors
        ]
        lines = [f"ops: {_words(chances, '{:.0%}')}"]
        if how:
            lines.append(f"then: {'; '.join(how)}")
        lines.append(f"values: {_words(legal, '{:+.2f}') or f'{self.value:+.2f}'}")
        return [*lines, f"because of (on {about}): {', '.join(because)}"]


@torch.no_grad()
def _explain(
    network: Network, decision: _Decision, slot_names: Sequence[str], blueprint_names: Sequence[str]
) -> Explanation:
    """Explain the decision of one row.

    Args:
        network: the policy that decided.
        decision: the decision without its row axis.
        slot_names: names of the host's slots.
        blueprint_names: names in the order of the network's ids.
    """
    step, blueprints = decision.step, decision.blueprints
    names = {
        head: [choice_text(head, value) for value in values]
        for head, values in head_values(slot_names, blueprint_names).items()
    }
    probs = probabilities(step.choice_log_probs)
    by_head = {
        head: dict(zip(names[head], probs[index].tolist(), strict=False))
        for index, head in enumerate(HEAD_NAMES)
    }
    op = LifecycleOp(int(step.op))
    sees_op = network.config.critic != "state"
    values = dict(zip(names["op"], step.op_values.tolist(), strict=True)) if sees_op else {}
    legal = step.masks[OP, : network.table.sizes["op"]]
    measured_on: Literal["op", "value"] = "op" if int(legal.sum()) > 1 else "value"
    influence = _occlude(network, decision, legal, measured_on)
    labels = network.config.observation.labels(slot_names, blueprint_names)
    slots = padded_slots(slot_names, len(blueprints))
    labels = [*labels, *(f"{slot}.blueprint" for slot in slots)]
    shown = [*decision.raw.tolist(), *blueprints.tolist()]
    strongest = influence.abs().topk(CONTRIBUTORS).indices.tolist()
    return Explanation(
        op=op.name,
        choices={head: names[head][int(step[head])] for head in CAUSAL_HEADS[op] if head != "op"},
        probabilities=by_head,
        values=values,
        value=float(step.value),
        contributors=tuple(
            Contributor(
                feature=labels[index], value=float(shown[index]), influence=float(influence[index])
            )
            for index in strongest
        ),
        measured_on=measured_on,
    )


def _occlude(
    network: Network, decision: _Decision, legal: Tensor, measured_on: Literal["op", "value"]
) -> Tensor:
    """Return the influence of every feature and of every slot's blueprint, by occlusion."""
    features, slots = len(decision.observation), len(decision.blueprints)
    cases = features + slots + 1
    states = decision.observation.repeat(cases, 1)
    states[:features].fill_diagonal_(0.0)
    indices = decision.blueprints.repeat(cases, 1)
    indices[features : features + slots].fill_diagonal_(-1)
    state, cell = decision.hidden
    before = (state.expand(-1, cases, -1), cell.expand(-1, cases, -1))
    logits, judged, _ = network.respond(states, indices, before)
    log_probs = masked_log_softmax(network.table.op_logits(logits), legal)
    if measured_on == "op":
        score = log_probs[:, int(decision.step.op)]
    else:
        score = (probabilities(log_probs) * network.op_values(judged)).sum(-1)
    return score[-1] - score[:-1]


def _words(numbers: Mapping[str, float], form: str, most: int | None = None) -> str:
    """Return the largest numbers with their names, without those that are 0."""
    shown = sorted(numbers.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {form.format(number)}" for name, number in shown if number)


URGE_MEMORY = 0.8
"""Decay of urges per step. A probability of 1/8 that persists is enough to act; one of 1/100, which
is left over from exploration, never is."""


def follow_urges(urges: Tensor, chances: Tensor, legal: Tensor) -> tuple[Tensor, Tensor]:
    """Return the op of every row, int64 [R], and the remaining urges [R, ops].

    Taking the likeliest op of every step would not be greedy over an episode: a policy that
    germinates with probability 0.4 per step has most likely done so after two steps, but WAIT is
    the likeliest op of each. So the probabilities of an op add up, with decay, over the steps in
    which it is legal, and the op is taken when the sum exceeds a half.

    Args:
        urges: float32 [R, ops], the sums from earlier steps.
        chances: float32 [R, ops], the probability of every op now.
        legal: bool [R, ops].
    """
    urges = torch.where(legal, URGE_MEMORY * urges + chances, 0.0)
    urges[:, LifecycleOp.WAIT] = 0.5
    op = urges.argmax(1)
    return op, urges.scatter(1, op.unsqueeze(1), 0.0)


def looks_at(max_epochs: Tensor, learned: int) -> int:
    """Return how many steps the policy takes per epoch: 1, and more in a short run.

    A policy has learned after how many steps to act, whatever the length of the run: in a run of
    ten epochs it would germinate too late. Rows that are played together count as the longest.

    Args:
        max_epochs: int64 [R], epochs of every run.
        learned: epochs of the shortest runs that the policy was trained on; 0 if not known.
    """
    return max(1, round(CALM_SHARE * learned / int(max_epochs.max())))


def hurry(tempo: Tensor, max_epochs: Tensor, learned: int) -> Tensor:
    """Return the tempo of every row, replaced by the fastest one in short runs."""
    fastest = TEMPO_EPOCHS.index(min(TEMPO_EPOCHS))
    return torch.where(max_epochs.to(tempo.device) < CALM_SHARE * learned, fastest, tempo)


@dataclass(frozen=True, slots=True)
class _Decision:
    """The last decision with its inputs, for `explain` and `reasons`."""

    raw: Tensor
    observation: Tensor
    blueprints: Tensor
    hidden: Hidden
    step: PolicyStep
    could_germinate: Tensor
    """bool [R]"""
    is_measured: Tensor
    """bool [R], whether all measurements were finite; where not, the row waits."""
    signals: Signals


@register_controller("learned")
class LearnedController:
    """Acts by a trained network, by default without the probability floors of exploration.

    A draw depends only on the seed, the row and the step. So a row does not depend on the number of
    rows, and a restored controller continues with the same draws. A row that was rolled back starts
    with an empty LSTM state.

    Args:
        policy: the network with its observation statistics and its blueprints.
        context: the slots, blueprints and seed of the run.
        greedy: draw nothing: take the op by `follow_urges`, and the likeliest choice of each head.
        explore: keep the floors, as in a rollout.

    Raises:
        UsageError: The host has more slots than the policy serves.
    """

    def __init__(
        self,
        policy: Policy,
        context: ControllerContext,
        *,
        greedy: bool = False,
        explore: bool = False,
    ) -> None:
        self.policy = policy.fitted(context)
        self.greedy, self.explore = greedy, explore
        self._context = context
        self._ids = _blueprint_ids(self.policy, context)
        self._step = 0
        self._hidden: Hidden | None = None
        self._urges = torch.zeros(0)
        self._last: _Decision | None = None

    @property
    def limits(self) -> GrowthLimits:
        """The limits on growth that its policy was trained under."""
        return self.policy.limits

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> LearnedController:
        """Return the controller that samples from the policy in a folder."""
        return cls(load_named("learned", argument), context)

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start at the first step with empty LSTM states, on this device."""
        self.policy.to(device)
        self._hidden = self.policy.network.initial_hidden(rows)
        self._urges = torch.zeros(rows, len(LifecycleOp), device=self._hidden[0].device)
        self._step = 0
        self._last = None

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return the policy's action for every row."""
        check_rows("policy", 0 if self._hidden is None else self._hidden[0].shape[1], signals)
        assert self._hidden is not None, "nobody is shown no rows"
        device = self._hidden[0].device
        with torch.no_grad():
            raw, blueprints = self._observe(self._own_signals(signals), device)
            # A network whose loss is not finite was not measured, so there is nothing to decide by.
            is_measured = raw.isfinite().all(1) & _has_finite_loss(signals).to(device)
            raw = torch.where(raw.isfinite(), raw, 0.0)
            observation = self.policy.normalizer.normalize(raw)
        rolled_back = signals.rolled_back.to(device)
        before = clear_rows(self._hidden, rolled_back)
        uniforms = None
        if not self.greedy:
            keys = [(self._context.seed, row, self._step) for row in range(signals.rows)]
            uniforms = torch.stack([draw_heads(*key) for key in keys]).to(device)

        def decide(legal: Masks) -> PolicyStep:
            return self.policy.network.get_action(
                observation,
                legal,
                blueprint_indices=blueprints,
                hidden=before,
                deterministic=self.greedy,
                explore=self.explore,
                uniforms=uniforms,
            )

        own = _only_wait(self._own_masks(masks, device), ~is_measured)
        remembered = before
        for _ in range(1, looks_at(signals.max_epochs, self.policy.horizon)):
            # Only the last decision of an epoch is carried out.
            before = decide(own).hidden
        step = decide(own)
        if self.greedy:
            self._urges[rolled_back] = 0.0
            op, self._urges = follow_urges(self._urges, step.op_chances, own.op)
            if not torch.equal(op, step.op):
                # Decide the other heads for this op, but report the probabilities of all ops.
                only = F.one_hot(op, len(LifecycleOp)).bool()
                step = decide(replace(own, op=only)).with_op_of(step)
        could_germinate = own.op[:, LifecycleOp.GERMINATE]
        self._last = _Decision(
            raw, observation, blueprints, before, step, could_germinate, is_measured, signals
        )
        measured = is_measured[:, None]
        state, cell = zip(step.hidden, remembered, strict=True)
        self._hidden = (torch.where(measured, *state), torch.where(measured, *cell))
        self._step += 1
        actions = self._host_actions(step, masks)
        actions["tempo"] = hurry(actions["tempo"], signals.max_epochs, self.policy.horizon)
        return actions

    def _observe(self, signals: Signals, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the observation and the blueprints that the policy is shown."""
        return self.policy.layout.observe(signals, device)

    def reasons(self) -> Sequence[str]:
        """Return why each row waited at its last decision, where it could have germinated."""
        last = self._last
        if last is None:
            return ()
        waited = (last.step.op == LifecycleOp.WAIT) & last.could_germinate
        chances = last.step.op_chances[:, LifecycleOp.GERMINATE]
        pairs = enumerate(zip(waited.tolist(), chances.tolist(), strict=True))
        reasons = [self._why_waited(row, chance) if has else "" for row, (has, chance) in pairs]
        known = zip(last.is_measured.tolist(), reasons, strict=True)
        return [reason if is_measured else Why.NOT_FINITE for is_measured, reason in known]

    def _why_waited(self, row: int, chance: float) -> str:
        assert self._last is not None
        signals, learned = self._last.signals, self.policy.horizon
        epoch, horizon = int(signals.epoch[row]), int(signals.max_epochs[row])
        if is_too_short(horizon, learned):
            return f"{Why.SHORT_RUN} ({horizon} epochs instead of {learned} or more)"
        progress = describe_progress(signals.loss_history[row].tolist(), epoch, horizon)
        return f"{Why.LEARNED} (chance of germinating {100 * chance:.0f} %, {progress})"

    def decides(self, row: int = 0) -> bool:
        """Return whether the policy decides in a row, and not a fallback."""
        return True

    def explain(self, row: int = 0) -> Explanation:
        """Return the explanation of a row's last decision."""
        last = self._last
        if last is None:
            raise UsageError("there is no decision to explain yet; call act() first")
        if not 0 <= row < len(last.raw):
            raise UsageError(f"row must be 0 to {len(last.raw) - 1}, got {row}")
        state, cell = last.hidden
        one = replace(
            last,
            raw=last.raw[row],
            observation=last.observation[row],
            blueprints=last.blueprints[row],
            hidden=(state[:, row : row + 1], cell[:, row : row + 1]),
            step=last.step.row(row),
        )
        names = self._context.slot_names
        return _explain(self.policy.network, one, names, self.policy.blueprint_names)

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the LSTM state and urges of every row."""
        if self._hidden is None:
            return {"step": self._step, "state": None, "cell": None, "urges": None}
        state, cell = self._hidden
        return {
            "step": self._step,
            "state": state.clone(),
            "cell": cell.clone(),
            "urges": self._urges.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` returned."""
        self._step = int(state["step"])
        self._last = None
        if state["state"] is None:
            self._hidden = None
            return
        device = self.policy.network.floors.device
        self._hidden = (state["state"].to(device).clone(), state["cell"].to(device).clone())
        self._urges = state["urges"].to(device).clone()

    # Host and policy may number blueprints differently, so they are matched by name. The policy
    # never chooses a blueprint that it does not know; a seed of one reads as noop.

    def _ids_of(self, blueprints: int) -> Tensor | None:
        """Return the policy's id of each of the host's blueprints, -1 for unknown ones.

        Blueprints beyond those of the context are unknown. None if all ids are equal.
        """
        ids = F.pad(self._ids, (0, blueprints - len(self._ids)), value=-1)
        own = torch.arange(len(self.policy.blueprint_names))
        return None if torch.equal(ids, own) else ids

    def _own_signals(self, signals: Signals) -> Signals:
        ids = self._ids_of(signals.seed_params.shape[-1])
        if ids is None:
            return signals
        table = ids.to(signals.blueprint.device)
        known = table[signals.blueprint.clamp(min=0)].clamp(min=NOOP)
        return replace(
            signals,
            blueprint=torch.where(signals.blueprint < 0, -1, known),
            seed_params=self._own_columns(signals.seed_params, ids, -1),
            seed_flops=self._own_columns(signals.seed_flops, ids, -1),
        )

    def _own_columns(self, table: Tensor, ids: Tensor, missing: float) -> Tensor:
        """Return a table over the host's blueprints, [..., B], in the order of the policy's."""
        ids = ids.to(table.device)
        own = table.new_full((*table.shape[:-1], len(self.policy.blueprint_names)), missing)
        own[..., ids[ids >= 0]] = table[..., ids >= 0]
        return own

    def _own_masks(self, masks: Masks, device: torch.device) -> Masks:
        ids = self._ids_of(masks.blueprint_by_slot.shape[-1])
        if ids is not None:
            own = self._own_columns(masks.blueprint_by_slot, ids, False)
            slots = masks.slot_by_op.clone()
            slots[:, LifecycleOp.GERMINATE] &= own.any(-1)
            masks = replace(
                masks, blueprint_by_slot=own, slot_by_op=slots, op=masks.op & slots.any(-1)
            )
        return masks.to(device)

    def _host_actions(self, step: PolicyStep, masks: Masks) -> dict[str, Tensor]:
        device = masks.op.device
        actions = {head: values.clone().to(device) for head, values in step.items()}
        ids = self._ids_of(masks.blueprint_by_slot.shape[-1])
        if ids is not None:
            # The chosen blueprint is legal, so it is one of the host's.
            back = torch.zeros(len(self.policy.blueprint_names), dtype=torch.int64)
            back[ids[ids >= 0]] = (ids >= 0).nonzero().squeeze(-1)
            actions["blueprint"] = back.to(device)[actions["blueprint"]]
        return actions


@register_controller("greedy")
class GreedyController(LearnedController):
    """The learned controller with `greedy=True`."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> GreedyController:
        """Return the controller that acts greedily by the policy in a folder."""
        return cls(load_named("greedy", argument), context, greedy=True)


def load_named(name: str, argument: str | None) -> Policy:
    """Return the policy in the folder that was given to a controller."""
    if not argument:
        raise UsageError(f"controller {name!r} needs the folder of a policy, as in {name}:FOLDER")
    folder = find_policy(argument)
    try:
        return load_policy(folder)
    except CheckpointError as error:
        # A saved state is damaged; without a manifest the user named the wrong folder.
        if os.path.exists(folder / MANIFEST_FILE):
            raise
        raise UsageError(str(error)) from error


def _has_finite_loss(signals: Signals) -> Tensor:
    """Return bool [R]: whether the validation loss and score of a row are finite."""
    return signals.val_loss.isfinite() & signals.val_score.isfinite()


def _only_wait(masks: Masks, rows: Tensor) -> Masks:
    """Return masks that allow nothing but WAIT in the rows at `rows`, bool [R]."""
    is_wait = torch.arange(len(LifecycleOp), device=rows.device) == LifecycleOp.WAIT
    return replace(masks, op=masks.op & (is_wait | ~rows[:, None]))


def _blueprint_ids(policy: Policy, context: ControllerContext) -> Tensor:
    """Return the policy's id of every blueprint of the host, -1 for those it does not know."""
    own = policy.blueprint_names
    return torch.tensor([own.index(n) if n in own else -1 for n in context.blueprint_names])
