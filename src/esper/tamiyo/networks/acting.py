"""The fastest step for the device a policy is on: what rollouts use."""

from __future__ import annotations

from esper.tamiyo.networks.captured import CapturedPolicyStep
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.networks.packed import PackedPolicyStep


def rollout_step(
    policy: FactoredRecurrentActorCriticV2,
    rows: int,
    *,
    deterministic: bool = False,
    explore: bool = True,
) -> CapturedPolicyStep | PackedPolicyStep:
    """Return a step to call in place of `policy.get_action`; `refresh()` it after every update.

    Args:
        policy: the network, on a CPU or a CUDA device.
        rows: number of rows of every call.
        deterministic: take the likeliest choices instead of drawing.
        explore: whether the distribution has floors.
    """
    if policy.floors.is_cuda:
        return CapturedPolicyStep(policy, rows, deterministic=deterministic, explore=explore)
    return PackedPolicyStep(policy, rows, deterministic=deterministic, explore=explore)
