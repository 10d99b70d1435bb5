"""`esper.train`: the command `esper train` as a function.

trained = esper.train("digits", out="runs/tamiyo", rounds=50)
esper.train(out="runs/tamiyo", resume=True, ppo={"clip": 0.1})
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError, UsageError, reason_of
from esper.nissa.folder import SETTINGS, RunFolder, Which
from esper.nissa.recorded import carry_out_or_raise
from esper.nissa.sinks import DEFAULT_SINKS, Sink
from esper.simic.training.config import TrainConfig, get_recipe
from esper.simic.training.progress import Progress
from esper.simic.training.recorded import (
    Trained,
    read_run_config,
    resume_training,
    start_training,
)
from esper.utils.process import choose_device
from esper.utils.settings import change_settings, read_document

DEFAULT_RECIPE = "digits"


def train(
    recipe: str | None = None,
    *,
    out: str | Path,
    rounds: int | None = None,
    device: str | None = None,
    resume: bool | Which = False,
    overwrite: bool = False,
    sinks: Iterable[str | Sink] = DEFAULT_SINKS,
    on_progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Trained:
    """Train a controller in a run folder, as `esper train` does.

    Args:
        recipe: a recipe's name, or the `config.yaml` of a run; 'digits' by default.
        out: the run folder.
        rounds: rounds of episodes and updates; the recipe's by default.
        device: 'auto', 'cpu' or 'cuda'; the recipe's by default.
        resume: continue the run in `out` exactly, or with the settings given here; start it if
            there is none. 'previous' continues from the checkpoint before the latest.
        overwrite: replace the run in `out`.
        sinks: where curves and alarms go besides the store: 'tensorboard', 'wandb' (with
            WANDB_MODE=offline without a server), a registered name, or an object.
        on_progress: called after every step; `progress.report` is set when a round is finished.
        settings: any other setting of `TrainConfig`; a mapping changes some of a nested one, as in
            `ppo={"clip": 0.1}`.

    Raises:
        UsageError: An argument is wrong; the message says what to write instead.
        KeyboardInterrupt: Ctrl-C; the step in progress was finished and saved.
    """
    if resume and overwrite:
        raise UsageError("resume continues a run and overwrite replaces it; give one of them")
    given = dict(settings)
    if rounds is not None:
        given["rounds"] = rounds
    if device is not None:
        given["device"] = choose_device(device).type
    # Absolute: a callback may change the current folder.
    out = Path(out).absolute()
    folder = RunFolder(out)
    if resume and folder.is_run:
        if recipe is not None:
            _refuse_other_recipe(folder, find_recipe(recipe))
        which: Which = "previous" if resume == "previous" else "latest"
        run = resume_training(out, settings=given, checkpoint=which, sinks=sinks)
    else:
        config = resolve_recipe(recipe or DEFAULT_RECIPE, given)
        run = start_training(
            out, config, overwrite=overwrite, command="esper.train(...)", sinks=sinks
        )
    with run:
        carry_out_or_raise(run, on_progress)
        return run.finish()


def resolve_recipe(recipe: str, settings: Mapping[str, Any]) -> TrainConfig:
    """Return a recipe with some settings changed and its device resolved."""
    config = change_settings(find_recipe(recipe), settings)
    if "tasks" in settings and "curriculum" not in settings:
        config = config.replace(curriculum=())
    return config.replace(device=choose_device(config.device).type)


def find_recipe(name: str) -> TrainConfig:
    """Return a recipe by its name, or read it from a file or a run folder."""
    path = Path(name)
    if os.path.isdir(path):
        path = path / SETTINGS
    if not os.path.isfile(path):
        return get_recipe(name)
    try:
        return TrainConfig.from_mapping(read_document(path))
    except (OSError, ConfigError) as error:
        reason = reason_of(error)
        raise UsageError(f"{path} is no recipe: {reason}") from None


def _refuse_other_recipe(folder: RunFolder, asked: TrainConfig) -> None:
    found = read_run_config(folder).recipe
    if asked.recipe != found:
        raise UsageError(
            f"{folder.path} was started from the recipe {found!r}, not {asked.recipe!r}; continue "
            "it with its own, or give another folder by out=..."
        )
