"""The saved state of adapters: buffers of the model, and checks before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from esper.growth.adapters.placement import AdaptConfig
from esper.growth.adapters.weights import AdaptedWeight
from esper.leyline.errors import CheckpointError


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model that its `state_dict` has, such as running statistics.

    They may change in a frozen model too, and nothing tells beforehand which of them do.
    """
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def check_state(
    state: Mapping[str, Any],
    keys: Collection[str],
    weights: Mapping[str, AdaptedWeight],
    trainable: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    budget: int,
) -> None:
    """Refuse a state that is not one of adapters on these weights.

    Args:
        state: what is to be loaded.
        keys: its keys if it is one.
        weights: the adapted weights, by name.
        trainable: the parameters of the modules that train in full.
        buffers: the persistent buffers of the model.
        budget: most trainable parameters.
    """
    lacking = sorted(set(keys) - state.keys()) if isinstance(state, Mapping) else sorted(keys)
    if lacking and isinstance(state, Mapping) and {"pairs", "measured_steps"} <= state.keys():
        raise CheckpointError(
            f"this state of an Adapt was saved by another version of Esper ({lacking[0]!r} is "
            "missing); continue it with that version"
        )
    if lacking:
        raise CheckpointError(
            f"this is no state of an Adapt: {lacking[0]!r} is missing; give adapters.state_dict()"
        )
    advice = "make model and Adapt as they were made for it"
    for kind, names, there in (
        ("weights", state["pairs"], weights),
        ("trainable parameters", state["trainable"], trainable),
        ("buffers", state["buffers"], buffers),
    ):
        if names.keys() != there.keys():
            odd = sorted(names.keys() ^ there.keys())[0]
            raise CheckpointError(
                f"this state belongs to a model with other {kind}: only one of both has {odd}; "
                f"{advice}"
            )
    if state["budget"] != budget:
        raise CheckpointError(
            f"this state has a budget of {state['budget']:,}, but this Adapt of {budget:,}; write "
            f"Adapt(model, {state['budget']})"
        )
    for name, pair in state["pairs"].items():
        one = weights[name]
        for before, after in (("A", "B"), ("settled_A", "settled_B")):
            shapes = [list(pair[key].shape) for key in (before, after)]
            rank = shapes[0][0]
            if shapes != [[rank, one.columns], [one.rows, rank]]:
                raise CheckpointError(
                    f"the pair of {name} has the shapes {shapes[0]} and {shapes[1]}, and the "
                    f"weight is {one.rows}×{one.columns}; {advice}"
                )
    for saved, own in ((state["trainable"], trainable), (state["buffers"], buffers)):
        for name, values in saved.items():
            if values.shape != own[name].shape:
                raise CheckpointError(
                    f"{name} is {list(values.shape)} in this state and "
                    f"{list(own[name].shape)} in the model; {advice}"
                )


def check_settings(
    state: Mapping[str, Any], config: AdaptConfig, weights: Mapping[str, AdaptedWeight]
) -> None:
    """Refuse a state under whose settings adapters would go on differently.

    Once ranks have their last place, only the scale and the matrices that train matter.

    Args:
        state: what is to be loaded.
        config: settings of this Adapt.
        weights: the adapted weights, by name.
    """
    there, here = state["config"], config.to_mapping()
    is_final = state["is_placed"] and not state["pending"]
    # Steps at which ranks move are part of the state.
    matter = ["scale"] if is_final else [name for name in here if name != "moves"]
    for name in matter:
        if there[name] != here[name]:
            raise CheckpointError(
                f"this state was made with {name}={there[name]}, but this Adapt has "
                f"{name}={here[name]}; write config=esper.AdaptConfig({name}={there[name]})"
            )
    for name, trained in state["trained"].items():
        own = list(weights[name].pair.trained)
        if trained != own:
            raise CheckpointError(
                f"the pair of {name} trains {' and '.join(trained)} in this state, but "
                f"{' and '.join(own)} in this Adapt; give budget=, rank= and config= as they were, "
                f"with coverage={there['coverage']}"
            )
