from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from esper._version import __version__
from esper.leyline.errors import UsageError
from esper.utils.process import (
    available_bytes,
    choose_device,
    gpu_memory_share,
    grouped,
    keep_freed_memory,
    resident_bytes,
    software_versions,
    without_collections,
)

on_glibc = pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")

COUNT_FAULTS = """
import ctypes, resource, torch
from esper.utils.process import keep_freed_memory

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


@pytest.mark.parametrize("has_cuda", [False, True])
def test_auto_is_what_there_is(monkeypatch: pytest.MonkeyPatch, has_cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert choose_device("auto") == torch.device("cuda" if has_cuda else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UsageError, match="no CUDA device; use --device cpu"):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("cuda:1") == torch.device("cuda", 1)


def test_the_versions_that_matter_are_named() -> None:
    found = software_versions()
    assert found["esper"] == __version__
    assert found["torch"] == torch.__version__
    assert {"python", "numpy", "platform"} <= set(found)
    assert all(found.values())


def test_memory_grows_with_what_is_held() -> None:
    # In a process of its own: one that has freed memory before may hold more without growing.
    script = (
        "from esper.utils.process import resident_bytes\n"
        "before = resident_bytes()\n"
        "held = bytearray(b'x' * (32 * 2**20))\n"
        "print(resident_bytes() - before)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(said.stdout) > 16 * 2**20
    assert resident_bytes() is not None


def test_a_cpu_has_no_share_of_a_device() -> None:
    assert gpu_memory_share(torch.device("cpu")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much memory is free")
def test_free_memory_is_less_than_all_there_is() -> None:
    free = available_bytes()
    assert free is not None
    assert 2**20 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_values_and_keys_stay_in_the_order_in_which_they_come() -> None:
    pairs = [("late", 3), ("early", 1), ("late", 2)]
    assert list(grouped(pairs).items()) == [("late", [3, 2]), ("early", [1])]
    assert grouped([]) == {}
