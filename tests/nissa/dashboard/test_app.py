"""The pages and their data over HTTP, without a browser; `make test-browser` has one."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from esper.nissa.dashboard.app import make_app
from esper.nissa.dashboard.guard import Access
from tests.harness.bad_stores import endless_table
from tests.nissa.dashboard.stores import HOSTILE, growing, hostile, score, training


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    growing(root / "grown")
    training(root / "trained")
    hostile(root / "hostile")
    (root / "broken").mkdir()
    (root / "broken" / "run.db").write_bytes(b"no database" * 100)
    return root


@pytest.fixture(scope="module")
def client(runs: Path) -> TestClient:
    return make_client(runs)


def make_client(root: Path, **options: Any) -> TestClient:
    app = make_app(root, Access.on("127.0.0.1"), **options)
    return TestClient(app, base_url="http://127.0.0.1:8737")


def test_every_run_is_listed_and_a_broken_one_says_why(client: TestClient) -> None:
    found = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert set(found) == {"grown", "trained", "hostile", "broken"}
    assert found["broken"]["state"] == "damaged"
    assert "no SQLite database" in found["broken"]["note"]
    assert found["grown"]["val_gain"] == 2.0


def test_a_broken_run_is_an_answer_and_not_a_crash(client: TestClient) -> None:
    for path in ("run", "series", "garden", "decisions", "foreseen", "seed"):
        answer = client.get(f"/api/{path}", params={"id": "broken"})
        assert answer.status_code == 422
        assert answer.json()["error"]


def test_values_equal_the_stores(client: TestClient) -> None:
    tables = client.get("/api/series", params={"id": "grown"}).json()["tables"]
    at = tables["epochs"]["columns"].index("val_score")
    assert [row[at] for row in tables["epochs"]["rows"]] == [score(step) for step in range(1, 21)]


def test_a_part_of_the_axis_can_be_asked_for(client: TestClient) -> None:
    part = {"id": "grown", "from": 3, "to": 5}
    rows = client.get("/api/series", params=part).json()["tables"]["epochs"]["rows"]
    assert [row[0] for row in rows] == [3, 4, 5]


@pytest.mark.parametrize(
    "wrong", [{"from": "3"}, {"to": "3"}, {"from": "5", "to": "3"}, {"from": "-1", "to": "3"}]
)
def test_what_is_no_part_of_the_axis_is_refused(client: TestClient, wrong: dict[str, str]) -> None:
    assert client.get("/api/series", params={"id": "grown", **wrong}).status_code == 400


def test_every_kind_of_question_is_answered(client: TestClient) -> None:
    for name in ("grown", "trained", "hostile"):
        for path in ("run", "series", "garden", "decisions", "foreseen"):
            assert client.get(f"/api/{path}", params={"id": name}).status_code == 200
    assert client.get("/api/seed", params={"id": "grown"}).json()["seed"]["slot"] == "r0c0"
    assert client.get("/api/seed", params={"id": "grown", "ordinal": 9}).status_code == 404


def test_a_stream_begins_where_the_page_stands(client: TestClient, runs: Path) -> None:
    position = client.get("/api/series", params={"id": "grown"}).json()["position"]
    client = make_client(runs, is_over=lambda: True)
    answer = client.get("/api/stream", params={"id": "grown", "after": position})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert client.get("/api/stream", params={"id": "nothing"}).status_code == 404


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_store_behind_a_link_is_not_shown(tmp_path: Path) -> None:
    growing(tmp_path / "secret", epochs=1, task="secret")
    (tmp_path / "runs" / "linked").mkdir(parents=True)
    (tmp_path / "runs" / "linked" / "run.db").symlink_to(tmp_path / "secret" / "run.db")
    client = make_client(tmp_path / "runs")
    [listed] = client.get("/api/runs").json()["runs"]
    assert listed["state"] == "damaged"
    for path in ("run", "series", "garden", "decisions", "foreseen", "seed"):
        answer = client.get(f"/api/{path}", params={"id": "linked"})
        assert answer.status_code == 422
        assert "is a link" in answer.json()["error"]


def test_a_question_ends_with_the_server(tmp_path: Path) -> None:
    training(tmp_path / "bad")
    endless_table(tmp_path / "bad" / "run.db", "updates")
    began = time.monotonic()
    client = make_client(tmp_path, is_over=lambda: time.monotonic() > began + 0.3)
    answer = client.get("/api/series", params={"id": "bad"})
    assert "took too long" in answer.json()["error"]
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "path",
    [
        "/api/run?id=../secret",
        "/api/run?id=%2e%2e%2f",
        "/api/run?id=/etc",
        "/api/run?id=grown/../../x",
        "/api/run",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/run.db",
        "/grown/run.db",
    ],
)
def test_no_path_leads_out(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text
    assert "import" not in answer.text


@pytest.mark.parametrize("value", ["-1", "1.5", "x", "1 OR 1=1", "9" * 40, "\u0661"])
def test_a_number_is_a_number(client: TestClient, value: str) -> None:
    answer = client.get("/api/garden", params={"id": "grown", "round": value})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"from": "20"},
        {"to": "x"},
        {"to": "nan"},
        {"to": "1e99"},
        {"left": "-1"},
        {"right": "700"},
        {"right": "9e9", "width": "9e9"},
    ],
)
def test_lanes_are_drawn_for_a_sensible_frame_alone(
    client: TestClient, wrong: dict[str, str]
) -> None:
    frame = {"id": "grown", "from": "1", "to": "20", "left": "58", "right": "586", "width": "600"}
    answer = client.get("/api/lanes", params=frame)
    assert answer.headers["content-type"] == "image/svg+xml"
    assert answer.text.startswith("<svg ")
    assert client.get("/api/lanes", params={**frame, **wrong}).status_code == 400


def test_a_text_cannot_become_a_question(client: TestClient) -> None:
    answer = client.get("/api/decisions", params={"id": "grown", "op": "x' OR 1=1 --"})
    assert answer.json() == {"decisions": []}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(client: TestClient, runs: Path, method: str) -> None:
    before = (runs / "grown" / "run.db").read_bytes()
    for path in ("/", "/api/runs", "/static/page.css"):
        assert client.request(method, path).status_code == 405
    client.get("/api/series", params={"id": "grown"})
    assert (runs / "grown" / "run.db").read_bytes() == before


def test_hostile_text_is_inert_in_pages_and_plain_in_data(client: TestClient) -> None:
    page = client.get("/run", params={"id": HOSTILE})
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "<img" not in page.text
    assert "&lt;script&gt;" in page.text
    data = client.get("/api/run", params={"id": "hostile"})
    assert data.headers["content-type"] == "application/json"
    assert "\u202e" not in data.json()["run"]["task"]


def test_nothing_comes_from_elsewhere(client: TestClient) -> None:
    names = set()
    for path in ("/", "/run?id=grown"):
        text = client.get(path).text
        assert "://" not in text
        assert not re.search(r"<(script|style)[^>]*>[^<]", text)
        names |= set(re.findall(r'(?:src|href)="(/static/[^"]+)"', text))
    assert "/static/run.js" in names
    queue = sorted(names)
    for name in queue:
        answer = client.get(name)
        assert answer.status_code == 200, name
        for module in re.findall(r'from "\./([a-z]+\.js)"', answer.text):
            if f"/static/{module}" not in queue:
                queue.append(f"/static/{module}")
    licence = client.get("/static/vendor/uPlot.LICENSE")
    assert "MIT License" in licence.text


def test_an_unknown_page_is_an_answer(client: TestClient) -> None:
    assert client.get("/nothing").json()["error"]
