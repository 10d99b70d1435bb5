from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from esper.lab.proof.arm import DepthArm, parse_arm
from esper.lab.proof.plans import PlainSchedule
from esper.lab.proof.play import Player
from esper.lab.proof.prove import make_arm
from esper.lab.proof.search import Search, SearchConfig
from esper.lab.proof.static import deepened
from esper.lab.tasks.member import GivenMember
from esper.leyline.errors import UsageError
from tests.lab.population.tiny_tasks import TinyText
from tests.lab.proof.small import QUICK, member, play_config

MEMBERS = (member(2, horizon=6), member(3, 200, horizon=6))
UNPLAYED = member(4, 100, horizon=6)
CONFIG = SearchConfig(
    rungs=("4x1", "2x2"), children=(2, 1), choices=2, heuristics=2, play=play_config(rows=8)
)


def search(folder: Path, stop_after: int | None = None) -> Search:
    folder.mkdir(exist_ok=True)
    epochs = 0

    def is_stopped() -> bool:
        nonlocal epochs
        epochs += 1
        return stop_after is not None and epochs > stop_after

    player = Player(CONFIG.play, is_stopped=is_stopped)
    return Search(CONFIG, MEMBERS, folder, player, taught=(MEMBERS[0], UNPLAYED))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Search:
    found = search(tmp_path_factory.mktemp("search"))
    assert found.run()
    found.conclude()
    return found


def test_all_rungs_are_played_with_fresh_seeds(whole: Search) -> None:
    first = [each for each in whole.results if each.purpose == "rung 0"]
    last = [each for each in whole.results if each.purpose == "rung 1"]
    # On each of two members: waiting, the plans and the settings that are still in.
    assert len(first) == 2 * (1 + 4 + 3 + 2)
    assert len(last) == 2 * (1 + 2 + 1)
    arms = [{each.arm for each in last if each.member == m.label} for m in MEMBERS]
    assert arms[0] == arms[1], "tables are complete"
    assert {each.arm for each in last} < {each.arm for each in first}
    assert not set(first[0].seeds) & set(last[0].seeds)
    assert sum(len(each.seeds) for each in whole.results) == whole.rows


def test_children_are_plans_of_the_first_rung_that_differ_from_all_others(whole: Search) -> None:
    bred = [name for name in whole.plans if "." in name]
    assert bred == ["plan 1.0", "plan 1.1", "plan 2.0"]
    assert len({str(entries) for entries in whole.plans.values()}) == len(whole.plans)
    played = {each.arm for each in whole.results if each.purpose == "rung 0"}
    assert set(bred) < played
    written = json.loads((whole.folder / "plans.json").read_text())
    assert {name: tuple(entries) for name, entries in written.items()} == whole.plans
    read_again = Search(CONFIG, MEMBERS, whole.folder, Player(CONFIG.play))
    assert read_again.plans.keys() == whole.plans.keys()


@pytest.mark.slow
def test_an_interrupted_search_ends_with_the_same_file(whole: Search, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    for epochs in (3, 20):
        assert not search(folder, stop_after=epochs).run()
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"purpose": "rung 0", "arm"')  # killed while writing
    assert search(folder).run()
    name = "results.jsonl"
    assert sorted((folder / name).read_text().splitlines()) == sorted(
        (whole.folder / name).read_text().splitlines()
    )


def test_what_others_take_is_written(whole: Search) -> None:
    def read(name: str) -> object:
        return json.loads((whole.folder / name).read_text())

    summary = read("summary.json")
    few = read("split1.json")["plans"]
    assert len(few) == len(read("contextual.json")["plans"]) == CONFIG.choices == 2
    assert set(few) <= {each.arm for each in whole.results if each.purpose == "rung 1"}
    assert read("schedule.json") == [
        dict(entry) for entry in whole.plans[summary["best_single"]["plan"]]
    ]
    assert set(read("privileged.json")) == {each.label for each in MEMBERS}
    assert set(read("lessons.json")) == {each.label for each in (*MEMBERS, UNPLAYED)}
    kinds = {"contextual": "contextual schedule", "split1": "rule of splits"}
    for name, kind in {**kinds, "split2": "rule of splits"}.items():
        assert read(f"{name}.json")["kind"] == kind
        assert read(f"{name}.json")["held_out"] == summary["rules"][name]["held_out_log_ratio"]
    assert read("heuristic.json") == summary["heuristic"]["settings"]
    lines = (whole.folder / "ratios.jsonl").read_text().splitlines()
    ratios = [json.loads(line) for line in lines]
    assert {(each["member"], each["arm"]) for each in ratios} == {
        (each.member, each.arm) for each in whole.results if each.arm != "wait"
    }
    assert all(len(each["val"]) == len(each["seeds"]) for each in ratios)


def test_a_clone_is_taught_no_schedule_that_begins_before_there_was_anything_to_see(
    whole: Search, tmp_path: Path
) -> None:
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)

    def teach(start: float, plans: dict[str, PlainSchedule]) -> list[PlainSchedule]:
        (tmp_path / "plans.json").write_text(json.dumps(plans))
        config = CONFIG.replace(lessons_from=start, price=0.0, lessons=1)
        again = Search(config, MEMBERS, tmp_path, Player(CONFIG.play), taught=(UNPLAYED,))
        again.conclude()
        taught = json.loads((tmp_path / "lessons.json").read_text()).values()
        return [entries for entries in taught if entries]

    def late(entries: PlainSchedule) -> PlainSchedule:
        return [{**entry, "epoch": "50%"} for entry in entries]

    taught = teach(0.0, whole.plans)
    assert taught, "or it says nothing"
    best = next(name for name, entries in whole.plans.items() if list(entries) == taught[0])
    patient = {**whole.plans, best: late(whole.plans[best])}
    for start in (0.1, 0.6):
        # At 0.6 all begin too early, and those that begin last are taught.
        assert teach(start, patient) == [late(entries) for entries in taught]
    others = {name: own if name == best else late(own) for name, own in whole.plans.items()}
    assert teach(0.0, others) == taught
    assert taught[0] not in teach(0.1, others)


@pytest.mark.slow
def test_static_depths_are_played_and_chosen_by_member_and_by_descriptors(tmp_path: Path) -> None:
    base = TinyText.defaults.replace(horizon=6, budget="6x")
    texts = [
        GivenMember(f"rate {rate:g}", TinyText(base.replace(learning_rate=rate)))
        for rate in (0.001, 0.01)
    ]
    play = play_config(population=QUICK.replace(copies=True))
    config = SearchConfig(rungs=("2x2",), space="doublings", heuristics=0, depths=(2, 4), play=play)
    found = Search(config, texts, tmp_path, Player(play))
    assert found.run()
    assert sum(len(each.seeds) for each in found.results) == found.rows == 2 * 2 * (1 + 2 + 2)
    sizes = {each.arm: each.flops[0] / each.host_flops for each in found.results}
    assert 1.0 == sizes["wait"] < sizes["depth 2"] < sizes["depth 4"]
    depths = found.conclude()["depths"]
    assert depths["log_ratios"][str(depths["best_single"])] == max(depths["log_ratios"].values())
    assert depths["headroom"]["seeds"] == 2
    assert "depth 2" not in json.dumps(found.conclude()["rules"]), "schedules and depths are apart"
    in_hindsight = make_arm(parse_arm(f"privileged:{tmp_path / 'depth_privileged.json'}"))
    for each in texts:
        best = depths["best_by_member"][each.label]["depth"]
        assert in_hindsight.task(each).host_flops == deepened(each.task(), best).host_flops
    for name, rule in depths["rules"].items():
        file = tmp_path / f"depth_{name}.json"
        arm = make_arm(parse_arm(f"contextual:{file}"))
        assert isinstance(arm, DepthArm)
        assert json.loads(file.read_text())["plans"] == {"depth 2": 2, "depth 4": 4}
        assert rule["held_out_log_ratio"] == json.loads(file.read_text())["held_out"]


def test_rungs_are_checked() -> None:
    with pytest.raises(UsageError, match="PLANSxSEEDS"):
        SearchConfig(rungs=("many",))
