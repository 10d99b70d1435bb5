"""Results as lines of JSON: one for every arm on every member, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

# ---- What an arm spends: the operations of its training, and of the ablations it is measured by


def training_flops(signals: Signals) -> Tensor:
    """Return float64 [R]: the operations of the epoch that the rows have just trained."""
    samples = signals.samples_per_epoch.double()
    return PASSES_OF_TRAINING * samples * signals.flops.double()


def ablation_flops(signals: Signals, samples: Tensor) -> Tensor:
    """Return float64 [R]: the operations of all configurations but the network as it is.

    Args:
        signals: of the epoch that was measured, on the CPU.
        samples: int64 [R], validation samples.
    """
    blended = (signals.alpha > 0) & (signals.stage >= 0)
    measured = blended & (signals.stage != int(SeedStage.FOSSILIZED))
    fossils = (signals.slot_flops * (blended & ~measured)).sum(1)
    base = (signals.host_flops + fossils).double()
    found = torch.zeros(signals.rows, dtype=torch.float64)
    # Rows without a seed on trial, most of them, are evaluated once.
    for row in measured.any(1).nonzero().flatten().tolist():
        chosen = _configurations(tuple(measured[row].tolist()))
        own = (signals.slot_flops[row] * measured[row]).double()
        found[row] = (base[row] + chosen @ own).sum() * samples[row]
    return found


@lru_cache(maxsize=1024)
def _configurations(members: tuple[bool, ...]) -> Tensor:
    """Return float64 [K - 1, S]: the configurations that a plain validation would not need."""
    return plan_ablations(members)[1:].double()


Key = tuple[str, str, str]

RESULTS_FILE = "results.jsonl"
"""In the folder of a search or of a proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What an arm brought on a member; lists are over seeds."""

    purpose: str
    """What it was played for: 'proof', or a stage before it."""
    arm: str
    member: str
    seeds: list[int]
    val_errors: list[float]
    test_errors: list[float]
    val_scores: list[float]
    test_scores: list[float]
    parameters: list[int]
    flops: list[int]
    """Operations of one sample's forward pass at the end."""
    host_parameters: int
    """Of the member's own host."""
    host_flops: int
    training_flops: list[float]
    """Operations of the whole training."""
    ablation_flops: list[float]
    """Operations of measuring seeds, on top of that."""
    germinated: list[int]
    fossilized: list[int]
    pruned: list[int]
    rolled_back: list[bool]
    grown: list[list[dict[str, Any]]]
    """The seeds that are part of the network at the end, as `BuiltInSeed` in plain data."""

    @property
    def key(self) -> Key:
        """What tells results apart."""
        return self.purpose, self.arm, self.member

    def architectures(self) -> list[tuple[BuiltInSeed, ...]]:
        """Return what was grown with every seed."""
        return [tuple(BuiltInSeed.from_mapping(seed) for seed in row) for row in self.grown]

    def to_line(self) -> str:
        """Return the result as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: str) -> CellResult:
        """Return the result that a line holds."""
        return cls(**json.loads(line))


class ResultFile:
    """Lines that are only ever added, in an order that an interruption does not change."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a line that was broken off is removed."""
        self.path = path
        self._results: dict[Key, CellResult] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            atomic_write_text(path, whole)
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                result = CellResult.from_line(line)
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{path}: line {number} is no result of this version: {error}; "
                    "start anew in another folder"
                ) from None
            self._results[result.key] = result

    def __iter__(self) -> Iterator[CellResult]:
        return iter(self._results.values())

    def __contains__(self, key: object) -> bool:
        return key in self._results

    def get(self, key: Key) -> CellResult:
        """Return a result that is there."""
        return self._results[key]

    def of(self, purpose: str) -> list[CellResult]:
        """Return the results of one purpose, in the order in which they were played."""
        return [result for result in self if result.purpose == purpose]

    def add(self, results: Iterable[CellResult]) -> None:
        """Append results and make them durable."""
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


# ---- The figures of a proof: every arm in itself, by member, and beside the static networks


COSTS = ("parameters", "flops", "total_flops")
"""What fronts are drawn against: sizes at the end, and all operations of a run."""

MOST_ADDED = 0.05
"""Share of parameters that may be added where growth is useless or harmful."""
MOST_LOST = 0.3
"""Points of test score that may be lost there."""


def comparison_mapping(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {**dataclasses.asdict(comparison), "errors_changed": comparison.errors_changed}


def summarise(
    played: Sequence[CellResult], arm: str, errors: Mapping[str, Floats]
) -> dict[str, float]:
    """Return the figures of an arm over all members.

    Sizes are in units of the host's, operations in units of what training the waiting host takes.
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
    """Return the static network with the least error, and what finding it took: all of them."""
    static = {arm: s for arm, s in summaries.items() if arm.startswith("static x")}
    if not static:
        return None
    best = min(static, key=lambda arm: static[arm]["error"])
    spent = sum(each["training_flops"] for each in static.values())
    return {"arm": best, "error": static[best]["error"], "training_flops_of_all_sizes": spent}


def privileged_share(
    errors: Mapping[str, Floats], subject: str, specs: Sequence[ArmSpec]
) -> float | None:
    """Return how much of the privileged schedules' gain over waiting the subject reaches."""
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
    """Return, for every cost, the arms that no other beats in cost and error, cheapest first."""
    arms = list(summaries)
    errors = [summaries[arm]["error"] for arm in arms]
    return {
        cost: [arms[place] for place in front([summaries[arm][cost] for arm in arms], errors)]
        for cost in COSTS
    }


def by_member(
    played: Sequence[CellResult], errors: Mapping[str, Floats], members: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by member and arm, mean scores, log ratio over waiting, and what was added."""
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
    """Return, for every purpose of claim members, what the subject added and gained there.

    Args:
        figures: of `by_member`.
        subject: the arm under proof.
        purposes: what growth can bring, by member.
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


def write_report(found: Mapping[str, Any]) -> str:
    """Return the report of what `Proof.conclude` found."""
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
    """Return the table of a public benchmark; nothing where it is none."""
    if not found["benchmark"]:
        return []
    rows = [
        [str(place), arm, f"{score:+.4f}"]
        for place, (arm, score) in enumerate(found["ranking"].items(), start=1)
    ]
    told = "A score is the interquartile mean of log ratios over waiting."
    return [f"## {found['benchmark']}", _table(["rank", "arm", "score"], rows), told]


def _arms(arms: Mapping[str, Mapping[str, float]]) -> str:
    header = ["arm", "test score", "error", "parameters", "FLOPs", "training", "ablations"]
    header += ["germinated", "fossilized", "pruned"]
    digits = {"test_score": 2, "error": 4, "parameters": 2, "flops": 2, "training_flops": 2}
    digits |= {"ablation_flops": 2, "germinated": 1, "fossilized": 1, "pruned": 1}
    rows = [
        [name, *(f"{arm[key]:.{count}f}" for key, count in digits.items())]
        for name, arm in sorted(arms.items(), key=lambda item: item[1]["error"])
    ]
    return _table(header, rows)


def _asides(found: Mapping[str, Any]) -> list[str]:
    """Return what is reported beside the verdicts."""
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
    return _table(["member", *arms], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
