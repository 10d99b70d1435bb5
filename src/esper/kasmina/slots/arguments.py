"""How a batch of the user's becomes the arguments of a model.

A batch is a pair, a tuple of several inputs and targets, or a dict with labels (Hugging Face).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from esper.leyline.errors import UsageError

LABELS = ("labels", "label", "targets", "target", "y")
"""Names under which a dict may hold its targets."""


def label_of(batch: Any) -> str | None:
    """Return the name of the targets in a batch that is a dict; None for other batches."""
    if not isinstance(batch, Mapping):
        return None
    found = [name for name in LABELS if name in batch]
    if len(found) != 1:
        has = ", ".join(map(str, batch)) or "nothing"
        raise UsageError(
            f"a batch that is a dict needs exactly one of {', '.join(LABELS)}, but has {has}; "
            "rename its targets, or give (inputs, targets) pairs"
        )
    return found[0]


def read_batch(batch: Any, *, keeps_label: bool = False) -> tuple[Any, Any]:
    """Return (inputs, targets); with `keeps_label` the inputs keep the targets too."""
    label = label_of(batch)
    if label is not None:
        kept = {key: value for key, value in batch.items() if keeps_label or key != label}
        return kept, batch[label]
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UsageError(
            "batches must be (inputs, targets) pairs, (input, ..., targets) tuples, or dicts with "
            f"labels, got a {type(batch).__name__}{size}"
        )
    *inputs, targets = batch
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets


def only_argument(model: nn.Module) -> str | None:
    """Return the name of the parameter of a model's forward that has exactly one, else None."""
    try:
        found = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return None
    is_plain = len(found) == 1 and found[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    is_plain = is_plain or (len(found) == 1 and found[0].kind is inspect.Parameter.POSITIONAL_ONLY)
    return found[0].name if is_plain else None


def whole_dict(inputs: Any, argument: str | None) -> Any:
    """Return a dict of inputs as the one argument of a model, where it cannot be keywords.

    Args:
        inputs: what the model is called with.
        argument: the only parameter of the model; None if it has several.
    """
    is_whole = argument is not None and isinstance(inputs, Mapping) and argument not in inputs
    return (inputs,) if is_whole else inputs


def example_inputs(model: nn.Module, example: Any) -> Any:
    """Return the inputs in an example: a dict is given whole to a model with one parameter."""
    return whole_dict(example, only_argument(model)) if isinstance(example, Mapping) else example
