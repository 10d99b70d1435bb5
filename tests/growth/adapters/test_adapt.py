"""Adapt in plain loops: budgets, identity at the start, moving, baking, resuming, refusals."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel

import esper
from esper.growth.adapters.adapt import Adapt
from esper.growth.adapters.placement import AdaptConfig
from esper.growth.batches import warn_of_moving_statistics
from esper.leyline.errors import CheckpointError, EsperWarning, UsageError

STEPS = 24


class Net(nn.Module):
    """Convolutions, attention and linear layers, with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, stride=2)
        self.attention = nn.TransformerEncoderLayer(6, 2, 24, dropout=0.0, batch_first=True)
        self.wide = nn.Linear(6, 40)
        self.head = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).transpose(1, 2)
        return self.head(F.gelu(self.wide(self.attention(x).mean(1))))


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(16, 1, 9, 9, generator=chance)
    return x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 4, 4] > 0).long()


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


def adamw(adapters: Adapt) -> torch.optim.Optimizer:
    return torch.optim.AdamW(adapters.parameters(), lr=0.01)


def train(adapters: Adapt, optimizer: Any, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        loss = loss_of(adapters.model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        adapters.step(optimizer)
        losses.append(float(loss.detach()))
    return losses


def test_the_budget_holds_at_every_step_and_the_base_is_not_touched() -> None:
    model = make()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapters = esper.Adapt(model, budget=500, total_steps=STEPS)
    optimizer = adamw(adapters)
    for step in range(STEPS):
        train(adapters, optimizer, step, step + 1)
        trained = [p for p in model.parameters() if p.requires_grad]
        own = {id(p) for p in adapters.parameters()}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert own == held
        if adapters.is_placed and adapters._sums is None:
            assert {id(p) for p in trained} == own
            assert 0 < sum(p.numel() for p in trained) == adapters.count_parameters() <= 500
    # Every one of them is frozen in its place.
    for name, one in adapters.weights.items():
        assert torch.equal(one.weight, base[name])
    # The first move waits for as many measured steps as the first placement.
    assert [event["step"] for event in adapters.history] == [0, 4, 8, 13]


def test_the_start_is_exactly_the_model() -> None:
    model, x = make(), batch(0)[0]
    before = model(x)
    adapters = Adapt(model, 500)
    assert adapters.count_parameters() > 100
    assert torch.equal(model(x), before)
    adapters.measure([0, 1], lambda step: loss_of(model, step))
    assert adapters.is_placed
    assert adapters.count_parameters() > 300
    assert torch.equal(model(x), before)


def test_adapters_learn() -> None:
    model = make()
    before = sum(loss_of(model, step).item() for step in range(110, 120))
    adapters = Adapt(model, 1_000, total_steps=120)
    losses = train(adapters, torch.optim.AdamW(adapters.parameters(), lr=0.02), 0, 120)
    assert sum(losses[-10:]) < 0.8 * before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_baking_gives_the_model_back(dtype: torch.dtype) -> None:
    model = make().to(dtype)
    model.head.bias.requires_grad_(False)
    kinds = [type(one) for one in model.modules()]
    keys = list(model.state_dict())
    adapters = Adapt(model, 500, total_steps=STEPS, trainable="head")
    optimizer = adamw(adapters)
    for step in range(STEPS):
        x, y = batch(step)
        F.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        adapters.step(optimizer)
    x = batch(0)[0].to(dtype)
    adapted = model(x)
    assert adapters.bake() is model
    assert torch.equal(model(x), adapted)
    assert [type(one) for one in model.modules()] == kinds
    assert list(model.state_dict()) == keys
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]
    with pytest.raises(UsageError, match="merged into the weights"):
        adapters.step(optimizer)


@pytest.mark.parametrize("stop", [2, 4, 9, 13])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_resumed_run_is_the_same_to_the_bit(stop: int, optimizer_first: bool) -> None:
    """Stopped while gradients are measured, just placed, in between, and before a second move."""
    model = make()
    whole = Adapt(model, 500, total_steps=STEPS, trainable=["head"])
    expected = train(whole, adamw(whole), 0, STEPS)
    adapters = Adapt(make(), 500, total_steps=STEPS, trainable=["head"])
    optimizer = adamw(adapters)
    losses = train(adapters, optimizer, 0, stop)
    file = io.BytesIO()
    torch.save({"adapters": adapters.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    torch.manual_seed(9)
    fresh = copy.deepcopy(Net())
    fresh.load_state_dict(make().state_dict())
    torch.manual_seed(1)
    adapters = Adapt(fresh, 500, total_steps=STEPS, trainable=["head"])
    if optimizer_first:
        optimizer = adamw(adapters)
        adapters.load_state_dict(state["adapters"], optimizer)
    else:
        adapters.load_state_dict(state["adapters"])
        optimizer = adamw(adapters)
    optimizer.load_state_dict(state["optimizer"])
    losses += train(adapters, optimizer, stop, STEPS)
    assert losses == expected
    assert adapters.history == whole.history
    for name, one in whole.state_dict()["pairs"].items():
        for key, value in one.items():
            assert torch.equal(adapters.state_dict()["pairs"][name][key], value), (name, key)


def test_moving_keeps_what_was_learned_and_starts_optimizer_state_anew() -> None:
    model, x = make(), batch(0)[0]
    adapters = Adapt(
        model,
        120,
        trainable="head",
        total_steps=40,
        config=AdaptConfig(stay=0.0, coverage=0.0, idle=0.0),
    )
    optimizer = adamw(adapters)
    train(adapters, optimizer, 0, 9)
    before = {name: one.pair.rank for name, one in adapters.weights.items() if one.pair.rank}
    loss_of(model, 9).backward()
    optimizer.step()
    optimizer.zero_grad()
    outputs = model(x)
    adapters.step(optimizer)
    assert adapters.history[-1]["step"] == 10
    assert adapters.history[-1]["settled"] == before
    torch.testing.assert_close(model(x), outputs)
    pairs = [p for p in adapters.parameters() if p not in set(model.head.parameters())]
    assert not any(p in optimizer.state for p in pairs)
    train(adapters, optimizer, 10, 11)
    states = [optimizer.state[p] for p in pairs if p in optimizer.state]
    assert states
    assert {float(state["step"]) for state in states} == {1.0}


def test_components_that_were_never_used_are_dropped() -> None:
    adapters = Adapt(
        make(), 500, total_steps=40, config=AdaptConfig(stay=0.0, coverage=0.0, idle=1e9)
    )
    train(adapters, adamw(adapters), 0, 10)
    assert adapters.history[-1]["dropped"]
    assert all(one.pair.settled == 0 for one in adapters.weights.values())


def test_a_uniform_rank_is_plain_lora() -> None:
    model = make()
    torch.manual_seed(3)
    adapters = Adapt(model, rank=2, targets=["wide", "head"])
    assert adapters.ranks == {"wide.weight": 2, "head.weight": 2}
    assert adapters.count_parameters() == adapters.budget == 2 * (46 + 43)
    pair = adapters.weights["wide.weight"].pair
    bound = 6**-0.5
    assert 0.3 * bound < float(pair.A.detach().abs().mean()) < 0.7 * bound
    assert not pair.B.detach().any()
    train(adapters, adamw(adapters), 0, 3)
    assert pair.B.detach().any()
    assert len(adapters.history) == 1


def test_ranks_go_where_the_gradient_is() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    adapters = Adapt(model, 64)
    optimizer = adamw(adapters)
    for _ in range(4):
        model["used"](torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        adapters.step(optimizer)
    assert adapters.ranks == {"used.weight": 8, "unused.weight": 0}
    table = str(adapters)
    assert "used.weight" in table
    assert "100.0%" in table
    assert "64 of 64 parameters in adapters; 1 other weights have no rank" in table


def test_gradients_of_weights_are_seen_by_nobody_else() -> None:
    model = make()
    adapters = Adapt(model, 500, trainable="head")
    optimizer = adamw(adapters)
    loss_of(model, 0).backward()
    assert all(one.weight.grad is None for one in adapters.weights.values())
    assert model.head.weight.grad is not None
    adapters.step(optimizer)


def test_ranks_can_be_placed_before_training() -> None:
    model = make()
    adapters = Adapt(model, 500, trainable="head")
    adapters.measure(range(3), lambda step: loss_of(model, step))
    assert adapters.is_placed
    assert model.head.weight.grad is None
    optimizer = adamw(adapters)
    before = adapters.ranks
    train(adapters, optimizer, 0, 6)
    assert adapters.ranks == before
    with pytest.raises(UsageError, match="already placed"):
        adapters.measure(range(3), lambda step: loss_of(model, step))


def test_gradient_accumulation_and_clipping() -> None:
    model = make()
    adapters = Adapt(model, 500, total_steps=20)
    optimizer = adamw(adapters)
    for step in range(20):
        for part in range(2):
            loss_of(model, 2 * step + part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        adapters.step(optimizer)
    assert [event["step"] for event in adapters.history[:2]] == [0, 4]


def twice(model: nn.Module, *targets: str) -> Adapt:
    first, second = targets or ("auto", "auto")
    Adapt(model, 500, targets=first)
    return Adapt(model, 500, targets=second)


@pytest.mark.parametrize(
    ("make_adapters", "told"),
    [
        (lambda: Adapt(make()), "budget=20_000"),
        (lambda: Adapt(make(), 500, rank=2), "budget=20_000"),
        (lambda: Adapt(make(), 2), "budget=2 is too small"),
        (lambda: Adapt(nn.LayerNorm(4), 500), "no weight that can be adapted"),
        (lambda: Adapt(make(), 500, trainable="tail"), "names 'tail'.*conv, attention, wide, head"),
        (lambda: Adapt(make(), 500, trainable="heads"), "'heads'.*did you mean 'head'"),
        (lambda: Adapt(make(), 500, targets="tail"), "names 'tail'"),
        (lambda: Adapt(DataParallel(make()), 500), "without DataParallel"),
        (lambda: Adapt("net", 500), r"takes a torch\.nn\.Module, got str"),
        (lambda: Adapt(make(), "2x"), "budget must be a whole number, got '2x'"),
        (lambda: Adapt(make(), rank=0), "rank must be at least 1"),
        (lambda: Adapt(make(), 500, total_steps=0), "total_steps must be at least 1, got 0"),
        (
            lambda: Adapt(make(), 500, config={"scale": 2}),
            "config must be an AdaptConfig, got a dict",
        ),  # type: ignore[arg-type]
        (lambda: twice(make()), r"conv\.weight and 6 more weights have .*; call bake\(\)"),
        (lambda: twice(make(), "wide", "head"), r"^wide\.weight has adapters of another"),
    ],
)
def test_refusals(make_adapters: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        make_adapters()
    assert "\n" not in str(caught.value)


def test_a_model_that_was_refused_is_as_it_was() -> None:
    model = make()
    with pytest.raises(UsageError, match="too small"):
        Adapt(model, 2)
    assert list(model.state_dict()) == list(make().state_dict())
    assert all(p.requires_grad for p in model.parameters())


def test_the_table_shows_gradient_and_use() -> None:
    adapters = Adapt(make(), 150, total_steps=STEPS)
    train(adapters, adamw(adapters), 0, STEPS)
    head, *rows, last = str(adapters).splitlines()
    assert head.split() == ["weight", "shape", "rank", "parameters", "gradient", "use"]
    use = [float(row.split()[-1].removesuffix("%")) for row in rows]
    assert sum(use) == pytest.approx(100, abs=1)
    assert last.startswith(f"{adapters.count_parameters()} of 150 parameters in adapters")


def test_an_optimizer_that_does_not_hold_the_adapters_is_refused() -> None:
    model = make()
    adapters = Adapt(model, 500)
    with pytest.raises(UsageError, match=r"make it from adapters\.parameters\(\)"):
        adapters.step(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    with pytest.raises(UsageError, match="LBFGS"):
        adapters.step(torch.optim.LBFGS(adapters.parameters()))
    with pytest.raises(UsageError, match=r"must be a torch\.optim\.Optimizer or several, got int"):
        adapters.step(3)  # type: ignore[arg-type]
    optimizer = adamw(adapters)
    for _ in range(39):
        adapters.step(optimizer)
    with pytest.raises(UsageError, match="no gradient reached the weights in 40 steps"):
        adapters.step(optimizer)


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Train without `adapters.step`."""
    for step in range(count):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loop_that_forgets_adapters_step_is_warned_once() -> None:
    model = make()
    adapters = Adapt(model, 500, trainable="head")
    # A head may be trained first, and ranks are measured in the first four steps.
    step_alone(model, torch.optim.SGD(model.head.parameters(), lr=0.1), 9)
    optimizer = adamw(adapters)
    step_alone(model, optimizer, 4)
    with pytest.warns(EsperWarning, match=r"call adapters\.step\(optimizer\) after each"):
        step_alone(model, optimizer, 1)
    step_alone(model, optimizer, 1)


def test_adapters_of_one_matrix_are_watched_too() -> None:
    model = nn.Linear(4, 8)
    adapters = Adapt(model, 16, config=AdaptConfig(coverage=0.0))
    assert adapters.weights["weight"].pair.trained == ("A",)
    optimizer = adamw(adapters)
    for _ in range(4):
        optimizer.step()
    with pytest.warns(EsperWarning, match=r"call adapters\.step"):
        optimizer.step()


def test_a_loop_with_nothing_to_place_needs_no_step() -> None:
    adapters = Adapt(make(), rank=2)
    step_alone(adapters.model, adamw(adapters), 9)
    adapters = Adapt(make(), 500)
    adapters.measure(range(3), lambda step: loss_of(adapters.model, step))
    step_alone(adapters.model, adamw(adapters), 9)
    # These ranks would move.
    adapters = Adapt(make(), 500, total_steps=STEPS)
    adapters.measure(range(3), lambda step: loss_of(adapters.model, step))
    with pytest.warns(EsperWarning, match="no ranks are placed or moved"):
        step_alone(adapters.model, adamw(adapters), 5)


def test_moving_statistics_of_a_frozen_model_are_said_at_the_first_step() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def step(adapters: Adapt) -> None:
        optimizer = torch.optim.SGD(adapters.parameters(), lr=0.1)
        for _ in range(2):
            adapters.model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            adapters.step(optimizer)

    adapters = Adapt(normed(), 40)
    with pytest.warns(EsperWarning, match="'1' are frozen, but the running statistics") as seen:
        step(adapters)
    assert len(seen) == 1
    # The line that it says to write holds all of them still.
    model = nn.Sequential(normed(), nn.Conv1d(5, 5, 1), *(nn.BatchNorm1d(5) for _ in range(2)))
    with pytest.warns(EsperWarning, match=r"'0\.1' and 2 more are frozen") as seen:
        warn_of_moving_statistics(model.requires_grad_(False).train(), has_own_loop=True)
    line = str(seen[0].message).partition("model.train(): ")[2]
    assert line == "[m.eval() for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)]"
    exec(line, {"model": model, "torch": torch})
    warn_of_moving_statistics(model, has_own_loop=True)
    step(Adapt(normed(), 40, trainable="1"))
    for held in ("", "1"):
        adapters = Adapt(normed(), 40)
        adapters.model.get_submodule(held).eval()
        step(adapters)


def test_a_state_of_another_model_or_budget_is_refused() -> None:
    state = Adapt(make(), 500).state_dict()
    with pytest.raises(CheckpointError, match="other weights"):
        Adapt(make(), 500, targets="wide").load_state_dict(state)
    with pytest.raises(CheckpointError, match="a budget of 500, but this Adapt of 600"):
        Adapt(make(), 600).load_state_dict(state)


def test_a_state_that_is_none_or_damaged_is_refused_before_anything_is_loaded() -> None:
    whole = Adapt(make(), 500, trainable="head").state_dict()
    fresh = Adapt(make(), 500, trainable="head")
    before = {name: value.clone() for name, value in fresh.model.state_dict().items()}
    pairs, trained = whole["pairs"], whole["trainable"]
    name = next(name for name, pair in pairs.items() if len(pair["A"]))
    pair = {**pairs[name], "A": pairs[name]["A"][:, 1:]}
    for state, told in (
        ({"x": 1}, r"no state of an Adapt: .* is missing; give adapters\.state_dict\(\)"),
        (make().state_dict(), "no state of an Adapt"),
        ({key: value for key, value in whole.items() if key != "pairs"}, "'pairs' is missing"),
        ({**whole, "pairs": {**pairs, name: pair}}, f"the pair of {name} has the shapes"),
        (
            {**whole, "trainable": {**trained, "head.weight": torch.zeros(1)}},
            r"head\.weight is \[1\] in this state",
        ),
    ):
        with pytest.raises(CheckpointError, match=told):
            fresh.load_state_dict(state)
    after = fresh.model.state_dict()
    assert all(torch.equal(after[each], value) for each, value in before.items())
    fresh.load_state_dict(whole)
