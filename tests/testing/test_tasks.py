"""The contract check catches each way in which a task can break it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from esper.kasmina.hosts import MlpConfig
from esper.lab.tasks import TASKS, Source, Task, TaskConfig, register_task
from esper.lab.tasks.task import DataPath
from esper.leyline.errors import UsageError
from esper.testing import check_task


class Flawed(Task):
    """A task whose data can be made to change between two loads, or to overflow the loss."""

    defaults = TaskConfig(
        host="mlp",
        host_options=MlpConfig(in_features=3, hidden=(4,), num_outputs=2),
        input_shape=(3,),
        num_classes=2,
        samples_per_step=16,
    )
    flaw = "none"
    loads = 0

    def read(self, data_path: DataPath | None) -> Source:
        Flawed.loads += 1
        x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        if self.flaw == "unsteady":
            x += Flawed.loads
        if self.flaw == "overflow":
            x[:, 0] = 3e38
        return Source("flawed", "memory", x, np.arange(64) % 2, num_classes=2)


@pytest.fixture(autouse=True)
def flawed() -> Iterator[None]:
    register_task("flawed")(Flawed)
    yield
    TASKS.unregister("flawed")


def test_a_sound_task_passes() -> None:
    check_task("flawed")


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("unsteady", "two loads give different train splits"),
        ("overflow", "one finite loss per sample"),
    ],
)
def test_each_flaw_is_named(monkeypatch: pytest.MonkeyPatch, flaw: str, words: str) -> None:
    monkeypatch.setattr(Flawed, "flaw", flaw)
    with pytest.raises(UsageError, match=words):
        check_task("flawed")
