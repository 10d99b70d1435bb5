"""What is recorded beside the terms and never paid.

The first five names are columns of `decisions`; the others are for the tables of rounds and
episodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.simic.rewards.memory import follow_seeds
from esper.simic.rewards.terms.attribution import (
    ransomware_penalty,
    regress_discount,
    timing_discount,
)
from esper.simic.rewards.view import StepView


def describe_attribution(view: StepView) -> Mapping[str, Tensor]:
    """Return the guards of the attribution: of several live seeds, the most suspicious one's."""
    worth, improvement = view.contribution, view.improvement
    grew = view.live & (improvement > view.config.ransomware.min_improvement)
    penalty = view.once(ransomware_penalty) * view.once(timing_discount)
    return {
        "regress_discount": _extreme(view.live, view.once(regress_discount), -1),
        "timing_discount": _extreme(view.live, view.once(timing_discount), -1),
        "ransomware_penalty": view.mean_over_live(penalty),
        "attribution_ratio": _extreme(grew & ~worth.isnan(), worth / improvement, 1),
    }


def share_of_shaping(terms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the potentials' share of the absolute terms, where there are potentials."""
    if "pbrs" not in terms:
        return {}
    whole = torch.stack(list(terms.values())).abs().sum(0)
    share = terms["pbrs"].abs() / whole
    return {"shaped_reward_ratio": torch.where(whole > 0, share, 0.0)}


def describe_seeds(view: StepView) -> Mapping[str, Tensor]:
    """Return the row's counts after the step, and live seeds that look like ransomware."""
    config, story = view.config.ransomware, view.once(follow_seeds)
    hostage = view.live & (view.contribution > config.hostage_contribution)
    hostage &= view.improvement < config.hostage_improvement
    counts = {
        "seeds_germinated": story["germinated"],
        "seeds_fossilized": story["fossilized"],
        "seeds_contributing": story["fossil_contributes"].sum(1),
        "seeds_pruned": story["removed"],
        "ransomware_seeds": hostage.sum(1),
    }
    return {name: count.float() for name, count in counts.items()}


def _extreme(mask: Tensor, values: Tensor, sign: int) -> Tensor:
    """Return [R]: the greatest (sign 1) or least (sign -1) value under the mask, NaN without."""
    bounded = torch.where(mask, sign * values, -torch.inf).amax(1)
    return torch.where(mask.any(1), sign * bounded, torch.nan)
