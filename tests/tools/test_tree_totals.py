from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tools.tree_totals import count_code_lines, count_options, files_run, main

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


def test_comments_blanks_and_docstrings_are_no_code() -> None:
    assert count_code_lines(SOURCE) == 6
    assert count_code_lines("") == 0
    assert count_code_lines('TEXT = """a\nb"""\n') == 2
    assert count_code_lines('def f():\n    """Do\n\n    nothing."""\n') == 1


def test_settings_are_counted_where_they_are_declared() -> None:
    assert count_options("class A:\n    a: int = option(1)\n    b: int = field(option)\n") == 1


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
    folder = tmp_path / "src" / "esper" / "a"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('"""A folder."""\n')
    (folder.parent / "one.py").write_text(SOURCE)
    (folder.parent / "two.py").write_text("x = option(1)\n" + "\n" * 500)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "count.py").write_text("X = 1\nY = 2\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "src/esper: 7 lines of code",
        "modules: 3, of more than 500 lines: 1",
        "folders: 1",
        "settings: 1 declared fields",
        "benchmarks: 0 lines of code",
        "tests: 0 lines of code",
        "tools: 2 lines of code",
    ]
    assert main([str(tmp_path / "nowhere")]) == 2
