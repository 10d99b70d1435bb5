from __future__ import annotations

import dataclasses

import pytest

from esper.lab.proof.results import CellResult
from esper.lab.proof.watching import Run, how_they_end, likenesses, parting, runs_of, watch
from esper.lab.tasks.arena import DepthMember
from tests.lab.proof.made_up import result


def cell(member: str, moments: list[list[int]], copies: list[list[int]]) -> CellResult:
    return result("mine", member, [0.1] * len(moments), moments=moments, copies=copies)


def test_outcomes_are_copies_by_slot_in_the_scored_network() -> None:
    runs = runs_of(cell("m", [[3, 9], [3, 9], [], [5]], [[3, 1], [3, 1], [0, 0], [0, 1]]))
    assert runs[0] == runs[1]
    assert len({run.outcome for run in runs}) == 3
    assert [run.moments for run in runs] == [(3, 9), (3, 9), (), (5,)]
    assert [run.epochs for run in runs] == [60] * 4
    assert runs_of(result("mine", "m", [0.1, 0.2])) == []


def run(outcome: str, *moments: int) -> Run:
    return Run(outcome, moments, 60)


def test_runs_part_when_their_germinations_differ_in_number() -> None:
    # Both double at the start of epoch 13, one of them again at that of 25: 24 of 60 are over.
    assert parting([run("4", 13, 25), run("2", 13)]) == pytest.approx(24 / 60)
    assert parting([run("2", 1), run("1")]) == 0.0
    assert parting([run("2", 20), run("2", 10), run("2", 10)]) == pytest.approx(9 / 60)
    assert parting([run("first slot", 7), run("second slot", 7)]) is None


def test_how_often_seeds_end_alike_and_when_they_part() -> None:
    groups = [
        [run("2", 13), run("2", 13), run("2", 7), run("4", 13, 31)],
        [run("1"), run("1"), run("1"), run("1")],
        [run("2", 7), run("other", 7), run("2", 7), run("other", 7)],
        [run("2", 13), run("2", 13), run("1"), run("1")],
        [run("alone", 9)],
    ]
    found = how_they_end(groups)
    assert found.groups == 4
    assert found.alike == pytest.approx((0.75 + 1.0 + 0.5 + 0.5) / 4)
    assert found.alike_in_moments == pytest.approx((0.5 + 1.0 + 1.0 + 0.5) / 4)
    assert (found.differing, found.never_parted) == (3, 1)
    # At the start of epoch 7 in the first group, of 13 in the last.
    assert found.parted_at == pytest.approx((6 / 60 + 12 / 60) / 2)
    assert how_they_end([]).alike is None


BASE = DepthMember(kind="gpt", data="sources", width=24, steps=1_000)


def test_members_are_alike_if_only_hidden_facts_differ() -> None:
    hidden = [
        dataclasses.replace(BASE, train_size=500),
        dataclasses.replace(BASE, label_noise=0.6),
        dataclasses.replace(BASE, steps=1_030),
    ]
    known = [
        dataclasses.replace(BASE, steps=4_000),
        DepthMember(kind="resnet", data="digits", width=8, steps=1_000),
        DepthMember(kind="resnet", data="digits", width=8, stages=2, steps=1_000),
    ]
    assert likenesses([BASE, *known, *hidden]) == [
        [member.label for member in (BASE, *hidden)],
    ]
    assert likenesses(known) == []


def test_a_rule_by_descriptors_ends_alike_where_members_are() -> None:
    same = {m: cell(m, [[7]] * 4, [[1]] * 4) for m in ("a", "b", "c")}
    found = watch(same, [["a", "b"]])
    assert found is not None
    assert (found["same member"].groups, found["same member"].alike) == (3, 1.0)
    assert (found["alike beforehand"].groups, found["alike beforehand"].alike) == (1, 1.0)


def test_a_controller_that_watches_parts_where_hidden_facts_differ() -> None:
    results = {
        "clean": cell("clean", [[7, 13]] * 4, [[3]] * 4),
        "noisy": cell("noisy", [[7]] * 4, [[1]] * 4),
        "other": cell("other", [[]] * 4, [[0]] * 4),
    }
    found = watch(results, [["clean", "noisy"]])
    assert found is not None
    assert found["same member"].alike == 1.0
    assert found["same member"].parted_at is None
    assert found["alike beforehand"].alike == 0.5
    assert found["alike beforehand"].parted_at == pytest.approx(12 / 60)


def test_arms_that_grow_nothing_and_older_results_say_nothing() -> None:
    assert watch({"a": cell("a", [[], []], [[0], [0]])}, []) is None
    assert watch({"a": result("mine", "a", [0.1, 0.2])}, []) is None
