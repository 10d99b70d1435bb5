"""A search or a proof in its folder: started, continued, and never written by two at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from esper.leyline.config import Config
from esper.leyline.errors import ConfigError, UsageError
from esper.leyline.lock import WriterLock
from esper.nissa.database import LOCK_FILE
from esper.nissa.listing import COMMAND
from esper.runs.folder import RunFolder

C = TypeVar("C", bound=Config)


def start(path: str | Path, config: Config, *, overwrite: bool) -> None:
    """Make the folder and write down what was asked for."""
    kind = type(config).__name__.removesuffix("Config").lower()
    settings = {COMMAND: kind, **config.to_mapping()}
    with RunFolder(path).claim_new(settings, overwrite=overwrite) as lock:
        lock.release()


def read_config(path: str | Path, config: type[C]) -> C:
    """Return what was asked for in a folder that is continued."""
    kind = config.__name__.removesuffix("Config").lower()
    settings = RunFolder(path).read_config()
    if settings.pop(COMMAND, None) != kind:
        raise UsageError(f"{path} is no folder of `esper {kind}`; give the --out of one")
    try:
        return config.from_mapping(settings)
    except ConfigError as error:
        raise UsageError(f"{path} was written by another version: {error}") from None


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Within the block no other process writes into the folder."""
    lock = WriterLock(Path(path) / LOCK_FILE)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()
