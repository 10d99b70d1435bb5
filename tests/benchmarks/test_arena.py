"""Members that benchmarks measure, their jobs and records, and the choice of rates."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._arena import (
    MEMBERS,
    MemberJob,
    add_recipe_options,
    add_run_options,
    members_of,
    read_lines,
    record_all,
    wider,
)
from benchmarks.tune_hosts import best_by_member, rates_by_size
from esper.lab.tasks import Member, get_family


def test_members_are_chosen_by_parts_of_their_labels() -> None:
    assert members_of(None, "select", None) == list(MEMBERS)
    assert [m.width for m in members_of(None, "select", ["plain 4x3"])] == [4, 4]


def test_members_of_a_family_are_measured_at_their_tuned_rate() -> None:
    family = get_family("image16_family")
    chosen = members_of("image16_family", "train", None)
    assert {member.rate_factor for member in chosen} == {1.0}
    assert set(chosen) < set(family.members("train"))
    assert members_of("image16_family", "select", None) == list(family.members("select"))


def test_a_wider_host_is_the_same_task_otherwise() -> None:
    member = Member(data="cifar16", width=4, train_size=2_000)
    assert wider(member, 1.5) == replace(member, width=6)


def record(width: int, rate: float, val: float) -> dict[str, object]:
    member = Member(data="cifar16", width=width, train_size=20_000)
    return {
        "member": member.label,
        "data": "cifar16",
        "host": "plain",
        "train_size": 20_000,
        "learning_rate": rate,
        "val": [val, val],
    }


def test_rates_are_summed_up_as_the_table_of_rates_has_them() -> None:
    records = [
        record(8, 0.1, 50.0),
        record(8, 0.2, 54.0),
        record(4, 0.1, 40.0),
        record(4, 0.2, 38.0),
        record(4, 0.4, 99.0),
        {"error": "out of time"},
    ]
    # The rate that only one member was tried at says nothing about the others.
    assert rates_by_size(records) == [("cifar16", "plain", 20_000, {0.1: 45.0, 0.2: 46.0})]
    best = best_by_member(records)
    assert [each["learning_rate"] for each in best.values()] == [0.2, 0.4]


def make_options(**changes: object) -> Namespace:
    parser = ArgumentParser()
    add_run_options(parser, out="unused.jsonl", seconds=60.0, seeds=3, first_seed=5)
    add_recipe_options(parser, for_seeds=False)
    options = parser.parse_args(["--device", "cpu"])
    return Namespace(**{**vars(options), **changes})


def test_a_job_follows_the_command_line_and_names_its_settings() -> None:
    settings = MemberJob.settings_of(make_options(schedule="cosine"))
    assert (settings["strategy"], settings["bf16"]) == ("sequential", False)
    job = MemberJob(member=MEMBERS[0], learning_rate=0.1, deadline=0.0, **settings)
    facts = job.facts()
    assert facts["member"] == MEMBERS[0].label
    assert (facts["learning_rate"], facts["schedule"], facts["seeds"]) == (0.1, "cosine", [5, 6, 7])


def test_records_are_appended_and_a_failure_does_not_end_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(item: int) -> dict[str, Any]:
        return {"value": 12 // item}

    out = tmp_path / "new" / "found.jsonl"
    records = record_all(work, [0, 3], 1, make_options(out=out), lambda each: f"is {each['value']}")
    assert records[0]["error"].startswith("ZeroDivisionError")
    assert records[1] == {"value": 4}
    assert read_lines(out) == records
    printed = capsys.readouterr().out
    assert "1/2 failed: ZeroDivisionError" in printed
    assert "2/2 is 4" in printed
    assert "2 of 2 done" in printed
