"""Grown: the result of a growing run."""

from __future__ import annotations

import copy
import inspect
import io
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from esper.growth.depth.blocks import is_asleep
from esper.growth.history import Picture, draw_history, make_table
from esper.growth.snapshots import Recipe
from esper.growth.static import StaticComparison, compare_static
from esper.kasmina.contribution import Contributions, Estimate
from esper.kasmina.garden import Garden
from esper.kasmina.slots.probe import (
    axis_size,
    call_arguments,
    evaluating,
    look,
    resized,
    tensors_along,
)
from esper.leyline.config import Config
from esper.leyline.errors import UsageError
from esper.leyline.reasons import (
    format_gain,
    format_score,
    format_stacks,
    is_loss,
)
from esper.leyline.records import (
    EpochRecord,
    ModuleRecord,
    RunSummary,
    SizeRecord,
    best_by_size,
    removed_later,
)
from esper.utils.files import as_path, atomic_write_bytes
from esper.utils.process import software_versions

# ---- The parts of a host, in the order in which they are called


_ITSELF = "(itself)"


class _Part(NamedTuple):
    path: str
    module: nn.Module
    parameters: int


def describe_host(garden: Garden, example_input: Any) -> tuple[ModuleRecord, ...]:
    """Return the parts of a garden's host; only a part with a slot in it is split further."""
    places: dict[str, list[str]] = {}
    for slot, path in garden.slot_paths.items():
        places.setdefault(path, []).append(slot)
    parts = list(_parts(garden.model, "", frozenset(places), set()))
    seen = look(garden, {part.path: part.module for part in parts}, example_input)
    if seen.error is not None:
        raise seen.error
    called = {path: number for number, path in enumerate(seen.kinds)}
    order: dict[str, int] = {}
    last = -1
    for part in parts:
        # A container that is never called itself comes after the part before it.
        last = order[part.path] = called.get(part.path, last)
    return tuple(
        ModuleRecord(
            path=part.path or _ITSELF,
            kind=type(part.module).__name__,
            parameters=part.parameters,
            shape=_shape(seen.outputs[part.path]),
            slots=tuple(places.get(part.path, ())),
        )
        for part in sorted(parts, key=lambda part: order[part.path])
    )


def _parts(
    module: nn.Module, path: str, places: frozenset[str], counted: set[int]
) -> Iterator[_Part]:
    prefix = f"{path}." if path else ""
    is_opened = not path or any(place.startswith(prefix) for place in places)
    if is_opened:
        for name, child in module.named_children():
            yield from _parts(child, f"{prefix}{name}", places, counted)
    parameters = 0
    for parameter in module.parameters():
        if parameter.requires_grad and id(parameter) not in counted:
            counted.add(id(parameter))
            parameters += parameter.numel()
    if not is_opened or path in places or parameters:
        yield _Part(path, module, parameters)


def _shape(outputs: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the shape of one sample of a part's first output; None if that is no tensor."""
    first = outputs[0] if outputs else None
    return tuple(first.shape[1:]) if isinstance(first, Tensor) else None


# ---- Export to one file that needs neither Esper nor the host's class: ONNX or PT2


Format = Literal["onnx", "pt2"]


def check_format(kind: str) -> None:
    """Refuse a format whose packages are missing, before anything is trained."""
    if kind == "onnx":
        try:
            import onnxscript  # noqa: F401
        except ImportError:
            raise UsageError(
                "exporting to ONNX needs: pip install 'esper-grow[export]'; or export to pt2"
            ) from None


def export_garden(garden: Garden, example: Any, path: str | Path) -> Path:
    """Write a garden in eval mode, for any batch size, as the path's suffix says."""
    path = as_path(path, "grown.pt2")
    kind = path.suffix.removeprefix(".")
    if kind not in get_args(Format):
        raise UsageError(f"{str(path)!r} has no known suffix; use .onnx or .pt2")
    check_format(kind)
    axis = garden.batch_axis
    size = axis_size(example, axis)
    which = tensors_along(example, axis, size)
    # PyTorch would treat a batch size of 1 as fixed.
    example = resized(example, which, axis, max(size, 2)) if size else example
    size = max(size, 2)
    args, kwargs = call_arguments(example)
    batch = torch.export.Dim("batch", min=1)

    def free(leaf: Any) -> dict[int, Any] | None:
        is_along = isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == size
        return {axis: batch} if is_along else None

    shapes: dict[str, Any] = {"args": tree_map(free, args)} if args else {}
    shapes |= {name: tree_map(free, value) for name, value in kwargs.items()}
    model = _naming(garden, list(kwargs)) if kwargs else garden
    with evaluating(garden), torch.no_grad():
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
        except Exception as error:
            raise UsageError(
                f"PyTorch cannot export this model: {_first_line(error)}; write "
                "grown.save(folder) instead"
            ) from error
        content = _as_pt2(program) if kind == "pt2" else _as_onnx(program)
    atomic_write_bytes(path, content)
    return path


def _naming(garden: Garden, names: list[str]) -> nn.Module:
    """Return a garden with named arguments, because PyTorch cannot export `**kwargs`."""

    def forward(self: Any, **inputs: Any) -> Any:
        return self.garden(**inputs)

    kinds = inspect.Parameter
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            kinds("self", kinds.POSITIONAL_OR_KEYWORD),
            *(kinds(name, kinds.KEYWORD_ONLY) for name in names),
        ]
    )
    model: nn.Module = type("Named", (nn.Module,), {"forward": forward})()
    model.garden = garden
    return model


def _as_pt2(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _as_onnx(program: torch.export.ExportedProgram) -> bytes:
    try:
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        raise UsageError(
            f"ONNX cannot express this model: {_first_line(error)}; export to pt2 instead"
        ) from error
    assert converted is not None
    content: bytes = converted.model_proto.SerializeToString()
    return content


def _first_line(error: BaseException) -> str:
    """Return the first line of the first error in a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().split("\n")[0].strip() or type(error).__name__


# ---- The result


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A grown network with the history of its run."""

    model: Garden
    """The network, ready to use, save and export."""
    history: list[EpochRecord]
    """Per epoch: metrics, decision, slots."""
    summary: RunSummary
    """Parameters, scores, and the life of every seed."""
    contributions: Contributions
    """The score that the network would lose now without each seed, fossilized ones included.

    It is not the gain of growing, because the host has learned to rely on its seeds. The twin
    measures the gain.
    """
    twin: nn.Module | None
    """The network that was trained without growing, if there is one and it differs; like the
    network itself, of its own best epoch or of the last."""
    config: Config
    """The settings of the run."""
    example_input: Any
    """One batch of inputs of the network."""
    why: tuple[str, ...]
    """Why the network did not learn, or did not grow, or not completely, and which of its seeds
    were pruned after the epoch that is kept; one sentence each."""
    static_warning: str
    """Warning that a static network of the same size is likely to do as well; usually empty."""
    val_gain: Estimate | None = None
    """Validation score minus the twin's, over the same samples; None without a twin that
    differs."""
    recipe: Recipe = field(repr=False, compare=False)
    """The request of the run before training, for `compare_static`."""
    folder: Path | None = None
    """The run folder, if there is one."""

    def __repr__(self) -> str:
        """Return the outcome in one line."""
        summary = self.summary
        kept = []
        pruned = {
            (seed.slot, seed.germinated): f" (pruned at epoch {seed.ended})"
            for seed in removed_later(self.history, summary.kept_epoch)
        }
        for seed in summary.seeds:
            if seed.fate not in ("pruned", "dropped"):
                state = " (blending)" if seed.fate == "blending" else ""
                state = pruned.get((seed.slot, seed.germinated), state)
                kept.append(f"{seed.blueprint} at {seed.slot}{state}")
        size = _change(summary.parameters_before, summary.parameters_after)
        cost = _change(summary.flops_before, summary.flops_after)
        grew = ", ".join(kept) or "nothing"
        return (
            f"Grown({summary.task}: {self._score_text()}, {size} parameters, {cost} FLOPs, grew "
            f"{grew}, {self._epoch_text()}{self._budget_text()})"
        )

    def _budget_text(self) -> str:
        """Return what was spent of a budget; empty without one."""
        spent, budget = self.summary.training_flops, self.summary.compute_budget
        if spent is None or budget is None:
            return ""
        return f", {spent:.4g} of {budget:.4g} training FLOPs"

    def _score_text(self) -> str:
        summary = self.summary
        splits = {
            "validation": (summary.val_score, summary.twin_val_score),
            "test": (summary.test_score, summary.twin_test_score),
        }
        lines = []
        for split, (score, twin) in splits.items():
            if score is None:
                continue
            line = f"{split} {'' if is_loss(score) else 'score '}{format_score(score)}"
            if twin is not None:
                gain = format_gain(score, twin).replace("loss ", "")
                word = "" if is_loss(twin) else "gain "
                line += f" (twin {format_score(twin)}, {word}{gain})"
            lines.append(line)
        return ", ".join(lines)

    def _epoch_text(self) -> str:
        return f"epoch {self.summary.kept_epoch} of {self.summary.epochs}"

    @property
    def best_by_size(self) -> tuple[SizeRecord, ...]:
        """The best validation score of each size that the network had, the smallest first.

        Sizes are reached at different epochs, so this does not show what a network that kept its
        size would have reached: its twin or `compare_static` does.
        """
        return best_by_size(self.history)

    @property
    def modules(self) -> tuple[ModuleRecord, ...]:
        """The parts of the host, in the order in which they are called; of a deepened one none."""
        return () if self.summary.stacks else describe_host(self._garden, self.example_input)

    @property
    def _garden(self) -> Garden:
        return self.model

    def bake(self) -> nn.Module:
        """Return the network as a plain module of the host's own class, without Esper."""
        return self.model.bake()

    def save(self, folder: str | Path) -> Path:
        """Write the network into a folder and return that; `esper.load_garden` reads it.

        To grow a deepened network further, write `deepen={"weights": folder}`.
        """
        self._garden.save(folder)
        return Path(folder)

    def export(self, path: str | Path) -> Path:
        """Write the network as `.onnx` or `.pt2`, in eval mode and for any batch size.

        The file needs neither Esper nor the host's class.
        """
        return export_garden(self._garden, self.example_input, path)

    def report(self, path: str | Path, *, command: str | None = None) -> Path:
        """Write one self-contained HTML page about the run and return its path."""
        from esper.nissa.report import render_report, write_report

        place = as_path(path, "report.html")
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
        write_report(place, page)
        return place

    def plot(self, path: str | Path | None = None) -> Picture:
        """Draw the validation scores of network and twin by epoch, and when what grew.

        A notebook displays the picture; `.save(path)` writes it.

        Args:
            path: also write it here, as `.svg` or `.html`.
        """
        picture = draw_history(self.history, self.summary.task)
        if path is not None:
            picture.save(path)
        return picture

    def to_pandas(self, table: str = "epochs") -> Any:
        """Return the history as a `pandas.DataFrame`, one row for each epoch.

        Args:
            table: 'epochs', 'actions' (decisions other than WAIT), 'slots' or 'stacks' (their state
                in every epoch), 'seeds' or 'sizes' (the best validation score of each size).
        """
        return make_table(table, self.history, self.summary).to_pandas()

    def to_polars(self, table: str = "epochs") -> Any:
        """Return the history as a `polars.DataFrame`; the tables are those of `to_pandas`."""
        return make_table(table, self.history, self.summary).to_polars()

    def compare_static(
        self, model: nn.Module | None = None, *, progress: bool | None = None
    ) -> StaticComparison:
        """Train a static network of the same size from scratch, and compare both.

        It has all seeds at full amplitude from the first step, and the model's first weights. Data,
        epochs, optimizer, schedule and seed are those of the run. For a deepened network it is the
        one with all blocks awake; if that was trained as the twin, nothing is trained again.

        Args:
            model: another network to train instead.
            progress: show every epoch on standard error; by default if that is a terminal.
        """
        return compare_static(self, model, progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deepened(Grown):
    """A deepened network with the history of its run."""

    model: Any
    """Your own object, with nothing of Esper left in it. Blocks that slept in the kept epoch are
    removed, so that it is as deep as the network that was validated."""
    garden: Garden
    """The same network as a garden, which Esper saves and loads."""

    def __repr__(self) -> str:
        """Return the outcome in one line."""
        summary = self.summary
        spent, whole = summary.training_flops or 0.0, summary.static_flops or 0.0
        cost = f"{spent:.3g} training FLOPs"
        if whole:
            cost += f" ({spent / whole:.0%} of the static network's)"
        size = _change(summary.parameters_before, summary.parameters_after)
        return (
            f"Deepened({summary.task}: {self._score_text()}, "
            f"{format_stacks(summary.stacks)} awake, "
            f"{size} parameters, {cost}, {summary.seconds:.0f} s, {self._epoch_text()})"
        )

    @property
    def _garden(self) -> Garden:
        return self.garden

    @property
    def awake(self) -> dict[str, int]:
        """Number of blocks awake, by stack."""
        return {stack.name: stack.awake for stack in self.summary.stacks}

    def bake(self) -> nn.Module:
        """Return a copy of `model`, which is a plain module already."""
        if any(map(is_asleep, self.model.modules())):
            raise UsageError(
                "the model needs its sleeping blocks, so there is no plain copy without them; "
                "train until all blocks are awake, or build the model with fewer"
            )
        plain: nn.Module = copy.deepcopy(self.model)
        return plain


def _change(before: int, after: int) -> str:
    return " → ".join(f"{each:,}" for each in dict.fromkeys((before, after)))
