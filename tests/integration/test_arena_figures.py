"""Figures of the arena on the pages are those of the raw results in research/arena."""

from __future__ import annotations

import importlib.util
import lzma
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from esper.lab.proof.arm import parse_arm, weights_digest
from esper.lab.proof.choose import measure_headroom, read_table
from esper.lab.proof.results import CellResult, read_results
from esper.lab.proof.statistics import log_ratios
from esper.lab.tasks import get_family

ROOT = Path(__file__).parents[2]
ARENA = ROOT / "research" / "arena"
README = (ARENA / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def read_packed(name: str, folder: Path) -> list[CellResult]:
    plain = folder / "results.jsonl"
    plain.write_bytes(lzma.decompress((ARENA / "results" / name).read_bytes()))
    return read_results(plain)


def load_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("arena_tables", ARENA / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hindsight_in_the_four_families(capsys: pytest.CaptureFixture[str]) -> None:
    load_tables().print_searches()
    found = capsys.readouterr().out.replace("-", "−").splitlines()
    assert len(found) == 4
    for number, line in enumerate(found, start=1):
        gains = re.search(r"plan ([+−][\d.]+ %), hindsight over it ([+−][\d.]+ ± [\d.]+ %)", line)
        assert gains is not None, line
        (row,) = (
            row for row in README.splitlines() if re.match(rf"\| \**{number}: ", row) is not None
        )
        for figure in gains.groups():
            assert figure in row
    assert "+3.8 ± 0.8 %" in RESULTS


def test_the_kept_search_was_on_the_members_of_the_family(tmp_path: Path) -> None:
    results = read_packed("search_1.jsonl.xz", tmp_path)
    labels = {member.label for member in get_family("depth_small").members("train")}
    assert {each.member for each in results} == labels
    table = read_table(results, "wait")
    plans = [arm for arm in next(iter(table.values())) if ">" in arm]
    assert measure_headroom(table, plans, "val")["hindsight"] > 0.03


def test_what_controllers_and_rules_gain_on_select(tmp_path: Path) -> None:
    results = read_packed("select.jsonl.xz", tmp_path)
    by_arm: dict[str, dict[str, CellResult]] = defaultdict(dict)
    for each in results:
        by_arm[each.arm][each.member] = each
    waiting = by_arm["wait"]
    assert len(waiting) == len(get_family("depth_small").members("select")) == 15
    said = {
        "s1": "controller, seed 1",
        "s0": "controller, seed 0",
        "s2": "controller, seed 2",
        "slope": "`slope`, tuned",
        "schedule": "best single plan (at once)",
    }
    gains = {}
    for arm, words in said.items():
        own = by_arm[arm]
        ratios = {
            member: log_ratios(own[member].test_errors, waiting[member].test_errors)
            for member in waiting
        }
        gains[arm] = 100 * float(np.mean(list(ratios.values())))
        row = next(line for line in README.splitlines() if words in line)
        assert f"{gains[arm]:+.1f}" in row
        copies = [ratio for member, ratio in ratios.items() if member.startswith("copies")]
        assert f"{100 * float(np.mean(copies)):+.1f}" in row
    one, other, third = (f"{gains[arm]:+.1f} %" for arm in ("s1", "s0", "s2"))
    assert f"{one}, {other}, {third}" in RESULTS
    for arm in ("slope", "schedule"):
        assert f"| {gains[arm]:+.1f} % |" in RESULTS


def test_the_controller_reaches_most_of_hindsight_on_train(tmp_path: Path) -> None:
    played: dict[str, dict[str, CellResult]] = defaultdict(dict)
    for each in read_packed("train.jsonl.xz", tmp_path):
        played[each.arm][each.member] = each
    assert len(played["wait"]) == 30
    gain = float(
        np.mean(
            [
                log_ratios(played["first"][member].test_errors, waiting.test_errors)
                for member, waiting in played["wait"].items()
            ]
        )
    )
    table = read_table(read_packed("search_1.jsonl.xz", tmp_path), "wait")
    plans = [arm for arm in next(iter(table.values())) if ">" in arm]
    found = measure_headroom(table, plans, "test")
    assert f"has {100 * gain:+.1f} % (`results/train.jsonl.xz`)" in README
    assert round((gain - found["single"]) / found["hindsight"], 1) == 0.9
    assert "reaches 90 % of what hindsight gains" in README


def test_the_claim_is_as_its_results_say(tmp_path: Path) -> None:
    folder = ARENA / "claim" / "proof"
    plain = tmp_path / "results.jsonl"
    plain.write_bytes(lzma.decompress((folder / "results.jsonl.xz").read_bytes()))
    played: dict[str, dict[str, CellResult]] = defaultdict(dict)
    for each in read_results(plain):
        if each.purpose == "proof":
            played[each.arm][each.member] = each
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    # Its members are those that the weights in the tree draw.
    digest = weights_digest(parse_arm(f"greedy:{ARENA / 'policy'}"))
    assert config["members"]["claim_key"] == digest
    assert set(played["wait"]) == {
        member.label for member in get_family("depth_small").drawn_claim(digest)
    }

    def over_waiting(arm: str) -> float:
        ratios = [
            log_ratios(played[arm][member].test_errors, waiting.test_errors)
            for member, waiting in played["wait"].items()
        ]
        return 100 * float(np.expm1(-np.mean(ratios)))

    assert f"mean loss is {over_waiting('first'):.1f} % above that of never growing" in README
    assert f"Its loss is {over_waiting('first'):.1f} % above that of never growing" in RESULTS
    claim = README.split("## The claim")[1]
    for arm, words in (
        ("slope", "`slope`, tuned"),
        ("schedule", "best single plan"),
        ("depth 2", "2 blocks from the start"),
        ("halving", "successive halving over depths"),
        ("random", "random legal operations"),
    ):
        row = next(line for line in claim.splitlines() if line.startswith(f"| {words} |"))
        assert f"| {over_waiting(arm):+.1f} % |" in row
