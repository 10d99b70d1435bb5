"""Files that other programs read: workflows, hooks, issue templates, the citation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import esper

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def steps(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_runs_targets_that_exist_on_every_python_that_we_support() -> None:
    workflow = read(".github/workflows/test.yml")
    jobs = workflow["jobs"]
    # YAML takes the bare word `on` for true.
    assert {"push", "pull_request"} <= set(workflow[True])
    assert steps(jobs["test"]) == ["make PYTHON=python test"]
    assert steps(jobs["portable"]) == ["make PYTHON=python test-portable"]
    made = [line.split()[-1] for job in jobs.values() for line in steps(job) if "make " in line]
    # All code on pages runs somewhere: in trainers and environments only with their libraries.
    wanted = {"test", "test-portable", "docs", "test-browser", "test-integrations"}
    assert set(made) == wanted <= TARGETS
    named = [one.rpartition(" ")[2] for one in PROJECT["project"]["classifiers"]]
    supported = [version for version in named if version.startswith("3.")]
    for name in ("test", "package"):
        assert jobs[name]["strategy"]["matrix"]["python"] == supported


def test_the_workflow_calls_commands_of_ours_as_they_are() -> None:
    from esper.scripts.cli.main import build_parser

    install = steps(read(".github/workflows/test.yml")["jobs"]["package"])[-1]
    calls = re.findall(r'clean/bin/esper" (.*?)\)', install)
    assert len(calls) == 2
    for call in calls:
        words = call.split()
        assert callable(build_parser(words).parse_args(words).run)


def test_hooks_run_what_make_check_runs() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    hooks = {hook["id"]: hook for hook in local["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "mypy"}
    for hook in hooks.values():
        tool = hook["entry"].split()[0].rpartition("/")[2]
        assert f"$(BIN)/{tool}" in MAKEFILE
        assert hook["entry"].startswith(".venv/bin/")
    checked = re.compile(hooks["mypy"]["files"])
    for folder in PROJECT["tool"]["mypy"]["files"]:
        assert checked.match(f"{folder}/some/module.py")


@pytest.mark.parametrize("name", ["bug.yml", "idea.yml"])
def test_issue_forms_have_what_a_form_needs(name: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}")
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(part["attributes"]["label"] for part in form["body"])


def test_the_citation_names_the_version_that_is_released() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == esper.__version__
    assert citation["authors"]
    assert citation["license"] == PROJECT["project"]["license"]
