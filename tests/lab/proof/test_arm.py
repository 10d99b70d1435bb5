from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from esper.lab.proof.arm import (
    ControllerArm,
    ScheduleArm,
    find_donors,
    group_of,
    parse_arm,
    seed_of,
    waiting,
    weights_digest,
)
from esper.lab.tasks.member import GivenMember
from esper.leyline.errors import UsageError
from esper.tamiyo.controllers import new_policy, save_policy
from tests.lab.population.tiny_tasks import TinyText
from tests.lab.proof.small import member


@pytest.mark.parametrize(
    ("text", "name", "kind", "argument"),
    [
        ("wait", "wait", "wait", None),
        ("periodic:every=3", "periodic", "periodic", "every=3"),
        ("slow=periodic:every=9", "slow", "periodic", "every=9"),
        ("heuristic:rest_epochs=2", "heuristic", "heuristic", "rest_epochs=2"),
        ("static", "static", "static", None),
        ("depth:4", "depth 4", "depth", "4"),
        ("depth:2,tuned", "depth 2, tuned", "depth", "2,tuned"),
        ("deep=depth:8", "deep", "depth", "8"),
        ("scratch:heuristic", "scratch", "scratch", "heuristic"),
        ("blind=shuffled:runs/tamiyo", "blind", "shuffled", "runs/tamiyo"),
        ("plan=schedule:a/b=c.json", "plan", "schedule", "a/b=c.json"),
    ],
)
def test_arms_as_people_write_them(text: str, name: str, kind: str, argument: str | None) -> None:
    spec = parse_arm(text)
    assert (spec.name, spec.kind, spec.argument) == (name, kind, argument)


@pytest.mark.parametrize("text", ["depth", "depth:", "depth:0", "depth:two", "depth:2,slow"])
def test_a_depth_is_a_number_of_blocks(text: str) -> None:
    with pytest.raises(UsageError, match="depth:4,tuned to tune"):
        parse_arm(text)


def test_a_folder_is_a_policy_that_acts_greedily(tmp_path: Path) -> None:
    save_policy(tmp_path / "tamiyo", new_policy())
    spec = parse_arm(f"{tmp_path / 'tamiyo'}")
    assert (spec.name, spec.controller) == ("tamiyo", f"greedy:{tmp_path / 'tamiyo'}")
    assert parse_arm(f"mine={tmp_path / 'tamiyo'}").name == "mine"


def test_a_word_that_is_no_arm_is_told_the_nearest_and_how_to_bring_ones_own() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'plateau'\?.*tamiyo.*--import FILE"):
        parse_arm("platau")


def test_only_what_draws_needs_a_controller_for_every_member() -> None:
    one, other = member(2), member(3)
    drawing, ruled = ControllerArm("r", "random"), ControllerArm("h", "heuristic")
    assert group_of(drawing, one) != group_of(drawing, other)
    assert group_of(ruled, one) == group_of(ruled, other)
    # Nobody knows what a third party's controller does with the number of a row.
    for spec, draws in (("tamiyo", False), ("greedy:x", False), ("learned:x", True), ("own", True)):
        assert ControllerArm("arm", spec).is_drawing == draws
    plan = ScheduleArm("plan", lambda member: ())
    assert group_of(plan, one) == group_of(waiting(), other)
    assert seed_of(drawing, one) != seed_of(drawing, other)


def test_the_digest_of_an_arm_is_that_of_its_weights(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        save_policy(tmp_path / name, new_policy(seed=seed))
    one, same, other = (
        weights_digest(parse_arm(f"{kind}{tmp_path / name}"))
        for kind, name in (("", "one"), ("learned:", "same"), ("", "other"))
    )
    assert one == same != other
    assert len(one) == 64
    (file,) = (tmp_path / "one").glob("*.safetensors")
    assert one == hashlib.sha256(file.read_bytes()).hexdigest()
    assert weights_digest(parse_arm("tamiyo")) == weights_digest(parse_arm("tamiyo:tamiyo"))


@pytest.mark.parametrize("text", ["wait", "heuristic"])
def test_an_arm_without_weights_draws_no_claim(text: str) -> None:
    with pytest.raises(UsageError, match="put a learned policy first"):
        weights_digest(parse_arm(text))


def test_donors_are_other_members_of_the_same_kind_where_there_are_some() -> None:
    cnns = [member(width) for width in (2, 3, 4, 5)]
    texts = [GivenMember(name, TinyText()) for name in ("one", "other")]
    donors = find_donors([*cnns, *texts])
    labels = {each.label for each in cnns}
    assert {donors[label] for label in labels} == labels
    assert donors["one"] == "other"
    assert donors["other"] == "one"
    assert all(own != donor for own, donor in donors.items())
    assert find_donors([*texts, *cnns[::-1]]) == donors
    alone = find_donors([*cnns, texts[0]])
    assert alone["one"] in labels
    assert {label: alone[label] for label in labels} == {label: donors[label] for label in labels}
    assert find_donors([cnns[0], texts[0]]) == {cnns[0].label: "one", "one": cnns[0].label}


def test_one_member_has_no_donor() -> None:
    with pytest.raises(UsageError, match="there is only 'width 2, all images'; choose more"):
        find_donors([member(2)])
