"""What people read after a run: its picture and its page, made from what was recorded alone."""

from __future__ import annotations

from esper.report.growing import render_report
from esper.report.page import write_report
from esper.report.picture import growth_picture
from esper.report.stored import render_run, report_run

__all__ = ["growth_picture", "render_report", "render_run", "report_run", "write_report"]
