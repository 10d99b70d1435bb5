"""One garden in two real processes (gloo): equal weights through a whole life of seeds."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from esper.growth.config import GardenerConfig
from esper.growth.engine import Ranks, topology_hash
from esper.growth.gardener import Gardener
from esper.growth.grow import grow
from esper.kasmina.garden import Garden
from esper.leyline.errors import SlotError, UsageError
from esper.leyline.stages import SeedStage
from tests.growth.two_processes import WORLD, run_in_two
from tests.kasmina.gardens import ResidualStack
from tests.plots import (
    EAGER,
    FEATURES,
    SLOTS,
    Script,
    TinyConv,
    make_batches,
    make_evaluator,
    make_garden,
    make_net,
    raise_seed,
)

BATCHES = make_batches(6, 16, seed=3)


SCENARIOS = (
    "life_by_hand",
    "life_with_a_gardener",
    "parts_of_the_validation_set",
    "ranks_that_differ",
    "hooks_are_kept",
    "statistics_of_rank_0",
    "a_copied_block",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two processes say who go through all scenarios together: each name, then how it was."""
    ended = run_in_two(__name__, tmp_path_factory.mktemp("meeting"))
    return [out + errors for _, out, errors in ended]


def play(folder: str, rank: int) -> None:
    """Go through the scenarios in one of the processes; the first that fails is the last."""
    torch.set_num_threads(1)
    for name in SCENARIOS:
        method = f"file://{folder}/{name}"
        patience = timedelta(seconds=60)
        dist.init_process_group(
            "gloo", init_method=method, rank=rank, world_size=WORLD, timeout=patience
        )
        globals()[name](rank)
        dist.barrier()
        dist.destroy_process_group()
        print(f"{name} went well", flush=True)


def went_well(said: list[str], name: str) -> None:
    assert all(f"{name} went well" in one for one in said), "\n".join(said)


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


def check_equal(garden: Garden) -> None:
    """Names, shapes and weights agree on all ranks."""
    first, other = everywhere({n: p.detach() for n, p in garden.named_parameters()})
    assert first.keys() == other.keys()
    for name in first:
        assert (first[name] - other[name]).abs().max() <= 1e-6, name


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> None:
    model.train()
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


# -- by hand --------------------------------------------------------------------------------------


def life_by_hand(rank: int) -> None:
    """Two ranks with half of every batch each are one process with all of it."""
    garden, alone = make_garden(), make_garden()
    wrapped = DistributedDataParallel(garden, bucket_cap_mb=3, gradient_as_bucket_view=True)
    seen: list[bool] = []
    wrapped.register_forward_hook(lambda *_: seen.append(True))
    trained = Gardener(garden, "wait").optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    single = Gardener(alone, "wait").optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    half = slice(8 * rank, 8 * rank + 8)

    def epoch() -> None:
        train_on(wrapped, trained, half)
        train_on(alone, single, slice(None))
        check_equal(garden)
        for (name, one), other in zip(garden.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=name)
        garden.tick()
        alone.tick()

    epoch()
    for slot in ("body", "stem"):
        for each in (garden, alone):
            assert each.germinate(slot, "mlp_small", style="gated_gate", tempo=2)
        epoch()
        start = [p.detach().clone() for p in garden.slot_parameters(slot)]
        for each in (garden, alone):
            assert each.advance(slot)
        epoch()
        assert not all(map(torch.equal, start, garden.slot_parameters(slot)))
        for each in (garden, alone):
            assert each.advance(slot)
        epoch()
        epoch()
    # One fades out, frozen, and is gone; the other stays for good.
    for each in (garden, alone):
        assert each.prune("body", speed=2)
    for _ in range(4):
        epoch()
    assert not list(garden.slot_parameters("body"))
    for each in (garden, alone):
        here = torch.tensor([[name == "stem" for name in each.slot_names]])
        each.sync(each.state.where(here, contribution=2.0, counterfactual_age=0))
        if each.slots["stem"].stage is SeedStage.BLENDING:
            assert each.advance("stem")
        assert each.fossilize("stem"), each.slots["stem"]
    epoch()
    assert garden.slots["stem"].stage is SeedStage.FOSSILIZED
    # The wrapper is the owner's: its settings and hooks are what they were.
    assert len(seen) == len(BATCHES) * len(range(1 + 2 * 4 + 4 + 1))
    assert wrapped.bucket_bytes_cap == 3 * 2**20
    assert wrapped.gradient_as_bucket_view
    assert not wrapped.find_unused_parameters


def test_a_life_by_hand_is_the_same_on_all_ranks_and_in_one_process(said: list[str]) -> None:
    went_well(said, "life_by_hand")


# -- by a gardener --------------------------------------------------------------------------------


def life_with_a_gardener(rank: int) -> None:
    """Rank 0 decides, whatever the other would do and whatever it measures."""
    garden = make_garden()
    wrapped = DistributedDataParallel(garden)
    controller = "random" if rank == 0 else "wait"
    gardener = Gardener(garden, controller, 14, seed=3, config=GardenerConfig(ablate_every=1))
    optimizer = gardener.optimizer(torch.optim.AdamW, lr=0.01)
    own = make_evaluator(make_batches(2, 32, seed=9 + rank))
    for epoch in range(14):
        train_on(wrapped, optimizer, slice(8 * rank, 8 * rank + 8))
        check_equal(garden)
        record = gardener.step(own, train_loss=float(rank))
        first, other = everywhere(
            (record.val_loss, record.val_score, record.decision, record.slots, record.train_loss)
        )
        assert first == other, epoch
        assert record.train_loss == 0.5
        assert len(set(everywhere(topology_hash(garden)))) == 1
    ops = {record.decision.op for record in gardener.history if record.decision is not None}
    assert {"GERMINATE", "ADVANCE"} <= ops, ops


def test_rank_0_measures_and_decides_for_all(said: list[str]) -> None:
    went_well(said, "life_with_a_gardener")


def parts_of_the_validation_set(rank: int) -> None:
    garden, alone = make_garden(), make_garden()
    kept = DistributedDataParallel(garden)
    batches = make_batches(4, 8, seed=9)
    mine = batches[2 * rank : 2 * rank + 2]
    config = GardenerConfig(val_is_sharded=True)
    record = Gardener(garden, "wait", config=config).step(make_evaluator(mine))
    whole = Gardener(alone, "wait").step(make_evaluator(batches))
    assert record.val_score == pytest.approx(whole.val_score, abs=1e-6)
    assert record.val_loss == pytest.approx(whole.val_loss, abs=1e-6)
    assert kept.module is garden


def test_a_divided_validation_set_counts_as_a_whole(said: list[str]) -> None:
    went_well(said, "parts_of_the_validation_set")


def ranks_that_differ(rank: int) -> None:
    garden = make_garden()
    wrapped = DistributedDataParallel(garden)
    ranks = Ranks(garden)
    ranks.check_topology()
    if rank == 1:
        garden.germinate("body", "mlp_small")
    with pytest.raises(UsageError, match="network of rank 1 differs"):
        ranks.check_topology()
    # One process may evaluate by itself.
    if rank == 1:
        with torch.no_grad():
            wrapped.eval()(BATCHES[0][0])


def test_a_rank_that_acts_alone_is_named(said: list[str]) -> None:
    went_well(said, "ranks_that_differ")


def hooks_are_kept(rank: int) -> None:
    """A communication hook of the owner's, and a pass without reduction, survive a renewal."""
    garden = make_garden()
    wrapped = DistributedDataParallel(garden)
    reduced: list[int] = []

    # PyTorch reads annotations of such a hook, and does not understand them as text.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        reduced.append(1)
        tensor = bucket.buffer() / WORLD
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, hook)
    optimizer = Gardener(garden, "wait").optimizer(torch.optim.SGD, lr=0.05)
    garden.germinate("body", "mlp_small")
    garden.advance("body")
    wrapped.eval()
    with wrapped.no_sync():
        wrapped(BATCHES[0][0]).sum().backward()
        assert not reduced
        assert not wrapped.training
    train_on(wrapped, optimizer, slice(8 * rank, 8 * rank + 8))
    assert reduced
    check_equal(garden)


def test_what_its_owner_set_on_a_wrapper_is_kept(said: list[str]) -> None:
    went_well(said, "hooks_are_kept")


def statistics_of_rank_0(rank: int) -> None:
    torch.manual_seed(0)
    garden = Garden(TinyConv(norm=True), ["first"], torch.zeros(2, 1, 8, 8), config=EAGER)
    model = DistributedDataParallel(garden)
    gardener = Gardener(garden, "wait", 12)
    batches = [torch.randn(4, 1, 8, 8) + rank for _ in range(2)]
    assert gardener.recalibrate(batches) == 8
    norm = garden.model.norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    first, *others = everywhere(norm.running_mean)
    assert all(torch.equal(other, first) for other in others)
    wanted = torch.cat(everywhere(batches)[0])
    expected = garden.model.first(wanted).mean((0, 2, 3))  # type: ignore[operator, union-attr]
    torch.testing.assert_close(norm.running_mean, expected, rtol=1e-4, atol=1e-5)
    assert model.module is garden


def test_statistics_are_those_of_rank_0_everywhere(said: list[str]) -> None:
    went_well(said, "statistics_of_rank_0")


def a_copied_block(rank: int) -> None:
    """A `kin`, with its optimizer state, is the same on all ranks and in one process."""
    torch.manual_seed(0)
    garden = Garden(ResidualStack(), ["b"], torch.zeros(2, 4), config=EAGER)
    alone = copy.deepcopy(garden)
    wrapped = DistributedDataParallel(garden)
    trained = Gardener(garden, "wait").optimizer(torch.optim.AdamW, lr=0.05)
    single = Gardener(alone, "wait").optimizer(torch.optim.AdamW, lr=0.05)
    for number in range(3):
        train_on(wrapped, trained, slice(8 * rank, 8 * rank + 8))
        train_on(alone, single, slice(None))
        check_equal(garden)
        for (name, one), other in zip(garden.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=name)
        if number == 0:
            assert garden.germinate("b", "kin")
            assert alone.germinate("b", "kin")
            assert all(p in trained.state for p in garden.slot_parameters("b"))


def test_a_copied_block_is_the_same_on_all_ranks_and_in_one_process(said: list[str]) -> None:
    went_well(said, "a_copied_block")


# -- one process ----------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_wrapping_what_cannot_be_kept_in_step_is_refused() -> None:
    garden = make_garden()
    with pytest.raises(SlotError, match="DistributedDataParallel was given a model that grows"):
        DistributedDataParallel(garden.model)
    shadow = make_garden(config=EAGER.replace(training_mode="shadow"))
    with pytest.raises(UsageError, match="use 'straight_through' in several processes"):
        DistributedDataParallel(shadow)
    DistributedDataParallel(make_net())


@pytest.mark.usefixtures("alone")
def test_a_sharded_model_is_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole, part = make_net(), make_net()
    fully_shard(whole, mesh=mesh)
    fully_shard(part.body, mesh=mesh)
    with pytest.raises(UsageError, match=r"the model is sharded by FSDP2 \(fully_shard\)"):
        Garden(whole, SLOTS, torch.randn(2, FEATURES))
    with pytest.raises(UsageError, match="'body' of the model is sharded by FSDP2"):
        grow(part, train=make_batches(), val=make_batches(), epochs=2)


@pytest.mark.usefixtures("alone")
def test_one_process_shares_with_nobody() -> None:
    garden = make_garden()
    wrapped = DistributedDataParallel(garden)
    assert garden.ties.wrapper() is wrapped
    ranks = Ranks(garden)
    assert ranks.group is None
    assert ranks.from_first(garden) is garden
    assert ranks.mean(None) is None
    ranks.check_topology()
    del wrapped
    gardener = Gardener(garden, Script({}), 3)
    assert gardener.step(make_evaluator(), train_loss=2.0).train_loss == 2.0


def test_topologies_differ_by_what_grows_and_not_by_weights() -> None:
    one, other = make_garden(), make_garden(seed=1)
    assert topology_hash(one) == topology_hash(other)
    raise_seed(one, "stem", "TRAINING")
    assert topology_hash(one) != topology_hash(other)
    raise_seed(other, "stem", "TRAINING")
    assert topology_hash(one) == topology_hash(other)
    one.advance("stem")
    one.tick()
    assert topology_hash(one) != topology_hash(other)
