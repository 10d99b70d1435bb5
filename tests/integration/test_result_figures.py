"""Figures of README and site that come from raw results in research/ are what these say.

Each test computes a table anew and finds its numbers on the pages. Depth and the first claim have
tests of their own (test_depth_figures.py, test_claim.py); what trains again is in test_figures.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import pytest

from benchmarks import adapters, checkpoints, demo, peers, strangers
from benchmarks.depth.cells import CELLS
from benchmarks.depth.command import read_records
from benchmarks.depth.picture import draw_front
from benchmarks.depth.verdict import geometric_mean, judge
from esper.scripts.cli.demo import ARMS
from tests.pages import section

ROOT = Path(__file__).parents[2]
RESEARCH = ROOT / "research"
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")

Printed = Callable[..., list[list[str]]]


def cells(line: str) -> list[str]:
    """Return the cells of a row, with the minus of programs."""
    return [cell.strip(" *") for cell in line.replace("−", "-").strip("|").split("|")]


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of all tables in a text, by their first cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {cells(line)[0]: cells(line) for line in lines}


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Return a function that runs a benchmark and returns the rows of what it prints."""

    def run(main: Callable[[list[str]], int], *arguments: object) -> list[list[str]]:
        assert main([str(each) for each in arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [cells(line) for line in lines if line.startswith("| ")]

    return run


def of_readme(beginning: str) -> str:
    """Return the row of the table of README that begins so, with the minus of programs."""
    (found,) = [line for line in README.splitlines() if line.startswith(f"| {beginning}")]
    return found.replace("−", "-")


def test_the_demo() -> None:
    lines = (RESEARCH / "demo" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if (record := json.loads(line))["rate"] == 0.004]
    text = section(RESULTS, "The demo")
    page, _, _ = (RESEARCH / "demo" / "README.md").read_text("utf-8").partition("Two other rates")
    networks = {record["network"] for record in records}
    assert len(networks) == 3
    for network in networks:
        for name in ("avx2", "avx512"):
            losses = [
                record["test_loss"]
                for record in records
                if (record["network"], record["set"]) == (network, name)
            ]
            assert len(losses) == 5
            assert f"{median(losses):.3f}" in text
            assert rows(page)[network][1].startswith(f"{median(losses):.3f}")
    gains = demo.gains_of(records)
    assert f"{median(gains):.1f} % below the best static network" in text
    assert min(gains) > 0


def test_the_summary_of_the_demo_prints_the_recorded_results(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page, _, _ = (RESEARCH / "demo" / "README.md").read_text("utf-8").partition("Two other rates")
    header, *told = printed(demo.main, "--summary")
    found = [dict(zip(header, row, strict=True)) for row in told]
    ours = [row for row in found if row["rate"] == "0.004"]
    assert len(ours) == 6
    for row in ours:
        stated = re.findall(r"\d\.\d+", rows(page)[row["network"]][1])
        exact = [row["median"], *row["test loss"].split(" to ")]
        assert [float(each) for each in stated] == pytest.approx(
            [float(each) for each in exact], abs=0.0006
        )


def test_finished_networks(printed: Printed) -> None:
    told = printed(
        checkpoints.main, "--summary", "--out", RESEARCH / "checkpoints" / "results.jsonl"
    )
    over = {(row[0], row[1]): (row[2], row[6]) for row in told}
    page = rows(section(RESULTS, "Finished networks"))
    readme = of_readme("a finished network")
    for name, words in (("gpt", "GPT, deepened"), ("cnn", "CNN, with seeds")):
        seeds, _ = over[name, "scratch"]
        (row,) = [cell for first, cell in page.items() if first.startswith(words)]
        assert f"({seeds} random seeds)" in row[0]
        for arm, said in zip(("scratch", "continued"), row[1:], strict=True):
            mean, error = map(float, over[name, arm][1].split(" ± "))
            assert said == f"{mean:+.1f} ± {error:.1f}"
        mean, error = map(float, over[name, "scratch"][1].split(" ± "))
        told_as = f"{mean:+.1f} points" if mean > 2 * error else "CNN: no clear gain"
        assert told_as in readme


def test_adapters(printed: Printed) -> None:
    told = printed(adapters.main, "summary", RESEARCH / "adapters" / "results.jsonl")
    page = rows(section(RESULTS, "Adapters"))
    lora = [row[4] for row in told if row[0] == "peft"]
    ours = [row for row in told if row[0] == "esper" and len(row) == 8]
    assert len(lora) == len(ours) == 5
    told_by_score = {row[4]: row[6] for row in ours}
    stated = {row[3]: row for row in page.values() if row[3] in told_by_score}
    assert set(stated) == set(told_by_score)
    for score, row in stated.items():
        assert row[2] in lora
        assert row[4] == told_by_score[score]
    clear = [row for row in stated.values() if "[+" in row[4]]
    assert [row[0].split(",")[0] for row in clear] == ["residual CNN"]
    assert f"CNN: {float(clear[0][4].split()[0]):+.1f} points" in of_readme("a frozen model")


NAMES = {
    "ViT": "vit",
    "ViT, ten times as large": "vit-large",
    "GRU language model": "gru",
    "GRU, ten times as large": "gru-large",
    "GPT-2": "gpt2",
    "Conv1d": "conv1d",
    "graph network": "graph",
    "MLP for regression (loss)": "mlp",
    "ResNet with BatchNorm": "resnet",
}


def test_networks_that_no_controller_has_seen(printed: Printed) -> None:
    header, *told = printed(strangers.main, "summary", RESEARCH / "strangers" / "results.jsonl")
    found = {row[0]: dict(zip(header, row, strict=True)) for row in told}
    page = rows(section(RESULTS, "Networks that no controller has seen"))
    assert set(NAMES) < set(page)
    for name, case in NAMES.items():
        _, twin, best, default, static = page[name]
        own = found[case]
        assert abs(float(own["twin"])) == pytest.approx(float(twin), abs=0.006)
        if best.startswith("+"):
            schedules = [own[arm] for arm in strangers.SCHEDULES]
            top = max(schedules, key=lambda cell: float(cell.split(" ± ")[0]))
            assert agree(best, top)
            assert "of the best schedule" in own["default"]
        else:
            assert own["default"].startswith("median +")
        if default.startswith("+"):
            assert agree(default, own["tamiyo"])
        if static[0] in "+-":
            assert agree(static, own["static of its size"].removesuffix(": better"))
    shares = [
        int(cell["default"].split("%")[0]) for cell in found.values() if "%" in cell["default"]
    ]
    assert f"{min(shares)} to {max(shares)} % of the best one's gain" in RESULTS


def agree(stated: str, exact: str) -> bool:
    """Return whether a rounded gain with its error is another one, rounded."""
    return all(
        abs(float(a) - float(b)) <= 0.5001 * 10 ** -len(a.partition(".")[2])
        for a, b in zip(stated.split(" ± "), exact.split(" ± "), strict=True)
    )


def test_the_table_of_peers_is_what_its_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert peers.main(["--summary", "--out", str(RESEARCH / "peers" / "results.jsonl")]) == 0
    page = (RESEARCH / "peers" / "README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in page


def test_the_picture_of_the_front_page() -> None:
    records = read_records(RESEARCH / "depth" / "results.jsonl")
    picture = (ROOT / "docs" / "depth.svg").read_text(encoding="utf-8")
    assert draw_front(records, "python-short", [3, 6, 12]).strip() == picture.strip()
    verdict = judge(records, CELLS["python-short"])
    assert verdict is not None
    assert verdict.grown is not None
    scores = f"{verdict.static.score:.3f}, one grown to 6 blocks {verdict.grown.score:.3f}"
    for page in (README, INDEX):
        assert f"(6 blocks) has a loss of {scores}" in page


def test_six_of_eight_networks_gain_at_the_best_static_depth() -> None:
    records = read_records(RESEARCH / "depth" / "results.jsonl")
    verdicts = [verdict for cell in CELLS.values() if (verdict := judge(records, cell))]
    gains = [
        100 * (1 - verdict.grown.score / verdict.static.score)
        for verdict in verdicts
        if verdict.grown is not None
    ]
    assert len(gains) == 8
    assert sum(round(gain, 1) > 0 for gain in gains) == 6
    assert round(max(gains)) == 3
    assert "up to 3 % better at equal compute in six of eight" in README
    assert "up to 3 % better at equal compute in six of the eight" in INDEX
    mean, low, high = (
        round(100 * (1 - 1 / ratio))
        for ratio in geometric_mean([verdict.ratio for verdict in verdicts])
    )
    assert f"on average {mean} % less compute (95 % interval {low} to {high})" in README
    (worse,) = [-gain for gain in gains if gain < -0.05]
    assert f"makes {worse:.0f} % *more* errors" in README


def test_the_tutorial_says_what_equal_steps_give() -> None:
    records = read_records(RESEARCH / "depth" / "results.jsonl")
    differences, saved = [], []
    for name in ("python-short", "python-long", "prose", "ladder"):
        verdict = judge(records, CELLS[name])
        assert verdict is not None
        grown = verdict.default.records
        (steps,) = {one["steps"] for one in grown}
        static = [
            one
            for one in records
            if one["cell"] == name
            and one["plan"] == [[0.0, grown[0]["plan"][-1][1]]]
            and (one["steps"], one["rate"], one["schedule"]) == (steps, grown[0]["rate"], "wsd")
        ]
        assert {one["seed"] for one in static} == {one["seed"] for one in grown} == {0, 1}
        loss = {
            kind: fmean(one["loss"] for one in of) for kind, of in (("g", grown), ("s", static))
        }
        differences.append(100 * abs(loss["g"] / loss["s"] - 1))
        saved.append(1 - grown[0]["flops"] / static[0]["flops"])
    assert round(max(differences), 1) <= 0.7
    assert all(round(share, 2) == 0.25 for share in saved)
    page = (ROOT / "docs" / "tutorial-gpt.md").read_text(encoding="utf-8")
    assert (
        "have the same loss within 0.7 %, and the grown ones needed a quarter less compute" in page
    )


def test_the_front_page_and_the_tutorial_state_the_measured_savings() -> None:
    records = read_records(RESEARCH / "depth" / "results.jsonl")
    verdicts = {name: judge(records, cell) for name, cell in CELLS.items()}
    ratios = [verdict.ratio for verdict in verdicts.values() if verdict is not None]
    mean, _, _ = geometric_mean(ratios)
    assert f"{mean:.2f} times the compute" in INDEX
    assert f"geometric mean of eight networks, {min(ratios):.2f} to {max(ratios):.2f}" in INDEX
    small = verdicts["small"]
    assert small is not None
    tutorial = (ROOT / "docs" / "tutorial-gpt.md").read_text(encoding="utf-8")
    assert f"needs {small.ratio:.2f} times the compute" in tutorial
    stated = f"a loss of {small.static.score:.3f}, the grown one {small.default.score:.3f}"
    assert stated in tutorial
    exact = f"a loss of {small.default.score:.4f} and the best static one {small.static.score:.4f}"
    assert exact in " ".join(section(RESULTS, "The demo").split())


def test_what_the_table_of_readme_quotes_is_on_the_page_of_results() -> None:
    small = of_readme("a small network of unknown size")
    means = [cell[2].split()[0] for cell in rows(section(RESULTS, "Does growing pay?")).values()]
    least = min(float(mean) for mean in means if re.fullmatch(r"\+\d\.\d\d", mean))
    assert f"{least:+.1f} points on digits" in small
    enough = rows(section(RESULTS, "Seeds"))["large enough, three blocks (6)"]
    assert f"{enough[1]} points for {float(enough[2]) - 1:.0%}".replace("%", " %") in of_readme(
        "**a network that is large enough"
    )
    short = rows(section(RESULTS, "Short runs"))
    assert f"{short['10'][2]} points after 10 epochs" in of_readme("**a short run**")


def test_short_runs_of_deepen() -> None:
    records = demo.read(RESEARCH / "demo" / "short.jsonl")
    page, readme = rows(section(RESULTS, "Short runs")), of_readme("**a short run**")
    static_2, static_4, grown = (arm.name for arm in ARMS)
    budgets = sorted({record["compute"] for record in records})
    assert len(budgets) == 5
    for compute in budgets:
        own = [record for record in records if record["compute"] == compute]
        losses = {
            name: median(record["test_loss"] for record in own if record["network"] == name)
            for name in (static_2, static_4, grown)
        }
        (steps,) = {record["steps"] for record in own if record["network"] == static_4}
        gaps = [100 * (losses[grown] / losses[name] - 1) for name in (static_4, static_2)]
        words = [f"{abs(gap):.1f} % {'higher' if gap > 0 else 'lower'}" for gap in gaps]
        stated = [f"{losses[name]:.3f}" for name in (static_2, static_4, grown)]
        row = page[f"{compute:.0%}".replace("%", " %")]
        assert [cell.replace("*", "") for cell in row[1:]] == [f"{steps:,}", *stated, *words]
        if steps in (150, 600):
            assert words[0] in readme.replace("*", "")
            assert f"after {steps}" in readme
