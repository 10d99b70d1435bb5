"""The kinds of events, one name each."""

from __future__ import annotations

from enum import StrEnum


class EventKind(StrEnum):
    """What an event can be about; plug-ins may use words of their own."""

    TRAINING_STARTED = "training_started"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    SETTINGS_CHANGED = "settings_changed"
    STORE_RESTARTED = "store_restarted"
    SINK_FAILED = "sink_failed"
    TAMIYO_INITIATED = "tamiyo_initiated"
    SEED_GERMINATED = "seed_germinated"
    SEED_STAGE_CHANGED = "seed_stage_changed"
    SEED_GATE_EVALUATED = "seed_gate_evaluated"
    SEED_FOSSILIZED = "seed_fossilized"
    SEED_PRUNED = "seed_pruned"
    EPOCH_COMPLETED = "epoch_completed"
    BATCH_EPOCH_COMPLETED = "batch_epoch_completed"
    PPO_UPDATE_COMPLETED = "ppo_update_completed"
    EPISODE_OUTCOME = "episode_outcome"
    PLATEAU_DETECTED = "plateau_detected"
    IMPROVEMENT_DETECTED = "improvement_detected"
    DEGRADATION_DETECTED = "degradation_detected"
    PERFORMANCE_DEGRADATION = "performance_degradation"
    REWARD_HACKING_SUSPECTED = "reward_hacking_suspected"
    GRADIENT_ANOMALY = "gradient_anomaly"
    GRADIENT_PATHOLOGY_DETECTED = "gradient_pathology_detected"
    RATIO_EXPLOSION_DETECTED = "ratio_explosion_detected"
    RATIO_COLLAPSE_DETECTED = "ratio_collapse_detected"
    VALUE_COLLAPSE_DETECTED = "value_collapse_detected"
    NUMERICAL_INSTABILITY_DETECTED = "numerical_instability_detected"
    MEMORY_WARNING = "memory_warning"
    GOVERNOR_ROLLBACK = "governor_rollback"
    COUNTERFACTUAL_MATRIX_COMPUTED = "counterfactual_matrix_computed"
    ANALYTICS_SNAPSHOT = "analytics_snapshot"
