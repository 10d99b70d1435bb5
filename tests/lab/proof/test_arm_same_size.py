from __future__ import annotations

from statistics import median

from esper.lab.proof.arm import Standing, compare, grow_once, of_size, tune
from esper.lab.tasks import get_task


def test_the_static_network_has_the_nearest_size_and_the_same_form() -> None:
    task = get_task("digits")
    for wanted in (task.host_parameters, 1_500, 4_000):
        found = of_size(task, wanted)
        assert abs(found.host_parameters - wanted) <= 0.12 * wanted
        assert len(found.slot_paths) == len(task.slot_paths)
    assert of_size(task, task.host_parameters).config.host_options == task.config.host_options


def test_a_rate_is_chosen_by_the_median_validation_score() -> None:
    task = get_task("digits", horizon=3, samples_per_step=256)
    found = tune(task, (0, 1, 2), task.load(), rates=(1e-6, 0.1))
    assert [each.task.config.learning_rate for each in found] == [0.1, 1e-6]
    assert median(found[0].val) > median(found[1].val)
    assert [len(each.test) for each in found] == [3, 3]


def test_arms_are_paired_by_seed() -> None:
    task = get_task("digits", horizon=2, samples_per_step=256)
    data = task.load()
    grown = [grow_once(task, data, seed, "wait") for seed in (3, 4)]
    twin, same, static = compare(task, grown, data)
    # What only waits is its own twin.
    assert twin.test == same.test
    assert same.gain(twin) == 0.0
    assert len(static.test) == 2
    assert static.parameters == twin.parameters == task.host_parameters


def test_a_gain_is_the_median_of_pairs_and_not_a_difference_of_medians() -> None:
    one, other = (Standing("", scores, 1, 1) for scores in ([1.0, 5.0, 9.0], [0.0, 9.0, 5.0]))
    assert one.gain(other) == 1.0
    assert one.lead(other) == 0.0
