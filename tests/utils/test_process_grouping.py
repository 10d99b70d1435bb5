from __future__ import annotations

from esper.utils.process import grouped


def test_values_and_keys_stay_in_the_order_in_which_they_come() -> None:
    pairs = [("late", 3), ("early", 1), ("late", 2)]
    assert list(grouped(pairs).items()) == [("late", [3, 2]), ("early", [1])]
    assert grouped([]) == {}
