"""Reading TensorBoard's event files, checksums and all, without the code that wrote them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum, bit by bit as its definition says."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    checksum = crc32c(data)
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events(path: Path) -> Iterator[Any]:
    """Return every event of a file, after checking that the file is nothing but whole records."""
    from tensorboardX.proto.event_pb2 import Event

    data = path.read_bytes()
    at = 0
    while at < len(data):
        length = data[at : at + 8]
        (size,) = struct.unpack("<Q", length)
        assert struct.unpack("<I", data[at + 8 : at + 12]) == (masked(length),)
        body = data[at + 12 : at + 12 + size]
        assert struct.unpack("<I", data[at + 12 + size : at + 16 + size]) == (masked(body),)
        yield Event.FromString(body)
        at += 16 + size
    assert at == len(data)


def values(folder: Path) -> Iterator[tuple[int, Any]]:
    """Return every value of every event file of a folder, with its step."""
    for path in sorted(folder.glob("*tfevents*")):
        for event in events(path):
            for value in event.summary.value:
                yield event.step, value


def scalars(folder: Path, *, volatile: bool = True) -> dict[str, list[tuple[int, float]]]:
    """Return every scalar as (step, value), by name and in order; times and rates on request."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, value in values(folder):
        changing = value.tag.startswith(("time/", "memory/")) or value.tag == "charts/SPS"
        if value.WhichOneof("value") == "simple_value" and (volatile or not changing):
            found.setdefault(value.tag, []).append((step, value.simple_value))
    return found
