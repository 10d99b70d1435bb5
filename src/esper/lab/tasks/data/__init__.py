"""Readers of data that a user has on disk, one file per layout.

`open_data(path)` recognises the layout of a file or folder. Nothing is downloaded, and no reader
executes code from a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from esper.lab.tasks.data import arrays as idx
from esper.lab.tasks.data import arrays as npz
from esper.lab.tasks.data import cifar, text
from esper.lab.tasks.data.source import DataSet, Found, Source, existing, search
from esper.leyline.errors import DataError

__all__ = ["DEFAULT_CONTEXT", "Source", "open_data"]


# ---- `open_data`: recognises the layout of a user's file or folder, and reads it


DEFAULT_CONTEXT = 128
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
FILE_SETS = (*cifar.LAYOUTS, idx.ANY)
KNOWN = "CIFAR-10 batches (python, binary or packed), idx files, one .npz file, or UTF-8 .txt files"


def open_data(path: str | os.PathLike[str], *, context: int = DEFAULT_CONTEXT) -> Source:
    """Read a data file or folder in any known layout.

    Args:
        path: An .npz or .txt file, any file of a known data set, or a folder with one data set.
        context: Tokens per sequence, if it is text.
    """
    place = existing(path)
    return _open_folder(place, context) if place.is_dir() else _open_file(place, context)


def _read_found(found: Found) -> Source:
    return cifar.read_cifar(found) if found.layout in cifar.LAYOUTS else idx.read_idx(found)


def _open_file(path: Path, context: int) -> Source:
    if path.name.lower().endswith(ARCHIVES):
        raise DataError(f"{path} is an archive; unpack it and give the folder")
    for layout in FILE_SETS:
        if any(path.name in names for names in layout.files):
            whole = DataSet(layout.label, (layout,), "give a complete folder", _read_found)
            return whole.read(whole.find(path))
    if path.suffix == ".npz":
        return npz.read_npz(path)
    if path.suffix == ".txt":
        return text.read_text((path,), context)
    raise DataError(f"{path} is in no known layout; known: {KNOWN}")


def _open_folder(folder: Path, context: int) -> Source:
    complete, incomplete = search(FILE_SETS, folder, is_explicit=True)
    readers: dict[str, Callable[[], Source]] = {
        f"{found.layout.label} in {found.folder}": partial(_read_found, found) for found in complete
    }
    packed = {name for names in cifar.PACKED.files for name in names}
    for path in sorted(folder.glob("*.npz")):
        if path.name not in packed:
            readers[path.name] = partial(npz.read_npz, path)
    if len(readers) > 1:
        raise DataError(
            f"{folder} holds several data sets ({', '.join(readers)}); name the one you mean"
        )
    if readers:
        return next(iter(readers.values()))()
    if incomplete is not None:
        raise DataError(f"{incomplete}; complete them")
    # Data sets come with .txt notes, so text is read only if there is nothing else.
    if any(folder.glob("*.txt")):
        return text.read_text(text.find_text(folder), context)
    raise DataError(f"{folder} holds no known data; known: {KNOWN}")
