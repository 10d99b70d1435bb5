from __future__ import annotations

import re

from esper.nissa.events import EventKind


def test_every_kind_is_its_own_name_in_lower_case() -> None:
    for kind in EventKind:
        assert kind == kind.name.lower()
        assert re.fullmatch(r"[a-z][a-z_]*", kind)


def test_the_kinds_of_the_design_are_there() -> None:
    named = {
        "SEED_GERMINATED",
        "SEED_STAGE_CHANGED",
        "SEED_GATE_EVALUATED",
        "SEED_FOSSILIZED",
        "SEED_PRUNED",
        "EPOCH_COMPLETED",
        "BATCH_EPOCH_COMPLETED",
        "PLATEAU_DETECTED",
        "IMPROVEMENT_DETECTED",
        "DEGRADATION_DETECTED",
        "TAMIYO_INITIATED",
        "PPO_UPDATE_COMPLETED",
        "MEMORY_WARNING",
        "REWARD_HACKING_SUSPECTED",
        "PERFORMANCE_DEGRADATION",
        "GRADIENT_ANOMALY",
        "RATIO_EXPLOSION_DETECTED",
        "RATIO_COLLAPSE_DETECTED",
        "VALUE_COLLAPSE_DETECTED",
        "GRADIENT_PATHOLOGY_DETECTED",
        "NUMERICAL_INSTABILITY_DETECTED",
        "GOVERNOR_ROLLBACK",
        "TRAINING_STARTED",
        "CHECKPOINT_LOADED",
        "COUNTERFACTUAL_MATRIX_COMPUTED",
        "ANALYTICS_SNAPSHOT",
        "EPISODE_OUTCOME",
    }
    assert named <= {kind.name for kind in EventKind}
