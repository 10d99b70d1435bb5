from __future__ import annotations

import pytest
import torch

from esper.leyline.errors import UsageError
from esper.tasks.family import (
    FAMILIES,
    DigitsFamily,
    Family,
    FamilyConfig,
    make_family,
    register_family,
)


def test_a_member_depends_on_its_seed_alone() -> None:
    family = make_family("digits_family")
    (label, task), (other_label, other) = family.draw(3), make_family("digits_family").draw(3)
    assert label == other_label
    assert task.config == other.config
    assert len({family.draw(seed)[0] for seed in range(40)}) > 10


def test_members_differ_in_host_and_data() -> None:
    tasks = [make_family("digits_family").draw(seed)[1] for seed in range(40)]
    assert len({task.host_parameters for task in tasks}) > 3
    assert {len(task.slot_paths) for task in tasks} == {2, 3}
    assert {task.config.train_size for task in tasks} == {None, 600, 200}
    assert {task.config.label_noise for task in tasks} == {0.0, 0.1, 0.3}


def test_no_member_has_more_slots_than_the_family_says() -> None:
    family = make_family("digits_family")
    drawn = [family.draw(seed)[1] for seed in range(30)]
    assert max(len(task.slot_paths) for task in drawn) == family.max_slots == 3


def test_a_member_can_be_trained_on() -> None:
    family = DigitsFamily(FamilyConfig(widths=(4,), train_sizes=(200,), label_noises=(0.3,)))
    label, task = family.draw(0)
    assert label == "digits_family[width 4, depth 2, train 200, noise 0.3]" or "depth 3" in label
    data = task.load()
    assert data.size("train") == 200
    x, y = data.batch("train", torch.arange(4))
    loss, _ = task.objective(task.build_host(0)(x), y)
    assert loss.isfinite().all()
    clean = DigitsFamily(FamilyConfig(widths=(4,), train_sizes=(200,), label_noises=(0.0,)))
    wrong = data.targets["train"] != clean.draw(0)[1].load().targets["train"]
    assert int(wrong.sum()) == 60


def test_the_data_to_be_judged_on_is_never_noisy() -> None:
    noisy = DigitsFamily(FamilyConfig(label_noises=(0.3,))).draw(1)[1].load()
    clean = DigitsFamily(FamilyConfig(label_noises=(0.0,))).draw(1)[1].load()
    for split in ("val", "test"):
        assert torch.equal(noisy.targets[split], clean.targets[split])


def test_a_family_is_registered_by_name() -> None:
    assert {"digits_family", "cifar_family"} <= set(FAMILIES)
    with pytest.raises(UsageError, match="unknown task family 'digit_family'"):
        make_family("digit_family")
    with pytest.raises(UsageError, match="derives from Family"):
        register_family("odd")(object)  # type: ignore[type-var]
    bare = type("Bare", (Family,), {"member": lambda self, **_: None})
    with pytest.raises(UsageError, match="needs a class attribute defaults"):
        register_family("bare")(bare)
