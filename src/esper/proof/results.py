"""Results as lines of JSON: one for every arm on every member, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.kasmina.hosts import BuiltInSeed
from esper.leyline.errors import CheckpointError
from esper.leyline.files import append_to, atomic_write_text

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
