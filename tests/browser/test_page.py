"""The live page in a real browser: what a user sees, and what must never happen."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from esper.nissa import RunRow, open_run, open_store
from esper.nissa.schema import EpochRow
from tests.browser.conftest import Server
from tests.nissa.dashboard.stores import (
    HOSTILE,
    SLOTS,
    deepening,
    grow_epoch,
    growing,
    hostile,
    score,
    train_round,
    training,
)

Opener = Callable[..., Page]


def holding(text: str) -> re.Pattern[str]:
    """A pattern for what has this text in it."""
    return re.compile(re.escape(text))


def test_a_live_run_updates_without_reload_and_survives_a_restart(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "live", RunRow(kind="grow", epochs=20, slots=SLOTS), sinks=())
    for step in range(1, 6):
        grow_epoch(store, step)
    store.flush()
    page = open_page("/run?id=live")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(page.locator("#top")).to_contain_text("5 of 20")
    page.evaluate("window.wasHere = true")

    grow_epoch(store, 6)
    store.flush()
    expect(page.locator("#top")).to_contain_text("6 of 20")
    expect(page.locator("[data-chart=score] .value").first).to_have_text(f"{score(6):.2f}")

    server.stop()
    expect(page.locator("#connection")).to_have_attribute("data-state", "lost")
    grow_epoch(store, 7)
    store.flush()
    server.start()
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(page.locator("#top")).to_contain_text("7 of 20")

    store.finish("finished", val_score=70.0)
    store.close()
    expect(page.locator("#top .badge")).to_have_text("finished")
    assert page.evaluate("window.wasHere") is True


def test_values_equal_the_stores(server: Server, open_page: Opener, tmp_path: Path) -> None:
    growing(tmp_path / "grown")
    page = open_page("/run?id=grown")
    page.locator("[data-chart=score] .numbers summary").click()
    rows = page.locator("[data-chart=score] .numbers tbody tr")
    expect(rows).to_have_count(20)
    with open_run(tmp_path / "grown") as run:
        recorded = run.rows("epochs", columns=["step", "val_score", "twin_score"])
    for place, found in enumerate(reversed(recorded)):
        cells = rows.nth(place).locator("td").all_inner_texts()
        assert int(cells[0]) == found["step"]
        assert float(cells[1]) == pytest.approx(found["val_score"], abs=0.006)
        assert float(cells[2]) == pytest.approx(found["twin_score"], abs=0.006)


def test_a_seeds_life_opens_by_mouse_and_by_keys(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    growing(tmp_path / "grown")
    page = open_page("/run?id=grown")
    seed = page.locator(".lanes .seed")
    expect(seed).to_have_count(1)
    expect(seed).to_have_attribute("aria-label", holding("Slot r0c0: conv_light"))
    seed.click()
    dialog = page.locator("dialog#seed")
    expect(dialog).to_contain_text("conv_light in r0c0")
    expect(dialog).to_contain_text("+10.00 ± 0.10")
    expect(dialog.locator(".chart")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    seed.focus()
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()


def test_a_deepened_run_has_a_lane_for_each_stack(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    deepening(tmp_path / "deep")
    page = open_page("/run?id=deep")
    lanes = page.locator("svg.lanes")
    expect(lanes).to_have_attribute("aria-label", holding("layers: 1 → 2 → 4 of 4 blocks awake"))
    expect(lanes.locator("rect.fossilized")).to_have_count(1 + 2 + 4)
    expect(page.locator("#top")).to_contain_text("The rule schedule deepened a network (sources)")
    expect(page.locator("#top")).to_contain_text("70 %")
    expect(page.locator("#garden")).to_contain_text("Blocks that sleep cost nothing")
    expect(page.locator("#decisions .body")).to_contain_text("1 to 2 blocks")


def test_zoom_is_shared_and_survives_new_rows(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "live", RunRow(kind="grow", epochs=40, slots=SLOTS), sinks=())
    for step in range(1, 21):
        grow_epoch(store, step)
    store.flush()
    page = open_page("/run?id=live")
    plot = page.locator("[data-chart=score] .u-over")
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60, steps=5)
    page.mouse.up()
    unzoom = page.locator("#unzoom")
    expect(unzoom).to_be_enabled()
    last = page.locator(".lanes text.number", has_text=re.compile("^20$"))
    expect(last).to_have_count(0)
    axis = page.locator(".lanes text.number")
    before = axis.all_text_contents()
    grow_epoch(store, 21)
    store.flush()
    expect(page.locator("#top")).to_contain_text("21 of 40")
    expect(unzoom).to_be_enabled()
    assert axis.all_text_contents() == before
    unzoom.click()
    expect(unzoom).to_be_disabled()
    expect(last).to_have_count(1)
    store.close()


def test_a_long_run_has_finer_points_where_it_is_looked_at(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "long", RunRow(kind="grow", epochs=4500, slots=SLOTS), sinks=())
    store.write(*(EpochRow(step=step, val_score=float(step % 7)) for step in range(1, 4501)))
    store.flush()
    page = open_page("/run?id=long")
    page.locator("[data-chart=score] summary").click()
    rows = page.locator("[data-chart=score] .numbers tbody tr")
    # Of three epochs each the least value stands at the first, the greatest at the last.
    expect(rows.nth(1)).to_have_text("4498" + "4")
    plot = page.locator("[data-chart=score] .plot")
    plot.focus()
    page.keyboard.press("End")
    with page.expect_response(holding("/api/series")) as asked:
        for _ in range(4):
            page.keyboard.press("+")
    assert {table["every"] for table in asked.value.json()["tables"].values()} == {1}
    expect(rows.nth(1)).to_have_text("4499" + "5")
    # What comes while one looks is a point of its own as well.
    store.write(EpochRow(step=4501, val_score=3.5))
    store.flush()
    expect(rows.first).to_have_text("4501" + "3.5")
    page.keyboard.press("Escape")
    expect(rows.nth(2)).to_have_text("4498" + "4")
    expect(page.locator("#unzoom")).to_be_disabled()
    store.close()


def test_a_chart_is_read_with_keys(server: Server, open_page: Opener, tmp_path: Path) -> None:
    growing(tmp_path / "grown")
    page = open_page("/run?id=grown")
    plot = page.locator("[data-chart=score] .plot")
    expect(plot).to_have_attribute("aria-label", holding("grown: 50 at epoch 1"))
    plot.focus()
    page.keyboard.press("Home")
    said = page.locator("[data-chart=score] [aria-live]")
    expect(said).to_contain_text("epoch 1: grown 50")
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text(f"epoch 2: grown {score(2):.2f}")
    page.keyboard.press("+")
    expect(page.locator("#unzoom")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#unzoom")).to_be_disabled()


def test_a_training_run_shows_every_panel_and_follows_rounds(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    store = open_store(
        tmp_path / "learns", RunRow(kind="train", rounds=10, rows=2, slots=SLOTS), sinks=()
    )
    for number in range(3):
        train_round(store, number)
    store.flush()
    page = open_page("/run?id=learns")
    for group in ("Learning", "Behaviour", "Policy", "Critic", "Reward", "Throughput"):
        expect(page.locator(f"[data-group={group}]")).to_be_visible()
    expect(page.locator("[data-chart=entropy] .legend li")).to_have_count(2)
    expect(page.locator("[data-chart=foreseen]")).to_contain_text("3 decisions of round 3")
    expect(page.locator("#worth")).to_contain_text("+2.00")
    decision = page.locator("#decisions .decision").first
    decision.locator("summary").click()
    expect(decision).to_contain_text("75 %")
    expect(decision).to_contain_text("+1.500")
    train_round(store, 3)
    store.flush()
    expect(page.locator("#episode-round")).to_have_value("4")
    store.close()


def test_runs_are_laid_over_each_other_and_one_is_pinned(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    growing(tmp_path / "a" / "first")
    growing(tmp_path / "second", epochs=10)
    page = open_page("/")
    page.get_by_label("Choose a/first").check()
    page.get_by_label("Choose second").check()
    page.locator("#together").click()
    names = page.locator("[data-chart=score] .legend li")
    expect(names).to_have_count(4)
    expect(page.locator(".chips .pinned")).to_contain_text("first")
    page.get_by_label("Pin second").click()
    expect(page.locator(".chips .pinned")).to_contain_text("second")
    page.get_by_label("Leave out a/first").click()
    expect(names).to_have_count(2)


def test_a_run_laid_over_that_is_gone_leaves_the_rest(
    server: Server, browser: Browser, tmp_path: Path
) -> None:
    growing(tmp_path / "grown")
    page = browser.new_page()
    page.goto(f"{server.url}/run?id=grown&with=gone")
    expect(page.locator("#trouble")).to_contain_text("gone: There is no such run.")
    expect(page.locator("[data-chart=score] .legend li")).to_have_count(2)
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    page.close()


def test_the_list_names_broken_runs_filters_and_sees_new_ones(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    page = open_page("/")
    expect(page.locator("#runs")).to_contain_text("There are no runs here yet")
    growing(tmp_path / "grown")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_bytes(b"nothing" * 100)
    expect(page.locator("#runs tbody tr")).to_have_count(2)
    expect(page.locator("#runs")).to_contain_text("the file is no SQLite database")
    page.locator("#filter").fill("fin.shed")
    expect(page.locator("#runs tbody tr")).to_have_count(1)
    page.locator("#filter").fill("zzz")
    expect(page.locator("#runs")).to_contain_text("No run matches")


def test_hostile_texts_are_shown_as_text(server: Server, open_page: Opener, tmp_path: Path) -> None:
    hostile(tmp_path / "<img src=x onerror=alert(3)>")
    page = open_page("/")
    page.on("dialog", lambda dialog: pytest.fail("a script ran"))
    page.locator("#runs a").first.click()
    expect(page.locator("#top")).to_contain_text("<script>alert(1)</script>")
    expect(page.locator("#alarms")).to_contain_text("<img src=x")
    page.locator(".lanes .seed .hit").first.click()
    expect(page.locator("dialog#seed")).to_contain_text("<script>")
    assert page.locator("main img, main script, dialog img, dialog script").count() == 0
    assert HOSTILE[-1] in page.locator("#top").inner_text()


def test_a_run_that_is_not_there_is_said(server: Server, browser: Browser) -> None:
    page = browser.new_page()
    page.goto(f"{server.url}/run?id=nothing")
    expect(page.locator("#top")).to_contain_text("There is no such run")
    expect(page.locator("#garden")).not_to_be_visible()
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(
    server: Server, open_page: Opener, tmp_path: Path, width: int, theme: str
) -> None:
    growing(tmp_path / "grown")
    training(tmp_path / "trained")
    for path in ("/", "/run?id=grown", "/run?id=trained"):
        page = open_page(path, width=width, theme=theme)
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(241, 243, 246)" if theme == "light" else "rgb(12, 15, 18)")


def test_theme_and_palette_are_chosen_and_remembered(
    server: Server, open_page: Opener, tmp_path: Path
) -> None:
    growing(tmp_path / "grown")
    page = open_page("/run?id=grown")
    page.locator("#theme").select_option("dark")
    page.locator("#palette").select_option("tol")
    page.reload()
    root = page.locator("html")
    expect(root).to_have_attribute("data-theme", "dark")
    expect(root).to_have_attribute("data-palette", "tol")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(12, 15, 18)"
