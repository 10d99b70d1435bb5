from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from esper.leyline.process import keep_freed_memory, without_collections

on_glibc = pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")

COUNT_FAULTS = """
import ctypes, resource, torch
from esper.leyline.process import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20) for _ in range(10)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def least():
    return min(faults() for _ in range(6))

# What glibc starts with; it may move the border by itself later.
ctypes.CDLL(None).mallopt(-3, 2**17)
usual = least()
assert keep_freed_memory()
print(usual, least())
"""


@on_glibc
def test_freed_memory_is_used_again() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True
    )
    usual, kept = map(int, ran.stdout.split())
    assert kept < usual / 10


@on_glibc
def test_what_the_environment_says_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()


def test_nothing_is_collected_meanwhile_and_all_is_as_before_afterwards() -> None:
    assert gc.isenabled()
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), without_collections():
        _ = 1 / 0
    assert gc.isenabled()
