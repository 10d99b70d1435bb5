"""`kin`: copies of blocks as seeds, against plain PyTorch in which the block is copied by hand."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.growth.gardener import Gardener
from esper.kasmina.blueprints.kin import KIN, copy_block
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.engine import read_weights, write_weights
from esper.kasmina.evaluation import evaluate_contributions
from esper.kasmina.garden import Garden, load_garden
from esper.kasmina.optimizer import slot_groups
from esper.kasmina.slot import SlotMode
from esper.kasmina.wrapping import disconnect, slots_behind
from esper.leyline.actions import HEAD_SIZES, LifecycleOp
from esper.leyline.errors import SlotError, UsageError
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.leyline.stages import SeedStage
from tests.growth.depth.models import (
    image_loss,
    images,
    make_gpt,
    make_resnet,
    text_loss,
    tokens,
    train,
)
from tests.kasmina.gardens import quick_config
from tests.plots import record_contributions

TOKENS, IMAGES = tokens(0)[:, :-1], images(0)[0]

Case = tuple[Callable[[], nn.Module], str, int, Tensor, Callable[[Any, int], Tensor]]
"""How to make a model, the list of its blocks, which one is copied, an example and a loss."""

CASES: dict[str, Case] = {
    "cnn": (make_resnet, "stage1", 1, IMAGES, image_loss),
    "transformer": (lambda: make_gpt(2, dropout=0.1), "blocks", 0, TOKENS, text_loss),
}

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.05, "amsgrad": True}),
    "foreach": (AdamW, {"lr": 0.01, "foreach": True}),
    "fused": (AdamW, {"lr": 0.01, "fused": True}),
}


def deepened(model: nn.Module, blocks: str, index: int) -> nn.Module:
    """A plain copy of a model in which a block comes twice."""
    plain = copy.deepcopy(model)
    disconnect(plain)
    stack: Any = plain.get_submodule(blocks)
    stack.insert(index + 1, copy.deepcopy(stack[index]))
    return plain


def make(case: str, **config: Any) -> tuple[Garden, str]:
    """A garden around the model of a case, and its slot."""
    build, blocks, index, example, _ = CASES[case]
    slot = f"{blocks}.{index}"
    return Garden(build(), [slot], example, config=quick_config(**config)), slot


# -- as plain copying ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_plain_copying_to_the_bit(case: str, kind: str) -> None:
    """Outputs right after germination, and every optimizer step that follows."""
    garden, slot = make(case)
    _, blocks, index, example, loss_of = CASES[case]
    factory, options = OPTIMIZERS[kind]
    optimizer = Gardener(garden, "wait").optimizer(factory, **options)
    torch.manual_seed(1)
    train(garden, optimizer, 0, 3, loss_of=loss_of)

    plain = deepened(garden.model, blocks, index)
    by_hand = factory(plain.parameters(), **options)
    stack: Any = plain.get_submodule(blocks)
    old = list(garden.model.parameters())
    new = [p for p in plain.parameters() if not any(p is q for q in stack[index + 1].parameters())]
    sources = dict(zip(new, old, strict=True))
    pairs = zip(stack[index + 1].parameters(), stack[index].parameters(), strict=True)
    sources |= {copied: sources[source] for copied, source in pairs}
    for parameter, source in sources.items():
        if source in optimizer.state:
            by_hand.state[parameter] = copy.deepcopy(optimizer.state[source])

    assert garden.germinate(slot, KIN)
    for mode in (False, True):
        garden.train(mode)
        plain.train(mode)
        torch.manual_seed(2)
        expected = plain(example)
        torch.manual_seed(2)
        assert torch.equal(garden(example), expected)
    for step in range(3, 6):
        for model, its in ((garden, optimizer), (plain, by_hand)):
            torch.manual_seed(step)
            train(model, its, step, step + 1, loss_of=loss_of)
        seed = garden.seedbed[0].seed
        assert seed is not None
        for one, other in (
            *zip(garden.model.parameters(), new, strict=True),
            *zip(seed.parameters(), stack[index + 1].parameters(), strict=True),
            *zip(seed.buffers(), stack[index + 1].buffers(), strict=True),
        ):
            assert torch.equal(one, other)
    # Source and copy have gone apart: they share nothing.
    block = garden.model.get_submodule(slot)
    assert not any(map(torch.equal, seed.parameters(), block.parameters()))


def test_muon_state_is_copied() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.body(x)
            return out

    torch.manual_seed(0)
    model = nn.Sequential(Plain(), nn.Linear(4, 4, bias=False))
    garden = Garden(model, ["0"], torch.randn(2, 4))
    optimizer = Gardener(garden, "wait").optimizer(torch.optim.Muon, lr=0.05)
    garden(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert garden.germinate("0", KIN)
    (copied,) = garden.slot_parameters("0")
    mine, theirs = optimizer.state[copied], optimizer.state[model[0].body.weight]
    assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])
    assert mine["momentum_buffer"] is not theirs["momentum_buffer"]


def test_a_copy_joins_the_groups_of_its_source_whatever_the_slot_has() -> None:
    """Its learning rate and weight decay are the host's; other seeds keep those of their slot."""
    garden, slot = make("transformer")
    groups = slot_groups(garden)
    host = list(garden.host_parameters())
    decay = [p for p in host if p.dim() > 1]
    spared = [p for p in host if p.dim() < 2]
    groups[0:1] = [{"params": decay}, {"params": spared, "weight_decay": 0.0}]
    optimizer = Gardener(garden, "wait").optimizer(AdamW, groups, lr=0.1, weight_decay=0.5)
    assert garden.germinate(slot, KIN)
    for parameter in garden.slot_parameters(slot):
        homes = [
            i
            for i, group in enumerate(optimizer.param_groups)
            if any(parameter is one for one in group["params"])
        ]
        assert homes == [0 if parameter.dim() > 1 else 1]


def test_what_the_optimizer_never_saw_has_no_state() -> None:
    garden, slot = make("transformer")
    optimizer = Gardener(garden, "wait").optimizer(SGD, lr=0.1, momentum=0.9)
    assert garden.germinate(slot, KIN)
    assert not any(p in optimizer.state for p in garden.slot_parameters(slot))


# -- its life --------------------------------------------------------------------------------------


def test_it_is_at_full_amplitude_at_once_and_lives_on_as_others() -> None:
    garden, slot = make("transformer")
    assert garden.germinate(slot, KIN)
    view, state = garden.slots[slot], garden.state
    assert (view.stage, view.alpha, view.blueprint) == (SeedStage.BLENDING, 1.0, KIN)
    assert SeedStage(int(state.previous_stage[0, 0])) is SeedStage.TRAINING
    assert garden.seedbed[0].mode == SlotMode.REPLACE
    masks = garden.table.masks()
    legal = {op for op in LifecycleOp if bool(masks.op[0, op])}
    assert legal >= {LifecycleOp.ADVANCE, LifecycleOp.SET_ALPHA_TARGET}
    assert LifecycleOp.GERMINATE not in legal, "the only slot is taken"
    garden.tick()
    assert view.alpha == 1
    assert garden.advance(slot)
    assert view.stage is SeedStage.HOLDING
    assert not garden.fossilize(slot)
    with torch.no_grad():
        next(garden.slot_parameters(slot)).add_(0.1)
    record_contributions(garden, evaluate_contributions(garden, evaluate_text))
    assert garden.fossilize(slot)
    assert garden.seedbed[0].mode == SlotMode.REPLACE


def evaluate_text(model: nn.Module) -> tuple[Tensor, None]:
    batch = tokens(9, 16)
    scores = model(batch[:, :-1]).transpose(1, 2)
    return nn.functional.cross_entropy(scores, batch[:, 1:], reduction="none").mean(1), None


@pytest.mark.parametrize("case", CASES)
def test_it_is_switched_off_and_out_without_a_trace(case: str) -> None:
    garden, slot = make(case, lifecycle={"rules": {"min_prune_age": 0}})
    example = CASES[case][3]
    garden.eval()
    host, size = garden(example), garden.count_parameters()
    optimizer = Gardener(garden, "wait").optimizer(SGD, lr=0.1, momentum=0.9)
    assert garden.germinate(slot, KIN)
    grown = garden(example)
    assert not torch.equal(grown, host)
    both = torch.tensor([[True], [False]])
    with garden.seedbed.configured(both, len(example)):
        on, off = garden(example.repeat(2, *[1] * (example.dim() - 1))).chunk(2)
    assert torch.allclose(on, grown, atol=1e-6)
    assert torch.allclose(off, host, atol=1e-6)
    with garden.seedbed.configured(torch.tensor([[False]]), None):
        assert torch.equal(garden(example), host)
    assert garden.prune(slot, speed=3)
    garden.tick()
    assert 0 < garden.slots[slot].alpha < 1
    assert garden.seedbed[0].mode == SlotMode.BLEND
    assert not any(p.requires_grad for p in garden.slot_parameters(slot))
    for _ in range(2):
        garden.tick()
    assert torch.equal(garden(example), host)
    assert garden.count_parameters() == size
    assert len(optimizer.param_groups[0]["params"]) == len(list(garden.host_parameters()))


@pytest.mark.parametrize("how", ["by hand", "by setting"])
def test_it_can_be_blended_in_as_other_seeds(how: str) -> None:
    garden, slot = make("cnn", lifecycle={"immediate": "auto" if how == "by hand" else "none"})
    asked = {"immediate": False} if how == "by hand" else {}
    example = CASES["cnn"][3]
    garden.eval()
    host = garden(example)
    assert garden.germinate(slot, KIN, style="linear_add", tempo=2, **asked)
    assert garden.slots[slot].stage is SeedStage.GERMINATED
    assert garden.advance(slot)
    assert torch.equal(garden(example), host)
    assert garden.advance(slot)
    assert torch.equal(garden(example), host), "alpha 0 is the host"
    garden.tick()
    assert garden.slots[slot].alpha == 0.5
    garden.tick()
    plain = deepened(garden.model, "stage1", 1).eval()
    assert torch.equal(garden(example), plain(example)), "alpha 1 is the copy alone"


def test_while_it_trains_alone_the_host_does_not_notice() -> None:
    """Not even through what else its block was given."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))
            self.block = Given()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.block(x, shift=self.shift)
            return out

    model = Shifted()
    alone = copy.deepcopy(model)
    x = torch.randn(3, 4)
    garden = Garden(model, ["block"], x, config=quick_config(lifecycle={"immediate": "none"}))
    assert garden.germinate("block", KIN)
    assert garden.advance("block")
    for one in (garden, alone):
        one(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    assert all(p.grad is not None for p in garden.slot_parameters("block"))


def test_an_amplitude_below_one_is_reached_at_once_too() -> None:
    garden, slot = make("transformer")
    assert garden.germinate(slot, KIN, alpha_target=0.5)
    assert garden.slots[slot].alpha == 0.5
    assert garden.slots[slot].stage is SeedStage.BLENDING
    assert not garden.advance(slot)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"blueprint": "conv_light", "immediate": True}, "so it has to be blended in"),
        ({"blueprint": KIN, "style": "gated_gate"}, r"leave the style out, or write immediate=F"),
    ],
)
def test_what_cannot_be_at_once_is_refused(asked: dict[str, Any], message: str) -> None:
    garden, slot = make("cnn")
    with pytest.raises(UsageError, match=message):
        garden.germinate(slot, **asked)
    assert garden.slots[slot].stage is SeedStage.DORMANT


def test_limits_and_counts_know_what_it_costs() -> None:
    garden, slot = make("cnn")
    before, work = garden.count_parameters(), garden.count_flops()
    block = garden.model.get_submodule(slot)
    size = sum(p.numel() for p in block.parameters())
    assert garden.germinate(slot, KIN)
    assert garden.count_parameters() == before + size
    plain = Garden(deepened(garden.model, "stage1", 1), ["head"], IMAGES)
    assert garden.count_flops() - work == plain.host_flops - work
    gate = int(garden.costs().seeds.gate_params[0, 0])
    choice = BLUEPRINTS.get(KIN).id
    for limit, fits in ((before + size + gate, True), (before + size + gate - 1, False)):
        limited, _ = make("cnn", max_parameters=limit)
        assert bool(limited.table.fits()[0, 0, choice]) == fits
        assert bool(limited.germinate(slot, KIN)) == fits
    for factor, fits in ((1.5, True), (1.01, False)):
        assert bool(make("cnn", max_growth=factor)[0].table.fits()[0, 0, choice]) == fits


# -- which blocks can be copied --------------------------------------------------------------------


class Given(nn.Module):
    """A residual block on vectors that is given something else as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: Any = None) -> Any:
        x = x + torch.tanh(self.body(x))
        return x + shift if isinstance(shift, Tensor) else x


class Caller(nn.Module):
    """Calls a block in one way or another, then a head."""

    def __init__(self, block: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.block, self.head, self.call = block, nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        out = self.call(self.block, x)
        scores: Tensor = self.head(out[0] if isinstance(out, tuple) else out)
        return scores


class Cache:
    """What a block writes into."""


class Several(Given):
    def forward(self, x: Tensor, shift: Any = None) -> Any:
        return super().forward(x), x.mean(-1)


class InPlace(Given):
    def forward(self, x: Tensor, shift: Any = None) -> Any:
        return x.add_(self.body(x))


class Locked(Given):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def tied() -> nn.Module:
    model = Caller(Given(), lambda block, x: block(x))
    model.head.weight = model.block.body.weight
    return model


def frozen() -> nn.Module:
    model = Caller(Given(), lambda block, x: block(x))
    model.block.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "slot", "example", "why"),
    [
        (make_resnet(), "stem", IMAGES, r"it turns float32 \[6, 1, 8, 8\] into float32 \[6, 4"),
        (make_resnet(), "stage2.0", IMAGES, r"it turns float32 \[6, 4, 8, 8\] into"),
        (make_gpt(2), "embed", TOKENS, r"it turns int64 \[4, 6\] into float32 \[4, 6, 8\]"),
        (make_gpt(2), "blocks.0.out", TOKENS, "it has no residual path"),
        (tied(), "block", torch.randn(3, 4), "tied: block.body.weight is also head.weight"),
        (frozen(), "block", torch.randn(3, 4), "0 of its .* parameters train"),
        (
            Caller(Given(), lambda block, x: block(x, Cache())),
            "block",
            torch.randn(3, 4),
            r"it is given a Cache, which .* \(use_cache=False\)",
        ),
        (
            Caller(Given(), lambda block, x: block(x=x, shift=Cache())),
            "block",
            torch.randn(3, 4),
            "it is given a Cache",
        ),
        (Caller(Several(), lambda b, x: b(x)), "block", torch.randn(3, 4), "it returns 2 tensors"),
        (
            Caller(InPlace(), lambda b, x: b(x.clone())),
            "block",
            torch.randn(3, 4),
            "it changes its input in place",
        ),
        (Caller(Locked(), lambda b, x: b(x)), "block", torch.randn(3, 4), "cannot run: .*lock"),
    ],
)
def test_a_block_that_cannot_be_copied_is_not_offered_and_says_why(
    model: nn.Module, slot: str, example: Tensor, why: str
) -> None:
    model = copy.deepcopy(model) if "lock" not in why else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    garden = Garden(model, [slot], example)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not bool(garden.table.fits()[0, 0, BLUEPRINTS.get(KIN).id])
    result = garden.germinate(slot, KIN)
    assert not result
    assert result.reason.startswith(f"GERMINATE at {slot}: no copy of '{slot}' can grow there: ")
    assert "\n" not in result.reason
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(result.reason)
    # Another seed can.
    assert garden.table.fits()[0, 0].any()


def test_a_cache_that_comes_later_is_refused_too() -> None:
    model = Caller(Given(), lambda block, x: block(x))
    garden = Garden(model, ["block"], torch.randn(3, 4))
    assert garden.germinate("block", KIN)
    model.call = lambda block, x: block(x, shift=Cache())
    with pytest.raises(SlotError, match=r"slot 'block' was given a Cache.*use_cache=False"):
        garden(torch.randn(3, 4))


def test_a_block_that_keeps_what_it_computed_is_copied_in_mid_training() -> None:
    class Keeping(Given):
        def forward(self, x: Tensor, shift: Any = None) -> Any:
            self.last = super().forward(x)
            return self.last

    garden = Garden(Caller(Keeping(), lambda block, x: block(x)), ["block"], torch.randn(3, 4))
    garden(torch.randn(3, 4)).sum().backward()
    assert garden.germinate("block", KIN)
    garden(torch.randn(3, 4)).sum().backward()


# -- what it is called with ------------------------------------------------------------------------


class Shifts(nn.Module):
    """Hands its block a tensor, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self.way = Given(), way
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        ways = {
            "position": lambda: self.block(x, shift),
            "name": lambda: self.block(x, shift=shift),
            "names": lambda: self.block(x=x, shift=shift),
            "tuple": lambda: self.block(x, shift),
        }
        out = ways[self.way]()
        scores: Tensor = self.head(out[0] if isinstance(out, tuple) else out)
        return scores


class InTuple(Given):
    def forward(self, x: Tensor, shift: Any = None) -> Any:
        return super().forward(x, shift), None


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("way", ["position", "name", "names", "tuple"])
def test_a_copy_is_given_what_its_block_is(way: str, alpha: float) -> None:
    torch.manual_seed(0)
    model = Shifts(way)
    if way == "tuple":
        model.block = InTuple()
    x, shift = torch.randn(3, 4), torch.randn(3, 4)
    once = copy.deepcopy(model.block)
    garden = Garden(model, ["block"], (x, shift))
    assert garden.germinate("block", KIN, alpha_target=alpha)

    def output(block: nn.Module, x: Tensor) -> Tensor:
        made = block(x, shift)
        return made[0] if way == "tuple" else made

    h = output(once, x)
    expected = model.head(h + alpha * (output(once, h) - h))
    torch.testing.assert_close(garden(x, shift), expected)
    baked = garden.bake()
    assert torch.equal(baked(x, shift), garden(x, shift))
    if way != "tuple":
        baked.way = "name" if way == "position" else "position"
        with pytest.raises(AssertionError, match="same arguments as when it was grown"):
            baked(x, shift)


def test_a_baked_copy_takes_a_mask_that_comes_later_and_refuses_a_cache() -> None:
    """Also after it was pickled: a graph is traced again then."""
    model = Optional()
    x, shift = torch.randn(3, 4), torch.randn(3, 4)
    garden = Garden(model, ["block"], x)
    assert garden.germinate("block", KIN)
    baked = garden.bake()
    data = pickle.dumps(baked)
    assert b"esper" not in data
    for plain in (baked, pickle.loads(data)):
        for given in (None, shift):
            assert torch.equal(plain(x, given), garden(x, given))
        with pytest.raises(AssertionError, match=r"None or a tensor .* 'shift'.*use_cache=False"):
            plain(x, Cache())


class Optional(nn.Module):
    """Hands its block something that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Given()

    def forward(self, x: Tensor, shift: Any = None) -> Tensor:
        out: Tensor = self.block(x, shift=shift)
        return out


# -- copies, files and plain networks --------------------------------------------------------------


def test_a_copy_has_nothing_of_the_garden_in_it() -> None:
    """A block with slots of its own inside is copied as it was without them."""
    model = make_gpt(2)
    x = TOKENS
    slots = ["blocks.0.out", "blocks.0"]
    garden = Garden(model, slots, x, config=quick_config())
    assert garden.germinate("blocks.0.out", "mlp_small")
    assert garden.advance("blocks.0.out")
    assert garden.advance("blocks.0.out")
    garden.tick()
    with torch.no_grad():
        for parameter in garden.slot_parameters("blocks.0.out"):
            parameter.add_(0.1)
    assert garden.germinate("blocks.0", KIN)
    copied = garden.seedbed[1].seed
    assert copied is not None
    assert not slots_behind(copied)
    assert copied.state_dict().keys() == make_gpt(2).blocks[0].state_dict().keys()
    assert len(slots_behind(garden.model)) == 2
    hidden = torch.randn(2, 6, 8)
    plain = make_gpt(2).blocks[0]
    plain.load_state_dict(copied.state_dict())
    assert torch.equal(copied(hidden), plain(hidden))
    assert not torch.equal(garden.model.blocks[0](hidden), plain(hidden))
    assert torch.equal(garden.bake()(x), garden(x))


def test_modes_frozen_parts_and_ties_within_are_kept() -> None:
    block = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Linear(4, 4), nn.Linear(4, 4))
    block[2].weight = block[1].weight
    block[1].bias.requires_grad_(False)
    copied = copy_block(block)
    assert [part.training for part in copied.modules()] == [True, False, True, True]
    assert copied[2].weight is copied[1].weight is not block[1].weight
    assert not copied[1].bias.requires_grad


@pytest.mark.parametrize("case", CASES)
def test_it_is_saved_loaded_copied_and_baked(case: str, tmp_path: Path) -> None:
    garden, slot = make(case)
    build, _, _, example, loss_of = CASES[case]
    assert garden.germinate(slot, KIN)
    optimizer = Gardener(garden, "wait").optimizer(SGD, lr=0.1)
    train(garden, optimizer, 0, 2, loss_of=loss_of)
    garden.eval()
    expected = garden(example)
    garden.save(tmp_path / "garden")
    loaded = load_garden(tmp_path / "garden", model=build()).eval()
    assert torch.equal(loaded(example), expected)
    assert loaded.seedbed[0].mode == SlotMode.REPLACE
    assert torch.equal(copy.deepcopy(garden)(example), expected)
    baked = garden.bake()
    assert torch.equal(baked(example), expected)
    assert type(baked) is type(build())
    data = pickle.dumps(baked)
    assert b"esper" not in data
    again = pickle.loads(data)
    assert torch.equal(again(example), expected)
    # A plain network, which trains on and grows again: now both blocks are copied as one.
    torch.manual_seed(0)
    one = loss_of(baked.train(), 5)
    torch.manual_seed(0)
    assert torch.equal(one, loss_of(garden.train(), 5))
    second = Garden(baked, [slot], example)
    assert second.germinate(slot, KIN)
    grown = sum(p.numel() for p in garden.slot_parameters(slot))
    assert second.count_parameters() - second.count_host_parameters() == 2 * grown


def test_a_whole_stage_is_copied_and_baked_as_one_more_step() -> None:
    garden = Garden(make_resnet(), ["stage1"], IMAGES)
    assert garden.germinate("stage1", KIN)
    garden.eval()
    plain = copy.deepcopy(garden.model).eval()
    disconnect(plain)
    plain.stage1 = nn.Sequential(plain.stage1, copy.deepcopy(plain.stage1))
    baked = garden.bake()
    assert torch.equal(garden(IMAGES), plain(IMAGES))
    assert torch.equal(baked(IMAGES), plain(IMAGES))
    assert torch.equal(pickle.loads(pickle.dumps(baked))(IMAGES), plain(IMAGES))


def test_a_garden_of_an_older_esper_offers_no_copies(tmp_path: Path) -> None:
    garden, slot = make("cnn")
    placed = garden.placed.to_mapping()
    for place in placed["slots"]:
        del place["kin"]
    old = Garden(make_resnet(), type(garden.placed).from_mapping(placed))
    assert "saved before Esper could copy blocks" in old.germinate(slot, KIN).reason


def test_an_average_of_weights_copies_its_own_block() -> None:
    garden, slot = make("transformer")
    average = AveragedModel(garden, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = Gardener(garden, "wait").optimizer(SGD, lr=0.5)
    for step in range(2):
        train(garden, optimizer, step, step + 1)
        average.update_parameters(garden)
    assert garden.germinate(slot, KIN)
    follower: Any = average.module
    own, mine = follower.model.get_submodule(slot), follower.seedbed[0].seed
    assert all(map(torch.equal, mine.parameters(), own.parameters()))
    assert not any(
        torch.equal(one, other)
        for one, other in zip(mine.parameters(), garden.slot_parameters(slot), strict=True)
    )
    train(garden, optimizer, 2, 3)
    average.update_parameters(garden)
    assert follower.seedbed[0].mode == SlotMode.REPLACE


def test_a_compiled_garden_goes_on() -> None:
    garden, slot = make("transformer")
    compiled = torch.compile(garden.eval(), backend="eager", fullgraph=True)
    compiled(TOKENS)
    assert garden.germinate(slot, KIN)
    assert torch.equal(compiled(TOKENS), garden(TOKENS))


def test_a_rollback_brings_a_copy_back_as_it_was() -> None:
    garden, slot = make("cnn")
    assert garden.germinate(slot, KIN)
    optimizer = Gardener(garden, "wait").optimizer(SGD, lr=0.1, momentum=0.9)
    train(garden, optimizer, 0, 2, loss_of=image_loss)
    garden.eval()
    expected, safe, state = garden(IMAGES), read_weights(garden, None), garden.state
    train(garden.train(), optimizer, 2, 4, loss_of=image_loss)
    with torch.no_grad():
        next(garden.host_parameters()).fill_(torch.nan)
    write_weights(garden, optimizer, safe, state)
    assert torch.equal(garden.eval()(IMAGES), expected)
    assert not any(p in optimizer.state for p in garden.parameters())


def test_restoring_a_garden_gives_copies_no_state_of_others() -> None:
    """Weights that are loaded were trained elsewhere; so was the optimizer, or it begins anew."""
    garden, slot = make("transformer")
    assert garden.germinate(slot, KIN)
    saved = garden.state_dict()
    other, _ = make("transformer")
    optimizer = Gardener(other, "wait").optimizer(SGD, lr=0.1, momentum=0.9)
    train(other, optimizer, 0, 1)
    other.load_state_dict(saved)
    assert not any(p in optimizer.state for p in other.slot_parameters(slot))


def test_its_number_follows_the_built_in_ones() -> None:
    assert BLUEPRINTS.get(KIN).id == NUM_BLUEPRINTS == HEAD_SIZES["blueprint"] == 13
    with pytest.raises(UsageError, match=r"write garden.germinate\(slot, 'kin'\)"):
        BLUEPRINTS.get(KIN).build(4, "cnn")
