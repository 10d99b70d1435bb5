from __future__ import annotations

import pytest

from benchmarks.pool import run_under


def capability(number: int) -> tuple[int, str]:
    import torch

    return number, torch.backends.cpu.get_cpu_capability()


def test_measurements_are_made_under_the_instruction_set_they_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run_under(["default"], capability, [3, 4], jobs=1)
    assert found == {"default": [(3, "DEFAULT"), (4, "DEFAULT")]}
    assert "instruction set default" in capsys.readouterr().err
