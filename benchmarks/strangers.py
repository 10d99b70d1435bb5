"""Measure the default controller on networks that no controller was trained on.

    python -m benchmarks strangers run --data DATA --out research/strangers/results.jsonl
    python -m benchmarks strangers summary research/strangers/results.jsonl

Seven networks as people write them, small enough that growing may pay: a ViT, a GRU language model,
GPT-2 of `transformers`, a Conv1d network, an MLP for regression, a graph network, a ResNet with
BatchNorm; the first two also ten times as large, and GPT-2 also in the `Trainer`. Each is grown
with four seeds by three fixed schedules and by controllers, each time beside its twin on the same
batches. What the default has grown is also trained from scratch, as a static network of the same
size. Scores are those of the test split: points, or losses with their sign turned. The default has
to get half of what the best schedule gains where that is more than two standard errors, and must
not be below the twin elsewhere. Seeds 0 to 3 are judged; constants of rules are chosen on others
(`--seeds 10 11`).

`run` goes on where it stopped. DATA has the images that `python -m benchmarks depth images` makes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pool import run_all
from benchmarks.table import print_table, require_results

Batches = list[tuple[Any, Any]]
Splits = tuple[Batches, Batches, Batches]

EPOCHS, SEEDS, BATCH = 30, (0, 1, 2, 3), 64
MAX_GROWTH = 2.0
BLUEPRINTS = ["conv_heavy", "mlp", "conv_light", "mlp_small", "lora"]
SCHEDULES: dict[str, list[dict[str, Any]]] = {
    "late slot, early": [{"epoch": "10%", "op": "grow", "slot": "100%", "blueprint": BLUEPRINTS}],
    "middle slot, later": [{"epoch": "25%", "op": "grow", "slot": "50%", "blueprint": BLUEPRINTS}],
    "two slots": [
        {"epoch": "10%", "op": "grow", "slot": "100%", "blueprint": BLUEPRINTS},
        {"epoch": "30%", "op": "grow", "slot": "0%", "blueprint": BLUEPRINTS},
    ],
}
CONTROLLERS = ("tamiyo", "trial", "heuristic", "heuristic:plateau_epochs=0", "plateau")
DEFAULT = CONTROLLERS[0]
TRAINER = "gpt2-trainer"
NEED_TRANSFORMERS = ("gpt2", TRAINER)


# ---- The networks


class ViT(nn.Module):
    """Blocks over 16 patches."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.Sequential(*(EncoderBlock(width) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        x = self.patches(x).flatten(2).mT + self.places
        out: Tensor = self.head(self.blocks(x).mean(1))
        return out


class EncoderBlock(nn.Module):
    """Attention and a perceptron, each on a normalised input and added to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens, each having looked at all."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Recurrent(nn.Module):
    """A language model of two GRUs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.first = nn.GRU(width, width, batch_first=True)
        self.second = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next byte."""
        out: Tensor = self.head(self.second(self.first(self.embed(x))[0])[0])
        return out


def make_hugging_face_gpt2() -> Any:
    """Return a GPT-2 of two blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, n_inner=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(settings)


def make_gpt2() -> nn.Module:
    """Return the GPT-2 as a network from tokens to scores."""

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt2 = make_hugging_face_gpt2()

        def forward(self, x: Tensor) -> Tensor:
            return self.gpt2(x).logits  # type: ignore[no-any-return]

    return Logits()


def make_conv1d() -> nn.Module:
    """Return three convolutions over a wave."""
    layers: list[nn.Module] = []
    for inside, outside in ((1, 8), (8, 8), (8, 16)):
        part = nn.Sequential(nn.Conv1d(inside, outside, 5, 2, 2), nn.ReLU())
        layers.append(part)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 8))


def make_mlp() -> nn.Module:
    """Return a narrow perceptron with one number as its output."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(10, 24), nn.ReLU()),
        nn.Sequential(nn.Linear(24, 24), nn.ReLU()),
        nn.Sequential(nn.Linear(24, 24), nn.ReLU()),
        nn.Linear(24, 1),
    )


class Graph(nn.Module):
    """Two rounds of messages between the nodes of dense graphs."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.rounds = nn.ModuleList(Messages(width) for _ in range(2))
        self.head = nn.Linear(width, 6)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Classify graphs."""
        x = self.embed(nodes)
        for each in self.rounds:
            x = each(x, edges)
        out: Tensor = self.head(x.mean(1))
        return out


class Messages(nn.Module):
    """What neighbours say is added to every node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.theirs = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the nodes after one round."""
        return x + torch.relu(self.own(x) + self.theirs(edges @ x / 4))


class ResNet(nn.Module):
    """Three residual blocks with BatchNorm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = Residual(width, width, 1)
        self.layer2 = Residual(width, 2 * width, 2)
        self.layer3 = Residual(2 * width, 2 * width, 1)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        same = stride == 1 and inside == outside
        self.around = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.around(x))


# ---- Their data, drawn anew for every seed


def _split(inputs: Sequence[Tensor], targets: Tensor, train: int, held_out: int) -> Splits:
    def part(start: int, end: int) -> Batches:
        xs = [x[start:end].split(BATCH) for x in inputs]
        return [(*x, y) for *x, y in zip(*xs, targets[start:end].split(BATCH), strict=True)]

    ends = (train, train + held_out, train + 3 * held_out)
    return part(0, ends[0]), part(ends[0], ends[1]), part(ends[1], ends[2])


@lru_cache(maxsize=1)
def _cifar(folder: Path) -> tuple[Tensor, Tensor]:
    with np.load(folder / "cifar16-all.npz") as file:
        x, y = (torch.from_numpy(file[name][:12000]) for name in ("x_train", "y_train"))
    return (x.float() - 120) / 60, y.long()


def images(folder: Path, seed: int) -> Splits:
    """Return 3,000 images of CIFAR-10 to train on."""
    x, y = _cifar(folder)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:6000]
    return _split([x[chosen]], y[chosen], 3000, 1000)


@lru_cache(maxsize=1)
def _sources() -> Tensor:
    """Return the standard library's own text, bytes above 127 as 127."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127).long()


def text(folder: Path, seed: int) -> Splits:
    """Return 3,000 windows of 32 bytes."""
    source = _sources()
    starts = torch.randint(len(source) - 33, (6000,), generator=torch.Generator().manual_seed(seed))
    windows = source[starts[:, None] + torch.arange(33)]
    return _split([windows[:, :-1]], windows[:, 1:], 3000, 1000)


def waves(folder: Path, seed: int) -> Splits:
    """Return sums of two tones in noise; the class says which pair of eight."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(8, (5000,), generator=draw)
    low, high = 3 + y % 4, 9 + 2 * (y // 4) + y % 2
    time_ = torch.linspace(0, 2 * torch.pi, 128)
    phases = 2 * torch.pi * torch.rand(2, 5000, 1, generator=draw)
    tones = [torch.sin(f[:, None] * time_ + p) for f, p in zip((low, high), phases, strict=True)]
    x = sum(tones) + 1.5 * torch.randn(5000, 128, generator=draw)
    return _split([x.unsqueeze(1)], y, 2000, 1000)


def numbers(folder: Path, seed: int) -> Splits:
    """Return Friedman's first function of ten numbers, with noise."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(5000, 10, generator=draw)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = (y + 10 * x[:, 3] + 5 * x[:, 4] + torch.randn(5000, generator=draw) - 14.4) / 5
    return _split([x - 0.5], y.unsqueeze(1), 2000, 1000)


def graphs(folder: Path, seed: int) -> Splits:
    """Return graphs of 12 nodes; the class says how many of their triangles there are."""
    draw = torch.Generator().manual_seed(seed)
    nodes = torch.randn(5000, 12, 4, generator=draw)
    near = torch.cdist(nodes, nodes) + 0.5 * torch.rand(5000, 12, 12, generator=draw)
    edges = ((near + near.mT) / 2 < 2.4).float()
    edges.diagonal(dim1=1, dim2=2).zero_()
    triangles = (edges @ edges @ edges).diagonal(dim1=1, dim2=2).sum(1) / 6
    y = torch.bucketize(triangles, torch.quantile(triangles, torch.arange(1, 6) / 6))
    return _split([torch.randn(5000, 12, 4, generator=draw), edges], y, 2000, 1000)


@dataclass(frozen=True)
class Case:
    """A network with its data."""

    make: Callable[[], nn.Module]
    data: Callable[[Path, int], Splits]
    loss: str = "classification"
    rate: float = 3e-3


CASES = {
    "vit": Case(partial(ViT, 24, 2), images),
    "vit-large": Case(partial(ViT, 64, 4), images, rate=1e-3),
    "gru": Case(partial(Recurrent, 32), text, "language"),
    "gru-large": Case(partial(Recurrent, 96), text, "language"),
    "gpt2": Case(make_gpt2, text, "language"),
    TRAINER: Case(make_hugging_face_gpt2, text),
    "conv1d": Case(make_conv1d, waves),
    "mlp": Case(make_mlp, numbers, "regression", 1e-2),
    "graph": Case(Graph, graphs),
    "resnet": Case(ResNet, images),
}


# ---- Running and telling


@dataclass(frozen=True)
class Fixed:
    """A schedule for any host."""

    entries: Sequence[dict[str, Any]]

    def controller(self, context: Any) -> Any:
        """Return what carries it out on a host."""
        from esper.tamiyo.controllers.schedule import ScheduleController, parse_schedule

        return ScheduleController([parse_schedule(self.entries, context)], context, is_quiet=True)


class Shuffled(Sequence[Any]):
    """Batches in another order every epoch; as with a `DataLoader`, Esper can count the samples."""

    def __init__(self, batches: Batches, seed: int) -> None:
        self._batches, self._seed, self._epoch = batches, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        draw = torch.Generator().manual_seed(1000 * self._seed + self._epoch)
        order = torch.randperm(len(self._batches), generator=draw).tolist()
        return self._batches[order[index]]


def run_one(case: str, arm: str, seed: int, folder: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    """Grow one network beside its twin; return what came of both."""
    import esper
    from esper.leyline.errors import EsperWarning
    from esper.leyline.reasons import is_grown

    if case == TRAINER:
        return run_in_trainer(arm, seed, folder, epochs)
    chosen = CASES[case]
    torch.manual_seed(seed)
    model = chosen.make()
    train, val, test = chosen.data(folder, seed)
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        grown = esper.grow(
            model,
            train=Shuffled(train, seed),
            val=val,
            test=test,
            epochs=epochs,
            loss=chosen.loss,
            controller=Fixed(SCHEDULES[arm]) if arm in SCHEDULES else arm,  # type: ignore[arg-type]
            optimizer=partial(torch.optim.AdamW, lr=chosen.rate),
            scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=epochs),
            max_growth=MAX_GROWTH,
            seed=seed,
            twin=True,
        )
        told = grown.summary
        has_static = arm == DEFAULT and is_grown(told.seeds)
        static = grown.compare_static(progress=False).static.test_score if has_static else None
    return {
        "case": case,
        "arm": arm,
        "seed": seed,
        "score": told.test_score,
        "twin": told.twin_test_score,
        "static": static,
        "growth": told.parameters_after / told.parameters_before,
        "seeds": [f"{one.blueprint} at {one.slot}: {one.fate}" for one in told.seeds],
        "seconds": round(time.monotonic() - started, 1),
    }


def run_in_trainer(arm: str, seed: int, folder: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    """Grow the GPT-2 in the `Trainer` of Hugging Face; its twin is trained there without Esper."""
    import esper
    from esper.integrations.hugging_face import GrowingCallback
    from esper.leyline.errors import EsperWarning
    from esper.leyline.records import seeds_at_end

    started = time.monotonic()
    torch.manual_seed(seed)
    model = CASES[TRAINER].make()
    example = {"input_ids": CASES[TRAINER].data(folder, seed)[1][0][0]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        garden = esper.Garden(model, esper.suggest_slots(model, example), example)
        growing = GrowingCallback(
            garden,
            epochs,
            Fixed(SCHEDULES[arm]) if arm in SCHEDULES else arm,  # type: ignore[arg-type]
            max_growth=MAX_GROWTH,
            seed=seed,
        )
        optimizer = growing.optimizer(torch.optim.AdamW, lr=CASES[TRAINER].rate)
        score = _score_in_trainer(growing.model, optimizer, seed, folder, epochs, [growing])
    ended = seeds_at_end(growing.history)
    return {
        "case": TRAINER,
        "arm": arm,
        "seed": seed,
        "score": score,
        "twin": _twin_in_trainer(seed, folder, epochs),
        "static": None,
        "growth": garden.count_parameters() / garden.count_host_parameters(),
        "seeds": [f"{one.blueprint} at {one.slot}: {one.fate}" for one in ended],
        "seconds": round(time.monotonic() - started, 1),
    }


@lru_cache(maxsize=1)
def _twin_in_trainer(seed: int, folder: Path, epochs: int) -> float:
    torch.manual_seed(seed)
    model = CASES[TRAINER].make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CASES[TRAINER].rate)
    return _score_in_trainer(model, optimizer, seed, folder, epochs)


def _score_in_trainer(
    model: Any, optimizer: Any, seed: int, folder: Path, epochs: int, callbacks: Any = None
) -> float:
    """Train and return the percentage of the next bytes of the test split that are right."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    splits = CASES[TRAINER].data(folder, seed)
    train, val, test = (torch.cat([x for x, _ in batches]) for batches in splits)
    rows = [[{"input_ids": x, "labels": x} for x in part] for part in (train, val)]
    with tempfile.TemporaryDirectory() as out:
        settings = TrainingArguments(
            out, num_train_epochs=epochs, eval_strategy="epoch", save_strategy="no",
            per_device_train_batch_size=BATCH, per_device_eval_batch_size=4 * BATCH,
            lr_scheduler_type="cosine", seed=seed, data_seed=seed, use_cpu=True,
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model, settings, train_dataset=rows[0], eval_dataset=rows[1], callbacks=callbacks,
            optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()
    with torch.no_grad():
        found = model(input_ids=test).logits[:, :-1].argmax(-1) == test[:, 1:]
    return 100 * float(found.float().mean())


def main(arguments: Sequence[str]) -> int:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks strangers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="grow what is not in the results yet")
    run.add_argument("--data", type=Path, required=True, help="folder with cifar16-all.npz")
    run.add_argument("--out", type=Path, required=True, help="results, a line of JSON a network")
    run.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    run.add_argument("--arms", nargs="+", default=(*SCHEDULES, *CONTROLLERS))
    run.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    run.add_argument("--jobs", type=int, default=1, help="networks side by side, a core each")
    summary = verbs.add_parser("summary", help="print the table of what was measured")
    summary.add_argument("results", type=Path)
    options = parser.parse_args(arguments)
    if options.verb == "summary":
        require_results(options.results)
        print_summary(_read(options.results))
        return 0
    done = {(each["case"], each["arm"], each["seed"]) for each in _read(options.out)}
    left_out: list[str] = []
    if importlib.util.find_spec("transformers") is None:
        left_out = [case for case in options.cases if case in NEED_TRANSFORMERS]
    if left_out:
        needed = "pip install 'esper-grow[transformers]'"
        print(f"{', '.join(left_out)} left out: {needed}", file=sys.stderr)
    todo = [
        (case, arm, seed)
        for seed in options.seeds
        for case in options.cases
        for arm in options.arms
        if (case, arm, seed) not in done and case not in left_out
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    work = partial(_run_and_write, folder=options.data, out=options.out)
    run_all(work, todo, options.jobs)
    return 0


def _run_and_write(which: tuple[str, str, int], folder: Path, out: Path) -> None:
    """Run one network and write it down at once, so that nothing is lost on the way."""
    found = json.dumps(run_one(*which, folder)) + "\n"
    with out.open("a", encoding="utf-8") as file:
        file.write(found)


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]


def print_summary(records: Sequence[dict[str, Any]]) -> None:
    """Print, for every network, the gain of each arm over the twin with its standard error."""
    arms = list(dict.fromkeys(one["arm"] for one in records))
    rows = []
    for case in CASES:
        gains = {
            arm: [o["score"] - o["twin"] for o in records if (o["case"], o["arm"]) == (case, arm)]
            for arm in arms
        }
        if not any(gains.values()):
            continue
        twins = [one["twin"] for one in records if one["case"] == case]
        static = _static(records, case)
        told = [_told(gains[arm]) for arm in arms]
        rows.append([case, f"{fmean(twins):.4g}", *told, static, _verdict(gains)])
    print_table(["network", "twin", *arms, "static of its size", "default"], rows)


def _static(records: Sequence[dict[str, Any]], case: str) -> str:
    """Return how far the static network is above what the default has grown, where it grew."""
    ahead = [
        one["static"] - one["score"]
        for one in records
        if (one["case"], one["arm"]) == (case, DEFAULT) and one.get("static") is not None
    ]
    is_better = len(ahead) > 1 and fmean(ahead) > 2 * _error(ahead)
    return _told(ahead) + (": better" if is_better else "")


def _told(gains: Sequence[float]) -> str:
    if not gains:
        return ""
    error = f" ± {_error(gains):.2g}" if len(gains) > 1 else ""
    return f"{fmean(gains):+.3g}{error}"


def _error(gains: Sequence[float]) -> float:
    return stdev(gains) / math.sqrt(len(gains))


def _verdict(gains: dict[str, list[float]]) -> str:
    """Return whether the default does what it has to."""
    own = gains.get(DEFAULT, [])
    tried = [gains[arm] for arm in SCHEDULES if len(gains.get(arm, ())) > 1]
    if len(own) < 2 or not tried:
        return "not measured"
    best = max(tried, key=fmean)
    if fmean(best) > 2 * _error(best):
        share = fmean(own) / fmean(best)
        return f"{share:.0%} of the best schedule" + ("" if share >= 0.5 else ": too little")
    middle = median(own)
    return f"median {middle:+.3g}" + ("" if middle >= 0 else ": harm")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
