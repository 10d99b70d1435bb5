from __future__ import annotations

from pathlib import Path

from esper.nissa import open_store
from esper.nissa.columns import TABLES
from esper.nissa.database import connect_reader
from esper.nissa.rows import decode, read_records
from esper.nissa.schema import EpochRow, UpdateRow
from tests.nissa.telling import run_row


def test_flags_json_and_absent_values_come_back() -> None:
    table = TABLES["updates"]
    values = {"round": 1, "is_last": 1, "q_by_op": '{"WAIT": 0.5}', "was_skipped": 0}
    row = decode(table, [values.get(name) for name in table.names])
    assert row["is_last"] is True
    assert row["was_skipped"] is False
    assert row["q_by_op"] == {"WAIT": 0.5}
    assert row["approx_kl"] is None


def test_records_come_back_as_they_were_told(tmp_path: Path) -> None:
    told = [
        EpochRow(step=step, val_score=0.5 * step, stabilized=step > 1, time=1.0) for step in (1, 2)
    ]
    update = UpdateRow(round=3, approx_kl=0.1, advantage_by_op={"WAIT": {"n": 3}}, time=2.0)
    with open_store(tmp_path, run_row(), sinks=()) as store:
        store.write(*told, update)
    connection = connect_reader(tmp_path / "run.db")
    assert list(read_records(connection, "epochs")) == told
    assert list(read_records(connection, "epochs", "WHERE step > ?", (1,))) == told[1:]
    assert list(read_records(connection, "updates")) == [update]
    connection.close()
