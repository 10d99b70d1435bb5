"""What people read after a run: its picture and its page, made from the recorded history alone."""

from __future__ import annotations

from esper.report.page import render_report, write_report
from esper.report.picture import growth_picture

__all__ = ["growth_picture", "render_report", "write_report"]
