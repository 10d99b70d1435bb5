"""What every test runs under: a number of threads, fixed seeds, and no CPU path that may trap."""

from __future__ import annotations

import gc
import os

# Some CPUs advertise AMX but trap on its first instruction. oneDNN reads its limit once, when
# PyTorch is loaded, so this comes before that import.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import getpass
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from tests import trains

SEED = 20_240_229

# A shell has what it starts in the background ignore SIGINT, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One, as the command itself uses, unless `make test-portable` asks for another number.
THREADS = int(os.environ.setdefault("ESPER_THREADS", "1"))
torch.set_num_threads(THREADS)
# Processes that tests start compute with as many.
os.environ["OMP_NUM_THREADS"] = str(THREADS)

# Runs and checkpoints wait for the disk at every step, ten milliseconds where others use it too. So
# files of tests lie in memory where there is enough of it and programs may be started from there.
MEMORY = Path("/dev/shm")
if (
    os.access(MEMORY, os.W_OK)
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    and shutil.disk_usage(MEMORY).free > 2 * 2**30
):
    # What the compiler keeps is large, and stays from run to run.
    kept = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
    os.environ.setdefault("TMPDIR", str(MEMORY))
    # Pytest has asked for the place already.
    tempfile.tempdir = None


class TorchRandom:
    """Lets Hypothesis reset PyTorch's global numbers before every example, as it does others."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> Any:
        return torch.get_rng_state()

    def setstate(self, state: Any) -> None:
        torch.set_rng_state(state)


# Hypothesis keeps only a weak reference.
TORCH_RANDOM = TorchRandom()
hypothesis.register_random(TORCH_RANDOM)

# A shared machine is slow at times, so no example has a deadline. Continuous integration draws the
# same examples every time; on a desk they differ, and a failure prints how to repeat it.
hypothesis.settings.register_profile("desk", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same global numbers and threads, whatever ran before it."""
    torch.set_num_threads(THREADS)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def pytest_configure(config: pytest.Config) -> None:
    """Have every test watched for training."""
    config.pluginmanager.register(trains)


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of every later search for garbage: half a second each.

    What a test itself makes is searched as ever.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, however the tests were chosen."""
    if torch.cuda.is_available():
        return
    reason = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(reason)
