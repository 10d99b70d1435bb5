"""Digests of the results of eight small runs, to show that a code change did not change them.

`python -m tools.digests [NAME ...]` plays the runs and compares every figure with digests.json
beside this file; it names what differs and exits with 1. `--write` records the figures instead.
Every run is a process of its own, a few seconds to half a minute on one core. A run that needs a
package that is not installed (Ray, Gymnasium) is skipped by name, and its recorded figures stay.

What is promised: on one machine, with the same PyTorch and the same instruction set, equal code
gives equal digests. So record before a change and compare after it, on the same machine: `--file`
keeps the figures of another machine apart from those that are committed. `--set` says which vector
instructions PyTorch, oneDNN and MKL may use. `default` has the narrowest, and is the most likely to
agree between processors; NumPy and the C library still choose by processor, so nobody promises it.

What counts: scores, decisions, rewards, gradients, weights, counts. What does not: times, memory,
paths, versions, names of files, and sentences for people. A figure is one column of a table in the
store, one part of a JSON file, one field of signals, or all weights of a network whatever they are
called; so a figure that was only renamed is reported as gone and as new, with equal digests.

The runs use promised names alone (the command line, `import esper`, tables and files of a run
folder): they can be played on a tree whose modules have moved. `ENVIRONMENTS` is the exception.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import runpy
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.instruction_sets import INSTRUCTION_SETS, available

ROOT = Path(__file__).resolve().parents[1]
RECORDED = Path(__file__).with_suffix(".json")
ENVIRONMENTS = "esper.lab.envs"
"""The package that registers `Esper/Grow-v1` with Gymnasium."""

Figures = dict[str, str]
"""Digests of a run by the name of the figure."""

TABLES = (
    *("runs", "rounds", "updates", "update_heads", "episodes", "epochs", "decisions"),
    *("seeds", "seed_stages", "contributions", "alarms", "events"),
)
"""Tables of a store, in which order matters."""

VOLATILE = re.compile(
    r"""(.*_)?(seconds|time|path|folder|file|memory_bytes|gpu_memory_share)
    | steps_per_s | wait_s | waits | dropped | created | host | process | node | run_id | versions
    | id | version | config | command | run | policy | report | exported | out | resumes | name
    | message | advice | note | reason | why | verdicts""",
    re.VERBOSE,
)
"""Columns and keys of figures that two runs of the same code may have different, and of prose."""


# ------------------------------------------------------------------------------ what is hashed


def digest(*parts: bytes) -> str:
    """Return a short digest of some bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()[:16]


def without_volatile(value: Any) -> Any:
    """Return plain data without the keys that may change from run to run."""
    if isinstance(value, Mapping):
        return {
            key: without_volatile(inner)
            for key, inner in value.items()
            if not VOLATILE.fullmatch(str(key))
        }
    if isinstance(value, list | tuple):
        return [without_volatile(inner) for inner in value]
    return value


def digest_data(value: Any) -> str:
    """Return the digest of plain data; numbers count to the last bit."""
    return digest(json.dumps(without_volatile(value), sort_keys=True).encode())


def digest_tensors(tensors: Iterable[Any]) -> str:
    """Return the digest of tensors, whatever their names and their order."""
    return digest(*sorted(tensor_bytes(tensor) for tensor in tensors))


def tensor_bytes(tensor: Any) -> bytes:
    """Return shape, type and content of a tensor."""
    import torch

    array = tensor.detach().cpu().contiguous()
    content: bytes = array.flatten().view(torch.uint8).numpy().tobytes()
    return f"{tuple(array.shape)} {array.dtype} ".encode() + content


def store_figures(path: Path) -> Figures:
    """Return a digest for every column of a store that has any value."""
    figures = {}
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        for table in TABLES:
            found = connection.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in found.description]
            rows = [dict(zip(names, row, strict=True)) for row in found]
            places = [name for name in ("round", "row", "step", "ordinal", "id") if name in names]
            rows.sort(key=lambda row: [row[place] or 0 for place in places])
            for name in names:
                values = [_parsed(row[name]) for row in rows]
                # The time at which a run ended, not the epoch at which a seed did.
                is_time = (table, name) == ("runs", "ended")
                if VOLATILE.fullmatch(name) or is_time or all(value is None for value in values):
                    continue
                figures[f"{table}.{name}"] = digest_data(values)
    return figures


def _parsed(value: Any) -> Any:
    """Return a value of a column; text that is JSON becomes what it describes."""
    if isinstance(value, str) and value[:1] in "[{":
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def file_figures(folder: Path, *names: str) -> Figures:
    """Return a digest for every part of JSON files, and one for a file of JSON lines."""
    figures = {}
    for name in names:
        text = (folder / name).read_text(encoding="utf-8")
        if name.endswith(".jsonl"):
            lines = map(json.loads, text.splitlines())
            figures[name] = digest_data(sorted(lines, key=partial(json.dumps, sort_keys=True)))
            continue
        data = json.loads(text)
        # A few parts have names of ours, many are members of a family.
        parts = data if isinstance(data, dict) and len(data) < 40 else {"all": data}
        figures |= {
            f"{name}: {key}": digest_data(value)
            for key, value in parts.items()
            if not VOLATILE.fullmatch(key)
        }
    return figures


def weight_figures(folder: Path) -> Figures:
    """Return the digest of all weights that are saved below a folder."""
    from safetensors.torch import load_file

    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise SystemExit(f"error: {folder} has no weights; a run was to leave some")
    tensors = [each for file in files for each in load_file(file).values()]
    # Other tensors are bytes of descriptions, with settings in them.
    return {"weights": digest_tensors(each for each in tensors if each.is_floating_point())}


def named(name: str, figures: Figures) -> Figures:
    """Return figures of one of several parts of a run."""
    return {f"{name}/{key}": value for key, value in figures.items()}


# ----------------------------------------------------------------------------- the eight runs


def esper_command(*arguments: str) -> None:
    """Run a command of Esper in this process."""
    sys.argv = ["esper", *arguments, "--json"]
    code: Any = 0
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            runpy.run_module("esper", run_name="__main__")
        except SystemExit as end:
            code = end.code
    if code:
        raise SystemExit(f"error: esper {' '.join(arguments)} ended with {code}")


def digit_batches(size: int) -> list[tuple[Any, Any]]:
    """Return the embedded digits in batches."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images / 16.0, dtype=torch.float32)[:, None]
    return list(zip(images.split(size), torch.tensor(data.target).split(size), strict=True))


def small_cnn() -> Any:
    """Return a CNN with BatchNorm, always the same."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


def residual_network() -> Any:
    """Return a network of four residual blocks, always the same."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return x + nn.functional.gelu(self.layer(self.norm(x)))

    torch.manual_seed(1)
    blocks = nn.Sequential(*(Block() for _ in range(4)))
    return nn.Sequential(nn.Linear(64, 16), blocks, nn.Linear(16, 10))


EAGER = "heuristic:min_epoch=1,plateau_epochs=0,trial_epochs=1,measurement_epochs=2"
"""A heuristic that grows within a dozen epochs."""


def play_grow(folder: Path) -> Figures:
    """`esper grow`, `esper.grow`, `Gardener` in a loop of one's own, and `Deepen`."""
    import torch
    from torch.nn.functional import cross_entropy

    import esper

    out = folder / "command"
    settings = ("growth.garden.lifecycle.gates.min_training_epochs=2",)
    esper_command(
        *("grow", "--task", "digits", "--controller", EAGER, "--epochs", "24", "--device", "cpu"),
        *(part for setting in settings for part in ("--set", setting)),
        *("--seed", "3", "--twin", "--out", str(out)),
    )
    figures = named("command", store_figures(out / "run.db"))
    figures |= named("command", file_figures(out, "summary.json"))
    figures |= named("command", weight_figures(out / "grown"))

    batches = digit_batches(64)
    train, val = batches[:10], batches[10:14]
    grown = esper.grow(
        small_cnn(),
        train=train,
        val=val,
        epochs=30,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        max_growth=2.0,
        out=folder / "python",
        sinks=(),
        progress=False,
    )
    figures |= named("python", store_figures(folder / "python" / "run.db"))
    figures["python/weights"] = digest_tensors(grown.bake().state_dict().values())
    figures["python/losses"] = digest_data([record.val_loss for record in grown.history])

    figures |= named("own loop", _own_loop(train, val))

    deep = residual_network()
    optimizer = torch.optim.AdamW(deep.parameters(), lr=1e-2)
    depth = esper.Deepen(deep, optimizer, example=torch.zeros(2, 64), total_steps=40)
    losses = []
    for x, y in (batches[:20] * 2)[:40]:
        optimizer.zero_grad()
        loss = cross_entropy(deep(x.flatten(1)), y)
        loss.backward()
        optimizer.step()
        depth.step()
        losses.append(loss.item())
    figures["deepen/losses"] = digest_data([losses, depth.flops, dict(depth.awake)])
    figures["deepen/weights"] = digest_tensors(deep.state_dict().values())
    return figures


def _own_loop(train: Sequence[Any], val: Sequence[Any]) -> Figures:
    """Grow in a loop as the documentation shows it, by hand at first."""
    import torch
    from torch.nn.functional import cross_entropy

    import esper

    def evaluate(model: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            outputs = [(model(x), y) for x, y in val]
        loss = torch.cat([cross_entropy(out, y, reduction="none") for out, y in outputs])
        return loss, torch.cat([out.argmax(1) == y for out, y in outputs])

    garden = esper.Garden(small_cnn(), slots=["0", "2"], example_input=val[0][0])
    by_hand = [
        garden.germinate("0", blueprint="conv_light", style="sigmoid_add", tempo=3),
        garden.germinate("2", blueprint="norm"),
        garden.fossilize("2"),
        garden.prune("2", speed=0),
    ]
    gardener = esper.Gardener(garden, controller=EAGER, horizon=16)
    optimizer = gardener.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    seen = []
    for _ in range(16):
        garden.train()
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(garden(x), y).backward()
            optimizer.step()
        garden.eval()
        gardener.recalibrate(x for x, _ in train)
        gardener.step(evaluate)
        losses, _ = evaluate(garden)
        slots = [
            (str(slot.stage), slot.alpha, slot.blueprint, slot.epochs_in_stage)
            for slot in garden.slots.values()
        ]
        seen.append([losses.mean().item(), slots])
    found = esper.evaluate_contributions(garden, evaluate)
    return {
        "by hand": digest_data([result.ok for result in by_hand]),
        "epochs": digest_data(seen),
        "contributions": digest_data(
            {slot: [each.value, each.se] for slot, each in found.leave_one_out.items()}
        ),
        "weights": digest_tensors(garden.bake().state_dict().values()),
    }


def play_train(folder: Path) -> Figures:
    """`esper train smoke`, and a longer run of another policy and another reward."""
    figures = _train(folder / "smoke", "smoke")
    others = ("policy.layout=travelling", "reward.mode=shaped", "evaluate_every=1")
    busy = ("policy.initial_op_bias=[0, 2, 0, -2, 2, 3]", "evaluation_seeds=2")
    gates = ("population.lifecycle.gates.min_training_epochs=1",)
    more = [part for setting in (*others, *busy, *gates) for part in ("--set", setting)]
    size = ("--rounds", "1", "--episode-length", "16", "--seed", "2")
    return named("smoke", figures) | named(
        "longer", _train(folder / "longer", "smoke", *size, *more)
    )


def _train(out: Path, *arguments: str) -> Figures:
    """Return the figures of a training run in this process."""
    sequential = ("--set", "strategy=sequential")
    given = sequential if "strategy" not in " ".join(arguments) else ()
    esper_command("train", *arguments, *given, "--device", "cpu", "--out", str(out))
    return (
        store_figures(out / "run.db")
        | file_figures(out, "summary.json")
        | weight_figures(out / "checkpoints" / "latest" / "policy")
    )


MEMBERS = ("--family", "digits_family", "--count", "2", "--device", "cpu")
PLAYED = [
    part
    for setting in (
        "play.strategy=sequential",
        # Limits and gates within which seeds of these small hosts grow up in a few epochs.
        *("play.param_limit=8", "play.flop_limit=8"),
        "play.population.lifecycle.gates.min_training_epochs=1",
    )
    for part in ("--set", setting)
]


def play_prove(folder: Path) -> Figures:
    """`esper prove` with a learned arm, hand-written ones, and one trained from scratch."""
    plan = [{"epoch": 1, "op": "grow", "slot": "100%", "blueprint": "conv_light", "tempo": 3}]
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    esper_command(
        *("prove", f"schedule:{folder / 'plan.json'}", "wait", "tamiyo", "periodic:every=2", EAGER),
        *("scratch:schedule", *MEMBERS, "--split", "select", "--seeds", "2", "--horizon", "9"),
        *(*PLAYED, "--out", str(folder / "proof")),
    )
    return file_figures(folder / "proof", "results.json", "results.jsonl")


def play_search(folder: Path) -> Figures:
    """`esper search`: schedules and settings of the heuristic, in two rungs."""
    return _search(folder / "search", "2x2", "1x2")


def _search(out: Path, *rungs: str) -> Figures:
    esper_command(
        *("search", *MEMBERS, "--split", "train", "--rungs", *rungs, "--heuristics", "1"),
        *("--horizon", "7", *PLAYED, "--out", str(out)),
    )
    names = ("schedule", "privileged", "lessons", "contextual", "heuristic", "summary")
    return file_figures(out, *(f"{name}.json" for name in names), "results.jsonl", "ratios.jsonl")


def play_clone(folder: Path) -> Figures:
    """`esper clone` from a small search."""
    _search(folder / "search", "2x2")
    out = folder / "clone"
    esper_command(
        *("clone", str(folder / "search"), "--rounds", "2", "--episodes", "4", "--passes", "2"),
        *("--set", "policy.lstm_hidden_dim=16", *PLAYED, "--device", "cpu", "--out", str(out)),
    )
    return file_figures(out, "clone.json") | weight_figures(out / "policy")


def play_workers(folder: Path) -> Figures:
    """A population in worker processes, in one process and as a stack; training in workers."""
    figures: Figures = {}
    for strategy in ("sequential", "stacked", "workers"):
        figures |= named(strategy, _population(strategy))
    out = folder / "run"
    short = ("--rounds", "1", "--episode-length", "4", "--set", "strategy=workers")
    return figures | named("train", _train(out, "smoke", *short))


def _population(strategy: Any) -> Figures:
    """Return the figures of rows that live through actions which are drawn in advance."""
    import torch

    import esper
    from esper.leyline import HEAD_NAMES, HEAD_SIZES, LifecycleOp

    rows, steps = 4, 14
    generator = torch.Generator().manual_seed(5)
    # Every row germinates, brings its seed up and then keeps or prunes it, each at its own time.
    course = [LifecycleOp.GERMINATE, *[LifecycleOp.ADVANCE] * 6]
    ends = [LifecycleOp.FOSSILIZE, LifecycleOp.SET_ALPHA_TARGET, LifecycleOp.PRUNE]
    germinated = {"blueprint": [1, 3, 4, 1], "tempo": [0] * rows, "alpha_target": [2] * rows}
    config = esper.Population("digits", rows, 7, "cpu", "sequential").config
    lifecycle = config.lifecycle
    lifecycle = lifecycle.replace(gates=lifecycle.gates.replace(min_training_epochs=1))
    population = esper.Population(
        *("digits", rows, 7, "cpu", strategy),
        horizon=steps + 2,
        config=config.replace(lifecycle=lifecycle),
    )
    seen: list[Any] = [population.reset()]
    saved = None
    for step in range(steps):
        actions = {
            head: torch.randint(HEAD_SIZES[head], (rows,), generator=generator)
            for head in HEAD_NAMES
        }
        actions |= {head: torch.tensor(chosen) for head, chosen in germinated.items()}
        actions["slot"] = torch.arange(rows) % 3
        # The last row prunes what the others fossilize.
        ways = [course + ends * 3] * (rows - 1) + [course + ends[::-1] * 3]
        ops = [way[max(0, step - row)] for row, way in enumerate(ways)]
        actions["op"] = torch.tensor([int(op) for op in ops])
        seen.append(population.step(actions))
        if step == steps // 2:
            saved = population.snapshot()
    fork = population.fork(rows=[0, 2])
    waiting = {head: torch.zeros(2, dtype=torch.int64) for head in HEAD_NAMES}
    forked = fork.step(waiting)
    fork.close()
    assert saved is not None
    restored = population.restore(saved)
    tested = population.test_scores()
    population.close()
    figures = {
        name: digest(*(tensor_bytes(getattr(each, name)) for each in seen))
        for name in _fields(seen[0])
    }
    apart = {"fork": forked, "restored": restored}
    for moment, signals in apart.items():
        tensors = (tensor_bytes(getattr(signals, name)) for name in _fields(signals))
        figures[f"all signals, {moment}"] = digest(*tensors)
    return figures | {"test scores": digest(tensor_bytes(tested))}


def _fields(signals: Any) -> list[str]:
    """Return the names of the tensors of signals."""
    import dataclasses

    import torch

    return [
        field.name
        for field in dataclasses.fields(signals)
        if isinstance(getattr(signals, field.name), torch.Tensor)
    ]


def play_ray(folder: Path) -> Figures:
    """`esper train` with the rows in two actors of a Ray cluster on this machine."""
    cluster = ("--engine", "ray", "--actors", "2")
    return _train(folder / "run", "smoke", "--episode-length", "4", "--envs", "3", *cluster)


def play_environments(folder: Path) -> Figures:
    """One environment and a vector of them, by random legal actions."""
    import gymnasium
    import numpy as np

    settings = {
        "episode_length": 14,
        "device": "cpu",
        "strategy": "sequential",
        "population.lifecycle.gates.min_training_epochs": 1,
    }
    name = f"{ENVIRONMENTS}:Esper/Grow-v1"
    envs = gymnasium.make_vec(name, num_envs=3, recipe="smoke", settings=settings)
    env = gymnasium.make(name, recipe="smoke", settings=settings)
    generator = np.random.default_rng(0)
    figures = {}
    for kind, world in (("vector", envs), ("single", env)):
        observation, info = world.reset(seed=4)
        seen: dict[str, list[bytes]] = {"observations": [observation.tobytes()]}
        for _ in range(16):
            mask = np.atleast_2d(info["action_mask"])
            space = world.action_space if kind == "single" else envs.single_action_space
            actions = _draw(generator, mask, space.nvec)
            actions = actions if kind == "vector" else actions[0]
            observation, reward, ended, cut, info = world.step(actions)
            seen["observations"].append(observation.tobytes())
            seen.setdefault("masks", []).append(np.asarray(info["action_mask"]).tobytes())
            for field, value in {"rewards": reward, "ends": ended, "cuts": cut}.items():
                seen.setdefault(field, []).append(np.asarray(value).tobytes())
            for field in ("score", "twin_score"):
                seen.setdefault(field, []).append(np.asarray(info[field]).tobytes())
            if kind == "single" and (ended or cut):
                observation, info = world.reset()
        world.close()
        figures |= named(kind, {field: digest(*values) for field, values in seen.items()})
    return figures


def _draw(generator: Any, masks: Any, sizes: Any) -> Any:
    """Return one random choice of every head that its mask allows, int64 [R, heads].

    Of the ops, the last head, those that bring a seed up come more often than those that end it.
    """
    import numpy as np

    parts = np.split(masks.astype(np.float64), np.cumsum(sizes)[:-1], axis=1)
    parts[-1] = parts[-1] * np.array([1.0, 2.0, 1.0, 0.2, 3.0, 4.0])
    return np.stack([(part * generator.random(part.shape)).argmax(1) for part in parts], axis=1)


@dataclass(frozen=True)
class Run:
    """One of the runs."""

    play: Callable[[Path], Figures]
    needs: str = ""
    """The package that it needs beside Esper's own."""


RUNS = {
    "grow": Run(play_grow),
    "train": Run(play_train),
    "prove": Run(play_prove),
    "search": Run(play_search),
    "clone": Run(play_clone),
    "workers": Run(play_workers),
    "ray": Run(play_ray, needs="ray"),
    "environments": Run(play_environments, needs="gymnasium"),
}


# -------------------------------------------------------------------------- play and compare


def figures_of(name: str, instruction_set: str) -> Figures:
    """Play a run in a process of its own, under an instruction set and with one thread."""
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **INSTRUCTION_SETS[instruction_set],
        **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")},
        "ESPER_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }
    with tempfile.TemporaryDirectory(prefix=f"digests-{name}-") as place:
        folder = Path(place)
        said = folder / "said.txt"
        command = [sys.executable, "-m", "tools.digests", "--play", name, place]
        with said.open("w") as sink:
            process = subprocess.run(command, cwd=ROOT, env=environment, stderr=sink, check=False)
        if process.returncode:
            raise SystemExit(f"{said.read_text()}error: the run {name!r} failed")
        figures: Figures = json.loads((folder / "figures.json").read_text())
        return figures


def play_here(name: str, folder: Path) -> None:
    """Play a run in this process and leave its figures in a file."""
    work = folder / "work"
    work.mkdir()
    figures = RUNS[name].play(work)
    (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


def differences(recorded: Figures, found: Figures) -> list[str]:
    """Return one line for every figure that is not what it was."""
    changed = [
        f"{key}: {recorded[key]} was recorded, {found[key]} is found"
        for key in sorted(recorded.keys() & found.keys())
        if recorded[key] != found[key]
    ]
    gone = [f"{key}: gone ({recorded[key]})" for key in sorted(recorded.keys() - found.keys())]
    new = [f"{key}: new ({found[key]})" for key in sorted(found.keys() - recorded.keys())]
    return [*changed, *gone, *new]


def read_recorded(path: Path) -> dict[str, Any]:
    """Return what is recorded, by instruction set."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def main(arguments: list[str]) -> int:
    """Compare, or record with `--write`; return 1 where anything differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.digests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"runs: {', '.join(RUNS)}")
    parser.add_argument("--write", action="store_true", help="record instead of comparing")
    parser.add_argument("--set", default="default", choices=tuple(INSTRUCTION_SETS))
    parser.add_argument("--file", type=Path, default=RECORDED, help="where figures are recorded")
    parser.add_argument("--play", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.play:
        play_here(options.play[0], Path(options.play[1]))
        return 0
    unknown = [name for name in options.names if name not in RUNS]
    if unknown:
        parser.error(f"there is no run {unknown[0]!r}; there are {', '.join(RUNS)}")
    if options.set not in available():
        parser.error(f"this processor has no {options.set}")
    import torch

    recorded = read_recorded(options.file)
    part = recorded.setdefault(options.set, {"torch": torch.__version__, "runs": {}})
    if part["torch"] != torch.__version__ and not options.write:
        parser.error(
            f"digests were recorded with PyTorch {part['torch']}, this is {torch.__version__}; "
            "record those of the tree before the change with --write --file"
        )
    part["torch"] = torch.__version__
    failed = False
    for name in options.names or RUNS:
        run = RUNS[name]
        if run.needs and importlib.util.find_spec(run.needs) is None:
            print(f"{name}: skipped, {run.needs} is not installed", flush=True)
            continue
        if not options.write and name not in part["runs"]:
            print(f"{name}: nothing is recorded under {options.set}", flush=True)
            failed = True
            continue
        started = time.monotonic()
        figures = figures_of(name, options.set)
        spent = f"{len(figures)} figures, {time.monotonic() - started:.0f} s"
        if options.write:
            part["runs"][name] = figures
            print(f"{name}: recorded, {spent}", flush=True)
            continue
        lines = differences(part["runs"][name], figures)
        failed = failed or bool(lines)
        print(f"{name}: {f'{len(lines)} differ' if lines else 'the same'}, {spent}", flush=True)
        for line in lines:
            print(f"  {line}", flush=True)
    if options.write:
        text = json.dumps(recorded, indent=1, sort_keys=True)
        options.file.write_text(f"{text}\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
