"""The tables of `esper bench`: which columns a target shows, and how each value is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Column = tuple[str, str, Callable[[Any], str]]
"""Heading, the key of a result, and how its value is written."""

_CASE: tuple[Column, ...] = (
    ("task", "task", str),
    ("strategy", "strategy", str),
    ("rows", "rows", str),
    ("type", "precision", str),
)

RATES: tuple[Column, ...] = (
    *_CASE,
    ("ms per row", "row_ms", lambda value: f"{value:.1f}"),
    ("row epochs per s", "row_epochs_per_s", lambda value: f"{value:,.1f}"),
    ("images per s", "images_per_s", lambda value: f"{value:,.0f}"),
    ("ratio", "ratio", lambda value: "–" if value is None else f"{value:.2f}"),
)

PHASES: tuple[Column, ...] = (
    *_CASE,
    ("train s", "train_s", lambda value: f"{value:.3f}"),
    ("val s", "validate_s", lambda value: f"{value:.3f}"),
    ("other s", "other_s", lambda value: f"{value:.3f}"),
    ("GiB", "memory_gib", lambda value: "–" if value is None else f"{value:.1f}"),
    ("of mm", "matmul_share", lambda value: f"{100 * value:.1f}%"),
)

EXTRACTION: tuple[Column, ...] = (
    ("rows", "rows", lambda value: f"{value}"),
    ("slots", "slots", lambda value: f"{value}"),
    ("occupied", "occupied", lambda value: f"{100 * value:.0f}%"),
    ("us per row", "extraction_us", lambda value: f"{value:.2f}"),
    ("reference", "reference_us", lambda value: f"{value:.1f}"),
    ("ratio", "ratio", lambda value: f"{value:.1f}"),
)

_WORK = {
    "step": "step of a rollout",
    "plain_step": "step by get_action",
    "update": "forward + backward",
    "captured_step": "step, CUDA graph",
}

_COMPARED: tuple[Column, ...] = (
    ("ms", "esper_ms", lambda value: f"{value:.3f}"),
    ("reference ms", "reference_ms", lambda value: f"{value:.3f}"),
    ("ratio", "ratio", lambda value: f"{value:.2f}"),
    ("CPU ratio", "cpu_ratio", lambda value: f"{value:.2f}"),
    ("against", "reference", str),
)

POLICY: tuple[Column, ...] = (
    ("rows", "rows", lambda value: f"{value}"),
    ("work", "work", lambda value: _WORK[value]),
    *_COMPARED,
)

UPDATE: tuple[Column, ...] = (
    ("rows", "rows", lambda value: f"{value}"),
    ("minibatches", "minibatches", lambda value: f"{value}"),
    *_COMPARED,
)

ROUND: tuple[Column, ...] = (
    ("recipe", "recipe", str),
    ("rows", "rows", lambda value: f"{value}"),
    ("first s", "first_s", lambda value: f"{value:.1f}"),
    ("round s", "round_s", lambda value: f"{value:.2f}"),
    ("twins s", "twins_s", lambda value: f"{value:.2f}"),
    ("episodes s", "episodes_s", lambda value: f"{value:.2f}"),
    ("update s", "update_s", lambda value: f"{value:.3f}"),
    ("images per s", "images_per_s", lambda value: f"{value:,.0f}"),
)

FAMILY: tuple[Column, ...] = (
    ("host", "host", str),
    ("rows", "rows", lambda value: f"{value}"),
    ("ms a step", "step_ms", lambda value: f"{value:.0f}"),
    ("row epochs per s", "row_epochs_per_s", lambda value: f"{value:,.1f}"),
    ("captures", "captures", lambda value: f"{value}"),
    ("after the first round", "later_captures", lambda value: f"{value}"),
)
