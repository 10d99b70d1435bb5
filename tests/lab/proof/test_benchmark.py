from __future__ import annotations

import json
from typing import Any

import pytest

from esper.lab.proof.benchmark import (
    BENCHMARKS,
    CONTROLS,
    check_entry,
    checksum,
    describe_benchmarks,
    get_benchmark,
    publishable,
)
from esper.lab.proof.results import rank
from esper.leyline.errors import UnknownNameError, UsageError
from esper.scripts.cli.main import main


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_version_means_one_thing_for_ever(name: str) -> None:
    """Where this fails, members or settings have changed: give the benchmark a new version."""
    assert checksum(get_benchmark(name).config()) == get_benchmark(name).checksum


def test_tasks_have_names_of_their_own() -> None:
    tasks = get_benchmark("digits-v1").tasks()
    assert list(tasks)[:2] == ["digits-v1/01", "digits-v1/02"]
    assert len({member.label for member in tasks.values()}) == len(tasks) == 16


def test_an_entry_changes_nothing_that_counts() -> None:
    config = get_benchmark("digits-quick-v1").config("patient=heuristic:plateau_epochs=9")
    check_entry(config)
    check_entry(config.replace(play=config.play.replace(device="cpu", rows=8)))
    for changed in (
        config.replace(seeds=5),
        config.replace(wilcoxon=True),
        config.replace(reported=()),
        config.replace(play=config.play.replace(param_limit=3.0)),
        config.replace(members=config.members.replace(count=3)),
    ):
        with pytest.raises(UsageError, match="fixes members, seeds, limits"):
            check_entry(changed)
    with pytest.raises(UsageError, match="add the arms random"):
        check_entry(config.replace(arms=tuple(arm for arm in config.arms if arm != "random")))
    with pytest.raises(UnknownNameError, match="did you mean 'digits-v1'"):
        get_benchmark("digit-v1")


def test_the_ranking_is_by_log_ratio_over_waiting() -> None:
    errors: dict[str, Any] = {
        "wait": [[0.2, 0.2], [0.4, 0.4]],
        "worse": [[0.3, 0.3], [0.5, 0.5]],
        "better": [[0.1, 0.1], [0.2, 0.2]],
    }
    ranking = rank(errors)
    assert list(ranking) == ["better", "wait", "worse"]
    assert ranking["wait"] == 0.0
    assert ranking["better"] == pytest.approx(0.693, abs=1e-3)


def test_what_is_published_names_the_version_and_ranks_every_arm() -> None:
    arm = {"test_score": 90.0, "error": 0.1, "parameters": 1.5, "flops": 1.2, "pruned": 3.0}
    found = {"benchmark": "digits-v1", "arms": {"wait": arm}, "ranking": {"wait": 0.0}}
    published = publishable(found)
    assert published["checksum"] == get_benchmark("digits-v1").checksum
    assert published["arms"]["wait"]["score"] == 0.0
    assert "pruned" not in published["arms"]["wait"]


def test_published_scores_are_of_this_version_and_of_all_controls() -> None:
    for name, each in describe_benchmarks().items():
        if each["scores"] is not None:
            assert each["scores"]["benchmark"] == name
            assert each["scores"]["checksum"] == each["checksum"]
            assert set(CONTROLS) <= set(each["scores"]["arms"])


def test_the_command_lists_benchmarks_and_refuses_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["prove", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed["benchmarks"]) == set(BENCHMARKS)
    entry = ["prove", "own=heuristic:rest_epochs=9", "--benchmark", "digits-v1", "--out", "x"]
    assert main([*entry, "--seeds", "3"]) == 2
    assert "fixes members" in capsys.readouterr().err
