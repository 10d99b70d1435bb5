from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from esper.nissa import open_store
from esper.nissa.report import report_run
from esper.nissa.report.panels import panels_for
from esper.nissa.schema import DecisionRow
from esper.nissa.schema_runs import RoundRow, UpdateHeadRow, UpdateRow
from tests.nissa.report.test_growing import HOSTILE, Reader, read
from tests.nissa.report.training_runs import COMMAND, train_row, write_training


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_training(tmp_path_factory.mktemp("runs") / "digits", rounds=30)
    return report_run(folder).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reader(page: str) -> Reader:
    return read(page)


def test_every_section_of_a_training_run_is_there(page: str) -> None:
    found = re.findall(r"<h2>([^<]*)</h2>", page)
    assert found == [
        *("Learning", "Behaviour", "Operations", "Blueprints", "Alarms", "Reward", "Critic"),
        *("Policy", "Throughput", "Decisions", "Events", "How to repeat it", "Configuration"),
        "Recorded",
    ]


def test_the_story_is_told(reader: Reader) -> None:
    for text in (
        "A controller trained on digits",
        "In 30 rounds (1,920 episodes, 115,200 decisions)",
        "above their twins",
        "Written after round 30 of 30",
        "Validation gain over the twin",
        "Explained variance",
        COMMAND,
        "fresh heads: blueprint, tempo",
    ):
        assert text in reader.text


def test_ops_blueprints_heads_and_terms_are_tables(reader: Reader) -> None:
    for text in (
        *("set alpha target", "Mean reward at the end", "Germinated", "conv_light"),
        *("alpha curve", "norm 60.0 %, conv light 30.0 %", "rent", "Value loss", "Kurtosis"),
    ):
        assert text in reader.text


def test_episodes_fold_and_tell_probabilities(page: str, reader: Reader) -> None:
    assert reader.count("details") == 3
    assert page.count("<details open>") == 1
    for text in (
        "germinate (5.0 %)",
        "r0c1 (42.0 %), blueprint ",
        "(31.0 %)",
        "tempo 5 (40.0 %)",
        "wait, the only legal op",
        "wait (93.0 %)",
        "r0c1 (the only one)",
        "advance (2.0 %)",
    ):
        assert text in reader.text
    # Waits in a row are one line, and nothing is left out.
    assert re.search(r">\d+–60<", page)


def test_nothing_is_fetched_and_nothing_runs(page: str) -> None:
    assert not re.search(r"https?://|\bsrc=|\bhref=|url\(|@import|<script|<link", page)


def test_the_page_stays_small(page: str, tmp_path: Path) -> None:
    assert len(page) < 700_000
    many = report_run(write_training(tmp_path / "run", rounds=400))
    assert many.stat().st_size < 1_200_000


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    pages = []
    for name in ("one", "two"):
        folder = write_training(tmp_path / name / "digits", rounds=3)
        text = report_run(folder).read_text(encoding="utf-8")
        pages.append(re.sub(r"started</th><td>[^<]*", "", text))
    assert pages[0] == pages[1]


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    folder = write_training(tmp_path / "run", rounds=4, planned=40, is_finished=False)
    text = read(report_run(folder).read_text()).text
    assert "Written after round 4 of 40; the run stopped there." in text


def test_a_run_without_twins_or_recorded_rows_has_no_gain(tmp_path: Path) -> None:
    folder = write_training(tmp_path / "run", rounds=3, with_twin=False, recorded_rows=0)
    page = report_run(folder).read_text()
    assert "gain over" not in page
    assert "<h2>Decisions" not in page


def test_a_run_without_a_round_is_told(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", train_row(), sinks=()):
        pass
    reader = read(report_run(tmp_path / "run").read_text())
    assert "No round was finished" in reader.text
    assert COMMAND in reader.text
    assert reader.count("svg") == 0


def test_hostile_values_stay_text(tmp_path: Path) -> None:
    row = train_row(task=HOSTILE, recipe=HOSTILE, config={HOSTILE: HOSTILE}, command=HOSTILE)
    with open_store(tmp_path / "run", row, sinks=(), watch=False) as store:
        fates = {HOSTILE: {"germinated": 1, "fossilized": 1, "pruned": 0}}
        terms = {HOSTILE: {"mean": 1.0, "share": 1.0}}
        store.write(
            RoundRow(
                round=0, episodes=1, blueprint_fates=fates, reward_terms=terms, return_mean=1.0
            )
        )
        store.write(UpdateHeadRow(round=0, head=HOSTILE, choices=[3], entropy=0.5))
        store.write(UpdateRow(round=0, lstm_by_step=[{"step": HOSTILE}]))
        store.write(
            DecisionRow(
                step=1,
                op=HOSTILE,
                slot=HOSTILE,
                blueprint=HOSTILE,
                reason=HOSTILE,
                outcome=HOSTILE,
                alternatives={"op": [[HOSTILE, 0.1]]},
            )
        )
        store.event("settings_changed", HOSTILE)
    page = report_run(tmp_path / "run").read_text(encoding="utf-8")
    reader = read(page)
    assert reader.count("img") == 0
    assert "\x07" not in page
    assert "\u202e" not in page


def test_the_report_has_the_charts_of_the_live_page(page: str) -> None:
    found = re.findall(r'<svg class="chart"[^>]*><title>([^<]*)</title>', page)
    shown = {html.unescape(title) for title in found}
    assert {panel.title for panel in panels_for("train")} - shown <= NOT_WRITTEN


NOT_WRITTEN = {"Joint ratio after the update", "Memory"}
"""Charts of what the made-up run leaves out."""
