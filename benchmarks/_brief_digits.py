"""A task for demonstrations by the hundred: `esper --import benchmarks._brief_digits ...`."""

from __future__ import annotations

from esper.lab.tasks.presets import DigitsNarrow
from esper.lab.tasks.task import register_task


@register_task("digits_brief")
class DigitsBrief(DigitsNarrow):
    """The narrow host on the embedded digits, with epochs of 256 images instead of 1,024."""

    defaults = DigitsNarrow.defaults.replace(samples_per_step=256)
