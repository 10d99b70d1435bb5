"""RecordedRun: the loop of every run, which records, saves checkpoints, shows progress and stops.

A checkpoint holds the watermark of the store. So a run that was killed at any moment continues from
its last checkpoint, and on the CPU leaves what an uninterrupted run leaves.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from esper.leyline.errors import CheckpointError, UsageError, is_command, warn
from esper.leyline.records import Plain
from esper.nissa.folder import Checkpoints, RunFolder, RunKind, Write
from esper.nissa.schema import EventKind
from esper.utils.process import STOP_SIGNALS, software_versions

if TYPE_CHECKING:
    from esper.nissa.store import RunStore

# ---- Inputs of a run beside its settings: data, model, the controller's file, software


SETTABLE = ("data", "controller")
"""Contents that a setting names, so that --set can replace them."""

_CHECKSUM = re.compile("[0-9a-f]{32}")

COMPARED_VERSIONS = ("esper", "python", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class RunInputs(Plain):
    """Checksums and versions at the start of a run, or when it was continued."""

    contents: Mapping[str, str]
    """By name, such as 'data' or 'training targets': a checksum or a short description."""
    versions: Mapping[str, str]
    """Of the software."""

    @classmethod
    def now(cls, contents: Mapping[str, str | None]) -> RunInputs:
        """Return the contents that are not None, with the versions of this process."""
        found = software_versions()
        return cls(
            {name: value for name, value in contents.items() if value is not None},
            {name: found[name] for name in COMPARED_VERSIONS},
        )

    def differences(
        self, run: Path, saved: Mapping[str, Any], changed: Collection[str]
    ) -> dict[str, tuple[str, str]]:
        """Return the software whose version differs, by name: the version then and now.

        Args:
            run: The run folder.
            saved: The inputs of the checkpoint, as `to_mapping` returned them.
            changed: Settings that were changed on purpose, so that their content may differ.

        Raises:
            UsageError: Some content differs although its setting was not changed.
        """
        try:
            contents, versions = dict(saved["contents"]), dict(saved["versions"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of {run} does not list the inputs of the run ({error}); "
                "use another copy of it"
            ) from None
        for name, checksum in self.contents.items():
            before = str(contents.get(name, checksum))
            if before != checksum and name not in changed:
                shown = "" if _CHECKSUM.fullmatch(checksum) else f" ({_changes(before, checksum)})"
                again = f" or accept the present one with --set {name}=...,"
                raise UsageError(
                    f"the {name} of {run} changed since it was saved{shown}; restore it,"
                    f"{again if name in SETTABLE and is_command() else ''} or start a new run"
                )
        return {
            name: (str(versions[name]), now)
            for name, now in self.versions.items()
            if versions.get(name, now) != now
        }


_PAIR = re.compile(r"'(\w+)': '([^']*)'")


def _changes(before: str, now: str) -> str:
    """Return how two descriptions differ: of two dicts only the entries that do."""
    pairs = [dict(_PAIR.findall(text)) for text in (before, now)]
    kinds = [_PAIR.sub("", text) for text in (before, now)]
    if kinds[0] == kinds[1] and pairs[0].keys() == pairs[1].keys():
        changed = [name for name in pairs[0] if pairs[0][name] != pairs[1][name]]
        if changed:
            return ", ".join(f"{n} was {pairs[0][n]}, is {pairs[1][n]}" for n in changed)
    return f"was {before}, is {now}"


def describe_versions(differences: Mapping[str, tuple[str, str]]) -> str:
    """Return version differences in one line."""
    return ", ".join(f"{name} {was} -> {now}" for name, (was, now) in differences.items())


Step = TypeVar("Step")

INTERRUPTED = 130
"""Exit code of a run that was stopped and can be continued."""

SAME_REQUEST_S = 1.0
"""Signals this close to the first are the same request: `timeout` sends one to a process and one to
its group, batch systems one to every process.
"""


class Stopped(KeyboardInterrupt):
    """A signal stopped a run, which is saved and can be continued.

    Args:
        run: The run folder.
        signal: The first signal.
        epoch: The last epoch that was saved.
    """

    def __init__(self, run: Path, signal: int, epoch: int) -> None:
        """Create the error, with how to continue the run."""
        super().__init__(f"{run} is saved up to epoch {epoch}; continue it with resume=True")
        self.signal, self.epoch = signal, epoch


class RecordedRun(ABC, Generic[Step]):
    """A run that is open for writing in its folder; use it as a context manager.

    Args:
        folder: The run folder.
        store: The store to record to.
        command: The command that started it.
        inputs: Its inputs beside its settings.
        save_every_s: Longest time between two checkpoints, in seconds.
        is_saved: Whether the newest checkpoint holds the current state.
    """

    kind: ClassVar[RunKind]

    def __init__(
        self,
        folder: RunFolder,
        store: RunStore,
        command: str,
        inputs: RunInputs,
        *,
        save_every_s: float,
        is_saved: bool,
    ) -> None:
        """Bring the parts together; nothing is written yet."""
        self.folder, self.store, self.command, self.inputs = folder, store, command, inputs
        self.checkpoints = Checkpoints(folder.path, self.kind)
        self._save_every_s = save_every_s
        self._saved_at = time.monotonic()
        self._is_saved = is_saved
        self.is_between_steps = False
        """Whether a step is done and the next has not begun: it is recorded, saved, shown."""
        self._best: Write | None = None
        """Writes `checkpoints/best`, if there is something better than what is saved."""

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """Do the remaining steps."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether nothing is left to do."""

    @abstractmethod
    def record(self, step: Step) -> None:
        """Record one step."""

    def is_due(self, step: Step) -> bool:
        """Return whether to save a checkpoint after a step."""
        return time.monotonic() - self._saved_at >= self._save_every_s

    @abstractmethod
    def best(self, step: Step) -> Write | None:
        """Return a function that writes the best result, if this step made it."""

    @abstractmethod
    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, Write]]:
        """Return the state, its manifest, and the other parts of a checkpoint."""

    @abstractmethod
    def record_stop(self) -> str:
        """Record that the run stops early; return where, in words."""

    def carry_out(
        self,
        show: Callable[[Step], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Run to the end, or until asked to stop; return whether the end was reached.

        Args:
            show: Called after every step.
            is_stopped: Called after every step; True saves the state and stops.
        """
        for step in self.steps():
            self.is_between_steps, self._is_saved = True, False
            self.record(step)
            self._best = self.best(step) or self._best
            if self.is_due(step):
                self.save()
            if show is not None:
                was_done = self.is_done
                show(step)
                # A callback may end the run; that is saved too.
                self._is_saved &= self.is_done == was_done
            if is_stopped():
                break
            self.is_between_steps = False
        # Not twice: `previous` must be older than `latest`.
        if not self._is_saved:
            self.save()
        if self.is_done:
            return True
        self.folder.log(f"interrupted {self.record_stop()}")
        return False

    def save(self) -> None:
        """Save the best result so far, then a checkpoint of the current state."""
        # The watermark must be in the store before the checkpoint that refers to it.
        mark = self.store.watermark()
        if self._best is not None:
            self._best(self.checkpoints.best)
            self._best = None
        state, meta, parts = self.snapshot()
        about = {"telemetry": mark, "command": self.command, "world": self.inputs.to_mapping()}
        self.checkpoints.save({**state, **about}, meta, parts)
        self._saved_at = time.monotonic()
        self._is_saved = True

    def warn_of_other_versions(self, versions: Mapping[str, tuple[str, str]]) -> None:
        """Record and warn if the run continues with other versions of software."""
        if not versions:
            return
        text = describe_versions(versions)
        self.folder.log(f"other software: {text}")
        self.store.event(
            EventKind.VERSIONS_CHANGED,
            f"continued with other software: {text}",
            severity="warning",
            data={name: list(pair) for name, pair in versions.items()},
        )
        warn(
            f"{self.folder.path} was saved with other software ({text}); from here on its numbers "
            "may differ from those of an uninterrupted run"
        )

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.store.__exit__(kind, error, trace)


def carry_out_or_raise(run: RecordedRun[Step], show: Callable[[Step], None] | None) -> None:
    """Run to the end, within a program that does other things too.

    Raises:
        KeyboardInterrupt: A signal came; the run is saved and can be continued.
    """
    with stop_signals() as noted:
        is_done = run.carry_out(show, lambda: bool(noted))
    if is_done:
        return
    if noted[0] != signal.SIGINT:
        # The program's own handler decides what else to do; by default the process ends.
        run.close()
        signal.raise_signal(noted[0])
    raise KeyboardInterrupt(f"{run.folder.path} is saved; continue it with resume=True")


def _is_ours(number: int) -> bool:
    handler = signal.getsignal(number)
    if number in (signal.SIGINT, signal.SIGTERM):
        return handler != signal.SIG_IGN
    return handler == signal.SIG_DFL


def _print_at_once(line: str) -> None:
    """Print a line to standard error from within a signal handler."""
    # Below a progress bar and the terminal's own ^C.
    start = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
    # A handler may interrupt a write to the same stream, which Python refuses, or find it closed.
    with suppress(RuntimeError, OSError, ValueError, AttributeError):
        sys.stderr.write(f"{start}{line}\n")
        sys.stderr.flush()


@contextmanager
def stop_signals(announce: Callable[[int], str] | None = None) -> Iterator[list[int]]:
    """Within the block, collect `STOP_SIGNALS` in the yielded list instead of stopping at once.

    Only the main thread can do this; in others the list stays empty. Signals that are ignored (by
    `nohup`) or that the program handles itself are left alone.

    Args:
        announce: Returns what is printed to standard error when the first signal, its argument,
            comes.

    Raises:
        KeyboardInterrupt: A second signal came later: the user does not want to wait.
    """
    noted: list[int] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not noted:
            noted.append(number)
            first = now
            if announce is not None:
                _print_at_once(announce(number))
        elif now - first > SAME_REQUEST_S:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.signal(number, note) for number in STOP_SIGNALS if _is_ours(number)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
