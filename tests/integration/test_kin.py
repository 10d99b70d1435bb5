"""Growing deeper by `kin` through `esper.grow`: schedules, records, resuming, who chooses it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.growth.config import GrowthConfig
from esper.growth.gardener import Gardener
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.wrapping import disconnect
from esper.leyline.actions import LifecycleOp, placeholder_actions
from esper.nissa import open_run
from tests.growth.depth.models import images, make_gpt, make_resnet, tokens
from tests.plots import plain_history, same

pytestmark = pytest.mark.filterwarnings("ignore:.*too few to grow in")

CONFIG = GrowthConfig(garden={"lifecycle": {"gates": {"min_gradient_health": 0.0}}}, seed=3)


def image_batches(count: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [images(first + step) for step in range(count)]


def text_batches(count: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    batches = [tokens(first + step) for step in range(count)]
    return [(batch[:, :-1], batch[:, 1:]) for batch in batches]


CASES: dict[str, dict[str, Any]] = {
    "cnn": {
        "model": make_resnet,
        "slots": ["stage1.0", "stage1.1"],
        "train": image_batches(4),
        "val": image_batches(2, 50),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    },
    "transformer": {
        "model": lambda: make_gpt(2),
        "slots": ["blocks.0", "blocks.1"],
        "train": text_batches(4),
        "val": text_batches(2, 50),
        "loss": "language",
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    },
}


def evaluate(batches: Any, model: nn.Module) -> tuple[Tensor, None]:
    """Loss of every validation sample."""
    losses = []
    for x, y in batches:
        scores = model(x).mT if y.dim() > 1 else model(x)
        losses.append(F.cross_entropy(scores, y, reduction="none").reshape(len(x), -1).mean(1))
    return torch.cat(losses), None


def plan(folder: Path, *entries: dict[str, Any]) -> str:
    file = folder / "plan.json"
    file.write_text(json.dumps(list(entries)))
    return f"schedule:{file}"


def grow(case: str, controller: Any, epochs: int = 8, **more: Any) -> Any:
    options = {**CASES[case], "config": CONFIG, "keep": "last", **more}
    model, slots = options.pop("model")(), options.pop("slots")
    return esper.grow(model, slots, controller=controller, epochs=epochs, **options)


@pytest.mark.filterwarnings("ignore:A static network of the same size")
@pytest.mark.parametrize("case", CASES)
def test_a_schedule_deepens_a_network_and_resumes_to_the_bit(case: str, tmp_path: Path) -> None:
    slots = CASES[case]["slots"]
    controller = plan(
        tmp_path,
        {"epoch": 2, "op": "grow", "slot": slots[0], "blueprint": "kin"},
        {"epoch": 3, "op": "grow", "slot": slots[1], "blueprint": "kin"},
    )
    whole = grow(case, controller, out=tmp_path / "whole")
    stages = [[slot.stage for slot in record.slots] for record in whole.history]
    assert stages[1] == ["DORMANT", "DORMANT"]
    assert stages[2][0] == "BLENDING", "at work in the epoch after it was germinated"
    assert whole.history[2].slots[0].alpha == 1.0
    assert whole.history[2].slots[0].contribution is not None
    assert {slot.blueprint for slot in whole.history[-1].slots} == {"kin"}
    assert stages[-1] == ["FOSSILIZED", "FOSSILIZED"]
    before, after = whole.summary.parameters_before, whole.summary.parameters_after
    blocks = [whole.model.model.get_submodule(slot) for slot in slots]
    assert after - before == sum(p.numel() for block in blocks for p in block.parameters())

    class Stopped(Exception):
        """Power is lost."""

    def stop(record: Any) -> None:
        if record.epoch == 4:
            raise Stopped

    with pytest.raises(Stopped):
        grow(case, controller, out=tmp_path / "parts", on_epoch=stop)
    resumed = grow(case, controller, out=tmp_path / "parts", resume=True)
    assert plain_history(resumed.history) == plain_history(whole.history)
    assert same(resumed.model.state_dict(), whole.model.state_dict())
    example = CASES[case]["val"][0][0]
    assert torch.equal(whole.model.bake()(example), whole.model(example))

    with open_run(tmp_path / "whole") as stored:
        lanes = list(stored.rows("seed_stages", where=f"slot = '{slots[0]}'"))
    assert {lane["blueprint"] for lane in lanes} == {"kin"}
    entered = [(lane["stage"], lane["alpha"]) for lane in lanes if lane["entered"]]
    assert entered == [("BLENDING", 1.0), ("HOLDING", 1.0), ("FOSSILIZED", 1.0)]
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "kin" in page


def test_a_gardener_continues_exactly_and_germinates_exactly(tmp_path: Path) -> None:
    """In a loop of one's own the next step is that of plain PyTorch with copied state."""

    def start() -> tuple[Gardener, Any]:
        garden = esper.Garden(make_gpt(2), ["blocks.0"], tokens(0)[:, :-1])
        file = plan(tmp_path, {"epoch": 1, "op": "grow", "slot": 0, "blueprint": "kin"})
        gardener = Gardener(garden, file, 60)
        return gardener, gardener.optimizer(torch.optim.AdamW, lr=0.01)

    judge = partial(evaluate, text_batches(1, 50))

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        x, y = text_batches(1, number)[0]
        F.cross_entropy(model(x).mT, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    gardener, optimizer = start()
    for number in range(3):
        step(gardener.garden, optimizer, number)
    plain: Any = copy.deepcopy(gardener.garden.model)
    disconnect(plain)
    plain.blocks.insert(1, copy.deepcopy(plain.blocks[0]))
    by_hand = torch.optim.AdamW(plain.parameters(), lr=0.01)
    old = dict(gardener.garden.model.named_parameters())
    number_of = {"0": "0", "1": "0", "2": "1"}
    for name, parameter in plain.named_parameters():
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = number_of[parts[1]]
        by_hand.state[parameter] = copy.deepcopy(optimizer.state[old[".".join(parts)]])
    record = gardener.step(judge)
    assert record.decision is not None
    assert (record.decision.blueprint, record.decision.outcome) == ("kin", "done")
    saved = copy.deepcopy(gardener.state_dict())
    x = text_batches(1, 50)[0][0]
    assert torch.equal(gardener.garden(x), plain(x))
    step(gardener.garden, optimizer, 7)
    step(plain, by_hand, 7)
    assert torch.equal(gardener.garden(x), plain(x))
    gardener.step(judge)

    other, its = start()
    other.load_state_dict(saved)
    step(other.garden, its, 7)
    other.step(judge)
    assert same(other.state_dict()["garden"], gardener.state_dict()["garden"])
    assert same(other.state_dict()["optimizer"], gardener.state_dict()["optimizer"])


@pytest.mark.filterwarnings("ignore:Nothing grew")
def test_a_slot_whose_block_cannot_be_copied_is_passed_over(tmp_path: Path) -> None:
    controller = plan(tmp_path, {"epoch": 1, "op": "grow", "slot": "stem", "blueprint": "kin"})
    with pytest.warns(UserWarning, match="'kin' does not fit slot 'stem'"):
        grow("cnn", controller, 3, slots=["stem"])
    garden = esper.Garden(make_resnet(), ["stem"], images(0)[0])
    gardener = Gardener(garden, Chooses("kin"), 60)
    gardener.optimizer(torch.optim.SGD, lr=0.1)
    decision = gardener.step(partial(evaluate, CASES["cnn"]["val"])).decision
    assert decision is not None
    assert decision.outcome == "illegal"
    assert "no copy of 'stem' can grow there: it turns" in decision.reason


class Chooses:
    """Germinates a blueprint in the first slot, whether or not that is legal."""

    def __init__(self, name: str) -> None:
        self.choice = BLUEPRINTS.get(name).id

    def reset(self, rows: int, device: Any) -> None:
        pass

    def act(self, signals: Any, masks: Any) -> dict[str, Tensor]:
        actions = placeholder_actions(1)
        actions["op"][0], actions["blueprint"][0] = LifecycleOp.GERMINATE, self.choice
        return actions

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("case", CASES)
def test_the_shipped_controller_plays_and_never_chooses_it(case: str) -> None:
    model, slots = CASES[case]["model"](), CASES[case]["slots"]
    garden = esper.Garden(model, slots, CASES[case]["val"][0][0])
    gardener = Gardener(garden, "tamiyo", 40)
    optimizer = gardener.optimizer(torch.optim.SGD, lr=0.05)
    kin = BLUEPRINTS.get("kin").id
    for epoch in range(30):
        x, y = CASES[case]["train"][epoch % 4]
        F.cross_entropy(model(x).mT if y.dim() > 1 else model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        gardener.recalibrate([x])
        decision = gardener.step(partial(evaluate, CASES[case]["val"])).decision
        assert decision is not None
        assert decision.blueprint != "kin"
        assert decision.outcome != "illegal"
    controller: Any = gardener.controller
    signals, masks = gardener.signals(), garden.table.masks()
    # It is shown what it would be shown without `kin` ...
    assert "kin" not in controller.policy.blueprint_names
    shown = controller._own_signals(signals)
    assert torch.equal(shown.seed_params, signals.seed_params[..., :kin])
    assert bool((signals.seed_params[..., kin] > 0).all())
    # ... and germinates nothing where nothing else fits.
    fits = torch.zeros_like(masks.blueprint_by_slot)
    fits[..., kin] = True
    slot_by_op = masks.slot_by_op.clone()
    slot_by_op[:, LifecycleOp.GERMINATE] = True
    op = masks.op.clone()
    op[:, LifecycleOp.GERMINATE] = True
    masks = replace(masks, blueprint_by_slot=fits, slot_by_op=slot_by_op, op=op)
    for _ in range(20):
        assert int(controller.act(signals, masks)["op"][0]) != LifecycleOp.GERMINATE


def test_controllers_that_draw_may_choose_it() -> None:
    garden = esper.Garden(make_gpt(2), ["blocks.0"], tokens(0)[:, :-1])
    chosen = set()
    for seed in range(60):
        gardener = Gardener(copy.deepcopy(garden), "random", 60, seed=seed)
        actions = gardener.controller.act(gardener.signals(), garden.table.masks())
        if int(actions["op"][0]) == LifecycleOp.GERMINATE:
            chosen.add(int(actions["blueprint"][0]))
    assert BLUEPRINTS.get("kin").id in chosen
    assert len(chosen) > 1


@pytest.mark.filterwarnings("ignore:A static network of the same size")
def test_the_heuristic_takes_it_where_it_is_told_to() -> None:
    grown = grow(
        "cnn",
        "heuristic:rotation=[kin],min_epoch=1,plateau_epochs=0",
        12,
        config=CONFIG.replace(gardener={"tracker": {"stable_epochs": 0}}),
    )
    germinated = [r.decision for r in grown.history if r.decision and r.decision.op == "GERMINATE"]
    assert germinated
    assert {decision.blueprint for decision in germinated} == {"kin"}
