"""Members with a budget of compute, and the generator that draws them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from esper.lab.proof.static import deepened
from esper.lab.tasks.arena import HORIZON, DepthMember, Draws
from esper.lab.tasks.data.text import fold
from esper.lab.tasks.family import Family
from esper.lab.tasks.family_presets import DEPTH_FAMILY, DEPTH_SMALL
from esper.lab.tasks.task import get_task

TEXT = DepthMember(kind="gpt", data="sources", width=24, train_size=2_000, steps=700)


def draws(**changes: object) -> Draws:
    values: dict[str, object] = {
        "key": "some",
        "count": 30,
        "data": {"gpt": ("sources",)},
        "width": {"gpt": (16, 24)},
        "train_size": (0, 500, 2_000),
        "label_noise": (0.0, 0.3),
        "steps": {"gpt": (500, 5_000)},
    }
    return Draws(**(values | changes))  # type: ignore[arg-type]


def test_a_member_names_itself_in_one_line() -> None:
    assert TEXT.label == "sources gpt 24, 2000 samples, 700 steps"
    noisy = dataclasses.replace(TEXT, train_size=0, label_noise=0.3)
    assert noisy.label == "sources gpt 24, all samples, noise 0.3, 700 steps"
    hard = dataclasses.replace(TEXT, data="mirrors", level=9)
    assert hard.label == "mirrors9 gpt 24, 2000 samples, 700 steps"


def test_the_level_of_a_member_is_that_of_its_text() -> None:
    text = dataclasses.replace(TEXT, data="mirrors", train_size=0)
    assert text.task().config.level is None
    hard = dataclasses.replace(text, level=9).task()
    colon = int(fold(np.array([ord(":")], np.uint8))[0])
    assert hard.load().splits.samples["train"][0].tolist().index(colon) in range(20)
    assert hard.config.level == 9


def test_the_budget_pays_for_its_steps_and_its_evaluations() -> None:
    task = TEXT.task()
    config = task.config
    assert (config.horizon, len(task.slot_paths)) == (HORIZON, 1)
    samples = 3 * config.batch_size * 700 + HORIZON * config.validation_samples
    assert task.compute_budget(config.validation_samples) == samples * task.host_flops
    # However many epochs are played, the FLOPs are the same.
    assert TEXT.task(horizon=20).config.budget == config.budget


def test_descriptors_tell_nothing_of_the_data() -> None:
    seen = TEXT.descriptors()
    for hidden in ({"train_size": 0}, {"label_noise": 0.3}, {"data": "facts", "level": 900}):
        assert dataclasses.replace(TEXT, **hidden).descriptors() == seen  # type: ignore[arg-type]
    for told in ({"steps": 1_400}, {"width": 32}):
        assert dataclasses.replace(TEXT, **told).descriptors() != seen  # type: ignore[arg-type]
    assert dataclasses.replace(TEXT, steps=1_400).descriptors()["log_budget"] == pytest.approx(
        seen["log_budget"] + 1
    )


def test_a_draw_depends_on_its_key_alone() -> None:
    assert draws().members() == draws().members()
    assert draws().members() != draws().with_key("other").members()
    assert draws(count=10).members() == draws().members()[:10]


def test_every_value_is_drawn_and_budgets_are_spread_by_ratio() -> None:
    members = draws(count=200).members()
    assert len({member.label for member in members}) == 200
    for name, values in (("width", {16, 24}), ("train_size", {0, 500, 2_000})):
        counts = Counter(getattr(member, name) for member in members)
        assert set(counts) == values
        assert min(counts.values()) > 0.6 * 200 / len(values)
    steps = [member.steps for member in members]
    assert 500 <= min(steps) < 600
    assert 4_000 < max(steps) <= 5_000
    assert {member.level for member in members} == {0}, "sources have no levels"
    middle = sorted(steps)[100]
    assert 1_200 < middle < 2_100, "half of the budgets are below the geometric mean, 1,580"


def test_texts_are_drawn_at_their_own_levels() -> None:
    levels = {"facts": (300, 900), "mirrors": (4,)}
    drawn = draws(data={"gpt": ("sources", *levels)}, levels=levels, count=60)
    found = {(member.data, member.level) for member in drawn.members()}
    assert found == {("sources", 0), ("facts", 300), ("facts", 900), ("mirrors", 4)}
    assert dict(drawn.items())["level of facts"] == (300, 900)


@pytest.mark.parametrize("family", [DEPTH_SMALL, DEPTH_FAMILY])
def test_every_shipped_member_has_a_level_that_its_text_has(family: Family) -> None:
    texts = {
        (member.data, member.level)
        for members in (*map(family.members, ("train", "select")), family.drawn_claim("2" * 64))
        for member in members
        if isinstance(member, DepthMember)
    }
    for data, level in texts:
        assert get_task(data, level=level or None).config.level == (level or None)
    assert {data for data, level in texts if level} == {"copies", "facts", "sorting", "sums"}


def test_the_splits_of_the_small_family_share_no_member() -> None:
    train, select = (set(DEPTH_SMALL.members(split)) for split in ("train", "select"))
    claim = set(DEPTH_SMALL.drawn_claim("0" * 64))
    assert (len(train), len(select), len(claim)) == (30, 15, 36)
    assert not train & select
    assert not claim & (train | select)


@pytest.mark.parametrize(
    ("kind", "data", "stages"),
    [("gpt", "chain", 1), ("tcn", "copies", 1), ("resnet", "digits", 2), ("vit", "fashion14", 1)],
)
def test_every_stage_of_every_kind_can_be_doubled(kind: str, data: str, stages: int) -> None:
    member = DepthMember(kind=kind, data=data, width=8, stages=stages, steps=20_000)  # type: ignore[arg-type]
    task = member.task()
    assert len(task.slot_paths) == member.num_slots == stages
    assert member.descriptors()["slots"] == stages
    deeper = deepened(task, 4)
    assert 2.0 < deeper.host_flops / task.host_flops <= 4.0
    budgets = {one.compute_budget(one.config.validation_samples) for one in (task, deeper)}
    assert len(budgets) == 1, "a deeper network has no more FLOPs"


@pytest.mark.parametrize("key", ["a", "b"])
def test_data_sets_take_turns(key: str) -> None:
    texts = ("sources", "chain", "links")
    members = draws(
        key=key,
        count=12,
        data={"gpt": texts, "vit": ("cifar16",)},
        width={"gpt": (16,), "vit": (16,)},
        steps={"gpt": (500, 5_000), "vit": (500, 5_000)},
    ).members()
    counts = Counter(member.data for member in members)
    assert counts == {"cifar16": 6, **dict.fromkeys(texts, 2)}


def test_a_kind_and_two_data_sets_are_in_claim_alone() -> None:
    seen = {
        name: {
            getattr(m, name) for split in ("train", "select") for m in DEPTH_FAMILY.members(split)
        }
        for name in ("kind", "data")
    }
    claim = DEPTH_FAMILY.drawn_claim("1" * 64)
    assert {member.kind for member in claim} - seen["kind"] == {"vit"}
    assert {member.data for member in claim} - seen["data"] == {"fashion14", "sums"}
    assert {member.kind for member in claim} == {"tcn", "resnet", "vit"}


def test_a_kind_and_a_text_of_the_small_family_are_in_claim_alone() -> None:
    seen = [m for split in ("train", "select") for m in DEPTH_SMALL.members(split)]  # type: ignore[arg-type]
    claim = DEPTH_SMALL.drawn_claim("1" * 64)
    assert {m.kind for m in claim} - {m.kind for m in seen} == {"gpt"}  # type: ignore[union-attr]
    assert {m.data for m in claim} - {m.data for m in seen} == {"sums"}


@pytest.mark.parametrize("digest", ["0", "7", "f"])
def test_every_member_can_be_played_at_every_depth_also_by_halving(digest: str) -> None:
    members = [*DEPTH_SMALL.members("train"), *DEPTH_SMALL.drawn_claim(digest * 64)]
    least = {}
    for member in members:
        task = member.task()
        config = task.config
        assert config.budget is not None
        deep = deepened(task, 4).host_flops
        share = deep * (3 * config.batch_size + config.validation_samples)
        steps = 2 / 3 * float(config.budget) / HORIZON / share
        least[member.label] = steps
    assert min(least.values()) >= 1.0, min(least.items(), key=lambda pair: pair[1])
