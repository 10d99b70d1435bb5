"""Every setting is run and told of, and a test that trains cannot be left out unnoticed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import esper
from esper.leyline.actions import placeholder_actions
from tests import trains
from tools.instruction_sets import INSTRUCTION_SETS, available
from tools.portable import Outcome, Setting, main, plan, summary

HERE = Path(__file__)
ELSEWHERE = trains.TESTS / "browser" / "test_new.py"


def seen(steps: int = 0, processes: int = 0) -> dict[str, int]:
    return {trains.STEPS: steps, trains.PROCESSES: processes}


def counted(before: dict[str, int]) -> tuple[int, int]:
    now = trains.seen
    return tuple(now[what] - before[what] for what in (trains.STEPS, trains.PROCESSES))  # type: ignore[return-value]


def test_an_optimizer_step_is_training() -> None:
    before = dict(trains.seen)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()
    assert counted(before) == (0, 0)
    torch.optim.SGD([weight], lr=0.1).step()
    assert counted(before) == (1, 0)


def test_a_step_of_stacked_rows_is_training() -> None:
    population = esper.Population("digits_mlp", 2, device="cpu", strategy="stacked", horizon=4)
    before = dict(trains.seen)
    population.reset()
    population.step(placeholder_actions(2))
    population.close()
    assert counted(before)[0] > 0


def test_a_python_process_may_train() -> None:
    before = dict(trains.seen)
    subprocess.run([sys.executable, "-c", ""], check=True)
    subprocess.run("true", shell=True, check=True)
    assert counted(before) == (0, 1)
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    assert counted(before) == (0, 2)


def test_a_test_that_trains_has_to_be_on_the_list() -> None:
    assert trains.what_is_missing(HERE, seen(steps=3)) is None
    assert trains.what_is_missing(ELSEWHERE, seen()) is None
    said = trains.what_is_missing(ELSEWHERE, seen(steps=3, processes=1))
    assert said is not None
    assert "(optimizer steps: 3, Python processes: 1)" in said
    assert "'browser/test_new.py'" in said
    quiet = trains.TESTS / "nissa" / "test_new.py"
    assert trains.what_is_missing(quiet, seen(processes=1)) is None
    assert trains.what_is_missing(quiet, seen(steps=1, processes=1)) is not None


def test_what_is_on_the_list_exists_and_is_marked(request: pytest.FixtureRequest) -> None:
    for name in (*trains.FILES, *trains.ONLY_PROCESSES):
        assert (trains.TESTS / name).exists(), name
    assert request.node.get_closest_marker("trains") is not None


UNLISTED = """
import pytest
import torch

@pytest.fixture(scope="module")
def trained():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()

def test_it(trained):
    pass
"""


def test_a_test_that_trains_and_is_on_no_list_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_unlisted.py"
    file.write_text(UNLISTED)
    command = [sys.executable, "-m", "pytest", "-p", "tests.trains", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, file],
        cwd=trains.TESTS.parent,
        env={name: value for name, value in os.environ.items() if name != trains.SHARE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "this test trains (optimizer steps: 1)" in done.stdout


def test_a_processor_has_what_is_narrower_than_its_widest() -> None:
    assert available("default") == ("default",)
    assert available("avx512") == tuple(INSTRUCTION_SETS)
    assert available("sve256") == ("default",)
    assert available()[0] == "default"


def test_a_process_computes_as_it_is_told() -> None:
    """Told of nothing, it may choose; the last test here tells it, as `make test-portable` does."""
    used = torch.backends.cpu.get_cpu_capability().lower()
    assert os.environ.get("ATEN_CPU_CAPABILITY", used) == used
    assert os.environ["ESPER_THREADS"] == str(torch.get_num_threads())


def test_every_test_is_run_with_one_thread_under_each_set_and_once_with_two() -> None:
    told = [str(setting) for setting in plan(["default", "avx2"])]
    assert told == [
        "default, 1 thread",
        "avx2, 1 thread",
        "default, 2 threads, 1/2",
        "avx2, 2 threads, 2/2",
    ]
    assert [str(setting) for setting in plan(["default"], [2])] == ["default, 2 threads"]


def test_shares_leave_nothing_out_and_have_nothing_twice() -> None:
    files = {trains.TESTS / f"test_{i}.py" for i in range(7)}
    shares = [trains.share_of(files, f"{i}/3") for i in (1, 2, 3)]
    assert set().union(*shares) == files
    assert sorted(map(len, shares)) == [2, 2, 3]


def test_the_summary_names_what_failed_and_what_was_skipped() -> None:
    good = Outcome(Setting("default", 1), 0, "12 passed", (), 61.2)
    bad = Outcome(
        Setting("avx2", 2, "2/2"), 1, "1 failed, 11 passed", ("tests/a.py::test_b",), 70.0
    )
    assert summary([good, bad], ["avx512"]).splitlines() == [
        "default, 1 thread       ok         61 s  12 passed",
        "avx2, 2 threads, 2/2    FAILED     70 s  1 failed, 11 passed",
        "    tests/a.py::test_b",
        "avx512                  skipped: this processor does not have it",
    ]


def test_it_runs_the_tests_of_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    only = ["--set", "default", "--threads", "2", "--jobs", "1"]
    chosen = [f"{HERE}::test_a_process_computes_as_it_is_told", "-p", "no:cacheprovider"]
    assert main([*only, *chosen]) == 0
    said = capfd.readouterr().out
    assert "== 1 of 1: default, 2 threads" in said
    assert "1 passed" in said.splitlines()[-1]
