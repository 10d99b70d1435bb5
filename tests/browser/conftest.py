"""A server in a process of its own, and pages that tell of every error and foreign request."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

# A page follows a run within seconds, however busy the machine is.
expect.set_options(timeout=20_000)


class Server:
    """`esper dashboard` over a folder; it can be stopped and started again on the same port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = 0
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "esper", "dashboard", str(self.root), "--port", str(self.port)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        self.url = line.split(" at ")[-1].split()[0].rstrip("/")
        self.port = int(self.url.rpartition(":")[2])

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=10)
        return self._process.returncode


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    # A container's root may not use the browser's own sandbox.
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Callable[..., Page]]:
    """Open pages; in the end none may have had an error or asked another machine."""
    problems: list[str] = []
    contexts = []

    def open_one(path: str, *, width: int = 1280, theme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,  # type: ignore[arg-type]
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda told: _note(told.type, told.text, problems))
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url.startswith(server.url)
                else problems.append(f"foreign request: {asked.url}")
            ),
        )
        page.goto(server.url + path)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


def _note(kind: str, text: str, problems: list[str]) -> None:
    # A server that was stopped on purpose is told by the page, and by the browser as well.
    if (
        kind in ("error", "warning")
        and "ERR_CONNECTION" not in text
        and "ERR_INCOMPLETE" not in text
    ):
        problems.append(f"{kind}: {text}")
