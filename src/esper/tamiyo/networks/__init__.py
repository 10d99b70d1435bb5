"""The policy network: from an observation to a distribution over actions, and a value."""

from esper.tamiyo.networks.acting import rollout_step
from esper.tamiyo.networks.captured import CapturedPolicyStep
from esper.tamiyo.networks.config import SENTINEL_PRIOR, CriticKind, PolicyConfig
from esper.tamiyo.networks.embedding import BlueprintEmbedding
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.head_table import HeadTable, MaskSource
from esper.tamiyo.networks.memory import Hidden, clear_rows
from esper.tamiyo.networks.packed import PackedPolicyStep
from esper.tamiyo.networks.records import Evaluation, PolicyStep, Scores

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
