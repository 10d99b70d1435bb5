from __future__ import annotations

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
    before = resident_bytes()
    held = torch.ones(32 * 2**20 // 4)
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before > 16 * 2**20
    assert held.numel()


def test_a_cpu_has_no_share_of_a_device() -> None:
    assert gpu_memory_share(torch.device("cpu")) is None
