"""The policy network: from an observation to a distribution over actions, and a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper.leyline.slots import BlueprintKind
from esper.tamiyo.networks.actor_critic import ActorCritic
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.travelling import TravellingActorCritic

# ---- From a configuration to the network it describes


Network = ActorCritic[Any]
"""A policy network of either layout."""


def make_network(config: PolicyConfig, kinds: Sequence[BlueprintKind]) -> Network:
    """Return a network that has learned nothing, from PyTorch's own random numbers.

    Args:
        config: what it is.
        kinds: the kind of every blueprint at the index that is its id.
    """
    if config.layout == "documents":
        return FactoredRecurrentActorCriticV2.from_config(config)
    return TravellingActorCritic(config, kinds)
