"""Figures of a claim from results that nobody played, whose right answers are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from esper.lab.proof.evidence import LEFT_OUT, gather, read_proof, read_spec
from esper.lab.proof.prove import ProveConfig
from esper.lab.proof.results import CellResult
from esper.lab.tasks.arena import DepthMember
from esper.lab.tasks.family import MemberChoice, get_family
from esper.leyline.errors import UsageError
from tests.lab.proof.made_up import result

MEMBERS = tuple(
    member
    for member in get_family("depth_family").members("select")
    if isinstance(member, DepthMember)
)
SEEDS = 4
ARMS = ("mine", "wait", "slope", "depth:2", "early=schedule:a.json", "late=schedule:b.json")
Effect = Callable[[DepthMember], float]


def settings(*arms: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of a proof whose first arm is a policy that is not on this machine."""
    config = ProveConfig(
        arms=("wait",), seeds=SEEDS, members=MemberChoice(family="depth_family"), wilcoxon=True
    )
    return {**config.to_mapping(), "arms": ["/elsewhere/mine", *arms[1:]], **changes}


def cells(
    effects: dict[str, Effect], *, spread: float = 0.0, **own: dict[str, Any]
) -> list[CellResult]:
    """Return results of arms with known log ratios over waiting; noise is the same for all arms."""
    stream = np.random.default_rng(0)
    found = []
    for member in MEMBERS:
        base = np.exp(stream.normal(-1.5, 0.3, SEEDS))
        for arm, effect in effects.items():
            errors = base * np.exp(-effect(member) + stream.normal(0, spread, SEEDS))
            found.append(result(arm, member.label, errors.tolist(), **own.get(arm, {})))
    return found


def is_image(member: DepthMember) -> bool:
    return member.kind == "resnet"


EFFECTS: dict[str, Effect] = {
    "wait": lambda member: 0.0,
    "mine": lambda member: 0.1 if is_image(member) else -0.02,
    "slope": lambda member: 0.04,
    "depth 2": lambda member: 0.12 if is_image(member) else -0.1,
    "early": lambda member: 0.08 if is_image(member) else -0.2,
    "late": lambda member: 0.02,
}


def test_effects_are_told_by_kind_of_network_and_by_data() -> None:
    proof = read_proof(settings(*ARMS), cells(EFFECTS))
    found = gather(proof)
    assert found["subject"] == "mine"
    network, data = found["groups"]["network"], found["groups"]["data"]
    assert set(network) == {"resnet", "tcn"}
    images = sum(map(is_image, MEMBERS))
    assert (network["resnet"]["members"], network["tcn"]["members"]) == (
        images,
        len(MEMBERS) - images,
    )
    for arm, image, text in (("wait", 0.1, -0.02), ("slope", 0.06, -0.06), ("early", 0.02, 0.18)):
        for kind, effect in (("resnet", image), ("tcn", text)):
            own = network[kind]["against"][arm]
            assert own["estimate"] == pytest.approx(effect)
            assert own["interval"]["low"] == pytest.approx(effect)
            assert own["interval"]["high"] == pytest.approx(effect)
    used = {member.data for member in MEMBERS}
    assert set(data) == used
    for name in used:
        effect = 0.1 if name in ("cifar16", "digits") else -0.02
        assert data[name]["members"] == sum(member.data == name for member in MEMBERS)
        assert data[name]["against"]["wait"]["estimate"] == pytest.approx(effect)


def test_arms_have_ratios_of_losses_and_both_tests() -> None:
    effects = {"mine": lambda member: 0.1, "wait": EFFECTS["wait"], "slope": EFFECTS["slope"]}
    found = gather(read_proof(settings("mine", "slope"), cells(effects, spread=0.01)))
    assert found["arms"]["mine"]["loss_ratio"] == pytest.approx(np.exp(-0.1), abs=0.005)
    assert found["arms"]["wait"]["loss_ratio"] == 1.0
    assert found["arms"]["mine"]["parameters"] == 1.5
    verdicts = {each["reference"]: each for each in found["comparisons"]}
    assert {arm: each["verdict"] for arm, each in verdicts.items()} == {
        "wait": "beats",
        "slope": "beats",
    }
    assert all(each["is_required"] and each["needs_ranks"] for each in verdicts.values())
    # All members favour it, so the rank tests have their least p; Holm doubles both.
    assert verdicts["wait"]["ranks"]["adjusted_p"] == pytest.approx(2 * 2.0 ** (1 - len(MEMBERS)))


def test_five_members_that_carry_everything_are_left_out() -> None:
    best = {member.label for member in MEMBERS[3 : 3 + LEFT_OUT]}

    def few(member: DepthMember) -> float:
        return 0.5 if member.label in best else -0.01

    effects = {"mine": few, "wait": EFFECTS["wait"], "slope": lambda member: few(member) - 0.1}
    found = gather(read_proof(settings("mine", "slope"), cells(effects)))
    own = found["without_five"]
    assert own["members"] == len(MEMBERS) - LEFT_OUT
    assert own["lowest_mean"] == pytest.approx({"wait": -0.01, "slope": 0.1})
    without = {each["reference"]: each for each in own["comparisons"]}
    assert without["wait"]["verdict"] == "loses"
    assert without["slope"]["verdict"] == "beats"
    assert without["wait"]["over_members"]["estimate"] == pytest.approx(-0.01)
    whole = {each["reference"]: each for each in found["comparisons"]}
    assert whole["wait"]["over_members"]["estimate"] > -0.01


def test_hindsight_is_over_schedules_and_over_depths() -> None:
    found = gather(read_proof(settings(*ARMS), cells(EFFECTS)))
    share = sum(map(is_image, MEMBERS)) / len(MEMBERS)
    schedules, depths = found["hindsight"]["schedules"], found["hindsight"]["depths"]
    assert schedules["choices"] == ["wait", "early", "late"]
    # Early is best on images and late on texts; alone, late gains everywhere.
    assert schedules["single"] == pytest.approx(0.02)
    assert schedules["gain"]["estimate"] == pytest.approx(share * 0.06)
    mine = share * 0.1 + (1 - share) * -0.02
    assert schedules["reached"]["estimate"] == pytest.approx(mine - 0.02)
    assert schedules["share"] == pytest.approx((mine - 0.02) / (share * 0.06))
    assert depths["choices"] == ["wait", "depth 2"]
    assert depths["over_best"]["estimate"] == pytest.approx(mine - share * 0.12)


def test_a_search_on_the_same_members_gives_the_schedules() -> None:
    played = cells({arm: EFFECTS[arm] for arm in ("mine", "wait")})
    stream = np.random.default_rng(3)
    searched = []
    for member in MEMBERS[2:]:
        for arm, effect in {
            **{"wait": 0.0, "1>2@0%": 0.3, "1>2@50%": 0.1},
            **{"heuristic 1": 9.0, "depth 2": 0.07},
        }.items():
            sign = 1 if is_image(member) or arm != "1>2@0%" else -1
            errors = 0.3 * np.exp(stream.normal(0, 1e-6, 6) - sign * effect)
            searched.append(result(arm, member.label, errors.tolist(), purpose="rung 1"))
    found = gather(read_proof(settings("mine"), played), searched)
    own = found["hindsight"]["schedules"]
    share = sum(map(is_image, MEMBERS[2:])) / len(MEMBERS[2:])
    assert own["members"] == len(MEMBERS) - 2
    assert own["arms"] == 3
    assert own["single"] == pytest.approx(0.1, abs=1e-5)
    assert own["gain"]["estimate"] == pytest.approx(share * 0.2, abs=1e-5)
    mine = share * 0.1 + (1 - share) * -0.02
    assert own["reached"]["estimate"] == pytest.approx(mine - 0.1, abs=1e-5)
    depths = found["hindsight"]["depths"]
    assert depths["arms"] == 2
    assert depths["over_best"]["estimate"] == pytest.approx(mine - 0.07, abs=1e-5)
    few = [each for each in searched if each.member == MEMBERS[2].label]
    left_out = gather(read_proof(settings("mine"), played), few)["left_out"]["tables"]
    assert "2 or more" in left_out["hindsight over schedules"]


def test_useless_members_are_those_on_which_all_deeper_arms_are_worse() -> None:
    effects = {**EFFECTS, "late": lambda member: 0.01}
    texts = sum(not is_image(member) for member in MEMBERS)
    # The late schedule is scored before it grows: what it gains says nothing of depth.
    shallow = {"flops": 1000}
    found = gather(read_proof(settings(*ARMS), cells(effects, late=shallow)))
    own = found["useless"]
    assert (own["members"], own["by_both"]) == (texts, texts)
    assert own["mean"] == pytest.approx(-0.02)
    assert own["over_waiting"]["high"] == pytest.approx(-0.02)
    grown = gather(read_proof(settings(*ARMS), cells(effects)))["useless"]
    assert (grown["members"], grown["mean"]) == (0, None)


def test_watching_is_told_of_every_arm_that_grows() -> None:
    moments = {"moments": [[7], [7], [13], [7]], "copies": [[1], [1], [3], [1]]}
    still = {"moments": [[]] * SEEDS, "copies": [[0]] * SEEDS}
    effects = {arm: EFFECTS[arm] for arm in ("mine", "wait", "slope")}
    effects["frozen"] = lambda member: 0.0
    played = cells(effects, mine=moments, slope=moments, frozen=still, wait=still)
    found = gather(read_proof(settings("mine", "slope", "frozen:/elsewhere/mine"), played))
    watching = found["watching"]
    assert watching["blindfolded"] == ["frozen"]
    assert set(watching["ends"]) == {"mine", "slope"}
    assert watching["ends"]["mine"]["same member"]["alike"] == 0.75
    assert watching["ends"]["mine"]["same member"]["parted_at"] == pytest.approx(6 / 60)
    assert "watching" not in found["left_out"]["tables"]


def test_what_was_not_played_is_left_out_and_named() -> None:
    effects = {arm: EFFECTS[arm] for arm in ("mine", "wait", "slope")}
    played = cells(effects)
    last = MEMBERS[-1].label
    stopped = [each for each in played if (each.arm, each.member) != ("slope", last)]
    arms = ("mine", "slope", "depth:2", "static", "scratch:mine", "shuffled:/elsewhere/mine")
    found = gather(read_proof(settings(*arms), stopped))
    left_out = found["left_out"]
    assert left_out["arms"] == {
        "slope": f"played on {len(MEMBERS) - 1} of {len(MEMBERS)} members",
        "depth 2": "not played",
        "static": "not played",
        "scratch mine": "not played",
        "shuffled": "not played",
    }
    assert set(left_out["tables"]) == {
        *("watching", "hindsight over schedules", "hindsight over depths", "useless"),
    }
    assert left_out["members"] == []
    assert list(found["arms"]) == ["mine", "wait"]
    assert [each["reference"] for each in found["comparisons"]] == ["wait"]
    # A member without waiting has nothing to compare with.
    fewer = [each for each in played if (each.arm, each.member) != ("wait", last)]
    found = gather(read_proof(settings("mine", "slope"), fewer))
    assert found["left_out"]["members"] == [last]
    assert found["left_out"]["arms"] == {}
    assert len(found["members"]) == len(MEMBERS) - 1
    with pytest.raises(UsageError, match="0 members on which both 'mine' and 'wait'"):
        read_proof(settings("mine"), [])


def test_few_members_cannot_be_left_out() -> None:
    effects = {arm: EFFECTS[arm] for arm in ("mine", "wait")}
    labels = [member.label for member in MEMBERS[:6]]
    choice = MemberChoice(family="depth_family", labels=tuple(labels))
    few = settings("mine", members=choice.to_mapping())
    played = [each for each in cells(effects) if each.member in labels]
    found = gather(read_proof(few, played))
    assert found["without_five"] is None
    assert "6 members are too few" in found["left_out"]["tables"]["without_five"]


def test_rates_and_other_purposes_are_no_results_of_arms() -> None:
    effects = {arm: EFFECTS[arm] for arm in ("mine", "wait")}
    played = cells(effects)
    extra = [result(arm, MEMBERS[0].label, [0.9] * 2, purpose="rates") for arm in ("mine", "other")]
    proof = read_proof(settings("mine"), [*played, *extra])
    assert list(proof.arms) == ["mine", "wait"]
    assert proof.missing_arms == {}
    assert proof.over_waiting("mine")[0].tolist() == pytest.approx([0.1] * SEEDS)


@pytest.mark.parametrize(
    ("text", "name", "kind", "argument"),
    [
        ("/elsewhere/tuned/", "tuned", "greedy", "/elsewhere/tuned/"),
        ("mine=/elsewhere/tuned", "mine", "greedy", "/elsewhere/tuned"),
        ("shuffled_later:/elsewhere", "shuffled_later", "shuffled_later", "/elsewhere"),
        ("b=own_rule:x=1", "b", "own_rule", "x=1"),
        ("depth:4,tuned", "depth 4, tuned", "depth", "4,tuned"),
    ],
)
def test_arms_of_another_machine_have_their_names(
    text: str, name: str, kind: str, argument: str
) -> None:
    spec = read_spec(text)
    assert (spec.name, spec.kind, spec.argument) == (name, kind, argument)
