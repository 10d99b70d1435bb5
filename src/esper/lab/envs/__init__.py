"""Gymnasium environments in which an agent grows networks, for learners other than Esper's.

    import gymnasium, esper.lab.envs

    env = gymnasium.make("Esper/Grow-v1", recipe="smoke")
    envs = gymnasium.make_vec("Esper/Grow-v1", num_envs=64, recipe="digits")

Importing this package registers them; `gymnasium.make("esper.lab.envs:Esper/Grow-v1")` imports it
by itself. It needs the extra: `pip install 'esper-grow[envs]'`. docs/how-to/environments.md
describes observations, legal actions and the end of episodes.
"""

from __future__ import annotations

from esper.leyline.errors import needing

with needing("esper.lab.envs", "envs"):
    import gymnasium

    from esper.lab.envs.grow import (
        CompoundActions,
        GrowEnv,
        GrowVectorEnv,
        LegalActions,
        LegalVectorActions,
    )


ENV_ID = "Esper/Grow-v1"
"""The id of both environments; its number changes when observations, actions or rewards do."""

if ENV_ID not in gymnasium.registry:
    gymnasium.register(
        ENV_ID,
        entry_point="esper.lab.envs.grow:GrowEnv",
        vector_entry_point="esper.lab.envs.grow:GrowVectorEnv",
    )

__all__ = [
    "ENV_ID",
    "CompoundActions",
    "GrowEnv",
    "GrowVectorEnv",
    "LegalActions",
    "LegalVectorActions",
]
