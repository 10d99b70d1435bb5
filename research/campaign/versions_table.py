"""The table of `versions.py`: learning curves by thirds, and the documents' criteria as figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from esper.simic.training.evaluation import paired_interval

BEFORE, AFTER = "documents-v1", "documents-000"
"""What document 000 calls V1 and V2."""

HEADS = ("blueprint", "tempo")

CRITICAL = 0.27
"""Share of a head's greatest entropy below which document 000 calls it collapsed: 0.7 of 2.56 nats
for blueprint, 0.3 of 1.10 for tempo."""

SLOWEST = 2.0
"""Times as long as a round of V1 that one of V2 may take, by document 000."""

PARTS = ("first third", "second third", "last third")

Line = dict[str, Any]
Figure = Callable[[list[Line]], float | None]
"""A number of a run, made of its rounds; None where it has none."""


def read_lines(path: Path) -> list[Line]:
    """Return the rounds that were written, each once; none where there is no file."""
    if not path.exists():
        return []
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return list({(line["name"], line["seed"], line["round"]): line for line in lines}.values())


class Results:
    """The rounds of every version by seed, as many as all runs of its kind have."""

    def __init__(self, lines: Sequence[Line]) -> None:
        """Sort the rounds; V1 and V2 are cut to the same length, and so are our widths."""
        runs: dict[str, dict[int, list[Line]]] = {}
        for line in sorted(lines, key=lambda line: line["round"]):
            runs.setdefault(line["name"], {}).setdefault(line["seed"], []).append(line)
        self.runs: dict[str, dict[int, list[Line]]] = {}
        for is_ours in (False, True):
            kind = {name: seeds for name, seeds in runs.items() if _is_ours(name) == is_ours}
            common = min((len(run) for seeds in kind.values() for run in seeds.values()), default=0)
            self.runs |= {
                name: {seed: run[:common] for seed, run in sorted(seeds.items())}
                for name, seeds in sorted(kind.items(), key=lambda item: item[0] != BEFORE)
            }

    def values(self, name: str, figure: Figure) -> dict[int, float]:
        """Return a figure of every run of a version, by seed, where it has one."""
        found = {seed: figure(rounds) for seed, rounds in self.runs.get(name, {}).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def differences(self, figure: Figure, new: str = AFTER, old: str = BEFORE) -> list[float]:
        """Return one version minus another for every seed that both have."""
        before, after = self.values(old, figure), self.values(new, figure)
        return [after[seed] - before[seed] for seed in after if seed in before]


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


# --- figures of a run ----------------------------------------------------------------------------


def third(rounds: Sequence[Line], number: int) -> list[Line]:
    """Return a third of the rounds; the last one has the most where they do not divide."""
    cuts = [len(rounds) * edge // 3 for edge in range(4)]
    return list(rounds[cuts[number] : cuts[number + 1]])


def mean_of(read: Callable[[Line], float | None], number: int | None = None) -> Figure:
    """Return the mean of a column over a third of a run, or over all of it."""

    def figure(rounds: list[Line]) -> float | None:
        chosen = rounds if number is None else third(rounds, number)
        values = [value for line in chosen if (value := read(line)) is not None]
        return fmean(values) if values else None

    return figure


def column(name: str) -> Callable[[Line], float | None]:
    """Return how to read a column."""
    return lambda line: line[name]


def potential_share(line: Line) -> float | None:
    """Return how much of the returns' variance the reward's potential explains.

    None where the reward has none, as `shaped` and the runs before it was recorded.
    """
    share: float | None = line.get("potential_share")
    return share


def entropy(head: str) -> Callable[[Line], float | None]:
    """Return how to read a head's entropy on steps that germinate, as a share of its greatest."""
    return lambda line: line["entropy"][head]


def counted(name: str, live: int) -> Callable[[Line], float | None]:
    """Return how to read what is counted by live seeds."""
    return lambda line: float(line[name].get(str(live), 0))


def credited_share(live: int) -> Figure:
    """Return the share of fossils, made while so many seeds lived, that paid hindsight credit."""

    def figure(rounds: list[Line]) -> float | None:
        fossils = sum(counted("fossils", live)(line) or 0 for line in rounds)
        credits = sum(counted("credits", live)(line) or 0 for line in rounds)
        return credits / fossils if fossils else None

    return figure


def learned(rounds: list[Line]) -> float | None:
    """Return how much higher the return is in the last third than in the first."""
    early, late = mean_of(column("return"), 0)(rounds), mean_of(column("return"), 2)(rounds)
    return None if early is None or late is None else late - early


def least_entropy(head: str) -> Figure:
    """Return the least entropy that a head had after any round."""

    def figure(rounds: list[Line]) -> float | None:
        return min((v for line in rounds if (v := entropy(head)(line)) is not None), default=None)

    return figure


def round_time(rounds: list[Line]) -> float | None:
    """Return the median time of a round; the first has kernels to compile."""
    later = rounds[1:] or rounds
    return float(median(line["seconds"] for line in later)) if later else None


def update_time(rounds: list[Line]) -> float | None:
    """Return the median time of an update."""
    later = rounds[1:] or rounds
    return float(median(line["timings"]["update"] for line in later)) if later else None


def memory(rounds: list[Line]) -> float | None:
    """Return the most memory of a run in GiB."""
    return max((line["memory_bytes"] for line in rounds), default=0) / 2**30 or None


# --- tables --------------------------------------------------------------------------------------


def print_summary(lines: Sequence[Line]) -> None:
    """Print one column per version, then the documents' criteria."""
    results = Results(lines)
    if not results.runs:
        print("no rounds yet")
        return
    names = list(results.runs)
    print(f"| figure | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for told, cells in table_rows(results):
        print(f"| {told} | {' | '.join(cells)} |")
    one = lines[0]
    print(
        f"\nMeans over seeds with their 95 % intervals. {one['rows']} networks a round, "
        f"{one.get('steps', '?')} decisions each; entropies are shares of the greatest, after the "
        "update, on steps that germinate."
    )
    print(f"\n| criterion | measured (V1: {BEFORE}, V2: {AFTER}) | answer |\n|---|---|---|")
    for answered in criteria(results):
        print(f"| {' | '.join(answered)} |")


def table_rows(results: Results) -> list[tuple[str, list[str]]]:
    """Return the rows of the first table: what it is, and a cell for every version."""
    figures: list[tuple[str, Figure, str]] = []
    rounds = [line for seeds in results.runs.values() for lines in seeds.values() for line in lines]
    has_potential = any(potential_share(line) is not None for line in rounds)
    beside = [("share of the potential", potential_share, ".2f")] if has_potential else []
    for told, read, form in (
        ("return", column("return"), "+.2f"),
        ("gain over waiting, points", column("gain"), "+.2f"),
        ("explained variance", column("explained_variance"), ".2f"),
        *beside,
        *((f"{head} entropy", entropy(head), ".2f") for head in HEADS),
    ):
        figures += [(f"{told}, {part}", mean_of(read, n), form) for n, part in enumerate(PARTS)]
    for live in (2, 3):
        figures += [
            (f"decisions a round, {live} live", mean_of(counted("decisions", live)), ".0f"),
            (f"credits a round, {live} live", mean_of(counted("credits", live)), ".2f"),
            (f"credit a round, {live} live", mean_of(counted("credit", live)), ".3f"),
            (f"fossils that paid credit, {live} live", credited_share(live), ".0%"),
        ]
    figures += [
        ("round, s", round_time, ".1f"),
        ("update, s", update_time, ".2f"),
        ("peak memory, GiB", memory, ".2f"),
    ]
    runs = results.runs
    facts: list[tuple[str, Callable[[dict[int, list[Line]]], str]]] = [
        ("parameters", lambda seeds: f"{next(iter(seeds.values()))[0]['parameters']:,}"),
        ("seeds", lambda seeds: str(len(seeds))),
        ("rounds compared", lambda seeds: str(len(next(iter(seeds.values()))))),
    ]
    return [
        *((told, [fact(seeds) for seeds in runs.values()]) for told, fact in facts),
        *(
            (told, [interval(list(results.values(name, figure).values()), form) for name in runs])
            for told, figure, form in figures
        ),
    ]


def interval(values: Sequence[float], form: str) -> str:
    """Return a mean over seeds with its interval, as far as there are enough seeds."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    found = paired_interval(values)
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def criteria(results: Results) -> list[tuple[str, str, str]]:
    """Return every success criterion of 000 and 002 with what was measured and its answer."""
    if not {BEFORE, AFTER} <= set(results.runs):
        return [("all", "runs of V1 and V2 are missing", "–")]

    def compare(figure: Figure, form: str = "+.2f") -> tuple[str, str]:
        values = results.differences(figure)
        if len(values) < 2:
            return f"V2 − V1: {interval(values, form)}", "too few seeds"
        found = paired_interval(values)
        answer = "yes" if found.low >= 0 else "no" if found.high < 0 else "cannot be told"
        return f"V2 − V1: {interval(values, form)}", answer

    def alone(name: str, figure: Figure, least: float) -> tuple[str, str]:
        values = list(results.values(name, figure).values())
        if len(values) < 2:
            return interval(values, "+.2f"), "too few seeds"
        found = paired_interval(values)
        answer = "yes" if found.low > least else "no" if found.high < least else "cannot be told"
        return interval(values, "+.2f"), answer

    def kept(head: str) -> tuple[str, str]:
        last = list(results.values(AFTER, mean_of(entropy(head), 2)).values())
        least = results.values(AFTER, least_entropy(head)).values()
        if not last:
            return "never drawn", "–"
        told = f"{interval(last, '.2f')} in the last third, {min(least):.2f} at the least"
        return told, "yes" if min(least) >= CRITICAL else "no"

    explained = mean_of(column("explained_variance"), 2)
    times = {name: results.values(name, round_time) for name in (BEFORE, AFTER)}
    slow, fast = (fmean(times[name].values()) for name in (AFTER, BEFORE))
    speed = f"{slow:.1f} s against {fast:.1f} s: {slow / fast:.2f} times"
    return [
        ("V1 learns: return, last third − first", *alone(BEFORE, learned, 0.0)),
        ("V2 learns: return, last third − first", *alone(AFTER, learned, 0.0)),
        (
            "000, 1: V2's curve matches or exceeds V1's (return, all rounds)",
            *compare(mean_of(column("return"))),
        ),
        ("000, 1: return, last third", *compare(mean_of(column("return"), 2))),
        ("000, 1: gain over waiting, last third, points", *compare(mean_of(column("gain"), 2))),
        *(
            (
                f"000, 2; 002, 6: hindsight credits a round, {live} live",
                *compare(mean_of(counted("credits", live))),
            )
            for live in (2, 3)
        ),
        ("000, 3; 002, 5: explained variance improves, last third", *compare(explained)),
        ("000, 3: V2's explained variance is above 0", *alone(AFTER, explained, 0.0)),
        (f"000, 4: blueprint entropy on GERMINATE stays above {CRITICAL}", *kept("blueprint")),
        (
            f"000, 5: a round within {SLOWEST:g} times V1's",
            speed,
            "yes" if slow <= SLOWEST * fast else "no",
        ),
        ("002, 3: V3's curve matches V2's observation", "there is no V2 to compare with", "–"),
        ("002, 4: extraction at least 5 times as fast", "`esper bench observation`", "–"),
        (f"002, 7: tempo entropy on GERMINATE stays above {CRITICAL}", *kept("tempo")),
    ]
