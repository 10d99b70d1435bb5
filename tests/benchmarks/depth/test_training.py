"""Runs of the depth cells: growth copies blocks with their state, FLOPs and steps are counted."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.depth import training
from benchmarks.depth.cells import CELLS, Cell, Job, doubling, grown, static
from benchmarks.depth.models import NETWORKS, Network, Size
from benchmarks.depth.training import (
    Images,
    Text,
    flops_of,
    grow,
    rate_factor,
    sources_of,
    steps_of,
    train,
)

SMALL = CELLS["small"]


def make(cell: Cell, blocks: int) -> Network:
    torch.manual_seed(0)
    network: Network = NETWORKS[cell.network](cell.size, blocks)
    return network


def some_text() -> Text:
    letters = torch.randint(0, 128, (20_000,), generator=torch.Generator().manual_seed(1))
    return Text(letters[:-4_000].to(torch.uint8), letters[-4_000:].to(torch.uint8))


def some_images() -> Images:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(40, 16, 16, 3, generator=generator)
    labels = torch.randint(0, 10, (40,), generator=generator)
    return Images(F.pad(images, (0, 0, 2, 2, 2, 2)), labels, images, labels)


def test_stacked_copies_repeat_the_stack_and_interleaved_ones_each_block() -> None:
    assert sources_of(3, 6, "stack") == [0, 1, 2, 0, 1, 2]
    assert sources_of(3, 6, "interleave") == [0, 0, 1, 1, 2, 2]
    assert sources_of(1, 4, "stack") == [0, 0, 0, 0]


@pytest.mark.parametrize("order", ["stack", "interleave"])
@pytest.mark.parametrize("start", ["state", "copy", "fresh", "zero"])
def test_new_blocks_begin_as_the_job_says(order: str, start: str) -> None:
    network = make(SMALL, 4)
    network.awake = 2
    optimizer = torch.optim.AdamW(network.parameters())
    ids = torch.randint(0, 128, (2, 8))
    network(ids).sum().backward()
    optimizer.step()
    before = [block.up.weight.clone() for block in network.blocks[:2]]
    moments = [optimizer.state[block.up.weight]["exp_avg"].clone() for block in network.blocks[:2]]
    outputs = network(ids)
    new = grow(network, optimizer, 4, Job("small", ((0.0, 2),), 1e-3, start=start, order=order))
    assert len(new) == 2
    assert network.awake == 4
    for at, source in enumerate(sources_of(2, 4, order)):
        block = network.blocks[at]
        is_copy = block not in new or start in ("state", "copy")
        assert torch.equal(block.up.weight, before[source]) == is_copy
        state = optimizer.state.get(block.up.weight)
        if block in new and start != "state":
            assert not state
        else:
            assert torch.equal(state["exp_avg"], moments[source])
    if start == "zero":
        assert torch.equal(network(ids), outputs)


@pytest.mark.parametrize("kind", ["gpt", "vit", "resnet"])
def test_training_flops_are_three_forward_passes(kind: str) -> None:
    size = Size(16, 2, 16, 10)
    cell = replace(SMALL, network=kind, size=size)
    network = make(cell, 3)
    network.awake = 2
    inputs = torch.randint(0, 10, (1, 16)) if kind == "gpt" else torch.randn(1, 3, 16, 16)
    counter = FlopCounterMode(display=False)
    # Only the plain form of attention is counted by PyTorch on every processor.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), counter:
        network.eval()(inputs)
    by_hand = network.training_flops(2)
    if kind == "gpt":
        # PyTorch counts both halves of a causal product; one is never needed.
        by_hand += 16 * 2 * 6 * 16 * 16
    assert by_hand == 3 * counter.get_total_flops()


def test_a_budget_of_compute_buys_steps_by_the_plan() -> None:
    network = make(SMALL, 4)
    assert steps_of(static(SMALL, 4, compute=1.0), network) == SMALL.steps
    job = grown(SMALL, doubling(2, 0.5), compute=1.0)
    mean = (network.training_flops(2) + network.training_flops(4)) / 2
    assert steps_of(job, network) == int(SMALL.steps * network.training_flops(4) / mean)


@pytest.mark.parametrize("schedule", ["wsd", "linear", "cosine"])
def test_rates_rise_and_decay_to_nothing(schedule: str) -> None:
    cell, job = replace(SMALL, warmup=10), static(SMALL, 4, schedule=schedule)
    factors = [rate_factor(job, cell, step, 1_000) for step in range(1_000)]
    assert factors[0] == pytest.approx(0.1, abs=0.01)
    assert max(factors) > 0.97
    assert factors[-1] < 0.01
    assert (factors[500] == 1.0) == (schedule == "wsd")


def test_a_run_counts_what_was_awake_and_is_the_same_again() -> None:
    cell = CELLS["small"]
    job = grown(cell, doubling(1, 0.2, 0.4), length=0.004, seed=3)
    data, device = some_text(), torch.device("cpu")
    first = train(job, data, device, float("inf"))
    again = train(job, data, device, float("inf"))
    assert first is not None
    assert again is not None
    assert first["steps"] == 20
    network = make(cell, 4)
    expected = sum(
        steps * network.training_flops(awake) * cell.batch
        for steps, awake in ((4, 1), (4, 2), (12, 4))
    )
    assert first["flops"] == pytest.approx(expected)
    assert flops_of(job) == pytest.approx(expected)
    assert first["loss"] == again["loss"]
    assert train(job, data, device, time.monotonic() - 1) is None


@pytest.mark.parametrize("order", ["stack", "interleave"])
@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_deepen_does_what_the_plain_copies_do(
    kind: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "gpt":
        cell, data = CELLS["small"], some_text()
    else:
        cell = replace(CELLS["cnn"], size=Size(4, 1, 16, 10), batch=8, steps=20, warmup=5)
        monkeypatch.setitem(CELLS, "cnn", cell)
        data = some_images()
    job = grown(cell, doubling(1, 0.2, 0.5), length=20 / cell.steps, order=order)
    device = torch.device("cpu")
    by_deepen = train(job, data, device, float("inf"))
    monkeypatch.setattr(training, "_Deepened", training._Grown)
    by_hand = train(job, data, device, float("inf"))
    assert by_deepen is not None
    assert by_hand is not None
    assert by_deepen["loss"] == by_hand["loss"]
    assert by_deepen["flops"] == by_hand["flops"]
    assert by_deepen["curve"] == by_hand["curve"]


def test_mixed_images_have_mixed_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(CELLS["vit"], batch=8)
    batch = some_images().batches(cell, 5, 3, torch.device("cpu"))
    _, targets = batch(0)
    assert targets.shape == (8, 10)
    assert torch.allclose(targets.sum(1), torch.ones(8))
    assert bool(((targets > 0).sum(1) == 2).any())
    small = replace(cell, size=Size(12, 1, 16, 10), steps=3, warmup=1)
    monkeypatch.setitem(CELLS, "vit", small)
    result = train(static(small, 2), some_images(), torch.device("cpu"), float("inf"))
    assert result is not None
    assert result["loss"] < 10.0
