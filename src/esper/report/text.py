"""Values as text a reader can trust: visible characters only, and numbers with honest digits.

Names, reasons and settings come from outside, so nothing in them may act on the reader's screen:
control characters, direction marks and halves of surrogate pairs are written as escapes, and
endless values are cut with a note. Escaping for markup happens here as well, in `escaped`.
"""

from __future__ import annotations

import html
import math
import unicodedata

NOT_MEASURED = "not measured"
NOT_FINITE = "not finite"
MINUS = "−"

_LIMIT = 400
_HUGE = 1e6
# Marks that reorder the text around them could make a name read as something else.
_DIRECTION_MARKS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
# Controls, surrogates, unassigned codes, line and paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cs", "Cn", "Zl", "Zp"})


def visible(value: object, *, limit: int = _LIMIT, keep: str = "") -> str:
    """Return a value as printable text of bounded length.

    Args:
        value: Anything; its `str` is shown.
        limit: Longer text is cut there, and says how long it was.
        keep: Characters that stay as they are although they do not print, such as newlines.
    """
    text = str(value)
    shown = "".join(
        character if character in keep else _printable(character) for character in text[:limit]
    )
    if len(text) > limit:
        shown += f"… ({len(text):,} characters)"
    return shown


def escaped(value: object, *, limit: int = _LIMIT, keep: str = "") -> str:
    """Return a value as printable text that markup and quoted attributes take literally."""
    return html.escape(visible(value, limit=limit, keep=keep), quote=True)


def shortened(value: object, length: int) -> str:
    """Return printable text of at most `length` characters, with an ellipsis where it was cut."""
    text = visible(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def width_in_em(text: str) -> float:
    """Return about how wide a text is, in units of its font size."""
    # No font can be measured here; these are upper ends for the usual sans-serif faces.
    return sum(
        1.05 if unicodedata.east_asian_width(character) in "WF" else 0.61 for character in text
    )


def format_count(value: int) -> str:
    """Return a whole number with separated thousands."""
    return f"{value:,}".replace("-", MINUS)


def format_number(value: float | None, *, decimals: int | None = None, signed: bool = False) -> str:
    """Return a measured value with as many decimals as its size deserves.

    An absent value is "not measured", never 0.
    """
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
    """Return a number of any size in few characters: a KL of 1e-4 as well as a count."""
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
    """Return a share in percent; there is none of nothing."""
    if part is None or not whole:
        return NOT_MEASURED
    share = 100 * part / whole
    if not math.isfinite(share):
        return NOT_FINITE
    # Close to either end another digit tells much; and all or nothing is said without any.
    is_close = 0.005 < share < 1 or 99 < share < 99.995
    decimals = 2 if is_close else 0 if round(share, 2) in (0, 100) else 1
    return f"{share:.{decimals}f} %".replace("-", MINUS)


def decimals_for(value: float) -> int:
    """Return how many decimals a score of this size deserves."""
    size = abs(value)
    if size == 0 or size >= 10:
        return 2
    return 3 if size >= 1 else 4


def format_contribution(value: float | None, error: float | None) -> str:
    """Return a contribution with its standard error, or that it was never measured."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    if error is None or not math.isfinite(error):
        return f"{format_number(value, decimals=_fine_decimals(value), signed=True)} ± unknown"
    # The digits of the error say how many of the value's mean anything.
    decimals = _fine_decimals(error or value)
    value_text = format_number(value, decimals=decimals, signed=True)
    return f"{value_text} ± {format_number(error, decimals=decimals)}"


def format_duration(seconds: float) -> str:
    """Return a time the way people say it."""
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
