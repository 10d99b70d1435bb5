"""Every table of a run's store: one record class per table, one field per column.

This is the one place that says what is recorded, in which unit, and what it means; the SQL, the
writer and `docs/telemetry.md` are made from it. Absent is None and stored as NULL, never as 0.
A column is *volatile* where identical runs may differ: times, memory, rates, the machine.

Keys are (round, row, step, ordinal): the round of training (0 when one network is grown), the row
of the population (0 for one network), the epoch within the episode from 1, and a count within
these. Every table also has `id`, the order of writing from 1.

What has names of its own in every run (the terms of a reward, which anybody may write) is one JSON
column, and a view unfolds it into rows: a new term needs no change here.

Raise `SCHEMA_VERSION` whenever a table or a column changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from esper.nissa.columns import Row, column, key, record, table, unfold

SCHEMA_VERSION = 9

_ROUND = "Round of training, from 0; 0 when one network is grown."
_ROW = "Row of the population; 0 for one network."
_STEP = "Epochs done in the episode when it happened, from 1."
_COUNT = "Number within the same round, row and step, from 0."
_TIME = "When it was recorded, seconds since 1970 (UTC)."
_FLOPS = "Operations of one sample's forward pass, seeds and gates included."
_FLOPS_OF_HOST = "Operations of one sample's forward pass through the host alone."
_FLOPS_OF_SEED = "Operations per sample of the seed and its gate."
_CONTRIBUTION = "Points lost if it were taken out now; last measured."
_ENV_STEPS = "Decisions of all rows since the start of the run; the x axis of training curves."
_ROLLBACK = "Why the governor acted: not_finite, lobotomy or divergence; absent where it did not."
_VOLATILE_ROW = "The row speaks of the machine (memory, a sink, a resume), not of the run."

Json = Mapping[str, Any] | Sequence[Any]
"""Plain data, which is stored as JSON text."""


@record
class Moment(Row):
    """One moment of one network's life: the key of everything that happens in an epoch."""

    round: int = key(_ROUND)
    row: int = key(_ROW)
    step: int = key(_STEP)


@table("runs", "The run itself: one row.")
class RunRow(Row):
    """What was asked for, on what, and how it ended."""

    kind: str = column("", "grow, train or prove.", default="grow")
    name: str | None = column("", "Name of the run, as people call it.")
    task: str | None = column("", "Task, or the model when a user's own is grown.")
    recipe: str | None = column("", "Recipe a training run started from.")
    controller: str | None = column("", "Who decides.")
    seed: int | None = column("", "Seed of the whole run.")
    device: str | None = column("", "cpu or cuda.")
    rounds: int | None = column("rounds", "Rounds planned.")
    rows: int | None = column("rows", "Networks trained side by side.")
    epochs: int | None = column("epochs", "Epochs planned per episode.")
    slots: Json | None = column("", "Names of the slots, in action order.")
    host_parameters: int | None = column("parameters", "Trainable parameters before growth.")
    host_flops: int | None = column("operations", _FLOPS_OF_HOST)
    config: Json | None = column("", "The complete resolved configuration.")
    command: str | None = column("", "The command that started the run.")
    status: str = column("", "running, interrupted, failed or finished.", default="running")
    note: str | None = column("", "Why it stopped, where that needs words.")
    kept_epoch: int | None = column("epochs", "The epoch whose network is the result.")
    twin_kept_epoch: int | None = column("epochs", "The same of the waiting twin.")
    stopped: str | None = column("", "Why it ended before its last epoch, where it did.")
    val_score: float | None = column("points", "Validation score of the result.")
    test_score: float | None = column("points", "Test score, touched once at the end.")
    twin_val_score: float | None = column("points", "Validation score of the waiting twin.")
    twin_test_score: float | None = column("points", "Test score of the waiting twin.")
    parameters: int | None = column("parameters", "Trainable parameters at the end.")
    flops: int | None = column("operations", _FLOPS)
    run_id: str | None = column("", "Random name of this store.", volatile=True)
    versions: Json | None = column("", "Versions of the software.", volatile=True)
    host: str | None = column("", "Name of the machine.", volatile=True)
    process: int | None = column("", "Process that wrote last.", volatile=True)
    created: float | None = column("s", "When the run was started.", volatile=True)
    ended: float | None = column("s", "When it finished or stopped.", volatile=True)
    resumes: int | None = column("", "How often it was continued.", volatile=True)
    seconds: float | None = column("s", "Time spent in the run.", volatile=True)
    waits: int | None = column("", "Writes that had to wait for the store.", volatile=True)
    wait_s: float | None = column("s", "Time the run waited for the store.", volatile=True)
    dropped: int | None = column("records", "Records a slow sink left out.", volatile=True)


@table("rounds", "One round of training: all rows play one episode, then the policy is updated.")
class RoundRow(Row):
    """What the episodes of one round were like, taken together."""

    round: int = key(_ROUND)
    episodes: int | None = column("episodes", "Episodes played in the round.")
    env_steps: int | None = column("decisions", _ENV_STEPS)
    return_mean: float | None = column("reward", "Mean return of the episodes, raw.")
    return_std: float | None = column("reward", "Standard deviation of the returns.")
    return_p05: float | None = column("reward", "Returns of the episodes: 5th percentile.")
    return_p25: float | None = column("reward", "Returns of the episodes: 25th percentile.")
    return_p50: float | None = column("reward", "Returns of the episodes: median.")
    return_p75: float | None = column("reward", "Returns of the episodes: 75th percentile.")
    return_p95: float | None = column("reward", "Returns of the episodes: 95th percentile.")
    score_mean: float | None = column("points", "Mean final validation score.")
    score_best: float | None = column("points", "Best final validation score.")
    score_rolling: float | None = column("points", "Mean of score_mean over the last 10 rounds.")
    gain_mean: float | None = column("points", "Mean final score minus the twin's.")
    gain_p05: float | None = column("points", "Gains of the episodes: 5th percentile.")
    gain_p25: float | None = column("points", "Gains of the episodes: 25th percentile.")
    gain_p50: float | None = column("points", "Gains of the episodes: median.")
    gain_p75: float | None = column("points", "Gains of the episodes: 75th percentile.")
    gain_p95: float | None = column("points", "Gains of the episodes: 95th percentile.")
    paid_off_share: float | None = column(
        "share",
        "Episodes that paid off: their return exceeds 0, that of waiting, and, where a twin ran, "
        "their network scored above it.",
    )
    paid_off_rolling: float | None = column(
        "share", "Moving average of paid_off_share; ends exploration."
    )
    eval_episodes: int | None = column("episodes", "Greedy episodes played after the update.")
    eval_return: float | None = column("reward", "Mean return of these.")
    eval_gain: float | None = column("points", "Mean gain over the twin of these.")
    free_steps: int | None = column("decisions", "Decisions with more than one legal op.")
    forced_share: float | None = column("share", "Decisions with WAIT as the only legal op.")
    wait_share_free: float | None = column("share", "WAIT among the free decisions.")
    idle_share_free: float | None = column(
        "share", "Free decisions without effect: WAIT, or an op whose gate was not met."
    )
    op_counts: Json | None = column("decisions", "How often each op was taken.")
    reward_by_op: Json | None = column("reward", "Per op: n and mean raw reward.")
    reward_terms: Json | None = column(
        "reward", "Per term: mean per decision, and share of the absolute reward."
    )
    blueprint_fates: Json | None = column(
        "seeds", "Per blueprint, seeds germinated, fossilized and pruned so far."
    )
    seeds_germinated: int | None = column("seeds", "Seeds germinated in the round.")
    seeds_fossilized: int | None = column("seeds", "Seeds fossilized in the round.")
    seeds_pruned: int | None = column("seeds", "Seeds pruned in the round.")
    fossilization_rate: float | None = column(
        "share", "Fossilized among the seeds germinated in the first 60 % of their episode."
    )
    rollbacks: int | None = column("", "Rows the governor rolled back.")
    growth_ratio: float | None = column("ratio", "Largest parameters over host parameters.")
    anti_gaming_share: float | None = column("share", "Decisions with an anti-gaming penalty.")
    attribution_ratio_max: float | None = column(
        "ratio", "Largest contribution over improvement with a ransomware penalty."
    )
    ransomware_count: int | None = column("seeds", "Seeds that look like ransomware.")
    hindsight_mean: float | None = column("reward", "Mean hindsight credit of a scaffold.")
    hindsight_count: int | None = column("", "Times hindsight credit was paid.")
    hindsight_delay: float | None = column("epochs", "Mean delay of that credit.")
    hindsight_quantiles: Json | None = column(
        "reward", "That credit where it was paid: p05, p25, p50, p75, p95."
    )
    obs_clamp_share: float | None = column("share", "Observation entries at their clamp.")
    obs_clamp_features: Json | None = column(
        "share", "The features most often at their clamp, by name."
    )
    seconds: float | None = column("s", "Time of the round.", volatile=True)
    update_seconds: float | None = column("s", "Time of its update.", volatile=True)
    twin_seconds: float | None = column("s", "Time of its waiting twins.", volatile=True)
    steps_per_s: float | None = column("decisions/s", "Speed.", volatile=True)
    memory_bytes: int | None = column("bytes", "Resident memory of the process.", volatile=True)
    gpu_memory_share: float | None = column("share", "GPU memory in use.", volatile=True)
    time: float | None = column("s", _TIME, volatile=True)


@table("updates", "One optimisation epoch of a PPO update; all measured after its step.")
class UpdateRow(Row):
    """The learner's state after one pass over a round's decisions."""

    round: int = key(_ROUND)
    ordinal: int = key("Optimisation epoch within the update, from 0.")
    is_last: bool = column("", "It was the last epoch of the update.", default=True)
    env_steps: int | None = column("decisions", _ENV_STEPS)
    learning_rate: float | None = column("", "Step size of the optimizer.")
    policy_loss: float | None = column("", "Clipped surrogate, summed over the heads.")
    value_loss: float | None = column("", "Half the mean squared error of the critic.")
    entropy: float | None = column("share", "Mean normalised entropy of the heads, unfloored.")
    entropy_coef: float | None = column("", "Weight of the entropy bonus.")
    op_entropy_coef: float | None = column(
        "", "Weight of the op's bonus, which ends when episodes pay off."
    )
    paid_off_rolling: float | None = column(
        "share", "Moving average of the episodes that paid off, at the update."
    )
    floor_penalty: float | None = column("", "Penalty of heads below their entropy floor.")
    exploration_kl: float | None = column("nats", "KL(uniform over valid, policy), free steps.")
    total_loss: float | None = column("", "What was minimised.")
    approx_kl: float | None = column("nats", "KL from the round's policy, after the step.")
    clipfrac: float | None = column("share", "Decisions whose joint ratio left the clip range.")
    clipfrac_up: float | None = column("share", "Of these, above the range.")
    clipfrac_down: float | None = column("share", "Of these, below the range.")
    ratio_mean: float | None = column("ratio", "Joint ratio: mean.")
    ratio_std: float | None = column("ratio", "Joint ratio: standard deviation.")
    ratio_min: float | None = column("ratio", "Joint ratio: least.")
    ratio_max: float | None = column("ratio", "Joint ratio: greatest.")
    explained_variance: float | None = column(
        "share",
        "1 - Var(R - V) / Var(R): V the critic's values in the rollout, R what it is to foresee, "
        "both without the reward's potential.",
    )
    potential_share: float | None = column(
        "share",
        "Variance of the returns as paid that the reward's potential explains by itself, "
        "1 - Var(R) / Var(R - P); absent where nothing was paid in advance.",
    )
    low_variance: bool | None = column("", "R hardly varies: nothing to explain.")
    advantage_mean: float | None = column("", "Advantage: mean, normalised.")
    advantage_std: float | None = column("", "Advantage: standard deviation, normalised.")
    advantage_skew: float | None = column("", "Advantage: skewness.")
    advantage_kurtosis: float | None = column("", "Advantage: excess kurtosis.")
    advantage_positive: float | None = column("share", "Advantages above 0.")
    advantage_mean_raw: float | None = column("reward", "Advantage: mean before normalising.")
    advantage_std_raw: float | None = column("reward", "Advantage: deviation before normalising.")
    advantage_floored: bool | None = column("", "The deviation was below its floor.")
    advantage_by_op: Json | None = column(
        "reward", "Per op: n, mean, std, skew, kurtosis and positive share, raw."
    )
    return_mean: float | None = column("reward", "R, what the critic is to foresee: mean.")
    return_std: float | None = column("reward", "R: standard deviation.")
    return_skew: float | None = column("", "R: skewness.")
    return_p05: float | None = column("reward", "R: 5th percentile.")
    return_p25: float | None = column("reward", "R: 25th percentile.")
    return_p50: float | None = column("reward", "R: median.")
    return_p75: float | None = column("reward", "R: 75th percentile.")
    return_p95: float | None = column("reward", "R: 95th percentile.")
    value_mean: float | None = column("reward", "V, what the critic said: mean.")
    value_std: float | None = column("reward", "V: standard deviation.")
    value_min: float | None = column("reward", "V: least.")
    value_max: float | None = column("reward", "V: greatest.")
    value_target_scale: float | None = column("", "Factor the critic's targets were divided by.")
    value_return_correlation: float | None = column("", "Correlation of V and R.")
    value_loss_by_op: Json | None = column("", "Value loss of each op's decisions.")
    value_by_state: Json | None = column(
        "reward",
        "States right after a germination, and all others: n, mean V (value), mean R (return), "
        "and mean and std of V - R.",
    )
    td_mean: float | None = column("reward", "Temporal difference: mean.")
    td_std: float | None = column("reward", "Temporal difference: standard deviation.")
    bellman_error: float | None = column("reward²", "Mean squared temporal difference.")
    q_by_op: Json | None = column(
        "reward", "Mean Q(s, op) of each op; absent, as below, where the critic sees no op."
    )
    q_variance: float | None = column("reward²", "Variance of Q over ops, mean over states.")
    q_op_spread: float | None = column("reward", "Greatest minus least mean Q of an op.")
    grad_norm: float | None = column("", "Gradient norm before clipping.")
    value_grad_norm: float | None = column("", "Gradient norm of the critic's head.")
    grad_cv: float | None = column("", "Deviation over mean of the gradient norms.")
    nonfinite: int | None = column("", "NaN and infinite values met in the update.")
    log_prob_min: float | None = column("nats", "Least log-probability of an action taken.")
    log_prob_max: float | None = column("nats", "Greatest log-probability of an action taken.")
    lstm_h_rms: float | None = column("", "Hidden state: root mean square.")
    lstm_h_max: float | None = column("", "Hidden state: greatest magnitude.")
    lstm_c_rms: float | None = column("", "Cell state: root mean square.")
    lstm_c_max: float | None = column("", "Cell state: greatest magnitude.")
    lstm_c_rms_early: float | None = column("", "Cell state up to epoch 100: root mean square.")
    lstm_c_rms_late: float | None = column("", "Cell state beyond epoch 100: root mean square.")
    lstm_by_step: Json | None = column(
        "", "Memory at some steps: a list of step, h_rms, h_max, c_rms, c_max."
    )
    forced_share: float | None = column("share", "Decisions with WAIT as the only legal op.")
    decision_density: float | None = column("share", "Decisions other than WAIT.")
    usable_steps: int | None = column("decisions", "Free decisions the policy could learn from.")
    obs_clamp_share: float | None = column("share", "Observation entries at their clamp.")
    feedback_dependence: float | None = column(
        "share", "Op probability that moves when the last action is hidden, free steps."
    )
    was_skipped: bool | None = column("", "Not finite, so no step was taken.")
    stopped_early: bool | None = column("", "The KL limit ended the update.")
    seconds: float | None = column("s", "Time of this epoch.", volatile=True)
    memory_bytes: int | None = column("bytes", "Resident memory of the process.", volatile=True)
    gpu_memory_share: float | None = column("share", "GPU memory in use.", volatile=True)
    time: float | None = column("s", _TIME, volatile=True)


@table("update_heads", "One head of the policy in one optimisation epoch; write before `updates`.")
class UpdateHeadRow(Row):
    """One head after one pass over a round's decisions."""

    round: int = key(_ROUND)
    ordinal: int = key("Optimisation epoch within the update, from 0.")
    head: str = key("Name of the head.", default="")
    env_steps: int | None = column("decisions", _ENV_STEPS)
    usage: float | None = column("share", "Decisions in which the head was causal.")
    free_steps: int | None = column("decisions", "Causal decisions with more than one choice.")
    valid_actions: float | None = column("choices", "Mean number of valid choices, free steps.")
    loss: float | None = column("", "Clipped surrogate of the head.")
    entropy: float | None = column("share", "Normalised entropy over all steps, unfloored.")
    entropy_conditional: float | None = column("share", "The same over free causal steps.")
    entropy_nats: float | None = column("nats", "Entropy over free causal steps.")
    ratio_mean: float | None = column("ratio", "The head's ratio: mean, causal steps.")
    ratio_std: float | None = column("ratio", "The head's ratio: standard deviation.")
    ratio_min: float | None = column("ratio", "The head's ratio: least.")
    ratio_max: float | None = column("ratio", "The head's ratio: greatest.")
    approx_kl: float | None = column("nats", "KL of the head, causal steps.")
    clipfrac: float | None = column("share", "Causal decisions outside the clip range.")
    grad_norm: float | None = column("", "Gradient norm of the head's parameters.")
    floor_penalty: float | None = column("", "Penalty below the entropy floor.")
    exploration_kl: float | None = column("nats", "KL(uniform over valid, head), free steps.")
    advantage_std: float | None = column("", "Deviation of the head's advantages.")
    choices: Json | None = column(
        "decisions", "How often each choice was taken, in their order, causal steps."
    )


@table("episodes", "One episode of one row, when it ends.")
class EpisodeRow(Row):
    """How one episode ended."""

    round: int = key(_ROUND)
    row: int = key(_ROW)
    ordinal: int = key("Number of the episode within the round and row, from 0.")
    env_steps: int | None = column("decisions", _ENV_STEPS)
    env_seed: int | None = column("", "Seed of the environment.")
    task: str | None = column("", "Task of the row.")
    length: int | None = column("epochs", "Epochs of the episode.")
    episodic_return: float | None = column("reward", "Sum of raw rewards.")
    return_normalized: float | None = column("", "Sum of normalised rewards.")
    reward_terms: Json | None = column("reward", "Per term: its sum, raw.")
    final_score: float | None = column("points", "Validation score at the end.")
    best_score: float | None = column("points", "Best validation score.")
    twin_score: float | None = column("points", "Final score of the waiting twin.")
    gain: float | None = column("points", "Final score minus the twin's.")
    parameters: int | None = column("parameters", "Trainable parameters at the end.")
    host_parameters: int | None = column("parameters", "Trainable parameters of the host.")
    parameter_ratio: float | None = column("ratio", "Added over host parameters.")
    flops: int | None = column("operations", _FLOPS)
    host_flops: int | None = column("operations", _FLOPS_OF_HOST)
    flop_ratio: float | None = column("ratio", "Added over host operations.")
    seeds_germinated: int | None = column("seeds", "Seeds germinated.")
    seeds_fossilized: int | None = column("seeds", "Seeds fossilized.")
    seeds_contributing: int | None = column("seeds", "Fossilized seeds that improved the host.")
    seeds_pruned: int | None = column("seeds", "Seeds pruned.")
    forced_steps: int | None = column("decisions", "Decisions with WAIT as the only legal op.")
    op_counts: Json | None = column("decisions", "How often each op was taken.")
    stability: float | None = column("", "1 / (1 + variance of the last 20 rewards).")
    reached_score: bool | None = column("", "The final score reached 80 points.")
    rolled_back: bool | None = column("", "The governor ended the episode.")
    rollback_reason: str | None = column("", _ROLLBACK)
    time: float | None = column("s", _TIME, volatile=True)


@table("epochs", "One epoch of one network, as it was measured.")
class EpochRow(Moment):
    """What was measured after one epoch."""

    train_loss: float | None = column("", "Mean training loss of the epoch.")
    val_loss: float | None = column("", "Validation loss.")
    val_score: float | None = column("points", "Validation score: accuracy, or negative loss.")
    best_score: float | None = column("points", "Best validation score so far.")
    twin_score: float | None = column("points", "Score of the waiting twin at this epoch.")
    stabilized: bool | None = column("", "The host has settled once.")
    plateau_epochs: int | None = column("epochs", "Epochs without half a point of progress.")
    parameters: int | None = column("parameters", "Trainable parameters.")
    host_parameters: int | None = column("parameters", "Trainable parameters of the host.")
    flops: int | None = column("operations", _FLOPS)
    host_flops: int | None = column("operations", _FLOPS_OF_HOST)
    live_seeds: int | None = column("seeds", "Seeds with a module, fossilized ones included.")
    training_steps: int | None = column("steps", "Optimizer steps so far, of a deepened network.")
    training_flops: float | None = column("operations", "What they took, forward and backward.")
    static_flops: float | None = column("operations", "The same with all blocks awake throughout.")
    rollback_reason: str | None = column("", _ROLLBACK)
    statistics_samples: int | None = column(
        "samples", "Training samples that BatchNorm statistics were taken from anew."
    )
    seconds: float | None = column("s", "Time of the epoch.", volatile=True)
    memory_bytes: int | None = column("bytes", "Resident memory of the process.", volatile=True)
    gpu_memory_share: float | None = column("share", "GPU memory in use.", volatile=True)
    time: float | None = column("s", _TIME, volatile=True)


_CONFIDENCE = "Probability of the choice of the head {}, as it was sampled."
_VALID = "Valid choices of the head {}; 1 is a masked head."


@table("decisions", "One decision of the controller about one row.", indexes=(("op",),))
class DecisionRow(Moment):
    """What was decided, how sure the policy was, what came of it, and how it was rewarded."""

    ordinal: int = key(_COUNT)
    op: str | None = column("", "The op that was chosen; DEEPEN where blocks wake.")
    slot: str | None = column("", "The slot or the stack it was for; absent for WAIT.")
    blueprint: str | None = column("", "Blueprint to germinate.")
    style: str | None = column("", "How the seed is blended in.")
    tempo: int | None = column("epochs", "Length of the first blend.")
    alpha_target: float | None = column("", "Amplitude to aim for.")
    alpha_speed: int | None = column("ticks", "Length of a later ramp.")
    alpha_curve: str | None = column("", "Shape of a later ramp.")
    outcome: str | None = column("", "done, gate_failed or illegal.")
    reason: str | None = column("", "Why it was refused; of a DEEPEN also what it did.")
    blocks_before: int | None = column("blocks", "Blocks of the stack awake before a DEEPEN.")
    blocks_after: int | None = column("blocks", "Blocks of the stack awake after it.")
    training_step: int | None = column("steps", "Optimizer steps done when blocks woke.")
    took_effect: bool | None = column("", "It was carried out.")
    effective_op: str | None = column("", "The op it counted as; WAIT when refused.")
    forced: bool | None = column("", "WAIT was the only legal op.")
    valid_op: int | None = column("choices", _VALID.format("op"))
    valid_slot: int | None = column("choices", _VALID.format("slot"))
    valid_blueprint: int | None = column("choices", _VALID.format("blueprint"))
    valid_style: int | None = column("choices", _VALID.format("style"))
    valid_tempo: int | None = column("choices", _VALID.format("tempo"))
    valid_alpha_target: int | None = column("choices", _VALID.format("alpha_target"))
    valid_alpha_speed: int | None = column("choices", _VALID.format("alpha_speed"))
    valid_alpha_curve: int | None = column("choices", _VALID.format("alpha_curve"))
    confidence_op: float | None = column("share", _CONFIDENCE.format("op"))
    confidence_slot: float | None = column("share", _CONFIDENCE.format("slot"))
    confidence_blueprint: float | None = column("share", _CONFIDENCE.format("blueprint"))
    confidence_style: float | None = column("share", _CONFIDENCE.format("style"))
    confidence_tempo: float | None = column("share", _CONFIDENCE.format("tempo"))
    confidence_alpha_target: float | None = column("share", _CONFIDENCE.format("alpha_target"))
    confidence_alpha_speed: float | None = column("share", _CONFIDENCE.format("alpha_speed"))
    confidence_alpha_curve: float | None = column("share", _CONFIDENCE.format("alpha_curve"))
    alternatives: Json | None = column("", "Per head, the two likeliest others.")
    log_prob: float | None = column("nats", "Log-probability of the whole action.")
    value: float | None = column(
        "reward", "What the critic foresees; less the potential it is the baseline."
    )
    q_taken: float | None = column("reward", "The critic's Q(s, op taken).")
    potential: float | None = column(
        "reward", "What the reward had paid in advance before the decision; 0 without a potential."
    )
    reward: float | None = column("reward", "The whole reward, raw.")
    reward_normalized: float | None = column("", "The reward the learner saw.")
    reward_terms: Json | None = column(
        "reward", "Per term of the reward: what it paid; they add up to the reward."
    )
    reward_details: Json | None = column(
        "", "What explains the terms and is not paid, by name, where there is any."
    )


@table(
    "seeds",
    "The life of one seed, as it stands now.",
    indexes=(("blueprint",),),
    versioned=True,
)
class SeedRow(Row):
    """One seed; a later record with the same key replaces the earlier one."""

    round: int = key(_ROUND)
    row: int = key(_ROW)
    ordinal: int = key("Number of the seed within the episode, from 0.")
    slot: str | None = column("", "Where it grows.")
    blueprint: str | None = column("", "What it was built from.")
    germinated: int | None = column("epochs", "Epoch of the decision that germinated it.")
    ended: int | None = column("epochs", "Epoch of its fossilization or removal.")
    fate: str | None = column("", "fossilized, pruned, dropped, or the stage it is in.")
    parameters: int | None = column("parameters", "Parameters of the seed and its gate.")
    flops: int | None = column("operations", _FLOPS_OF_SEED)
    contribution: float | None = column("points", _CONTRIBUTION)
    contribution_se: float | None = column("points", "Standard error of the contribution.")
    improvement: float | None = column("points", "Score since germination.")


@table("seed_stages", "One occupied slot at one epoch: the swim lanes.", indexes=(("stage",),))
class StageRow(Moment):
    """One slot that holds a record, as it was at the end of an epoch."""

    ordinal: int = key("Index of the slot, in action order.")
    slot: str | None = column("", "Name of the slot.")
    stage: str | None = column("", "Stage of the seed.")
    entered: bool | None = column("", "The stage is new in this epoch.")
    blueprint: str | None = column("", "What the seed was built from.")
    alpha: float | None = column("", "Amplitude.")
    alpha_target: float | None = column("", "Amplitude aimed for.")
    epochs_in_stage: int | None = column("epochs", "Epochs since the stage began.")
    age: int | None = column("epochs", "Epochs since germination.")
    parameters: int | None = column("parameters", "Parameters of the seed and its gate.")
    flops: int | None = column("operations", _FLOPS_OF_SEED)
    contribution: float | None = column("points", _CONTRIBUTION)
    contribution_se: float | None = column("points", "Standard error of the contribution.")
    improvement: float | None = column("points", "Score since germination.")
    interaction: float | None = column("points", "Sum of its interactions with other seeds.")
    grad_norm: float | None = column("", "Gradient norm of the seed.")
    grad_health: float | None = column("", "1 is healthy.")


@table("stacks", "One stack of blocks at one epoch of a network that is deepened.")
class StackRow(Moment):
    """How much of one stack was awake when an epoch was measured."""

    ordinal: int = key("Number of the stack in the model, from 0.")
    stack: str | None = column("", "Name of the stack.")
    awake: int | None = column("blocks", "Blocks that are awake; the others cost nothing.")
    blocks: int | None = column("blocks", "All blocks of the stack.")


@table(
    "contributions",
    "One measured worth of one seed, pair or set of seeds.",
    indexes=(("slot",),),
    numbered=True,
)
class ContributionRow(Moment):
    """One result of an ablation, paired over the same samples."""

    ordinal: int | None = key(_COUNT, default=None)
    kind: str | None = column("", "leave_one_out, solo_on, pair, interaction, all_off, shapley.")
    slot: str | None = column("", "The seed's slot; absent when it is about all seeds.")
    other: str | None = column("", "The second slot of a pair.")
    value: float | None = column("points", "What it is worth.")
    se: float | None = column("points", "Standard error of the value.")


@table("alarms", "One alarm, raised or cleared.", indexes=(("monitor",),), numbered=True)
class AlarmRow(Moment):
    """Something a monitor found."""

    volatile: bool = key(_VOLATILE_ROW, default=False)
    ordinal: int | None = key(_COUNT, default=None)
    monitor: str | None = column("", "Name of the monitor.")
    severity: str | None = column("", "info, warning or critical.")
    state: str = column("", "raised or cleared.", default="raised")
    subject: str | None = column("", "The head, op, slot or blueprint it is about.")
    value: float | None = column("", "What was measured.")
    threshold: float | None = column("", "What it was compared with.")
    message: str | None = column("", "What is wrong.")
    advice: str | None = column("", "What to try.")
    time: float | None = column("s", _TIME, volatile=True)


class EventKind(StrEnum):
    """What an event can be about; plug-ins may use words of their own."""

    TRAINING_STARTED = "training_started"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    SETTINGS_CHANGED = "settings_changed"
    VERSIONS_CHANGED = "versions_changed"
    STORE_RESTARTED = "store_restarted"
    TAMIYO_INITIATED = "tamiyo_initiated"
    SEED_GERMINATED = "seed_germinated"
    SEED_STAGE_CHANGED = "seed_stage_changed"
    SEED_GATE_EVALUATED = "seed_gate_evaluated"
    SEED_FOSSILIZED = "seed_fossilized"
    SEED_PRUNED = "seed_pruned"
    BLOCKS_WOKEN = "blocks_woken"
    GOVERNOR_ROLLBACK = "governor_rollback"
    DECISION_EXPLAINED = "decision_explained"
    ACTOR_WORKED = "actor_worked"
    ACTOR_LOST = "actor_lost"


@table("events", "Anything else that happened.", indexes=(("kind",),), numbered=True)
class EventRow(Moment):
    """One thing that happened."""

    volatile: bool = key(_VOLATILE_ROW, default=False)
    ordinal: int | None = key(_COUNT, default=None)
    kind: str | None = column("", "What happened, in one word: an `EventKind`, or a plug-in's own.")
    severity: str = column("", "debug, info, warning or critical.", default="info")
    slot: str | None = column("", "The slot it is about.")
    message: str | None = column("", "The same in words.")
    data: Json | None = column("", "Details.")
    time: float | None = column("s", _TIME, volatile=True)


unfold(
    "decision_terms",
    "One term of the reward of one decision.",
    of="decisions",
    column="reward_terms",
    name="term",
    values={"value": "What it paid."},
)
unfold(
    "decision_details",
    "One number that explains the reward of one decision.",
    of="decisions",
    column="reward_details",
    name="detail",
    values={"value": "The number."},
)
unfold(
    "episode_terms",
    "One term of the reward of one episode.",
    of="episodes",
    column="reward_terms",
    name="term",
    values={"value": "What it paid in the whole episode."},
)
unfold(
    "round_terms",
    "One term of the reward in one round.",
    of="rounds",
    column="reward_terms",
    name="term",
    values={"mean": "Mean per decision.", "share": "Share of the absolute reward."},
)
