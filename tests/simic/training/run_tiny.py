"""`python -m tests.simic.training.run_tiny [STRATEGY] RUN`: start the tiny run, or continue it.

A program of its own: worker processes import the tiny task, which a script's own classes are not
for them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from esper.leyline.errors import EsperError
from esper.simic.training.recorded import resume_training, start_training
from tests.simic.training.tiny import tiny_config


def main() -> None:
    """Start or continue the run in the folder that is named."""
    torch.set_num_threads(int(os.environ["ESPER_THREADS"]))
    strategy, folder = sys.argv[1:] if len(sys.argv) > 2 else ("sequential", sys.argv[1])
    config = tiny_config(checkpoint_seconds=0.01, strategy=strategy)
    try:
        if (Path(folder) / "config.yaml").exists():
            run = resume_training(folder, sinks=())
        else:
            run = start_training(folder, config, sinks=())
        with run:
            if run.carry_out():
                run.finish()
    except EsperError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
