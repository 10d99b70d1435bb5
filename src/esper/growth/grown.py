"""Grown: what a growing run leaves behind."""

from __future__ import annotations

import copy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from esper.growth.depth.sleeping import is_asleep
from esper.growth.export import export_garden, format_of
from esper.kasmina.contribution import Contributions
from esper.kasmina.garden import Garden
from esper.leyline.config import Config
from esper.leyline.errors import UsageError
from esper.leyline.process import software_versions
from esper.leyline.reasons import why_not_grown
from esper.leyline.records import (
    EpochRecord,
    ModuleRecord,
    RunSummary,
    SizeRecord,
    best_by_size,
    is_loss,
    told_score,
    told_stacks,
)
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
    """What the network would lose now without each seed, fossils included. Not what a seed has
    brought: a host that had grown up without it would lean on it less. That is the difference to
    the twin."""
    twin: nn.Module | None
    """The network that only waited, where one was trained and growth made a difference; kept as
    the network itself is, of its own best epoch or of the last."""
    config: Config
    """The settings of the run."""
    example_input: Any = None
    """One batch of inputs as the network takes them."""
    modules: tuple[ModuleRecord, ...] = ()
    """What the host is made of, in the order in which it is called."""
    folder: Path | None = None
    """The run folder, where there is one."""

    def __repr__(self) -> str:
        """Return the outcome in one line."""
        summary = self.summary
        kept = [
            f"{seed.blueprint} at {seed.slot}{' (blending)' if seed.fate == 'blending' else ''}"
            for seed in summary.seeds
            if seed.fate not in ("pruned", "dropped")
        ]
        size = _change(summary.parameters_before, summary.parameters_after)
        cost = _change(summary.flops_before, summary.flops_after)
        grew = ", ".join(kept) or "nothing"
        return (
            f"Grown({summary.task}: {self._told_score()}, {size} parameters, {cost} FLOPs, grew "
            f"{grew}, {self._told_epoch()})"
        )

    def _told_score(self) -> str:
        summary = self.summary
        split, score, twin = ("test", summary.test_score, summary.twin_test_score)
        if score is None:
            split, score, twin = ("val", summary.val_score, summary.twin_val_score)
        told = f"{split} {'' if is_loss(score) else 'score '}{told_score(score)}"
        return told if twin is None else f"{told} (twin {told_score(twin)})"

    def _told_epoch(self) -> str:
        return f"epoch {self.summary.kept_epoch} of {self.summary.epochs}"

    @property
    def best_by_size(self) -> tuple[SizeRecord, ...]:
        """The best validation score of every size the network had, the smallest first."""
        return best_by_size(self.history)

    @property
    def why(self) -> tuple[str, ...]:
        """Why the network did not learn, or nothing grew, or not to the end, line by line."""
        summary = self.summary
        return why_not_grown(self.history, summary.kept_epoch, summary.stopped, summary.chance_loss)

    def bake(self) -> nn.Module:
        """Return the network as a plain module of the host's own class, without Esper."""
        return self.model.bake()

    def save(self, folder: str | Path) -> Path:
        """Write the grown network into a folder, return it; `esper.load_garden` reads it back."""
        self.model.save(folder)
        return Path(folder)

    def export(self, path: str | Path) -> Path:
        """Write the network, with a free batch size, as ONNX or PT2 by the ending of the path.

        It is in eval mode, and neither needs Esper nor the class of the host.
        """
        kind = format_of(path)
        if self.example_input is None:
            raise UsageError("this result has no example of its inputs, which an export needs")
        return export_garden(self.model, self.example_input, path, kind)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Deepened(Grown):
    """A network that was deepened, with its history."""

    model: Any
    """The network: your own object, with nothing of Esper left in it. Blocks that sleep in the
    epoch that is kept are no longer in it, so that it is as deep as what was validated."""
    garden: Garden
    """The same, as Esper saves and loads it."""

    def __repr__(self) -> str:
        """Return the outcome in one line."""
        summary = self.summary
        spent, whole = summary.training_flops or 0.0, summary.static_flops or 0.0
        cost = f"{spent:.3g} training FLOPs"
        if whole:
            cost += f" ({spent / whole:.0%} of the static network's)"
        size = _change(summary.parameters_before, summary.parameters_after)
        return (
            f"Deepened({summary.task}: {self._told_score()}, {told_stacks(summary.stacks)} awake, "
            f"{size} parameters, {cost}, {summary.seconds:.0f} s, {self._told_epoch()})"
        )

    @property
    def awake(self) -> dict[str, int]:
        """Blocks of the network, by stack."""
        return {stack.name: stack.awake for stack in self.summary.stacks}

    def bake(self) -> nn.Module:
        """Return a copy of the network: a plain module, as `model` itself is."""
        if any(map(is_asleep, self.model.modules())):
            raise UsageError(
                "the model cannot do without the blocks that never woke, so there is no plain copy "
                "without them; train it until all are awake, or build it with fewer blocks"
            )
        plain: nn.Module = copy.deepcopy(self.model)
        return plain

    def save(self, folder: str | Path) -> Path:
        """Write the network into a folder, return it; `deepen={"weights": folder}` grows it on.

        `esper.load_garden(folder, model=...)` reads it back into a model with as many blocks.
        """
        self.garden.save(folder)
        return Path(folder)

    def export(self, path: str | Path) -> Path:
        """Write the network, with a free batch size, as ONNX or PT2 by the ending of the path."""
        return export_garden(self.garden, self.example_input, path, format_of(path))


def _change(before: int, after: int) -> str:
    return " → ".join(f"{each:,}" for each in dict.fromkeys((before, after)))
