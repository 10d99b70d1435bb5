"""Trains one arm of a case and measures it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.adapters.cases import CASES, Case, Split, load_base, loss_of, score_of
from esper import Adapt
from esper.growth.adapters.finding import find_weights
from esper.growth.adapters.placement import AdaptConfig

ARMS = ("peft", "esper", "placed", "uniform", "full", "head")
"""peft: LoRA of PEFT at uniform rank. esper: placed by gradients, then moved. placed: never moved.
uniform: Esper's own pairs at uniform rank. full: every parameter. head: a new head alone."""

FIRST_RATES = {"full": 1e-3, "head": 1e-2}
RATE = 8e-3
"""The middle of the first three rates that are tried for adapters."""
FACTOR = 2.0
"""From one rate of the grid to the next."""
TUNING_SEEDS = (100, 101)


@dataclass(frozen=True)
class Job:
    """One training run."""

    case: str
    arm: str
    rate: float
    seed: int
    options: tuple[tuple[str, Any], ...] = ()
    """Settings of `AdaptConfig` that are not the default ones."""

    @property
    def label(self) -> str:
        """The arm with its settings."""
        told = (f"{key}={_plain(value)}" for key, value in self.options)
        return " ".join([self.arm, *told])

    @property
    def name(self) -> str:
        """What identifies the run in the results."""
        return f"{self.case} {self.label} lr{self.rate:.3g} s{self.seed}"


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(f"{one:g}" for one in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


class Bench:
    """Data and trained networks, loaded once."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder, self._cache = folder, cache
        self._loaded: dict[str, tuple[dict[str, Tensor], Split]] = {}

    def load(self, case: Case) -> tuple[dict[str, Tensor], Split]:
        """Return the weights of a case's network and its second task."""
        if case.name not in self._loaded:
            base = load_base(case, self._folder, self._cache)
            self._loaded[case.name] = base, case.after(self._folder)
        return self._loaded[case.name]


def budget_of(case: Case, network: nn.Module) -> int:
    """Return the parameters of the uniform arm."""
    return case.rank * sum(
        weight.shape[0] + weight[0].numel() for weight in _uniform_weights(case, network).values()
    )


def _uniform_weights(case: Case, network: nn.Module) -> dict[str, Tensor]:
    """Return the weights that PEFT's LoRA can adapt; of convolutions in groups it cannot, here."""
    found = find_weights(network, [case.head] if case.head else []).weights
    return {
        name: one.module._parameters[one.tensor]
        for name, one in found.items()
        if getattr(one.module, "groups", 1) == 1
    }


def train(job: Job, bench: Bench, *, steps: int | None = None) -> dict[str, Any]:
    """Adapt the network of a case and return what was measured."""
    case = CASES[job.case]
    base, data = bench.load(case)
    torch.manual_seed(job.seed)
    network = case.make()
    fresh = {n: p.clone() for n, p in network.state_dict().items() if _is_head(case, n)}
    network.load_state_dict({**base, **fresh})
    steps = steps or case.steps
    before = score_of(case, network.eval(), data.test)
    budget = budget_of(case, network)
    began = time.monotonic()
    trained, adapters = _arm(job, case, network, budget, steps)
    parameters = list(adapters.parameters()) if adapters else _trainable(trained)
    optimizer = torch.optim.AdamW(parameters, job.rate, weight_decay=0.0)
    order = torch.Generator().manual_seed(job.seed)
    # Statistics of batch norm stay those of the first task, in all arms.
    trained.eval()
    curve, at = [], torch.empty(0)
    for step in range(steps):
        rate = min(1.0, (step + 1) / (0.03 * steps), 2 * (1 - step / steps))
        for group in optimizer.param_groups:
            group["lr"] = job.rate * rate
        if len(at) < case.batch:
            at = torch.randperm(len(data.train[0]), generator=order)
        now, at = at[: case.batch], at[case.batch :]
        loss = loss_of(case, trained(data.train[0][now]), data.train[1][now])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if adapters:
            adapters.step(optimizer)
        if step % max(1, steps // 10) == 0:
            curve.append(round(float(loss.detach()), 4))
    size = sum(p.numel() for p in (adapters.parameters() if adapters else _trainable(trained)))
    if adapters:
        adapters.bake()
    seconds = time.monotonic() - began
    val, test = (score_of(case, trained, part) for part in (data.val, data.test))
    return {
        "name": job.name,
        "case": job.case,
        "arm": job.label,
        "rate": job.rate,
        "seed": job.seed,
        "steps": steps,
        "budget": budget,
        "parameters": size,
        "before": round(before["score"], 3),
        "val": round(val["score"], 4),
        "val_loss": round(val["loss"], 6),
        "score": round(test["score"], 4),
        "loss": round(test["loss"], 6),
        "seconds": round(seconds, 2),
        "curve": curve,
        "ranks": {n: r for n, r in adapters.ranks.items() if r} if adapters else None,
        "history": adapters.history if adapters and job.arm != "uniform" else None,
    }


def _is_head(case: Case, name: str) -> bool:
    return bool(case.head) and name.startswith(f"{case.head}.")


def _trainable(network: nn.Module) -> list[nn.Parameter]:
    return [p for p in network.parameters() if p.requires_grad]


def _arm(
    job: Job, case: Case, network: nn.Module, budget: int, steps: int
) -> tuple[nn.Module, Adapt | None]:
    """Return the network as the arm trains it, and its adapters where they are Esper's."""
    heads = [case.head] if case.head else []
    if job.arm == "full":
        return network, None
    if job.arm == "head":
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(_is_head(case, name))
        return network, None
    if job.arm == "peft":
        return _with_peft(case, network), None
    if job.arm == "uniform":
        targets = [name.rpartition(".")[0] for name in _uniform_weights(case, network)]
        return network, Adapt(network, rank=case.rank, targets=targets, trainable=heads)
    options = dict(job.options)
    if job.arm == "placed":
        options["moves"] = ()
    config = AdaptConfig(**options)
    return network, Adapt(network, budget, total_steps=steps, trainable=heads, config=config)


def _with_peft(case: Case, network: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    names = [name.rpartition(".")[0] for name in _uniform_weights(case, network)]
    config = LoraConfig(
        r=case.rank,
        lora_alpha=case.rank,
        target_modules="|".join(map(re.escape, names)),
        fan_in_fan_out=case.name == "gpt2",
        modules_to_save=[case.head] if case.head else None,
    )
    return get_peft_model(network, config)
