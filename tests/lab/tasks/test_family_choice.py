from __future__ import annotations

import pytest

from esper.lab.tasks.family import MemberChoice, get_family
from esper.lab.tasks.member import descriptors
from esper.leyline.errors import UsageError
from tests.lab.proof.small import member


def test_members_are_those_of_the_split() -> None:
    family = get_family("digits_family")
    assert MemberChoice().find() == family.members("select")
    few = MemberChoice(split="train", labels=("noise 0.4",), count=5)
    assert len(few.find()) == 5
    assert all("noise 0.4" in each.label for each in few.find())
    assert few.find() == few.find()
    assert few.find() != few.replace(seed=1).find()


def test_the_claim_is_not_opened_by_accident() -> None:
    choice = MemberChoice(family="image16_family", split="claim")
    for opening in (0, 3):
        with pytest.raises(UsageError, match="at most twice"):
            choice.find(opening)
    assert len(choice.find(1)) == 24
    assert set(choice.purposes()) == {each.label for each in choice.find(2)}
    with pytest.raises(UsageError, match="--open-claim is for"):
        MemberChoice().find(1)


def test_what_is_not_there() -> None:
    with pytest.raises(UsageError, match="no member has 'noise 7'"):
        MemberChoice(labels=("noise 7",)).find()
    with pytest.raises(UsageError, match="no members to claim"):
        MemberChoice(split="claim").find(1)


def test_descriptors_tell_members_apart_before_anything_is_trained() -> None:
    narrow, wide = descriptors(member(2).task()), descriptors(member(8).task())
    assert wide["log_parameters"] > narrow["log_parameters"] + 2
    few = descriptors(member(2, 256).task())
    assert few["log_train_size"] == 8.0
    assert {**few, "log_train_size": narrow["log_train_size"]} == narrow


def test_a_whole_label_chooses_one_member_and_a_part_all_that_share_it() -> None:
    every = MemberChoice(family="image16_family", split="train")
    plain = "cifar16 plain 4x2 pooled, 20000 images, 60 epochs"
    assert [each.label for each in every.replace(labels=(plain,)).find()] == [plain]
    part = [each.label for each in every.replace(labels=("4x2 pooled, 20000 images, 60",)).find()]
    assert plain in part
    assert len(part) > 1


def test_drawn_claim_members_follow_from_the_weights_that_are_judged() -> None:
    choice = MemberChoice(family="depth_small", split="claim")
    assert choice.needs_claim_key
    with pytest.raises(UsageError, match=r"follow from the weights .* members\.claim_key=SHA256"):
        choice.find(1)
    one, other = (choice.replace(claim_key=key * 64).find(1) for key in "ab")
    assert one == choice.replace(claim_key="a" * 64).find(1)
    labels = {member.label for member in one}
    assert len(labels) == len(one) >= 32
    assert labels != {member.label for member in other}
    with pytest.raises(UsageError, match="at most twice"):
        choice.replace(claim_key="a" * 64).find(0)
    assert not MemberChoice(family="depth_small").needs_claim_key
    assert not MemberChoice(family="image16_family", split="claim").needs_claim_key
