"""Computed texts: what every line must hold, and that they never change."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from esper.lab.tasks.data.source import Array
from esper.lab.tasks.data.synthetic import (
    SYMBOLS,
    make_chain,
    make_copies,
    make_facts,
    make_links,
    make_mirrors,
    make_repeats,
    make_sorting,
    make_sums,
    make_table,
    read_computed,
)
from esper.lab.tasks.splits import SPLITS, make_splits

WITHOUT_REPETITION = [make_sums, make_links, make_mirrors, make_sorting, make_repeats, make_chain]
"""Texts of which no window occurs twice; facts are meant to."""


def lines(text: Array) -> list[str]:
    *found, rest = text.tobytes().decode("ascii").split("\n")
    assert not rest, "the text ends with a line"
    return found


def test_every_result_is_right() -> None:
    found = lines(make_sums(count=20_000))
    assert len(found) == 20_000
    kinds = Counter[str]()
    for line in found:
        a, kind, b, result = re.fullmatch(r"(\d{1,3})([+*])(\d{1,3})=(\d{1,4})", line).groups()  # type: ignore[union-attr]
        assert int(result) == (int(a) + int(b) if kind == "+" else int(a) * int(b)), line
        assert all(number == str(int(number)) for number in (a, b, result)), "no leading zeros"
        assert kind == "+" or int(b) in range(2, 10)
        kinds[kind] += 1
    assert min(kinds.values()) > 9_500
    # All sizes of numbers occur, 0 too.
    numbers = [int(line.split("+")[0]) for line in found if "+" in line]
    assert {0, 999} <= set(numbers)
    assert np.mean(numbers) == pytest.approx(499.5, abs=10)


def test_every_value_follows_from_the_definitions() -> None:
    found = lines(make_links(count=5_000))
    depths, orders = Counter[int](), set()
    for line in found:
        said, asked = line.split(":")
        values: dict[str, str] = {}
        steps: dict[str, int] = {}
        for definition in said.split(","):
            name, _, given = definition.partition("=")
            assert re.fullmatch("[a-z]", name)
            assert name not in values, "four different variables"
            # A name that was not defined before would raise here.
            values[name] = given if given.isdigit() else values[given]
            steps[name] = 0 if given.isdigit() else 1 + steps[given]
        answers = {answer[0]: answer[1:] for answer in asked.split(",")}
        assert answers == values, line
        assert len(values) == 4
        depths.update(steps.values())
        orders.add(tuple(list(values).index(name) for name in answers))
    assert set(depths) == {0, 1, 2, 3}
    links = sum(count for depth, count in depths.items() if depth)
    assert links / (3 * len(found)) == pytest.approx(0.7, abs=0.02)
    assert len(orders) == 24, "values are asked for in any order"


@pytest.mark.parametrize("level", [1, 2, 5])
def test_numbers_have_as_many_digits_as_the_level_says(level: int) -> None:
    found = lines(make_sums(level, 5_000))
    for line in found:
        a, kind, b, result = re.fullmatch(r"(\d+)([+*])(\d+)=(\d+)", line).groups()  # type: ignore[union-attr]
        assert int(result) == (int(a) + int(b) if kind == "+" else int(a) * int(b)), line
        assert max(len(a), len(b)) <= level
    assert max(len(line.split("+")[0]) for line in found if "+" in line) == level


@pytest.mark.parametrize("level", [2, 8])
def test_there_are_as_many_variables_as_the_level_says(level: int) -> None:
    for line in lines(make_links(level, 500)):
        said, asked = (part.split(",") for part in line.split(":"))
        values: dict[str, str] = {}
        for definition in said:
            name, given = definition.split("=")
            values[name] = given if given.isdigit() else values[given]
        assert {answer[0]: answer[1:] for answer in asked} == values
        assert len(values) == level


def test_a_key_always_has_the_same_value() -> None:
    values: dict[str, set[str]] = {}
    for line in lines(make_facts(50, 5_000)):
        key, value = re.fullmatch("([a-z]{4}):([a-z]{4})", line).groups()  # type: ignore[union-attr]
        values.setdefault(key, set()).add(value)
    assert len(values) == 50
    assert all(len(known) == 1 for known in values.values())
    assert len({line[:4] for line in lines(make_facts(2_000, 100_000))}) == 2_000


def test_mirrors_and_sorted_words() -> None:
    for line in lines(make_mirrors(7, 500)):
        word, mirror = re.fullmatch("([a-z]{7}):([a-z]{7})", line).groups()  # type: ignore[union-attr]
        assert mirror == word[::-1]
    for line in lines(make_sorting(4, 500)):
        word, ordered = re.fullmatch("([a-z]{4}):([a-z]{4})", line).groups()  # type: ignore[union-attr]
        assert ordered == "".join(sorted(word))


def test_copied_words_have_six_kinds_of_letters() -> None:
    words = []
    for line in lines(make_copies(5, 2_000)):
        word, copy = re.fullmatch("([a-f]{5}):([a-f]{5})", line).groups()  # type: ignore[union-attr]
        assert copy == word
        words.append(word)
    assert set("".join(words)) == set("abcdef")
    # 7,776 words are possible: 2,000 draws of them give about 1,763 different ones.
    assert 1_650 < len(set(words)) < 1_880


def test_a_line_repeats_few_words() -> None:
    found = lines(make_repeats(3, 2_000))
    counts = Counter(len(set(line.split(" "))) for line in found)
    assert set(counts) <= {1, 2, 3}
    assert counts[3] > 0.8 * len(found)
    assert all(re.fullmatch("[a-z]{5}( [a-z]{5}){7}", line) for line in found)


def bits(counts: Array) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def test_two_symbols_say_all_about_the_next_one_in_the_chain() -> None:
    text = make_chain()
    assert set(np.unique(text).tolist()) == set(SYMBOLS)
    place = np.zeros(256, np.int64)
    place[np.frombuffer(SYMBOLS, np.uint8)] = np.arange(len(SYMBOLS))
    walk, size = place[text], len(SYMBOLS)
    codes = walk.copy()
    joint = [bits(np.bincount(codes))]
    for _ in range(3):
        codes = codes[:-1] * size + walk[-len(codes) + 1 :]
        joint.append(bits(np.bincount(codes)))
    alone, one, two, three = np.diff([0.0, *joint])
    # About those of English text; the last one is lower by the bias of 4 million counts alone.
    assert [alone, one, two] == pytest.approx([4.40, 3.55, 2.53], abs=0.02)
    assert two - three < 0.02
    # The symbols in front are the more frequent ones.
    counts = np.bincount(walk, minlength=size)
    assert counts[:10].sum() > 2 * counts[-10:].sum()
    # Steps follow the table: within six deviations for the most frequent pairs.
    table = make_table()
    pairs = walk[:-2] * size + walk[1:-1]
    for pair in np.bincount(pairs).argsort()[-5:]:
        following = np.bincount(walk[2:][pairs == pair], minlength=size)
        expected = np.bincount(table[divmod(pair, size)], minlength=size) / 256
        spread = np.sqrt(following.sum() * expected * (1 - expected)) + 1
        # A walk's end is followed by the start of another: a few steps in a million.
        assert (np.abs(following - following.sum() * expected) < 6 * spread + 20).all()


@pytest.mark.parametrize(
    ("make", "size", "digest"),
    [
        (make_sums, 4_582_261, "eb9ff23d57b03222"),
        (make_links, 4_200_000, "43544a2e645c4cee"),
        (make_facts, 4_000_000, "9dbb343ab0128bc6"),
        (make_mirrors, 3_999_996, "ced9455dfb848b51"),
        (make_copies, 3_999_996, "7f9d75ea2d07e24a"),
        (make_sorting, 3_999_996, "f20e4b74ae5b05cf"),
        (make_repeats, 3_999_984, "be795998a8b5c560"),
        (make_chain, 4_194_304, "aa6ae77e3658a1bd"),
    ],
)
def test_golden_texts(make: Callable[[], Array], size: int, digest: str) -> None:
    text = make()
    assert text.dtype == np.uint8
    assert len(text) == size
    assert hashlib.blake2b(text.tobytes(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize("make", WITHOUT_REPETITION)
def test_splits_share_no_sequence(make: Callable[[], Array]) -> None:
    source = read_computed("some", make(), 64)
    assert source.x.shape[1] == 65
    assert source.num_classes == 256
    assert source.kind == "tokens"
    splits = make_splits(source)
    rows = [{row.tobytes() for row in splits.samples[split].numpy()} for split in SPLITS]
    assert sum(map(len, rows)) == len(set().union(*rows)) == len(source.x), "none occurs twice"
    assert len(rows[0]) > 20_000


def test_another_context_cuts_the_same_text() -> None:
    text = make_links()
    short, long = (read_computed("links", text, each).x.reshape(-1) for each in (27, 111))
    assert np.array_equal(short[: len(long)], long)
