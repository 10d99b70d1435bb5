"""Two writers of one folder: one wins, and the other changes nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from esper.leyline.errors import CheckpointError, UsageError
from esper.nissa.folder import TRAINING, Checkpoints, RunFolder
from esper.simic.training.recorded import resume_training, start_training
from esper.utils.files import is_locked
from tests.simic.training.tiny import tiny_config


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every file and folder with what shows that it was touched."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        # The log of the store's own writer, which is at work.
        if not path.name.startswith("run.db")
    }


def test_a_resume_that_is_refused_leaves_a_save_in_progress_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(run, tiny_config(), sinks=()) as training:
        training.save()
        # The moment between two renames of a save, and one that is half written.
        saving = run / "checkpoints" / ".saving-1-abcd"
        (saving / "state").mkdir(parents=True)
        (run / "checkpoints" / ".old-1-abcd").mkdir()
        before = everything(run)
        with pytest.raises(CheckpointError, match="is being written by another process"):
            resume_training(run, sinks=())
        assert everything(run) == before
        training.save()
    assert Checkpoints(run, TRAINING).load() is not None


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_start_into_a_run_that_is_going_on_changes_nothing(
    tmp_path: Path, overwrite: bool
) -> None:
    run = tmp_path / "run"
    with start_training(run, tiny_config(), sinks=()) as training:
        training.save()
        before = everything(run)
        with pytest.raises((CheckpointError, UsageError)):
            start_training(run, tiny_config(seed=9), overwrite=overwrite, sinks=())
        assert everything(run) == before
    assert RunFolder(run).read_config()["seed"] == 3


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("attempt", range(10))
def test_of_two_starts_at_once_one_wins(tmp_path: Path, overwrite: bool, attempt: int) -> None:
    run = tmp_path / "run"
    if overwrite:
        with RunFolder(run).claim_new({"who": "old"}, overwrite=False) as lock:
            lock.release()
    gate = threading.Barrier(4)
    won: list[int] = []
    refused: list[Exception] = []
    done = threading.Event()

    def attempt_start(number: int) -> None:
        gate.wait()
        try:
            with RunFolder(run).claim_new({"who": number}, overwrite=overwrite) as lock:
                won.append(number)
                done.wait(10)
                lock.release()
        except (CheckpointError, UsageError) as error:
            refused.append(error)
            if len(refused) == 3:
                done.set()

    threads = [threading.Thread(target=attempt_start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1, refused
    assert RunFolder(run).read_config() == {"who": won[0]}


def test_a_start_that_fails_gives_the_folder_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")

    def fail() -> None:
        with folder.claim_new({"a": 1}, overwrite=False):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        fail()
    assert not is_locked(folder.path / "run.db.lock")


def test_what_a_killed_start_leaves_is_an_empty_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "run.db.lock").write_text("1\n")
    (folder.path / ".config.yaml.tmp-1-abcd").write_text("half")
    with folder.claim_new({"a": 1}, overwrite=False) as lock:
        lock.release()
    assert folder.read_config() == {"a": 1}


def test_a_folder_that_is_no_run_gets_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    for action in (
        lambda: resume_training(tmp_path / "thesis"),
        lambda: start_training(tmp_path / "thesis", tiny_config(), overwrite=True),
    ):
        with pytest.raises(UsageError, match=r"no run folder|not a run folder"):
            action()
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
