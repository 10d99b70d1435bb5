"""Registration of tasks, and the how-to page."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from esper.kasmina.hosts import MlpConfig
from esper.lab.tasks import (
    FAMILIES,
    TASKS,
    Source,
    Task,
    TaskConfig,
    get_family,
    get_task,
    register_task,
)
from esper.lab.tasks.task import DataPath
from esper.leyline.errors import ConfigError, UnknownNameError, UsageError

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "add-a-task.md"


class Bare(Task):
    def read(self, data_path: DataPath | None) -> Source:
        raise NotImplementedError


def test_lookup_with_changes() -> None:
    task = get_task("digits", learning_rate=0.5)
    assert task.name == "digits"
    assert task.config.learning_rate == 0.5
    assert get_task("digits").config.learning_rate != 0.5


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'digits'"):
        get_task("digit")
    with pytest.raises(ConfigError, match="did you mean 'horizon'"):
        get_task("digits", horizn=3)


def test_no_docstring_is_missed_where_python_drops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "esper.lab.tasks.task.sys", SimpleNamespace(flags=SimpleNamespace(optimize=2))
    )
    defaults = TaskConfig(host="mlp", host_options=MlpConfig(), input_shape=(64,))
    register_task("bare")(type("Bare3", (Bare,), {"defaults": defaults}))
    TASKS.unregister("bare")


def test_an_incomplete_class_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a class attribute defaults"):
        register_task("bare")(Bare)
    defaults = TaskConfig(host="mlp", host_options=MlpConfig(), input_shape=(64,))
    with pytest.raises(UsageError, match="needs a docstring"):
        register_task("bare")(type("Bare2", (Bare,), {"defaults": defaults}))
    with pytest.raises(UsageError, match="derives from Task"):
        register_task("bare")(int)  # type: ignore[type-var]
    assert "bare" not in TASKS


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(UsageError, match="already registered"):
        register_task("digits")(TASKS.get("digits"))


def test_the_how_to_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = HOW_TO.read_text(encoding="utf-8").split("```python\n")[1:]
    code = "".join(block.split("```")[0] for block in blocks)
    (tmp_path / "how_to_add_a_task.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("how_to_add_a_task")
    assert get_task("rings").load().size("train") > 100
    assert len(get_family("few_digits").members("train")) == 4
    TASKS.unregister("rings")
    FAMILIES.unregister("few_digits")
