"""Policy networks: from an observation to a distribution over actions and a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper.leyline.slots import BlueprintKind
from esper.tamiyo.networks.actor_critic import ActorCritic
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.travelling import TravellingActorCritic

Network = ActorCritic[Any]
"""A policy network of either layout."""


def make_network(config: PolicyConfig, kinds: Sequence[BlueprintKind]) -> Network:
    """Return an untrained network, initialised from PyTorch's global generator.

    Args:
        config: the configuration.
        kinds: the kind of every blueprint at the index that is its id.
    """
    if config.layout == "documents":
        return FactoredRecurrentActorCriticV2.from_config(config)
    return TravellingActorCritic(config, kinds)
