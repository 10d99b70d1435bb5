"""Trains one network of a depth cell and measures it: every FLOP counted, fully decayed."""

from __future__ import annotations

import math
import platform
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.depth.cells import CELLS, Cell, Job
from benchmarks.depth.corpus import read_corpus
from benchmarks.depth.models import NETWORKS, Network
from benchmarks.depth.step import TrainingStep
from esper import Deepen
from esper.growth.depth.blocks import ORDERS

VALIDATION_BYTES = {"python": 2_200_000, "prose": 1_100_000, "stdlib": 200_000}
IMAGES = "cifar16-all.npz"
_CURVE_POINTS = 40


# --- data --------------------------------------------------------------------------------------


@dataclass
class Text:
    """Bytes to train on and bytes to validate on."""

    train: Tensor
    held_out: Tensor

    def batches(
        self, cell: Cell, steps: int, seed: int, device: torch.device
    ) -> Callable[[int], Any]:
        """Return a function from the step to its windows and their next bytes."""
        length, generator = cell.size.length, torch.Generator().manual_seed(seed)
        starts = torch.randint(
            0, len(self.train) - length - 1, (steps, cell.batch), generator=generator
        )
        starts, reach = starts.to(device), torch.arange(length + 1, device=device)

        def batch(step: int) -> tuple[Tensor, Tensor]:
            window = self.train[starts[step][:, None] + reach].long()
            return window[:, :-1], window[:, 1:]

        return batch

    @torch.no_grad()
    def measure(self, network: Network, cell: Cell) -> dict[str, float]:
        """Return the mean loss of the held-out text, in windows that do not overlap."""
        width = cell.size.length + 1
        windows = self.held_out[: len(self.held_out) // width * width].view(-1, width).long()
        total = torch.zeros((), dtype=torch.float64, device=windows.device)
        for part in windows[: len(windows) // cell.batch * cell.batch].split(cell.batch):
            logits = network(part[:, :-1]).float().flatten(0, 1)
            total += F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum")
        return {"loss": float(total) / (len(windows) // cell.batch * cell.batch * cell.size.length)}


@dataclass
class Images:
    """Images of 16x16 with crops and mirror images for training, as they are for the test."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    def batches(
        self, cell: Cell, steps: int, seed: int, device: torch.device
    ) -> Callable[[int], Any]:
        generator = torch.Generator(device=device).manual_seed(seed)
        grid = torch.arange(16, device=device)
        shares = np.random.default_rng(seed).beta(cell.mixup or 1.0, cell.mixup or 1.0, steps)
        per_epoch = len(self.train) // cell.batch
        order = torch.empty(0)

        def batch(step: int) -> tuple[Tensor, Tensor]:
            nonlocal order
            if step % per_epoch == 0:
                order = torch.randperm(len(self.train), device=device, generator=generator)
            at = order[step % per_epoch * cell.batch :][: cell.batch]
            shift = torch.randint(0, 5, (2, cell.batch, 1), device=device, generator=generator)
            mirrored = torch.rand(cell.batch, 1, device=device, generator=generator) < 0.5
            columns = torch.where(mirrored, 15 - grid, grid) + shift[0]
            picked = self.train[
                at[:, None, None], (grid + shift[1])[:, :, None], columns[:, None, :]
            ]
            images, labels = picked.permute(0, 3, 1, 2), self.train_labels[at]
            if not cell.mixup:
                return images, labels
            share, chosen = float(shares[step]), F.one_hot(labels, cell.size.classes).float()
            return _mixed(images, share), _mixed(chosen, share)

        return batch

    @torch.no_grad()
    def measure(self, network: Network, cell: Cell) -> dict[str, float]:
        logits = torch.cat(
            [network(part.permute(0, 3, 1, 2)).float() for part in self.test.split(1_000)]
        )
        wrong = (logits.argmax(1) != self.test_labels).float().mean()
        return {"loss": float(F.cross_entropy(logits, self.test_labels)), "error": float(wrong)}


def _mixed(values: Tensor, share: float) -> Tensor:
    """Return each item mixed with the one before it."""
    return share * values + (1.0 - share) * values.roll(1, 0)


def load_data(name: str, folder: Path, device: torch.device) -> Text | Images:
    """Read a cell's data onto the device."""
    if name == "images":
        return _load_images(folder / IMAGES, device)
    if name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted([*root.glob("*.py"), *root.glob("asyncio/*.py")])
        text = "".join(file.read_text("utf-8", "ignore") for file in files).encode(
            "ascii", "ignore"
        )
    else:
        text = read_corpus(folder, name)
    raw = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    held_out = VALIDATION_BYTES[name]
    return Text(raw[:-held_out], raw[-held_out:])


def _load_images(path: Path, device: torch.device) -> Images:
    if not path.exists():
        raise SystemExit(
            f"{path} is missing; make it: python -m benchmarks depth images --out {path.parent}"
        )
    with np.load(path) as file:
        parts = {key: torch.from_numpy(file[key]).to(device) for key in file.files}

    def scale(images: Tensor) -> Tensor:
        return (images.permute(0, 2, 3, 1).float() / 255 - 0.47) / 0.24

    return Images(
        F.pad(scale(parts["x_train"]), (0, 0, 2, 2, 2, 2)),
        parts["y_train"].long(),
        scale(parts["x_test"]),
        parts["y_test"].long(),
    )


# --- growing -----------------------------------------------------------------------------------


def sources_of(old: int, new: int, order: str) -> list[int]:
    """Return which block awake before each of the blocks awake afterwards begins as."""
    if order == "interleave":
        return [at * old // new for at in range(new)]
    sources = [at % old for at in range(new)]
    if order == "stack" and new % old:
        sources[-(new % old) :] = range(old - new % old, old)
    return sources


@torch.no_grad()
def grow(
    network: Network, optimizer: torch.optim.Optimizer, blocks: int, job: Job
) -> set[nn.Module]:
    """Wake blocks as the job says; return those that are new."""
    fresh = set()
    for stack in network.stacks():
        old = network.awake
        saved = [_copy_of(block, optimizer) for block in stack[:old]]
        seen: set[int] = set()
        for at, source in enumerate(sources_of(old, blocks, job.order)):
            block = stack[at]
            is_new = source in seen
            seen.add(source)
            weights, states = saved[source]
            if is_new:
                fresh.add(block)
            for parameter in block.parameters():
                optimizer.state.pop(parameter, None)
            if is_new and job.start in ("fresh", "zero"):
                block.initialize(network.size.init, CELLS[job.cell].depth)
                if job.start == "zero":
                    block.silence()
                continue
            block.load_state_dict(weights)
            for parameter, state in zip(block.parameters(), states, strict=True):
                if state and not (is_new and job.start == "copy"):
                    optimizer.state[parameter] = {
                        key: value.clone() if isinstance(value, Tensor) else value
                        for key, value in state.items()
                    }
    network.awake = blocks
    return fresh


def _copy_of(block: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, list[Any]]:
    weights = {key: value.clone() for key, value in block.state_dict().items()}
    states = [
        {
            k: v.clone() if isinstance(v, Tensor) else v
            for k, v in optimizer.state.get(p, {}).items()
        }
        for p in block.parameters()
    ]
    return weights, states


# --- training ----------------------------------------------------------------------------------


def steps_of(job: Job, network: Network) -> int:
    """Return how many steps the run has: a share of the cell's, or what its compute buys."""
    cell = CELLS[job.cell]
    if job.compute is None:
        return round(job.length * cell.steps)
    ends = [*(share for share, _ in job.plan[1:]), 1.0]
    mean = sum(
        (end - share) * network.training_flops(blocks)
        for (share, blocks), end in zip(job.plan, ends, strict=True)
    )
    return int(job.compute * cell.steps * network.training_flops(cell.depth) / mean)


def flops_of(job: Job) -> float:
    """Return the training FLOPs of the whole run, without building its network."""
    cell = CELLS[job.cell]
    with torch.device("meta"):
        network: Network = NETWORKS[cell.network](cell.size, 1)
    steps = steps_of(job, network)
    ends = [*(int(share * steps) for share, _ in job.plan[1:]), steps]
    starts = [0, *ends[:-1]]
    return cell.batch * sum(
        (end - start) * network.training_flops(blocks)
        for start, end, (_, blocks) in zip(starts, ends, job.plan, strict=True)
    )


def rate_factor(job: Job, cell: Cell, step: int, steps: int) -> float:
    """Return the share of the highest rate: warm-up, then level and decay, linear or cosine."""
    warmup = cell.warmup or max(50, steps // 50)
    rise = min(1.0, (step + 1) / warmup)
    if job.schedule == "wsd":
        return rise * min(1.0, (steps - step) / (cell.decay * steps))
    left = (steps - step) / steps
    return rise * (left if job.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


def train(
    job: Job, data: Text | Images, device: torch.device, deadline: float
) -> dict[str, Any] | None:
    """Train one network to its end; return what is recorded, or None when time is up."""
    cell = CELLS[job.cell]
    torch.manual_seed(job.seed)
    deepest = max(blocks for _, blocks in job.plan)
    network: Network = NETWORKS[cell.network](cell.size, deepest).to(device)
    if cell.network == "resnet" and device.type == "cuda":
        network.to(memory_format=torch.channels_last)
    network.awake = job.plan[0][1]
    optimizer = _make_optimizer(cell, network, job.rate)
    steps = steps_of(job, network)
    todo = [(int(share * steps), blocks) for share, blocks in job.plan[1:]]
    batch_at = data.batches(cell, steps, job.seed, device)
    if device.type == "cuda":
        for stack in network.stacks():
            for block in stack:
                block.compile(dynamic=False)
        _compile_blocks(network, batch_at(0)[0])
    is_usual = job.start == "state" and job.order in ORDERS and not job.ramp
    growth = _Deepened if is_usual else _Grown
    growing = growth(job, network, optimizer, todo, batch_at(0)[0])
    training = TrainingStep(
        network, optimizer, 1.0 if cell.optimizer == "adamw" else None, job.rate
    )
    flops, losses = 0.0, []
    network.train()
    _synchronize(device)
    began, busy = time.monotonic(), time.process_time()
    for step in range(steps):
        if growing.before(step, steps):
            training.renew()
        factor = rate_factor(job, cell, step, steps)
        if job.rewarm and growing.grew_at is not None:
            factor *= min(1.0, (step - growing.grew_at + 1) / job.rewarm)
        training.set_rate(job.rate * factor)
        loss = training(*batch_at(step))
        flops += network.training_flops(growing.awake) * cell.batch
        if step % max(1, steps // _CURVE_POINTS) == 0:
            losses.append((flops, loss.clone()))
            if time.monotonic() > deadline:
                return None
    _synchronize(device)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - busy
    network.eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        result = data.measure(network, cell)
    return {
        **job.as_record(),
        "steps": steps,
        "flops": flops,
        **result,
        "python": platform.python_version() if cell.data == "stdlib" else None,
        "parameters": sum(each.numel() for each in network.parameters()),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "curve": [[float(f"{at:.5g}"), round(float(value), 4)] for at, value in losses],
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compile_blocks(network: Network, inputs: Tensor) -> None:
    """Compile the blocks, forwards and backwards, before the clock runs; nothing is trained."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.train()
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        network(inputs).float().sum().backward()
    network.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])


class _Deepened:
    """Grows as users do, by `esper.Deepen`."""

    def __init__(
        self,
        job: Job,
        network: Network,
        optimizer: torch.optim.Optimizer,
        todo: list[tuple[int, int]],
        example: Tensor,
    ) -> None:
        self.awake, self.grew_at = network.awake, None
        self._depth = None
        if todo:
            network.awake = todo[-1][1]
            self._depth = Deepen(
                network,
                optimizer,
                stacks=network.stack_names(),
                example=example,
                start=self.awake,
                at=dict(todo),
                order=job.order,
            )

    def before(self, step: int, steps: int) -> bool:
        """Wake blocks where the plan says so; return whether the network is another one now."""
        if self._depth is None or not step:
            return False
        self._depth.step()
        awake = next(iter(self._depth.awake.values()))
        if awake == self.awake:
            return False
        self.awake, self.grew_at = awake, step
        return True


class _Grown:
    """Grows in other ways, for comparison: fresh or silent blocks, copies that are blended in."""

    def __init__(
        self,
        job: Job,
        network: Network,
        optimizer: torch.optim.Optimizer,
        todo: list[tuple[int, int]],
        example: Tensor,
    ) -> None:
        self._job, self._network, self._optimizer, self._todo = job, network, optimizer, todo
        self.grew_at: int | None = None
        self._new: set[nn.Module] = set()
        self._amount = torch.ones((), device=example.device)
        network.run = self._run

    @property
    def awake(self) -> int:
        return self._network.awake

    def before(self, step: int, steps: int) -> bool:
        """Grow where the plan says so, and blend in; return whether the network is another one."""
        has_changed = False
        if self._todo and step == self._todo[0][0]:
            self._new = grow(self._network, self._optimizer, self._todo.pop(0)[1], self._job)
            self.grew_at, has_changed = step, True
        if self._new:
            assert self.grew_at is not None
            share = (step - self.grew_at + 1) / max(1.0, self._job.ramp * steps)
            self._amount.fill_(min(1.0, share))
            if share >= 1:
                self._new, has_changed = set(), True
        return has_changed

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        out = block(x)
        return x + self._amount * (out - x) if block in self._new else out


def _make_optimizer(cell: Cell, network: nn.Module, rate: float) -> torch.optim.Optimizer:
    fused = next(network.parameters()).is_cuda
    if cell.optimizer == "sgd":
        return torch.optim.SGD(
            network.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused
        )
    return torch.optim.AdamW(
        network.parameters(),
        rate,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=fused,
        capturable=fused,
    )


def finished(records: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of the runs that are done."""
    return {record["name"] for record in records}
