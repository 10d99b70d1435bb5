"""The picture in the README: one digits run, drawn by the program itself."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(arguments: list[str]) -> int:
    import torch

    from esper.lab.tasks import get_task
    from esper.lab.tasks.request import task_config, task_run

    parser = argparse.ArgumentParser(prog="python -m benchmarks picture", description=__doc__)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs/growth.svg"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = get_task("digits")
    config = task_config(task, seed=options.seed, keep="last")
    run = task_run(task, task.load(), config=config, controller="heuristic")
    for record in run.epochs():
        print(f"\repoch {record.epoch}/{run.config.epochs}", end="", flush=True)
    run.finish().plot(options.out)
    print(f"\n{options.out}")
    return 0
