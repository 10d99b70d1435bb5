import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.config import Config, check_value, option
from esper.leyline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    rate: float = option(0.1, "How fast.", above=0.0, maximum=1.0)
    mode: Literal["slow", "fast"] = option("slow", "How.")


@dataclass(frozen=True, kw_only=True)
class Outer(Config):
    count: int = option(3, "How many.", minimum=1, maximum=10)
    name: str = option("x", "What it is called.")
    flag: bool = option(False, "Whether.")
    ratio: float = option(1.0, "Any number.")
    widths: tuple[int, ...] = option((8, 16), "Width of each block.", minimum=1)
    pair: tuple[int, float] = option((1, 2.0), "Two numbers.")
    limit: int | None = option(None, "At most this many.", minimum=0)
    level: Literal[0, 1, "auto"] = option("auto", "How much.")
    choice: Literal["red", "green"] | None = option(None, "A colour.")
    inner: Inner = option(Inner, "The rest.")
    extra: Inner | None = option(None, "More of it.")
    parts: tuple[Inner, ...] = option((), "Several.")
    either: int | str = option(1, "A number or a name.")


@dataclass(frozen=True, kw_only=True)
class Needy(Config):
    must: int = option(help="No default.")
    may: int = option(1, "A default.")


def refusal(**values: Any) -> str:
    """The line with which these values are refused, the same from code and from a file."""
    with pytest.raises(ConfigError) as by_code:
        Outer(**values)
    with pytest.raises(ConfigError) as by_mapping:
        Outer.from_mapping(values)
    assert str(by_code.value) == str(by_mapping.value)
    assert "\n" not in str(by_code.value)
    return str(by_code.value)


def test_defaults() -> None:
    config = Outer()
    assert config.inner == Inner()
    assert config.widths == (8, 16)
    assert config.limit is None


@pytest.mark.parametrize(
    ("values", "line"),
    [
        # Wrong types.
        ({"count": "3"}, "Outer.count must be a whole number, got '3'"),
        ({"count": 3.0}, "Outer.count must be a whole number, got 3.0"),
        ({"count": True}, "Outer.count must be a whole number, got True"),
        ({"count": None}, "Outer.count must be a whole number, got None"),
        ({"name": 3}, "Outer.name must be text, got 3"),
        ({"flag": 1}, "Outer.flag must be true or false, got 1"),
        ({"flag": "yes"}, "Outer.flag must be true or false, got 'yes'"),
        ({"ratio": "1.0"}, "Outer.ratio must be a number, got '1.0'"),
        ({"ratio": False}, "Outer.ratio must be a number, got False"),
        ({"limit": "many"}, "Outer.limit must be a whole number or nothing, got 'many'"),
        ({"limit": True}, "Outer.limit must be a whole number or nothing, got True"),
        ({"either": 1.5}, "Outer.either must be a whole number or text, got 1.5"),
        ({"either": None}, "Outer.either must be a whole number or text, got None"),
        ({"inner": 3}, "Outer.inner must be a mapping with the keys of Inner, got 3"),
        ({"inner": None}, "Outer.inner must be a mapping with the keys of Inner, got None"),
        # Out of range.
        ({"count": 0}, "Outer.count must be at least 1 and at most 10, got 0"),
        ({"count": 11}, "Outer.count must be at least 1 and at most 10, got 11"),
        ({"limit": -1}, "Outer.limit must be at least 0, got -1"),
        ({"inner": {"rate": 0}}, "Inner.rate must be above 0.0 and at most 1.0, got 0.0"),
        ({"inner": {"rate": 1.5}}, "Inner.rate must be above 0.0 and at most 1.0, got 1.5"),
        # Not finite.
        ({"ratio": math.nan}, "Outer.ratio must be finite, got nan"),
        ({"ratio": -math.inf}, "Outer.ratio must be finite, got -inf"),
        (
            {"inner": {"rate": math.nan}},
            "Inner.rate must be finite and above 0.0 and at most 1.0, got nan",
        ),
        ({"pair": (1, math.nan)}, "Outer.pair[1] must be finite, got nan"),
        # Lists.
        ({"widths": 8}, "Outer.widths must be a list, got 8"),
        ({"widths": "8"}, "Outer.widths must be a list, got '8'"),
        ({"widths": [8, "x"]}, "Outer.widths[1] must be a whole number, got 'x'"),
        ({"widths": [8, True]}, "Outer.widths[1] must be a whole number, got True"),
        ({"widths": [8, 0]}, "Outer.widths[1] must be at least 1, got 0"),
        ({"pair": [1]}, "Outer.pair must have 2 entries, got 1"),
        ({"pair": [1.5, 1.5]}, "Outer.pair[0] must be a whole number, got 1.5"),
        ({"parts": [{"rate": 2}]}, "Inner.rate must be above 0.0 and at most 1.0, got 2.0"),
        # Choices.
        (
            {"inner": {"mode": "fsat"}},
            "Inner.mode must be one of 'slow', 'fast', got 'fsat', did you mean 'fast'?",
        ),
        ({"inner": {"mode": 7}}, "Inner.mode must be one of 'slow', 'fast', got 7"),
        (
            {"choice": "gren"},
            "Outer.choice must be one of 'red', 'green', got 'gren', did you mean 'green'?",
        ),
        ({"level": True}, "Outer.level must be one of 0, 1, 'auto', got True"),
        ({"level": 1.0}, "Outer.level must be one of 0, 1, 'auto', got 1.0"),
        # Unknown keys, at any depth.
        (
            {"inner": {"rte": 1}},
            "Inner has no key 'rte', did you mean 'rate'? known: mode, rate",
        ),
        (
            {"extra": {"zzzzz": 1}},
            "Inner has no key 'zzzzz'; known: mode, rate",
        ),
    ],
)
def test_every_refusal_is_one_line_that_says_what_is_right(
    values: dict[str, Any], line: str
) -> None:
    assert refusal(**values).startswith(line)


@pytest.mark.parametrize("how", ["from_mapping", "replace"])
def test_unknown_key_suggests_the_nearest_and_lists_all(how: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Outer.from_mapping({"cuont": 2}) if how == "from_mapping" else Outer().replace(cuont=2)
    assert str(caught.value) == (
        "Outer has no key 'cuont', did you mean 'count'? known: choice, count, either, extra, "
        "flag, inner, level, limit, name, pair, parts, ratio, widths"
    )


def test_a_key_that_is_no_text_is_unknown() -> None:
    with pytest.raises(ConfigError, match="Outer has no key 3; known"):
        Outer.from_mapping({3: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("mapping", [None, 3, "count: 3", [("count", 3)]])
def test_only_a_mapping_can_be_read(mapping: Any) -> None:
    with pytest.raises(ConfigError, match="Outer must be a mapping"):
        Outer.from_mapping(mapping)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^Needy needs must$"):
        Needy.from_mapping({"may": 2})
    assert Needy.from_mapping({"must": 5}) == Needy(must=5)


def test_values_take_their_declared_type() -> None:
    config = Outer(ratio=2, widths=[1, 2], pair=[3, 4], extra={"rate": 1}, parts=[Inner(), {}])
    assert (config.ratio, type(config.ratio)) == (2.0, float)
    assert config.widths == (1, 2)
    assert config.pair == (3, 4.0)
    assert type(config.pair[1]) is float
    assert config.extra == Inner(rate=1.0)
    assert config.parts == (Inner(), Inner())


def test_a_number_too_large_for_a_float_is_refused() -> None:
    assert "must be a number" in refusal(ratio=10**400)


@pytest.mark.parametrize("bits", [64, 400, 20_000])
def test_a_number_beyond_64_bits_is_refused_without_writing_it_out(bits: int) -> None:
    """Neither PyTorch nor SQLite could take it, and Python would not even print it."""
    assert Needy(must=2**63 - 1).must == 2**63 - 1
    with pytest.raises(ConfigError, match=r"Needy.must must be a whole number of at most 64 bits"):
        Needy(must=2**bits)


def test_bounds_themselves_are_allowed() -> None:
    assert Outer(count=1).count == 1
    assert Outer(count=10).count == 10
    assert Inner(rate=1.0).rate == 1.0


@pytest.mark.parametrize("value", [1.5, 2.0, math.inf, math.nan, True, "2", None, 0])
def test_an_argument_is_checked_like_a_field(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tempo must be .*, got"):
        check_value("tempo", value, int, minimum=1)
    check_value("tempo", 3, int, minimum=1)


def test_replace_checks_and_leaves_the_original() -> None:
    config = Outer()
    assert config.replace(count=5) == Outer(count=5)
    assert config == Outer()
    with pytest.raises(ConfigError, match=r"Outer\.count must be at least 1"):
        config.replace(count=0)


def test_configs_are_frozen_and_can_be_keys() -> None:
    config = Outer()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.count = 5  # type: ignore[misc]
    assert {config: 1}[Outer()] == 1


def test_describe_gives_the_sentence_of_every_field() -> None:
    assert Inner.describe() == {"rate": "How fast.", "mode": "How."}


INNERS = st.builds(
    Inner,
    rate=st.floats(0.0, 1.0, exclude_min=True),
    mode=st.sampled_from(["slow", "fast"]),
)
WHOLE = st.integers(-(2**63) + 1, 2**63 - 1)
OUTERS = st.builds(
    Outer,
    count=st.integers(1, 10),
    name=st.text(),
    flag=st.booleans(),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    widths=st.lists(st.integers(1, 2**40)).map(tuple),
    pair=st.tuples(WHOLE, st.floats(allow_nan=False, allow_infinity=False)),
    limit=st.none() | st.integers(0, 10**12),
    level=st.sampled_from([0, 1, "auto"]),
    choice=st.none() | st.sampled_from(["red", "green"]),
    inner=INNERS,
    extra=st.none() | INNERS,
    parts=st.lists(INNERS, max_size=3).map(tuple),
    either=WHOLE | st.text(),
)


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(child) for key, child in value.items())
    if isinstance(value, list):
        return all(is_plain(child) for child in value)
    return type(value) in (str, int, float, bool, type(None))


@given(OUTERS)
def test_plain_data_reads_back_as_the_same_config(config: Outer) -> None:
    mapping = config.to_mapping()
    assert is_plain(mapping)
    assert Outer.from_mapping(mapping) == config
