"""Access control of the dashboard, and the list of runs that it may show.

Any web page that the user has open can reach a server on 127.0.0.1 under a host name that resolves
to it (DNS rebinding). So the Host header is checked. A server that listens beyond this machine also
requires a token.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esper.nissa.columns import storable_text
from esper.nissa.database import STORE_FILE
from esper.nissa.listing import (
    LISTING_S,
    RESULTS,
    RunEntry,
    describe_run,
    newest_first,
    run_folders,
)

COOKIE = "esper_token"

HEADERS = {
    # Nothing but our own files, whatever a text in a store tries; see decision 0010.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_loopback(host: str) -> bool:
    """Return whether a host is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which requests are allowed."""

    is_local: bool = True
    """The server listens on this machine only and accepts local names only."""
    token: str | None = None
    names: frozenset[str] = field(default_factory=frozenset)
    """Further host names that requests may use."""

    @classmethod
    def on(cls, host: str, names: Iterable[str] = ()) -> Access:
        """Return the access rules of a server that listens on this host."""
        given = frozenset(name.lower() for name in names)
        if is_loopback(host):
            return cls(names=given)
        own = {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        return cls(is_local=False, token=new_token(), names=given | own)

    def knows_host(self, header: str) -> bool:
        """Return whether a Host header names this server."""
        name = _host_name(header)
        if name in self.names or name == "localhost":
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # Unlike a name, an address cannot be redirected by its owner.
        return address.is_loopback or not self.is_local


def _host_name(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


class Guard:
    """Middleware that refuses foreign host names and missing tokens, and adds security headers.

    The token is in the address once and then in a cookie, so that it does not stay in the history
    of the browser.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        """Wrap an application."""
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refuse(scope)
        await (self._app if refusal is None else refusal)(scope, receive, marked)

    def _refuse(self, scope: MutableMapping[str, Any]) -> Response | None:
        asked = HTTPConnection(scope)
        if not self._access.knows_host(asked.headers.get("host", "")):
            return PlainTextResponse(
                "This host name is not allowed; use the address that `esper dashboard` printed, or "
                "start it with --allow-host NAME.\n",
                status_code=421,
            )
        token = self._access.token
        if token is None:
            return None
        given = asked.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), token.encode()):
            rest = urlencode([p for p in asked.query_params.multi_items() if p[0] != "token"])
            # A path that begins with two slashes would lead to another host.
            path = "/" + scope["path"].lstrip("/\\")
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return answer
        if hmac.compare_digest(asked.cookies.get(COOKIE, "").encode(), token.encode()):
            return None
        return PlainTextResponse(
            "A token is needed: open the whole address that `esper dashboard` printed.\n",
            status_code=401,
        )


# ---- The runs below one folder, by name


FRESH_S = 2.0
"""How long a list of runs is cached."""

SLOW_S = 0.5 * LISTING_S
"""A store that took longer than this is read again only once it has changed."""


class Catalog:
    """The runs at or below a folder, looked up by name.

    Args:
        root: A run folder, or a folder of runs.
        fresh_s: How long a list is cached.
        is_over: Returns True when the server has to stop; an unfinished list is then given up.
    """

    def __init__(
        self,
        root: Path,
        *,
        fresh_s: float = FRESH_S,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start without reading anything."""
        self.root = root
        self._fresh_s = fresh_s
        self._is_over = is_over
        self._listing = threading.Lock()
        self._found: dict[str, RunEntry] = {}
        self._looked = -float("inf")
        self._slow: dict[Path, tuple[object, RunEntry]] = {}
        """Slow stores: their stamp, and the entry that was read."""

    def entries(self) -> dict[str, RunEntry]:
        """Return all runs by name, newest first, damaged ones included."""
        with self._listing:
            if time.monotonic() - self._looked > self._fresh_s:
                # Searches, clones and proofs have no store to show.
                found = [self._describe(folder) for folder in run_folders(self.root)]
                shown = newest_first(run for run in found if run.kind not in RESULTS)
                self._found = {self._name(entry.path): entry for entry in shown}
                self._looked = time.monotonic()
            return self._found

    def folder(self, name: str) -> Path | None:
        """Return the folder of a run, None for an unknown name."""
        known = self._found.get(name)
        if known is not None:
            return known.path
        return next((path for path in run_folders(self.root) if self._name(path) == name), None)

    def _describe(self, folder: Path) -> RunEntry:
        if self._is_over():
            return RunEntry(path=folder, state="damaged", note="the server stops")
        stamp = _stamp(folder / STORE_FILE)
        if folder in self._slow and self._slow[folder][0] == stamp:
            return self._slow[folder][1]
        began = time.monotonic()
        entry = describe_run(folder)
        self._slow.pop(folder, None)
        if time.monotonic() - began > SLOW_S:
            self._slow[folder] = (stamp, entry)
        return entry

    def _name(self, path: Path) -> str:
        """Return the path below the root; a run that is the root itself has its folder's name."""
        inside = path.relative_to(self.root).as_posix()
        own = self.root.resolve().name
        is_free = inside == "." and own and not (self.root / own).exists()
        return storable_text(own if is_free else inside)


def _stamp(path: Path) -> object:
    """Return inode, size and time of the store, which change when it is written to."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
