"""The policy network: from an observation to a distribution over actions, and a value."""

from esper.tamiyo.networks.actor_critic import ActorCritic
from esper.tamiyo.networks.config import SENTINEL_PRIOR, CriticKind, PolicyConfig
from esper.tamiyo.networks.decision import Evaluation, PolicyStep, Scores
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.head_table import HeadTable, MaskSource
from esper.tamiyo.networks.layers import BlueprintEmbedding, Hidden, clear_rows
from esper.tamiyo.networks.network import Network, make_network
from esper.tamiyo.networks.policy_step import (
    CapturedPolicyStep,
    PackedPolicyStep,
    PlainPolicyStep,
    rollout_step,
)
from esper.tamiyo.networks.travelling import TravellingActorCritic

__all__ = [
    "SENTINEL_PRIOR",
    "ActorCritic",
    "BlueprintEmbedding",
    "CapturedPolicyStep",
    "CriticKind",
    "Evaluation",
    "FactoredRecurrentActorCriticV2",
    "HeadTable",
    "Hidden",
    "MaskSource",
    "Network",
    "PackedPolicyStep",
    "PlainPolicyStep",
    "PolicyConfig",
    "PolicyStep",
    "Scores",
    "TravellingActorCritic",
    "clear_rows",
    "make_network",
    "rollout_step",
]
