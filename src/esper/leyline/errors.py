"""Errors and warnings, one class per kind of mistake.

Every message is one line that says what is wrong and what would be right. The command line prints
that line for any `EsperError`; any other exception is a bug and keeps its traceback. Each class
also derives from the built-in exception that a caller would expect.
"""

from __future__ import annotations

import difflib
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class EsperError(Exception):
    """Base of every error Esper raises on purpose."""


class UsageError(EsperError, ValueError):
    """The request was wrong: an unknown name, a bad combination of options."""


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
    """A slot cannot be placed there, or the activation at a slot has changed its form."""


class DataError(EsperError, OSError):
    """A data file is missing, truncated or not what it says it is."""


class CheckpointError(EsperError, OSError):
    """A saved state is missing, damaged or of another kind."""


class NonFiniteError(EsperError, ArithmeticError):
    """A loss or an activation is NaN or infinite."""


class OwnCodeError(EsperError, RuntimeError):
    """A model, a loss or a loader of the user failed."""


class EmptyMaskError(EsperError, ValueError):
    """No action is legal where one must be chosen."""


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Turn an ImportError within the block into one that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs the extra: pip install 'esper-grow[{extra}]' ({error})"
        ) from None


class EsperWarning(UserWarning):
    """Something works, but not as well as the user may think."""


_MOST_NAMED = 50
_FEW = 8
"""Most names of which all are shown where there may be hundreds."""
_ALIKE = 0.6
"""Least similarity of two names, from 0 to 1, for one to be suggested in place of the other."""

_SKIPPED_PACKAGES = ("esper", "torch", "contextlib")
"""Packages between the user's line and the call of `warn`."""


def warn(message: str) -> None:
    """Issue an EsperWarning at the line of the user's code that called Esper."""
    depth, frame = 1, sys._getframe()
    while (
        frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED_PACKAGES
    ):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, EsperWarning, stacklevel=depth)


def reason_of(error: object) -> str:
    """Return the message of an error in one line, or its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def describe_no_module(given: object) -> str:
    """Return that something is no model, and what to give instead."""
    if isinstance(given, type):
        name = given.__name__
        return f"the model must be a torch.nn.Module, got the class {name}; write {name}(...)"
    name = type(given).__name__
    return f"the model must be a torch.nn.Module, got {name}; give the network itself"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the closest known name, or an empty string."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=_ALIKE)
    return f", did you mean {close[0]!r}?" if close else ""


def instead(name: object, known: Iterable[str], intro: str = "known:") -> str:
    """Return the end of a message about an unknown name: the closest name, and all known ones."""
    names = list(known)
    shown = ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
    return f"{nearest(str(name), names) or ';'} {intro} {shown or 'none'}"


def nearest_few(name: str, known: Iterable[str]) -> str:
    """Return all of a few names, of many the closest, and how many others there are."""
    names = list(known)
    if len(names) <= _FEW:
        return ", ".join(names) or "none"
    count = _FEW // 2
    close = difflib.get_close_matches(str(name), names, n=count, cutoff=_ALIKE / 2)
    shown = close or names[:count]
    return f"{', '.join(shown)} and {len(names) - len(shown)} more"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an unknown name, with the closest and all known ones."""
    return UnknownNameError(f"unknown {kind} {name!r}{instead(name, sorted(known))}")


# ---- Options as the user writes them: on the command line, or in Python


_PYTHON = {"resume": "resume=True", "overwrite": "overwrite=True", "out": "out=..."}
_is_command = False
"""Whether the user runs a command of Esper."""


@contextmanager
def as_command() -> Iterator[None]:
    """Within the block, messages name options as on the command line."""
    global _is_command  # Not a context variable: writer threads have messages too.
    before, _is_command = _is_command, True
    try:
        yield
    finally:
        _is_command = before


def is_command() -> bool:
    """Return whether the user runs a command of Esper."""
    return _is_command


def option(name: str) -> str:
    """Return an option as the user writes it: `--resume`, or `resume=True` in Python."""
    return f"--{name}" if _is_command else _PYTHON[name]


# ---- Exceptions from a user's model, loss or loader, in one line with the place and advice


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
        r"expected scalar type \w+ but found \w+|mixed dtype|RNN input dtype",
        "weights and inputs must have the same type: give inputs as "
        "x.to(next(model.parameters()).dtype), or convert the model, as by model.float()",
    ),
    (
        r"must be Tensor, not|numpy\.ndarray|Input type \(.*\) and (bias|weight) type"
        r"|have the same dtype",
        "give tensors of the model's own type, as by torch.as_tensor(x, dtype=torch.float32)",
    ),
    (
        r"forward\(\) got an unexpected keyword argument",
        "the keys of a dict batch must be names of arguments of forward; rename them, or give "
        "(input, target)",
    ),
    (
        r"forward\(\) takes .* were given|forward\(\) missing .* argument",
        "a batch is (input, target), or (input, ..., target) with one input for each argument of "
        "forward",
    ),
    (
        r"[Oo]ut of memory",
        "use a smaller batch size",
    ),
)
"""Advice for common errors of PyTorch, by pattern."""

_TWO_DTYPES = re.compile(
    r"mat1 and mat2 must have the same dtype, but got (\S+) and (\S+)"
    r"|m1 and m2 to have the same dtype, but got: (\S+) != (\S+)"
    r"|Input type \((.*?)\) and (?:bias|weight) type \((.*?)\)"
)
"""Errors of PyTorch that name the type of an input and that of a weight."""

_DTYPES = {"bfloat16": "bfloat16", "double": "float64", "half": "float16", "float": "float32"}
"""Names of types by what PyTorch's errors call them; the first that occurs counts."""

_NOT_USERS = tuple(
    str(path)
    for path in (
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
    )
)


def describe_exception(error: Exception) -> str:
    """Return an exception in one line: its class, its message, its place in user code, advice."""
    message = reason_of(error)
    shown = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} …"
    advice = _dtype_advice(message)
    advice = advice or next((text for pattern, text in _ADVICE if re.search(pattern, message)), "")
    advice = f"; {advice}" if advice else ""
    return f"{type(error).__name__}: {shown}{_place_of(error)}{advice}"


def _dtype_advice(message: str) -> str:
    """Return advice where a message names the types of an input and of a weight, else ""."""
    match = _TWO_DTYPES.search(message)
    if match is None:
        return ""
    names = [name.lower() for name in match.groups() if name]
    given, own = (next((_DTYPES[key] for key in _DTYPES if key in name), None) for name in names)
    if own is None:
        return ""
    if given is None:
        return f"give tensors of the model's own type, as by x.to(torch.{own})"
    return (
        f"the weights are torch.{own} and the inputs torch.{given}: give inputs as "
        f"x.to(torch.{own}), or convert the model by model.to(torch.{given})"
    )


def _place_of(error: Exception) -> str:
    """Return the last line of user code in the traceback, empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_NOT_USERS, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
    return ""
