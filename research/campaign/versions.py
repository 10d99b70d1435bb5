"""V1 against V2 on networks: the documents' policies and ours at three widths, side by side.

Six policies with their learners train on CIFAR-10 at 16x16 with three seeds each: what the
documents replaced (`documents-v1`), what they describe (`documents-000`, `documents-001`), and ours
at 128, 256 and 512. Task, reward, hosts, rows and length are those of the recipe `cifar16` for all
of them, so that returns can be compared.

    python research/campaign/versions.py --data cifar16.npz --out versions.jsonl --seconds 1500
    python research/campaign/versions.py --summary versions.jsonl

Every round is a line of JSON. Where time is up the run in progress is saved in the folder beside
`--out`; the same command goes on from there, and leaves out what is done. `--summary` prints the
table, and answers the success criteria of documents 000 and 002 one by one.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.process import choose_device
from esper.leyline.rules import is_in
from esper.leyline.stages import LIVE_STAGES
from esper.runs.training import TrainingRun, resume_training, start_training
from esper.simic.training.config import TrainConfig
from esper.simic.training.evaluation import paired_interval
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.progress import Progress, RoundReport
from esper.simic.training.recipes import get_recipe

BEFORE, AFTER = "documents-v1", "documents-000"
"""What document 000 calls V1 and V2."""

DOCUMENTS = (BEFORE, AFTER, "documents-001")
WIDTHS = (128, 256, 512)
HEADS = ("blueprint", "tempo")

COLLAPSED = 0.05
"""Normalised entropy below which the alarm `head_collapse` speaks of these heads."""

SLOWEST = 2.0
"""Times as long as a round of V1 that one of V2 may take, by document 000."""

Line = dict[str, Any]


# --- training ----------------------------------------------------------------------------------


def configurations(options: argparse.Namespace) -> dict[str, TrainConfig]:
    """Return the six of them by name, all on the same networks."""
    device = choose_device(options.device).type
    base = get_recipe("cifar16")
    base = base.replace(
        data=None if options.data is None else str(options.data.absolute()),
        device=device,
        rows=options.rows,
        rounds=options.rounds,
        episode_length=options.steps or base.episode_length,
        evaluate_every=0,
        recorded_rows=0,
        population=base.population.replace(use_bf16=device == "cuda"),
    )
    found = {}
    for name in DOCUMENTS:
        theirs = get_recipe(name)
        found[name] = base.replace(
            recipe=name,
            policy=theirs.policy,
            ppo=theirs.ppo,
            horizon=theirs.horizon,
            reward=base.reward.replace(gamma=theirs.ppo.gamma),
        )
    for width in WIDTHS:
        name = f"ours-{width}"
        policy = base.policy.replace(lstm_hidden_dim=width)
        found[name] = base.replace(recipe=name, policy=policy)
    return found


def work(options: argparse.Namespace) -> bool:
    """Train what is left, one after another, until time is up; return whether all is done."""
    deadline = time.monotonic() + options.seconds
    folder = options.out.with_suffix(".runs")
    folder.mkdir(parents=True, exist_ok=True)
    done = {(line["name"], line["seed"], line["round"]) for line in read_lines(options.out)}
    chosen = configurations(options)
    with options.out.open("a", encoding="utf-8") as file:
        # All of them with one seed before any has another, so that a short time is shared fairly.
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for name, config in chosen.items():
                if options.only and name not in options.only:
                    continue
                if (name, seed, options.rounds - 1) in done:
                    continue

                def write(line: Line) -> None:
                    file.write(json.dumps(line) + "\n")
                    file.flush()

                with _open(folder / f"{name}-{seed}", config.replace(seed=seed)) as run:
                    is_done = _train(run, name, write, deadline)
                _free()
                if not is_done:
                    print(
                        f"time is up in {name}, seed {seed}; the same command goes on", flush=True
                    )
                    return False
    return True


def _open(folder: Path, config: TrainConfig) -> TrainingRun:
    """Start a run, or open the one that an earlier call did not finish."""
    if folder.exists():
        return resume_training(folder, sinks=())
    return start_training(folder, config, sinks=(), command="versions.py")


def _train(run: TrainingRun, name: str, write: Callable[[Line], None], deadline: float) -> bool:
    """Go on with a run, a line for every round; return whether it came to its end."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    parameters = sum(each.numel() for each in run.trainer.policy.network.parameters())
    began = time.monotonic()

    def show(progress: Progress) -> None:
        report = progress.report
        if report is None:
            return
        line = {
            "name": name,
            "seed": run.config.seed,
            "rounds": run.config.rounds,
            "rows": run.config.rows,
            "device": run.config.device,
            "parameters": parameters,
            **describe_round(report),
            "memory_bytes": peak_memory(),
        }
        write(line)
        print(
            f"[{time.monotonic() - began:4.0f} s] {name}, seed {line['seed']}, round "
            f"{line['round'] + 1}/{line['rounds']}: return {line['return']:+.3f}, "
            f"explained {line['explained_variance']:.2f}, {line['seconds']:.1f} s",
            flush=True,
        )

    return run.carry_out(show, lambda: time.monotonic() >= deadline)


def describe_round(report: RoundReport) -> Line:
    """Return what is compared of a round."""
    outcome, heads = report.outcome, {head: report.update.head(head) for head in HEADS}
    return {
        "round": report.round,
        "return": report.return_mean,
        "gain": report.gain_mean,
        "explained_variance": report.explained_variance,
        "kl": report.approx_kl,
        "entropy": {head: row["entropy_conditional"] for head, row in heads.items()},
        "ops": outcome.op_counts(),
        "fossilization_rate": report.fossilization_rate,
        **scaffold_credit(outcome),
        "seconds": report.seconds,
        "timings": dict(report.timings),
    }


def scaffold_credit(outcome: RoundOutcome) -> Line:
    """Return how often a fossil's scaffolds earned credit, by the seeds that lived just before.

    The seed that is fossilized is one of them: with two, another one lived beside it. Decisions
    are counted by live seeds too, since credit needs that seeds live together at all.
    """
    stage, active = outcome.states["stage"][:, :-1], outcome.active
    live = is_in(stage, LIVE_STAGES).sum(-1)
    credit = outcome.detail("hindsight_credit")
    assert credit is not None, "the reward records hindsight credit"
    earned = (credit > 0) & active
    numbers = range(stage.shape[-1] + 1)
    return {
        "credits": {n: int((earned & (live == n)).sum()) for n in numbers if n},
        "credit_sum": float(credit[earned].sum()),
        "fossilized": int((outcome.decisions["effective_op"] == int(LifecycleOp.FOSSILIZE)).sum()),
        "decisions": {n: int((active & (live == n)).sum()) for n in numbers},
    }


def peak_memory() -> int:
    """Return the most memory in use so far in this run: the GPU's, or else the process's."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- what was found ----------------------------------------------------------------------------


def read_lines(path: Path) -> list[Line]:
    """Return the rounds that were written, each once; none where there is no file."""
    if not path.exists():
        return []
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return list({(line["name"], line["seed"], line["round"]): line for line in lines}.values())


class Results:
    """The rounds by policy and seed, and figures of them."""

    def __init__(self, lines: Sequence[Line]) -> None:
        """Sort the rounds; runs that were cut off are left out."""
        self.runs: dict[str, dict[int, list[Line]]] = {}
        for line in sorted(lines, key=lambda line: line["round"]):
            self.runs.setdefault(line["name"], {}).setdefault(line["seed"], []).append(line)
        for name, seeds in self.runs.items():
            self.runs[name] = {
                seed: rounds for seed, rounds in seeds.items() if len(rounds) == rounds[0]["rounds"]
            }
        self.runs = {name: seeds for name, seeds in self.runs.items() if seeds}

    def by_seed(self, name: str, figure: Callable[[list[Line]], float | None]) -> dict[int, float]:
        """Return a figure of every run of a policy, by seed, where it has one."""
        found = {seed: figure(rounds) for seed, rounds in self.runs.get(name, {}).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def differences(self, figure: Callable[[list[Line]], float | None]) -> list[float]:
        """Return V2 minus V1 for every seed that both have."""
        old, new = self.by_seed(BEFORE, figure), self.by_seed(AFTER, figure)
        return [new[seed] - old[seed] for seed in new if seed in old]


def late(key: str) -> Callable[[list[Line]], float | None]:
    """Return the mean of a column over the second half of a run."""

    def figure(rounds: list[Line]) -> float | None:
        values = [line[key] for line in rounds[len(rounds) // 2 :] if line[key] is not None]
        return fmean(values) if values else None

    return figure


def entropy(
    head: str, which: Callable[[list[float]], float]
) -> Callable[[list[Line]], float | None]:
    """Return one of a head's conditional entropies over a run: the first, the least, the last."""

    def figure(rounds: list[Line]) -> float | None:
        values = [line["entropy"][head] for line in rounds if line["entropy"][head] is not None]
        return which(values) if values else None

    return figure


def first(values: list[float]) -> float:
    """Return the first."""
    return values[0]


def last(values: list[float]) -> float:
    """Return the last."""
    return values[-1]


def credits_together(rounds: list[Line]) -> float:
    """Return how often credit was earned in a round beside another live seed, in the mean."""
    return fmean(
        sum(count for n, count in line["credits"].items() if int(n) >= 2) for line in rounds
    )


def time_together(rounds: list[Line]) -> float:
    """Return the share of decisions at which two or more seeds lived."""
    together = sum(
        count for line in rounds for n, count in line["decisions"].items() if int(n) >= 2
    )
    return float(together / sum(sum(line["decisions"].values()) for line in rounds))


def round_time(rounds: list[Line]) -> float:
    """Return the median time of a round without its twins; the first has captures to make."""
    later = rounds[1:] or rounds
    return float(median(line["seconds"] - line["timings"]["twins"] for line in later))


def update_time(rounds: list[Line]) -> float:
    """Return the median time of an update."""
    return float(median(line["timings"]["update"] for line in rounds[1:] or rounds))


def memory(rounds: list[Line]) -> float:
    """Return the most memory of a run in GiB."""
    return float(max(line["memory_bytes"] for line in rounds)) / 2**30


def print_summary(lines: Sequence[Line]) -> None:
    """Print one row per policy, then the documents' criteria."""
    results = Results(lines)
    columns: dict[str, tuple[Callable[[list[Line]], float | None], str]] = {
        "return": (late("return"), "+.3f"),
        "gain": (late("gain"), "+.2f"),
        "explained": (late("explained_variance"), ".2f"),
        **{
            f"{head} entropy, {told}": (entropy(head, which), ".2f")
            for head in HEADS
            for told, which in (("first", first), ("least", min), ("last", last))
        },
        "credits a round, 2 or 3 live": (credits_together, ".1f"),
        "decisions with 2 or 3 live": (time_together, ".1%"),
        "round s": (round_time, ".1f"),
        "update s": (update_time, ".2f"),
        "peak GiB": (memory, ".2f"),
    }
    print(f"| policy | parameters | seeds | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 3) + "|")
    for name, seeds in results.runs.items():
        cells = [
            _told(list(results.by_seed(name, f).values()), form) for f, form in columns.values()
        ]
        parameters = next(iter(seeds.values()))[0]["parameters"]
        print(f"| {name} | {parameters:,} | {len(seeds)} | {' | '.join(cells)} |")
    print("\nReturn, gain and explained variance over the second half of a run; ± is the deviation")
    print("between seeds.\n")
    print("| criterion | measured (V1 is documents-v1, V2 documents-000) | answer |\n|---|---|---|")
    for answered in criteria(results):
        print(f"| {' | '.join(answered)} |")


def _told(values: list[float], form: str) -> str:
    if not values:
        return "–"
    spread = torch.tensor(values).std() if len(values) > 1 else None
    return f"{fmean(values):{form}}" + ("" if spread is None else f" ± {spread:{form.strip('+')}}")


def criteria(results: Results) -> list[tuple[str, str, str]]:
    """Return every success criterion of 000 and 002 with what was measured and its answer."""
    if not {BEFORE, AFTER} <= set(results.runs):
        return [("all", "runs of V1 and V2 are missing", "–")]

    def compare(figure: Callable[[list[Line]], float | None]) -> tuple[str, str]:
        values = results.differences(figure)
        if len(values) < 2:
            return f"V2 − V1: {values}", "too few seeds"
        interval = paired_interval(torch.tensor(values, dtype=torch.float64))
        answer = "yes" if interval.low >= 0 else "no" if interval.high < 0 else "cannot be told"
        return f"V2 − V1: {interval}", answer

    def kept(*heads: str) -> tuple[str, str]:
        least = {head: results.by_seed(AFTER, entropy(head, min)).values() for head in heads}
        told = ", ".join(f"{head} at least {min(v):.2f}" for head, v in least.items() if v)
        holds = all(v and min(v) >= COLLAPSED for v in least.values())
        return told or "none drawn", "yes" if holds else "no"

    explained = results.by_seed(AFTER, late("explained_variance"))
    before = results.by_seed(BEFORE, late("explained_variance"))
    positive = (
        f"V2 {fmean(explained.values()):.2f}, V1 {fmean(before.values()):.2f}",
        "yes" if fmean(explained.values()) > max(0.0, fmean(before.values())) else "no",
    )
    slow, fast = (median(results.by_seed(n, round_time).values()) for n in (AFTER, BEFORE))
    speed = (f"{slow:.1f} s against {fast:.1f} s", "yes" if slow <= SLOWEST * fast else "no")
    return [
        ("000, 1: V2 curves match or exceed V1 (return)", *compare(late("return"))),
        ("000, 1: the same in points over the twin", *compare(late("gain"))),
        ("000, 2; 002, 6: scaffolding credit improves", *compare(credits_together)),
        ("000, 3; 002, 5: explained variance improves, above 0", *positive),
        ("000, 4: blueprint entropy kept during GERMINATE", *kept("blueprint")),
        (f"000, 5: a round within {SLOWEST:g} times V1", *speed),
        ("002, 3: V3 curves match or exceed V2's observation", "there is no V2 (0060)", "–"),
        ("002, 7: entropies of the sparse heads are stable", *kept(*HEADS)),
    ]


def main(arguments: Sequence[str]) -> int:
    """Train what is left, or print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="file or folder; the usual places if not given")
    parser.add_argument("--out", type=Path, default=Path("versions.jsonl"))
    parser.add_argument("--summary", type=Path, help="print the tables of this file and end")
    parser.add_argument("--seconds", type=float, default=1500.0, help="stop by then")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*DOCUMENTS, *(f"ours-{width}" for width in WIDTHS)),
        help="some of them: several processes, each with a file of its own, can share a device",
    )
    parser.add_argument("--rounds", type=int, default=6, help="of every run")
    parser.add_argument("--rows", type=int, default=64, help="networks side by side")
    parser.add_argument("--steps", type=int, help="decisions of an episode; cifar16's by default")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args(arguments)
    if options.summary is not None:
        print_summary(read_lines(options.summary))
        return 0
    torch.set_num_threads(1)
    is_done = work(options)
    print_summary(read_lines(options.out))
    return 0 if is_done else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
