"""The settings of `esper grow`, as in `config.yaml`, and the `GrowRequest` made from them."""

from __future__ import annotations

import dataclasses
import importlib
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from esper.growth.batches import first_batch, outputs_of, refuse_meta
from esper.growth.config import DEFAULT_CONTROLLER, GrowthConfig
from esper.growth.criterion import predictions, refuse_labels
from esper.growth.depth.rules import DeepenConfig
from esper.growth.request import AUTO, STARTED_BY, GrowRequest
from esper.growth.run import GrowthLoop
from esper.kasmina.costs import as_options
from esper.kasmina.lifecycle import GardenConfig
from esper.kasmina.slots.placement import DeclaredAxes, SlotNames, matches
from esper.lab.tasks import get_task, make_data, open_data
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.splits import Split
from esper.lab.tasks.task import Task
from esper.leyline.config import Config, option
from esper.leyline.controller import Controller
from esper.leyline.errors import CheckpointError, ConfigError, UsageError, instead, reason_of
from esper.leyline.slots import USUAL_AXES
from esper.nissa.folder import (
    GROWING,
    SETTINGS,
    TRAINING,
    Checkpoints,
    RunFolder,
    resume_command,
)
from esper.tamiyo.controllers.policy_file import controller_fingerprint
from esper.utils.process import choose_device, find_module, is_file_name
from esper.utils.randomness import seeded
from esper.utils.settings import change_settings

# ---- Requests to grow a model on the data of a task or a file


class TrainingBatches:
    """The training batches of an epoch; they depend on the seed and the epoch's number alone."""

    def __init__(self, data: TaskData, batch_size: int, seed: int) -> None:
        """Prepare epochs of `samples_per_step` samples."""
        self._data = data
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self._batch_size

    def __len__(self) -> int:
        return -(-self._data.samples_per_step // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._data.order(self._seed, self._epoch)
        crops = self._data.crops(self._seed, self._epoch)
        for start in range(0, len(order), self._batch_size):
            part = slice(start, start + self._batch_size)
            yield self._data.batch("train", order[part], None if crops is None else crops[part])

    def calibration_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the whole training set, always in the same order, in batches of about equal size.

        An epoch of `samples_per_step` may lack samples and repeat others.
        """
        size = self._data.size("train")
        whole = dataclasses.replace(self._data, samples_per_step=size)
        order, crops = whole.order(self._seed, 1), whole.crops(self._seed, 1)
        count = -(-size // self._batch_size)
        for number in range(count):
            # Equal sizes, as a last batch of one sample would have no variance.
            part = slice(number * size // count, (number + 1) * size // count)
            yield whole.batch("train", order[part], None if crops is None else crops[part])


class FixedBatches:
    """The same samples in the same order each time."""

    def __init__(
        self, data: TaskData, split: Split, *, subset: bool = False, batch_size: int = 256
    ) -> None:
        """Use a whole split, or the fixed validation subset that is scored after every epoch."""
        self._indices = data.subset if subset else data.indices(split)
        self._data = data
        self._split: Split = split
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self._indices.split(self._batch_size):
            yield self._data.batch(self._split, indices)


def data_request(
    model: nn.Module,
    slots: SlotNames,
    data: TaskData,
    *,
    config: GrowthConfig,
    **more: Any,
) -> GrowRequest:
    """Return the reproducible and resumable request to grow a model on a task's data.

    Args:
        model: the model.
        slots: where it may grow.
        data: the data; its device is that of the run.
        config: settings of training and growth.
        more: other parts of the request.
    """
    facts = config.gardener.with_task_facts(
        train_samples=data.size("train"), samples_per_epoch=data.samples_per_step
    )
    val = FixedBatches(data, "val", subset=True)
    if data.objective == "classification":
        refuse_meta(model)
        scores = predictions(outputs_of(model.to(data.device), first_batch(val)[0]))
        refuse_labels(scores, torch.arange(data.num_classes or 1))
    return GrowRequest(
        model=model,
        slots=slots,
        train=TrainingBatches(data, config.training.batch_size, config.seed),
        val=val,
        test=FixedBatches(data, "test"),
        loss=data.objective,
        config=config.replace(gardener=facts),
        device=data.device,
        **more,
    )


def task_run(
    task: Task,
    data: TaskData,
    *,
    config: GrowthConfig,
    controller: str | Controller = DEFAULT_CONTROLLER,
) -> GrowthLoop:
    """Return the run that grows a task's host on its data, without a folder."""
    request = data_request(
        task.build_host(config.seed),
        task.slot_paths,
        data,
        config=config,
        axes=USUAL_AXES[task.topology],
        controller=controller,
        name=task.name,
    )
    return GrowthLoop(request)


def task_config(task: Task, **changes: Any) -> GrowthConfig:
    """Return the growth settings of a task, with some changed; the twin is on by default."""
    settings = task.config
    base = GrowthConfig(
        epochs=settings.horizon, budget=settings.budget, twin=True, training=settings.training
    )
    gardener = base.gardener.replace(
        param_budget=settings.param_budget,
        chance_loss=settings.baseline_loss,
        num_classes=settings.num_classes or 0,
    )
    limits = as_options(task.param_limit, task.flop_limit, task.host_flops)
    chosen = {"gardener": gardener, "garden": base.garden.limited(**limits), **changes}
    return base.replace(**chosen)


@dataclass(frozen=True, kw_only=True)
class GrowSettings(Config):
    """Settings of one `esper grow`."""

    task: str | None = option(None, "Task to grow; empty when a model is given.")
    model: str | None = option(None, "MODULE:FACTORY or FILE.py:FACTORY of the model to grow.")
    slots: tuple[str, ...] = option(
        (), "Submodules whose output may grow; if empty, those of the task or model, else found."
    )
    axes: str | None = option(
        None, "Axes of activations at slots, one name or A=BTC,B=TBC; found out if empty."
    )
    data: str | None = option(None, "File or folder of the data.")
    controller: str = option(DEFAULT_CONTROLLER, "Who decides what grows.")
    device: Literal["cpu", "cuda"] = option("cpu", "Where it runs.")
    growth: GrowthConfig = option(GrowthConfig, "How the network is trained and grown.")

    def __post_init__(self) -> None:
        """Check rules that span several fields."""
        super().__post_init__()
        if (self.task is None) == (self.model is None):
            raise UsageError("give either --task T or --model MODULE:FACTORY with --data PATH")
        if self.model is not None and self.data is None:
            raise UsageError("--model needs --data PATH: the file or folder it is trained on")
        if self.growth.deepen is not None and self.controller == DEFAULT_CONTROLLER:
            # No seeds grow, so no controller is needed.
            object.__setattr__(self, "controller", "wait")

    def load(self) -> TaskData:
        """Return the data."""
        choose_device(self.device)
        if self.task is not None:
            return get_task(self.task).load(self.data, device=self.device)
        assert self.data is not None
        return make_data(open_data(self.data), device=self.device)

    def request(self, *, renewed: Collection[str] = ()) -> GrowRequest:
        """Load the data, build the network, and return the request to grow it.

        Args:
            renewed: settings that were given again, so that their files may have changed.
        """
        data = self.load()
        seed = self.growth.seed
        axes = parse_declared(self.axes)
        if self.task is not None:
            task = get_task(self.task)
            model, name = task.build_host(seed), task.name
            slots: SlotNames = task.slot_paths
            if self.slots == (AUTO,):
                slots = AUTO
            elif self.slots:
                slots = task_slots(task, model, self.slots)
            elif not self.axes:
                axes = USUAL_AXES[task.topology]
        else:
            assert self.model is not None
            model, name = build_model(self.model, seed), model_name(self.model)
            slots = model_slots(model, self.slots)
        if self.growth.deepen is not None:
            slots, axes = self.slots or AUTO, parse_declared(self.axes)
        return data_request(
            model,
            slots,
            data,
            config=self.growth,
            axes=axes,
            controller=self.controller,
            name=name,
            settings=self.to_mapping(),
            renewed=renewed,
            contents={
                "data": data.splits.fingerprint(),
                "controller": controller_fingerprint(self.controller),
            },
        )


def request_again(
    path: str | Path, changes: Mapping[str, Any], *, model: str | None = None
) -> GrowRequest:
    """Return the request to continue what `esper grow` started.

    Args:
        path: the run folder.
        changes: changed settings, by dotted key.
        model: MODULE:FACTORY, for a run of a user's own model; a folder alone runs no code.

    Raises:
        UsageError: It is not such a run, or the model differs.
        CheckpointError: Its settings cannot be read.
    """
    folder = RunFolder(path)
    settings = read_settings(folder)
    _refuse_code(settings, folder.path, model)
    return change_settings(settings, changes).request(renewed=frozenset(changes))


def _refuse_code(settings: GrowSettings, run: Path, model: str | None) -> None:
    """Raise if only the run folder, which may come from others, names the code of a model.

    Args:
        settings: settings in the folder.
        run: the folder.
        model: MODULE:FACTORY given by the user.
    """
    if settings.model is not None and model is None:
        raise UsageError(
            f"{run} names the model {settings.model!r}, whose code would run; confirm it to "
            f"continue: {resume_command(run, GROWING, model=settings.model)}"
        )
    if model is not None and model != settings.model:
        named = "no model of its own" if settings.model is None else f"the model {settings.model!r}"
        raise UsageError(f"{run} was started with {named}, not with {model!r}; leave out --model")


def read_settings(folder: RunFolder) -> GrowSettings:
    """Return the settings of the run in a folder."""
    settings = folder.read_run_config()
    if STARTED_BY in settings:
        raise UsageError(
            f"{folder.path} was started by a Python program, which has the model; continue it "
            f"there: {settings[STARTED_BY]}(model, ..., out={str(folder.path)!r}, resume=True)"
        )
    if "ppo" in settings:
        again = resume_command(folder.path, TRAINING)
        raise UsageError(f"{folder.path} is a training run; continue it with: {again}")
    try:
        return GrowSettings.from_mapping(settings)
    except ConfigError as error:
        Checkpoints(folder.path, GROWING).refuse_other_format()
        raise CheckpointError(f"{folder.path / SETTINGS}: {error}") from None


def growth_of(task: str | None, deepen: DeepenConfig | None = None) -> GrowthConfig:
    """Return the default growth settings; the twin is on, except with `deepen`.

    With `deepen` the limits of a task do not apply: they are for seeds.
    """
    if deepen is not None:
        growth = GrowthConfig() if task is None else task_config(get_task(task), budget=None)
        return growth.replace(twin=False, garden=GardenConfig(), deepen=deepen)
    return GrowthConfig(twin=True) if task is None else task_config(get_task(task))


def model_name(spec: str) -> str:
    """Return the name of a model, without the folder of its file."""
    module, separator, factory = spec.rpartition(":")
    return f"{Path(module).stem if is_file_name(module) else module}{separator}{factory}"


def build_model(spec: str, seed: int) -> nn.Module:
    """Import MODULE:FACTORY, from the current folder too, or FILE.py:FACTORY, and call it."""
    module_name, separator, factory_name = spec.rpartition(":")
    if not separator or not module_name or not factory_name:
        raise UsageError(f"--model must look like MODULE:FACTORY or FILE.py:FACTORY, got {spec!r}")
    try:
        found = find_module(module_name)
    except UsageError as error:
        raise UsageError(f"--model {spec}: {error}") from None
    try:
        module = importlib.import_module(found)
    except ModuleNotFoundError as error:
        is_itself = error.name is not None and f"{found}.".startswith(f"{error.name}.")
        advice = "install what it needs"
        if is_itself:
            advice = "run from the folder that holds it, or name its file: FILE.py:FACTORY"
        raise UsageError(f"cannot import {module_name!r}: {error}; {advice}") from None
    except Exception as error:
        raise UsageError(f"cannot import {module_name!r}: {_explain(error)}") from error
    factory = vars(module).get(factory_name)
    if not callable(factory):
        known = [name for name, item in vars(module).items() if callable(item)]
        told = instead(factory_name, known, "it has:")
        raise UsageError(f"{module_name!r} has no callable {factory_name!r}{told}")
    try:
        with seeded(seed, "host"):
            model = factory()
    except Exception as error:
        raise UsageError(
            f"{spec} failed: {_explain(error)}; it is called without arguments"
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{spec} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _explain(error: Exception) -> str:
    """Return what a user's own code raised, and where, in one line."""
    reason = f"{type(error).__name__}: {reason_of(error)}"
    if isinstance(error, SyntaxError):  # its text names the place
        return reason if error.filename is None else f"{reason} in {error.filename}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    inside = last.filename == __file__ or last.filename.startswith("<")
    return reason if inside else f"{reason} ({last.filename}, line {last.lineno})"


def task_slots(task: Task, model: nn.Module, chosen: tuple[str, ...]) -> dict[str, str]:
    """Return the chosen slots of a task, given as its slot ids or as submodules."""
    own = task.slot_paths
    submodules = dict(model.named_modules())
    for slot in chosen:
        known = slot in own or any(name and matches(name, slot) for name in submodules)
        if not known:
            told = instead(slot, own, "name a submodule of its host, or one of its slots:")
            raise UsageError(f"task {task.name!r} has no slot {slot!r}{told}")
    return {
        path if "*" in slot else slot: path
        for slot in chosen
        for path in ([own[slot]] if slot in own else [n for n in submodules if matches(n, slot)])
    }


def parse_declared(text: str | None) -> DeclaredAxes | None:
    """Parse --axes: one name for all slots, or A=BTC,B=TBC."""
    if not text:
        return None
    if "=" not in text:
        return text.strip()
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and equals and axes.strip() for name, equals, axes in pairs):
        raise UsageError(f"--axes must be one name, or look like A=BTC,B=TBC, got {text!r}")
    return {name.strip(): axes.strip() for name, _, axes in pairs}


def model_slots(model: nn.Module, chosen: tuple[str, ...]) -> SlotNames:
    """Return the slots named on the command line, those the model names itself, or 'auto'."""
    own: Any = vars(model).get("slot_paths")
    if not chosen and isinstance(own, Mapping) and own:
        return dict(own)
    return chosen if chosen and chosen != (AUTO,) else AUTO
