"""Results of cells as JSON lines, the figures of a proof, and its report."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.contribution import plan_ablations
from esper.kasmina.flops import PASSES_OF_TRAINING
from esper.kasmina.hosts import BuiltInSeed
from esper.lab.proof.arm import WAIT, ArmSpec
from esper.lab.proof.statistics import Comparison, Floats, front, interquartile_mean, log_ratios
from esper.leyline.errors import CheckpointError
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.utils.files import append_to, atomic_write_text

# ---- FLOPs of training, and of ablations


def training_flops(signals: Signals, before: Tensor) -> Tensor:
    """Return float64 [R]: the operations of training so far.

    A row with a budget counts them itself, and its evaluation and ablations among them.

    Args:
        signals: of the epoch that the rows have just trained.
        before: float64 [R], the operations of training before it.
    """
    samples = signals.samples_per_epoch.double()
    now = before + PASSES_OF_TRAINING * samples * signals.flops.double()
    return torch.where(signals.compute_budget >= 0, signals.compute_spent.double(), now)


def ablation_flops(signals: Signals, samples: Tensor) -> Tensor:
    """Return float64 [R]: FLOPs of all ablations, without the plain validation.

    It is 0 for rows with a budget, whose training has them.

    Args:
        signals: signals after the epoch, on the CPU.
        samples: int64 [R], number of validation samples.
    """
    blended = (signals.alpha > 0) & (signals.stage >= 0) & (signals.compute_budget < 0)[:, None]
    measured = blended & (signals.stage != int(SeedStage.FOSSILIZED))
    fossils = (signals.slot_flops * (blended & ~measured)).sum(1)
    base = (signals.host_flops + fossils).double()
    found = torch.zeros(signals.rows, dtype=torch.float64)
    # Most rows have no live blended seed, and no ablations.
    for row in measured.any(1).nonzero().flatten().tolist():
        chosen = _configurations(tuple(measured[row].tolist()))
        own = (signals.slot_flops[row] * measured[row]).double()
        found[row] = (base[row] + chosen @ own).sum() * samples[row]
    return found


@lru_cache(maxsize=1024)
def _configurations(members: tuple[bool, ...]) -> Tensor:
    """Return float64 [K - 1, S]: the configurations besides the plain validation."""
    return plan_ablations(members)[1:].double()


Key = tuple[str, str, str]

RESULTS_FILE = "results.jsonl"
"""Name of the file in the folder of a search or a proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Results of an arm on a member; lists are over seeds."""

    purpose: str
    """'proof', 'rates', 'halving', or the rung of a search."""
    arm: str
    member: str
    seeds: list[int]
    val_errors: list[float]
    test_errors: list[float]
    val_scores: list[float]
    test_scores: list[float]
    parameters: list[int]
    flops: list[int]
    """FLOPs of one sample's forward pass through the scored network."""
    host_parameters: int
    """Of the member's own host."""
    host_flops: int
    training_flops: list[float]
    """FLOPs of the whole training."""
    ablation_flops: list[float]
    """FLOPs of all ablations."""
    germinated: list[int]
    fossilized: list[int]
    pruned: list[int]
    rolled_back: list[bool]
    grown: list[list[dict[str, Any]]]
    """The seeds in the scored network, as plain data of `BuiltInSeed`."""
    scored_epochs: list[int] = field(default_factory=list)
    """Epochs whose networks were scored; empty in results of older versions."""
    curves: list[list[float]] = field(default_factory=list)
    """Validation score after every epoch, by seed; empty in results of older versions."""
    germinated_at: list[list[int]] = field(default_factory=list)
    """Epochs at whose start something was germinated, by seed; empty in results of older
    versions."""

    @property
    def key(self) -> Key:
        """Key of the result."""
        return self.purpose, self.arm, self.member

    def architectures(self) -> list[tuple[BuiltInSeed, ...]]:
        """Return the grown architecture of every seed."""
        return [tuple(BuiltInSeed.from_mapping(seed) for seed in row) for row in self.grown]

    def to_line(self) -> str:
        """Return the result as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: str) -> CellResult:
        """Return the result of a line."""
        return cls(**json.loads(line))


class ResultFile:
    """A file of results to which lines are only appended."""

    def __init__(self, path: Path) -> None:
        """Read the file; an incomplete last line is removed."""
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = _whole_lines(text)
        if whole != text:
            atomic_write_text(path, whole)
        self._results = {result.key: result for result in _parse(whole, path)}

    def __iter__(self) -> Iterator[CellResult]:
        return iter(self._results.values())

    def __contains__(self, key: object) -> bool:
        return key in self._results

    def get(self, key: Key) -> CellResult:
        """Return a stored result."""
        return self._results[key]

    def of(self, purpose: str) -> list[CellResult]:
        """Return the results of one purpose, in the order in which they were played."""
        return [result for result in self if result.purpose == purpose]

    def add(self, results: Iterable[CellResult]) -> None:
        """Append results, and flush them to disk."""
        fresh = list(results)
        text = "".join(f"{result.to_line()}\n" for result in fresh)
        try:
            with append_to(self.path) as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror}; free some space or make it "
                "writable, then continue with --resume"
            ) from None
        self._results |= {result.key: result for result in fresh}


def read_results(path: Path) -> list[CellResult]:
    """Return the results of a file, which stays as it is; an incomplete last line is left out."""
    return list(_parse(_whole_lines(path.read_text(encoding="utf-8")), path))


def _whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def _parse(text: str, path: Path) -> Iterator[CellResult]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield CellResult.from_line(line)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: line {number} is not a result of this version: {error}; "
                "start again in another folder"
            ) from None


# ---- The figures of a proof: of every arm, by member, and of the static networks


COSTS = ("parameters", "flops", "total_flops")
"""Costs of the Pareto fronts: final sizes, and all FLOPs of a run."""

MOST_ADDED = 0.05
"""Most added parameters, as a share, where growth is useless or harmful."""
MOST_LOST = 0.3
"""Most points of test score lost there."""


def comparison_mapping(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {**dataclasses.asdict(comparison), "errors_changed": comparison.errors_changed}


def summarise(
    played: Sequence[CellResult], arm: str, errors: Mapping[str, Floats]
) -> dict[str, float]:
    """Return the figures of an arm over all members.

    Sizes are multiples of the host's, FLOPs multiples of those of training the waiting host.
    """
    own = [result for result in played if result.arm == arm]
    waiting = {result.member: result for result in played if result.arm == WAIT}

    def over_waiting(total: str) -> float:
        return fmean(
            fmean(getattr(each, total)) / fmean(waiting[each.member].training_flops) for each in own
        )

    training, ablations = over_waiting("training_flops"), over_waiting("ablation_flops")
    return {
        "test_score": fmean(fmean(each.test_scores) for each in own),
        "error": float(np.exp(np.log(errors[arm]).mean())),
        "parameters": fmean(fmean(each.parameters) / each.host_parameters for each in own),
        "flops": fmean(fmean(each.flops) / each.host_flops for each in own),
        "training_flops": training,
        "ablation_flops": ablations,
        "total_flops": training + ablations,
        "germinated": fmean(fmean(each.germinated) for each in own),
        "fossilized": fmean(fmean(each.fossilized) for each in own),
        "pruned": fmean(fmean(each.pruned) for each in own),
        "rolled_back": fmean(fmean(map(float, each.rolled_back)) for each in own),
    }


def best_static(summaries: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """Return the static network with the least error, and the FLOPs of training all of them."""
    static = {arm: s for arm, s in summaries.items() if arm.startswith("static x")}
    if not static:
        return None
    best = min(static, key=lambda arm: static[arm]["error"])
    spent = sum(each["training_flops"] for each in static.values())
    return {"arm": best, "error": static[best]["error"], "training_flops_of_all_sizes": spent}


def privileged_share(
    errors: Mapping[str, Floats], subject: str, specs: Sequence[ArmSpec]
) -> float | None:
    """Return the subject's gain over waiting, as a share of that of the privileged schedules."""
    name = next((spec.name for spec in specs if spec.kind == "privileged"), None)
    if name is None:
        return None
    possible = float(log_ratios(errors[name], errors[WAIT]).mean())
    return float(log_ratios(errors[subject], errors[WAIT]).mean()) / possible if possible else None


def rank(errors: Mapping[str, Floats]) -> dict[str, float]:
    """Return every arm's score, the best first: the interquartile mean of log ratios over waiting.

    Args:
        errors: test errors by arm, [members, seeds].
    """
    scores = {
        arm: float(interquartile_mean(log_ratios(table, errors[WAIT])))
        for arm, table in errors.items()
    }
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def fronts(summaries: Mapping[str, Mapping[str, float]]) -> dict[str, list[str]]:
    """Return the arms on the Pareto front of error and each cost, cheapest first."""
    arms = list(summaries)
    errors = [summaries[arm]["error"] for arm in arms]
    return {
        cost: [arms[place] for place in front([summaries[arm][cost] for arm in arms], errors)]
        for cost in COSTS
    }


def by_member(
    played: Sequence[CellResult], errors: Mapping[str, Floats], members: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return mean scores, log ratios over waiting and added sizes, by member and arm."""
    known = {(result.member, result.arm): result for result in played}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for place, member in enumerate(members):
        found[member] = {}
        for arm, table in errors.items():
            result = known[member, arm]
            ratios = log_ratios(table[place], errors[WAIT][place])
            waited = fmean(known[member, WAIT].test_scores)
            found[member][arm] = {
                "test_score": fmean(result.test_scores),
                "points_over_wait": fmean(result.test_scores) - waited,
                "log_ratio_over_wait": float(ratios.mean()),
                "parameters_added": fmean(result.parameters) / result.host_parameters - 1.0,
                "flops_added": fmean(result.flops) / result.host_flops - 1.0,
                "fossilized": fmean(result.fossilized),
            }
    return found


def restraint(
    figures: Mapping[str, Mapping[str, Mapping[str, float]]],
    subject: str,
    purposes: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Return what the subject added and gained, by expected benefit of growth.

    Args:
        figures: result of `by_member`.
        subject: the first arm.
        purposes: expected benefit of growth, by claim member.
    """
    found: dict[str, dict[str, Any]] = {}
    for purpose in dict.fromkeys(purposes.values()):
        own = [figures[m][subject] for m in figures if purposes.get(m) == purpose]
        if not own:
            continue
        added = fmean(each["parameters_added"] for each in own)
        gained = fmean(each["points_over_wait"] for each in own)
        is_restrained = added <= MOST_ADDED and gained >= -MOST_LOST
        found[purpose] = {
            "members": len(own),
            "parameters_added": added,
            "points_gained": gained,
            "is_restrained": is_restrained,
        }
    return found


# ---- The report of a proof in Markdown: verdicts first, then what they rest on


NEEDS_BOTH = (
    "*beats* and *loses to* need the bootstrap and Wilcoxon's signed-rank test over members, each "
    "after a Holm correction of its own."
)


def write_report(found: Mapping[str, Any]) -> str:
    """Return the Markdown report of the result of `Proof.conclude`."""
    limits = found["limits"]
    opened = f", opening {found['opening']} of the claim" if found["opening"] else ""
    parts = [
        f"# Proof: {found['subject']}",
        f"{len(found['members'])} members of {found['family']} ({found['split']}{opened}), "
        f"{found['seeds']} paired seeds each. Every arm may grow to {limits['parameters']:g} times "
        f"the host's parameters and {limits['flops']:g} times its operations. Log ratios are of "
        "test errors, above 0 where the first arm makes fewer; intervals are bootstraps over "
        "members and seeds of the interquartile mean.",
        *_ranking(found),
        "## Verdicts",
        *([NEEDS_BOTH] if found["wilcoxon"] else []),
        "\n".join(f"- {verdict}" for verdict in found["verdicts"]),
        "## Arms",
        _arms(found["arms"]),
        "Sizes are in units of the host's at the end of a run; operations of training and of "
        "ablations in units of what training the waiting host takes. Error is the geometric mean.",
        *_asides(found),
        "## Members",
        _members(found),
        "Log ratio over waiting, mean over seeds, and in brackets the parameters added.",
    ]
    return "\n\n".join(parts) + "\n"


def _ranking(found: Mapping[str, Any]) -> list[str]:
    """Return the table of a public benchmark; nothing for other proofs."""
    if not found["benchmark"]:
        return []
    rows = [
        [str(place), arm, f"{score:+.4f}"]
        for place, (arm, score) in enumerate(found["ranking"].items(), start=1)
    ]
    note = "A score is the interquartile mean of log ratios over waiting."
    return [f"## {found['benchmark']}", markdown_table(["rank", "arm", "score"], rows), note]


def _arms(arms: Mapping[str, Mapping[str, float]]) -> str:
    header = ["arm", "test score", "error", "parameters", "FLOPs", "training", "ablations"]
    header += ["germinated", "fossilized", "pruned"]
    digits = {"test_score": 2, "error": 4, "parameters": 2, "flops": 2, "training_flops": 2}
    digits |= {"ablation_flops": 2, "germinated": 1, "fossilized": 1, "pruned": 1}
    rows = [
        [name, *(f"{arm[key]:.{count}f}" for key, count in digits.items())]
        for name, arm in sorted(arms.items(), key=lambda item: item[1]["error"])
    ]
    return markdown_table(header, rows)


def _asides(found: Mapping[str, Any]) -> list[str]:
    """Return the figures besides the verdicts."""
    lines = [
        f"- Front of error against {cost.replace('_', ' ')}: {', '.join(arms)}."
        for cost, arms in found["fronts"].items()
    ]
    best = found["best_static"]
    if best is not None:
        lines.append(
            f"- Best of the static sizes: {best['arm']} with error {best['error']:.4f}; training "
            f"all of them took {best['training_flops_of_all_sizes']:.2f} times the host's training."
        )
    if found["privileged_share"] is not None:
        lines.append(
            f"- {found['subject']} reaches {found['privileged_share']:.0%} of the gain of "
            "schedules that were searched on the members themselves."
        )
    for purpose, each in found["restraint"].items():
        verdict = "within" if each["is_restrained"] else "not within"
        lines.append(
            f"- Where growth {_PURPOSES.get(purpose, purpose)} ({each['members']} members): "
            f"{each['parameters_added']:+.1%} parameters, {each['points_gained']:+.2f} points; "
            f"{verdict} 5 % and 0.3 points."
        )
    return ["## Beside the verdicts", "\n".join(lines)]


_PURPOSES = {
    "lacks capacity": "is meant to pay",
    "neutral": "is neutral",
    "useless or harmful": "is useless or harmful",
}


def _members(found: Mapping[str, Any]) -> str:
    arms = list(found["arms"])
    rows = [
        [
            member,
            *(
                f"{own[arm]['log_ratio_over_wait']:+.3f} ({own[arm]['parameters_added']:+.0%})"
                for arm in arms
            ),
        ]
        for member, own in found["by_member"].items()
    ]
    return markdown_table(["member", *arms], rows)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
