"""V1 against V2 side by side (`research/campaign/versions.py`): whose turn it is, and the table."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CAMPAIGN = Path(__file__).parents[2] / "research" / "campaign"


@pytest.fixture(scope="module")
def versions() -> Iterator[ModuleType]:
    sys.path.insert(0, str(CAMPAIGN))
    try:
        import versions
    finally:
        sys.path.remove(str(CAMPAIGN))
    yield versions
    for name in ("versions", "versions_table"):
        sys.modules.pop(name)


def make_line(name: str, seed: int, round: int, **columns: Any) -> dict[str, Any]:
    """Return a round whose return rises by 1 every round, with a little of the seed's own."""
    return {
        "name": name,
        "seed": seed,
        "round": round,
        "rounds": 9,
        "rows": 4,
        "steps": 150,
        "parameters": 1000,
        "return": round + 0.1 * seed,
        "gain": 0.5,
        "explained_variance": 0.25,
        "entropy": {"blueprint": 0.8, "tempo": None},
        "credits": {"1": 0, "2": 3, "3": 1},
        "credit": {"1": 0.0, "2": 0.6, "3": 0.2},
        "fossils": {"1": 5, "2": 6, "3": 1},
        "decisions": {"0": 10, "1": 5, "2": 3, "3": 1},
        "seconds": 2.0,
        "timings": {"update": 0.5},
        "memory_bytes": 2**30,
        **columns,
    }


def make_run(name: str, seed: int, rounds: int = 9, **columns: Any) -> list[dict[str, Any]]:
    return [make_line(name, seed, number, **columns) for number in range(rounds)]


def criteria(versions: ModuleType, lines: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    found = versions.print_summary.__globals__["criteria"](
        versions.print_summary.__globals__["Results"](lines)
    )
    return {what: (measured, answer) for what, measured, answer in found}


def test_whoever_has_played_the_fewest_rounds_is_next_and_ours_come_last(
    versions: ModuleType,
) -> None:
    jobs = [versions.Job(*each, []) for each in (("ours-128", 0, 0), ("documents-v1", 0, 2))]
    jobs += [versions.Job("documents-000", 0, 1, [])]
    order = []
    while (job := versions.next_job(jobs, 3, math.inf)) is not None:
        order.append(job.name)
        job.played += 1
    assert order == ["documents-000", "documents-v1", "documents-000"] + 3 * ["ours-128"]


def test_no_round_begins_that_would_not_end_in_time(versions: ModuleType) -> None:
    slow, busy = versions.Job("documents-v1", 0, 1, []), versions.Job("documents-000", 0, 0, [])
    slow.seconds, busy.busy = 20.0, True
    assert versions.next_job([slow, busy], 9, 21.0) is None
    assert versions.next_job([slow, busy], 9, 23.0) is slow


def test_versions_differ_in_their_policy_and_entropy_alone(versions: ModuleType) -> None:
    parser = ["--task", "digits", "--steps", "150", "--rows", "4", "--device", "cpu"]
    options = versions.parse([*parser, "--rounds", "2"])
    old, new = (versions.configuration(name, 3, options) for name in versions.VERSIONS[:2])
    assert (old.policy.lstm_hidden_dim, new.policy.lstm_hidden_dim) == (128, 512)
    assert old.ppo.entropy_multipliers != new.ppo.entropy_multipliers
    assert new == old.replace(
        recipe=new.recipe,
        policy=new.policy,
        ppo=old.ppo.replace(entropy_multipliers=new.ppo.entropy_multipliers),
    )
    assert (old.episode_length, old.reward.mode, old.seed) == (150, "shaped", 3)
    assert old.ppo.epochs > 1


def test_the_criteria_are_figures(versions: ModuleType) -> None:
    lines = [line for seed in range(3) for line in make_run("documents-v1", seed)]
    for seed in range(3):
        better = make_run("documents-000", seed, seconds=3.0, explained_variance=0.5)
        lines += [{**line, "return": line["return"] + 1.0} for line in better]
    found = criteria(versions, lines)
    assert found["V1 learns: return, last third − first"] == ("+6.00 [+6.00, +6.00]", "yes")
    assert found["000, 1: return, last third"] == ("V2 − V1: +1.00 [+1.00, +1.00]", "yes")
    assert found["000, 2; 002, 6: hindsight credits a round, 2 live"][0].startswith("V2 − V1: +0")
    measured, answer = found["000, 5: a round within 2 times V1's"]
    assert (measured, answer) == ("3.0 s against 2.0 s: 1.50 times", "yes")
    entropy = "000, 4: blueprint entropy on GERMINATE stays above 0.27"
    assert found[entropy] == ("0.80 [0.80, 0.80] in the last third, 0.80 at the least", "yes")
    assert found["002, 7: tempo entropy on GERMINATE stays above 0.27"] == ("never drawn", "–")


def test_a_head_that_collapsed_once_is_said_to_have(versions: ModuleType) -> None:
    lines = [line for seed in range(2) for line in make_run("documents-v1", seed)]
    lines += make_run("documents-000", 0) + make_run("documents-000", 1)
    lines[-1]["entropy"] = {"blueprint": 0.1, "tempo": 0.9}
    found = criteria(versions, lines)
    assert found["000, 4: blueprint entropy on GERMINATE stays above 0.27"][1] == "no"


def test_runs_of_a_kind_are_compared_over_the_rounds_that_all_have(
    versions: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        make_run("documents-v1", 0) + make_run("documents-000", 0, 6) + make_run("ours-128", 0, 3)
    )
    versions.print_summary(lines)
    text = capsys.readouterr().out
    assert "| figure | documents-v1 | documents-000 | ours-128 |" in text
    assert "| rounds compared | 6 | 6 | 3 |" in text
    assert "| return, last third | +4.50 | +4.50 | +2.00 |" in text
    assert "| fossils that paid credit, 2 live | 50% | 50% | 50% |" in text


@pytest.mark.slow
def test_two_processes_stop_and_go_on_from_small_states(tmp_path: Path) -> None:
    out, small = tmp_path / "versions.jsonl", tmp_path / "small"
    command = [sys.executable, str(CAMPAIGN / "versions.py"), "--out", str(out), "--seeds", "1"]
    command += ["--versions", "documents-v1", "documents-000", "--task", "digits", "--steps", "2"]
    command += ["--rows", "2", "--rounds", "2", "--processes", "2", "--device", "cpu"]

    def play(*more: str) -> list[tuple[str, int]]:
        done = subprocess.run([*command, *more], check=False, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        lines = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
        return sorted((line["name"], line["round"]) for line in lines)

    names = ("documents-000", "documents-v1")
    assert play("--seconds", "600", "--most-rounds", "1", "--pack", str(small)) == [
        (name, 0) for name in names
    ]
    state = out.with_suffix(".state")
    for path in small.glob("*.pt"):
        assert path.stat().st_size < 0.2 * (state / path.name).stat().st_size
        path.replace(state / path.name)
    assert play("--seconds", "600") == [(name, round) for name in names for round in (0, 1)]
