"""The shipped families: what training can draw, and the members that claims are measured on."""

from __future__ import annotations

import dataclasses

import pytest

from esper.lab.tasks import FAMILIES, Member, get_family
from esper.lab.tasks.family_presets import CIFAR_FAMILY, DIGITS_FAMILY, IMAGE16_FAMILY

SHIPPED = ("digits_family", "image16_family", "cifar_family")

CLAIM = {
    "lacks capacity": [
        "cifar16 plain 5x2 pooled, 25000 images, 60 epochs",
        "cifar16 plain 7x2 pooled, 25000 images, 60 epochs",
        "cifar16 plain 10x2 pooled, 25000 images, 60 epochs",
        "cifar16 plain 14x2 pooled, 25000 images, 60 epochs",
        "cifar16 plain 20x2 pooled, 25000 images, 60 epochs",
        "cifar16 residual 4x2 pooled, 25000 images, 60 epochs",
        "cifar16 residual 8x2 pooled, 25000 images, 60 epochs",
        "fashion14 plain 3x2 pooled, 25000 images, 60 epochs",
        "fashion14 plain 5x2 pooled, 25000 images, 60 epochs",
        "fashion14 plain 10x2 pooled, 25000 images, 60 epochs",
        "fashion14 residual 4x2 pooled, 25000 images, 60 epochs",
        "fashion14 residual 8x2 pooled, 25000 images, 60 epochs",
    ],
    "neutral": [
        "cifar16 plain 32x3 pooled, 25000 images, 60 epochs",
        "cifar16 plain 48x3 pooled, 25000 images, 60 epochs",
        "cifar16 residual 32x3 pooled, 25000 images, 60 epochs",
        "fashion14 plain 20x3 pooled, 25000 images, 60 epochs",
        "fashion14 plain 32x3 pooled, 25000 images, 60 epochs",
        "fashion14 residual 20x3 pooled, 25000 images, 60 epochs",
    ],
    "useless or harmful": [
        "cifar16 plain 10x3 pooled, 1000 images, 60 epochs",
        "cifar16 plain 10x3 pooled, 4000 images, noise 0.6, 60 epochs",
        "cifar16 residual 8x3 pooled, 1000 images, 60 epochs",
        "fashion14 plain 10x3 pooled, 500 images, 60 epochs",
        "fashion14 plain 10x3 pooled, 4000 images, noise 0.6, 60 epochs",
        "fashion14 residual 8x3 pooled, 500 images, 60 epochs",
    ],
}


def held_out_values(member: Member, family: str) -> int:
    """Return how many values of a member training never draws."""
    drawn = dict(get_family(family).train.items())
    return sum(value not in drawn[name] for name, value in dataclasses.asdict(member).items())


def test_the_shipped_families_are_registered() -> None:
    assert set(SHIPPED) <= set(FAMILIES)
    for family in (DIGITS_FAMILY, IMAGE16_FAMILY, CIFAR_FAMILY):
        assert get_family(family.name) is family


def test_the_claim_list_is_what_was_committed() -> None:
    found = {
        purpose: [member.label for member in members]
        for purpose, members in IMAGE16_FAMILY.claims.items()
    }
    assert found == CLAIM


def test_the_claim_list_is_balanced() -> None:
    sizes = [len(members) for members in IMAGE16_FAMILY.claims.values()]
    assert sizes == [12, 6, 6]
    claim = IMAGE16_FAMILY.members("claim")
    assert len(set(claim)) == 24
    assert {member.data for member in claim} == {"cifar16", "fashion14"}
    assert {member.host for member in claim} == {"plain", "residual"}
    assert all(member.is_possible for member in claim)
    for member in IMAGE16_FAMILY.claims["lacks capacity"]:
        assert member.label_noise == 0.0
        assert member.train_size == 25_000
        assert member.depth == 2
    for member in IMAGE16_FAMILY.claims["neutral"]:
        assert member.label_noise == 0.0
        assert member.depth == 3
        assert member.width >= 20
    for member in IMAGE16_FAMILY.claims["useless or harmful"]:
        assert member.train_size <= 1_000 or member.label_noise >= 0.5


@pytest.mark.parametrize("name", SHIPPED)
def test_the_whole_train_product_has_no_member_of_the_other_splits(name: str) -> None:
    family = get_family(name)
    train = set(family.members("train"))
    assert not train & set(family.members("select"))
    assert not train & set(family.members("claim"))
    # Nor has any other family: training on several at once opens nothing either.
    for other in SHIPPED:
        assert not train & set(get_family(other).members("select"))
        assert not train & set(get_family(other).members("claim"))


@pytest.mark.parametrize("name", SHIPPED)
def test_thousands_of_draws_stay_in_the_train_product(name: str) -> None:
    family = get_family(name)
    train = set(family.members("train"))
    kept_out = {*family.members("select"), *IMAGE16_FAMILY.members("claim")}
    drawn: set[Member] = set()
    for seed in range(300):
        for members in family.draw(seed, architectures=4, conditions=16):
            drawn.update(members)
    assert drawn == train, "a member of the product is never drawn, or one beyond it is"
    assert not drawn & kept_out


def test_fashion_and_the_residual_host_are_in_claim_alone() -> None:
    for name in SHIPPED:
        for split in ("train", "select"):
            for member in get_family(name).members(split):
                assert member.host == "plain"
                assert member.data not in ("fashion", "fashion14")
    claim = IMAGE16_FAMILY.members("claim")
    assert sum(member.data == "fashion14" for member in claim) == 11
    assert sum(member.host == "residual" for member in claim) == 8


@pytest.mark.parametrize("name", SHIPPED)
def test_select_has_axes_of_its_own(name: str) -> None:
    family = get_family(name)
    train = dict(family.train.items())
    for axis in ("width", "label_noise", "train_size"):
        assert set(getattr(family.select, axis)) - set(train[axis]), axis
    assert not set(family.select.width) & set(family.train.width)
    assert all(held_out_values(member, name) >= 1 for member in family.members("select"))


def test_claims_are_far_from_what_training_draws() -> None:
    assert all(
        held_out_values(member, "image16_family") >= 2 for member in IMAGE16_FAMILY.members("claim")
    )
    select = IMAGE16_FAMILY.select
    for member in IMAGE16_FAMILY.members("claim"):
        assert member.width not in select.width


@pytest.mark.parametrize("name", SHIPPED)
def test_every_architecture_has_its_slots_and_a_rate(name: str) -> None:
    family = get_family(name)
    for split in ("train", "select", "claim"):
        firsts = {member.architecture: member for member in family.members(split)}
        for member in firsts.values():
            task = member.task()
            assert len(task.slot_paths) == member.depth <= family.max_slots
            assert 0.0 < task.config.learning_rate <= 1.0
