"""Plain UTF-8 text as byte tokens: no tokenizer, no vocabulary file, 256 tokens.

The mark `<|endoftext|>` between stories becomes token 0, a byte that text does not contain. Each
file is cut into sequences of context + 1 tokens without overlap; the remainder is dropped. Files
with "valid" or "test" in their name are the test split, if there are others to train on.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from esper.lab.tasks.data.source import (
    HOW_TO_POINT,
    Array,
    Source,
    data_file,
    data_roots,
    existing,
    readable,
)
from esper.leyline.errors import DataError

VOCAB = 256
END_OF_TEXT = "<|endoftext|>"
HELD_OUT = ("valid", "test")
STORY_FOLDERS = ("tinystories", "TinyStories", "stories")
HOW_TO_GET = (
    "get TinyStoriesV2-GPT4-train.txt and TinyStoriesV2-GPT4-valid.txt from "
    "https://huggingface.co/datasets/roneneldan/TinyStories"
)


def encode(text: str) -> Array:
    """Return the byte tokens of a text."""
    return np.frombuffer(text.encode().replace(END_OF_TEXT.encode(), b"\0"), dtype=np.uint8)


def find_text(data_path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return the file the user gave, or the .txt files of the folder, by name."""
    path = existing(data_path)
    if path.is_file():
        return (path,)
    files = _texts(path, prefix="")
    if not files:
        raise DataError(f"{path} holds no .txt file; plain UTF-8 text is expected")
    return files


def find_stories(data_path: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Return the TinyStories files found in the usual places, or the text the user gave."""
    roots = data_roots()
    if data_path is not None:
        path = existing(data_path)
        if path.is_file():
            return (path,)
        roots = (path,)
    for root in roots:
        for folder in (root, *(root / name for name in STORY_FOLDERS)):
            is_named = folder.name in STORY_FOLDERS
            files = _texts(folder, prefix="" if is_named else "tinystories")
            if files:
                return files
    if data_path is not None:
        return find_text(data_path)
    raise DataError(
        f"TinyStories was not found: needed tinystories*.txt; "
        f"looked in {', '.join(map(str, roots))}; {HOW_TO_GET}, then {HOW_TO_POINT}; "
        f"any other UTF-8 text will do as well"
    )


def read_sources(context: int) -> Source:
    """Return the sources of Python's standard library, which every installation has.

    They are sorted by checksum, so that neighbours are unrelated.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts = {}
    for file in _texts(folder, prefix="", suffix=".py"):
        text = file.read_bytes().decode("utf-8", "ignore").replace("\0", "")
        texts[hashlib.sha256(text.encode()).digest()] = text
    if not texts:
        raise DataError(
            f"{folder} has no sources of Python's standard library; give any UTF-8 text by --data"
        )
    tokens = np.concatenate([encode(texts[key]) for key in sorted(texts)])
    sequences = cut(tokens, context)
    origin = "the sources of Python's standard library"
    return Source(name="sources", origin=origin, x=sequences, y=None, num_classes=VOCAB)


def read_text(
    files: Sequence[Path], context: int, limit_bytes: int | None = None, name: str = "text"
) -> Source:
    """Return sequences [N, context + 1] of byte tokens.

    Args:
        files: The text files, in the order in which they are read.
        context: Tokens a model sees at once.
        limit_bytes: Read only this much from the start of each file; None for all of it.
        name: What the text is, for people.
    """
    held_out = [file for file in files if any(word in file.name.lower() for word in HELD_OUT)]
    if len(held_out) == len(files):
        held_out = []
    parts = {file: cut(_read_tokens(file, limit_bytes), context) for file in dict.fromkeys(files)}
    train = np.concatenate([parts[file] for file in parts if file not in held_out])
    test = np.concatenate([parts[file] for file in held_out]) if held_out else None
    where = ", ".join(str(file) for file in parts)
    for part, sequences in (("training", train), ("test", test)):
        if sequences is not None and len(sequences) == 0:
            raise DataError(
                f"{where}: the {part} text is shorter than one sequence of {context + 1} bytes; "
                f"give a longer text or a shorter context"
            )
    return Source(name=name, origin=where, x=train, y=None, x_test=test, num_classes=VOCAB)


def _texts(folder: Path, prefix: str, suffix: str = ".txt") -> tuple[Path, ...]:
    if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
        return ()
    return tuple(
        sorted(
            path
            for path in folder.iterdir()
            if path.suffix == suffix
            and path.name.lower().startswith(prefix)
            and os.path.isfile(path)
        )
    )


def _read_tokens(path: Path, limit_bytes: int | None) -> Array:
    with data_file(readable(path)) as file:
        raw = file.read() if limit_bytes is None else file.read(limit_bytes)
        was_cut = limit_bytes is not None and len(raw) == limit_bytes and bool(file.read(1))
    if not raw:
        raise DataError(f"{path} is empty; plain UTF-8 text is expected")
    if was_cut:
        # The last character may be incomplete: step back to its first byte.
        start = next(i for i in range(len(raw) - 1, -1, -1) if raw[i] & 0xC0 != 0x80 or i == 0)
        raw = raw[:start]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; convert it first, "
            f"for example with iconv -t utf-8"
        ) from None
    if "\0" in text:
        raise DataError(
            f"{path} has a NUL character at position {text.index(chr(0))}; it is not plain text"
        )
    return encode(text)


FOLDED = 64
"""Tokens of a folded text."""
_FIRST, _CASE, _OTHER = ord(" "), ord("`"), ord("_")


def fold(tokens: Array) -> Array:
    """Return byte tokens in an alphabet of 64, as in the six-bit codes of old.

    Letters lose their case. Line ends and other bytes outside of ASCII's printable ones become one
    token. So next to a small network the table of tokens is small too.
    """
    upper = np.where(tokens >= _CASE, tokens - (_CASE - ord("@")), tokens)
    is_printable = (tokens >= _FIRST) & (tokens <= ord("~"))
    return (np.where(is_printable, upper, _OTHER) - _FIRST).astype(np.uint8)


def cut(tokens: Array, context: int) -> Array:
    """Cut tokens [N] into sequences [N // (context + 1), context + 1]."""
    count = len(tokens) // (context + 1)
    return tokens[: count * (context + 1)].reshape(count, context + 1)
