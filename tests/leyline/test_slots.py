import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import UsageError
from esper.leyline.slots import SlotConfig, parse_slot_id, slot_id


def test_default_has_the_three_slots_of_the_documents() -> None:
    config = SlotConfig.default()
    assert config.slot_ids == ("r0c0", "r0c1", "r0c2")
    assert config.num_slots == 3


def test_of_counts_columns_of_row_zero() -> None:
    assert SlotConfig.of(5).slot_ids == ("r0c0", "r0c1", "r0c2", "r0c3", "r0c4")


def test_index_follows_the_order_given() -> None:
    config = SlotConfig(("r1c0", "layer.2", "r0c0"))
    assert [config.index(name) for name in config.slot_ids] == [0, 1, 2]


def test_unknown_slot_suggests_the_nearest_and_keeps_the_order() -> None:
    config = SlotConfig(("layer2", "layer1"))
    with pytest.raises(UsageError) as caught:
        config.index("layer11")
    assert str(caught.value) == (
        "unknown slot 'layer11', did you mean 'layer1'? known: layer2, layer1"
    )


@pytest.mark.parametrize("count", [0, -1])
def test_no_slots_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="at least one slot"):
        SlotConfig.of(count)


def test_repeated_ids_are_refused() -> None:
    with pytest.raises(UsageError, match="must differ, got a, b, a"):
        SlotConfig(("a", "b", "a"))


def test_a_text_is_no_list_of_ids() -> None:
    with pytest.raises(UsageError, match="got the text 'abc'"):
        SlotConfig("abc")  # type: ignore[arg-type]


def test_a_list_becomes_a_tuple_so_that_the_config_can_be_a_key() -> None:
    config = SlotConfig(["a", "b"])  # type: ignore[arg-type]
    assert config == SlotConfig(("a", "b"))
    assert hash(config) == hash(SlotConfig(("a", "b")))


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_ids_parse_back(row: int, column: int) -> None:
    assert parse_slot_id(slot_id(row, column)) == (row, column)


@pytest.mark.parametrize("name", ["", "early", "r0", "c0r0", "r0c0 ", " r0c0", "r-1c0", "r0c0\n"])
def test_bad_ids_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="must look like 'r0c2'"):
        parse_slot_id(name)
