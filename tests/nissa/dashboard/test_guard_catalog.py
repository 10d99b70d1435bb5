from __future__ import annotations

import threading
from pathlib import Path

import pytest

from esper.nissa.dashboard import guard as catalogs
from esper.nissa.dashboard.guard import Catalog
from esper.nissa.listing import RunEntry, describe_run
from tests.nissa.conftest import Clock
from tests.nissa.dashboard.stores import growing


def test_a_run_is_found_by_its_place_below_the_folder(tmp_path: Path) -> None:
    growing(tmp_path / "runs" / "a" / "first", epochs=1)
    catalog = Catalog(tmp_path / "runs")
    assert list(catalog.entries()) == ["a/first"]
    assert catalog.folder("a/first") == tmp_path / "runs" / "a" / "first"


def test_a_proof_has_nothing_to_show(tmp_path: Path) -> None:
    growing(tmp_path / "run", epochs=1)
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "run.db.lock").touch()
    (tmp_path / "proof" / "config.yaml").write_text("command: prove\n")
    assert list(Catalog(tmp_path).entries()) == ["run"]


def test_a_folder_that_is_a_run_has_a_name(tmp_path: Path) -> None:
    growing(tmp_path / "one", epochs=1)
    assert Catalog(tmp_path / "one").folder("one") == tmp_path / "one"


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    growing(tmp_path / "secret", epochs=1)
    growing(tmp_path / "runs" / "first", epochs=1)
    catalog = Catalog(tmp_path / "runs")
    for name in (
        "../secret",
        "first/../../secret",
        str(tmp_path / "secret"),
        "",
        "first/",
        "./first",
    ):
        assert catalog.folder(name) is None


def test_a_run_that_begins_later_is_found(tmp_path: Path) -> None:
    growing(tmp_path / "first", epochs=1)
    catalog = Catalog(tmp_path, fresh_s=0.0)
    assert catalog.folder("second") is None
    growing(tmp_path / "second", epochs=1)
    assert catalog.folder("second") == tmp_path / "second"


def test_a_slow_store_keeps_nobody_else_waiting(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "good"):
        growing(tmp_path / name, epochs=1)
    described: list[str] = []
    finish = threading.Event()

    def describe(folder: Path) -> RunEntry:
        described.append(folder.name)
        if folder.name == "bad":
            assert finish.wait(30)
            clock.ahead += 2 * catalogs.SLOW_S
        return describe_run(folder)

    monkeypatch.setattr(catalogs, "describe_run", describe)
    monkeypatch.setattr(catalogs, "time", clock)
    catalog = Catalog(tmp_path, fresh_s=0.0)
    listing = threading.Thread(target=catalog.entries)
    listing.start()
    assert catalog.folder("good") == tmp_path / "good"
    assert listing.is_alive()
    finish.set()
    listing.join()
    # Once is enough, as long as the store is what it was.
    assert set(catalog.entries()) == {"bad", "good"}
    assert described.count("bad") == 1
    assert described.count("good") == 2
