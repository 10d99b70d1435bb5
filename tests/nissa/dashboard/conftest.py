"""The dashboard is an extra: where its server is not installed, its tests are not collected."""

from __future__ import annotations

from importlib.util import find_spec

_MISSING = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_report_header() -> str | None:
    """Name what is missing at the top of the run."""
    return f"tests/dashboard is left out: no {', '.join(_MISSING)}" if _MISSING else None
