"""Weights & Biases, as the optional extra `wandb`.

`WANDB_MODE` or `wandb offline` decides whether it uses a server. The x axis is `esper/step`. A
resumed run continues the same W&B run; points after the checkpoint are sent twice, because W&B
cannot delete points.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from esper.leyline.errors import UsageError, needing, reason_of
from esper.nissa.columns import Row, storable_text
from esper.nissa.schema import AlarmRow
from esper.nissa.schema_runs import RunRow
from esper.nissa.sinks.sink import SinkContext, points_of, register_sink
from esper.nissa.sinks.tensorboard import settings_of

STEP = "esper/step"
PROJECT = "esper"

_WITHOUT_SERVER = ("offline", "dryrun", "disabled")


@register_sink("wandb")
class WandbSink:
    """Sends points and alarms to one W&B run."""

    def __init__(self, *, project: str = PROJECT, mode: str | None = None) -> None:
        """Create an idle sink; `mode` is W&B's own, such as "offline", and its default if None."""
        self._project = project
        self._mode = mode
        self._wandb: Any = None
        self._logger: Any = None
        self._run = RunRow()

    def start(self, context: SinkContext) -> None:
        """Start or continue the W&B run."""
        self._wandb = _load()
        self._run = context.run
        self._logger = self._wandb.init(
            project=self._project,
            mode=self._mode,
            dir=str(context.folder),
            id=context.run.run_id,
            name=storable_text(context.run.name or context.folder.name)[:128],
            config=dict(settings_of(context.run)),
            resume="allow",
            settings=self._wandb.Settings(console="off", silent=True),
        )
        self._logger.define_metric("*", step_metric=STEP)

    def write(self, records: Sequence[Row]) -> None:
        """Log the records, one entry per step."""
        step: int | None = None
        entry: dict[str, Any] = {}
        for record in records:
            if isinstance(record, AlarmRow):
                self._alarm(record)
            for point in points_of(record, self._run):
                # Names of reward terms may contain any characters.
                name = storable_text(point.name)
                if entry and (point.step != step or name in entry):
                    self._logger.log({STEP: step, **entry})
                    entry = {}
                step = point.step
                entry[name] = point.value
        if entry:
            self._logger.log({STEP: step, **entry})

    def mark(self) -> Mapping[str, Any]:
        """Return the id of the W&B run."""
        return {"id": self._run.run_id}

    def close(self, status: str) -> None:
        """End the W&B run."""
        if self._logger is not None:
            self._logger.finish(exit_code=0 if status == "finished" else 1)
            self._logger = None

    def _alarm(self, record: AlarmRow) -> None:
        if record.state == "raised" and record.severity in ("warning", "critical"):
            level = "ERROR" if record.severity == "critical" else "WARN"
            self._logger.alert(
                title=storable_text(str(record.monitor)),
                text=storable_text(str(record.message)),
                level=level,
                wait_duration=60,
            )


def check_wandb() -> None:
    """Raise if W&B is not installed or not logged in, before a run starts.

    In a terminal W&B asks for its key here; a sink runs on a thread of its own and cannot.
    """
    wandb = _load()
    if wandb.setup().settings.mode in _WITHOUT_SERVER:
        return
    try:
        wandb.login()
    except Exception as error:  # foreign code, and its kinds of errors differ by version
        reason = reason_of(error).rstrip(".")
        raise UsageError(
            f"W&B cannot be used: {reason}; run `wandb login`, or set WANDB_MODE=offline"
        ) from error


def _load() -> Any:
    with needing("the sink wandb", "wandb"):
        module = importlib.import_module("wandb")
    return module
