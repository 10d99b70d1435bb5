from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from esper.nissa.dashboard.guard import Access, Guard, is_loopback


def client(access: Access, host: str = "localhost:8737") -> TestClient:
    return TestClient(
        Guard(PlainTextResponse("inside"), access),
        base_url=f"http://{host}",
        follow_redirects=False,
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_server_on_this_machine_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    assert Access.on(host).token is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_server_beyond_this_machine_has_a_token(host: str) -> None:
    assert len(Access.on(host).token or "") >= 32


@pytest.mark.parametrize("host", ["localhost", "localhost:8737", "127.0.0.1:1", "[::1]:8737"])
def test_the_own_names_are_taken(host: str) -> None:
    assert client(Access.on("127.0.0.1"), host).get("/").text == "inside"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8737", "192.168.1.5", "127.0.0.1.evil.example"]
)
def test_a_foreign_name_is_refused(host: str) -> None:
    answer = client(Access.on("127.0.0.1"), host).get("/")
    assert answer.status_code == 421
    assert "inside" not in answer.text


def test_a_request_without_a_name_is_refused() -> None:
    assert not Access.on("127.0.0.1").knows_host("")


def test_a_further_name_can_be_allowed() -> None:
    assert (
        client(Access.on("127.0.0.1", ["Proxy.example"]), "proxy.example").get("/").text == "inside"
    )


def test_without_the_token_nothing_is_told() -> None:
    access = Access.on("0.0.0.0")
    for path in ("/", "/?token=", "/?token=wrong", "/api/runs?token=é"):
        assert client(access, "192.168.1.5").get(path).status_code == 401


def test_the_token_goes_from_the_address_into_a_cookie() -> None:
    access = Access.on("0.0.0.0")
    browser = client(access, "192.168.1.5")
    answer = browser.get(f"/run?id=a%2Fb&token={access.token}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/run?id=a%2Fb"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert browser.get("/run").text == "inside"


@pytest.mark.parametrize("path", ["//evil.example/..", "///evil.example", "/\\evil.example"])
def test_the_token_leads_nowhere_else(path: str) -> None:
    access = Access.on("0.0.0.0")
    scope = {
        "type": "http",
        "path": path,
        "query_string": f"token={access.token}".encode(),
        "headers": [(b"host", b"192.168.1.5")],
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(Guard(PlainTextResponse("inside"), access)(scope, receive, send))
    location = dict(sent[0]["headers"])[b"location"]
    assert location.startswith(b"/evil.example")


def test_every_answer_says_what_a_browser_may_do() -> None:
    for host in ("localhost", "evil.example"):
        headers = client(Access.on("127.0.0.1"), host).get("/").headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
