"""Which blocks learn to look further back once they are copied? Causal convolutions, or attention.

    python research/arena/reach.py --out reach.jsonl
    python research/arena/reach.py --summary reach.jsonl

A letter of the text `copies` stands some bytes behind itself. One block does not see that far: it
is a pair of convolutions over three bytes, or attention to the last four with a learned bias for
each distance. Every plan has the same training FLOPs: a network of one or two blocks from the
start, or one block that is copied at a share of the budget, with its optimizer state. Plain
PyTorch on a CPU, one thread; a minute.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.lab.tasks.data.synthetic import make_copies
from esper.lab.tasks.data.text import FOLDED, cut, fold

CONTEXT, BATCH, WIDTH, KERNEL, WINDOW, HEADS = 32, 4, 24, 3, 4, 2
RATE, LEVEL = 0.01, 5
PLANS = {"1": (1, None), "2": (2, None), "1>2@2%": (1, 0.02), "1>2@10%": (1, 0.1)}
"""Blocks at the start, and the share of the budget at which they are doubled."""


class Convolutions(nn.Module):
    """Two causal convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.filters = nn.ModuleList(nn.Linear(KERNEL * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream with both added."""
        y = F.gelu(self._convolve(x, 0))
        return x + self._convolve(y, 1)

    def _convolve(self, x: Tensor, number: int) -> Tensor:
        padded = F.pad(self.norms[number](x), (0, 0, KERNEL - 1, 0))
        seen = [padded[:, back : back + CONTEXT] for back in range(KERNEL)]
        return self.filters[number](torch.cat(seen, -1))


class Attention(nn.Module):
    """Attention to the last few bytes with a bias for every distance, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.bias = nn.Parameter(torch.zeros(HEADS, WINDOW))
        place = torch.arange(CONTEXT)
        self.back = place[:, None] - place[None]
        self.is_hidden = (self.back < 0) | (self.back >= WINDOW)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream with both added."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        bias = self.bias[:, self.back.clamp(0, WINDOW - 1)].masked_fill(self.is_hidden, -math.inf)
        gathered = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        x = x + self.out(gathered.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


BLOCKS = {"convolutions": Convolutions, "attention": Attention}


class Network(nn.Module):
    """An embedding, blocks, and a classifier."""

    def __init__(self, kind: str, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(FOLDED, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FOLDED)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of every next byte."""
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores

    def cost(self) -> int:
        """Return multiplications of a token's forward pass through the matrices."""
        return sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))


def double(network: Network, optimizer: torch.optim.Optimizer) -> None:
    """Append a copy of every block, with its optimizer state."""
    for block in list(network.blocks):
        copied = copy.deepcopy(block)
        network.blocks.append(copied)
        for source, new in zip(block.parameters(), copied.parameters(), strict=True):
            optimizer.param_groups[0]["params"].append(new)
            optimizer.state[new] = {k: v.clone() for k, v in optimizer.state[source].items()}


def play(text: Tensor, kind: str, plan: str, steps: int, seed: int) -> float:
    """Return the test loss after the FLOPs of so many steps of one block."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    blocks, moment = PLANS[plan]
    budget = steps * Network(kind, 1).cost()
    network = Network(kind, blocks)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.05)
    spent = 0
    train, test = text[:-2_000], text[-2_000:]
    while spent < budget:
        share = spent / budget
        if moment is not None and share >= moment:
            double(network, optimizer)
            moment = None
        rate = RATE * min(1.0, (share + 1e-3) / 0.02) * min(1.0, (1 - share) / 0.2)
        optimizer.param_groups[0]["lr"] = rate
        x = train[torch.randint(len(train), (BATCH,), generator=draw)]
        loss = F.cross_entropy(network(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        spent += network.cost()
    with torch.no_grad():
        return F.cross_entropy(network(test[:, :-1]).flatten(0, 1), test[:, 1:].flatten()).item()


def summarise(path: Path) -> None:
    """Print the mean test losses."""
    found: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text("utf-8").splitlines():
        one = json.loads(line)
        found[one["blocks"], one["steps"]][one["plan"]].append(one["loss"])
    print("| blocks | steps | " + " | ".join(PLANS) + " |\n|" + "---|" * (2 + len(PLANS)))
    for (kind, steps), plans in found.items():
        means = " | ".join(f"{fmean(plans[plan]):.2f}" for plan in PLANS)
        print(f"| {kind} | {steps} | {means} |")


def main() -> None:
    """Train every network, or print what was trained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--summary", type=Path, help="file of results to print")
    parser.add_argument("--steps", type=int, nargs="+", default=[600, 1500])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.summary:
        summarise(options.summary)
        return
    if options.out is None:
        parser.error("give --out FILE, or --summary FILE")
    torch.set_num_threads(1)
    text = torch.tensor(cut(fold(make_copies(LEVEL)), CONTEXT).astype(np.int64))
    names = itertools.product(BLOCKS, options.steps, PLANS, range(options.seeds))
    with options.out.open("w", encoding="utf-8") as file:
        for kind, steps, plan, seed in names:
            loss = play(text, kind, plan, steps, seed)
            record = {"blocks": kind, "steps": steps, "plan": plan, "seed": seed, "loss": loss}
            file.write(json.dumps(record) + "\n")
            file.flush()
    summarise(options.out)


if __name__ == "__main__":
    main()
