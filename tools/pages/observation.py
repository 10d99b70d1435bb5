"""The two pages on observations: what a policy sees, number by number."""

from __future__ import annotations

from collections.abc import Sequence

from esper.leyline.slots import SlotConfig
from esper.tamiyo.policy.layout import (
    BASE_FEATURES,
    FEATURE_NAMES,
    FEEDBACK_FEATURES,
    NUM_PER_SLOT,
    SLOT_FEATURES,
    FeatureSpec,
    get_feature_size,
)
from esper.tamiyo.policy.ratios import FEATURE_SETS, FeatureSet

_INTRODUCTION = """\
# Observation V3

The inputs of a policy for one host at one decision: {size} numbers for three slots, and the
blueprint of every slot as an index (-1 for none), which the network embeds. `python -m tools.pages`
makes this page from `esper.tamiyo.policy.layout`.

`esper.tamiyo.policy.features.batch_obs_to_features(signals, slot_config, device)` returns both for
all rows of a `Signals`. With S slots an observation has {shared} + {per_slot} S numbers ({five} for
five). If a host has fewer slots than its policy, the missing ones look empty.

* Every number lies within its range, and so within -2 and 2; values beyond are clamped.
* Shares are relative to the enabled slots of the row. All features of an empty or disabled slot
  are 0.
* A slot in its cooldown has a record: `is_active` is 1 and its stage is shown, because it cannot be
  germinated yet.
* Histories are ordered from the oldest epoch to the newest; missing epochs are 0.
* `points(score)` is the score itself if it is an accuracy (0 to 100 points). A score below zero
  is a negative loss, and its points are 100 exp(score): for a cross-entropy, the geometric mean of
  the likelihoods of the targets. So these features keep their range and direction for tasks
  without an accuracy. Contributions and interactions stay in the unit of the score.
* A seed is *measured* after its first ablation. Interactions are those of the
  latest ablations; `upstream` and `downstream` follow the order of the slots.
* `ObservationNormalizer` standardises the features of kind *continuous* and leaves the others.

A seed's blueprint is embedded by the network, so a blueprint that was registered later needs no new
feature. A stage, blueprint or op that does not exist is an error, never a feature.
"""


_TRAVELLING = """\
# The travelling observation

The inputs of a policy with `layout: travelling` for one host at one decision. Every number has the
same meaning on every task: losses and errors are relative to guessing, changes to their own noise,
parameters and operations to the host's. Sizes (data, network, horizon, learning rate, classes) are
logarithms on a fixed scale. `python -m tools.pages` makes this page from
`esper.tamiyo.policy.layout`.

With S slots and B blueprints an observation has {host} + {slot} S + {pair} S B numbers, and
the blueprint of every slot as an index (-1 for none), of which the network uses the kind. All slots
have the same features and share weights, and so do all blueprints at slots. So a policy works with
any number of both.

* Every number lies within its range; values beyond are clamped.
* Unknown values are neutral, and a flag marks them if they could be mistaken for a measurement. An
  unknown loss of guessing counts as 1.
* `error` is the share of wrong answers relative to guessing; for a score that is a negative loss,
  it is the loss relative to guessing. *What is left to gain* is the distance to a perfect score, in
  the score's unit. *Noise* is the root mean square of the latest changes from epoch to epoch.
* All features of a missing or disabled slot are 0, and so are those of a blueprint that does not
  fit a slot. In an empty slot, all features about a seed are 0.
* `ObservationNormalizer` standardises the features of kind *continuous*, with statistics over all
  slots (and over all blueprints at slots), and leaves the others. Features of kind *size* have a
  fixed scale, because a size that never varies in one task would be noise in the next.
"""

_RATIOS = """\
# The observation of ratios

The inputs of a policy with `layout: ratios`: the features above that are ratios, shares or flags,
without any absolute size of host, data or run. It adds what is left of a
[budget of compute](how-to/grow-your-own.md#a-budget-of-compute), and by how much each seed would
raise the cost of a step of the present network. The table is made from
`esper.tamiyo.policy.ratios`.
"""


def render() -> str:
    """Return the whole page about Observation V3."""
    parts = [
        _INTRODUCTION.format(
            size=len(FEATURE_NAMES),
            shared=len(BASE_FEATURES) + len(FEEDBACK_FEATURES),
            per_slot=NUM_PER_SLOT,
            five=get_feature_size(SlotConfig.of(5)),
        ),
        _section("The host", BASE_FEATURES, 0),
        _section("The previous action", FEEDBACK_FEATURES, len(BASE_FEATURES)),
        _section(
            "Each slot",
            SLOT_FEATURES,
            0,
            "Indices count from the start of the slot, which is 31 + 30 i for slot i. The full name"
            "\nof a feature starts with the id of its slot, as in `r0c0.alpha`.",
        ),
        _index(),
    ]
    return "\n".join(parts)


def render_travelling() -> str:
    """Return the whole page about the travelling observation, and that of ratios below it."""
    own = FEATURE_SETS["travelling"]
    sizes = {"host": len(own.host), "slot": len(own.slot), "pair": len(own.pair)}
    return "\n".join(
        [_TRAVELLING.format(**sizes), *_sections(own), _RATIOS, *_sections(FEATURE_SETS["ratios"])]
    )


def _sections(own: FeatureSet) -> list[str]:
    return [
        _section("The host, its task and the previous action", own.host, 0),
        _section("Each slot", own.slot, 0, "Indices count from the start of the slot."),
        _section("Each blueprint at each slot", own.pair, 0, "Indices count from its start."),
    ]


def _section(title: str, specs: Sequence[FeatureSpec], start: int, note: str = "") -> str:
    lines = [f"## {title}", "", *([note, ""] if note else [])]
    lines += ["| index | name | formula | range | kind |", "|---|---|---|---|---|"]
    lines += [
        f"| {start + index} | `{spec.name}` | {spec.formula} | {_range(spec)} "
        f"| {spec.kind.replace('_', '-')} |"
        for index, spec in enumerate(specs)
    ]
    return "\n".join(lines) + "\n"


def _index() -> str:
    """Return every index of the default layout, three slots side by side."""
    shared = len(BASE_FEATURES) + len(FEEDBACK_FEATURES)
    slots = SlotConfig.default().slot_ids
    lines = [
        "## Indices of the three default slots",
        "",
        f"| feature | {' | '.join(slots)} |",
        f"|---|{'---|' * len(slots)}",
    ]
    for offset, spec in enumerate(SLOT_FEATURES):
        places = [shared + NUM_PER_SLOT * slot + offset for slot in range(len(slots))]
        assert all(FEATURE_NAMES[place].endswith(spec.name) for place in places)
        lines.append(f"| `{spec.name}` | {' | '.join(map(str, places))} |")
    return "\n".join(lines) + "\n"


def _range(spec: FeatureSpec) -> str:
    if spec.kind == "code":
        return "0, 0.5, 1"
    if spec.kind in ("flag", "one_hot"):
        return "0, 1"
    return f"{spec.low:g} to {spec.high:g}"
