"""The policy network: from an observation to a distribution over actions, and a value."""

from esper.tamiyo.networks.config import SENTINEL_PRIOR, CriticKind, PolicyConfig
from esper.tamiyo.networks.decision import Evaluation, PolicyStep, Scores
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.head_table import HeadTable, MaskSource
from esper.tamiyo.networks.layers import BlueprintEmbedding, Hidden, clear_rows
from esper.tamiyo.networks.policy_step import CapturedPolicyStep, PackedPolicyStep, rollout_step

__all__ = [
    "SENTINEL_PRIOR",
    "BlueprintEmbedding",
    "CapturedPolicyStep",
    "CriticKind",
    "Evaluation",
    "FactoredRecurrentActorCriticV2",
    "HeadTable",
    "Hidden",
    "MaskSource",
    "PackedPolicyStep",
    "PolicyConfig",
    "PolicyStep",
    "Scores",
    "clear_rows",
    "rollout_step",
]
