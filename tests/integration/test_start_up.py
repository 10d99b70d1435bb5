"""Looking at finished runs must not wait for what only training needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import esper

SCRIPT = """
import sys
from esper.scripts.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "reading runs loaded PyTorch"
raise SystemExit(code)
"""


def test_listing_runs_does_not_load_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, "runs", "--root", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


READERS = """
import sys
import esper.leyline.actions, esper.leyline.records
import esper.nissa.reader, esper.nissa.listing, esper.nissa.monitors
import esper.nissa.report
assert "torch" not in sys.modules, "reading runs loaded PyTorch"
"""


def test_what_reads_a_run_back_does_not_load_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READERS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_when_it_is_asked_for() -> None:
    assert set(esper.__all__) <= set(dir(esper))
    for name in esper.__all__:
        assert getattr(esper, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'gorw'"):
        esper.gorw  # noqa: B018


GROWING = """
import sys, warnings
import torch
from torch import nn
import esper
warnings.simplefilter("ignore")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
batch = torch.randn(16, 8), torch.randint(0, 3, (16,))
esper.grow(model, train=[batch], val=[batch], epochs=2, controller="heuristic")
rooms = "esper.lab", "esper.simic", "esper.nissa.store", "esper.nissa.report"
print(*(name for name in sys.modules if name.startswith(rooms)))
"""


def test_growing_without_a_folder_loads_neither_store_nor_report_nor_laboratory() -> None:
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
