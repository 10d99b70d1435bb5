from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esper.leyline.errors import UsageError
from esper.nissa import open_store, query_run
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import RunRow
from esper.nissa.sinks import SinkContext
from esper.nissa.sinks.wandb import WandbSink
from tests.nissa.telling import run_row

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None,
    reason="W&B is not installed: pip install 'esper-grow[wandb]'",
)

# In a process of its own: W&B keeps threads, a service and global settings.
OFFLINE = """
import sys
from pathlib import Path
from esper.nissa import open_run, open_store, RunRow
from esper.nissa.schema import EpochRow
from esper.nissa.schema_runs import UpdateHeadRow, UpdateRow
from esper.testing.sinks import check_sink
from esper.nissa.sinks.wandb import WandbSink

folder = Path(sys.argv[1])
run = RunRow(task="digits", name="a <b> \\x1b[31m", config={"growth": {"lr": 0.1}})
with open_store(folder, run, sinks=[WandbSink(mode="offline")]) as store:
    for step in range(1, 6):
        store.write(EpochRow(step=step, val_score=50.0 + step, val_loss=1.0 / step))
    store.write(UpdateHeadRow(head="op", entropy=0.5, env_steps=600))
    store.write(UpdateRow(approx_kl=0.9, env_steps=600))
    mark = store.watermark()
    store.finish("finished")
with open_store(folder, run, resume=mark, sinks=[WandbSink(mode="offline")]) as store:
    store.write(EpochRow(step=6, val_score=60.0))
    store.finish("finished")
with open_run(folder) as stored:
    print([row["message"] for row in stored.rows("alarms", where="volatile = 1")])
    print(stored.info.run_id)
check_sink(lambda: WandbSink(mode="offline"), folder / "conformance")
print("conforms")
"""


@needs_wandb
def test_it_works_offline(tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("WANDB_")},
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
    }
    (tmp_path / "run" / "conformance").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    failures, run_id, conforms = done.stdout.splitlines()[-3:]
    assert failures == "[]"
    assert conforms == "conforms"
    files = list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert files
    written = b"".join(path.read_bytes() for path in files)
    for name in (b"charts/val_score", b"losses/entropy/op", b"esper/step"):
        assert name in written


def test_without_wandb_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = WandbSink()
    context = SinkContext(folder=tmp_path, run=RunRow(), is_resumed=False, cursor=None)
    with pytest.raises(UsageError, match=r"pip install 'esper-grow\[wandb\]'"):
        sink.start(context)
    sink.close("failed")


def test_a_run_goes_on_without_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with open_store(tmp_path, run_row(), sinks=["wandb"]) as store:
        store.write(EpochRow(step=1))
        store.finish("finished")
    assert query_run(tmp_path, "SELECT subject FROM alarms").rows == [("wandb",)]
    assert query_run(tmp_path, "SELECT status FROM runs").rows == [("finished",)]
