from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tools.tree_totals import count_code_lines, files_run, main

SOURCE = '''"""What it is for."""

# Why.
LIMIT = 3
"""How far."""


def double(x: int) -> int:
    """Return twice x."""
    return (
        x  # not half
        * 2
    )
'''


def test_comments_and_blanks_are_no_code() -> None:
    assert count_code_lines(SOURCE) == 9
    assert count_code_lines("") == 0
    assert count_code_lines('TEXT = """a\nb"""\n') == 2


def test_files_whose_functions_run_are_found_in_every_thread(tmp_path: Path) -> None:
    for name in ("called", "threaded", "imported"):
        (tmp_path / f"{name}.py").write_text("class A:\n    b = 1\n\ndef f():\n    return 1\n")

    def load(name: str) -> dict[str, object]:
        path = tmp_path / f"{name}.py"
        found: dict[str, object] = {}
        exec(compile(path.read_text(), str(path), "exec"), found)
        return found

    def action() -> None:
        load("called")["f"]()  # type: ignore[operator]
        thread = threading.Thread(target=load("threaded")["f"])  # type: ignore[arg-type]
        thread.start()
        thread.join()
        load("imported")

    assert files_run(action, tmp_path) == {"called.py", "threaded.py"}


def test_the_totals_are_told_and_do_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "src" / "esper"
    package.mkdir(parents=True)
    (package / "one.py").write_text(SOURCE)
    (package / "two.py").write_text("X = 1\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "src/esper: 10 lines of code in 2 modules\n"
    assert main([str(tmp_path / "nowhere")]) == 2
