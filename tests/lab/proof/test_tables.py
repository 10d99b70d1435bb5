from __future__ import annotations

import json
from typing import Any

import pytest

from esper.lab.proof.evidence import gather, read_proof
from esper.lab.proof.tables import headline, sections, to_markdown
from tests.lab.proof.test_evidence import ARMS, EFFECTS, MEMBERS, SEEDS, cells, is_image, settings

WATCHED: dict[str, Any] = {
    "moments": [[7], [7], [13], [7]],
    "copies": [[1], [1], [3], [1]],
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    effects = {**EFFECTS, "shuffled": lambda member: EFFECTS["mine"](member) - 0.05}
    effects["late"] = lambda member: 0.02 if is_image(member) else -0.01
    still = {"moments": [[]] * SEEDS, "copies": [[0]] * SEEDS, "flops": 1000, "parameters": 100}
    played = cells(effects, mine=WATCHED, wait=still)
    return gather(read_proof(settings(*ARMS, "shuffled:/elsewhere/mine", "random"), played))


def row(found: dict[str, Any], title: str, first: str) -> dict[str, str]:
    """Return a row of a table by its first cell."""
    (section,) = [each for each in sections(found) if each.title == title]
    (cells,) = [each for each in section.rows if each[0] == first]
    return dict(zip(section.header, cells, strict=True))


def test_every_table_is_made_and_every_row_has_its_columns(found: dict[str, Any]) -> None:
    assert [each.title for each in sections(found)] == [
        "Arms",
        "By kind of network",
        "By data set",
        "Without the best 5 members",
        "Does it watch? With less to see",
        "Does it watch? How networks end",
        "Against hindsight",
        "Where growing is useless",
        "Left out",
    ]
    for each in sections(found):
        assert each.rows
        assert {len(cells) for cells in each.rows} == {len(each.header)}
    assert headline(found) == (
        f"mine on {len(MEMBERS)} members of depth_family (select), {SEEDS} seeds"
    )


def test_cells_say_what_the_figures_are(found: dict[str, Any]) -> None:
    slope = row(found, "Arms", "slope")
    assert slope["loss"] == "0.961"
    assert (slope["parameters"], slope["after Holm"]) == ("1.50", "yes")
    assert row(found, "Arms", "wait")["parameters"] == "1.00"
    kinds = row(found, "By kind of network", "wait")
    assert kinds["resnet (8)"] == "+0.100 [+0.100, +0.100]"
    assert kinds["tcn (8)"] == "-0.020 [-0.020, -0.020]"
    assert kinds["above 0"] == "1 of 2"
    fewer = row(found, "Without the best 5 members", "wait")
    assert fewer["lowest mean"] == f"{(3 * 0.1 - 8 * 0.02) / 11:+.3f}"
    blind = row(found, "Does it watch? With less to see", "shuffled")
    assert (blind["log ratio (IQM)"][:6], blind["verdict"]) == ("+0.050", "beats")
    ends = row(found, "Does it watch? How networks end", "mine")
    assert (ends["same member: end alike"], ends["same member: part at"]) == ("75%", "10%")
    assert ends["same member: groups that differ"] == f"{len(MEMBERS)} of {len(MEMBERS)}"
    depths = row(found, "Against hindsight", "depths")
    assert depths["over hindsight"].startswith("-0.020")
    assert depths["worse by at most 0.5%"] == "no"
    assert row(found, "Left out", "arm")["name"] == "random"


def test_not_worse_is_shown_by_the_interval_or_by_the_estimate_alone() -> None:
    def useless(loss: float, spread: float) -> str:
        effects = {"mine": lambda member: -loss, "wait": EFFECTS["wait"]}
        effects["depth 2"] = lambda member: -0.3
        proof = read_proof(settings("mine", "depth:2"), cells(effects, spread=spread))
        (section,) = [e for e in sections(gather(proof)) if e.title == "Where growing is useless"]
        return section.rows[0][-1]

    assert useless(0.001, 0.0) == "yes"
    assert useless(0.006, 0.0) == "no"
    assert useless(0.0, 0.04) == "by its estimate"


def test_what_cannot_be_made_is_named(found: dict[str, Any]) -> None:
    bare = gather(read_proof(settings("mine"), cells({a: EFFECTS[a] for a in ("mine", "wait")})))
    titles = [each.title for each in sections(bare)]
    assert "Against hindsight" not in titles
    text = to_markdown(bare)
    assert "| table | useless | no arm of depth or schedule was played |" in text
    assert "over the 1 required comparisons that were played" in text
    whole = to_markdown(found)
    for each in sections(found):
        assert f"\n## {each.title}\n" in whole


def test_where_nothing_is_useless_the_table_says_so() -> None:
    effects = {"mine": EFFECTS["mine"], "wait": EFFECTS["wait"], "depth 2": lambda member: 0.2}
    proof = read_proof(settings("mine", "depth:2"), cells(effects))
    assert "There are none." in to_markdown(gather(proof))


def test_figures_are_plain_json(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found, allow_nan=False)) == found
