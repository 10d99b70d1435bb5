"""V1 against V2 on the documents' own case, every version and seed in a process of its own.

V1 (`documents-v1`) is the policy that the documents replaced, V2 (`documents-000`) the one they
describe: 150 decisions an episode, three slots, the reward `shaped`. Everything else is the same
for all of them: our learner's settings (the documents' own single pass an update hardly moves a
policy in the time there is), the same networks, the same length. Our own policy at three widths
comes after them.

    python research/campaign/versions.py --out versions.jsonl --processes 16 --seconds 520
    python research/campaign/versions.py --summary versions.jsonl

At most `--processes` of them play a round at any time, and whoever has played the fewest rounds is
next; ours get what V1 and V2 leave free. Every round is a line of JSON in `--out`, and the folder
beside it (`versions.state`) has every run as of its last round: the same command goes on from
there. `--pack FOLDER` writes these states without the optimizer's moments and with weights in half
precision, for going on elsewhere: put that folder in the place of `versions.state`.

It needs PyTorch, NumPy, SciPy, safetensors and scikit-learn's folder (its digits; nothing of
scikit-learn is imported).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from versions_table import AFTER, BEFORE, HEADS, Line, print_summary, read_lines

from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import is_in
from esper.leyline.stages import LIVE_STAGES
from esper.simic.training.config import LEARNER, TrainConfig, get_recipe
from esper.simic.training.episodes import TwinCurves
from esper.simic.training.outcome import RoundOutcome
from esper.simic.training.progress import RoundReport
from esper.simic.training.row_source import TaskRows
from esper.simic.training.vectorized import Trainer
from esper.utils.process import choose_device

OURS = tuple(f"ours-{width}" for width in (128, 256, 512))
VERSIONS = (BEFORE, AFTER, *OURS)

SEED_POOL = 16
"""Networks that a run draws its rows from, so that their waiting twins are trained once."""

FORMAT = "esper-versions-1"


def configuration(name: str, seed: int, options: argparse.Namespace) -> TrainConfig:
    """Return the run of a version: its own network and entropy weights, the rest is shared."""
    theirs = get_recipe("digits" if name in OURS else name)
    policy = theirs.policy
    if name in OURS:
        policy = policy.replace(lstm_hidden_dim=int(name.removeprefix("ours-")))
    return TrainConfig(
        recipe=name,
        tasks=(options.task,),
        data=options.data,
        rounds=options.rounds,
        rows=options.rows,
        rows_per_seed=1,
        seed_pool=SEED_POOL,
        episode_length=options.steps,
        seed=seed,
        device=choose_device(options.device).type,
        horizon=get_recipe(AFTER).horizon,
        policy=policy,
        ppo=LEARNER.replace(entropy_multipliers=theirs.ppo.entropy_multipliers),
        reward=get_recipe(AFTER).reward.replace(gamma=LEARNER.gamma),
        evaluate_every=0,
        recorded_rows=0,
    )


# --- one run in a process of its own -------------------------------------------------------------


def play(options: argparse.Namespace) -> None:
    """Play a round for every line on stdin, answer each with a line of JSON, save the state."""
    torch.set_num_threads(1)
    (name, seed), state = options.worker.rsplit(":", 1), Path(options.state)
    config = configuration(name, int(seed), options)
    trainer = Trainer(config)
    try:
        scores = load_state(trainer, state) if state.exists() else waiting_scores(trainer)
        parameters = sum(each.numel() for each in trainer.policy.network.parameters())
        rounds = trainer.run()
        for _ in sys.stdin:
            began = time.monotonic()
            report = next(rounds)
            line = {
                "name": name,
                "seed": config.seed,
                "rounds": config.rounds,
                "rows": config.rows,
                "steps": config.episode_length,
                "device": config.device,
                "parameters": parameters,
                **describe_round(report, scores),
                "memory_bytes": peak_memory(),
                "wall_seconds": time.monotonic() - began,
            }
            print(json.dumps(line), flush=True)
            # In this order a round may be written twice and is never lost.
            save_state(trainer, scores, state)
    finally:
        trainer.close()


def waiting_scores(trainer: Trainer) -> dict[int, float]:
    """Return the final validation score of every network of the run that only waits, by seed."""
    rows, config = trainer.row_source, trainer.config
    assert isinstance(rows, TaskRows), "rows of a task"
    plans = [rows.plan(number, 0) for number in range(config.rounds)]
    twins = TwinCurves(rows, config)
    for _ in twins.prepare(plans):
        pass
    return {
        seed: float(curve[-1])
        for plan in plans
        for seed, curve in zip(plan.env_seeds, twins.scores(plan), strict=True)
    }


def describe_round(report: RoundReport, waiting: Mapping[int, float]) -> Line:
    """Return what is compared of a round."""
    outcome = report.outcome
    heads = {row["head"]: row for row in report.update.heads if row["head"] in HEADS}
    twins = torch.tensor([waiting[seed] for seed in outcome.env_seeds], dtype=torch.float64)
    return {
        "round": report.round,
        "return": report.return_mean,
        "gain": float((outcome.final_scores - twins).mean()),
        "explained_variance": report.explained_variance,
        "potential_share": report.potential_share,
        "kl": report.approx_kl,
        "entropy": {head: row["entropy_conditional"] for head, row in heads.items()},
        "ops": outcome.op_counts(),
        "fossilization_rate": report.fossilization_rate,
        **scaffold_credit(outcome),
        "seconds": report.seconds,
        "timings": dict(report.timings),
    }


def scaffold_credit(outcome: RoundOutcome) -> Line:
    """Return how often, and with how much credit, a fossil paid for its scaffolds.

    All of it is counted by the seeds that lived just before the decision. The seed that is
    fossilized is one of them: with two, another one lived beside it.
    """
    stage, active = outcome.states["stage"][:, :-1], outcome.active
    live = is_in(stage, LIVE_STAGES).sum(-1)
    credit = outcome.detail("hindsight_credit")
    assert credit is not None, "the reward records hindsight credit"
    earned = (credit > 0) & active
    fossils = (outcome.decisions["effective_op"] == int(LifecycleOp.FOSSILIZE)) & active
    numbers = range(stage.shape[-1] + 1)
    return {
        "credits": {n: int((earned & (live == n)).sum()) for n in numbers if n},
        "credit": {n: float(credit[earned & (live == n)].sum()) for n in numbers if n},
        "fossils": {n: int((fossils & (live == n)).sum()) for n in numbers if n},
        "decisions": {n: int((active & (live == n)).sum()) for n in numbers},
    }


def peak_memory() -> int:
    """Return the most memory that the process has used: the GPU's, or else its own."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10


def save_state(trainer: Trainer, waiting: Mapping[int, float], path: Path) -> None:
    """Save a run between two rounds; the file is whole at any time."""
    part = path.with_suffix(".part")
    torch.save({"format": FORMAT, "waiting": dict(waiting), **trainer.state_dict()}, part)
    part.replace(path)


def load_state(trainer: Trainer, path: Path) -> dict[int, float]:
    """Go on from a saved state, and return the scores of its waiting networks.

    What a packed state lacks, the optimizer's moments and the imitated episodes, starts afresh.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state.pop("format", None) != FORMAT:
        raise SystemExit(f"{path} is not a state of this script; delete it to begin anew")
    planned = state["config"]["rounds"]
    if planned != trainer.config.rounds:
        raise SystemExit(
            f"{path} was saved with --rounds {planned}, which the learning rate follows; "
            f"write --rounds {planned}, or another --out"
        )
    state["agent"] = {**trainer.agent.state_dict(), **_with_floats(state["agent"], torch.float32)}
    waiting: dict[int, float] = state.pop("waiting")
    trainer.load_state_dict(state)
    return waiting


def pack_states(folder: Path, out: Path) -> int:
    """Write every state of a folder without moments and imitated episodes; return the bytes."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("*.pt")):
        state = torch.load(path, map_location="cpu", weights_only=True)
        agent = {
            name: part
            for name, part in state["agent"].items()
            if name not in ("optimizer", "good_episodes")
        }
        state["agent"] = _with_floats(agent, torch.float16, least=1024)
        torch.save(state, out / path.name)
    return sum(path.stat().st_size for path in out.glob("*.pt"))


def _with_floats(tree: Any, dtype: torch.dtype, least: int = 0) -> Any:
    """Return a state with its half or single precision tensors of `least` entries in `dtype`."""
    if isinstance(tree, dict):
        return {name: _with_floats(part, dtype, least) for name, part in tree.items()}
    if isinstance(tree, torch.Tensor) and tree.dtype in (torch.float16, torch.float32):
        return tree.to(dtype) if tree.numel() >= least else tree
    return tree


# --- all of them side by side --------------------------------------------------------------------


class Job:
    """One version with one seed: its process, and how far it is."""

    def __init__(self, name: str, seed: int, played: int, arguments: Sequence[str]) -> None:
        """Describe it; the process starts with its first round."""
        self.name, self.seed, self.played = name, seed, played
        self.busy = self.failed = False
        self.seconds = 0.0
        """What its last round took, the start of its process aside."""
        self._arguments = [*arguments, "--worker", f"{name}:{seed}"]
        self._process: subprocess.Popen[str] | None = None

    @property
    def label(self) -> str:
        """Version and seed."""
        return f"{self.name}-{self.seed}"

    def begin_round(self, answers: queue.SimpleQueue[tuple[Job, str | None]]) -> None:
        """Ask for a round; its line, or None where the process ended, comes through the queue."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            threading.Thread(target=self._listen, args=(answers,), daemon=True).start()
        assert self._process.stdin is not None
        self.busy = True
        with contextlib.suppress(BrokenPipeError):  # its end comes through the queue
            self._process.stdin.write("round\n")
            self._process.stdin.flush()

    def _listen(self, answers: queue.SimpleQueue[tuple[Job, str | None]]) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for text in self._process.stdout:
            answers.put((self, text))
        answers.put((self, None))

    def end(self) -> None:
        """End the process; a round in progress is lost, its run is saved as of the last one."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        if self.busy:
            self._process.terminate()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def next_job(jobs: Sequence[Job], rounds: int, seconds_left: float) -> Job | None:
    """Return whose round is next: V1 and V2 before ours, then whoever has played the fewest.

    A round that would not end in time, by the one before, is not begun.
    """
    ready = [
        job
        for job in jobs
        if not (job.busy or job.failed)
        and job.played < rounds
        and 1.1 * job.seconds <= seconds_left
    ]
    return min(ready, key=lambda job: (job.name in OURS, job.played), default=None)


def run_side_by_side(options: argparse.Namespace) -> bool:
    """Play rounds until time is up; return whether every run has come to its end."""
    began = time.monotonic()
    folder = options.out.with_suffix(".state")
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(name, seed, played_rounds(folder, name, seed), worker_arguments(options, folder, label))
        for seed in range(options.seeds)
        for name in options.versions
        for label in [f"{name}-{seed}"]
    ]
    answers: queue.SimpleQueue[tuple[Job, str | None]] = queue.SimpleQueue()
    with options.out.open("a", encoding="utf-8") as file:
        try:
            for line in _rounds(jobs, options, began, answers):
                file.write(json.dumps(line) + "\n")
                file.flush()
                print(_told(time.monotonic() - began, line), flush=True)
        finally:
            for job in jobs:
                job.end()
    left = [job.label for job in jobs if job.played < options.rounds]
    if left:
        print(f"not at their end: {', '.join(left)}; the same command goes on", flush=True)
    return not left


def _rounds(
    jobs: Sequence[Job],
    options: argparse.Namespace,
    began: float,
    answers: queue.SimpleQueue[tuple[Job, str | None]],
) -> Iterator[Line]:
    """Yield every round when it is played."""
    while True:
        left = options.seconds - (time.monotonic() - began)
        while sum(job.busy for job in jobs) < options.processes and left > 0:
            job = next_job(jobs, min(options.rounds, options.most_rounds or options.rounds), left)
            if job is None:
                break
            job.begin_round(answers)
        if left <= 0 or not any(job.busy for job in jobs):
            return
        try:
            job, text = answers.get(timeout=left)
        except queue.Empty:
            return
        job.busy = False
        if text is None:
            job.failed = True
            print(f"{job.label} ended early; what it said is above", file=sys.stderr, flush=True)
            continue
        line: Line = json.loads(text)
        job.seconds, job.played = line["wall_seconds"], line["round"] + 1
        yield line


def played_rounds(folder: Path, name: str, seed: int) -> int:
    """Return how many rounds the saved state of a run has behind it."""
    path = folder / f"{name}-{seed}.pt"
    if not path.exists():
        return 0
    return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["round"])


def worker_arguments(options: argparse.Namespace, folder: Path, label: str) -> list[str]:
    """Return the command line of a run's own process."""
    shared = ("task", "steps", "rounds", "rows", "device")
    given = [text for name in shared for text in (f"--{name}", str(getattr(options, name)))]
    data = [] if options.data is None else ["--data", options.data]
    return [*given, *data, "--state", str(folder / f"{label}.pt")]


def _told(seconds: float, line: Line) -> str:
    explained = line["explained_variance"]
    return (
        f"[{seconds:4.0f} s] {line['name']}, seed {line['seed']}, round {line['round'] + 1}/"
        f"{line['rounds']}: return {line['return']:+.3f}, gain {line['gain']:+.2f}, explained "
        f"{'–' if explained is None else format(explained, '.2f')}, {line['wall_seconds']:.1f} s"
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--summary", type=Path, help="print the tables of this file and end")
    parser.add_argument("--out", type=Path, default=Path("versions.jsonl"))
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=list(VERSIONS))
    parser.add_argument("--seeds", type=int, default=5, help="runs of every version")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data", help="file or folder; the usual places if not given")
    parser.add_argument("--steps", type=int, default=150, help="decisions of an episode")
    parser.add_argument("--rows", type=int, default=64, help="networks side by side in a run")
    parser.add_argument("--rounds", type=int, default=32, help="of every run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once")
    parser.add_argument("--seconds", type=float, default=520.0, help="stop by then")
    parser.add_argument("--most-rounds", type=int, help="stop after as many of every run, too")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--pack", type=Path, help="at the end, write small states to this folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Play what is left, or print what was found."""
    options = parse(arguments)
    if options.summary is not None:
        print_summary(read_lines(options.summary))
        return 0
    if options.worker is not None:
        play(options)
        return 0
    is_done = run_side_by_side(options)
    if options.pack is not None:
        size = pack_states(options.out.with_suffix(".state"), options.pack)
        print(f"states without moments: {size / 2**20:.1f} MiB in {options.pack}")
    print_summary(read_lines(options.out))
    return 0 if is_done else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
