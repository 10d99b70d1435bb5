"""The learned policy as a controller: greedy or sampling, with a memory for every row."""

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
from esper.tamiyo.controllers.registry import check_rows, register_controller
from esper.tamiyo.networks import Network
from esper.tamiyo.networks.decision import OP, PolicyStep
from esper.tamiyo.networks.layers import Hidden, clear_rows
from esper.tamiyo.policy.distribution import masked_log_softmax, probabilities
from esper.tamiyo.policy.observation import padded_slots
from esper.utils.manifest import MANIFEST_FILE
from esper.utils.randomness import generator

# ---- Why a policy decided as it did: probabilities, values, and what in the observation mattered


CONTRIBUTORS = 3
"""How many features an explanation names."""

_SHOWN = 3
"""How many choices of a head a line of text names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """One feature and what it did to the decision."""

    feature: str
    value: float
    """The feature as observed, before it was standardised; a blueprint by its id."""
    influence: float
    """How much less would have been there without it: log-probability of the op, or value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Plain):
    """One decision of one row, in words and numbers."""

    op: str
    choices: dict[str, str]
    """By head: what was taken, for the heads the op uses."""
    probabilities: dict[str, dict[str, float]]
    """By head and choice: what each head was drawn from; 0 where a choice was not legal."""
    values: dict[str, float]
    """Expected return of every op; empty where the critic does not see the op."""
    value: float
    """The baseline."""
    contributors: tuple[Contributor, ...]
    """The most influential features, strongest first."""
    measured_on: Literal["op", "value"]
    """What influence is about: the op taken, or the value where no other op was legal."""

    def lines(self) -> list[str]:
        """Return the explanation in a few lines of text."""
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
def explain_step(
    network: Network,
    step: PolicyStep,
    *,
    raw: Tensor,
    observation: Tensor,
    blueprints: Tensor,
    hidden: Hidden,
    slot_names: Sequence[str],
    blueprint_names: Sequence[str],
) -> Explanation:
    """Explain the decision of one row.

    Args:
        network: the policy that decided.
        step: what it decided, without the row's axis.
        raw: the observation before it was standardised, [features].
        observation: what the network read, [features].
        blueprints: int64 [S].
        hidden: the memory before the step, [layers, 1, width].
        slot_names: of the host's slots.
        blueprint_names: as the network numbers them.
    """
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
    influence = _occlude(network, step, observation, blueprints, hidden, legal, measured_on)
    labels = network.config.observation.labels(slot_names, blueprint_names)
    slots = padded_slots(slot_names, len(blueprints))
    labels = [*labels, *(f"{slot}.blueprint" for slot in slots)]
    shown = [*raw.tolist(), *blueprints.tolist()]
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
    network: Network,
    step: PolicyStep,
    observation: Tensor,
    blueprints: Tensor,
    hidden: Hidden,
    legal: Tensor,
    measured_on: Literal["op", "value"],
) -> Tensor:
    """Return the influence of every feature and of every slot's blueprint."""
    features, slots = len(observation), len(blueprints)
    cases = features + slots + 1
    states = observation.repeat(cases, 1)
    states[:features].fill_diagonal_(0.0)
    indices = blueprints.repeat(cases, 1)
    indices[features : features + slots].fill_diagonal_(-1)
    before = (hidden[0].expand(-1, cases, -1), hidden[1].expand(-1, cases, -1))
    logits, judged, _ = network.respond(states, indices, before)
    ops = network.table.op_logits(logits)
    log_probs = masked_log_softmax(ops, legal)
    if measured_on == "op":
        score = log_probs[:, int(step.op)]
    else:
        score = (probabilities(log_probs) * network.op_values(judged)).sum(-1)
    return score[-1] - score[:-1]


def _words(numbers: Mapping[str, float], form: str, most: int | None = None) -> str:
    """Return the largest numbers with their names; what is exactly 0 is left out."""
    shown = sorted(numbers.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {form.format(number)}" for name, number in shown if number)


URGE_MEMORY = 0.8
"""Share of an urge that is left a step later: a chance of one in eight, kept up, is enough to act;
one in a hundred, which is what is left of exploration, never is."""


def follow_urges(urges: Tensor, chances: Tensor, legal: Tensor) -> tuple[Tensor, Tensor]:
    """Return the op of every row, int64 [R], and the urges [R, ops] that are left.

    The likeliest op of every step is no likely way through an episode: a policy that germinates
    in each step with a chance of 0.4 has most likely done so after two, and would wait for ever if
    it was asked for the likeliest op alone. So chances add up to an urge, over steps in which the
    op was legal, and what has become more urgent than a half is done.

    Args:
        urges: float32 [R, ops], what is left of the steps before.
        chances: float32 [R, ops], the probability of every op now.
        legal: bool [R, ops].
    """
    urges = torch.where(legal, URGE_MEMORY * urges + chances, 0.0)
    urges[:, LifecycleOp.WAIT] = 0.5
    op = urges.argmax(1)
    return op, urges.scatter(1, op.unsqueeze(1), 0.0)


def looks_at(max_epochs: Tensor, learned: int) -> int:
    """Return how often a policy looks at every epoch: once, and where it has to hurry more often.

    It has learned to act after so many looks, however long the run: in one of ten epochs it would
    germinate when half of them are over. Runs that are played together count as the longest.
    """
    return max(1, round(CALM_SHARE * learned / int(max_epochs.max())))


def hurry(tempo: Tensor, max_epochs: Tensor, learned: int) -> Tensor:
    """Return the tempo of every row: the fastest, where the run is too short for another."""
    fastest = TEMPO_EPOCHS.index(min(TEMPO_EPOCHS))
    return torch.where(max_epochs.to(tempo.device) < CALM_SHARE * learned, fastest, tempo)


@dataclass(frozen=True, slots=True)
class _Decision:
    """What the last decision was made of, for `explain`."""

    raw: Tensor
    observation: Tensor
    blueprints: Tensor
    hidden: Hidden
    step: PolicyStep
    could_germinate: Tensor
    """bool [R]"""
    signals: Signals
    """What it was made by."""


@register_controller("learned")
class LearnedController:
    """Acts by a trained network, without the floors it explored with.

    A draw depends on the seed, the row and the step alone, so a row acts the same whatever the
    number of rows, and a restored controller goes on with the draws it would have made. A row
    that was rolled back forgets what it remembered: that past did not happen. A travelling policy
    is laid out for the host, whatever its slots and blueprints; of the documents' layout one is
    refused that does not fit.

    Args:
        policy: the network with its frozen observation statistics and its blueprints.
        context: the slots, blueprints and seed to work with.
        greedy: draw nothing: act when that has become likelier than not to have acted
            (`follow_urges`), and choose what is likeliest then.
        explore: keep the floors, as in a rollout.

    Raises:
        UsageError: The host has more slots than the policy serves, or blueprints it does not know.
    """

    def __init__(
        self,
        policy: Policy,
        context: ControllerContext,
        *,
        greedy: bool = False,
        explore: bool = False,
    ) -> None:
        """Bring policy and host together; nothing is remembered yet."""
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
        """The limits on growth that its policy learned under."""
        return self.policy.limits

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> LearnedController:
        """Return the controller that draws by the policy saved in a folder."""
        return cls(_load("learned", argument), context)

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start at the first step with empty memories, on this device."""
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
            raw, blueprints = self.policy.layout.observe(self._own_signals(signals), device)
            observation = self.policy.normalizer.normalize(raw)
        rolled_back = signals.rolled_back.to(device)
        before = clear_rows(self._hidden, rolled_back)
        uniforms = None if self.greedy else self._draws(signals.rows).to(device)

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

        own = self._own_masks(masks, device)
        for _ in range(1, looks_at(signals.max_epochs, self.policy.horizon)):
            # What is decided in between is not done.
            before = decide(own).hidden
        step = decide(own)
        if self.greedy:
            self._urges[rolled_back] = 0.0
            op, self._urges = follow_urges(self._urges, step.op_chances, own.op)
            if not torch.equal(op, step.op):
                # The other heads choose for this op; it was chosen from what all ops were like.
                only = F.one_hot(op, len(LifecycleOp)).bool()
                step = decide(replace(own, op=only)).with_op_of(step)
        could_germinate = own.op[:, LifecycleOp.GERMINATE]
        self._last = _Decision(raw, observation, blueprints, before, step, could_germinate, signals)
        self._hidden = step.hidden
        self._step += 1
        actions = self._host_actions(step, masks)
        actions["tempo"] = hurry(actions["tempo"], signals.max_epochs, self.policy.horizon)
        return actions

    def reasons(self) -> Sequence[str]:
        """Return why each row waited at its last decision, where it could have germinated."""
        last = self._last
        if last is None:
            return ()
        waited = (last.step.op == LifecycleOp.WAIT) & last.could_germinate
        chances = last.step.op_chances[:, LifecycleOp.GERMINATE]
        pairs = enumerate(zip(waited.tolist(), chances.tolist(), strict=True))
        return [self._why_waited(row, chance) if has else "" for row, (has, chance) in pairs]

    def _why_waited(self, row: int, chance: float) -> str:
        assert self._last is not None
        signals, learned = self._last.signals, self.policy.horizon
        epoch, horizon = int(signals.epoch[row]), int(signals.max_epochs[row])
        if is_too_short(horizon, learned):
            return f"{Why.SHORT_RUN} ({learned} epochs or more)"
        progress = describe_progress(signals.loss_history[row].tolist(), epoch, horizon)
        return f"{Why.LEARNED} (chance of germinating {100 * chance:.0f} %, {progress})"

    def decides(self, row: int = 0) -> bool:
        """Return whether the policy itself decides in a row."""
        return True

    def explain(self, row: int = 0) -> Explanation:
        """Return why the last decision of a row came out as it did."""
        last = self._last
        if last is None:
            raise UsageError("there is no decision to explain yet; call act() first")
        if not 0 <= row < len(last.raw):
            raise UsageError(f"row must be 0 to {len(last.raw) - 1}, got {row}")
        return explain_step(
            self.policy.network,
            last.step.row(row),
            raw=last.raw[row],
            observation=last.observation[row],
            blueprints=last.blueprints[row],
            hidden=(last.hidden[0][:, row : row + 1], last.hidden[1][:, row : row + 1]),
            slot_names=self._context.slot_names,
            blueprint_names=self.policy.blueprint_names,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the memory and the urges of every row."""
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
        """Continue after the given step with the given memories."""
        self._step = int(state["step"])
        self._last = None
        if state["state"] is None:
            self._hidden = None
            return
        device = self.policy.network.floors.device
        self._hidden = (state["state"].to(device).clone(), state["cell"].to(device).clone())
        self._urges = state["urges"].to(device).clone()

    def _draws(self, rows: int) -> Tensor:
        """Return one number per row and head, float64 [rows, 8]."""
        seed, step = self._context.seed, self._step
        return torch.stack(
            [
                torch.rand(
                    len(HEAD_NAMES),
                    generator=generator(seed, row, step, "policy"),
                    dtype=torch.float64,
                )
                for row in range(rows)
            ]
        )

    # The host and the policy may number blueprints differently; names are what they agree on. One
    # that the policy does not know is never chosen, and where one lives, it is told as noop.

    def _ids_of(self, blueprints: int) -> Tensor | None:
        """Return the policy's id of each of so many blueprints of the host, -1 for unknown ones.

        Those beyond the context's are unknown. None where host and policy number them alike.
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
        """Return a table over the host's blueprints, [..., B], over those of the policy."""
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
            # What is chosen fits a slot of the host, so it is one of the host's.
            back = torch.zeros(len(self.policy.blueprint_names), dtype=torch.int64)
            back[ids[ids >= 0]] = (ids >= 0).nonzero().squeeze(-1)
            actions["blueprint"] = back.to(device)[actions["blueprint"]]
        return actions


@register_controller("greedy")
class GreedyController(LearnedController):
    """The learned controller that draws nothing; built from its name."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> GreedyController:
        """Return the controller that acts greedily by the policy saved in a folder."""
        return cls(_load("greedy", argument), context, greedy=True)


def _load(name: str, argument: str | None) -> Policy:
    if not argument:
        raise UsageError(f"controller {name!r} needs the folder of a policy, as in {name}:FOLDER")
    folder = find_policy(argument)
    try:
        return load_policy(folder)
    except CheckpointError as error:
        # A folder that holds a state is at fault itself; any other was the wrong thing to name.
        if os.path.exists(folder / MANIFEST_FILE):
            raise
        raise UsageError(str(error)) from error


def _blueprint_ids(policy: Policy, context: ControllerContext) -> Tensor:
    """Return the policy's id of every blueprint of the host, -1 for those it does not know."""
    own = policy.blueprint_names
    return torch.tensor([own.index(n) if n in own else -1 for n in context.blueprint_names])
