"""The configuration of a policy network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES, NUM_OPS
from esper.leyline.config import Config, option
from esper.leyline.controller import DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.errors import ConfigError, UsageError
from esper.leyline.slots import NUM_BLUEPRINTS, SlotConfig
from esper.tamiyo.policy.distribution import FloorConfig
from esper.tamiyo.policy.observation import LayoutName, ObservationLayout, make_layout

CriticKind = Literal["op_marginal", "op_sampled", "op_soft", "state"]
"""The baseline: the mean of Q(s, op) over the policy, Q(s, sampled op), Q(s, probabilities of the
ops), or V(s)."""

SENTINEL_PRIOR: tuple[float, ...] = (2.0, 0.0, -2.0, -3.0, 3.0, 3.0)
"""Logits of the ops before any learning: WAIT likely, PRUNE rare, and seeds move on.

Without seeds the policy waits seven times in eight. With seeds, ADVANCE and FOSSILIZE are three
times as likely as WAIT where they are legal, and PRUNE a hundred times less likely: a seed pays
only after three ADVANCEs and a FOSSILIZE, and otherwise few seeds would live long enough to be
judged. Whether that happens now or an epoch later makes no difference to the return, so a greedy
policy ends up doing what the prior prefers.
"""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Config):
    """The shape and the start of a policy network, and what it is shown."""

    layout: LayoutName = option(
        "documents",
        "documents: Observation V3 and its network, for a fixed number of slots and blueprints; "
        "travelling: task-relative numbers and weights that serve any host and any blueprint; "
        "ratios: the same without what tells a size or a count, and with the budget of compute.",
    )
    state_dim: int | None = option(
        None,
        "Features of the documents' observation; by default what the number of slots asks for.",
        minimum=1,
        maximum=2**20,
    )
    num_slots: int = option(
        SlotConfig.default().num_slots,
        "Most slots of a host it can serve; a travelling policy is laid out for its host.",
        minimum=1,
        maximum=1024,
    )
    lstm_hidden_dim: int = option(
        DEFAULT_LSTM_HIDDEN_DIM,
        "Width of the features and of the memory.",
        minimum=4,
        maximum=4096,
    )
    lstm_layers: int = option(1, "Depth of the memory.", minimum=1, maximum=8)
    num_blueprints: int = option(
        NUM_BLUEPRINTS, "Blueprints it can choose and see.", minimum=2, maximum=1024
    )
    blueprint_embed_dim: int = option(
        4, "documents: numbers that describe the seed in a slot.", minimum=1, maximum=1024
    )
    blueprint_layers: int = option(
        3,
        "documents: layers of the blueprint's head; 2 are those of any other.",
        minimum=2,
        maximum=3,
    )
    slot_width: int = option(
        64,
        "travelling: numbers that describe a slot, and width of its heads.",
        minimum=4,
        maximum=4096,
    )
    critic: CriticKind = option(
        "op_marginal",
        "op_marginal: the baseline is the mean of Q(s, op) over the policy; op_sampled: it is "
        "Q(s, sampled op); op_soft: it is Q(s, probabilities of the ops); state: the critic does "
        "not see the op.",
    )
    op_encoder: bool = option(
        False, "Whether layers of its own encode the op before the critic sees it."
    )
    initial_op_bias: tuple[float, ...] = option(
        SENTINEL_PRIOR, "Logit of every op at the start, in the order of LifecycleOp."
    )
    policy_gain: float = option(0.01, "Gain of every head's last layer at the start.", minimum=0)
    value_gain: float = option(1.0, "Gain of the critic's last layer at the start.", minimum=0)
    floor: FloorConfig = option(FloorConfig, "Least probabilities while exploring.")
    check: bool = option(
        True, "Look for empty masks and logits that are not finite; ESPER_DEBUG=1 always does."
    )

    def __post_init__(self) -> None:
        """Check combinations of fields."""
        super().__post_init__()
        if len(self.initial_op_bias) != NUM_OPS:
            raise ConfigError(
                f"PolicyConfig.initial_op_bias must have {NUM_OPS} entries, one per op, "
                f"got {len(self.initial_op_bias)}"
            )
        if self.op_encoder and self.critic == "state":
            raise ConfigError(
                "PolicyConfig.op_encoder needs a critic that sees the op; "
                "leave it out, or use critic 'op_marginal'"
            )
        if self.state_dim is not None and self.layout != "documents":
            raise ConfigError(
                f"PolicyConfig.state_dim is the documents' alone, got {self.state_dim} with "
                f"layout {self.layout!r}; leave it out"
            )
        if self.blueprint_layers != 3 and self.layout != "documents":
            raise ConfigError(
                "PolicyConfig.blueprint_layers is the documents' alone, got "
                f"{self.blueprint_layers} with layout {self.layout!r}; leave it out"
            )

    @property
    def observation(self) -> ObservationLayout:
        """The layout of the observation."""
        return make_layout(self.layout, self.num_slots, self.num_blueprints)

    @property
    def observation_dim(self) -> int:
        """Number of features of the observation."""
        return self.state_dim or self.observation.size

    @property
    def input_dim(self) -> int:
        """Number of inputs of the documents' network: the observation and embedded blueprints."""
        return self.observation_dim + self.num_slots * self.blueprint_embed_dim

    def fitted(self, num_slots: int, num_blueprints: int) -> PolicyConfig:
        """Return the configuration of the same policy for other numbers of slots and blueprints.

        Raises:
            UsageError: The number of slots is part of its weights, and it has fewer.
        """
        if self.layout != "documents":
            return self.replace(num_slots=num_slots, num_blueprints=num_blueprints)
        if num_slots > self.num_slots:
            raise UsageError(
                f"the policy serves {self.num_slots} slots, and the network has {num_slots}; name "
                f"up to {self.num_slots} slots, or train a policy with policy.num_slots={num_slots}"
            )
        return self.replace(num_blueprints=num_blueprints)

    @property
    def head_sizes(self) -> dict[str, int]:
        """Number of choices of every head."""
        own = {"slot": self.num_slots, "blueprint": self.num_blueprints}
        return {head: own.get(head, HEAD_SIZES[head]) for head in HEAD_NAMES}
