from __future__ import annotations

import subprocess
import sys

import torch

from esper._version import __version__
from esper.nissa.machine import gpu_memory_share, resident_bytes, software_versions


def test_the_versions_that_matter_are_named() -> None:
    found = software_versions()
    assert found["esper"] == __version__
    assert found["torch"] == torch.__version__
    assert {"python", "numpy", "platform"} <= set(found)
    assert all(found.values())


def test_memory_grows_with_what_is_held() -> None:
    # In a process of its own: one that has freed memory before may hold more without growing.
    script = (
        "from esper.nissa.machine import resident_bytes\n"
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
