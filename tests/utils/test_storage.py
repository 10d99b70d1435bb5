"""Saved states: nothing damaged is loaded, and no moment finds neither the old nor the new."""

import builtins
import errno
import hashlib
import itertools
import json
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esper.leyline
from esper._version import __version__
from esper.leyline.errors import CheckpointError
from esper.utils import files
from esper.utils.files import atomic_write_text
from esper.utils.manifest import MANIFEST_FILE, TENSORS_FILE, TREE_FILE, manifest_checksum
from esper.utils.storage import load_tree, save_tree
from tests.leyline.states import NEW, OLD, assert_same, load, save

FILES = (TENSORS_FILE, TREE_FILE, MANIFEST_FILE)


def attempt(action: Callable[[], Any]) -> str | None:
    """The one line with which this is refused, or None if it is not."""
    try:
        action()
    except CheckpointError as error:
        line = str(error)
    else:
        return None
    assert "\n" not in line
    return line


def refusal(folder: Path, **options: Any) -> str:
    """The one line with which loading is refused."""
    line = attempt(lambda: load(folder, **options))
    assert line is not None
    return line


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_loaded_tensors_can_be_written_to_and_live_on_after_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    read = load(tmp_path / "state")
    for name in FILES:
        (tmp_path / "state" / name).write_bytes(b"")
    read["weight"] += 1
    assert torch.equal(read["weight"], OLD["weight"] + 1)


def test_tensors_go_to_the_device_asked_for(tmp_path: Path) -> None:
    save(tmp_path / "state", {"real": torch.zeros(2), "complex": torch.zeros(2) * 1j})
    read = load(tmp_path / "state", device="meta")
    assert {tensor.device.type for tensor in read.values()} == {"meta"}
    assert read["complex"].is_complex()


def test_meta_comes_back_and_the_manifest_can_be_read_by_eye(tmp_path: Path) -> None:
    meta = {"task": "digits", "best": math.inf, "$odd": [1, (2.5, None)]}
    save_tree(tmp_path / "state", OLD, kind="garden", version=3, meta=meta)
    _, read = load_tree(tmp_path / "state", kind="garden", version=3)
    assert_same(read, meta)
    assert sorted(os.listdir(tmp_path / "state")) == sorted(FILES)

    manifest = json.loads((tmp_path / "state" / MANIFEST_FILE).read_text())
    assert (manifest["kind"], manifest["version"]) == ("garden", 3)
    assert manifest["software"]["esper"] == __version__
    created = datetime.fromisoformat(manifest["created"])
    assert timedelta(0) <= datetime.now(UTC) - created < timedelta(minutes=5)
    for name in (TENSORS_FILE, TREE_FILE):
        data = (tmp_path / "state" / name).read_bytes()
        assert manifest["files"][name] == {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }


def test_no_meta_is_an_empty_one(tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    assert load_tree(tmp_path / "state", kind="test", version=1)[1] == {}


# ------------------------------------------------------------------------ what must not be loaded


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"kind": "garden"}, "holds a saved 'test' where a 'garden' is needed"),
        ({"version": 0}, "'test' of version 1, but this Esper reads version 0; update Esper"),
        ({"version": 2}, "version 1, but this Esper reads version 2; load it with the Esper that"),
    ],
)
def test_another_kind_or_version_is_refused(
    options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    save(tmp_path / "state", OLD)
    assert line in refusal(tmp_path / "state", **options)


def test_what_is_no_state_is_refused_by_what_it_is(tmp_path: Path) -> None:
    assert "there is no saved state at" in refusal(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    assert "is a file; a saved state is a folder" in refusal(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    assert "manifest.json is missing" in refusal(tmp_path / "folder")
    (tmp_path / "folder" / MANIFEST_FILE).write_text('{"name": "a web page"}')
    assert "manifest.json is not Esper's" in refusal(tmp_path / "folder")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "zeroed", "pickle"])
def test_a_damaged_file_is_refused(name: str, damage: str, tmp_path: Path) -> None:
    save(tmp_path / "state", OLD, meta={"round": 7})
    path = tmp_path / "state" / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "truncated": data[: len(data) // 2],
                "longer": data + b"x",
                "zeroed": bytes(len(data)),
                "pickle": pickle.dumps(OLD["name"]),
            }[damage]
        )
    line = refusal(tmp_path / "state")
    assert name in line
    assert "damaged" in line or "missing" in line
    if damage in ("truncated", "longer") and name != MANIFEST_FILE:
        assert f"bytes instead of {len(data)}" in line


META = {"round": 7, "note": "a b"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "state"
    save(folder, OLD, meta=META)
    return folder


@settings(max_examples=300)
@given(st.sampled_from(FILES), st.integers(0, 2**20), st.integers(0, 255))
def test_no_changed_byte_changes_what_is_loaded(
    saved: Path, name: str, position: int, byte: int
) -> None:
    path = saved / name
    content = path.read_bytes()
    changed = bytearray(content)
    changed[position % len(content)] = byte
    path.write_bytes(changed)
    try:
        if attempt(lambda: load(saved)) is None:
            # Other white space in the manifest is no damage.
            tree, meta = load_tree(saved, kind="test", version=1)
            assert_same(tree, OLD)
            assert_same(meta, META)
    finally:
        path.write_bytes(content)


def forge(folder: Path, name: str, data: bytes) -> None:
    """Replace a file together with its checksums, as a hostile or a careless hand would."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    if name != MANIFEST_FILE:
        digest = hashlib.sha256(data).hexdigest()
        manifest["files"][name] = {"size": len(data), "sha256": digest}
    manifest["checksum"] = manifest_checksum(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (TREE_FILE, b'{"a": {"$tensor": "tree/nowhere"}}'),
        (TREE_FILE, b'{"a": {"$tensor": ["tree/weight"]}}'),
        (TREE_FILE, b'{"a": {"$tensor": "tree/weight", "b": 1}}'),
        (TREE_FILE, b'{"a": {"$complex": "tree/weight"}}'),
        (TREE_FILE, b'{"a": {"$call": "os.system"}}'),
        (TREE_FILE, b'{"a": {"$float": "1.0"}}'),
        (TREE_FILE, b'{"a": {"$dict": [["x"]]}}'),
        (TREE_FILE, b'{"a": {"$dict": [5]}}'),
        (TREE_FILE, b'{"a": NaN}'),
        (TREE_FILE, b'{"a": Infinity}'),
        (TREE_FILE, b"[1, 2]"),
        (TREE_FILE, b"{"),
        (TREE_FILE, '{"a": "ü"}'.encode()),
        (TREE_FILE, b"[" * 100_000),
        (TREE_FILE, b'{"a": ' + b"1" * 10_000 + b"}"),
        (TENSORS_FILE, b"no tensors"),
        (TENSORS_FILE, b"\xff" * 100),
        (TENSORS_FILE, pickle.dumps({"weight": 1})),
        (TENSORS_FILE, struct.pack("<Q", 2) + b"{}"),
    ],
)
def test_forged_files_are_refused_too(name: str, data: bytes, tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    forge(tmp_path / "state", name, data)
    assert "is damaged" in refusal(tmp_path / "state")


def test_a_newer_layout_says_so_even_if_all_else_is_unknown(tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    path = tmp_path / "state" / MANIFEST_FILE
    path.write_text(json.dumps({"format": "esper-state", "layout": 3, "stuff": []}))
    assert "saved by a newer Esper (layout 3, this one reads 2); update" in refusal(path.parent)


def test_an_older_layout_says_who_can_read_it(tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    path = tmp_path / "state" / MANIFEST_FILE
    path.write_text(json.dumps({"format": "esper-state", "layout": 1, "esper": "0.1.0"}))
    line = refusal(path.parent)
    assert "saved by an older Esper (layout 1, this one reads 2)" in line
    assert "(0.1.0)" in line


class Bomb:
    def __reduce__(self) -> Any:
        return (builtins.exec, ("import builtins; builtins.exploded = True",))


@pytest.mark.parametrize("name", FILES)
def test_nothing_in_a_state_is_executed(name: str, tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    if name == MANIFEST_FILE:
        (tmp_path / "state" / name).write_bytes(pickle.dumps(Bomb()))
    else:
        forge(tmp_path / "state", name, pickle.dumps(Bomb()))
    refusal(tmp_path / "state")
    assert not hasattr(builtins, "exploded")


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "state", OLD)

    def refuse(path: Path, most: int | None = None) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("esper.utils.manifest.read_regular", refuse)
    line = refusal(tmp_path / "state")
    assert line.startswith(f"cannot read {tmp_path / 'state' / MANIFEST_FILE}: Permission denied;")


# --------------------------------------------------------------------------------------- replacing


def test_a_new_state_takes_the_place_of_the_old(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er" / "state"
    save(folder, OLD)
    save(folder, NEW)
    assert_same(load(folder), NEW)
    assert names(folder.parent) == ["state"]


def test_an_empty_folder_and_a_damaged_state_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    save(tmp_path / "state", OLD)
    (tmp_path / "state" / MANIFEST_FILE).write_text("damage")
    (tmp_path / "state" / TREE_FILE).unlink()
    save(tmp_path / "state", NEW)
    assert_same(load(tmp_path / "state"), NEW)


def test_other_peoples_files_are_never_deleted(tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    for name in ("thesis.tex", ".git", "a", "b"):
        (tmp_path / "state" / name).write_text("precious")
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "state", NEW)
    assert str(caught.value) == (
        f"cannot save to {tmp_path / 'state'}: it holds other files (.git, a, b, ...); "
        "choose a new or empty folder"
    )
    assert (tmp_path / "state" / "thesis.tex").read_text() == "precious"
    assert_same(load(tmp_path / "state"), OLD)
    assert names(tmp_path) == ["state"]


def test_a_file_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("precious")
    with pytest.raises(CheckpointError, match="a file is there; choose another folder"):
        save(tmp_path / "state", OLD)
    with pytest.raises(CheckpointError, match=r"cannot save to .*a file is in the way"):
        save(tmp_path / "state" / "below", OLD)
    assert (tmp_path / "state").read_text() == "precious"
    assert names(tmp_path) == ["state"]


def test_nothing_is_saved_through_a_link(tmp_path: Path) -> None:
    save(tmp_path / "round_3", OLD)
    (tmp_path / "latest").symlink_to("round_3")
    with pytest.raises(CheckpointError, match="it is a link to round_3, and nothing is written"):
        save(tmp_path / "latest", NEW)
    assert_same(load(tmp_path / "round_3"), OLD)
    assert_same(load(tmp_path / "latest"), OLD)


def test_the_folder_is_as_readable_as_any_other(tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "plain").stat().st_mode


# ------------------------------------------------------------------------- when the disk says no

EFFECTS = ("rename", "replace", "fsync", "mkdir")
"""The calls through which a save changes the disk, besides writing the files."""


class Kill(BaseException):
    """Something that nobody expects, such as an interrupt from the keyboard."""


def fail_at(
    monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException, *, for_good: bool = False
) -> list[int]:
    """Let call number `step` to the disk fail, or all from there on; count the calls."""
    calls = [0]

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == step + 1 or (for_good and calls[0] > step):
                raise error
            return real(*args, **options)

        return call

    for name in EFFECTS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    monkeypatch.setattr(files, "_write_bytes", wrap(files._write_bytes))
    return calls


def failing_steps(before: Callable[[], None], action: Callable[[], None]) -> Iterator[bool]:
    """Try 'failure at step n' for every n until the action does not come that far; did it fail?"""
    for step in itertools.count():
        with pytest.MonkeyPatch.context() as monkeypatch:
            before()
            calls = fail_at(monkeypatch, step, OSError(errno.ENOSPC, "No space left on device"))
            line = attempt(action)
        if calls[0] <= step:
            assert line is None
            return
        assert line is None or "No space left on device; free some space" in line
        yield line is not None


def test_a_full_disk_at_any_step_leaves_the_old_state_and_no_rubbish(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    steps = 0
    for failed in failing_steps(lambda: save(folder, OLD), lambda: save(folder, NEW)):
        steps += 1
        if failed:
            assert_same(load(folder), OLD)
            assert names(tmp_path) == ["state"]
        else:
            # Only the removal of the old state failed, which the next save makes good.
            assert_same(load(folder), NEW)
            save(folder, NEW)
            assert names(tmp_path) == ["state"]
    # Write three files and sync them, make and sync the folder, two renames, sync, one rename.
    assert steps >= 9


def test_a_full_disk_at_the_first_save_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    steps = 0
    for failed in failing_steps(lambda: None, lambda: save(folder, NEW)):
        steps += 1
        if failed:
            assert names(tmp_path) == []
            assert "there is no saved state" in refusal(folder)
        else:
            # It was only told to make a parent that is there already.
            assert_same(load(folder), NEW)
            shutil.rmtree(folder)
    assert steps >= 7


def test_a_disk_that_dies_at_any_step_still_holds_one_good_state(tmp_path: Path) -> None:
    for step in itertools.count():
        folder = tmp_path / str(step) / "state"
        save(folder, OLD)
        with pytest.MonkeyPatch.context() as monkeypatch:
            error = OSError(errno.EIO, "Input/output error")
            calls = fail_at(monkeypatch, step, error, for_good=True)
            line = attempt(lambda: save(folder, NEW))  # noqa: B023 (called at once)
            # If even the way back is barred, the new state may be the one that is there.
            assert load(folder)["name"] in ("old", "new")
        if calls[0] <= step:
            return
        assert line is None or (
            "Input/output error; check the disk or save elsewhere; "
            "what was saved there before is untouched" in line
        )


def test_an_interrupt_at_any_step_leaves_one_good_state_and_no_rubbish(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for step in itertools.count():
        save(folder, OLD)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = fail_at(monkeypatch, step, Kill())
            try:
                save(folder, NEW)
            except Kill:
                interrupted = True
            else:
                interrupted = False
        if calls[0] <= step:
            assert not interrupted
            return
        assert load(folder)["name"] in ("old", "new")
        save(folder, NEW)
        assert names(tmp_path) == ["state"]


@pytest.mark.parametrize(
    ("number", "text", "advice"),
    [
        (errno.ENOSPC, "No space left on device", "free some space or save elsewhere"),
        (errno.EROFS, "Read-only file system", "save to a place that is not read-only"),
        (errno.EACCES, "Permission denied", "make it writable or save elsewhere"),
        (errno.EIO, "Input/output error", "check the disk or save elsewhere"),
    ],
)
def test_a_refusal_of_the_disk_is_one_line_with_path_reason_and_advice(
    number: int, text: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    save(folder, OLD)

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(number, text)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointError) as caught:
        save(folder, NEW)
    assert str(caught.value) == (
        f"cannot save to {folder}: {text}; {advice}; what was saved there before is untouched"
    )
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "other", NEW)
    assert str(caught.value) == f"cannot save to {tmp_path / 'other'}: {text}; {advice}"


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="this user may write to read-only folders"
)
def test_a_read_only_folder(tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission denied; make it writable"):
            save(tmp_path / "state", NEW)
        assert_same(load(tmp_path / "state"), OLD)
    finally:
        tmp_path.chmod(0o700)


def test_a_real_full_disk(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="No space left") as caught, open(full, "wb", 0) as file:
        file.write(b"x")
    line = str(files._cannot_save(tmp_path / "state", caught.value))
    assert "No space left on device; free some space" in line


# ------------------------------------------------------------------------------ when it is killed

KILLED = """
import os, sys
import torch
from pathlib import Path
from esper.utils.storage import load_tree, save_tree

def save(folder, tree):
    save_tree(folder, tree, kind="test", version=1)

def name_of(folder):
    return load_tree(folder, kind="test", version=1)[0]["name"]

def dying(real, calls, step):
    def call(*args, **options):
        if calls[0] == step:
            os._exit(9)
        calls[0] += 1
        return real(*args, **options)
    return call

old, new = ({"name": name, "weight": torch.arange(6.0)} for name in ("old", "new"))
parent = Path(sys.argv[1])
found = []
for step in range(1000):
    folder = parent / "state"
    save(folder, old)
    child = os.fork()
    if child == 0:
        calls = [0]
        for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "open", "write"):
            setattr(os, name, dying(getattr(os, name), calls, step))
        save(folder, new)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found.append(name_of(folder))
    if os.waitstatus_to_exitcode(status) == 0:
        break
    # The next save starts from what the crash left, and leaves nothing of it behind.
    save(folder, new)
    assert name_of(folder) == "new"
    assert os.listdir(parent) == ["state"], os.listdir(parent)
print(" ".join(found))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_step_it_finds_the_old_state_or_the_new(tmp_path: Path) -> None:
    source = str(Path(esper.leyline.__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = result.stdout.split()
    # First the old one, from some step on the new one, and never anything else.
    turn = found.index("new")
    assert found == ["old"] * turn + ["new"] * (len(found) - turn)
    assert turn >= 9
    assert len(found) - turn >= 3


def test_after_a_crash_between_the_renames_the_old_state_is_found_and_kept(tmp_path: Path) -> None:
    save(tmp_path / "state", OLD)
    os.rename(tmp_path / "state", tmp_path / ".state.old")
    assert_same(load(tmp_path / "state"), OLD)
    # A save that fails keeps it, one that succeeds replaces it.
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_at(monkeypatch, 1, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(CheckpointError, match="what was saved there before is untouched"):
            save(tmp_path / "state", NEW)
    assert_same(load(tmp_path / "state"), OLD)
    save(tmp_path / "state", NEW)
    assert_same(load(tmp_path / "state"), NEW)
    assert names(tmp_path) == ["state"]


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_killed_save_left_half_written_is_removed_by_the_next(tmp_path: Path) -> None:
    dead = tmp_path / f".state.tmp-{dead_process()}-abc"
    dead.mkdir()
    (dead / TENSORS_FILE).write_text("half")
    (tmp_path / f".state.tmp-{dead_process()}-def").write_text("half")
    alive = tmp_path / f".state.tmp-{os.getppid()}-abc"
    alive.mkdir()
    others = [".state.tmp-", ".state.tmp-x", ".state2.tmp-1-a", "state.tmp"]
    for name in others:
        (tmp_path / name).write_text("somebody's")
    save(tmp_path / "state", NEW)
    assert names(tmp_path) == sorted([alive.name, *others, "state"])


def test_a_file_that_goes_between_two_looks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "state", OLD)
    (tmp_path / "state" / TREE_FILE).unlink()
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as it was a moment ago
    with pytest.raises(CheckpointError, match=f"{TREE_FILE} is missing"):
        load(tmp_path / "state")


def test_readers_never_see_a_save_in_the_middle(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    save(folder, {"first": 0, "last": torch.tensor(0)})
    done = threading.Event()
    problems: list[str] = []
    reads = [0]

    def read() -> None:
        while not done.is_set():
            try:
                tree = load(folder)
                if tree["first"] != int(tree["last"]):
                    problems.append(str(tree))
            except CheckpointError as error:
                problems.append(str(error))
            reads[0] += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(60):
            save(folder, {"first": number, "last": torch.tensor(number)})
    finally:
        done.set()
        reader.join()
    assert problems == []
    assert reads[0] > 0


# -------------------------------------------------------------------------------------- text files


@pytest.mark.parametrize("text", ["", "a\nb\r\n", "grüße ∑ 🌱\n"])
def test_text_is_written_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    atomic_write_text(path, "before")
    atomic_write_text(path, text)
    assert path.read_bytes() == text.encode("utf-8")
    assert names(path.parent) == ["report.html"]


def test_a_full_disk_at_any_step_leaves_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    steps = 0
    for failed in failing_steps(
        lambda: atomic_write_text(path, "old"), lambda: atomic_write_text(path, "new")
    ):
        steps += failed
        # When only the last sync fails the new text is there, whole.
        assert path.read_text() in ("old", "new")
        assert names(tmp_path) == ["config.yaml"]
    assert steps >= 3


def test_a_text_that_is_no_unicode_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    atomic_write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_never_replaced_by_a_text(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    place = tmp_path / "report.html"
    make(place)
    with pytest.raises(CheckpointError, match=r"cannot save to .*report\.html: it is not a file"):
        atomic_write_text(place, "x")
    assert names(tmp_path) == ["report.html"]
    assert not place.is_file()
