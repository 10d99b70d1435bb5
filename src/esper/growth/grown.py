"""Grown: what a growing run leaves behind."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from esper.kasmina.contribution import Contributions
from esper.kasmina.garden import Garden
from esper.leyline.architecture import ModuleRecord
from esper.leyline.config import Config
from esper.leyline.history import EpochRecord, RunSummary
from esper.nissa.machine import software_versions
from esper.report import growth_picture, render_report, write_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A grown network with its history."""

    model: Garden
    """The network, ready to use, save and export."""
    history: list[EpochRecord]
    """Per epoch: metrics, decision, slots."""
    summary: RunSummary
    """Parameters, scores, and the life of every seed."""
    contributions: Contributions
    """What every seed is worth at the end, fossils included."""
    twin: nn.Module | None
    """The network that only waited, where one was trained and growth made a difference."""
    config: Config
    """The settings of the run."""
    modules: tuple[ModuleRecord, ...] = ()
    """What the host is made of, in the order in which it is called."""

    def report(self, path: str | Path, *, command: str | None = None) -> Path:
        """Write one self-contained HTML page about the run and return its path."""
        line = shlex.join(sys.argv) if command is None else command
        page = render_report(
            self.history,
            self.summary,
            config=self.config.to_mapping(),
            command=line,
            versions=software_versions(),
            modules=self.modules,
            at_end={
                slot: (found.value, found.se)
                for slot, found in self.contributions.leave_one_out.items()
            },
        )
        write_report(Path(path), page)
        return Path(path)

    def picture(self, path: str | Path) -> Path:
        """Write the picture of what grew when, as SVG, and return its path."""
        write_report(Path(path), growth_picture(self.history, title=self.summary.task))
        return Path(path)
