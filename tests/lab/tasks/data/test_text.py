"""Text as byte tokens: round trip, cutting, held-out files, damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from esper.lab.tasks.data import text
from esper.lab.tasks.data.text import (
    encode,
    find_stories,
    find_text,
    fold,
    read_sources,
    read_text,
)
from esper.leyline.errors import DataError


def decode(tokens: NDArray[np.uint8]) -> str:
    return tokens.tobytes().decode(errors="replace").replace("\0", "<|endoftext|>")


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(TEXT, max_size=4))
def test_round_trip(stories: list[str]) -> None:
    text = "<|endoftext|>".join(stories)
    tokens = encode(text)
    assert decode(tokens) == text
    assert tokens.dtype == np.uint8


def test_the_mark_is_one_token() -> None:
    assert encode("a<|endoftext|>b").tolist() == [97, 0, 98]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_sequences_do_not_overlap_and_keep_the_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefghijk")
    source = read_text((path,), context=3)
    assert [decode(row) for row in source.x] == ["abcd", "efgh"]
    assert source.num_classes == 256
    assert source.kind == "tokens"


def test_no_sequence_spans_two_files(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "aaaaaaa")
    write(tmp_path / "b.txt", "bbbbb")
    source = read_text(find_text(tmp_path), context=3)
    assert [decode(row) for row in source.x] == ["aaaa", "bbbb"]


def test_held_out_files_are_the_test_split(tmp_path: Path) -> None:
    write(tmp_path / "tinystories-train.txt", "aaaa")
    write(tmp_path / "tinystories-valid.txt", "bbbb")
    source = read_text(find_stories(tmp_path), context=3)
    assert source.x_test is not None
    assert [decode(row) for row in (source.x[0], source.x_test[0])] == ["aaaa", "bbbb"]
    alone = read_text((tmp_path / "tinystories-valid.txt",), context=3)
    assert alone.x_test is None


def test_a_limit_cuts_between_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "aé" * 20)
    for limit in range(8, 20):
        whole = read_text((path,), context=0, limit_bytes=limit).x[:, 0]
        assert "�" not in decode(whole)
        assert len(whole) >= limit - 2
    assert len(read_text((path,), context=0, limit_bytes=60).x) == 60


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfabcd")
    assert decode(read_text((path,), context=3).x[0]) == "abcd"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"abc\xff\xfedef" * 9, "is not UTF-8 text: invalid start byte at byte 3"),
        (b"abcde\xc3", "is not UTF-8 text: unexpected end of data at byte 5"),
        (b"ab\0cdefgh", "has a NUL character at position 2"),
        (b"abc", "shorter than one sequence of 5 bytes"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_text((path,), context=4)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_sources_of_python_need_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_sources(64)
    assert source.x.shape[1] == 65
    assert len(source.x) > 10_000
    assert "import " in decode(source.x[:200].reshape(-1))
    assert np.array_equal(read_sources(64).x, source.x)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="give any UTF-8 text by --data"):
        read_sources(64)


def test_a_folder_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.txt file"):
        find_text(tmp_path)


def test_stories_are_found_by_name_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.lab.tasks.data.text.data_roots", lambda: (tmp_path,))
    write(tmp_path / "notes.txt", "not a story")
    with pytest.raises(DataError, match="TinyStories was not found"):
        find_stories()
    own = write(tmp_path / "stories" / "once.txt", "upon a time")
    assert find_stories() == (own,)
    named = write(tmp_path / "TinyStoriesV2-GPT4-train.txt", "upon a time")
    assert find_stories() == (named,)
    assert find_stories(tmp_path / "notes.txt") == (tmp_path / "notes.txt",)


def test_any_text_of_the_user_will_do(tmp_path: Path) -> None:
    path = write(tmp_path / "mine" / "novel.txt", "call me")
    assert find_stories(tmp_path / "mine") == (path,)


def test_missing_says_what_where_and_how(no_data: Path) -> None:
    with pytest.raises(DataError, match=r"tinystories\*\.txt.*roneneldan") as caught:
        find_stories()
    assert str(no_data) in str(caught.value)


def test_real_stories(real: Callable[[Callable[[], object]], None]) -> None:
    real(find_stories)
    source = read_text(find_stories(), context=64, limit_bytes=2**20)
    assert source.x.shape[1] == 65
    assert len(source.x) > 1000
    text = decode(source.x[:200].ravel())
    assert "�" not in text[:-4]
    assert " the " in text


def test_a_folded_text_has_64_tokens_and_no_case() -> None:
    folded = fold(np.arange(256, dtype=np.uint8))
    assert folded.dtype == np.uint8
    assert folded.max() == 63
    assert (fold(encode("abc XYZ~!?")) == fold(encode("ABC xyz^!?"))).all()
    printable = "".join(chr(code) for code in range(32, 96))
    assert fold(encode(printable)).tolist() == list(range(64))
    assert set(fold(encode("\n\té\x7f")).tolist()) == {63}, "all others are one token"
