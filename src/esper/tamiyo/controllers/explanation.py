"""Why a policy decided as it did: probabilities, values, and what in the observation mattered.

What mattered is measured by occlusion: a feature is put back to its usual value (the running mean
of a measurement, 0 of a flag), everything else and the memory stay, and the policy is asked again.
The change in the log-probability of the op it took is the feature's influence. Gradient times
input would cost one pass less, but it is blind to exactly what a sentinel lives on: a gate of the
memory that is saturated and a probability near 1 have no gradient, and a flag that is off has no
input. All features are asked about in one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, LifecycleOp, choice_text, head_values
from esper.leyline.records import Plain
from esper.tamiyo.networks.decision import PolicyStep
from esper.tamiyo.networks.head_table import OP
from esper.tamiyo.networks.layers import Hidden
from esper.tamiyo.networks.network import Network
from esper.tamiyo.policy.distribution import masked_log_softmax, probabilities
from esper.tamiyo.policy.observation import padded_slots

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
