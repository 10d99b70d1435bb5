"""What somebody's own model, loss or loader raises, in one line that says where and what to do.

The exception itself is kept as the cause: in Python its traceback is shown as ever, and
`ESPER_DEBUG=1` shows it at the command line.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from esper.leyline.errors import EsperError, UsageError, reason_of

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
