"""`Source`: the arrays that every reader returns, with their normalisation; and where data lies.

Splitting, subsampling and moving to a device is done in `tasks.dataset`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import DataError
from esper.utils.files import open_regular

Array = NDArray[Any]

Kind = Literal["image", "features", "tokens"]
"""Shape of one sample: [C, H, W], [F] or [T + 1] tokens."""

Target = Literal["class", "real", "next_token"]
"""What is predicted: a label, one or more real values, or each next token."""


MOST_CLASSES = 1_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """A data set before it is split; checked at construction.

    Attributes:
        name: What the data is, for people.
        origin: Where it came from; error messages begin with it.
        x: Training samples, uint8 or float32: [N, C, H, W], [N, F] or tokens [N, T + 1].
        y: Their labels (int64) or values (float32); None for tokens.
        x_test: Samples of the official test split, or None where there is none.
        y_test: Their labels or values.
        x_val: Samples of the user's own validation split; None to carve one from the training data.
        y_val: Their labels or values.
        num_classes: Number of classes, or of distinct tokens; None for real values.
        scale: Divisor from raw values to the unit of mean and std.
        mean: Mean per channel in that unit. None: bytes are standardised by the statistics of the
            training split, real numbers are used as they are.
        std: Standard deviation per channel; None as above.
    """

    name: str
    origin: str
    x: Array
    y: Array | None
    x_test: Array | None = None
    y_test: Array | None = None
    num_classes: int | None = None
    scale: float = 1.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    x_val: Array | None = None
    y_val: Array | None = None

    def __post_init__(self) -> None:
        """Raise if the arrays do not fit together."""
        _check_part(self, self.x, self.y, "training")
        for name, x, y in (
            ("validation", self.x_val, self.y_val),
            ("test", self.x_test, self.y_test),
        ):
            if x is None:
                continue
            _check_part(self, x, y, name)
            if x.shape[1:] != self.x.shape[1:]:
                raise DataError(
                    f"{self.origin}: training samples have shape {_shape(self.x)} but {name} "
                    f"samples {_shape(x)}; both must be alike"
                )

    @property
    def kind(self) -> Kind:
        """Shape of one sample."""
        if self.y is None:
            return "tokens"
        return "image" if self.x.ndim == 4 else "features"

    @property
    def target(self) -> Target:
        """What is predicted."""
        if self.y is None:
            return "next_token"
        return "real" if self.y.dtype.kind == "f" else "class"


def _shape(x: Array) -> str:
    return "x".join(map(str, x.shape[1:]))


def _check_part(source: Source, x: Array, y: Array | None, part: str) -> None:
    where = f"{source.origin}: the {part} part"
    if x.ndim < 2 or x.ndim == 3 or x.ndim > 4:
        raise DataError(
            f"{where} has samples of shape {_shape(x) or '()'}; "
            f"images are [N, C, H, W] and features [N, F]"
        )
    if x.size == 0:
        raise DataError(f"{where} is empty; at least one sample is needed")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise DataError(f"{where} has NaN or infinite values; clean them first")
    if y is None:
        return
    if len(y) != len(x):
        raise DataError(f"{where} has {len(x)} samples but {len(y)} labels; there must be as many")
    if y.dtype.kind == "f":
        if not np.isfinite(y).all():
            raise DataError(f"{where} has NaN or infinite targets; clean them first")
    elif source.num_classes is not None:
        if source.num_classes > MOST_CLASSES:
            raise DataError(
                f"{where} has labels up to {source.num_classes - 1:,}; number the classes from 0 "
                f"(at most {MOST_CLASSES:,} are possible)"
            )
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= source.num_classes:
            raise DataError(
                f"{where} has labels from {low} to {high}; "
                f"they must lie in 0 to {source.num_classes - 1}"
            )


# ---- Where data is looked for


ENVIRONMENT_VARIABLE = "ESPER_DATA"
HOW_TO_POINT = f"point --data or {ENVIRONMENT_VARIABLE} at its folder"


@dataclass(frozen=True, slots=True)
class Layout:
    """Files that belong together in one folder.

    Attributes:
        label: Name of the files, for messages.
        files: One entry per file, each a tuple of the names it may have, the usual one first.
        folders: Usual names of the folder that holds them.
        is_telling: Whether the file names alone identify the data set. If not, a folder of another
            name is used only if the user gave it.
    """

    label: str
    files: tuple[tuple[str, ...], ...]
    folders: tuple[str, ...] = ()
    is_telling: bool = True

    @property
    def summary(self) -> str:
        """The label, with the names of the first and the last file."""
        ends = dict.fromkeys((self.files[0][0], self.files[-1][0]))
        return f"{self.label} ({' … '.join(ends)})"


@dataclass(frozen=True, slots=True)
class Found:
    """A complete layout on disk; `files` are in the layout's order."""

    layout: Layout
    folder: Path
    files: tuple[Path, ...]


def data_roots() -> tuple[Path, ...]:
    """Return the folders that are searched when no path is given, first to last."""
    roots: list[Path] = []
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        roots.append(Path(named).expanduser())
    homes = [Path.cwd()]
    source = Path(__file__).resolve().parents[4]
    if source.name == "src":
        homes.append(source.parent)
    for home in homes:
        roots += [home / "data", home / "shared" / "data", home.parent / "shared" / "data"]
    return tuple(dict.fromkeys(roots))


def existing(data_path: str | os.PathLike[str]) -> Path:
    """Return the user's path, or raise if it does not exist."""
    try:
        path = Path(data_path).expanduser()
    except RuntimeError as error:  # the home folder of an unknown user
        raise DataError(f"data path {data_path}: {error}") from None
    # Not Path.exists, which raises for long names and for private folders.
    if not os.path.exists(path):
        raise DataError(f"data path {path} does not exist (current directory {Path.cwd()})")
    return readable(path)


def readable(path: Path) -> Path:
    """Return the path, or raise if this user may not read it."""
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} may not be read by this user; change its permissions")
    return path


@contextmanager
def data_file(path: Path) -> Iterator[BinaryIO]:
    """Open a data file for reading, with errors of one line.

    Raises:
        DataError: It cannot be opened, or reading fails.
    """
    try:
        with open_regular(path) as file:
            yield file
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def match(layout: Layout, folder: Path) -> tuple[Found | None, list[str]]:
    """Return the layout found in `folder`, or None and the names that are missing there."""
    paths: list[Path] = []
    missing: list[str] = []
    for names in layout.files:
        path = next((folder / name for name in names if os.path.isfile(folder / name)), None)
        if path is None:
            missing.append(names[0])
        else:
            paths.append(readable(path))
    return (None if missing else Found(layout, folder, tuple(paths))), missing


def search(
    layouts: Sequence[Layout], root: Path, is_explicit: bool
) -> tuple[list[Found], str | None]:
    """Return every complete layout in or under a root, and what is missing in an incomplete one."""
    complete: list[Found] = []
    partial: str | None = None
    for layout in layouts:
        folders = [root / name for name in layout.folders]
        if is_explicit or layout.is_telling or any(root.match(name) for name in layout.folders):
            folders.insert(0, root)
        for folder in folders:
            found, missing = match(layout, folder)
            if found is not None:
                complete.append(found)
            elif partial is None and len(missing) < len(layout.files):
                partial = f"{layout.label} in {folder} lack {', '.join(missing)}"
    return complete, partial


@dataclass(frozen=True, slots=True)
class DataSet:
    """A known data set on disk.

    Attributes:
        name: Its name, for messages.
        layouts: Its layouts, preferred first.
        how_to_get: A clause on where to get the files.
        read: Reads the files that were found.
    """

    name: str
    layouts: tuple[Layout, ...]
    how_to_get: str
    read: Callable[[Found], Source]

    def find(self, data_path: str | os.PathLike[str] | None = None) -> Found:
        """Return the first complete layout, or raise with the files and folders that were tried.

        Args:
            data_path: The file or folder the user gave; None to search the usual places.
        """
        roots: tuple[Path, ...] = data_roots()
        if data_path is not None:
            path = existing(data_path)
            roots = (path if path.is_dir() else path.parent,)
        first_partial: str | None = None
        for root in roots:
            complete, partial = search(self.layouts, root, is_explicit=data_path is not None)
            if complete:
                return complete[0]
            first_partial = first_partial or partial
        if first_partial is not None:
            raise DataError(f"{self.name} is incomplete: {first_partial}; {self.how_to_get}")
        needed = " or ".join(layout.summary for layout in self.layouts)
        raise DataError(
            f"{self.name} was not found: needed {needed}; looked in {', '.join(map(str, roots))}; "
            f"{self.how_to_get}, then {HOW_TO_POINT}"
        )
