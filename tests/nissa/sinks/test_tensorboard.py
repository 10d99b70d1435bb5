from __future__ import annotations

import os
from pathlib import Path

import pytest

from esper.nissa import open_store
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import EpisodeRow, RoundRow, RunRow, UpdateHeadRow, UpdateRow
from esper.nissa.sinks import SinkContext
from esper.nissa.sinks.tensorboard import TensorBoardSink, settings_of
from esper.testing.sinks import HOSTILE, check_sink
from tests.nissa.sinks.event_file import events, scalars, values
from tests.nissa.telling import run_row


def context(folder: Path, **changes: object) -> SinkContext:
    plain = {"folder": folder, "run": RunRow(), "is_resumed": False, "cursor": None}
    return SinkContext(**{**plain, **changes})  # type: ignore[arg-type]


def test_it_conforms(tmp_path: Path) -> None:
    check_sink(TensorBoardSink, tmp_path)
    # The last one started over, so nothing of the earlier ones is left.
    assert scalars(tmp_path / "tb") == {}


def test_curves_of_a_run_are_in_its_folder(tmp_path: Path) -> None:
    with open_store(tmp_path, run_row()) as store:
        store.write(EpochRow(step=1, val_score=70.0, val_loss=0.5))
        store.write(EpochRow(step=2, val_score=72.0))
        store.write(UpdateHeadRow(head="op", entropy=0.25, env_steps=600))
        store.write(UpdateRow(approx_kl=0.5, env_steps=600))
        store.write(EpisodeRow(episodic_return=2.0, env_steps=600))
    found = scalars(tmp_path / "tb")
    assert found["charts/val_score"] == [(1, 70.0), (2, 72.0)]
    assert found["losses/val_loss"] == [(1, 0.5)]
    assert found["losses/entropy/op"] == [(600, 0.25)]
    assert found["losses/approx_kl"] == [(600, 0.5)]
    assert found["charts/episodic_return"] == [(600, 2.0)]


def test_settings_are_hyper_parameters(tmp_path: Path) -> None:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    config = {"growth": {"epochs": 60, "twin": True, "name": "x", "none": None}, "list": [1, 2]}
    with open_store(tmp_path, run_row(config=config)):
        pass
    found = {}
    for _, value in values(tmp_path / "tb"):
        if value.metadata.plugin_data.plugin_name == "hparams":
            data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
            found.update(data.session_start_info.hparams)
    assert found["growth.epochs"].number_value == 60
    assert found["growth.twin"].bool_value is True
    assert found["growth.name"].string_value == "x"
    assert found["list"].string_value == "[1, 2]"
    assert found["task"].string_value == "digits"
    assert "growth.none" not in found


def test_settings_are_bounded_and_printable() -> None:
    run = RunRow(config={f"key{i}": HOSTILE * 100 for i in range(2_000)})
    pairs = list(settings_of(run))
    assert len(pairs) == 500
    for name, value in pairs:
        assert name.isprintable()
        assert not isinstance(value, str) or len(value) <= 500
        str(value).encode()


def test_a_resume_goes_on_in_the_same_file(tmp_path: Path) -> None:
    first = TensorBoardSink()
    first.start(context(tmp_path))
    first.write([EpochRow(step=1, val_score=1.0)])
    cursor = first.mark()
    first.write([EpochRow(step=2, val_score=99.0)])
    first.close("failed")
    second = TensorBoardSink()
    second.start(context(tmp_path, is_resumed=True, cursor=cursor))
    second.write([EpochRow(step=2, val_score=2.0)])
    second.close("finished")
    assert len(list((tmp_path / "tb").iterdir())) == 1
    assert scalars(tmp_path / "tb") == {"charts/val_score": [(1, 1.0), (2, 2.0)]}


def test_a_file_torn_by_a_kill_is_whole_after_a_resume(tmp_path: Path) -> None:
    sink = TensorBoardSink()
    sink.start(context(tmp_path))
    sink.write([EpochRow(step=1, val_score=1.0)])
    cursor = sink.mark()
    sink.close("failed")
    (path,) = (tmp_path / "tb").iterdir()
    with path.open("ab") as file:
        file.write(b"\x07torn")
    again = TensorBoardSink()
    again.start(context(tmp_path, is_resumed=True, cursor=cursor))
    again.close("finished")
    assert scalars(tmp_path / "tb") == {"charts/val_score": [(1, 1.0)]}


@pytest.mark.parametrize(("damage", "kept"), [("missing", 0), ("short", 0), ("torn", 1)])
def test_as_much_of_a_damaged_file_is_kept_as_is_whole(
    tmp_path: Path, damage: str, kept: int
) -> None:
    sink = TensorBoardSink()
    sink.start(context(tmp_path))
    sink.write([EpochRow(step=0, val_score=0.5)])
    sink.write([EpochRow(step=1, val_score=1.0)])
    cursor = sink.mark()
    sink.close("failed")
    (path,) = (tmp_path / "tb").iterdir()
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, 10 if damage == "short" else path.stat().st_size - 3)
    again = TensorBoardSink()
    again.start(context(tmp_path, is_resumed=True, cursor=cursor))
    again.write([EpochRow(step=2, val_score=2.0)])
    again.close("finished")
    assert scalars(tmp_path / "tb") == {"charts/val_score": [(0, 0.5), (2, 2.0)][1 - kept :]}


def test_files_of_others_and_cursors_of_strangers_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tb").mkdir()
    other = tmp_path / "tb" / "events.out.tfevents.1.somebody"
    other.write_bytes(b"")
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    sink = TensorBoardSink()
    cursor = {"file": "../outside", "bytes": 0}
    sink.start(context(tmp_path, is_resumed=True, cursor=cursor))
    sink.close("finished")
    assert other.exists()
    assert outside.read_bytes() == b"precious"


def test_the_file_starts_with_its_version(tmp_path: Path) -> None:
    sink = TensorBoardSink()
    sink.start(context(tmp_path))
    sink.close("finished")
    (path,) = (tmp_path / "tb").iterdir()
    assert next(events(path)).file_version == "brain.Event:2"


def test_hostile_names_become_tags(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/s3:\xff"))
    folder.mkdir()
    sink = TensorBoardSink()
    sink.start(context(folder, run=RunRow(name=HOSTILE, task=HOSTILE)))
    terms = {HOSTILE: {"mean": 1.0, "share": 1.0}}
    sink.write([RoundRow(env_steps=1, reward_terms=terms)])
    sink.close("finished")
    tags = [value.tag for _, value in values(folder / "tb")]
    assert all(tag.isprintable() for tag in tags)


def test_tensorboard_itself_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_store(tmp_path, run_row()) as store:
        store.write(EpochRow(step=1, val_score=70.0))
        store.write(EpochRow(step=2, val_score=71.0))
    loaded = EventAccumulator(str(tmp_path / "tb"))
    loaded.Reload()
    assert [(e.step, e.value) for e in loaded.Scalars("charts/val_score")] == [(1, 70.0), (2, 71.0)]
