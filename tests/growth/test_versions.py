from __future__ import annotations

import torch

from esper._version import __version__
from esper.growth.versions import software_versions


def test_the_versions_that_matter_are_named() -> None:
    found = software_versions()
    assert found["esper"] == __version__
    assert found["torch"] == torch.__version__
    assert {"python", "numpy", "platform"} <= set(found)
    assert all(found.values())
