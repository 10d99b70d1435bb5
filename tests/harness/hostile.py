"""Hostile inputs, generated: texts, data files, saved states, stores, paths; through the command.

Each input is one call of `esper` within this process; whatever comes of it but a result or one line
on standard error is a fault. As a program (`python -m tests.harness.hostile SEED COUNT FOLDER`) it
prints what it found as JSON, so that a crash or a hang is one of the program and is seen outside.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sqlite3
import struct
import sys
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from esper.scripts.cli.main import main as esper
from esper.tamiyo.controllers.pretrained import Tamiyo
from esper.utils.manifest import MANIFEST_FILE, manifest_checksum
from tests.harness.bad_stores import BAD_STORES

LONGEST_S = 60
"""Seconds of computing after which a command hangs; of waiting it gets five times as many."""

Attack = Callable[[random.Random, Path], list[str]]
"""Prepares something hostile in a folder and returns the arguments of the command."""

_VALUES: tuple[Callable[[random.Random], Any], ...] = (
    lambda r: r.choice([None, True, False, "", "x", "\x00", "é" * 50, "x" * 5000, [], {}, [[]]]),
    lambda r: r.choice([0, -1, 2**31, 2**63 - 1, 2**63, -(2**70), 10**400]),
    lambda r: r.choice([0.5, 1e308, float("inf"), float("nan"), -0.0]),
    lambda r: [r.random() for _ in range(r.randrange(5))],
    lambda r: {"a": {"b": [r.random()]}},
)

_FRAGMENTS = (
    *(
        "[",
        "]",
        "{",
        "}",
        "- ",
        ": ",
        "? ",
        "\n",
        "\t",
        "  ",
        "&a ",
        "*a ",
        "<<: ",
        "!!int ",
        "!!set ",
    ),
    *(
        "!!binary ",
        "!!timestamp ",
        "!!python/object:os.system ",
        "''",
        '"',
        "|",
        ">",
        "%",
        "@",
        "`",
    ),
    *("2024-99-99", "9" * 5000, "0x" + "f" * 3000, "1e999", ".inf", ".nan", "~", "\x01", "\ufeff"),
    *(
        "epoch: 3",
        "op: germinate",
        "slot: 0",
        "blueprint: norm",
        "growth:",
        "seed: 1",
        "--- ",
        "...",
    ),
)


def text(r: random.Random) -> str:
    """Return a text that is nearly YAML."""
    return "".join(r.choice(_FRAGMENTS) for _ in range(r.randrange(1, 30)))


def value(r: random.Random) -> Any:
    return r.choice(_VALUES)(r)


def mutated(r: random.Random, data: bytes) -> bytes:
    """Return bytes with some changed, cut off, repeated or put in."""
    changed = bytearray(data)
    for _ in range(r.randrange(1, 8)):
        if not changed:
            break
        at = r.randrange(len(changed))
        match r.randrange(5):
            case 0:
                changed[at] = r.randrange(256)
            case 1:
                del changed[at : at + r.randrange(1, 64)]
            case 2:
                changed[at:at] = bytes(r.randrange(256) for _ in range(r.randrange(1, 16)))
            case 3:
                changed[at : at + 4] = struct.pack("<I", r.choice([0, 1, 2**31, 2**32 - 1]))
            case 4:
                del changed[at:]
    return bytes(changed)


# -------------------------------------------------------------------------------------- the attacks


def _set(r: random.Random, place: Path) -> list[str]:
    key = r.choice(
        ["ppo.clip", "rounds", "seed", "tasks", "ppo", "reward.gamma", "x", "", "ppo.x.y"]
    )
    return ["train", "smoke", "--set", f"{key}={text(r)}", "--out", str(place / "run")]


def _recipe(r: random.Random, place: Path) -> list[str]:
    (place / "recipe.yaml").write_text(text(r), encoding="utf-8", errors="surrogateescape")
    return ["train", str(place / "recipe.yaml"), "--out", str(place / "run")]


def _settings(r: random.Random, place: Path) -> list[str]:
    run = place / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(text(r), encoding="utf-8", errors="surrogateescape")
    return r.choice(
        [
            ["grow", "--resume", "--out", str(run)],
            ["train", "--resume", "--out", str(run)],
            ["runs", "--root", str(place)],
        ]
    )


def _changed_settings(r: random.Random, place: Path) -> list[str]:
    """One value of a run's own settings is another."""
    import yaml

    run = place / "run"
    shutil.copytree(place.parent / "grown", run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    inner = settings
    while True:
        key = r.choice(list(inner))
        if not isinstance(inner[key], dict) or r.random() < 0.2:
            break
        inner = inner[key]
    inner[key] = value(r)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return ["grow", "--resume", "--out", str(run)]


def _schedule(r: random.Random, place: Path) -> list[str]:
    path = place / r.choice(["plan.yaml", "plan.json"])
    entry = {"epoch": value(r), "op": "germinate", "slot": value(r), "blueprint": value(r)}
    content = text(r) if r.random() < 0.5 else json.dumps([entry])
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    return _grow(place, "--controller", f"schedule:{path}")


def _arguments(r: random.Random, place: Path) -> list[str]:
    option = r.choice(["--seed", "--epochs", "--batch-size", "--learning-rate", "--max-seeds"])
    number = r.choice(["0", "-1", "9" * 30, "9" * 5000, "nan", "inf", "1e999", "", "x", str(2**63)])
    # Never so many that they would be carried out.
    if option == "--epochs" and number.isdecimal() and int(number[:18]) >= 1:
        number = "0"
    return _grow(place, f"{option}={number}")


def _paths(r: random.Random, place: Path) -> list[str]:
    os.mkfifo(place / "pipe.npz")
    path = r.choice(
        [
            *(
                "a\0b",
                "x" * 5000,
                str(place / "pipe.npz"),
                "/dev/zero",
                "~nobody/x",
                "",
                ".",
                "\udcff",
            ),
            *("/proc/self/mem", str(place / "pipe.npz" / "x"), "/", "\n", str(place / ("y" * 300))),
        ]
    )
    return r.choice(
        [
            _grow(place, "--data", path),
            [
                "grow",
                "--task",
                "digits",
                "--epochs",
                "1",
                "--controller",
                path,
                "--out",
                str(place / "o"),
            ],
            ["grow", "--resume", "--out", path],
            ["train", "--resume", "--out", path],
            ["report", path],
            ["query", path, "SELECT 1"],
            ["runs", "--root", path],
        ]
    )


def _npz(r: random.Random, place: Path) -> list[str]:
    path = place / "data.npz"
    x = np.zeros((30, 4), dtype=np.float32)
    y: Any = np.arange(30) % 3
    if r.random() < 0.3:
        y = r.choice(
            [y - 1, y + 10**9, y.astype(np.uint64) * 2**62, y[:5], y.astype(object), y + 0.5]
        )
    np.savez(path, x=x, y=y, allow_pickle=True)
    data = path.read_bytes()
    if r.random() < 0.7:
        path.write_bytes(mutated(r, data))
    if r.random() < 0.2:
        with (
            contextlib.suppress(Exception),
            zipfile.ZipFile(path, "a") as archive,
        ):
            archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + text(r).encode("utf-8", "replace"))
    model = ("--model", "torch.nn:Identity", "--slots", "0", "--data", str(path))
    return ["grow", *model, "--epochs", "1", "--out", str(place / "run")]


def _idx(r: random.Random, place: Path) -> list[str]:
    folder = place / "fashion-mnist"
    folder.mkdir()
    for stem, shape in (
        ("train-images-idx3", (20, 28, 28)),
        ("train-labels-idx1", (20,)),
        ("t10k-images-idx3", (10, 28, 28)),
        ("t10k-labels-idx1", (10,)),
    ):
        header = bytes((0, 0, 8, len(shape))) + b"".join(struct.pack(">I", size) for size in shape)
        data = header + bytes(int(np.prod(shape)))
        (folder / f"{stem}-ubyte").write_bytes(mutated(r, data) if r.random() < 0.5 else data)
    what = ("--task", "fashion", "--data", str(folder))
    # A slot that is not there is refused, but only after the data was read.
    return ["grow", *what, "--set", "slots=[nowhere]", "--out", str(place / "run")]


def _cifar(r: random.Random, place: Path) -> list[str]:
    import pickle

    folder = place / "cifar-10-batches-py"
    folder.mkdir()
    batch = {
        b"data": np.zeros((2, 3072), dtype=np.uint8),
        b"labels": [1, 2],
        b"filenames": [b"a", b"b"],
    }
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        data = pickle.dumps(batch, protocol=r.choice([0, 2, 4]))
        (folder / name).write_bytes(mutated(r, data) if r.random() < 0.5 else data)
    what = ("--task", "cifar_baseline", "--data", str(folder))
    return ["grow", *what, "--set", "slots=[nowhere]", "--out", str(place / "run")]


def _state(r: random.Random, place: Path) -> list[str]:
    """A checkpoint whose files were changed, with or without checksums that agree."""
    run = place / "run"
    shutil.copytree(place.parent / "grown", run)
    state = run / "checkpoints" / "latest" / "state"
    name = r.choice([MANIFEST_FILE, "tree.json", "tensors.safetensors"])
    path = state / name
    if name == MANIFEST_FILE and r.random() < 0.5:
        manifest = json.loads(path.read_bytes())
        manifest[r.choice(list(manifest))] = _plain(value(r))
        manifest["checksum"] = manifest_checksum(manifest)
        path.write_text(json.dumps(manifest))
    elif name == "tree.json" and r.random() < 0.7:
        tree = json.loads(path.read_bytes())
        _change(r, tree)
        path.write_text(json.dumps(tree))
        _sign(state, name)
    else:
        path.write_bytes(mutated(r, path.read_bytes()))
        if r.random() < 0.5 and name != MANIFEST_FILE:
            _sign(state, name)
    return ["grow", "--resume", "--out", str(run)]


def _store(r: random.Random, place: Path) -> list[str]:
    run = place / "run"
    run.mkdir()
    shutil.copy(place.parent / "grown" / "run.db", run / "run.db")
    if r.random() < 0.5:
        (run / "run.db").write_bytes(mutated(r, (run / "run.db").read_bytes()))
    else:
        change = sqlite3.connect(run / "run.db")
        table = r.choice(["runs", "epochs", "seed_stages", "decisions", "events", "contributions"])
        columns = [row[1] for row in change.execute(f"PRAGMA table_info({table})")]
        stored = r.choice(
            ["'x'", "x'ff00'", "NULL", "1e999", "-1", "'[1'", "'{}'", "9223372036854775807"]
        )
        with contextlib.suppress(sqlite3.Error):
            change.execute(f'UPDATE "{table}" SET "{r.choice(columns)}" = {stored}')
            change.commit()
        change.close()
    return r.choice(
        [
            ["report", str(run), "--out", str(place / "report.html")],
            ["query", str(run), "SELECT * FROM epochs", "--json"],
            ["query", str(run), "SELECT * FROM runs"],
            ["runs", "--root", str(place)],
        ]
    )


def _bad_store(r: random.Random, place: Path) -> list[str]:
    """A run whose store does to its reader what no store of Esper does."""
    run = place / "run"
    shutil.copytree(place.parent / "grown", run)
    BAD_STORES[r.choice(list(BAD_STORES))](run / "run.db")
    return r.choice(
        [
            ["report", str(run), "--out", str(place / "report.html")],
            ["compare", str(run), str(place.parent / "grown")],
            ["runs", "--root", str(place)],
            ["query", str(run), "SELECT SUM(val_score) FROM epochs", "--timeout", "5"],
            ["grow", "--resume", "--out", str(run)],
        ]
    )


def _links(r: random.Random, place: Path) -> list[str]:
    """A run in which a link lies where something is written; what it leads to must stay."""
    run = place / "run"
    shutil.copytree(place.parent / "grown", run)
    precious = place / PRECIOUS
    precious.mkdir()
    (precious / "file").write_text("precious")
    files = ["log.txt", "summary.json", "report.html", "config.yaml", "run.db", "run.db.lock"]
    files += ["run.db-wal", "run.db-shm", "checkpoints/latest/state/tree.json"]
    name = r.choice([*files, "tb", "checkpoints", "grown", "checkpoints/latest"])
    link = run / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    target = precious / "file" if name in files else precious
    if name in files and r.random() < 0.3:
        os.link(target, link)
    else:
        link.symlink_to(target if r.random() < 0.8 else precious / "new")
    return r.choice(
        [
            ["report", str(run)],
            ["grow", "--resume", "--out", str(run)],
            ["grow", "--resume", "--set", "growth.epochs=3", "--out", str(run)],
            ["runs", "--root", str(place)],
        ]
    )


def _policy(r: random.Random, place: Path) -> list[str]:
    """A learned controller with some value that no controller has."""
    folder = place / "policy"
    Tamiyo.from_pretrained().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    _change(r, config)
    path.write_text(json.dumps(config))
    return _grow(place, "--controller", f"tamiyo:{folder}")


ATTACKS: dict[str, Attack] = {
    "--set": _set,
    "recipe": _recipe,
    "config.yaml": _settings,
    "changed settings": _changed_settings,
    "schedule": _schedule,
    "arguments": _arguments,
    "paths": _paths,
    "npz": _npz,
    "idx": _idx,
    "cifar": _cifar,
    "checkpoint": _state,
    "store": _store,
    "bad store": _bad_store,
    "links": _links,
    "policy": _policy,
}

PRECIOUS = "precious"
"""A folder with one file that no command may change."""


def _change(r: random.Random, tree: Any) -> None:
    """Put another value somewhere into nested dicts and lists."""
    inner = tree
    while True:
        key = r.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], dict | list) or not inner[key] or r.random() < 0.3:
            break
        inner = inner[key]
    inner[key] = _plain(value(r))


def _is_precious(place: Path) -> bool:
    """Return whether what no command may change is as it was."""
    folder = place / PRECIOUS
    if not folder.exists():
        return True
    return os.listdir(folder) == ["file"] and (folder / "file").read_text() == "precious"


def _grow(place: Path, *more: str) -> list[str]:
    return [
        "grow",
        "--task",
        "digits",
        "--epochs",
        "1",
        "--no-twin",
        *more,
        "--out",
        str(place / "run"),
    ]


def _plain(found: Any) -> Any:
    return None if isinstance(found, float) and found != found else found


def _sign(state: Path, name: str) -> None:
    """Make checksum and size of a file in the manifest what they are."""
    import hashlib

    path = state / MANIFEST_FILE
    manifest = json.loads(path.read_bytes())
    data = (state / name).read_bytes()
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["checksum"] = manifest_checksum(manifest)
    path.write_text(json.dumps(manifest))


# ------------------------------------------------------------------------------------ carrying out


class _Hang(BaseException):
    """The command took far too long."""


def _ring(*_: object) -> None:
    raise _Hang


def attack(name: str, seed: int, folder: Path) -> str | None:
    """Carry out one attack; return what is wrong with the answer, None where nothing is."""
    place = folder / "place"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, _ring)
    signal.signal(signal.SIGPROF, _ring)
    try:
        arguments = ATTACKS[name](random.Random(seed), place)
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
        signal.alarm(5 * LONGEST_S)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = esper(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except _Hang:
        return f"{name} {seed}: no answer after {LONGEST_S} s of computing"
    except BaseException:
        last = traceback.format_exc().strip().splitlines()
        return f"{name} {seed}: {last[-1][:200]} [{last[-3].strip()[:120]}]"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    if not _is_precious(place):
        return f"{name} {seed}: written through a link by {arguments}"
    complaint = [
        line for line in err.getvalue().splitlines() if line.startswith(("esper", "Traceback"))
    ]
    if code not in (0, 1, 2) or "Traceback" in err.getvalue():
        return f"{name} {seed}: exit code {code}: {err.getvalue()[-300:]}"
    if code and not complaint:
        return f"{name} {seed}: exit code {code} without a word"
    return None


def main() -> None:
    """Carry out many attacks and print what was found."""
    first, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    quiet = io.StringIO()
    if not (folder / "grown").exists():
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            made = ["grow", "--task", "digits", "--epochs", "2", "--no-twin", "--out"]
            assert esper([*made, str(folder / "grown")]) == 0, quiet.getvalue()
    tried: Counter[str] = Counter()
    faults: list[str] = []
    names = list(ATTACKS)
    for number in range(first, first + count):
        name = names[number % len(names)]
        # Said before: whoever finds this process dead knows at what.
        print(f"# {name} {number}", flush=True)
        fault = attack(name, number, folder)
        tried[name] += 1
        if fault is not None:
            faults.append(fault)
    print(json.dumps({"tried": tried, "faults": faults}), flush=True)


if __name__ == "__main__":
    main()
