"""Diagnostics of an update: the round before it, and the policy after every pass.

`describe_round` summarises the rollout; `measure_policy` compares the policy with the one that
acted. Both return columns of the store by name. They are masked tensor operations over all heads,
copied to the host at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, LifecycleOp
from esper.simic.agent.losses import head_ratios, joint_ratio
from esper.simic.agent.objective import Targets
from esper.simic.agent.report import monitor_advantage_bias_by_op, monitor_critic_op_sensitivity
from esper.simic.agent.rollout_buffer import RolloutBatch
from esper.tamiyo.networks import Network
from esper.tamiyo.policy.action_masks import causal_heads
from esper.tamiyo.policy.distribution import masked_log_softmax

OP = HEAD_NAMES.index("op")
LOW_RETURN_STD = 1e-3  # Below this deviation of returns, a critic has nothing to explain.
LATE_EPOCH = 100
"""Documents 000 and 004 watch the LSTM's state after this epoch."""

MEMORY_STEPS = 10
"""Number of steps of an episode at which the LSTM's state is recorded, besides the last."""

FEEDBACK_ROWS = 4
"""Rows on which the dependence on the action feedback is measured."""


def kl_of_steps(log_ratios: Tensor) -> Tensor:
    """Return the KL estimate of every step and head, r - 1 - ln r, never negative."""
    return torch.expm1(log_ratios) - log_ratios


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Return 1 - Var(R - V) / Var(R) of values and returns [N]; 0 where returns do not vary."""
    spread = returns.var(correction=0)
    left = (returns - values).var(correction=0)
    return torch.where(spread > 0, 1.0 - left / spread.clamp(min=1e-12), 0.0)


# ---------------------------------------------------------------------------------- the rollout


def describe_round(
    batch: RolloutBatch, targets: Targets, scale: Tensor, *, sees_op: bool = True
) -> dict[str, Any]:
    """Return columns that describe the round, before any optimizer step.

    The critic is judged by its values and its targets, both without the reward's potential. The
    potential is in the baseline and in the returns alike, so with it any critic would seem to
    explain what the potential explains.

    Args:
        batch: the round.
        targets: its learning targets.
        scale: factor from the critic's output to rewards.
        sees_op: whether the critic is given the op; otherwise there are no values of ops.
    """
    # On the CPU: some hundred small operations take less time there than their GPU launches.
    valid, usable, op = batch.valid.cpu(), batch.usable.cpu(), batch.op.cpu()
    values = targets.critic_values.cpu()[valid].double()
    returns = targets.critic_returns.cpu()[valid].double()
    errors = targets.td_errors.cpu()[valid].double()
    advantages = targets.advantages.cpu()[usable].double()
    numbers = {
        "explained_variance": explained_variance(values, returns),
        **_moments("return", returns, "mean", "std", "skew"),
        **_moments("value", values, "mean", "std", "min", "max"),
        **_moments("td", errors, "mean", "std"),
        **_moments("advantage", advantages, *_ADVANTAGE),
        "bellman_error": errors.square().mean(),
        "value_return_correlation": _correlation(values, returns),
        "forced_share": 1.0 - _share(usable, valid),
        "decision_density": _share(valid & (op != int(LifecycleOp.WAIT)), valid),
        **_percentiles(returns),
    }
    on_device = {
        "advantage_mean_raw": targets.advantage_mean,
        "advantage_std_raw": targets.advantage_std,
        "value_target_scale": scale,
        **_memory(batch),
    }
    columns: dict[str, Any] = {**to_floats(numbers), **to_floats(on_device)}
    by_op = monitor_advantage_bias_by_op(targets.raw_advantages.cpu()[usable], op[usable])
    return {
        **columns,
        **(values_by_op((batch.op_values * scale).cpu()[valid]) if sees_op else {}),
        "potential_share": potential_share(targets.potentials.cpu()[valid].double(), returns),
        "low_variance": columns["return_std"] < LOW_RETURN_STD,
        "advantage_floored": bool(targets.advantage_floored),
        "advantage_by_op": by_op,
        "value_by_state": value_by_state(batch, targets),
        "lstm_by_step": memory_by_step(batch),
        "usable_steps": int(usable.sum()),
    }


def potential_share(potentials: Tensor, critic_returns: Tensor) -> float | None:
    """Return the share of the returns' variance that the potential alone explains.

    It is 1 - Var(R + P) / Var(R), below 0 if the potential adds noise. A baseline of potential and
    critic explains 1 - (1 - this) * (1 - explained variance). None without a potential.

    Args:
        potentials: [N], P, the potential before each step.
        critic_returns: [N], R + P, the critic's targets.
    """
    if not bool((potentials != 0).any()):
        return None
    return float(explained_variance(-potentials, critic_returns - potentials))


def values_by_op(values: Tensor) -> dict[str, Any]:
    """Return how the critic's values [N, ops] differ by op."""
    found = monitor_critic_op_sensitivity(values)
    names = (op.name for op in LifecycleOp)
    return {
        "q_by_op": dict(zip(names, found["q_per_op_mean"], strict=True)),
        "q_variance": found["q_variance_across_ops"],
        "q_op_spread": found["q_op_spread"],
    }


def value_by_state(batch: RolloutBatch, targets: Targets) -> dict[str, dict[str, float]]:
    """Return the critic's errors in states right after a germination, and in all others.

    The chosen blueprint is in the observation from that state on. A critic that cannot read it has
    a bias in these states.
    """
    valid = batch.valid.cpu()
    germinated = batch.effective_op.cpu() == int(LifecycleOp.GERMINATE)
    after = torch.zeros_like(valid)
    after[:, 1:] = (germinated & valid)[:, :-1]
    values, returns = targets.critic_values.cpu().double(), targets.critic_returns.cpu().double()
    found = {}
    for name, which in (("germinated", after & valid), ("other", ~after & valid)):
        errors = (values - returns)[which]
        if errors.numel():
            found[name] = {
                "n": int(errors.numel()),
                "value": float(values[which].mean()),
                "return": float(returns[which].mean()),
                "error": float(errors.mean()),
                "std": float(errors.std(correction=0)),
            }
    return found


_ADVANTAGE = ("mean", "std", "skew", "kurtosis", "positive")


def to_floats(numbers: dict[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as numbers, in one copy to the host."""
    stacked = torch.stack([value.detach().to(torch.float64) for value in numbers.values()])
    return dict(zip(numbers, stacked.tolist(), strict=True))


def _moments(name: str, values: Tensor, *wanted: str) -> dict[str, Tensor]:
    """Return the wanted moments of values [N]; all 0 without values."""
    if not values.numel():
        values = values.new_zeros(1)
    centred = values - values.mean()
    variance = centred.square().mean()
    safe = variance.clamp(min=1e-24)
    every = {
        "mean": values.mean(),
        "std": variance.sqrt(),
        "min": values.min(),
        "max": values.max(),
        "skew": centred.pow(3).mean() / safe.pow(1.5),
        "kurtosis": torch.where(variance > 0, centred.pow(4).mean() / safe.square() - 3.0, 0.0),
        "positive": (values > 0).double().mean(),
    }
    return {f"{name}_{key}": every[key] for key in wanted}


def _percentiles(returns: Tensor) -> dict[str, Tensor]:
    levels = (5, 25, 50, 75, 95)
    if not returns.numel():
        returns = returns.new_zeros(1)
    found = torch.quantile(returns, returns.new_tensor([level / 100 for level in levels]))
    return {
        f"return_p{level:02d}": each for level, each in zip(levels, found.unbind(), strict=True)
    }


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    first, second = first - first.mean(), second - second.mean()
    size = (first.square().sum() * second.square().sum()).sqrt()
    return torch.where(size > 0, (first * second).sum() / size.clamp(min=1e-24), 0.0)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part.sum() / whole.sum().clamp(min=1)


def _memory(batch: RolloutBatch) -> dict[str, Tensor]:
    """Return the size of the LSTM's state over the valid steps, early and late epochs apart."""
    valid = batch.valid.to(torch.float32)
    late = torch.arange(batch.valid.shape[1], device=valid.device) >= LATE_EPOCH
    found: dict[str, Tensor] = {}
    for name, memory in (("h", batch.hidden_state), ("c", batch.hidden_cell)):
        squares = memory.square().flatten(2).mean(-1)
        found[f"lstm_{name}_rms"] = _rms(squares, valid)
        found[f"lstm_{name}_max"] = (memory.flatten(2).abs().amax(-1) * valid).max()
        if name == "c":
            found["lstm_c_rms_early"] = _rms(squares, valid * ~late)
            found["lstm_c_rms_late"] = _rms(squares, valid * late)
    return found


def _rms(squares: Tensor, weights: Tensor) -> Tensor:
    return ((squares * weights).sum() / weights.sum().clamp(min=1)).sqrt()


def memory_by_step(batch: RolloutBatch) -> list[dict[str, float]]:
    """Return root mean square and maximum of the LSTM's state at some steps."""
    steps = batch.valid.shape[1]
    at = torch.arange(1, steps, max(1, (steps - 1) // MEMORY_STEPS)).tolist()
    chosen = sorted({*at, steps - 1})
    valid = batch.valid[:, chosen].to(torch.float32)
    columns = [torch.tensor(chosen, dtype=torch.float64)]
    for memory in (batch.hidden_state, batch.hidden_cell):
        part = memory[:, chosen].flatten(2)
        mean = (part.square().mean(-1) * valid).sum(0) / valid.sum(0).clamp(min=1)
        columns += [
            mean.sqrt().cpu().double(),
            (part.abs().amax(-1) * valid).amax(0).cpu().double(),
        ]
    names = ("step", "h_rms", "h_max", "c_rms", "c_max")
    return [
        {**dict(zip(names, row, strict=True)), "step": int(row[0])}
        for row in torch.stack(columns, dim=1).tolist()
    ]


# ----------------------------------------------------------------------------------- the policy


def measure_policy(
    batch: RolloutBatch,
    targets: Targets,
    *,
    old_log_probs: Tensor,
    log_probs: Tensor,
    entropies: Tensor,
    own_entropies: Tensor,
    clip: float,
) -> tuple[dict[str, float | None], dict[str, list[Any]]]:
    """Compare the policy with the one that acted; return joint columns, and columns by head.

    Args:
        batch: the rows that were scored.
        targets: their learning targets.
        old_log_probs: [R, T, 8], at the weights that the update started from.
        log_probs: [R, T, 8], now.
        entropies: [R, T, 8], over the base masks.
        own_entropies: [R, T, 8], over the masks that each head was drawn with.
        clip: ratios are clipped to 1 minus this and 1 plus this.
    """
    usable, causal = batch.usable, targets.causal
    log_ratios = log_probs - old_log_probs
    ratio = joint_ratio(log_ratios)
    above, below = ratio > 1.0 + clip, ratio < 1.0 - clip
    taken = log_probs.sum(-1)
    steps = usable.sum().clamp(min=1)
    joint = to_floats(
        {
            "approx_kl": (kl_of_steps(log_ratios).sum(-1) * usable).sum() / steps,
            "clipfrac": ((above | below) & usable).sum() / steps,
            "clipfrac_up": (above & usable).sum() / steps,
            "clipfrac_down": (below & usable).sum() / steps,
            "log_prob_min": torch.where(usable, taken, torch.inf).min(),
            "log_prob_max": torch.where(usable, taken, -torch.inf).max(),
            **_range(ratio.unsqueeze(-1), usable.unsqueeze(-1), single=True),
        }
    )
    choices = batch.masks.sum(-1)
    has_choice = causal & (choices > 1)
    own = torch.where(has_choice, own_entropies, 0.0)
    ratios = head_ratios(log_ratios)
    outside = ((ratios > 1.0 + clip) | (ratios < 1.0 - clip)) & causal
    everywhere = batch.valid.unsqueeze(-1).expand_as(entropies)
    nats = own * choices.clamp(min=1).log()
    by_head = {
        **_range(ratios, causal),
        "approx_kl": _mean(kl_of_steps(log_ratios), causal),
        "clipfrac": _mean(outside.to(torch.float32), causal),
        "entropy": _mean(entropies, everywhere),
        "entropy_conditional": _mean(own, has_choice),
        "entropy_nats": _mean(nats, has_choice),
    }
    columns = dict(zip(by_head, torch.stack(list(by_head.values())).tolist(), strict=True))
    used = causal.flatten(0, -2).any(0).tolist()
    chose = has_choice.flatten(0, -2).any(0).tolist()
    known: dict[str, list[Any]] = {}
    for name, values in columns.items():
        has = chose if name in ("entropy_conditional", "entropy_nats") else used
        has = [True] * len(HEAD_NAMES) if name == "entropy" else has
        known[name] = [value if here else None for value, here in zip(values, has, strict=True)]
    if not any(used):
        return dict.fromkeys(joint), known
    return {**joint, "entropy": sum(columns["entropy"]) / len(HEAD_NAMES)}, known


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of values [R, T, heads] over the steps that count, [heads]."""
    total = torch.where(counts, values, 0.0).flatten(0, -2).sum(0)
    return total / counts.flatten(0, -2).sum(0).clamp(min=1)


def _range(ratios: Tensor, counts: Tensor, *, single: bool = False) -> dict[str, Tensor]:
    """Return mean, deviation, least and greatest ratio of every head."""
    mean = _mean(ratios, counts)
    found = {
        "ratio_mean": mean,
        "ratio_std": _mean((ratios - mean).square(), counts).sqrt(),
        "ratio_min": torch.where(counts, ratios, torch.inf).flatten(0, -2).amin(0),
        "ratio_max": torch.where(counts, ratios, -torch.inf).flatten(0, -2).amax(0),
    }
    return {name: value[0] for name, value in found.items()} if single else found


def describe_heads(
    batch: RolloutBatch, targets: Targets, sizes: Mapping[str, int]
) -> dict[str, list[Any]]:
    """Return columns by head on its use in the round; `sizes` are the numbers of choices."""
    valid = batch.valid.unsqueeze(-1)
    causal = causal_heads(batch.op) & valid
    choices = batch.masks.sum(-1)
    free = causal & (choices > 1)
    advantages = targets.advantages.unsqueeze(-1).expand(causal.shape)
    mean = _mean(advantages, targets.causal)
    numbers = {
        "usage": _mean(causal.to(torch.float32), valid.expand_as(causal)),
        "valid_actions": _mean(choices.to(torch.float32), free),
        "advantage_std": _mean((advantages - mean).square(), targets.causal).sqrt(),
    }
    columns: dict[str, list[Any]] = dict(
        zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True)
    )
    columns["free_steps"] = free.flatten(0, -2).sum(0).tolist()
    width = batch.masks.shape[-1]
    counts = torch.zeros(len(HEAD_NAMES), width, dtype=torch.int64, device=valid.device)
    flat = batch.actions.flatten(0, -2).t()
    counts.scatter_add_(1, flat, causal.flatten(0, -2).t().to(torch.int64))
    columns["choices"] = [
        taken[: sizes[head]] for head, taken in zip(HEAD_NAMES, counts.tolist(), strict=True)
    ]
    return columns


@torch.no_grad()
def measure_feedback(network: Network, batch: RolloutBatch, op_logits: Tensor) -> float | None:
    """Return the change of op probabilities if the observation says that the last op was WAIT.

    It is large for a policy that repeats its last action instead of looking at the host. It is the
    total variation distance, averaged over the free steps; None without any.

    Args:
        network: the policy.
        batch: some rows.
        op_logits: [R, T, ops], of these rows as they are.
    """
    if not bool(batch.usable.any()):
        return None
    states = batch.states.clone()
    feedback = states[..., network.config.observation.feedback]
    feedback.zero_()
    # It succeeded, and the op was WAIT.
    feedback[..., 0] = 1.0
    feedback[..., 1 + int(LifecycleOp.WAIT)] = 1.0
    blind = network.score(
        states, batch.blueprint_indices, batch.actions, batch.masks, with_baseline=False
    )
    ops = op_logits.shape[-1]
    mask = batch.masks[..., OP, :ops]
    told = masked_log_softmax(op_logits, mask).exp()
    untold = masked_log_softmax(blind.logits[..., OP, :ops], mask).exp()
    moved = 0.5 * (told - untold).abs().sum(-1)
    return float((moved * batch.usable).sum() / batch.usable.sum())
