"""Markup and texts of reports: escaped elements, printable text, formatted numbers."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from esper.leyline.records import DecisionRecord, SeedRecord

NOT_MEASURED = "not measured"
NOT_FINITE = "not finite"
MINUS = "−"

_LIMIT = 400
_HUGE = 1e6
# Direction marks could make a name look like another.
_DIRECTION_MARKS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
# Controls, surrogates, unassigned codes, line and paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cs", "Cn", "Zl", "Zp"})


def visible(value: object, *, limit: int = _LIMIT, keep: str = "") -> str:
    """Return a value as printable text of bounded length.

    Args:
        value: Anything; its `str` is shown.
        limit: Longer text is cut there, with its length appended.
        keep: Characters to keep although they do not print, such as newlines.
    """
    text = str(value)
    shown = text[:limit]
    # Fast path: everything that Python calls printable is shown here.
    if not shown.isprintable():
        shown = "".join(
            character if character in keep else _printable(character) for character in shown
        )
    if len(text) > limit:
        shown += f"… ({len(text):,} characters)"
    return shown


def escaped(value: object, *, limit: int = _LIMIT, keep: str = "") -> str:
    """Return a value as printable text, escaped for markup and quoted attributes."""
    return html.escape(visible(value, limit=limit, keep=keep), quote=True)


def shortened(value: object, length: int) -> str:
    """Return printable text of at most `length` characters, with an ellipsis if it was cut."""
    text = visible(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def width_in_em(text: str) -> float:
    """Return the approximate width of a text, in units of its font size."""
    # Upper bounds for common sans-serif fonts.
    return sum(
        1.05 if unicodedata.east_asian_width(character) in "WF" else 0.61 for character in text
    )


def text_width(text: str, font: float, *, is_strong: bool = False) -> float:
    """Return the width of a text in a font of this size, at most."""
    return width_in_em(text) * font * (1.12 if is_strong else 1.0)


@dataclass(frozen=True, slots=True)
class Label:
    """A text of a drawing and its place."""

    text: str
    x: float
    anchor: str = "start"
    """Which end of the text is at `x`: start or end."""
    row: int = 0
    wanted: float = 0.0
    """The `x` it was meant to have; a line leads there from a label that had to move."""


_LABEL_GAP = 10.0


def place_labels(
    labels: Sequence[Label],
    *,
    left: float,
    right: float,
    rows: int,
    font: float,
    taken: float = 0.0,
) -> tuple[list[Label], int]:
    """Give every label a row in which it overlaps no other.

    Args:
        labels: The labels, in order of precedence.
        left: No label begins before this.
        right: No label ends after this; one that would is aligned to this edge.
        rows: Number of rows; a label that fits in none of them is left out.
        font: Size of the texts.
        taken: Row 0 is occupied from `left` to here.

    Returns:
        The placed labels, and how many were left out.
    """
    occupied: list[list[tuple[float, float]]] = [[] for _ in range(rows)]
    if taken > left:
        occupied[0].append((left, taken))
    placed: list[Label] = []
    for one in labels:
        width = text_width(one.text, font)
        x, anchor = one.x, one.anchor
        if anchor == "start" and x + width > right:
            x, anchor = right, "end"
        elif anchor == "end" and x - width < left:
            x, anchor = left, "start"
        begin = x if anchor == "start" else x - width
        end = begin + width
        for row, spans in enumerate(occupied):
            if all(end + _LABEL_GAP <= low or begin >= high + _LABEL_GAP for low, high in spans):
                spans.append((begin, end))
                placed.append(Label(one.text, x, anchor, row, one.x))
                break
    return placed, len(labels) - len(placed)


def format_count(value: int) -> str:
    """Return a whole number with separated thousands."""
    return f"{value:,}".replace("-", MINUS)


def format_number(value: float | None, *, decimals: int | None = None, signed: bool = False) -> str:
    """Return a value with decimals that fit its size; None is "not measured"."""
    if value is None:
        return NOT_MEASURED
    if not math.isfinite(value):
        return NOT_FINITE
    sign = "+" if signed else ""
    if abs(value) >= _HUGE:
        text = f"{value:{sign}.4g}"
    else:
        text = f"{value:{sign}.{decimals_for(value) if decimals is None else decimals}f}"
    # A value that rounds to zero has no direction.
    if not text.strip("+-0."):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def format_measure(value: float | None) -> str:
    """Return a number of any size in few characters."""
    if value is None:
        return NOT_MEASURED
    if not math.isfinite(value):
        return NOT_FINITE
    if value and abs(value) < 1e-3:
        mantissa, _, power = f"{value:.1e}".partition("e")
        text = f"{mantissa}e{int(power)}"
    else:
        size = abs(value)
        decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
        # Adding 0.0 takes the sign off a negative zero.
        text = f"{value + 0.0:,.{decimals}f}"
    return text.replace("-", MINUS)


def format_share(part: float | None, whole: float = 1.0) -> str:
    """Return a share in percent, "not measured" without a whole."""
    if part is None or not whole:
        return NOT_MEASURED
    share = 100 * part / whole
    if not math.isfinite(share):
        return NOT_FINITE
    # Two decimals close to 0 and 100, none at 0 and 100.
    is_close = 0.005 < share < 1 or 99 < share < 99.995
    decimals = 2 if is_close else 0 if round(share, 2) in (0, 100) else 1
    return f"{share:.{decimals}f} %".replace("-", MINUS)


def decimals_for(value: float) -> int:
    """Return the number of decimals for a score of this size."""
    size = abs(value)
    if size == 0 or size >= 10:
        return 2
    return 3 if size >= 1 else 4


def format_contribution(value: float | None, error: float | None) -> str:
    """Return a contribution with its standard error, or "not measured"."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    if error is None or not math.isfinite(error):
        return f"{format_number(value, decimals=_fine_decimals(value), signed=True)} ± unknown"
    # The standard error decides how many decimals are significant.
    decimals = _fine_decimals(error or value)
    value_text = format_number(value, decimals=decimals, signed=True)
    return f"{value_text} ± {format_number(error, decimals=decimals)}"


def format_duration(seconds: float) -> str:
    """Return a duration in words."""
    if not math.isfinite(seconds) or seconds < 0:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def counted(number: int, noun: str) -> str:
    """Return "1 seed", "2 seeds", "no seeds"."""
    amount = "no" if number == 0 else format_count(number)
    return f"{amount} {noun}" if number == 1 else f"{amount} {noun}s"


def _printable(character: str) -> str:
    if character in _DIRECTION_MARKS or unicodedata.category(character) in _UNPRINTABLE:
        code = ord(character)
        if code < 0x100:
            return f"\\x{code:02x}"
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def _fine_decimals(value: float) -> int:
    size = abs(value)
    if size == 0 or size >= 0.1:
        return 2
    return 3 if size >= 0.01 else 4


Attribute = str | float | int


def element(name: str, /, *children: str, **attributes: Attribute) -> str:
    """Return one element; children are markup, attribute values are escaped.

    A trailing underscore in an attribute's name is dropped (`class_`), others become hyphens.
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    if not children:
        return f"<{name}{pairs}/>"
    return f"<{name}{pairs}>{''.join(children)}</{name}>"


def label(content: object, **attributes: Attribute) -> str:
    """Return a line of text."""
    return element("text", escaped(content), **attributes)


def rectangle(
    kind: str, x: float, y: float, width: float, height: float, *children: str, **more: Attribute
) -> str:
    """Return a rectangle with a CSS class; `children` are its content."""
    return element("rect", *children, class_=kind, x=x, y=y, width=width, height=height, **more)


def tooltip(content: object) -> str:
    """Return the tooltip of the enclosing element."""
    return element("title", escaped(content, limit=1000))


def number(value: float) -> str:
    """Return a coordinate, rounded to a hundredth."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map from values `low..high` to coordinates `start..end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most about `most` round values between `low` and `high`.

    Args:
        low: Start of the axis.
        high: End of the axis, above `low`.
        most: How many values fit.
        whole: Whether to use whole numbers only.
    """
    raw = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw))
    steps = [factor * magnitude for factor in (1, 2, 2.5, 5, 10)]
    if whole:
        steps = [step for step in steps if step.is_integer()] or [1.0]
    step = next((step for step in steps if step >= raw * 0.999), steps[-1])
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return the ticks as text, all with the same number of decimals."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if largest >= 1e6 or step < 1e-5:
        texts = [f"{tick:.4g}" for tick in ticks]
    else:
        decimals = next((some for some in range(7) if math.isclose(round(step, some), step)), 7)
        # Adding 0.0 takes the sign off a negative zero.
        texts = [f"{round(tick, decimals) + 0.0:.{decimals}f}" for tick in ticks]
    return [text.replace("-", MINUS) for text in texts]


def _value(value: Attribute) -> str:
    return html.escape(value, quote=True) if isinstance(value, str) else number(value)


def op_words(op: str) -> str:
    """Return an operation's name as words."""
    return visible(op).replace("_", " ").lower()


def argument_words(decision: DecisionRecord) -> str:
    """Return the arguments an operation used, or an empty text."""
    given = {
        "blueprint": decision.blueprint,
        "style": decision.style and decision.style.lower(),
        "tempo": decision.tempo,
        "alpha target": None
        if decision.alpha_target is None
        else format_number(decision.alpha_target, decimals=2),
        "speed": decision.alpha_speed,
        "curve": decision.alpha_curve and decision.alpha_curve.lower(),
    }
    return ", ".join(
        f"{name} {visible(value)}" for name, value in given.items() if value is not None
    )


def outcome_words(outcome: str) -> str:
    """Return an outcome as words."""
    return visible(outcome).replace("_", " ")


def describe_decision(epoch: int, decision: DecisionRecord) -> str:
    """Return a decision in one line."""
    where = "" if decision.slot is None else f" {visible(decision.slot)}"
    arguments = argument_words(decision)
    text = f"after epoch {epoch}: {op_words(decision.op)}{where}"
    text += f" ({arguments})" if arguments else ""
    text += f": {outcome_words(decision.outcome)}"
    return f"{text}, {visible(decision.reason)}" if decision.reason else text


def describe_seed(seed: SeedRecord) -> str:
    """Return the life of a seed in a sentence."""
    text = f"Slot {visible(seed.slot)}: {visible(seed.blueprint)}, germinated after epoch"
    text += f" {seed.germinated}, {visible(seed.fate)}"
    if seed.ended is not None:
        text += f" after epoch {seed.ended}"
    return f"{text}, contribution {format_contribution(seed.contribution, seed.contribution_se)}."
