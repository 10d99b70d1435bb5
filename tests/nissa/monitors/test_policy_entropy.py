from __future__ import annotations

import math

import pytest

from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES
from esper.nissa.monitors.monitor import Finding, Limits
from esper.nissa.monitors.policy import (
    COLLAPSE_OTHER,
    NATS,
    monitor_sparse_head_entropy,
    nats_thresholds,
)
from tests.nissa.monitors.series_of import (
    as_levels,
    findings,
    healthy_head,
    healthy_round,
    healthy_update,
    levels,
)


def collapse(head: str, entropies: list[float | None]) -> list[Finding]:
    """Return what is found about a head with these entropies, update by update."""
    rows = [
        healthy_head(head, number, entropy_conditional=one) for number, one in enumerate(entropies)
    ]
    return findings("head_collapse", *rows, healthy_update(0))


@pytest.mark.parametrize(
    ("entropy", "severity"), [(None, None), (0.3, None), (0.29, "warning"), (0.09, "critical")]
)
def test_the_mean_entropy(entropy: float | None, severity: str | None) -> None:
    assert levels("entropy", healthy_update(0, entropy=entropy)) == as_levels(severity)


@pytest.mark.parametrize(
    ("head", "limit"),
    [("op", 0.08), ("slot", 0.10), ("blueprint", 0.05), ("tempo", 0.05), ("style", 0.08)],
)
def test_a_head_collapses_after_three_updates_and_recovers_at_one_and_a_half_times(
    head: str, limit: float
) -> None:
    low, high = 0.9 * limit, 1.6 * limit
    assert not collapse(head, [0.5, low, low])
    (found,) = collapse(head, [0.5, low, low, low])
    assert (found.severity, found.subject, found.value, found.threshold) == (
        "critical",
        head,
        low,
        limit,
    )
    assert collapse(head, [low, low, low, 1.4 * limit])
    assert not collapse(head, [low, low, low, high])
    assert not collapse(head, [low, low, high, low, low])
    assert COLLAPSE_OTHER == 0.08


def test_a_masked_head_has_not_collapsed() -> None:
    masked = [
        healthy_head("blueprint", number, usage=0.0, free_steps=0, entropy_conditional=0.0)
        for number in range(10)
    ]
    updates = [healthy_update(number) for number in range(10)]
    assert levels("head_collapse", *masked, *updates) == {}
    assert levels("head_entropy_nats", *masked, *updates) == {}
    assert levels("sparse_head_entropy", *masked, *updates) == {}
    assert not collapse("blueprint", [None] * 10)


def test_updates_in_which_a_head_was_masked_neither_count_nor_help() -> None:
    rows = []
    for number in range(9):
        idle = number % 2 == 0
        rows.append(
            healthy_head(
                "tempo",
                number,
                entropy_conditional=0.0 if idle else 0.01,
                free_steps=0 if idle else 30,
            )
        )
    assert levels("head_collapse", *rows[:4], healthy_update(0)) == {}
    assert levels("head_collapse", *rows, healthy_update(0)) == {"tempo": "critical"}


def test_the_collapse_of_the_briefing_is_found_and_the_healthy_op_is_not() -> None:
    blueprint: list[float | None] = [0.125, 0.105, 0.082, 0.055, 0.038, 0.027, 0.018, 0.012]
    op: list[float | None] = [0.515, 0.559, 0.527, 0.458, 0.353, 0.275, 0.204, 0.192, 0.157, 0.184]
    found_at = next(end for end in range(1, 9) if collapse("blueprint", blueprint[:end]))
    assert found_at == 7
    assert not collapse("op", op)


def test_thresholds_in_nats_are_the_documents_and_scale_with_the_choices() -> None:
    for head, (warning, critical) in NATS.items():
        limits = nats_thresholds(head, HEAD_SIZES[head])
        assert limits == Limits(warning=warning, critical=critical, is_floor=True)
    fewer = nats_thresholds("blueprint", 7)
    assert fewer is not None
    assert fewer.warning == pytest.approx(1.5 * math.log(7) / math.log(HEAD_SIZES["blueprint"]))
    # Every head can be healthy whatever the number of its choices: uniform is above the warning.
    for head in HEAD_NAMES:
        for valid in range(2, HEAD_SIZES[head] + 1):
            limits = nats_thresholds(head, valid)
            assert limits is not None
            assert limits.warning is not None
            assert limits.critical is not None
            assert limits.critical < limits.warning < math.log(valid)
    assert nats_thresholds("slot", 1) is None
    assert nats_thresholds("somebody_elses", 5) is None


@pytest.mark.parametrize(
    ("head", "nats", "valid", "severity"),
    [
        ("slot", 0.59, 3.0, "warning"),
        ("slot", 0.29, 3.0, "critical"),
        ("slot", 0.61, 3.0, None),
        # Two slots: ln 2 is all there is, so 0.5 nats are plenty.
        ("slot", 0.5, 2.0, None),
        ("slot", 0.3, 2.0, "warning"),
        ("slot", 0.0, 1.0, None),
        ("slot", 0.5, None, "warning"),
        ("slot", None, 3.0, None),
    ],
)
def test_a_head_in_nats(
    head: str, nats: float | None, valid: float | None, severity: str | None
) -> None:
    row = healthy_head(head, 0, entropy_nats=nats, valid_actions=valid)
    found = levels("head_entropy_nats", row, healthy_update(0))
    assert found == as_levels(severity, head)


def test_a_sparse_head_that_is_certain_before_it_was_used_is_a_bug() -> None:
    found = monitor_sparse_head_entropy(
        {"blueprint": 0.1, "tempo": 1.0, "style": 0.1, "alpha_target": 0.0, "slot": None},
        {"blueprint": 0.05, "tempo": 0.05, "style": 0.4, "alpha_target": 0.0, "slot": 0.05},
    )
    assert [(one.subject, one.severity) for one in found] == [("blueprint", "critical")]
    assert "5.0 %" in found[0].message
    # One choice only: nothing to be certain of.
    assert monitor_sparse_head_entropy({"slot": 0.0}, {"slot": 0.05}, {"slot": 1.0}) == []
    assert monitor_sparse_head_entropy({"slot": 0.0}, {}) == []


def test_the_monitor_of_sparse_heads_leaves_the_op_to_others() -> None:
    rows = [healthy_head("op", 0, usage=0.05, entropy_nats=0.0), healthy_update(0)]
    assert levels("sparse_head_entropy", *rows) == {}
    sparse = [healthy_head("tempo", 0, usage=0.05, entropy_nats=0.01), healthy_update(0)]
    assert levels("sparse_head_entropy", *sparse) == {"tempo": "critical"}


def test_waiting_99_percent_is_healthy_and_always_is_not() -> None:
    def op(wait: float | None) -> list[object]:
        rounds = [] if wait is None else [healthy_round(0, idle_share_free=wait)]
        heads = [
            healthy_head("op", number, entropy_conditional=0.02, entropy_nats=0.05)
            for number in range(5)
        ]
        return [*rounds, *heads, healthy_update(4)]

    for monitor in ("head_collapse", "head_entropy_nats"):
        for share in (0.5, 0.99):
            assert levels(monitor, *op(share)) == {}  # type: ignore[arg-type]
        assert levels(monitor, *op(1.0)) == {"op": "critical"}  # type: ignore[arg-type]
        # Certain of something else than waiting.
        assert levels(monitor, *op(0.01)) == {"op": "critical"}  # type: ignore[arg-type]
        assert levels(monitor, *op(None)) == {"op": "critical"}  # type: ignore[arg-type]
