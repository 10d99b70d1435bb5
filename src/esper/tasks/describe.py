"""What a task is, in plain data for tables and for other programs."""

from __future__ import annotations

from typing import Any

from esper.leyline.errors import DataError
from esper.tasks.registry import TASKS, get_task
from esper.tasks.task import DataPath


def describe_task(name: str, data_path: DataPath | None = None) -> dict[str, Any]:
    """Return sizes, slots, settings and whether the data is there; no data is read.

    Args:
        name: A registered task.
        data_path: Where to look for its data; None for the usual places.

    Returns:
        Plain numbers, strings, lists and dicts. `data` has `status` ("found" or "missing"),
        `where` (a folder, or "embedded") and, if missing, `problem`.
    """
    task = get_task(name)
    config = task.config
    data: dict[str, str | None]
    try:
        data = {"status": "found", "where": task.find(data_path), "problem": None}
    except DataError as error:
        data = {"status": "missing", "where": None, "problem": str(error)}
    return {
        "name": name,
        "summary": (TASKS.get(name).__doc__ or "").strip().splitlines()[0],
        "host": config.host,
        "host_options": config.host_options.to_mapping(),
        "topology": task.topology,
        "parameters": task.host_parameters,
        "slots": dict(task.slot_paths),
        "input_shape": list(config.input_shape),
        "num_classes": config.num_classes,
        "objective": config.objective,
        "score": task.score_kind,
        "samples_per_step": config.samples_per_step,
        "batch_size": config.batch_size,
        "horizon": config.horizon,
        "learning_rate": config.learning_rate,
        "param_budget": config.param_budget,
        "data": data,
    }
