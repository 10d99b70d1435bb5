"""`python -m esper.scripts.document_observation`: writes docs/observation.md from the layout.

The page says what the code says: names, formulas and ranges come from `layout.py`. With `--check`
nothing is written, and the exit code is 1 where the page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from esper.leyline.files import atomic_write_text
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

PAGE = Path("docs/observation.md")

_INTRODUCTION = """\
# Observation V3

What a policy sees of one host at one decision: {size} numbers for three slots, and beside them the
blueprint of every slot as an index (-1 where there is none), which the network embeds. This page is
written by `python -m esper.scripts.document_observation`; the table behind it is
`esper.tamiyo.policy.layout`.

`esper.tamiyo.policy.features.batch_obs_to_features(signals, slot_config, device)` returns both for
all rows of a `Signals`. With S slots an observation has {shared} + {per_slot} S numbers ({five} for
five). A policy laid out for more slots than a host has sees the missing ones as empty.

* Every number lies within its range, and so within -2 and 2; values beyond are clamped.
* Shares divide by the slots that are enabled in the row. A slot that is empty or not enabled is 0
  throughout.
* A slot in its cooldown has a record: `is_active` is 1 and its stage is shown, because it cannot be
  germinated yet.
* Histories run from the oldest epoch to the newest and are 0 where there was no epoch yet.
* `points(score)` is the score itself where it is an accuracy (0 to 100 points). A score below zero
  is a negative loss, and its points are 100 exp(score): for a cross-entropy the mean likelihood of
  the truth. So these features keep their range and direction for tasks without an accuracy.
  Contributions and interactions stay in the unit of the score.
* A seed is *measured* once an ablation has told its contribution. Interactions are those of the
  latest ablations; `upstream` and `downstream` follow the order of the slots.
* `ObservationNormalizer` standardises the features of kind *continuous* and leaves the others.

A seed's blueprint is embedded by the network, so a blueprint that was registered later needs no new
feature. A stage, blueprint or op that does not exist is an error, never a feature.
"""


def render() -> str:
    """Return the whole page."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m esper.scripts.document_observation",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--out", type=Path, default=PAGE, help=f"the page (default {PAGE})")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    options = parser.parse_args(arguments)
    page = render()
    if options.check:
        is_current = options.out.is_file() and options.out.read_text(encoding="utf-8") == page
        print(f"{options.out} is {'current' if is_current else 'out of date'}")
        return 0 if is_current else 1
    atomic_write_text(options.out, page)
    print(f"wrote {options.out}")
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
