"""Pins that were withdrawn are found, and minimums are what is declared."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.check_pins import Files, problem_of
from tools.minimum_pins import minimum_pins

PAGE = """<!DOCTYPE html><html><body>
<a href="x" data-yanked="broken">thing-1.4.0-py3-none-any.whl</a><br/>
<a href="x" data-yanked="broken">thing-1.4.0.tar.gz</a>
<a href="x">thing-1.4.1-cp311-cp311-linux.whl</a>
<a href="x" data-yanked="">thing-1.4.1.tar.gz</a>
<a href="x">thing-11.4.2.tar.gz</a>
</body></html>"""


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("thing==1.4.0", "thing==1.4.0 was withdrawn (broken); choose another version of thing"),
        ("thing==1.4", "thing==1.4 was withdrawn (broken); choose another version of thing"),
        ("thing==1.4.1", None),
        ("thing==1.4.2", "thing==1.4.2 is not on the index"),
    ],
)
def test_a_pin_is_judged_by_its_own_files(pin: str, said: str | None) -> None:
    assert problem_of(pin, Files(PAGE).found) == said


def test_minimums_are_those_that_are_declared() -> None:
    pins = minimum_pins("2.11.0")
    assert "torch==2.11.0" in pins
    assert "numpy==1.26" in pins
    assert all(pin.count("==") == 1 for pin in pins)


def test_setuptools_can_still_be_imported_afterwards() -> None:
    """PyTorch's compiler imports it, perhaps in the process of these tests."""
    code = "import tools.check_pins, setuptools"
    subprocess.run([sys.executable, "-c", code], check=True)
