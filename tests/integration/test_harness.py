"""The harness in small numbers; `make test-slow` runs it in full (`python -m tests.harness`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.scripts.cli.main import main
from tests.harness.__main__ import try_inputs
from tests.harness.accidents import ESPER, GROW, TRAIN, WORKERS, Subject, finish, survive
from tests.harness.hostile import ATTACKS

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and limits are POSIX")


def test_hostile_inputs_are_one_line_each(tmp_path: Path) -> None:
    tried, faults = try_inputs(4 * len(ATTACKS), seed=7_000, folder=tmp_path)
    assert faults == []
    assert set(tried) == set(ATTACKS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Subject], Any]:
    """What a run leaves that nothing happens to."""
    found: dict[str, Any] = {}

    def numbers(subject: Subject) -> Any:
        if subject.name not in found:
            run = tmp_path_factory.mktemp("whole") / "run"
            if subject is GROW:
                # In this process: Python and PyTorch are there already.
                assert main([*subject.start[len(ESPER) :], str(run)]) == 0
            else:
                assert finish(subject, run) is None
            found[subject.name] = subject.numbers(run)
        return found[subject.name]

    return numbers


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        (GROW, "disk full"),
        pytest.param(GROW, "killed while saving", marks=pytest.mark.slow),
        pytest.param(GROW, "readers", marks=pytest.mark.slow),
        pytest.param(GROW, "folder replaced", marks=pytest.mark.slow),
        pytest.param(GROW, "store held", marks=pytest.mark.slow),
        # Those of training take as long as all others together.
        pytest.param(TRAIN, "folder moved away", marks=pytest.mark.slow),
        pytest.param(TRAIN, "a second writer", marks=pytest.mark.slow),
        pytest.param(WORKERS, "worker killed", marks=pytest.mark.slow),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_accidents_change_no_number(
    subject: Subject, name: str, whole: Callable[[Subject], Any], tmp_path: Path
) -> None:
    assert survive(subject, name, tmp_path, whole(subject), seed=1) is None
