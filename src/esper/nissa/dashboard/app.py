"""The web application of the dashboard, which only reads."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import socket
import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from esper._version import __version__
from esper.leyline.errors import EsperError, UsageError, reason_of
from esper.nissa.dashboard import episodes, stream
from esper.nissa.dashboard import stream as reading
from esper.nissa.dashboard.guard import Access, Catalog, Guard
from esper.nissa.reader import StoredRun
from esper.nissa.report.markup import visible
from esper.nissa.report.page import PICTURE_STYLE, load_templates
from esper.nissa.report.panels import read_series

MOST_THREADS = 4
"""Threads per run, so that one slow store does not block the others."""

MOST_OVERLAID = 8
"""Runs that one page can show together."""

MOST_PIXELS = 20_000
"""Width of a drawing that may be asked for."""

_STATIC = files("esper.nissa.dashboard") / "static"
_LOOK = (files("esper.nissa.report") / "templates" / "look.css").read_text(encoding="utf-8")


def make_app(root: Path, access: Access, *, is_over: Callable[[], bool] = lambda: False) -> Guard:
    """Return the application over the runs at or below a folder.

    Args:
        root: A run folder, or a folder of runs.
        access: Which requests are allowed.
        is_over: Returns True when streams and queries have to end because the server stops.
    """
    pages = _Pages(root, is_over)
    routes = [
        Route("/", pages.runs_page),
        Route("/run", pages.run_page),
        Route("/api/runs", pages.runs),
        Route("/api/run", pages.run),
        Route("/api/series", pages.series),
        Route("/api/garden", pages.garden),
        Route("/api/lanes", pages.lanes),
        Route("/api/seed", pages.seed),
        Route("/api/decisions", pages.decisions),
        Route("/api/foreseen", pages.foreseen),
        Route("/api/stream", pages.stream),
        Route("/static/look.css", pages.look),
        Route("/static/picture.css", pages.picture_style),
        Mount("/static", StaticFiles(directory=str(_STATIC))),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _refuse,
            EsperError: _explain,
            sqlite3.Error: _explain,
        },
        middleware=[Middleware(_OnlyGet)],
    )
    return Guard(app, access)


class _OnlyGet:
    """Refuses every method but GET and HEAD, also for static files."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            await _answer({"error": "This page only reads."}, 405)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _answer(data: Any, status: int = 200) -> Response:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer({"error": visible(error.detail)}, error.status_code)


async def _explain(request: Request, error: Exception) -> Response:
    """Answer with the error of a store; other runs stay available."""
    text = reason_of(error)
    if "--timeout" in text:
        text = "This took too long; choose a round, or fewer rows."
    return _answer({"error": visible(text)}, 422)


Endpoint = Callable[["_Pages", Request], Awaitable[Response]]


def _data(read: Callable[[_Pages, Request], Any]) -> Endpoint:
    """Make an endpoint of a function, which runs in a thread of its own."""

    @functools.wraps(read)
    async def answer(self: _Pages, request: Request) -> Response:
        limiter = self.limiter(request.query_params.get("id", ""))
        found = await anyio.to_thread.run_sync(read, self, request, limiter=limiter)
        return found if isinstance(found, Response) else _answer(found)

    return answer


def _of_run(read: Callable[[_Pages, Request, StoredRun], Any]) -> Endpoint:
    """Make an endpoint of a function that reads the run named in the request."""

    @functools.wraps(read)
    def opened(self: _Pages, request: Request) -> Any:
        folder = self.folder(request.query_params.get("id", ""))
        with reading.open_shown(folder, self.is_over) as run:
            found = read(self, request, run)
            return found if isinstance(found, Response) else reading.plain(found)

    return _data(opened)


class _Pages:
    """The endpoints."""

    def __init__(self, root: Path, is_over: Callable[[], bool]) -> None:
        self._catalog = Catalog(root, is_over=is_over)
        self.is_over = is_over
        self._limiters: WeakValueDictionary[str, anyio.CapacityLimiter] = WeakValueDictionary()
        self._templates = load_templates("esper.nissa.dashboard")

    # ------------------------------------------------------------------------------------- pages

    async def runs_page(self, request: Request) -> Response:
        """Return the list of runs."""
        return self._page("runs.html", root=visible(self._catalog.root))

    async def run_page(self, request: Request) -> Response:
        """Return the page of one run or several; a script on it reports a missing run."""
        return self._page("run.html", name=visible(request.query_params.get("id", "")))

    async def look(self, request: Request) -> Response:
        """Return the colours that pages and reports share."""
        return Response(_LOOK, media_type="text/css")

    async def picture_style(self, request: Request) -> Response:
        """Return the style of drawings that pages and reports share."""
        return Response(PICTURE_STYLE, media_type="text/css")

    def _page(self, template: str, **values: str) -> Response:
        page = self._templates.get_template(template).render(version=__version__, **values)
        return HTMLResponse(page)

    # -------------------------------------------------------------------------------------- data

    @_data
    def runs(self, request: Request) -> Any:
        """Return all runs; a damaged one has the reason in its note."""
        found = []
        for name, entry in self._catalog.entries().items():
            fields = dataclasses.asdict(entry)
            del fields["path"]
            found.append({"name": name, **reading.plain(fields)})
        return {"root": visible(self._catalog.root), "runs": found}

    @_of_run
    def run(self, request: Request, run: StoredRun) -> Any:
        """Return settings, progress and alarms of one run."""
        return reading.read_run(run, request.query_params["id"])

    @_of_run
    def series(self, request: Request, run: StoredRun) -> Any:
        """Return the points of a run's charts, and the position at which a stream continues.

        `from` and `to` restrict them to a part of the axis.
        """
        between = _between(request)
        # Read before the points: rows written in between are then sent twice, not lost.
        position = stream.read_position(run)
        kind = reading.read_kind(run)
        return {
            "position": str(position),
            "kind": kind,
            "tables": read_series(run, kind, between),
        }

    @_of_run
    def garden(self, request: Request, run: StoredRun) -> Any:
        """Return what one episode was and what grew in it."""
        return episodes.read_garden(run, _number(request, "round"), _number(request, "row"))

    @_of_run
    def lanes(self, request: Request, run: StoredRun) -> Any:
        """Return the lanes of one episode, drawn for the width and the epochs that are shown."""
        low, high, left, right, width = (
            _decimal(request, key) for key in ("from", "to", "left", "right", "width")
        )
        if not low < high or not 0 <= left < right <= width <= MOST_PIXELS:
            raise HTTPException(400, f"from < to and left < right <= width <= {MOST_PIXELS}.")
        picture = episodes.draw_lanes(
            run,
            _number(request, "round"),
            _number(request, "row"),
            epochs=(low, high),
            left=left,
            right=right,
            width=width,
        )
        return Response(picture, media_type="image/svg+xml")

    @_of_run
    def seed(self, request: Request, run: StoredRun) -> Any:
        """Return the life of one seed."""
        numbers = [_number(request, key) for key in ("round", "row", "ordinal")]
        found = episodes.read_seed(run, *numbers)
        if found is None:
            raise HTTPException(404, "There is no such seed.")
        return found

    @_of_run
    def decisions(self, request: Request, run: StoredRun) -> Any:
        """Return the decisions that match all conditions."""
        asked = request.query_params
        return episodes.read_decisions(
            run,
            round=_maybe_number(request, "round"),
            row=_maybe_number(request, "row"),
            op=asked.get("op") or None,
            slot=asked.get("slot") or None,
            outcome=asked.get("outcome") or None,
            acted=asked.get("acted") == "1",
            before=_maybe_number(request, "before"),
        )

    @_of_run
    def foreseen(self, request: Request, run: StoredRun) -> Any:
        """Return predicted against real returns."""
        return episodes.read_foreseen(run, _number(request, "round"))

    async def stream(self, request: Request) -> Response:
        """Stream what is new in one run or several since the position of the page."""
        names = request.query_params.getlist("id")[:MOST_OVERLAID]
        seen = request.headers.get("last-event-id") or request.query_params.get("after", "")
        places = seen.split("|")
        if len(places) != len(names):
            places = [""] * len(names)
        watches = []
        for name, place in zip(names, places, strict=True):
            path = await anyio.to_thread.run_sync(self.folder, name, limiter=self.limiter(name))
            watches.append(stream.Watch(name, path, stream.Position.parse(place), self.is_over))
        return StreamingResponse(
            stream.events(watches, is_over=self.is_over), media_type="text/event-stream"
        )

    def limiter(self, name: str) -> anyio.CapacityLimiter:
        """Return the limiter of the threads of one run."""
        found = self._limiters.get(name)
        if found is None:
            found = self._limiters[name] = anyio.CapacityLimiter(MOST_THREADS)
        return found

    def folder(self, name: str) -> Path:
        """Return the folder of a run that may be shown."""
        path = self._catalog.folder(name)
        if path is None:
            raise HTTPException(404, "There is no such run.")
        return path


def _maybe_number(request: Request, key: str) -> int | None:
    text = request.query_params.get(key, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise HTTPException(400, f"{key} must be a whole number.")
    return int(text)


def _decimal(request: Request, key: str) -> float:
    try:
        found = float(request.query_params.get(key, ""))
    except ValueError:
        found = math.nan
    # The comparison is false for NaN as well.
    if not abs(found) < 1e15:
        raise HTTPException(400, f"{key} must be a number.")
    return found


def _between(request: Request) -> tuple[int, int] | None:
    low, high = (_maybe_number(request, key) for key in ("from", "to"))
    if low is None and high is None:
        return None
    if low is None or high is None or low > high:
        raise HTTPException(400, "from and to must be whole numbers, the lower one first.")
    return low, high


def _number(request: Request, key: str) -> int:
    found = _maybe_number(request, key)
    return 0 if found is None else found


# ---- The server


_TICK_S = 0.5
"""How often the server checks whether it has to stop."""


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
        root: A run folder, or a folder of runs.
        host: The address to listen on; any but a local one requires a token.
        port: The port, 0 for any that is free.
        names: Further host names that requests may use.
        say: Called with the address once the server listens.

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
    """A uvicorn server that wakes up twice a second instead of ten times, to save CPU time."""

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
        # Connections that come before the server is ready wait in this queue.
        listening.listen()
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on {host}, port {port}: {reason}; choose another with --port, "
            "0 for any that is free"
        ) from None
    return listening
