"""Checks of what goes into and comes out of an observation, each with the place of the mistake.

What no observation could express (a stage that does not exist, a seed without a blueprint) is
refused always. On an accelerator that refusal is an assertion on the device, so that nothing waits
for it; `ESPER_DEBUG=1` makes it a sentence there too and adds the checks that cost a pass over
everything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import NUM_OPS
from esper.leyline.alpha import AlphaAlgorithm, AlphaMode
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage, parse_stage


def is_debugging() -> bool:
    """Return whether `ESPER_DEBUG=1` is set; it is read anew each time."""
    return os.environ.get("ESPER_DEBUG") == "1"


def must_not_wait(device: torch.device) -> bool:
    """Return whether a check there leaves its verdict to the device instead of reading it."""
    return device.type != "cpu" and not is_debugging()


def refuse_strangers(signals: Signals, *, expected: Any, found: Any) -> None:
    """Raise unless as many stages, blueprints and last ops were found as there must be.

    Both are counts, as numbers or as tensors without dimensions.
    """
    if must_not_wait(signals.stage.device):
        torch._assert_async(
            found == expected,
            "a stage, blueprint or op in the signals does not exist; ESPER_DEBUG=1 says where",
        )
    elif int(found) != int(expected):
        raise find_stranger(signals)


def find_stranger(signals: Signals) -> ValueError:
    """Return the error that names the first record no observation could express."""
    active = signals.occupied.cpu()
    stages, blueprints = signals.stage.cpu(), signals.blueprint.cpu()
    for row, slot in active.nonzero().tolist():
        where = f"row {row}, slot {slot}"
        stage, blueprint = int(stages[row, slot]), int(blueprints[row, slot])
        try:
            parse_stage(stage)
        except ValueError as error:
            return UsageError(f"{where}: {error}")
        if blueprint < 0:
            return UsageError(
                f"{where}: a seed in {SeedStage(stage).name} has the blueprint {blueprint}; "
                "a record needs a blueprint id of 0 or more"
            )
    for row, op in enumerate(signals.last_op.tolist()):
        if not 0 <= op < NUM_OPS:
            return UsageError(f"row {row}: last_op must be 0 to {NUM_OPS - 1}, got {op}")
    return UsageError("the signals hold a stage, blueprint or op that does not exist")


def refuse_unknown_stages(signals: Signals) -> None:
    """Raise where a record's stage does not exist."""
    exists = torch.zeros_like(signals.occupied)
    for stage in SeedStage:
        exists |= signals.stage == int(stage)
    fine = (exists | ~signals.occupied).all()
    if must_not_wait(fine.device):
        torch._assert_async(fine, "a stage in the signals does not exist; ESPER_DEBUG=1 says where")
    elif not bool(fine):
        raise find_stranger(signals)


def check_signals(signals: Signals) -> None:
    """Raise where a code does not exist, or two signals about one measurement disagree."""
    active = signals.occupied & signals.enabled
    for name, count in (("alpha_mode", len(AlphaMode)), ("algorithm", len(AlphaAlgorithm))):
        code: Tensor = getattr(signals, name)
        wrong = active & ((code < 0) | (code >= count))
        if bool(wrong.any()):
            row, slot = wrong.nonzero()[0].tolist()
            raise UsageError(
                f"row {row}, slot {slot}: {name} must be 0 to {count - 1}, "
                f"got {int(code[row, slot])}"
            )
    wrong = active & (signals.contribution.isnan() != (signals.counterfactual_age < 0))
    if bool(wrong.any()):
        row, slot = wrong.nonzero()[0].tolist()
        raise UsageError(
            f"row {row}, slot {slot}: the contribution is {float(signals.contribution[row, slot])}"
            f" but counterfactual_age is {int(signals.counterfactual_age[row, slot])}; "
            "a seed has both or neither"
        )


def check_finite(features: Tensor, names: Sequence[str]) -> None:
    """Raise where a feature is NaN or infinite."""
    wrong = ~torch.isfinite(features)
    if bool(wrong.any()):
        row, index = wrong.nonzero()[0].tolist()
        raise NonFiniteError(
            f"row {row}: feature {index} ({names[index]}) is {float(features[row, index])}; "
            "the signal behind it was not measured or has diverged"
        )
