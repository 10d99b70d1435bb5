"""Models, losses and loaders of users' own: each that is awkward gets one clear line, or grows."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import numpy as np
import pytest

import esper
from esper.leyline.errors import EsperError, OwnCodeError
from tests.integration.awkward import BATCH, CASES, SAMPLES, Case, batches, data
from tests.scripts.cli.terminal import esper as command

pytestmark = [
    pytest.mark.filterwarnings("ignore::esper.leyline.errors.EsperWarning"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]

EPOCHS = 4
SHARED = 121
"""Samples of the command's data: the last of the training batches has one."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_by_a_call(case: Case) -> None:
    options = {"train": batches(), "val": batches(), **case.options}
    if case.says is None:
        grown = esper.grow(case.model(), ["body"], epochs=EPOCHS, controller="random", **options)
        assert len(grown.history) == EPOCHS
        return
    with pytest.raises(EsperError) as caught:
        esper.grow(case.model(), ["body"], epochs=EPOCHS, controller="random", **options)
    said = str(caught.value)
    assert re.search(case.says, said), said
    assert "\n" not in said
    if isinstance(caught.value, OwnCodeError):
        assert caught.value.__cause__ is not None
        shown = "".join(traceback.format_exception(caught.value))
        assert type(caught.value.__cause__).__name__ in shown


BY_COMMAND = {name: case for name, case in CASES.items() if not case.options}


@pytest.mark.parametrize("case", BY_COMMAND.values(), ids=BY_COMMAND)
def test_by_the_command(
    case: Case,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A part is kept for validation and testing, so that there are more samples than are trained on.
    x, y = (np.concatenate([part.numpy()] * 4) for part in data())
    np.savez(tmp_path / "data.npz", x=x[:SHARED], y=y[:SHARED])
    monkeypatch.chdir(tmp_path)
    said = command(
        capsys,
        *("grow", "--model", f"tests.integration.awkward:{case.model.__name__}"),
        *("--slots", "body", "--data", "data.npz", "--epochs", EPOCHS, "--no-twin"),
        *("--controller", "random", "--batch-size", BATCH, "--out", "run"),
    )
    if case.says is None:
        assert said.code == 0, said.err
        return
    assert said.code in (1, 2)
    assert "Traceback" not in said.err
    lines = [line for line in said.err.splitlines() if line.startswith("esper: ")]
    complaint = [line for line in lines if not line.startswith("esper: warning")]
    assert len(complaint) == 1, said.err
    assert re.search(case.by_command or case.says, complaint[0]), complaint[0]
    assert complaint[0].isprintable()


def test_there_is_a_last_batch_of_one() -> None:
    assert SAMPLES % BATCH == 1
