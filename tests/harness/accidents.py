"""Accidents of a run that is going on: it is killed, its disk fills up, its folder goes away.

Every accident ends with the run continued to its end, which must leave the very numbers of a run
that nothing happened to.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from esper.nissa.folder import GROWING, TRAINING, Checkpoints, RunKind
from esper.nissa.recorded import INTERRUPTED
from tests.plots import same
from tests.simic.training.tiny import tiny_config

LONGEST_S = 300
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1
_ROOT = Path(__file__).parents[2]
_OF_THE_PROCESS = frozenset(
    {"seconds", "telemetry", "command", "twin_seconds", "memory_bytes", "world", "random"}
)
"""What differs from process to process; Python draws random states that nobody seeds anew."""


@dataclass(frozen=True)
class Subject:
    """A run that accidents happen to."""

    name: str
    kind: RunKind
    start: tuple[str, ...]
    """The command, but for its folder."""
    resume: tuple[str, ...]

    def command(self, run: Path) -> list[str]:
        """Return the command that starts the run, or continues it where it was started."""
        has_begun = (run / "config.yaml").exists()
        return [sys.executable, *(self.resume if has_begun else self.start), str(run)]

    def numbers(self, run: Path) -> Any:
        """Return all that a finished run leaves, without times."""
        state = Checkpoints(run, self.kind).load()
        assert state is not None, f"{run} has no checkpoint"
        return _comparable(state)


ESPER = ("-m", "esper.scripts.cli.main")
GROW = Subject(
    "grow",
    GROWING,
    (*ESPER, "grow", "--task", "digits", "--epochs", "6", "--controller", "random", "--out"),
    (*ESPER, "grow", "--resume", "--out"),
)


def _training(name: str, strategy: str) -> Subject:
    """Return the tiny training run by the command, with a checkpoint after every round."""
    command = (*ESPER, "--import", "tests.simic.training.tiny", "train")
    recipe = Path(tempfile.gettempdir()) / f"esper-harness-{os.getpid()}-{strategy}.yaml"
    config = tiny_config(checkpoint_seconds=0.01, strategy=strategy)
    recipe.write_text(yaml.safe_dump(config.to_mapping()))
    atexit.register(recipe.unlink, missing_ok=True)
    return Subject(
        name, TRAINING, (*command, str(recipe), "--out"), (*command, "--resume", "--out")
    )


TRAIN = _training("train", "sequential")
WORKERS = _training("train (workers)", "workers")
SUBJECTS = (GROW, TRAIN, WORKERS)


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items() if key not in _OF_THE_PROCESS}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return value


# --------------------------------------------------------------------------------------- processes


@contextmanager
def going(
    subject: Subject, run: Path, *, limit: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Within the block the run goes on, in a group of its own; its files may be limited in size."""

    def before() -> None:
        if sys.platform == "linux":
            # For root, too, a folder that is read-only shall be so.
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = subprocess.Popen(
        subject.command(run),
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=before,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill(process)
        process.communicate()


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a run and all its workers at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(subject: Subject, run: Path) -> str | None:
    """Continue a run to its end; return what went wrong, None where nothing did."""
    with going(subject, run) as process:
        try:
            _, err = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return "it hangs"
    if process.returncode != 0:
        return f"it cannot be continued: {err[-300:]}"
    return None


def compare(subject: Subject, run: Path, whole: Any) -> str | None:
    """Return whether a run left other numbers than one without accidents."""
    problem = finish(subject, run)
    if problem is None and not same(subject.numbers(run), whole):
        problem = "its numbers are others"
    return problem


def wait_until(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> bool:
    """Wait for a condition while a run goes on; return whether it came true."""
    limit = time.monotonic() + LONGEST_S
    while process.poll() is None and time.monotonic() < limit:
        if is_so():
            return True
        time.sleep(0.002)
    return False


def has_checkpoint(run: Path) -> bool:
    return (run / "checkpoints" / "latest" / "state" / "manifest.json").exists()


def is_saving(run: Path) -> bool:
    try:
        return any(
            name.startswith((".saving-", ".old-")) for name in os.listdir(run / "checkpoints")
        )
    except OSError:
        return False


# --------------------------------------------------------------------------------------- accidents


def kill_at_random(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Kill the run at any moment, from its first import on."""
    with going(subject, run) as process:
        moment = time.monotonic() + r.uniform(0.1, 8.0)
        wait_until(process, lambda: time.monotonic() >= moment)
        kill(process)
    return None


def kill_while_saving(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Kill the run while a checkpoint is being written."""
    with going(subject, run) as process:
        for _ in range(r.randrange(1, 4)):
            if not wait_until(process, lambda: is_saving(run)):
                break
            time.sleep(r.uniform(0.0, 0.02))
        kill(process)
    return None


def kill_worker(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Kill one worker process after another while the run goes on; the run must not end of it."""
    with going(subject, run) as process:
        for _ in range(3):
            if not wait_until(process, lambda: len(workers_of(process)) > 1):
                break
            moment = time.monotonic() + r.uniform(0.0, 4.0)
            wait_until(process, lambda until=moment: time.monotonic() >= until)  # type: ignore[misc]
            for victim in r.sample(workers_of(process), k=min(1, len(workers_of(process)))):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        try:
            _, err = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return "it hangs without a worker"
    return None if process.returncode == 0 else f"it ended with its worker: {err[-300:]}"


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the worker processes of a run."""
    found = []
    for folder in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for child in folder.read_text().split():
            with suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def interrupt(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Press Ctrl-C at any moment: all processes of the group get it, workers that import too."""
    with going(subject, run) as process:
        moment = time.monotonic() + r.uniform(0.1, 8.0)
        wait_until(process, lambda: time.monotonic() >= moment)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            _, err = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return "it does not end when it is interrupted"
    if not (run / "config.yaml").exists():
        return None  # before there was a run to continue
    if process.returncode == 0:
        return None  # after its last step
    if process.returncode != INTERRUPTED or "--resume" not in err or "Traceback" in err:
        return f"exit code {process.returncode} when interrupted: {err[-400:]}"
    return None


def fill_disk(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Let no file grow beyond a size, as on a disk that is full."""
    with going(subject, run, limit=int(10 ** r.uniform(2.5, 6.0))) as process:
        try:
            _, err = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return "it hangs on a full disk"
    if "Traceback" in err:
        return f"a traceback on a full disk: {err[-400:]}"
    if process.returncode not in (0, 1, 2):
        return f"exit code {process.returncode} on a full disk: {err[-300:]}"
    return None


def read_only(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Let no file be made in the folder of the run, until it has ended."""
    with going(subject, run) as process:
        if not wait_until(process, lambda: has_checkpoint(run)):
            return None
        with unwritable(run):
            try:
                _, err = process.communicate(timeout=LONGEST_S)
            except subprocess.TimeoutExpired:
                return "it hangs in a folder that cannot be written"
    if "Traceback" in err:
        return f"a traceback in a folder that cannot be written: {err[-400:]}"
    return None


@contextmanager
def unwritable(run: Path) -> Iterator[None]:
    """Within the block no file can be made in the folder of a run."""
    folders = [run, run / "checkpoints"]
    before = [folder.stat().st_mode for folder in folders]
    for folder in folders:
        folder.chmod(0o555)
    try:
        yield
    finally:
        for folder, mode in zip(folders, before, strict=True):
            folder.chmod(mode)


def move_away(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Move the folder of the run away, and back when the run has noticed."""
    with going(subject, run) as process:
        if not wait_until(process, lambda: has_checkpoint(run)):
            return None
        moved = run.with_name("moved")
        os.rename(run, moved)
        try:
            _, err = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return "it does not notice that its folder is gone"
    if run.exists():
        return f"it made the folder anew: {[path.name for path in run.iterdir()]}"
    os.rename(moved, run)
    if process.returncode == 0 or "Traceback" in err:
        return f"exit code {process.returncode} without its folder: {err[-300:]}"
    return None


def replace_folder(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Put another folder in the place of the run's own, which must be left alone."""
    own = {"log.txt": "another log\n", "summary.json": "{}\n", "config.yaml": "task: other\n"}
    with going(subject, run) as process:
        if not wait_until(process, lambda: has_checkpoint(run)):
            return None
        moved = run.with_name("moved")
        os.rename(run, moved)
        run.mkdir()
        for name, text in own.items():
            (run / name).write_text(text)
        try:
            _, err = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return "it does not notice that its folder is another"
    left = {path.name: path.read_text() for path in run.iterdir() if path.is_file()}
    shutil.rmtree(run)
    os.rename(moved, run)
    if left != own:
        return f"it wrote to a folder that is not its own: {sorted(left)}"
    if process.returncode == 0 or "Traceback" in err:
        return f"exit code {process.returncode} in another folder: {err[-300:]}"
    return None


def hold_store(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Let another program hold the store for some time; the run must wait for it."""
    with going(subject, run) as process:
        if not wait_until(process, lambda: has_checkpoint(run)):
            return None
        other = sqlite3.connect(run / "run.db", isolation_level=None, timeout=10.0)
        try:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(r.uniform(6.0, 12.0))
            other.execute("ROLLBACK")
        finally:
            other.close()
        try:
            _, err = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return "it hangs after its store was held"
    return None if process.returncode == 0 else f"it ended when its store was held: {err[-300:]}"


def write_twice(subject: Subject, run: Path, r: random.Random) -> str | None:
    """Try to continue and to replace a run that is going on."""
    with going(subject, run) as process:
        if not wait_until(process, lambda: has_checkpoint(run)):
            return None
        with going(subject, run) as second:
            _, err = second.communicate(timeout=LONGEST_S)
        if process.poll() is None and "is being written by another process" not in err:
            return f"a second writer was not refused: {err[-300:]}"
        _, err = process.communicate(timeout=LONGEST_S)
    if process.returncode != 0:
        return f"the first writer ended: {err[-300:]}"
    return None


def read_meanwhile(subject: Subject, run: Path, r: random.Random) -> str | None:
    """List, ask and report a run while it is written."""
    calls = (
        ["runs", "--root", str(run.parent), "--json"],
        ["query", str(run), "SELECT COUNT(*) FROM epochs", "--json"],
        ["report", str(run), "--out", str(run.parent / "report.html")],
    )
    script = (
        "import io, json, sys, contextlib\n"
        "from esper.scripts.cli.main import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    assert main(arguments) == 0, arguments\n"
    )
    with going(subject, run) as process:
        if not wait_until(process, lambda: has_checkpoint(run)):
            return None
        while process.poll() is None:
            done = subprocess.run(
                [sys.executable, "-c", script, json.dumps(calls)],
                env={**os.environ, "PYTHONPATH": str(_ROOT / "src")},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                timeout=LONGEST_S,
            )
            if done.returncode != 0:
                return f"it cannot be read meanwhile: {done.stderr[-300:]}"
    return None


ACCIDENTS: dict[str, Callable[[Subject, Path, random.Random], str | None]] = {
    "killed at a random moment": kill_at_random,
    "killed while saving": kill_while_saving,
    "interrupted": interrupt,
    "worker killed": kill_worker,
    "disk full": fill_disk,
    "folder read-only": read_only,
    "folder moved away": move_away,
    "folder replaced": replace_folder,
    "store held": hold_store,
    "a second writer": write_twice,
    "readers": read_meanwhile,
}

KILLS = ("killed at a random moment", "killed while saving", "interrupted")
"""Accidents that happen several times to one run."""


def happens_to(name: str, subject: Subject) -> bool:
    """Return whether an accident can happen to a run: some have no workers."""
    return subject is WORKERS or name != "worker killed"


def survive(
    subject: Subject, name: str, folder: Path, whole: Any, seed: int, times: int = 1
) -> str | None:
    """Let one kind of accident happen to a run, and see it through to its end."""
    r = random.Random(seed)
    run = folder / "run"
    for _ in range(times):
        problem = ACCIDENTS[name](subject, run, r)
        if problem is not None:
            return f"{subject.name}, {name}, {seed}: {problem}"
    problem = compare(subject, run, whole)
    return None if problem is None else f"{subject.name}, {name}, {seed}: {problem}"
