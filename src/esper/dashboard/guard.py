"""Who may ask, and what a browser may do with the answer.

A page on this machine can be reached by any other page the user has open, under a name that its
owner points at 127.0.0.1. So the name a request was made to is checked; when the server listens
beyond this machine, a token is asked for as well.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "esper_token"

HEADERS = {
    # Nothing but our own files, whatever a text in a store tries; see decision 0065.
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
    """Return whether a host to listen on is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Return a token nobody guesses."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a request must bring."""

    is_local: bool = True
    """The server listens on this machine alone; only its own names are taken."""
    token: str | None = None
    names: frozenset[str] = field(default_factory=frozenset)
    """Further names the server may be asked under."""

    @classmethod
    def on(cls, host: str, names: Iterable[str] = ()) -> Access:
        """Return what a server that listens on this host must ask for."""
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
        # An address cannot be pointed elsewhere by the owner of a name.
        return address.is_loopback or not self.is_local


def _host_name(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


class Guard:
    """Refuses requests to foreign names or without the token; marks every answer.

    The token comes once in the address, then as a cookie: the address that stays in the browser's
    history has none.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        """Stand before an application."""
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand the request on."""
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
                "This server does not go by that name; use the address it printed, or start it "
                "with --allow-host NAME.\n",
                status_code=421,
            )
        token = self._access.token
        if token is None:
            return None
        given = asked.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), token.encode()):
            rest = urlencode([p for p in asked.query_params.multi_items() if p[0] != "token"])
            # A path that begins with two slashes would be an address elsewhere.
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
