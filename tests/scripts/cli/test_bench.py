from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from esper.lab.bench.engine import Throughput
from tests.scripts.cli.terminal import esper

QUICK = ("--device", "cpu", "--task", "digits", "--samples", "64", "--batch-size", "32")


def test_the_engine_is_measured_against_rows_one_after_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = esper(
        capsys, "bench", *QUICK, "--strategy", "stacked", "--rows", 1, 3, "--steps", 1, "--json"
    )
    assert said.code == 0
    found = json.loads(said.out)
    assert found["target"] == "engine"
    assert found["device"] == "cpu"
    assert found["data"] == "random bytes"
    assert found["threads"] == int(os.environ["ESPER_THREADS"])
    assert found["matmul_tflops"]["fp32"] > 0
    assert [(r["strategy"], r["rows"]) for r in found["results"]] == [
        ("sequential", 2),
        ("stacked", 1),
        ("stacked", 3),
    ]
    for result in found["results"]:
        assert set(result) == {*Throughput.__slots__, "ratio"}
        assert result["ratio"] == pytest.approx(
            found["results"][0]["row_ms"] / result["row_ms"], rel=1e-6
        )
    assert "measuring 3 of 3: digits, stacked, 3 rows, fp32" in said.err


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    arguments = ("bench", "engine", *QUICK, "--strategy", "sequential", "--steps", 1)
    said = esper(capsys, *arguments)
    assert said.code == 0
    for word in ("Population engine on", "images", "val s", "of mm", "sequential", "1.00"):
        assert word in said.out
    monkeypatch.setenv("COLUMNS", "60")
    said = esper(capsys, *arguments)
    assert max(map(len, said.out.splitlines())) <= 60
    assert "…" not in said.out


def test_the_observation_is_measured_against_plain_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = esper(capsys, "bench", "observation", "--rows", 2, 8, "--rounds", 2, "--json")
    assert said.code == 0
    found = json.loads(said.out)
    assert (found["target"], found["device"]) == ("observation", "cpu")
    assert found["threads"] == int(os.environ["ESPER_THREADS"])
    assert [result["rows"] for result in found["results"]] == [2, 8]
    assert all(result["ratio"] > 1 for result in found["results"])
    said = esper(capsys, "bench", "observation", "--rows", 2, "--rounds", 1)
    assert "us per row" in said.out


def test_the_policy_is_measured_and_what_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    arguments = ("bench", "policy", "--device", "cpu", "--rows", 2, "--steps", 3, "--rounds", 1)
    said = esper(capsys, *arguments, "--json")
    assert said.code == 0
    found = json.loads(said.out)
    assert (found["steps"], found["hidden"]) == (3, 512)
    assert [result["work"] for result in found["results"]] == ["step", "update"]
    assert {result["reference"] for result in found["results"]} == {"plain steps"}
    assert "[bench]" in found["left_out"]
    said = esper(capsys, *arguments)
    assert "backward" in said.out
    assert "gymnasium is not installed" in said.err


def test_a_whole_update_is_measured_and_what_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setattr("esper.scripts.cli.bench._WIDTH", 16)
    arguments = ("bench", "update", "--device", "cpu", "--steps", 3, "--rounds", 1)
    said = esper(capsys, *arguments, "--rows", 2, 5, "--json")
    assert said.code == 0
    found = json.loads(said.out)
    assert (found["target"], found["steps"], found["passes"]) == ("update", 3, 4)
    assert [(each["rows"], each["minibatches"]) for each in found["results"]] == [(2, 2), (5, 4)]
    for result in found["results"]:
        assert (result["work"], result["reference"]) == ("update", "plain steps")
        assert result["esper_ms"] > 0
        assert result["ratio"] == pytest.approx(
            result["reference_ms"] / result["esper_ms"], rel=1e-6
        )
    assert "[bench]" in found["left_out"]
    said = esper(capsys, *arguments, "--rows", 2)
    for words in ("Whole PPO update on", "3 steps an episode", "4 passes", "plain steps"):
        assert words in said.out
    assert "gymnasium is not installed" in said.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("observation", "--device", "cuda"), "plain Python; use --device cpu"),
        (("policy", "--task", "digits"), "--task is for `esper bench engine`"),
        (("observation", "--batch-size", 4), "--batch-size is for `esper bench engine`"),
        (("policy", "--device", "cuda"), "no CUDA device"),
        (("update", "--precision", "bf16"), "--precision is for `esper bench engine`"),
        (("update", "--device", "cuda"), "no CUDA device"),
        (("engin",), "'engin' is not known, did you mean 'engine'?"),
        (("--rows", 0), "must be a whole number from 1, got '0'"),
        (("--rows", "many"), "must be a whole number from 1, got 'many'"),
        (("--device", "tpu"), "'tpu' is not known"),
        (("--device", "cuda"), "no CUDA device"),
        (("--task", "digit", "--device", "cpu"), "unknown task 'digit', did you mean 'digits'?"),
        (("--precision", "fp16"), "'fp16' is not known"),
    ],
)
def test_a_wrong_request_is_one_line(
    arguments: tuple[Any, ...],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert reason in esper(capsys, "bench", *arguments).complaint()


def test_the_help_names_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "bench", "--help")
    assert said.code == 0
    for word in ("engine", "observation", "policy", "update", "--rows", "random data"):
        assert word in said.out


@pytest.mark.slow
def test_rounds_of_a_recipe_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    said = esper(capsys, "bench", "round", "--device", "cpu", "--rounds", 1)
    assert said.code == 0, said.err
    assert "smoke" in said.out
    assert "--recipe is for" in esper(capsys, "bench", "--recipe", "smoke").complaint()
    assert "--batch-size is for" in esper(capsys, "bench", "family", "--batch-size", 2).complaint()
