from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from esper.leyline.errors import ConfigError
from esper.utils.settings import parse_document, read_document

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)

HOSTILE = {
    "flow": "a: [1, 2",
    "tab": "a:\n\t- b",
    "unknown tag": "!!python/object/apply:os.system [echo]",
    "empty integer": "!!int ''",
    "empty float": "!!float ''",
    "no boolean": "!!bool perhaps",
    "no date": "!!timestamp soon",
    "impossible date": "2024-99-99",
    "date": "2024-01-02",
    "binary": "!!binary aGVsbG8=",
    "broken binary": "!!binary '=' ",
    "set": "!!set {a, b}",
    "pairs": "!!pairs [a, b]",
    "list as key": "? [a]\n: b",
    "thousands of digits": "9" * 5000,
    "hexadecimal": "0x" + "f" * 5000,
    "beyond 64 bits": str(2**63),
    "deep list": "[" * 3000,
    "deep, closed": "[" * 200 + "]" * 200,
    "deep mapping": "{a: " * 3000,
    "bomb": BOMB,
    "itself": "&a [*a]",
    "itself as a value": "a: &a {b: *a}",
    "undefined alias": "*nothing",
    "two documents": "a: 1\n---\nb: 2",
    "control character": "a: \x01",
    "merge with a number": "<<: 3",
    "half a surrogate": "\ud800",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_whatever_a_text_holds_is_one_line(text: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        parse_document(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.process_time() - started < 5


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "{", str(2**70), "[1,]"])
def test_json_has_the_same_border(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_document(text, "json")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", None),
        ("0.1", 0.1),
        ("[a, 1, null, true]", ["a", 1, None, True]),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
        (str(2**63 - 1), 2**63 - 1),
        ("1: one", {1: "one"}),
        # Names of choices, as YAML 1.2 has it; 1.1 would make truth values of them.
        ("[off, on, yes, no]", ["off", "on", "yes", "no"]),
    ],
)
def test_what_people_write_is_read(text: str, data: object) -> None:
    assert parse_document(text) == data


def test_a_file_is_read_by_its_ending(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: [1]")
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_document(tmp_path / "a.yaml") == read_document(tmp_path / "a.json") == {"a": [1]}


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(OSError, match=r"pipe|folder|No such file"):
            read_document(path)
    with pytest.raises(OSError, match=r"null (byte|character)"):
        read_document(tmp_path / "a\0b")
    with pytest.raises(OSError, match="name too long"):
        read_document(tmp_path / ("x" * 5000))


def test_a_file_of_the_wrong_kind_or_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"not UTF-8 text: .* at byte 3"):
        read_document(tmp_path / "latin")
    (tmp_path / "large").write_bytes(b"x" * (2**18 + 1))
    with pytest.raises(ConfigError, match="larger than 256 KiB"):
        read_document(tmp_path / "large")
