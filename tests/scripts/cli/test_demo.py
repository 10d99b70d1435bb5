from __future__ import annotations

import io
import json
import signal
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from esper.nissa.report.markup import text_width
from esper.nissa.report.page import FONT, NAMESPACE, WIDTH
from esper.scripts.cli import demo
from esper.scripts.cli.demo import ARMS, BUDGET, Outcome, Point
from tests.scripts.cli.terminal import Said, environment, esper, start

SHORT = ("demo", "--compute", 0.002, "--json")


def run(*arguments: object, **changes: str) -> Said:
    process = start(*arguments, env=environment(**changes))
    out, err = process.communicate(timeout=240)
    return Said(process.returncode, out, err)


def outcomes(*losses: float | None) -> dict[str, Outcome]:
    found = {}
    for arm, loss in zip(ARMS, losses, strict=True):
        points = [Point(0.5, 1e9, arm.start, 3.0), Point(1.0, 2e9, arm.blocks, loss or 2.0)]
        text = "def f(x):\n    return x"
        found[arm.name] = Outcome(arm.name, points, 100, 10, 1.0, loss, text)
    return found


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object], str]:
    """Return the folder of a very short demo, its document, and what it said on the way."""
    out = tmp_path_factory.mktemp("demo") / "run"
    said = run(*SHORT, "--out", out)
    assert said.code == 0, said.err
    return out, json.loads(said.out), said.err


def test_two_static_networks_and_a_grown_one_train_with_equal_compute(
    short: tuple[Path, dict[str, object], str],
) -> None:
    _, document, progress = short
    networks = document["networks"]
    assert [one["name"] for one in networks] == [arm.name for arm in ARMS]
    blocks = [[point["blocks"] for point in one["curve"]] for one in networks]
    assert [sorted(set(each)) for each in blocks] == [[2], [4], [1, 2, 4]]
    assert blocks[2] == sorted(blocks[2])
    spent = [one["curve"][-1]["flops"] for one in networks]
    # Steps do not come out even; the difference is never in favour of the grown network.
    assert spent[2] <= 0.002 * BUDGET <= min(spent[:2])
    small, static, grown = (one["parameters"] for one in networks)
    assert small < static == grown
    for one in networks:
        assert one["test_loss"] > 0
        assert one["text"].startswith("def ")
        assert all(before["flops"] < after["flops"] for before, after in pairwise(one["curve"]))
    assert "grown 1→2→4 blocks: 4 blocks" in progress


def test_text_of_a_network_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    made = outcomes(2.0, 2.1, 1.9)
    name = next(iter(made))
    text = f"def one()\n{' ' * 90}pass\n   \n{'x' * 90}\n    two   \n"
    made[name] = replace(made[name], text=text)
    demo.print_outcomes(made, 0, is_interrupted=False)
    said = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(said) if "writes, after 'def'" in line)
    assert [line for line in said[at + 1 : at + 5]] == [
        "    def one()",
        "     … pass",
        "    " + "x" * 55 + "…",
        "        two",
    ]


def test_picture_and_report_are_written(short: tuple[Path, dict[str, object], str]) -> None:
    out, document, _ = short
    assert document["picture"] == str(out / "depth.svg")
    assert document["report"] == str(out / "report.html")
    drawn = "".join(ElementTree.parse(out / "depth.svg").getroot().itertext())
    assert all(arm.name in drawn for arm in ARMS)
    for text in ElementTree.parse(out / "depth.svg").getroot().iter(f"{{{NAMESPACE}}}text"):
        if text.get("text-anchor") is None:
            width = text_width(text.text or "", FONT, is_strong=True)
            assert float(text.get("x", "nan")) + width <= WIDTH, text.text
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "1 → 2 → 4 of 4" in page


@pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C reaches a whole console")
def test_ctrl_c_tests_what_is_there_and_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two networks, each in a process of its own, as three are stopped alike."""
    show = demo.DemoView.show
    seen: set[str] = set()

    def interrupt(view: demo.DemoView, name: str, point: Point) -> None:
        show(view, name, point)
        if name not in seen:
            seen.add(name)
            if len(seen) == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo, "ARMS", ARMS[1:])
    monkeypatch.setattr(demo.DemoView, "show", interrupt)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    said = esper(capsys, "demo", "--compute", 0.3, "--out", "run")
    assert said.code == 130, said.err
    assert "Stopped after " in said.out
    assert all(arm.name in said.out for arm in ARMS[1:])
    assert said.out.count("writes, after 'def'") == 2
    for name, path in (("picture", "run/depth.svg"), ("report", "run/report.html")):
        assert f"{name}: {path}\n" in said.out
        assert (tmp_path / path).is_file()


def test_without_a_place_to_write_to_the_result_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    # The one that grows writes the report.
    monkeypatch.setattr(demo, "ARMS", ARMS[-1:])
    said = esper(capsys, *SHORT, "--out", tmp_path / "file" / "run")
    document = json.loads(said.out)
    assert said.code == 0
    assert all(one["test_loss"] > 0 for one in document["networks"])
    assert (document["picture"], document["report"]) == ("", "")
    assert len(document["problems"]) == 2
    assert said.err.count(str(tmp_path / "file")) == 2


@pytest.mark.parametrize("columns", ["40", "200"])
def test_the_table_fits_any_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    demo.print_outcomes(outcomes(2.0, 2.1, 1.9), 3, is_interrupted=False)
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith(("│", "┃", "┏", "└"))]
    assert table
    assert all(len(line) <= int(columns) for line in table)
    assert "    return x" in out


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((2.0, 2.2, 1.9), "5.0 % lower than the best static one (static, 2 blocks)"),
        ((2.2, 2.0, 2.1), "5.0 % higher than the best static one (static, 4 blocks)"),
        ((None, 2.0, 1.9), "5.0 % lower than the best static one (static, 4 blocks)"),
        ((2.0, 2.0, None), "nothing to compare"),
    ],
)
def test_the_verdict_says_what_was_found(losses: tuple[float | None, ...], words: str) -> None:
    assert words in demo.verdict(outcomes(*losses), is_interrupted=False)


def test_the_verdict_of_a_very_short_run_says_that_compute_differs() -> None:
    made = outcomes(2.0, 2.2, 1.9)
    assert demo.verdict(made, is_interrupted=False).startswith("For the same compute")
    *_, grown = made.values()
    grown.curve[-1] = replace(grown.curve[-1], flops=1.5e9)
    assert demo.verdict(made, is_interrupted=False).startswith("For 75% of the compute")


def test_a_process_that_dies_costs_only_its_own_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}

    def on_point(name: str, point: Point) -> None:
        seen[name] = seen.get(name, 0) + 1

    arms = [ARMS[0], ARMS[0].__class__("too deep", start=9, blocks=4, learning_rate=0.1)]
    found = demo.train_side_by_side(arms, 0, 0.002, tmp_path / "r.html", on_point, [])
    assert found[ARMS[0].name].test_loss is not None
    assert found["too deep"].test_loss is None
    assert "9" in found["too deep"].problem
    assert set(seen) == {ARMS[0].name}


@pytest.mark.parametrize(
    ("option", "value"), [("--compute", 0), ("--compute", "nan"), ("--seed", -1), ("--seed", 2**63)]
)
def test_what_cannot_be_is_refused_before_anything_starts(
    option: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = esper(capsys, "demo", option, value, "--out", tmp_path / "demo")
    assert option in said.complaint()
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("width", [40, 120])
def test_a_terminal_shows_a_row_for_each_network(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width)
    with demo.DemoView(console, ARMS) as view:
        view.show(ARMS[2].name, Point(0.2, 1e9, 1, 2.5))
        view.show(ARMS[2].name, Point(0.4, 2e9, 2, 2.25))
    shown = screen.getvalue()
    for text in (*(arm.name for arm in ARMS), "██░░", "40%", "2.250"):
        assert text in shown
    assert ("so far" in shown) == (width > 100)


def test_without_a_terminal_there_are_plain_lines_and_none_is_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with demo.DemoView(Console(stderr=True, width=40), ARMS) as view:
        for share, blocks in ((0.2, 1), (0.4, 2), (0.6, 4)):
            view.show(ARMS[2].name, Point(share, 1e9, blocks, 2.5))
        for arm in ARMS:
            view.show(arm.name, Point(1.0, 2e9, arm.blocks, 2.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        f"{ARMS[2].name}: {n} blocks, {at} of its steps" for n, at in ((2, "40%"), (4, "60%"))
    ]
    assert lines[-1].count("100% loss 2.000") == 3
