"""The three networks of `esper demo`, trained at equal compute, each in a process of its own."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline.errors import EsperError, EsperWarning
from esper.leyline.records import EpochRecord
from esper.scripts.cli.demo import BUDGET, PROMPT, Arm, Outcome, Point
from esper.utils.process import keep_freed_memory

if TYPE_CHECKING:
    from esper.growth.grown import Grown

TASK = "sources"
"""The sources of Python's own library."""
VOCAB, CONTEXT, DIM, HEADS = 128, 64, 32, 2
"""Vocabulary (ASCII bytes), context length, width, and attention heads."""
BATCH = 16
WINDOWS = 50
"""Least number of validations, if there are as many steps."""
MOST_STEPS = 100
"""About the largest number of steps between two validations; Ctrl-C takes effect there."""
VALIDATED = 256
"""Number of validation sequences."""
TESTED = 3_000
"""Number of test sequences, used once at the end."""
WARM_UP = 100
"""Steps with a rising learning rate."""
DECAY = 0.25
"""Share of the run, at its end, with a falling learning rate."""
WRITTEN = 320
"""Bytes of text that a network writes."""
TEMPERATURE = 0.7


class Block(nn.Module):
    """Causal attention, then a two-layer MLP, each behind an RMSNorm and inside a residual path."""

    def __init__(self, blocks: int) -> None:
        """Draw weights for a network of this many blocks."""
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = _linear(DIM, 3 * DIM), _linear(DIM, DIM, blocks)
        self.up, self.down = _linear(DIM, 4 * DIM), _linear(4 * DIM, DIM, blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream [B, T, DIM] with both updates added."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        updated: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return updated


class GPT(nn.Module):
    """A byte-level language model in plain PyTorch."""

    def __init__(self, blocks: int) -> None:
        """Draw weights from PyTorch's current random state."""
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        for table in (self.bytes, self.positions):
            nn.init.normal_(table.weight, std=_SPREAD)
        self.blocks = nn.ModuleList(Block(blocks) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(DIM), _linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of every next byte, [B, T] to [B, T, VOCAB]."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


_SPREAD = 0.05
"""Standard deviation of initial weights."""


def _linear(inputs: int, outputs: int, blocks: int = 0) -> nn.Linear:
    """Return a linear layer; the last one of a branch starts smaller, by the number of blocks."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=_SPREAD / math.sqrt(2 * blocks or 1))
    return layer


class _Batches:
    """Random sequences of the training text, the same for all networks of a seed."""

    def __init__(self, sequences: Tensor, windows: int, steps: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        self._sequences, self._steps, self._window = sequences, steps, 0
        shape = (windows * steps, BATCH)
        self._chosen = torch.randint(len(sequences), shape, generator=draws)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next window, from 1."""
        self._window = epoch - 1

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begin = self._window * self._steps
        for chosen in self._chosen[begin : begin + self._steps]:
            yield _pair(self._sequences[chosen])


def _pair(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and next-byte targets; bytes beyond ASCII share one token."""
    tokens = sequences.long().clamp_(max=VOCAB - 1)
    return tokens[:, :-1], tokens[:, 1:]


def train_arm(
    arm: Arm, seed: int, compute: float, on_point: Callable[[Point], bool]
) -> tuple[Grown, Outcome]:
    """Train a network and test it.

    Args:
        arm: the network to train.
        seed: of its first weights and its batches.
        compute: training FLOPs, as a multiple of `BUDGET`.
        on_point: called after every validation; returns whether to continue.
    """
    import esper
    from esper.lab.tasks import get_task

    parts = get_task(TASK).load().splits.samples
    torch.manual_seed(seed)
    model = GPT(arm.blocks)
    windows, steps = plan_windows(model, arm, compute * BUDGET)
    outcome = Outcome(arm.name)

    def on_epoch(record: EpochRecord) -> None:
        depth = record.depth
        assert depth is not None
        awake = sum(stack.awake for stack in depth.stacks)
        point = Point(record.epoch / windows, depth.flops, awake, float(record.val_loss))
        outcome.curve.append(point)
        outcome.steps = depth.step
        if not on_point(point):
            raise StopIteration("interrupted")

    began = time.process_time()
    with warnings.catch_warnings():
        # A static network is meant not to grow, so this warning does not matter.
        warnings.simplefilter("ignore", EsperWarning)
        grown = esper.grow(
            model,
            train=_Batches(parts["train"], windows, steps, seed),
            val=[_pair(part) for part in parts["val"][:VALIDATED].split(64)],
            epochs=windows,
            loss="language",
            deepen={"start": arm.start},
            optimizer=partial(
                torch.optim.AdamW,
                lr=arm.learning_rate,
                betas=(0.9, 0.95),
                weight_decay=0.1,
                fused=True,
            ),
            scheduler=partial(_scheduler, steps=windows * steps),
            scheduler_every="batch",
            keep="last",
            seed=seed,
            on_epoch=on_epoch,
            progress=False,
        )
    outcome.cpu_s = time.process_time() - began
    outcome.parameters = grown.summary.parameters_after
    outcome.test_loss = mean_loss(grown.model, parts["test"][:TESTED])
    outcome.text = write_text(grown.model, seed)
    return grown, outcome


def plan_windows(model: GPT, arm: Arm, flops: float) -> tuple[int, int]:
    """Return the number of validations and the steps between two, for a budget of FLOPs.

    Steps are rounded up for static networks and down for the one that grows.
    """
    import esper

    example = torch.zeros((BATCH, CONTEXT), dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters())
    depth = esper.Deepen(model, optimizer, example=example, start=arm.start, total_steps=1)
    is_static = arm.start == arm.blocks
    steps = depth.steps_for(flops) + is_static
    windows = max(1, min(steps, max(WINDOWS, steps // MOST_STEPS)))
    return windows, max(1, math.ceil(steps / windows) if is_static else steps // windows)


def _scheduler(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler with warm-up, constant rate and final decay."""
    from torch.optim.lr_scheduler import LambdaLR

    warm_up = min(WARM_UP, steps // 10 + 1)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warm_up, max(1, steps - step) / (DECAY * steps))

    return LambdaLR(optimizer, factor)


def mean_loss(model: nn.Module, sequences: Tensor) -> float:
    """Return the mean loss over these sequences, in nats per byte."""
    total = 0.0
    with torch.no_grad():
        for part in sequences.split(128):
            inputs, targets = _pair(part)
            outputs = model(inputs).flatten(0, 1)
            total += float(F.cross_entropy(outputs, targets.flatten(), reduction="sum"))
    return total / sequences[:, 1:].numel()


def write_text(model: nn.Module, seed: int) -> str:
    """Return the text that a network writes after `PROMPT`, with a fixed random seed."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        for _ in range(WRITTEN):
            scores = model(tokens[:, -CONTEXT:])[:, -1] / TEMPERATURE
            drawn = torch.multinomial(scores.softmax(-1), 1, generator=draws)
            tokens = torch.cat([tokens, drawn], dim=1)
    return bytes(tokens[0].tolist()).decode("ascii", "replace")


def work(pipe: Connection, arm: Arm, seed: int, compute: float, report: Path | None) -> None:
    """Train a network in this process; send every point, then the outcome or the error.

    Any message from the parent ends training early; only the parent handles Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()

    def on_point(point: Point) -> bool:
        pipe.send(point)
        return not pipe.poll()

    answer: Any
    try:
        grown, answer = train_arm(arm, seed, compute, on_point)
        if report is not None:
            try:
                answer.report = str(grown.report(report, command="esper demo"))
            except (EsperError, OSError) as error:
                answer.problem = str(error)
    except EsperError as error:
        answer = error
    except BrokenPipeError:
        return
    pipe.send(answer)
