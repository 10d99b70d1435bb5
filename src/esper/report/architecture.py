"""The drawing of a network: its host as a chain, and beside it what lives in every slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from esper.leyline.records import ModuleRecord, SlotRecord
from esper.report.markup import (
    counted,
    element,
    format_count,
    format_number,
    label,
    rectangle,
    shortened,
    tooltip,
    visible,
)
from esper.report.page import FONT, MARGIN, ROW, STAGE_CLASSES, WIDTH, draw_svg

TITLE = "The network and what grew in it"
MOST_BOXES = 40
"""Boxes drawn at most; a longer chain keeps those with a slot and those at its ends."""

_LEFT = 350.0
_GAP = 46.0
_RIGHT = WIDTH - 2 * MARGIN - _LEFT - _GAP
_PAD = 10.0
_ARROW = 26.0
# What fits into a box at the largest size.
_CHARACTERS = int((_LEFT - 3 * _PAD) / (0.61 * FONT))
_SEED_CHARACTERS = int((_RIGHT - 3 * _PAD) / (0.61 * FONT))


@dataclass(frozen=True, slots=True)
class _Row:
    """One box of the chain; without a module it stands for some that are not drawn."""

    module: ModuleRecord | None
    parameters: int
    count: int = 1


def draw_architecture(
    modules: Sequence[ModuleRecord], slots: Sequence[SlotRecord], *, is_file: bool
) -> str:
    """Draw a host and its slots as an SVG, for a file of its own or for inside a page.

    Modules that have neither parameters nor a slot are left out.
    """
    living = {slot.name: slot for slot in slots}
    drawing: list[str] = []
    top = MARGIN
    rows = list(_rows(modules))
    for number, row in enumerate(rows):
        if number:
            drawing.append(_arrow(MARGIN + _LEFT / 2, top, _ARROW))
            top += _ARROW
        box, height = _draw_row(row, living, top)
        drawing.extend(box)
        top += height
    height = top + MARGIN
    description = describe_architecture(modules, slots)
    return draw_svg(TITLE, description, drawing, height, is_file=is_file)


def describe_architecture(modules: Sequence[ModuleRecord], slots: Sequence[SlotRecord]) -> str:
    """Say in words what the drawing shows."""
    living = {slot.name: slot for slot in slots}
    shown = [module for module in modules if module.parameters or module.slots]
    total = sum(module.parameters for module in modules)
    told = [
        f"A host of {counted(len(shown), 'module')} with {counted(total, 'parameter')}, "
        "in the order in which they are called."
    ]
    for module in shown[: 2 * MOST_BOXES]:
        words = f"{visible(module.path)}: {counted(module.parameters, 'parameter')}"
        for name in module.slots:
            words += f"; slot {visible(name)} {' '.join(_seed_words(living.get(name)))}"
        told.append(f"{words}.")
    return " ".join(told)


def _rows(modules: Sequence[ModuleRecord]) -> Iterator[_Row]:
    shown = [module for module in modules if module.parameters or module.slots]
    room = MOST_BOXES - sum(bool(module.slots) for module in shown)
    plain = [index for index, module in enumerate(shown) if not module.slots]
    half = max(room, 2) // 2
    kept = set(plain if len(plain) <= room else (*plain[:half], *plain[-half:]))
    hidden: list[ModuleRecord] = []
    with_slot = 0
    for index, module in enumerate(shown):
        with_slot += bool(module.slots)
        if index in kept or (module.slots and with_slot <= MOST_BOXES):
            if hidden:
                yield _merged(hidden)
                hidden = []
            yield _Row(module, module.parameters)
        else:
            hidden.append(module)
    if hidden:
        yield _merged(hidden)


def _merged(modules: Sequence[ModuleRecord]) -> _Row:
    return _Row(None, sum(module.parameters for module in modules), len(modules))


def _draw_row(row: _Row, living: Mapping[str, SlotRecord], top: float) -> tuple[list[str], float]:
    module = row.module
    if module is None:
        lines = [f"{counted(row.count, 'module')} not drawn", _parameters(row.parameters)]
        return _box(MARGIN, top, _LEFT, lines, class_="part hidden", told=", ".join(lines))
    lines = [
        shortened(module.path, _CHARACTERS),
        shortened(module.kind, _CHARACTERS),
        _parameters(module.parameters),
    ]
    told = f"{visible(module.path)}, {visible(module.kind)}, {_parameters(module.parameters)}"
    if module.shape is not None:
        size = " × ".join(map(str, module.shape)) or "1"
        told += f", puts out {size} for one sample"
        lines[1] = shortened(f"{module.kind} → {size}", _CHARACTERS)
    drawn: list[str] = []
    below = 0.0
    for name in module.slots:
        seed = living.get(name)
        words = _seed_words(seed)
        texts = [shortened(f"{name}: {words[0]}", _SEED_CHARACTERS), *words[1:]]
        stage = "" if seed is None else STAGE_CLASSES.get(seed.stage, "")
        x = MARGIN + _LEFT + _GAP
        box, height = _box(
            x,
            top + below,
            _RIGHT,
            texts,
            class_="part seed" if stage else "part empty",
            told=f"slot {visible(name)}, {', '.join(words)}",
            stripe=stage,
        )
        middle = top + below + min(height, 3 * ROW + 2 * _PAD) / 2
        drawn.append(element("line", class_="axis", x1=x - _GAP, x2=x, y1=middle, y2=middle))
        drawn.extend(box)
        below += height + _PAD
    host, height = _box(MARGIN, top, _LEFT, lines, class_="part", told=told, least=below - _PAD)
    return [*host, *drawn], height


def _seed_words(seed: SlotRecord | None) -> list[str]:
    stage = "" if seed is None else STAGE_CLASSES.get(seed.stage, "")
    if seed is None or not stage or seed.blueprint is None:
        return ["empty"]
    if stage == "cooldown":
        return ["empty", "cooling down"]
    alpha = format_number(seed.alpha, decimals=2)
    return [visible(seed.blueprint), f"{stage}, alpha {alpha}", _parameters(seed.parameters)]


def _parameters(count: int) -> str:
    return f"{format_count(count)} parameter{'' if count == 1 else 's'}"


def _box(
    x: float,
    y: float,
    width: float,
    lines: Sequence[str],
    *,
    class_: str,
    told: str,
    stripe: str = "",
    least: float = 0.0,
) -> tuple[list[str], float]:
    height = max(len(lines) * ROW + 2 * _PAD, least)
    inside = [tooltip(told), rectangle(class_, x, y, width, height, rx=6)]
    if stripe:
        inside.append(rectangle(stripe, x + 4, y + 6, 6, height - 12, rx=2))
    for number, line in enumerate(lines):
        kind, middle = "muted number" if number else "strong", y + _PAD + (number + 0.5) * ROW
        inside.append(label(line, class_=kind, x=x + 1.8 * _PAD, y=middle, dy=".35em"))
    return [element("g", *inside)], height


def _arrow(x: float, y: float, length: float) -> str:
    end = y + length - 2
    return element("path", class_="arrow", d=f"M{x:.0f} {y + 2:.0f}V{end:.0f}m-5 -6l5 6l5 -6")
