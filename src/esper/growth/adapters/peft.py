"""Reads and writes the files and configurations of PEFT, without importing it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from esper.growth.adapters.finding import find_weights, nearest_names
from esper.growth.adapters.state import persistent_buffers
from esper.growth.adapters.weights import AdaptedWeight
from esper.leyline.errors import UsageError

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."

_UNSUPPORTED: dict[str, Any] = {
    "lora_dropout": 0.0,
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "exclude_modules": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "layer_replication": None,
    "init_lora_weights": True,
    "use_qalora": False,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "velora_config": None,
    "monteclora_config": None,
    "use_bdlora": None,
}
"""Fields of a `LoraConfig` that Esper does not support, with the value that turns each off."""


def save_adapter(
    folder: str | os.PathLike[str],
    model: nn.Module,
    weights: Mapping[str, AdaptedWeight],
    *,
    scale: float,
    trainable: Sequence[str],
) -> None:
    """Write a folder that `PeftModel.from_pretrained(model, folder)` loads.

    Args:
        folder: created if missing.
        model: the adapted network.
        weights: with their pairs.
        scale: factor of B A.
        trainable: modules that were trained in full, saved whole.
    """
    outer = _path_of_base(model)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for one in weights.values():
        left, right = one.pair.factors()
        if not len(right):
            continue
        _check_known(one)
        left, right = left.detach(), right.detach()
        if one.pair.layout == "conv":
            right = right.view(len(right), *one.weight.shape[1:])
            left = left.view(*left.shape, *(1 for _ in one.weight.shape[2:]))
        path = one.path.removeprefix(outer)
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = right.contiguous().cpu()
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = left.contiguous().cpu()
        ranks[path] = len(right)
    if not ranks:
        raise UsageError(
            "no rank is placed yet, so there is no adapter to save; train, or call measure(), first"
        )
    own = tuple(f"{module}." for module in trainable)
    # PEFT wants tied parameters under each of their names; the file refuses shared memory.
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *persistent_buffers(model).items()):
        if name.startswith(own):
            inner = name.removeprefix(outer)
            tensors[f"{_PREFIX}{inner}"] = tensor.detach().contiguous().cpu().clone()
    rank = max(ranks.values())
    # PEFT matches the ends of names; it matches a name that starts with ^ as a whole.
    patterns = {f"^{re.escape(path)}": size for path, size in ranks.items()}
    base = getattr(getattr(model, "config", None), "_name_or_path", None)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": "|".join(re.escape(path) for path in ranks),
        "rank_pattern": patterns,
        "alpha_pattern": {pattern: scale * size for pattern, size in patterns.items()},
        "fan_in_fan_out": all(
            one.pair.layout == "transposed"
            for one in weights.values()
            if one.pair.factors()[1].numel()
        ),
        "modules_to_save": [name.removeprefix(outer) for name in trainable] or None,
        "inference_mode": True,
    }
    into = Path(folder)
    if into.exists() and not into.is_dir():
        raise UsageError(f"{into} is a file; give a folder, as in save_pretrained('adapter')")
    into.mkdir(parents=True, exist_ok=True)
    save_file(tensors, into / TENSORS, metadata={"format": "pt"})
    (into / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _path_of_base(model: nn.Module) -> str:
    """Return the path of the network that PEFT has wrapped, with a dot behind; empty without."""
    if type(model).__module__.partition(".")[0] != "peft":
        return ""
    base: Any = model.get_base_model()  # type: ignore[operator]
    return next(f"{path}." for path, module in model.named_modules() if module is base)


def _check_known(one: AdaptedWeight) -> None:
    """Refuse a weight whose adapter PEFT cannot load."""
    if one.tensor != "weight" or isinstance(one.module, nn.MultiheadAttention):
        kind = "the projections of nn.MultiheadAttention"
    elif getattr(one.module, "groups", 1) > 1:
        kind = "convolutions in groups"
    elif type(one.module).__name__.endswith("NonDynamicallyQuantizableLinear"):
        kind = "the projections of nn.MultiheadAttention"
    elif not one.path:
        kind = "a model that is one layer"
    else:
        return
    raise UsageError(
        f"PEFT cannot load an adapter of {one.name} ({kind}); call bake() and save the model, or "
        "leave the weight out of targets="
    )


def read_lora_config(model: nn.Module, config: Any) -> tuple[list[str], list[str], int, float]:
    """Return (targets, trainable modules, rank, scale) of a `LoraConfig`."""
    if str(getattr(config, "peft_type", "")).rpartition(".")[2] != "LORA":
        raise UsageError(f"from_peft takes a LoraConfig of PEFT, got a {type(config).__name__}")
    for key, usual in _UNSUPPORTED.items():
        value = getattr(config, key, usual)
        if value != usual and (value or usual):
            raise UsageError(f"Adapt does not support {key}={value!r} of a LoraConfig; remove it")
    trainable = _ends_with(model, config.modules_to_save or ())
    wanted = config.target_modules
    if not wanted:
        raise UsageError(
            "the LoraConfig names no layers; write target_modules=[...] or 'all-linear'"
        )
    names = [name.rpartition(".")[0] for name in find_weights(model, trainable).weights]
    if wanted == "all-linear":
        found = names
    elif isinstance(wanted, str):
        found = [name for name in names if re.fullmatch(wanted, name)]
    else:
        found = [n for n in names if any(f".{n}".endswith(f".{end}") for end in wanted)]
    if not found:
        raise UsageError(
            f"target_modules={wanted!r} matches no weight that can be adapted"
            f"{nearest_names(str(wanted), names)}"
        )
    rank = config.r
    scale = config.lora_alpha / (rank**0.5 if getattr(config, "use_rslora", False) else rank)
    return found, trainable, rank, scale


def _ends_with(model: nn.Module, ends: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    return [name for name in names if any(f".{name}".endswith(f".{end}") for end in ends)]
