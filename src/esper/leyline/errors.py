"""What can go wrong, one class per kind of mistake.

Every message is one line that says what was wrong and what would be right. The command line
turns any `EsperError` into that line and an exit code; everything else is a bug and keeps its
traceback. Each class is also the built-in exception a caller would expect.
"""

from __future__ import annotations

import difflib
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class EsperError(Exception):
    """Base of every error Esper raises on purpose."""


class UsageError(EsperError, ValueError):
    """The request itself was wrong: an unknown name, a bad combination of options."""


class ConfigError(UsageError):
    """A configuration has an unknown key, a wrong type or a value out of range."""


class UnknownNameError(UsageError, KeyError):
    """A name is not in its registry."""

    def __str__(self) -> str:
        """Return the message as it is (`KeyError` would quote it)."""
        return str(self.args[0])


class MissingExtraError(UsageError, ImportError):
    """A feature needs packages that are not installed; the message names the extra."""


class SlotError(UsageError):
    """A slot cannot be placed there, or an activation at a slot is not what it was."""


class DataError(EsperError, OSError):
    """A data file is missing, truncated or not what it says it is."""


class CheckpointError(EsperError, OSError):
    """A saved state is missing, damaged or belongs to something else."""


class NonFiniteError(EsperError, ArithmeticError):
    """A loss or an activation is NaN or infinite."""


class OwnCodeError(EsperError, RuntimeError):
    """A model, a loss or a loader of the caller's own failed while it was used."""


class EmptyMaskError(EsperError, ValueError):
    """No action is legal where one must be chosen."""


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Name the extra that something needs where an import fails because it is not installed."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs the extra: pip install 'esper-grow[{extra}]' ({error})"
        ) from None


class EsperWarning(UserWarning):
    """Something works, but not as well as the caller may think."""


_MOST_NAMED = 50

_INSIDE = ("esper", "torch", "contextlib")
"""Packages between the line that a warning is about and the one that warns."""


def warn(message: str) -> None:
    """Warn at the line of a user's own code from which all this was called."""
    depth, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, EsperWarning, stacklevel=depth)


def reason_of(error: object) -> str:
    """Return what an error says in one line, or its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the closest known name, or an empty string."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def instead(name: object, known: Iterable[str], told: str = "known:") -> str:
    """Return what follows an unknown name in a message: the closest one, and what there is."""
    names = list(known)
    shown = ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
    return f"{nearest(str(name), names) or ';'} {told} {shown or 'none'}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that is not known, naming the closest and all known ones."""
    return UnknownNameError(f"unknown {kind} {name!r}{instead(name, sorted(known))}")


# ---- What somebody's own model, loss or loader raises, in one line that says where and what to do


_LONGEST = 300

_ADVICE = (
    (
        r"more than 1 (value per channel|spatial element) when training",
        "a batch of one sample is too small for this normalisation; use another batch size, or "
        "drop_last=True",
    ),
    (
        r"[Tt]arget -?\d+ is out of bounds|t >= 0 && t < n_classes|device-side assert",
        "labels must be 0, 1, 2, ... and less than the number of scores the model gives",
    ),
    (
        r"expected target dtype|expected scalar type Long",
        "class labels are whole numbers of 64 bits: give targets.long()",
    ),
    (
        r"must be Tensor, not|numpy\.ndarray|Input type \(.*\) and (bias|weight) type"
        r"|must have the same dtype",
        "give tensors of the model's own type, as by torch.as_tensor(x, dtype=torch.float32)",
    ),
    (
        r"[Oo]ut of memory",
        "use a smaller batch size",
    ),
)
"""What helps against errors that PyTorch words as if everybody knew."""

_NOT_THEIRS = tuple(
    str(path)
    for path in (
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
    )
)


@contextmanager
def explaining(
    problem: str | Callable[[], str], kind: type[EsperError] = UsageError
) -> Iterator[None]:
    """Turn what somebody's own code raises into one line.

    Args:
        problem: what could not be done, or a function that says it.
        kind: what is raised instead.
    """
    try:
        yield
    except (EsperError, Warning):
        raise
    except Exception as error:
        told = problem if isinstance(problem, str) else problem()
        raise kind(f"{told}: {told_of(error)}") from error


def told_of(error: Exception) -> str:
    """Return an exception in a line: its kind, its words, where it came from, what helps."""
    words = reason_of(error)
    shown = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} …"
    place = _place_of(error)
    advice = next((text for pattern, text in _ADVICE if re.search(pattern, words)), None)
    told = f"{type(error).__name__}: {shown}" if shown else type(error).__name__
    told += "" if place is None else f" ({place})"
    return told if advice is None else f"{told}; {advice}"


def _place_of(error: Exception) -> str | None:
    """Return the last line that is neither ours nor a library's, None where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_NOT_THEIRS, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return None
