"""Small hosts and gardens, and ways to bring them into a stage, for the tests of Kasmina."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from esper.growth.gardener import Gardener
from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.costs import row_costs
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig, LifecycleConfig
from esper.kasmina.slot_table import SlotTable
from esper.kasmina.state import SlotState, empty_state
from esper.lab.imagined import imagined_costs
from esper.leyline.errors import EsperWarning
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.leyline.stages import SeedStage

STYLES = ("linear_add", "linear_multiply", "sigmoid_add", "gated_gate")
MODES = ("straight_through", "shadow")
LIVING = (
    SeedStage.GERMINATED,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.HOLDING,
    SeedStage.FOSSILIZED,
)


class Stack(nn.Module):
    """Three layers on vectors of width 4: slots a, b and c."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


class Step(nn.Linear):
    """A residual block on vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class ResidualStack(Stack):
    """The same with blocks that can be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Step(4, 4) for _ in range(3))


class Residual(nn.Module):
    """Convolutions followed by everything that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        identity = self.relu(self.stem(x))
        out = self.conv(identity)
        out += identity
        out = self.relu(out)
        logits: Tensor = self.head(out.mean((-2, -1)))
        return logits


def quick_config(**changes: Any) -> GardenConfig:
    """Gates open at once, so that a test reaches any stage in a few calls."""
    lifecycle = {"gates": {"min_training_epochs": 0}, **changes.pop("lifecycle", {})}
    return GardenConfig.from_mapping({"lifecycle": lifecycle, **changes})


def stack_garden(model: nn.Module | None = None, **changes: Any) -> Garden:
    torch.manual_seed(7)
    return Garden(
        model or Stack(), ["a", "b", "c"], torch.zeros(2, 4), config=quick_config(**changes)
    )


def bring(
    garden: Garden,
    slot: str,
    stage: SeedStage,
    blueprint: str = "mlp_small",
    *,
    style: str = "linear_add",
) -> None:
    """Put a seed into the slot and bring it to the stage, at full amplitude once it is blended."""
    with warnings.catch_warnings():
        # With training_mode="shadow" a seed that skips its training is worth a warning.
        warnings.simplefilter("ignore", EsperWarning)
        assert garden.germinate(slot, blueprint, style=style, tempo=1)
        for reached in LIVING[1:]:
            if garden.slots[slot].stage is stage:
                break
            if reached is SeedStage.FOSSILIZED:
                measure(garden, slot)
                pretend_trained(garden, slot)
                assert garden.fossilize(slot)
            else:
                assert garden.advance(slot)
            if reached is SeedStage.BLENDING:
                garden.tick()
    assert garden.slots[slot].stage is stage


def measure(garden: Garden, slot: str, value: float = 2.0) -> None:
    """Pretend that an ablation found this contribution."""
    here = torch.tensor([[name == slot for name in garden.slot_names]])
    garden.table.state = garden.state.where(here, contribution=value, counterfactual_age=0)


def pretend_trained(garden: Garden, slot: str) -> None:
    """Let a seed that is as it was drawn pass for one that an optimizer has changed."""
    garden.seedbed[garden.slot_names.index(slot)].drawn = None
    known = garden.state.where(torch.ones_like(garden.state.untrained), untrained=False)
    garden.table.state = known


def stir(garden: Garden, slot: str) -> None:
    """Move the seed away from its start, where it may be the identity."""
    with torch.no_grad():
        for parameter in garden.slot_parameters(slot):
            parameter += 0.3 * torch.randn_like(parameter)


def assert_copies_train(host: nn.Module, slot: str, x: Tensor, *, learning_rate: float) -> None:
    """Check that 1, 2, 4 and 8 times the blocks in front of a slot learn, as copies."""
    config = quick_config(lifecycle={"rules": {"min_prune_age": 0}})
    garden = Garden(host, [slot], x, config=config)
    optimizer = Gardener(garden, "wait").optimizer(torch.optim.SGD, lr=learning_rate, momentum=0.9)
    labels = torch.arange(len(x)) % 3
    for copies in (0, 1, 3, 7):
        if copies:
            result = garden.germinate(slot, KIN)
            assert result, result.reason
        assert garden.slots[slot].copies == copies
        losses = []
        for _ in range(8):
            loss = functional.cross_entropy(garden(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], (copies, losses)
        for name, parameter in garden.named_parameters():
            assert parameter.grad is not None, (copies, name)
            assert bool(parameter.grad.isfinite().all()), (copies, name)
            assert bool(parameter.grad.any()), (copies, name)


def one_slot(stage: SeedStage, **fields: Any) -> SlotState:
    """The state of a single slot."""
    return empty_state(1, 1).where(torch.tensor([[True]]), stage=int(stage), **fields)


def stages(garden: Garden) -> list[SeedStage]:
    return [view.stage for view in garden.slots.values()]


def same_state(one: SlotState, other: SlotState) -> bool:
    """Equal in every field, NaN included."""
    return all(
        torch.equal(value.nan_to_num(1e30), other.state_dict()[name].nan_to_num(1e30))
        for name, value in one.state_dict().items()
    )


def plain_table(
    state: SlotState, host_params: int = 100, lifecycle: LifecycleConfig | None = None
) -> SlotTable:
    """Slots of rows in a state; seeds of any blueprint cost 7 parameters."""
    sizes = torch.full((NUM_BLUEPRINTS,), 7)
    costs = imagined_costs(state.num_slots, sizes, range(NUM_BLUEPRINTS))
    rows = row_costs(state.rows, costs, host_params=host_params)
    table = SlotTable(rows, lifecycle or LifecycleConfig())
    table.state = state
    return table
