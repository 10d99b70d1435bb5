from __future__ import annotations

from typing import Any

from esper.nissa.monitors import MONITORS
from esper.nissa.report.page import group_alarms, render_alarms
from esper.nissa.schema import AlarmRow


def alarm(step: int, **changes: Any) -> AlarmRow:
    plain: dict[str, Any] = {
        "step": step,
        "monitor": "growth",
        "severity": "info",
        "message": "it grew",
        "advice": "Set a limit.",
    }
    return AlarmRow(**{**plain, **changes})


def test_the_gravest_comes_first_and_repeats_are_one_row() -> None:
    groups = group_alarms(
        [
            *(alarm(step) for step in (3, 5, 9)),
            alarm(7, monitor="own", severity="critical", message="it broke", advice=None),
        ]
    )
    assert [(group.first.step, group.last, group.count) for group in groups] == [
        (7, 7, 1),
        (3, 9, 3),
    ]
    page = render_alarms(groups)
    assert page.index("it broke") < page.index("it grew")
    assert "epoch 3 to 9, 3 times" in page
    assert "Set a limit." in page


def test_what_is_over_says_so_until_it_comes_back() -> None:
    over = [alarm(3), alarm(6, state="cleared", message="growth is over")]
    assert "epoch 3, then over" in render_alarms(group_alarms(over))
    assert "growth is over" not in render_alarms(group_alarms(over))
    assert "over" not in render_alarms(group_alarms([*over, alarm(8)]))
    worse = [alarm(3), alarm(6, severity="warning")]
    assert [group.is_over for group in group_alarms(worse)] == [False, True]


def test_a_monitor_says_what_its_alarm_means() -> None:
    name = next(iter(MONITORS.names()))
    assert MONITORS.get(name).meaning[:20] in render_alarms(group_alarms([alarm(1, monitor=name)]))


def test_rounds_are_named_in_training() -> None:
    """People count rounds from 1, as progress does; a store from 0."""
    assert "round 5" in render_alarms(group_alarms([alarm(0, round=4)]))
    assert "round 1" in render_alarms(group_alarms([alarm(0, round=0)]))
