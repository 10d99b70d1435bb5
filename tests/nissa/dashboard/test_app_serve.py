from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from esper.leyline.errors import UsageError
from esper.nissa.dashboard.app import serve
from tests.harness.bad_stores import endless_table
from tests.nissa.dashboard.stores import growing, training


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match="choose another with --port"):
            serve(tmp_path, host="127.0.0.1", port=port)


def test_a_host_that_is_not_ours_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        serve(tmp_path, host="192.0.2.1", port=0)


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_a_store_that_never_answers_holds_up_neither_others_nor_the_end(tmp_path: Path) -> None:
    growing(tmp_path / "good")
    training(tmp_path / "bad")
    endless_table(tmp_path / "bad" / "run.db", "updates")
    server = subprocess.Popen(
        [sys.executable, "-m", "esper.scripts.cli.main", "dashboard", str(tmp_path), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        port = int(server.stderr.readline().split("http://")[1].split("/")[0].split(":")[1])

        def ask(path: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", path)
            try:
                return connection.getresponse().status
            finally:
                connection.close()

        def never() -> None:
            with suppress(OSError, http.client.HTTPException):
                ask("/api/series?id=bad")

        waiting = [threading.Thread(target=never, daemon=True) for _ in range(6)]
        for thread in waiting:
            thread.start()
        time.sleep(0.5)
        assert ask("/api/series?id=good") == 200
        assert ask("/api/runs") == 200
        assert any(thread.is_alive() for thread in waiting)
        began = time.monotonic()
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
        assert time.monotonic() - began < 6
    finally:
        server.kill()
        server.communicate()
