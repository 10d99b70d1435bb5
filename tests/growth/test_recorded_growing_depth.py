"""Deepened networks in run folders: stopped, killed and continued, to the bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import esper
from esper.growth.grown import Deepened
from esper.growth.recorded import RecordedGrowth
from esper.leyline.errors import UsageError
from esper.leyline.records import EpochRecord
from esper.nissa.reader import read_history
from tests.growth.depth.models import make_gpt, tokens
from tests.nissa.telling import contents
from tests.plots import plain_history, same

TRAIN = [(batch[:, :-1], batch[:, 1:]) for batch in map(tokens, range(5))]
VAL = TRAIN[:2]
EPOCHS = 7

pytestmark = [
    pytest.mark.filterwarnings("ignore:The best validation score is that of epoch"),
    pytest.mark.filterwarnings("ignore:The run stopped after epoch"),
]


class Patient:
    """A rule of one's own that remembers what it has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, progress: Any) -> Any:
        self.seen += len(progress.losses) > 0
        return progress.doubled if self.seen % 12 == 0 else None

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def deepen(out: Path | None, **changes: Any) -> Deepened:
    options = {
        "train": TRAIN,
        "val": VAL,
        "epochs": EPOCHS,
        "loss": "language",
        "optimizer": partial(AdamW, lr=0.01),
        "deepen": True,
        **changes,
    }
    seed = options.pop("model_seed", 0)
    grown = esper.grow(make_gpt(dropout=0.1, seed=seed), out=out, **options)
    assert isinstance(grown, Deepened)
    return grown


def interrupt_after(epoch: int) -> Any:
    def stop(record: EpochRecord) -> None:
        if record.epoch == epoch:
            signal.raise_signal(signal.SIGINT)

    return stop


def assert_same(one: Deepened, other: Deepened) -> None:
    assert plain_history(one.history) == plain_history(other.history)
    assert replace(one.summary, seconds=0.0) == replace(other.summary, seconds=0.0)
    assert same(one.model.state_dict(), other.model.state_dict())
    assert (one.twin is None) == (other.twin is None)
    if one.twin is not None and other.twin is not None:
        assert same(one.twin.state_dict(), other.twin.state_dict())


def of_stacks(folder: Path) -> dict[str, Any]:
    found = contents(folder)
    return {name: found[name] for name in ("epochs", "stacks", "decisions", "seeds")}


@pytest.mark.parametrize(
    "changes",
    [
        {"twin": True, "keep": "last"},
        {"deepen": {"controller": "slope", "start": 1, "order": "interleave"}, "epochs": 20},
        {"deepen": {"controller": Patient}, "keep": "last"},
    ],
    ids=["schedule", "slope", "function"],
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(RecordedGrowth, "is_due", lambda self, step: True)

    def options() -> dict[str, Any]:
        asked = dict(changes.get("deepen", {}))
        if asked.get("controller") is Patient:
            asked["controller"] = Patient()
        return {**changes, "deepen": asked}

    whole = deepen(tmp_path / "whole", **options())
    blocks = [record.depth.awake["blocks"] for record in whole.history if record.depth]
    assert blocks[0] == 1
    assert blocks[-1] == 4
    for stop in (1, 4):
        run = tmp_path / f"stopped after {stop}"
        with pytest.raises(KeyboardInterrupt, match="is saved"):
            deepen(run, on_epoch=interrupt_after(stop), **options())
        again = deepen(run, resume=True, model_seed=9, **options())
        assert_same(again, whole)
        assert of_stacks(run) == of_stacks(tmp_path / "whole")


def test_a_run_that_was_killed_goes_on_to_the_bit(tmp_path: Path) -> None:
    script = f"""
import os, signal
import esper.growth.recorded
from tests.growth.test_recorded_growing_depth import TRAIN, deepen
esper.growth.recorded.SAVE_EVERY_S = 0.0

class Deadly(list):
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        for number, batch in enumerate(list.__iter__(self)):
            if (self.epoch, number) == (5, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

deepen({str(tmp_path / "run")!r}, train=Deadly(TRAIN))
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert esper.read_manifest(tmp_path / "run").epoch == 4
    again = deepen(tmp_path / "run", resume=True)
    whole = deepen(None)
    assert [r.depth.awake["blocks"] for r in whole.history[:4] if r.depth] == [1, 2, 4, 4]
    assert_same(again, whole)


def test_the_store_tells_the_history(tmp_path: Path) -> None:
    grown = deepen(tmp_path / "run", deepen={"start": 1, "at": {3: 2, 4: 4}}, twin=True)
    with esper.open_run(tmp_path / "run") as stored:
        assert plain_history(read_history(stored)) == plain_history(grown.history)
        assert stored.info.controller == "schedule"
        assert stored.info.host_parameters == grown.summary.parameters_before
        events = stored.rows("events", where="kind = 'blocks_woken'")
    assert [event["message"] for event in events] == [
        "blocks: schedule: 1 to 2 blocks after step 3, at 9 % of the run",
        "blocks: schedule: 2 to 4 blocks after step 4, at 11 % of the run",
    ]


def test_a_longer_run_goes_on_from_where_it_is(tmp_path: Path) -> None:
    first = deepen(tmp_path / "run", epochs=4, keep="last")
    longer = deepen(tmp_path / "run", epochs=6, keep="last", resume=True)
    assert plain_history(longer.history)[:3] == plain_history(first.history)[:3]
    assert len(longer.history) == 6
    assert longer.awake == {"blocks": 4}
    # Moments that were not reached yet are those of the run as long as it is now.
    late = {"start": 1, "at": {0.9: 4}}
    deepen(tmp_path / "late", epochs=2, keep="last", deepen=late, on_epoch=_end_at(1))
    found = deepen(tmp_path / "late", epochs=6, keep="last", deepen=late, resume=True)
    blocks = [record.depth.awake["blocks"] for record in found.history if record.depth]
    assert blocks == [1, 1, 1, 1, 1, 4]


def _end_at(epoch: int) -> Any:
    def stop(record: EpochRecord) -> None:
        if record.epoch == epoch:
            raise StopIteration

    return stop


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"deepen": {"start": 2}}, r"growth\.deepen\.start is None"),
        ({"deepen": None}, r"growth\.deepen\.controller is 'schedule' .* cannot become None"),
        ({"deepen": {"controller": "slope"}}, "controller"),
    ],
)
def test_another_plan_needs_another_run(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    deepen(tmp_path / "run", epochs=2)
    with pytest.raises(UsageError, match=problem):
        esper.grow(
            make_gpt(dropout=0.1),
            **{
                "train": TRAIN,
                "val": VAL,
                "epochs": 3,
                "loss": "language",
                "optimizer": partial(AdamW, lr=0.01),
                "deepen": True,
                "out": tmp_path / "run",
                "resume": True,
                **changes,
            },
        )


def test_a_finished_run_says_what_it_grew_into(tmp_path: Path) -> None:
    grown = deepen(tmp_path / "run", keep="last")
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert '"training_flops"' in summary
    assert grown.folder == tmp_path / "run"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "GPT: a deepened network" in page
    assert "1 → 2 → 4 of 4 blocks" in page
    # It is grown on in another run, which takes its folder for the weights.
    deeper = deepen(None, deepen={"weights": str(tmp_path / "run"), "start": 4}, epochs=1)
    assert deeper.awake == {"blocks": 4}
    assert torch.isfinite(torch.tensor(deeper.summary.val_score))
