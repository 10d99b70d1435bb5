"""The server of the live page: one process that listens, reads and can be stopped at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from esper.dashboard.app import make_app
from esper.dashboard.guard import Access
from esper.leyline.errors import UsageError

_TICK_S = 0.5
"""How often the server looks whether it has to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens."""

    url: str
    is_local: bool


def serve(
    root: Path,
    *,
    host: str,
    port: int,
    names: Iterable[str] = (),
    say: Callable[[Address], None] = lambda address: None,
) -> None:
    """Serve the runs at or below a folder until the process is interrupted.

    Args:
        root: a run folder, or one that holds runs.
        host: where to listen; beyond this machine a token is asked for.
        port: which port, 0 for any that is free.
        names: further names the server may be asked under.
        say: called with the address once the server listens.

    Raises:
        UsageError: The port is taken, or the host is not one of this machine.
    """
    access = Access.on(host, names)
    with _listen(host, port) as listening:
        found = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        token = "" if access.token is None else f"?token={access.token}"
        say(Address(url=f"http://{shown}:{found}/{token}", is_local=access.is_local))
        _Server(root, access).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Wakes up less often than uvicorn does, ten times a second, to see whether it has to stop.

    Waking up was most of what the server cost the run beside it while nothing was new.
    """

    def __init__(self, root: Path, access: Access) -> None:
        app = make_app(root, access, is_over=lambda: self.should_exit)
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=2,
            )
        )

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(_TICK_S)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        # Whoever was told the address may come before the server is ready; it waits here.
        listening.listen()
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on {host}, port {port}: {reason}; choose another with --port, "
            "0 for any that is free"
        ) from None
    return listening
