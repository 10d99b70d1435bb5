"""Every table of a run's store: one record class per table, one field per column.

This is the only definition of what is recorded, with units and meanings; the SQL, the writer and
the page Telemetry are made from it. A missing value is None and stored as NULL, never as 0. A
column is *volatile* if identical runs may differ in it: times, memory, rates, the machine.

Keys are (round, row, step, ordinal): the round of training (0 when one network is grown), the row
of the population (0 for one network), the epoch within the episode from 1, and a count within
these. Every table also has `id`, the order of writing from 1.

Values whose names differ between runs (the terms of a reward, which plug-ins may add) are one JSON
column, and a view unfolds it into rows. So a new term needs no change here.

Raise `SCHEMA_VERSION` whenever a table or a column changes.
"""

from __future__ import annotations

from enum import StrEnum

from esper.nissa.columns import Row, column, key, record, table, unfold
from esper.nissa.schema_runs import (
    CONTRIBUTION,
    COUNT,
    FLOPS,
    FLOPS_OF_HOST,
    FLOPS_OF_SEED,
    ROLLBACK,
    ROUND,
    ROW,
    STEP,
    TIME,
    VOLATILE_ROW,
    Json,
)

SCHEMA_VERSION = 9


@record
class Moment(Row):
    """One moment of one network's life: the key of everything that happens in an epoch."""

    round: int = key(ROUND)
    row: int = key(ROW)
    step: int = key(STEP)


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
    flops: int | None = column("operations", FLOPS)
    host_flops: int | None = column("operations", FLOPS_OF_HOST)
    live_seeds: int | None = column("seeds", "Seeds with a module, fossilized ones included.")
    training_steps: int | None = column("steps", "Optimizer steps so far, of a deepened network.")
    training_flops: float | None = column(
        "operations", "Training so far, of a deepened network or of one with a budget."
    )
    static_flops: float | None = column("operations", "The same with all blocks awake throughout.")
    rollback_reason: str | None = column("", ROLLBACK)
    statistics_samples: int | None = column(
        "samples", "Training samples from which BatchNorm statistics were recomputed."
    )
    seconds: float | None = column("s", "Time of the epoch.", volatile=True)
    memory_bytes: int | None = column("bytes", "Resident memory of the process.", volatile=True)
    gpu_memory_share: float | None = column("share", "GPU memory in use.", volatile=True)
    time: float | None = column("s", TIME, volatile=True)


_CONFIDENCE = "Probability of the choice of the head {}, as it was sampled."
_VALID = "Valid choices of the head {}; 1 is a masked head."


@table("decisions", "One decision of the controller about one row.", indexes=(("op",),))
class DecisionRow(Moment):
    """One decision: the action, its probabilities, its outcome and its reward."""

    ordinal: int = key(COUNT)
    op: str | None = column("", "The op that was chosen; DEEPEN where blocks wake.")
    slot: str | None = column("", "The slot or the stack it was for; absent for WAIT.")
    blueprint: str | None = column("", "Blueprint to germinate.")
    style: str | None = column("", "How the seed is blended in.")
    tempo: int | None = column("epochs", "Length of the first blend; 0: at full amplitude at once.")
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

    round: int = key(ROUND)
    row: int = key(ROW)
    ordinal: int = key("Number of the seed within the episode, from 0.")
    slot: str | None = column("", "Where it grows.")
    blueprint: str | None = column("", "What it was built from.")
    germinated: int | None = column("epochs", "Epoch of the decision that germinated it.")
    ended: int | None = column("epochs", "Epoch of its fossilization or removal.")
    fate: str | None = column("", "fossilized, pruned, dropped, or the stage it is in.")
    parameters: int | None = column("parameters", "Parameters of the seed and its gate.")
    flops: int | None = column("operations", FLOPS_OF_SEED)
    contribution: float | None = column("points", CONTRIBUTION)
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
    flops: int | None = column("operations", FLOPS_OF_SEED)
    contribution: float | None = column("points", CONTRIBUTION)
    contribution_se: float | None = column("points", "Standard error of the contribution.")
    improvement: float | None = column("points", "Score since germination.")
    interaction: float | None = column("points", "Sum of its interactions with other seeds.")
    grad_norm: float | None = column("", "Gradient norm of the seed.")
    grad_health: float | None = column("", "1 is healthy.")


@table("stacks", "One stack of blocks at one epoch of a network that is deepened.")
class StackRow(Moment):
    """Blocks of one stack that were awake when an epoch was measured."""

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

    ordinal: int | None = key(COUNT, default=None)
    kind: str | None = column("", "leave_one_out, solo_on, pair, interaction, all_off, shapley.")
    slot: str | None = column("", "The seed's slot; absent when it is about all seeds.")
    other: str | None = column("", "The second slot of a pair.")
    value: float | None = column("points", "What it is worth.")
    se: float | None = column("points", "Standard error of the value.")


@table("alarms", "One alarm, raised or cleared.", indexes=(("monitor",),), numbered=True)
class AlarmRow(Moment):
    """Something a monitor found."""

    volatile: bool = key(VOLATILE_ROW, default=False)
    ordinal: int | None = key(COUNT, default=None)
    monitor: str | None = column("", "Name of the monitor.")
    severity: str | None = column("", "info, warning or critical.")
    state: str = column("", "raised or cleared.", default="raised")
    subject: str | None = column("", "The head, op, slot or blueprint it is about.")
    value: float | None = column("", "What was measured.")
    threshold: float | None = column("", "What it was compared with.")
    message: str | None = column("", "What is wrong.")
    advice: str | None = column("", "What to try.")
    time: float | None = column("s", TIME, volatile=True)


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

    volatile: bool = key(VOLATILE_ROW, default=False)
    ordinal: int | None = key(COUNT, default=None)
    kind: str | None = column("", "What happened, in one word: an `EventKind`, or a plug-in's own.")
    severity: str = column("", "debug, info, warning or critical.", default="info")
    slot: str | None = column("", "The slot it is about.")
    message: str | None = column("", "The same in words.")
    data: Json | None = column("", "Details.")
    time: float | None = column("s", TIME, volatile=True)


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
