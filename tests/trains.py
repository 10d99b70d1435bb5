"""Which tests train a network: `make test-portable` runs them under every instruction set.

The last bits of what a processor computes depend on its instruction set, and training makes them
grow. So a test that trains must hold for all of them. Which tests train is a list of files, and it
is checked: a test that takes an optimizer step, or starts a Python process, in a file that is not
on the list fails and says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from esper.lab.population.train_step import TrainStep

TESTS = Path(__file__).parent

FILES = (
    "benchmarks/",
    "conformance/",
    "frameworks/",
    "growth/",
    "integration/",
    "integrations/",
    "kasmina/",
    "lab/",
    "scripts/",
    "simic/agent/",
    "simic/training/",
    "tamiyo/",
    "testing/",
    "tools/test_portable.py",
    "zoo/",
)
"""Files below `tests` that train, and folders in which any file may (with a slash at their end)."""

ONLY_PROCESSES = (
    "browser/",
    "leyline/",
    "nissa/",
    "tools/",
    "utils/",
)
"""Files whose Python processes train nothing; most packages here may not import what trains."""

SHARE = "ESPER_TEST_SHARE"
"""Environment variable: `2/3` runs the second third of the files alone."""

STEPS, PROCESSES = "optimizer steps", "Python processes"

seen = {STEPS: 0, PROCESSES: 0}
"""What was counted so far."""
_BEFORE = pytest.StashKey[dict[str, int]]()


def is_named(path: Path, names: Sequence[str]) -> bool:
    """Return whether a file of tests is one of these, or in one of these folders."""
    own = _name_of(path)
    return any(own.startswith(name) if name.endswith("/") else own == name for name in names)


def share_of(paths: set[Path], share: str) -> set[Path]:
    """Return the files of a share: `2/3` is the second of every three."""
    own, parts = map(int, share.split("/"))
    return set(sorted(paths)[own - 1 :: parts])


def what_is_missing(path: Path, done: dict[str, int]) -> str | None:
    """Return what is wrong with a test that did this, given the lists; None if nothing is."""
    if is_named(path, FILES):
        return None
    if not done[STEPS] and is_named(path, ONLY_PROCESSES):
        return None
    found = [f"{what}: {count}" for what, count in done.items() if count]
    if not found:
        return None
    return (
        f"this test trains ({', '.join(found)}), so `make test-portable` has to run it under "
        f"every instruction set: name {_name_of(path)!r} in FILES of tests/trains.py, or in "
        "ONLY_PROCESSES if its processes train nothing"
    )


def pytest_configure() -> None:
    """Count optimizer steps and Python processes from now on."""

    def count(what: str) -> None:
        seen[what] += 1

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and _is_python(*arguments[:2]):
            count(PROCESSES)

    register_optimizer_step_post_hook(lambda *_: count(STEPS))
    sys.addaudithook(listen)
    # Neither a stack of rows nor a process of `multiprocessing` tells anyone what it does.
    for owner, name, what in ((TrainStep, "run", STEPS), (BaseProcess, "start", PROCESSES)):
        _count_calls(owner, name, what)


def _name_of(path: Path) -> str:
    return Path(os.path.relpath(path, TESTS)).as_posix()


def _count_calls(owner: type, name: str, what: str) -> None:
    own = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen[what] += 1
        return own(*args, **kwargs)

    setattr(owner, name, counted)


def _is_python(executable: Any, arguments: Any) -> bool:
    words = [arguments] if isinstance(arguments, str | bytes) else list(arguments)
    return any("python" in os.fsdecode(word) for word in (executable or "", *words))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Remember what was counted before the fixtures of a test, which may train too."""
    item.stash[_BEFORE] = dict(seen)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that trains in a file that is not on the list."""
    result = yield
    before = item.stash[_BEFORE]
    missing = what_is_missing(item.path, {what: seen[what] - before[what] for what in seen})
    if missing is not None:
        pytest.fail(missing, pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the files on the list, and keep every n-th file if a share is wanted."""
    for item in items:
        if is_named(item.path, FILES):
            item.add_marker(pytest.mark.trains)
    share = os.environ.get(SHARE)
    if share is not None:
        chosen = share_of({item.path for item in items}, share)
        config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
        items[:] = [item for item in items if item.path in chosen]
