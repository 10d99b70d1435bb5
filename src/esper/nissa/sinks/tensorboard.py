"""TensorBoard: scalars and hyper-parameters in `tb/` of the run folder.

One event file per run. A resume truncates it to its length at the checkpoint and appends to it, so
that the curves of an interrupted run are those of an uninterrupted one. The message classes come
from tensorboardX, which is imported when the sink starts.
"""

from __future__ import annotations

import importlib
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from esper.nissa.columns import Row, storable_text
from esper.nissa.schema_runs import RunRow
from esper.nissa.sinks.sink import SinkContext, points_of, register_sink
from esper.utils.files import append_to, open_regular, refuse_link
from esper.utils.settings import flat_settings

FOLDER = "tb"

_SUFFIX = ".esper"
_MAX_SETTINGS = 500
_MAX_TEXT = 500


@register_sink("tensorboard")
class TensorBoardSink:
    """Writes one event file."""

    def __init__(self) -> None:
        """Create an idle sink; nothing is opened yet."""
        self._run = RunRow()
        self._path = Path()
        self._file: BinaryIO | None = None
        self._event: Any = None
        self._summary: Any = None
        self._checksum: Any = None

    def start(self, context: SinkContext) -> None:
        """Open the event file; if the run is resumed, truncate it to the cursor."""
        self._event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._checksum = importlib.import_module("tensorboardX.record_writer").masked_crc32c
        self._run = context.run
        folder = context.folder / FOLDER
        refuse_link(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = _cut_back(folder, context.cursor) if context.is_resumed else None
        if kept is None:
            stamp = int(context.run.created or time.time())
            self._path = folder / f"events.out.tfevents.{stamp}{_SUFFIX}"
            self._file = append_to(self._path)
        else:
            self._path, self._file = kept
        if kept is None:
            self._append(self._event(wall_time=time.time(), file_version="brain.Event:2"))
            self._write_settings()

    def write(self, records: Sequence[Row]) -> None:
        """Write the points of records, one event per step."""
        step: int | None = None
        values: list[Any] = []
        for record in records:
            for at, value in self._values(record):
                if at != step and values:
                    self._append_values(step, values)
                    values = []
                step = at
                values.append(value)
        if values:
            self._append_values(step, values)
        self._opened().flush()

    def mark(self) -> Mapping[str, Any]:
        """Flush the file; the cursor is its name and length."""
        file = self._opened()
        file.flush()
        return {"file": self._path.name, "bytes": file.tell()}

    def close(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("the sink is closed")
        return self._file

    def _values(self, record: Row) -> Iterator[tuple[int, Any]]:
        for point in points_of(record, self._run):
            scalar = self._summary.Summary.Value
            yield point.step, scalar(tag=_tag(point.name), simple_value=point.value)

    def _write_settings(self) -> None:
        hparams = importlib.import_module("tensorboardX.summary").hparams
        metric = "charts/val_score" if self._run.kind == "grow" else "charts/episodic_return"
        for summary in hparams(dict(settings_of(self._run)), {metric: 0.0})[:2]:
            self._append(self._event(wall_time=time.time(), summary=summary))

    def _append_values(self, step: int | None, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._append(self._event(wall_time=time.time(), step=step or 0, summary=summary))

    def _append(self, event: Any) -> None:
        """Write one record: length, checksum of the length, data, checksum of the data."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._opened().write(
            length
            + struct.pack("<I", self._checksum(length))
            + data
            + struct.pack("<I", self._checksum(data))
        )


def settings_of(run: RunRow) -> Iterator[tuple[str, str | float | bool]]:
    """Yield the settings of a run as flat names and values, for hyper-parameter tables."""
    top = {"kind": run.kind, "task": run.task, "controller": run.controller, "seed": run.seed}
    config = run.config if isinstance(run.config, Mapping) else {}
    pairs = [(name, value) for name, value in top.items() if value is not None]
    flat = flat_settings(config).items()
    pairs += [(name, value) for name, value in flat if value is not None and name not in top]
    for name, value in pairs[:_MAX_SETTINGS]:
        if isinstance(value, bool | int | float):
            yield _tag(name), value if isinstance(value, bool) else float(value)
        else:
            yield _tag(name), storable_text(str(value))[:_MAX_TEXT]


def _tag(name: str) -> str:
    if not name.isprintable():
        name = storable_text("".join(c if c.isprintable() else "_" for c in name))
    return name[:_MAX_TEXT]


def _cut_back(folder: Path, cursor: Mapping[str, Any] | None) -> tuple[Path, BinaryIO] | None:
    """Remove everything after the cursor; return the file to append to, if it exists."""
    kept = None if cursor is None else folder / Path(str(cursor["file"])).name
    for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        if path != kept:
            path.unlink()
    if cursor is None or kept is None or not kept.exists():
        return None
    # After a power cut the end may be missing: only whole records are kept.
    whole = min(int(cursor["bytes"]), _whole_bytes(kept))
    if not whole:
        kept.unlink()
        return None
    file = append_to(kept)
    file.truncate(whole)
    file.seek(0, os.SEEK_END)
    return kept, file


def _whole_bytes(path: Path) -> int:
    """Return the length of a file up to its last whole record."""
    size, at = path.stat().st_size, 0
    with open_regular(path) as file:
        while len(length := file.read(8)) == 8:
            end = at + 16 + int.from_bytes(length, "little")
            if end > size:
                break
            at = end
            file.seek(at)
    return at
