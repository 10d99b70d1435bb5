"""Reads a finished network, saved by Esper, PyTorch or Hugging Face, to grow it further.

Learning rates rise again from 0 in the first steps (`Rewarm`), because a full rate would harm a
network that has reached the end of its schedule.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from esper.growth.depth.gardener import (
    describe_misfit,
    holds_seeds,
    network_folder,
    read_weights,
)
from esper.growth.depth.rules import DeepenConfig
from esper.kasmina.garden import load_garden
from esper.kasmina.saving import read_garden
from esper.leyline.errors import CheckpointError, UsageError, needing, reason_of
from esper.utils.manifest import MANIFEST_FILE

REWARM = 0.05
"""Default share of a run over which learning rates rise when it starts from a checkpoint."""

_HUGGING_FACE = "config.json"
_PEFT = "adapter_config.json"

# ---- Reading networks


def open_checkpoint(
    model: nn.Module | str | Path, checkpoint: str | Path | None, deepen: DeepenConfig | None
) -> tuple[nn.Module, DeepenConfig | None]:
    """Return the network to grow, with the weights of a checkpoint, and how to deepen it.

    Args:
        model: the network; or the checkpoint itself, if that describes the network.
        checkpoint: file or folder of the weights; None if `model` is the checkpoint.
        deepen: how to deepen the network; then the checkpoint has as many blocks as are awake at
            first, and the model has all.

    Raises:
        UsageError: It cannot be read, needs a model, or does not fit the one given.
    """
    network = None if isinstance(model, str | os.PathLike) else model
    if network is None and checkpoint is not None:
        raise UsageError("model and checkpoint= are both paths; give the model as an nn.Module")
    source = model if network is None else checkpoint
    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"checkpoint= takes a file or a folder, got {type(source).__name__}")
    path = Path(source)
    if not os.path.exists(path):
        raise UsageError(
            f"there is no checkpoint {path}; give a folder of save_pretrained, of grown.save or of "
            "a run, or a file of model.state_dict()"
        )
    if deepen is not None and deepen.weights is not None:
        raise UsageError("deepen already names weights; leave out checkpoint= or those")
    if os.path.isfile(path / _PEFT):
        raise UsageError(
            f"{path} holds a PEFT adapter, not a network; give the merged model: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload()"
        )
    if os.path.isfile(path / _HUGGING_FACE):
        return _from_pretrained(path, network, deepen)
    if network is None:
        raise UsageError(
            f"{path} holds weights but no architecture; write "
            f"esper.grow(model, checkpoint={str(path)!r}) with a model that fits"
        )
    if deepen is not None:
        return network, deepen.replace(weights=str(path))
    return _load_into(network, path), None


def _load_into(model: nn.Module, path: Path) -> nn.Module:
    """Return a model with the weights, and the seeds, of a file or folder."""
    if os.path.isdir(path):
        place = network_folder(path)
        if not os.path.isfile(place / MANIFEST_FILE):
            raise UsageError(
                f"{path} is no checkpoint that Esper can read; give a folder of save_pretrained, "
                "of grown.save or of a run, or a file of model.state_dict()"
            )
        if holds_seeds(read_garden(place)[0]):
            is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
            try:
                # Seeds become part of the network, so that more can grow in it.
                baked = load_garden(place, model=model).bake()
            except CheckpointError as error:
                raise UsageError(f"{reason_of(error)}; give a model of that architecture") from None
            return baked.requires_grad_(False) if is_frozen else baked
    _fill(model, read_weights(str(path)), path)
    return model


def _fill(model: nn.Module, weights: Mapping[str, Any], path: Path) -> None:
    """Load weights into a model, or raise with how they differ from its own."""
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        why = describe_misfit(weights, model)
        raise UsageError(f"the weights of {path} do not fit the model: {why}") from None


def _from_pretrained(
    path: Path, model: nn.Module | None, deepen: DeepenConfig | None
) -> tuple[nn.Module, DeepenConfig | None]:
    """Load a folder of `save_pretrained`, into a model of the same class if one is given."""
    kind: Any = type(model) if hasattr(model, "from_pretrained") else _class_of(path)
    try:
        finished = kind.from_pretrained(path, local_files_only=True)
    except Exception as error:
        # A damaged file raises whatever its bytes happen to lead to.
        raise UsageError(
            f"{path} cannot be loaded as a {kind.__name__}: {reason_of(error)[:300]}; write it "
            "again by model.save_pretrained, or give the class that was saved"
        ) from None
    if deepen is None:
        if model is None:
            loaded: nn.Module = finished
            return loaded, None
        _fill(model, finished.state_dict(), path)
        return model, None
    whole = _deeper(kind, finished.config, deepen, path) if model is None else model
    return whole, deepen.replace(weights=dict(finished.state_dict()))


def _class_of(path: Path) -> type[nn.Module]:
    """Return the class of the network in a folder of Hugging Face."""
    with needing(f"{path}, written by Hugging Face,", "transformers"):
        library = importlib.import_module("transformers")
    try:
        config = json.loads((path / _HUGGING_FACE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path / _HUGGING_FACE} is damaged ({reason_of(error)}); write it again by "
            "model.save_pretrained"
        ) from None
    names = config.get("architectures") if isinstance(config, Mapping) else None
    kind = getattr(library, str(names[0]), None) if names else None
    if kind is None:
        raise UsageError(
            f"{path / _HUGGING_FACE} names no architecture of transformers; write "
            f"esper.grow(model, checkpoint={str(path)!r})"
        )
    found: type[nn.Module] = kind
    return found


def _deeper(kind: Any, config: Any, deepen: DeepenConfig, path: Path) -> nn.Module:
    """Return a network with the configuration of a finished one, but deeper.

    It has the most blocks that `at` names, or twice as many as the finished one.
    """
    before = getattr(config, "num_hidden_layers", None)
    if not isinstance(before, int):
        raise UsageError(
            f"the configuration in {path} has no num_hidden_layers; build the deeper model and "
            f"write esper.grow(model, checkpoint={str(path)!r}, deepen=...)"
        )
    wanted = [blocks for _, blocks in deepen.at or () if isinstance(blocks, int)]
    most = max(wanted, default=2 * before)
    if most <= before:
        raise UsageError(
            f"{path} has {before} blocks, and deepen wakes {most} at most; name more than it has, "
            f"as in deepen={{'at': {{0.2: {2 * before}}}}}"
        )
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = most
    layers = getattr(config, "layer_types", None)
    if layers:
        # The pattern of layer types continues.
        deeper.layer_types = [layers[n % before] for n in range(deeper.num_hidden_layers)]
    built: nn.Module = kind(deeper)
    return built


# ---- Warming up again


class Rewarm:
    """Scales learning rates up from 0 over the first steps of a run.

    Schedules do not see it: a rate is lowered only while the optimizer steps.

    Args:
        steps: length of the warm-up in optimizer steps.
        per_epoch: optimizer steps of an epoch.
    """

    def __init__(self, steps: int, per_epoch: int) -> None:
        """Start at step 0, without an optimizer."""
        self.steps = steps
        self._per_epoch = per_epoch
        self._step = 0
        self._entered: dict[int, list[list[Any]]] = {}
        """Rates of an optimizer before each of its nested steps, the outermost first."""
        self._handles: list[RemovableHandle] = []

    @classmethod
    def of(cls, rewarm: int | float, train: Any, epochs: int) -> Rewarm:
        """Return the warm-up of `GrowthConfig.rewarm` for a run of this length."""
        if not isinstance(train, Sized):
            raise UsageError(
                "rewarm needs the number of steps in an epoch, but train has no length; give train "
                "as a list or a DataLoader, or write rewarm=0"
            )
        share = isinstance(rewarm, float)
        whole = epochs * len(train)
        if rewarm > whole:
            raise UsageError(
                f"rewarm={rewarm} steps are more than the {whole} of the run; write a share of it, "
                "such as rewarm=0.05"
            )
        return cls(max(1, round(rewarm * whole if share else rewarm)), len(train))

    @property
    def factor(self) -> float:
        """Factor of the learning rate in the next step."""
        return min(1.0, (self._step + 1) / (self.steps + 1))

    def at(self, epoch: int, batch: int) -> None:
        """Set the step to a batch (from 0) of an epoch (from 1)."""
        self._step = (epoch - 1) * self._per_epoch + batch

    def warm(self, optimizer: Optimizer) -> None:
        """Scale the rates of an optimizer until `release`."""
        self._handles.append(optimizer.register_step_pre_hook(self._lower))
        self._handles.append(optimizer.register_step_post_hook(self._restore))

    def release(self) -> None:
        """Remove the hooks from all optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _lower(self, optimizer: Optimizer, *_: Any) -> None:
        entered = self._entered.setdefault(id(optimizer), [])
        entered.append([group["lr"] for group in optimizer.param_groups])
        # The step of a subclass may call its base's step, which runs the same hooks.
        if len(entered) == 1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        rates = self._entered[id(optimizer)].pop()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
