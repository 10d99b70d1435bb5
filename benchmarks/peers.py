"""Compare Esper with plain training, PEFT, PerforatedAI and gromo at equal compute.

    pip install --no-deps --target PEERS peft perforatedai gromo    # and what these need but torch
    python -m benchmarks peers --peers PEERS --out research/peers/results.jsonl
    python -m benchmarks peers --summary --out research/peers/results.jsonl

`grow`: an MLP of two hidden layers of 8 on the embedded digits, to at most 2,072 parameters.
`adapt`: a trained MLP, frozen, to the same digits turned by 90 degrees, with 660 trainable
parameters. All arms of a task have the same training FLOPs (of `adapt`: the same steps). Each arm's
learning rate is the best of three by the validation loss of a seed of its own; other seeds are
tested. A peer that is not installed is named and left out. Runs of PerforatedAI have processes of
their own, because it keeps its state in its modules.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.table import print_table, require_results

SMALL, WIDE, LIMIT = 8, 21, 2_072
"""Neurons of both hidden layers at first and where all are there; most parameters of all arms."""
EPOCHS = 30
"""Epochs that the wide network trains; others train for as many FLOPs."""
BATCH = 32
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Rates to try: the middle ones, and the others while the best so far is at an end."""
TUNED_ON = 100
"""The seed by which a rate is chosen."""
SEEDS = (0, 1, 2, 3)
ADAPT_STEPS, RANK, TRAINABLE = 300, 2, 660


def mlp(hidden: int) -> Any:
    from torch import nn

    widths = (64, hidden, hidden, 10)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def load(seed: int) -> dict[str, tuple[Any, Any]]:
    """Return digits for training, validation and test; the test is the same for all seeds."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]
    rest = torch.randperm(1_437, generator=torch.Generator().manual_seed(seed))
    parts = {"train": rest[:1_088], "val": rest[1_088:], "test": torch.arange(1_437, 1_797)}
    return {name: (images[chosen], labels[chosen]) for name, chosen in parts.items()}


def weights_of(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.ndim > 1)


class Budget:
    """FLOPs that are left; a training step of a sample takes 6 a weight."""

    def __init__(self) -> None:
        self.samples = 1_088
        self.all = 6.0 * self.samples * weights_of(mlp(WIDE)) * EPOCHS
        self.spent = 0.0

    def epoch(self, weights: float) -> bool:
        """Pay for an epoch of a network; say whether there was enough for half of it."""
        cost = 6.0 * self.samples * weights
        if self.all - self.spent < 0.5 * cost:
            return False
        self.spent += cost
        return True


def train_epoch(model: Any, optimizer: Any, data: tuple[Any, Any], draws: Any) -> None:
    import torch
    from torch.nn import functional as F

    x, y = data
    model.train()
    for chosen in torch.randperm(len(x), generator=draws).split(BATCH):
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def judge(model: Any, data: tuple[Any, Any]) -> tuple[float, float]:
    """Return loss and accuracy in percent."""
    import torch
    from torch.nn import functional as F

    x, y = data
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    right = (outputs.argmax(1) == y).float().mean()
    return float(F.cross_entropy(outputs, y)), 100.0 * float(right)


def adamw(model: Any, rate: float) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)


# ---- grow


def plain(parts: Any, rate: float, seed: int, budget: Budget, hidden: int) -> Any:
    import torch

    model, draws = mlp(hidden), torch.Generator().manual_seed(seed)
    optimizer = adamw(model, rate)
    while budget.epoch(weights_of(model)):
        train_epoch(model, optimizer, parts["train"], draws)
    return model


def by_esper(parts: Any, rate: float, seed: int, budget: Budget) -> Any:
    import torch

    import esper

    class Batches:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return len(parts["train"][0]) // BATCH

        def __iter__(self) -> Any:
            draws = torch.Generator().manual_seed(1_000 * seed + self.epoch)
            x, y = parts["train"]
            for chosen in torch.randperm(len(x), generator=draws).split(BATCH):
                yield x[chosen], y[chosen]

    def on_epoch(record: Any) -> None:
        # Two operations of a forward pass are a weight.
        if not budget.epoch(record.flops / 2):
            raise StopIteration("the budget is spent")

    grown = esper.grow(
        mlp(SMALL),
        train=Batches(),
        val=[parts["val"]],
        epochs=3 * EPOCHS,
        controller="heuristic",
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.0),
        max_parameters=LIMIT,
        keep="last",
        seed=seed,
        on_epoch=on_epoch,
        progress=False,
    )
    return grown.bake()


def by_perforated_ai(parts: Any, rate: float, seed: int, budget: Budget) -> Any:
    import torch
    from perforatedai import globals_perforatedai as GPA
    from perforatedai import utils_perforatedai as UPA

    settings = GPA.pc
    for name, value in {
        "configuration_confirmed": True,
        "unwrapped_modules_confirmed": True,
        "weight_decay_accepted": True,
        "testing_dendrite_capacity": False,
        "silent": True,
        "verbose": False,
        "dashboard_events_enabled": False,
        "find_best_lr": False,
        "switch_mode": settings.DOING_FIXED_SWITCH,
        "first_fixed_switch_num": EPOCHS // 2,
        "fixed_switch_num": 10 * EPOCHS,
        "max_dendrites": 1,
        "output_dimensions": [-1, 0],
    }.items():
        getattr(settings, f"set_{name}")(value)
    how = {"save_name": "PAI", "making_graphs": False, "maximizing_score": True}
    model = UPA.perforate_model(mlp(SMALL), doing_pai=True, **how)
    tracker, draws = GPA.pai_tracker, torch.Generator().manual_seed(seed)
    optimizer = adamw(model, rate)
    tracker.set_optimizer_instance(optimizer)
    while budget.epoch(weights_of(model)):
        train_epoch(model, optimizer, parts["train"], draws)
        score = judge(model, parts["val"])[1]
        model, has_grown, is_done = tracker.add_validation_score(score, model)
        if has_grown and not is_done:
            optimizer = adamw(model, rate)
            tracker.set_optimizer_instance(optimizer)
    return model


def by_gromo(parts: Any, rate: float, seed: int, budget: Budget) -> Any:
    import torch
    from gromo.containers.growing_mlp import GrowingMLP
    from torch import nn
    from torch.nn import functional as F

    model = GrowingMLP(64, 10, SMALL, 2, activation=nn.ReLU())
    draws = torch.Generator().manual_seed(seed)
    optimizer, epoch = adamw(model, rate), 0
    # Both hidden layers in turn, from 8 to 21 neurons.
    growths = {12: (0, 7), 17: (1, 7), 22: (0, 6), 27: (1, 6)}
    while budget.epoch(weights_of(model)):
        train_epoch(model, optimizer, parts["train"], draws)
        epoch += 1
        if epoch in growths and budget.epoch(weights_of(model)):
            layer, neurons = growths[epoch]
            model.init_computation()
            x, y = parts["train"]
            for some in torch.arange(len(x)).split(BATCH):
                model.zero_grad()
                F.cross_entropy(model(x[some]), y[some]).backward()
                model.update_computation()
            model.compute_optimal_updates(maximum_added_neurons=neurons)
            model.reset_computation()
            model.select_update(layer)
            model.set_scaling_factor(1.0)
            model.apply_change(extension_size=neurons)
            optimizer = adamw(model, rate)
    return model


# ---- adapt


def trained_host() -> Any:
    import torch

    torch.manual_seed(0)
    model, draws, parts = mlp(64), torch.Generator().manual_seed(0), load(0)
    optimizer = adamw(model, 0.003)
    for _ in range(20):
        train_epoch(model, optimizer, parts["train"], draws)
    return model


def turned(parts: Any) -> Any:
    """Return the digits turned by 90 degrees; 200 of them to train on."""
    found = {n: (x.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1), y) for n, (x, y) in parts.items()}
    return {**found, "train": tuple(part[:200] for part in found["train"])}


def adapt(parts: Any, rate: float, seed: int, budget: Budget, how: str) -> Any:
    import torch
    from torch.nn import functional as F

    model, parts = trained_host(), turned(parts)
    torch.manual_seed(seed)
    adapters = None
    if how == "peft":
        from peft import LoraConfig, get_peft_model

        names = ["0", "2", "4"]
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    elif how == "esper":
        import esper

        adapters = esper.Adapt(model, budget=TRAINABLE, total_steps=ADAPT_STEPS)
    chosen = adapters.parameters() if adapters else [p for p in model.parameters()]
    kept = [p for p in chosen if p.requires_grad]
    optimizer = torch.optim.AdamW(kept, lr=rate, weight_decay=0.0)
    draws, (x, y) = torch.Generator().manual_seed(seed), parts["train"]
    for _ in range(ADAPT_STEPS):
        some = torch.randint(len(x), (BATCH,), generator=draws)
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if adapters is not None:
            adapters.step(optimizer)
    model.trained = sum(p.numel() for p in kept)
    return model


Arm = tuple[str, str, str | None, Callable[..., Any]]
"""Task, name, the package it needs, and what trains it."""
ARMS: tuple[Arm, ...] = (
    ("grow", "plain, 8 neurons", None, partial(plain, hidden=SMALL)),
    ("grow", "plain, 21 neurons", None, partial(plain, hidden=WIDE)),
    ("grow", "esper, seeds", None, by_esper),
    ("grow", "perforatedai", "perforatedai", by_perforated_ai),
    ("grow", "gromo", "gromo", by_gromo),
    ("adapt", "plain, all weights", None, partial(adapt, how="plain")),
    ("adapt", "esper, Adapt", None, partial(adapt, how="esper")),
    ("adapt", "peft, LoRA", "peft", partial(adapt, how="peft")),
)


def measure(number: int, rate: float, seed: int) -> dict[str, Any]:
    """Train and judge one network, in this process."""
    import torch

    torch.set_num_threads(1)
    task, name, package, train = ARMS[number]
    parts, budget = load(seed), Budget()
    torch.manual_seed(seed)
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = train(parts, rate, seed, budget)
    seconds = time.process_time() - began
    parts = turned(parts) if task == "adapt" else parts
    (val_loss, _), (loss, accuracy) = judge(model, parts["val"]), judge(model, parts["test"])
    return {
        "task": task,
        "arm": name,
        "version": _version(package),
        "rate": rate,
        "seed": seed,
        "val_loss": val_loss,
        "test_loss": loss,
        "test_accuracy": accuracy,
        "parameters": getattr(model, "trained", sum(p.numel() for p in model.parameters())),
        "flops": budget.spent if task == "grow" else None,
        "cpu_s": round(seconds, 2),
    }


def _version(package: str | None) -> str | None:
    from importlib.metadata import version

    return None if package is None else version(package)


# ---- the command


def run(out: Path, peers: str, only: list[str]) -> None:
    """Measure what is not there yet: rates first, then the seeds that are judged."""
    for number, (task, name, package, _) in enumerate(ARMS):
        if only and not any(word in f"{task} {name}" for word in only):
            continue
        if package is not None and importlib.util.find_spec(package) is None:
            print(f"{name}: left out, {package} is not installed", file=sys.stderr)
            continue

        def own(task: str = task, name: str = name) -> list[dict[str, Any]]:
            return [one for one in _read(out) if (one["task"], one["arm"]) == (task, name)]

        while (rate := next_rate(own())) is not None:
            _record(number, rate, TUNED_ON, out, peers)
        rate = best_rate(own())
        for seed in SEEDS:
            if not any((one["rate"], one["seed"]) == (rate, seed) for one in own()):
                _record(number, rate, seed, out, peers)


def next_rate(records: list[dict[str, Any]]) -> float | None:
    """Return a rate to try on the seed that tunes; None where the best one is between others."""
    tried = {one["rate"] for one in records if one["seed"] == TUNED_ON}
    for rate in RATES[1:4]:
        if rate not in tried:
            return rate
    at = RATES.index(best_rate(records))
    for rate in RATES[max(0, at - 1) : at + 2]:
        if rate not in tried:
            return rate
    return None


def best_rate(records: list[dict[str, Any]]) -> float:
    """Return the rate with the lowest validation loss of the seed that tunes."""
    tuned = [one for one in records if one["seed"] == TUNED_ON]
    return float(min(tuned, key=lambda one: one["val_loss"])["rate"])


def _record(number: int, rate: float, seed: int, out: Path, peers: str) -> None:
    """Measure one network, and write what came of it."""
    is_apart = ARMS[number][2] == "perforatedai"
    found = _measure_apart(number, rate, seed, peers) if is_apart else measure(number, rate, seed)
    line = json.dumps(found)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, file=sys.stderr, flush=True)


def _measure_apart(number: int, rate: float, seed: int, peers: str) -> Any:
    """Measure in a process and a folder of its own: what is measured writes where it is."""
    job = json.dumps([number, rate, seed])
    command = [sys.executable, "-m", "benchmarks", "peers", "--job", job, "--peers", peers]
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
    if done.returncode:
        print(f"{ARMS[number][1]}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        raise SystemExit(1)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarize(records: list[dict[str, Any]]) -> None:
    """Print one table: what every arm reaches, and what it takes."""
    rows = []
    for task, name, _, _ in ARMS:
        own = [one for one in records if (one["task"], one["arm"]) == (task, name)]
        if not any(one["seed"] == TUNED_ON for one in own):
            continue
        rate = best_rate(own)
        judged = [one for one in own if one["rate"] == rate and one["seed"] != TUNED_ON]
        if not judged:
            continue
        scores = [one["test_accuracy"] for one in judged]
        flops = judged[0]["flops"]
        rows.append(
            [
                task,
                f"{name} {judged[0]['version'] or ''}".strip(),
                f"{rate:g}",
                str(len(judged)),
                f"{fmean(scores):.2f}",
                f"{min(scores):.2f} to {max(scores):.2f}",
                f"{fmean(one['test_loss'] for one in judged):.3f}",
                f"{round(fmean(one['parameters'] for one in judged)):,}",
                "" if flops is None else f"{fmean(one['flops'] for one in judged):.3g}",
                f"{fmean(one['cpu_s'] for one in judged):.1f}",
            ]
        )
    columns = ["task", "arm", "rate", "seeds", "accuracy", "range", "loss"]
    print_table([*columns, "parameters", "FLOPs", "CPU s"], rows)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("research/peers/results.jsonl"))
    parser.add_argument("--peers", default="", metavar="FOLDER", help="where the peers are")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="arms by their names")
    parser.add_argument("--summary", action="store_true", help="only print what --out holds")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peers:
        options.peers = str(Path(options.peers).resolve())
        # Behind everything else: PyTorch stays the one of this environment.
        sys.path.append(options.peers)
    if options.job:
        print(json.dumps(measure(*json.loads(options.job))))
        return 0
    if options.summary:
        require_results(options.out)
    else:
        run(options.out, options.peers, options.only)
    summarize(_read(options.out))
    return 0
