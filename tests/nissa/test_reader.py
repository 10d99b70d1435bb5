from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.errors import UnknownNameError, UsageError
from esper.nissa import StoreError, open_run, open_store
from esper.nissa.columns import TABLES
from esper.nissa.reader import frame_library
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import RunRow
from tests.nissa.telling import EPOCHS, tell


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("read") / "run"
    tell(made, sinks=())
    return made


def test_a_run_describes_itself(folder: Path) -> None:
    with open_run(folder) as run:
        assert isinstance(run.info, RunRow)
        assert (run.info.task, run.info.status) == ("digits", "finished")
        assert run.info.config == {"growth": {"epochs": EPOCHS, "twin": True}}
        assert run.tables == tuple(TABLES)
        assert run.folder == folder
        assert repr(run) == f"<run {str(folder)!r}>"


def test_rows_are_plain_data(folder: Path) -> None:
    with open_run(folder / "run.db") as run:
        rows = run.rows("epochs", columns=["step", "stabilized", "twin_score"], where="step < 5")
        assert rows[0] == {"step": 1, "stabilized": False, "twin_score": None}
        assert rows[3] == {"step": 4, "stabilized": True, "twin_score": None}
        assert len(run.rows("epochs", where="step > ?", parameters=(28,))) == 2
        assert len(run.rows("epochs", limit=7)) == 7
        record = next(run.records("epochs"))
        assert isinstance(record, EpochRow)
        assert record.step == 1
        assert run.query("SELECT MAX(step) FROM epochs").rows == [(EPOCHS,)]


def test_a_question_leaves_nothing_behind_on_the_file_it_shares(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
    with open_store(tmp_path, RunRow(), sinks=()) as store:
        store.write(EpochRow(step=1))
        store.flush()
        with open_run(tmp_path) as run:
            assert run.query("SELECT step FROM epochs, runs", limit=0).is_truncated
            with pytest.raises(UsageError, match="took longer"):
                run.query(endless, timeout_s=0.01)
            # No transaction is left open: what was written since is seen.
            store.write(EpochRow(step=2))
            store.flush()
            assert [row["step"] for row in run.rows("epochs")] == [1, 2]
            # No limit of time is left either: this is longer than that of the question before.
            assert run.query(f"SELECT COUNT(*) FROM ({endless} LIMIT 300000)").rows == [(300000,)]
            assert (run.entry.state, run.entry.done) == ("running", 2)


def test_wrong_names_and_conditions_are_one_line(folder: Path, tmp_path: Path) -> None:
    with open_run(folder) as run:
        with pytest.raises(UnknownNameError, match="did you mean 'epochs'"):
            run.rows("epoch")
        with pytest.raises(UnknownNameError, match="unknown column of epochs 'val_scor'"):
            run.rows("epochs", columns=["val_scor"])
        with pytest.raises(UsageError, match="the condition 'nonsense > 3' cannot be used"):
            run.rows("epochs", where="nonsense > 3")
        with pytest.raises(UsageError, match="cannot be used"):
            run.rows("epochs", where="1; DELETE FROM epochs")
    with pytest.raises(StoreError, match="there is no store"):
        open_run(tmp_path)


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_tables_are_data_frames(folder: Path, library: str) -> None:
    pytest.importorskip(library)
    with open_run(folder) as run:
        frame: Any = run.table("epochs", library=library)
        assert list(frame.columns) == list(TABLES["epochs"].names)
        assert len(frame) == EPOCHS
        assert list(frame["stabilized"])[:4] == [False, False, False, True]
        absent = (
            frame["twin_score"].is_null() if library == "polars" else frame["twin_score"].isna()
        )
        assert list(absent)[:6] == [True] * 4 + [False] * 2
        small: Any = run.table("decisions", columns=["op", "tempo"], limit=3, library=library)
        assert small.shape == (3, 2)
        assert str(small["tempo"].dtype) == "Int64"
        empty: Any = run.table("epochs", where="step < 0", library=library)
        assert len(empty) == 0
        for name in run.tables:
            assert run.table(name, library=library).shape[1] == len(TABLES[name].columns)


def test_polars_comes_before_pandas_and_either_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()

    def load(name: str) -> types.ModuleType:
        if name not in installed:
            raise ImportError(name)
        return types.ModuleType(name)

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(UsageError, match=r"need polars or pandas.*\.rows\(\) for plain rows"):
        frame_library()
    installed.add("pandas")
    assert frame_library()[0] == "pandas"
    with pytest.raises(UsageError, match="pip install polars"):
        frame_library("polars")
    installed.add("polars")
    assert frame_library()[0] == "polars"
    assert frame_library("pandas")[0] == "pandas"
    with pytest.raises(UnknownNameError, match="unknown data-frame library 'panda'"):
        frame_library("panda")


def test_nothing_is_loaded_until_a_frame_is_asked_for(folder: Path) -> None:
    loaded = {"polars", "pandas"} & set(sys.modules)
    with open_run(folder) as run:
        run.rows("epochs")
    assert {"polars", "pandas"} & set(sys.modules) == loaded
