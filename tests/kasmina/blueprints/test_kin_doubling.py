"""Germinating `kin` again, against plain PyTorch in which block and copies are copied by hand."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.growth.gardener import Gardener
from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.engine import read_weights, write_weights
from esper.kasmina.garden import Garden, load_garden
from esper.kasmina.slot_table import SlotTable
from esper.kasmina.wrapping import disconnect
from esper.leyline.errors import SlotError
from esper.leyline.stages import SeedStage
from tests.growth.depth.models import train
from tests.kasmina.blueprints.test_kin import CASES, OPTIMIZERS, Given, Shifts, make
from tests.plots import record_epoch, same

KIN_ID = BLUEPRINTS.get(KIN).id
YOUNG = {"lifecycle": {"rules": {"min_prune_age": 0}}}
"""Settings under which copies may be doubled before an epoch was recorded."""


def double(garden: Garden, slot: str, times: int = 2) -> None:
    for _ in range(times):
        result = garden.germinate(slot, KIN)
        assert result, result.reason


def double_by_hand(plain: nn.Module, optimizer: Optimizer, stack: nn.Module, *, first: int) -> None:
    """Copy the blocks of a stack from `first` to before the others of the host, in order."""
    own: Any = stack
    awake = list(own)[first : first + getattr(plain, "awake", 1)]
    plain.awake = 2 * len(awake)
    for number, block in enumerate(awake):
        copied = copy.deepcopy(block)
        for new, old in zip(copied.parameters(), block.parameters(), strict=True):
            optimizer.param_groups[0]["params"].append(new)
            if old in optimizer.state:
                optimizer.state[new] = copy.deepcopy(optimizer.state[old])
        own.insert(first + len(awake) + number, copied)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_plain_copying_to_the_bit(case: str, kind: str) -> None:
    """1, 2, 4, 8 blocks, with training in between: outputs, weights and optimizer states."""
    garden, slot = make(case, **YOUNG)
    _, blocks, index, example, loss_of = CASES[case]
    factory, options = OPTIMIZERS[kind]
    plain: Any = copy.deepcopy(garden.model)
    disconnect(plain)
    stack = plain.get_submodule(blocks)
    optimizer = Gardener(garden, "wait").optimizer(factory, **options)
    by_hand = factory(plain.parameters(), **options)
    for level in range(4):
        if level:
            double(garden, slot, 1)
            double_by_hand(plain, by_hand, stack, first=index)
        assert garden.slots[slot].copies == 2**level - 1
        for step in (2 * level, 2 * level + 1):
            for model, its in ((garden, optimizer), (plain, by_hand)):
                torch.manual_seed(step)
                train(model, its, step, step + 1, loss_of=loss_of)
        for one, other in zip(
            garden.seedbed[0].copied_blocks, list(stack)[index + 1 : index + 2**level], strict=True
        ):
            assert same(one.state_dict(), other.state_dict())
            for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
                assert same(dict(optimizer.state[mine]), dict(by_hand.state[theirs]))
        for mode in (False, True):
            garden.train(mode)
            plain.train(mode)
            torch.manual_seed(level)
            expected = plain(example)
            torch.manual_seed(level)
            assert torch.equal(garden(example), expected)


# -- when it is legal ------------------------------------------------------------------------------


def fits(garden: Garden) -> list[int]:
    """What may be germinated in the only slot."""
    masks = garden.table.masks()
    legal = bool(masks.slot_by_op[0, 1, 0])
    return masks.blueprint_by_slot[0, 0].nonzero().flatten().tolist() if legal else []


def test_it_is_one_seed_whose_record_begins_anew() -> None:
    garden, slot = make("transformer", lifecycle={"rules": {"max_seeds": 1}})
    assert garden.germinate(slot, KIN)
    assert fits(garden) == []
    assert "younger than min_prune_age" in garden.germinate(slot, KIN).reason
    record_epoch(garden, 50.0)
    assert fits(garden) == [KIN_ID]
    assert "already holds a seed" in garden.germinate(slot, "mlp").reason
    garden.tick()
    assert garden.advance(slot)
    assert garden.slots[slot].stage is SeedStage.HOLDING
    garden.table.state = garden.state.where(garden.state.occupied, contribution=1.0)
    # A target below 1 would blend out what is awake already.
    assert garden.germinate(slot, KIN, alpha_target=0.5)
    view = garden.slots[slot]
    assert (view.stage, view.alpha, view.copies, view.age) == (SeedStage.BLENDING, 1.0, 3, 0)
    assert view.contribution is None
    record_epoch(garden, 50.0)
    double(garden, slot, 1)
    record_epoch(garden, 50.0)
    assert view.copies == 7
    assert "as many copies of its block as it may" in garden.germinate(slot, KIN).reason
    assert fits(garden) == []


def test_copies_that_were_fading_or_were_blended_in_are_not_doubled() -> None:
    garden, slot = make("cnn", **YOUNG)
    assert garden.germinate(slot, KIN)
    assert garden.set_alpha_target(slot, 0.5, speed=0)
    assert fits(garden) == []
    assert garden.set_alpha_target(slot, 1.0, speed=0)
    assert fits(garden) == []
    assert "not at full amplitude all the time" in garden.germinate(slot, KIN).reason
    blended, slot = make("cnn", **YOUNG)
    assert blended.germinate(slot, KIN, style="linear_add", tempo=1, immediate=False)
    for _ in range(2):
        assert blended.advance(slot)
    blended.tick()
    assert blended.slots[slot].alpha == 1
    assert fits(blended) == []
    assert "not at full amplitude all the time" in blended.germinate(slot, KIN).reason


def test_fossils_are_not_doubled() -> None:
    garden, slot = make("transformer", **YOUNG)
    double(garden, slot)
    assert garden.advance(slot)
    with torch.no_grad():
        next(garden.slot_parameters(slot)).add_(0.1)
    garden.table.state = garden.state.where(garden.state.occupied, contribution=1.0)
    assert garden.fossilize(slot)
    assert fits(garden) == []
    assert "already holds a seed" in garden.germinate(slot, KIN).reason


def test_limits_and_counts_know_what_it_costs() -> None:
    garden, slot = make("cnn", **YOUNG)
    before, work = garden.count_parameters(), garden.count_flops()
    size = sum(p.numel() for p in garden.model.get_submodule(slot).parameters())
    gate = int(garden.costs().seeds.gate_params[0, 0])
    assert garden.germinate(slot, KIN)
    one = garden.count_flops() - work
    for copies in (3, 7):
        signals = Gardener(garden, "wait").signals()
        more = copies - int(signals.copies[0, 0])
        assert int(signals.seed_params[0, 0, KIN_ID]) == more * size
        assert int(signals.seed_flops[0, 0, KIN_ID]) == more * one
        double(garden, slot, 1)
        assert garden.count_parameters() == before + copies * size
        assert garden.count_flops() == work + copies * one
        for limit, is_legal in ((before + copies * size + gate, True), (-1, False)):
            most = limit if is_legal else before + copies * size + gate - 1
            limited, _ = make("cnn", max_parameters=most, **YOUNG)
            double(limited, slot, 1 if copies == 3 else 2)
            assert (fits(limited) == [KIN_ID]) == is_legal
            assert bool(limited.germinate(slot, KIN)) == is_legal


def test_all_copies_go_at_once_or_fade_together() -> None:
    garden, slot = make("transformer", **YOUNG)
    example = CASES["transformer"][3]
    garden.eval()
    host = garden(example)
    optimizer = Gardener(garden, "wait").optimizer(SGD, lr=0.1, momentum=0.9)
    double(garden, slot)
    with garden.seedbed.configured(torch.tensor([[False]]), None):
        assert torch.equal(garden(example), host)
    grown = garden(example)
    both = torch.tensor([[True], [False]])
    with garden.seedbed.configured(both, len(example)):
        on, off = garden(example.repeat(2, 1)).chunk(2)
    assert torch.allclose(on, grown, atol=1e-6)
    assert torch.allclose(off, host, atol=1e-6)
    assert garden.prune(slot, speed=2)
    garden.tick()
    assert 0 < garden.slots[slot].alpha < 1
    assert not any(p.requires_grad for p in garden.slot_parameters(slot))
    garden.tick()
    assert torch.equal(garden(example), host)
    assert garden.slots[slot].copies == 0
    assert len(optimizer.param_groups[0]["params"]) == len(list(garden.host_parameters()))


def test_a_doubling_that_fails_leaves_the_copies_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    garden, slot = make("cnn", **YOUNG)
    assert garden.germinate(slot, KIN)
    optimizer = Gardener(garden, "wait").optimizer(SGD, lr=0.1, momentum=0.9)
    garden.notice_training()
    seed, state = garden.seedbed[0].seed, garden.state
    resize = SlotTable.resize

    def fail_once(table: SlotTable, sizes: Tensor) -> None:
        monkeypatch.setattr(SlotTable, "resize", resize)
        raise MemoryError("full")

    monkeypatch.setattr(SlotTable, "resize", fail_once)
    with pytest.raises(MemoryError):
        garden.germinate(slot, KIN)
    assert garden.seedbed[0].seed is seed
    assert same(garden.state.state_dict(), state.state_dict())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in garden.parameters()}


# -- what copies are called with, files and plain networks -----------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("way", ["position", "names"])
def test_every_copy_is_given_what_its_block_is(way: str, alpha: float) -> None:
    torch.manual_seed(0)
    model, x, shift = Shifts(way), torch.randn(3, 4), torch.randn(3, 4)
    once = copy.deepcopy(model.block)
    garden = Garden(model, ["block"], (x, shift))
    garden.config = garden.config.from_mapping(YOUNG)
    double(garden, "block")
    assert alpha == 1 or garden.set_alpha_target("block", alpha, speed=0)
    h = once(x, shift)
    deep = h
    for _ in range(3):
        deep = once(deep, shift)
    torch.testing.assert_close(garden(x, shift), model.head(h + alpha * (deep - h)))
    assert torch.equal(garden.bake()(x, shift), garden(x, shift))


def test_a_cache_that_comes_later_is_refused_too() -> None:
    class Cache:
        """What a block writes into."""

    model = nn.Sequential(Given())
    garden = Garden(model, ["0"], torch.randn(3, 4))
    garden.config = garden.config.from_mapping(YOUNG)
    double(garden, "0")
    with pytest.raises(SlotError, match="given a Cache, which its copy would change"):
        garden.seedbed[0].attend(model[0], (torch.randn(3, 4), Cache()), {}, torch.randn(3, 4))


@pytest.mark.parametrize("case", CASES)
def test_it_is_saved_loaded_copied_and_baked(case: str, tmp_path: Path) -> None:
    garden, slot = make(case, **YOUNG)
    build, _, _, example, loss_of = CASES[case]
    optimizer = Gardener(garden, "wait").optimizer(AdamW, lr=0.01)
    for step in range(2):
        double(garden, slot, 1)
        train(garden, optimizer, step, step + 1, loss_of=loss_of)
    garden.eval()
    expected = garden(example)
    garden.save(tmp_path / "garden")
    loaded = load_garden(tmp_path / "garden", model=build()).eval()
    assert torch.equal(loaded(example), expected)
    assert loaded.slots[slot].copies == 3
    assert torch.equal(copy.deepcopy(garden)(example), expected)
    baked = garden.bake()
    data = pickle.dumps(baked)
    assert b"esper" not in data
    for plain in (baked, pickle.loads(data)):
        assert torch.equal(plain(example), expected)
    other, _ = make(case, **YOUNG)
    its = Gardener(other, "wait").optimizer(AdamW, lr=0.01)
    write_weights(other, its, read_weights(garden, optimizer), garden.state)
    for model, own in ((garden, optimizer), (other, its)):
        torch.manual_seed(0)
        train(model.train(), own, 5, 7, loss_of=loss_of)
    # Buffers of BatchNorm and all weights.
    assert same(other.state_dict(), garden.state_dict())


def test_an_average_of_weights_copies_its_own_blocks() -> None:
    garden, slot = make("transformer", **YOUNG)
    average = AveragedModel(garden, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = Gardener(garden, "wait").optimizer(SGD, lr=0.5)
    for step in range(2):
        double(garden, slot, 1)
        train(garden, optimizer, step, step + 1)
        average.update_parameters(garden)
    follower: Any = average.module
    block, copied = follower.model.get_submodule(slot), follower.seedbed[0].copied_blocks[0]
    double(garden, slot, 1)
    seven = follower.seedbed[0].copied_blocks
    assert len(seven) == 7
    assert seven[0] is copied
    for own, source in ((seven[3], block), (seven[4], copied)):
        assert all(map(torch.equal, own.parameters(), source.parameters()))
    train(garden, optimizer, 2, 3)
    average.update_parameters(garden)
    assert not torch.equal(follower(CASES["transformer"][3]), garden(CASES["transformer"][3]))


def test_a_compiled_garden_goes_on() -> None:
    garden, slot = make("transformer", **YOUNG)
    example = CASES["transformer"][3]
    compiled = torch.compile(garden.eval(), backend="eager", fullgraph=True)
    for _ in range(2):
        double(garden, slot, 1)
        assert torch.equal(compiled(example), garden(example))
