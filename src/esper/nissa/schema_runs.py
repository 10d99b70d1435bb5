"""Tables of a run and of the rounds in which a controller trains; `schema` has all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from esper.nissa.columns import Row, column, key, table

ROUND = "Round of training, from 0; 0 when one network is grown."
ROW = "Row of the population; 0 for one network."
STEP = "Epochs done in the episode when it happened, from 1."
COUNT = "Number within the same round, row and step, from 0."
TIME = "When it was recorded, seconds since 1970 (UTC)."
FLOPS = "Operations of one sample's forward pass, seeds and gates included."
FLOPS_OF_HOST = "Operations of one sample's forward pass through the host alone."
FLOPS_OF_SEED = "Operations per sample of the seed and its gate."
CONTRIBUTION = "Points lost if it were taken out now; last measured."
ENV_STEPS = "Decisions of all rows since the start of the run; the x axis of training curves."
ROLLBACK = "Why the governor acted: not_finite, lobotomy or divergence; absent where it did not."
VOLATILE_ROW = "The row speaks of the machine (memory, a sink, a resume), not of the run."

Json = Mapping[str, Any] | Sequence[Any]
"""Plain data, which is stored as JSON text."""


@table("runs", "The run itself: one row.")
class RunRow(Row):
    """One run: its settings, its machine and its results."""

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
    host_flops: int | None = column("operations", FLOPS_OF_HOST)
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
    flops: int | None = column("operations", FLOPS)
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
    """Figures of all episodes of one round."""

    round: int = key(ROUND)
    episodes: int | None = column("episodes", "Episodes played in the round.")
    env_steps: int | None = column("decisions", ENV_STEPS)
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
    gain_mean: float | None = column("points", "Mean final validation score minus the twin's.")
    gain_p05: float | None = column("points", "Validation gains of the episodes: 5th percentile.")
    gain_p25: float | None = column("points", "Validation gains of the episodes: 25th percentile.")
    gain_p50: float | None = column("points", "Validation gains of the episodes: median.")
    gain_p75: float | None = column("points", "Validation gains of the episodes: 75th percentile.")
    gain_p95: float | None = column("points", "Validation gains of the episodes: 95th percentile.")
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
    eval_gain: float | None = column("points", "Mean validation gain over the twin of these.")
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
    time: float | None = column("s", TIME, volatile=True)


@table("updates", "One optimisation epoch of a PPO update; all measured after its step.")
class UpdateRow(Row):
    """The learner's state after one pass over a round's decisions."""

    round: int = key(ROUND)
    ordinal: int = key("Optimisation epoch within the update, from 0.")
    is_last: bool = column("", "It was the last epoch of the update.", default=True)
    env_steps: int | None = column("decisions", ENV_STEPS)
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
    time: float | None = column("s", TIME, volatile=True)


@table("update_heads", "One head of the policy in one optimisation epoch; write before `updates`.")
class UpdateHeadRow(Row):
    """One head after one pass over a round's decisions."""

    round: int = key(ROUND)
    ordinal: int = key("Optimisation epoch within the update, from 0.")
    head: str = key("Name of the head.", default="")
    env_steps: int | None = column("decisions", ENV_STEPS)
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
    """One episode: task, scores and how it ended."""

    round: int = key(ROUND)
    row: int = key(ROW)
    ordinal: int = key("Number of the episode within the round and row, from 0.")
    env_steps: int | None = column("decisions", ENV_STEPS)
    env_seed: int | None = column("", "Seed of the environment.")
    task: str | None = column("", "Task of the row.")
    length: int | None = column("epochs", "Epochs of the episode.")
    episodic_return: float | None = column("reward", "Sum of raw rewards.")
    return_normalized: float | None = column("", "Sum of normalised rewards.")
    reward_terms: Json | None = column("reward", "Per term: its sum, raw.")
    final_score: float | None = column("points", "Validation score at the end.")
    best_score: float | None = column("points", "Best validation score.")
    twin_score: float | None = column("points", "Final validation score of the waiting twin.")
    gain: float | None = column("points", "Final validation score minus the twin's.")
    parameters: int | None = column("parameters", "Trainable parameters at the end.")
    host_parameters: int | None = column("parameters", "Trainable parameters of the host.")
    parameter_ratio: float | None = column("ratio", "Added over host parameters.")
    flops: int | None = column("operations", FLOPS)
    host_flops: int | None = column("operations", FLOPS_OF_HOST)
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
    rollback_reason: str | None = column("", ROLLBACK)
    time: float | None = column("s", TIME, volatile=True)
