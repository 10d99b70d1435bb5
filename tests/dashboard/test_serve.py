from __future__ import annotations

import socket
from pathlib import Path

import pytest

from esper.dashboard.serve import serve
from esper.leyline.errors import UsageError


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
