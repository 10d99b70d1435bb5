"""A saved garden, rebuilt here and in another process, and what can be wrong with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BLUEPRINTS, register_blueprint
from esper.kasmina.garden import Garden, load_garden
from esper.kasmina.optimizer import CarriedOptimizer
from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.stages import SeedStage
from esper.utils.manifest import MANIFEST_FILE, TENSORS_FILE, TREE_FILE
from esper.utils.storage import load_tree, save_tree
from tests.kasmina.gardens import (
    LIVING,
    Residual,
    Stack,
    bring,
    quick_config,
    same_state,
    stack_garden,
    stir,
)
from tests.plots import record_epoch

X = torch.randn(5, 4)

FRESH_PROCESS = """
import os
import sys
import torch
from torch.nn import functional as F
from esper.kasmina.garden import load_garden
from esper.kasmina.optimizer import CarriedOptimizer
from esper.utils.storage import load_tree, save_tree
from tests.kasmina.gardens import Residual
from pathlib import Path

torch.set_num_threads(int(os.environ["ESPER_THREADS"]))
folder = Path(sys.argv[1])
batch, _ = load_tree(folder / "batch", kind="batch", version=1)
torch.manual_seed(99)
garden = load_garden(folder / "garden", model=Residual())
carried = CarriedOptimizer(garden, torch.optim.SGD(garden.parameters(), lr=0.1, momentum=0.9))
carried.load_state_dict(load_tree(folder / "optimizer", kind="optimizer", version=1)[0])
outputs = garden.eval()(batch["x"]).detach()
garden.train()
losses = []
for _ in range(4):
    carried.optimizer.zero_grad()
    loss = garden.training_loss(lambda model: F.cross_entropy(model(batch["x"]), batch["y"]))
    loss.backward()
    carried.optimizer.step()
    garden.tick()
    losses.append(loss.detach())
save_tree(
    folder / "after",
    {"outputs": outputs, "losses": losses, "state": dict(garden.state_dict())},
    kind="after",
    version=1,
)
"""


def continue_here(garden: Garden, carried: CarriedOptimizer, x: Tensor, y: Tensor) -> list[Tensor]:
    losses = []
    for _ in range(4):
        carried.optimizer.zero_grad()
        loss = garden.training_loss(lambda model: nn.functional.cross_entropy(model(x), y))
        loss.backward()
        carried.optimizer.step()
        garden.tick()
        losses.append(loss.detach())
    return losses


def test_a_new_process_has_the_same_outputs_and_trains_on_with_the_same_losses(
    tmp_path: Path,
) -> None:
    x, y = torch.randn(6, 3, 5, 5), torch.randint(3, (6,))
    torch.manual_seed(1)
    config = quick_config(training_mode="shadow")
    garden = Garden(Residual(), {"late": "conv", "early": "stem"}, x, config=config)
    carried = CarriedOptimizer(garden, torch.optim.SGD(garden.parameters(), lr=0.1, momentum=0.9))
    bring(garden, "early", SeedStage.HOLDING, "conv_light", style="gated_gate")
    assert garden.set_alpha_target("early", 0.5, speed=8, curve="cosine")
    garden.tick()
    bring(garden, "late", SeedStage.TRAINING, "bottleneck")
    continue_here(garden, carried, x, y)

    save_tree(tmp_path / "batch", {"x": x, "y": y}, kind="batch", version=1)
    save_tree(tmp_path / "optimizer", carried.state_dict(), kind="optimizer", version=1)
    garden.save(tmp_path / "garden")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    outputs = garden.eval()(x).detach()
    garden.train()
    losses = continue_here(garden, carried, x, y)
    after, _ = load_tree(tmp_path / "after", kind="after", version=1)
    assert torch.equal(after["outputs"], outputs)
    assert all(map(torch.equal, after["losses"], losses))
    for name, value in garden.state_dict().items():
        assert torch.equal(after["state"][name], value), name


@pytest.mark.parametrize("stage", LIVING)
@pytest.mark.parametrize("style", ["linear_multiply", "gated_gate"])
def test_every_stage_survives(tmp_path: Path, stage: SeedStage, style: str) -> None:
    garden = stack_garden()
    bring(garden, "b", stage, style=style)
    stir(garden, "b")
    record_epoch(garden, 12.0)
    garden.save(tmp_path / "g")
    loaded = load_garden(tmp_path / "g", model=Stack())
    assert torch.equal(loaded(X), garden(X))
    assert same_state(loaded.state, garden.state)
    assert loaded.config == garden.config
    assert loaded.seedbed.germinations == garden.seedbed.germinations
    loaded.tick()
    garden.tick()
    assert same_state(loaded.state, garden.state)


def test_a_fading_seed_is_frozen_after_loading_and_thawed_when_it_holds(tmp_path: Path) -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    garden.set_alpha_target("a", 0.5, speed=2)
    garden.save(tmp_path / "g")
    loaded = load_garden(tmp_path / "g", model=Stack())
    assert not any(parameter.requires_grad for parameter in loaded.slot_parameters("a"))
    loaded.tick()
    loaded.tick()
    assert all(parameter.requires_grad for parameter in loaded.slot_parameters("a"))


def test_a_cooling_slot_goes_on_cooling(tmp_path: Path) -> None:
    garden = stack_garden(lifecycle={"rules": {"min_prune_age": 0}})
    bring(garden, "a", SeedStage.TRAINING)
    garden.prune("a")
    garden.tick()
    garden.save(tmp_path / "g")
    loaded = load_garden(tmp_path / "g", model=Stack())
    for _ in range(6):
        assert not loaded.germinate("a", "norm")
        loaded.tick()
    assert loaded.germinate("a", "norm")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_bit_equal_in_the_middle_of_a_ramp(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    stir(garden, "a")
    garden.set_alpha_target("a", 0.5, speed=3)
    garden.tick()
    garden.to(dtype)
    garden.save(tmp_path / "g")
    loaded = load_garden(tmp_path / "g", model=Stack().to(dtype))
    assert torch.equal(loaded(X.to(dtype)), garden(X.to(dtype)))


def test_tied_weights_survive(tmp_path: Path) -> None:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.c.weight = self.a.weight

    garden = Garden(Tied(), ["b"], X, config=quick_config())
    bring(garden, "b", SeedStage.HOLDING)
    garden.save(tmp_path / "g")
    loaded = load_garden(tmp_path / "g", model=Tied())
    assert torch.equal(loaded(X), garden(X))
    assert loaded.model.c.weight is loaded.model.a.weight


class Tokens(nn.Module):
    """Two inputs by name, of whole numbers and of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, *, tokens: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.mix(self.embed(tokens)) * mask[..., None]
        return out


def test_no_example_is_needed_again_whatever_the_inputs_are(tmp_path: Path) -> None:
    batch = {"tokens": torch.randint(9, (2, 5)), "mask": torch.rand(2, 5) > 0.5}
    garden = Garden(Tokens(), ["mix"], batch, axes="BTC", config=quick_config())
    bring(garden, "mix", SeedStage.HOLDING, "lora")
    stir(garden, "mix")
    garden.save(tmp_path / "g")
    loaded = load_garden(tmp_path / "g", model=Tokens())
    assert torch.equal(loaded(**batch), garden(**batch))
    assert loaded.placed == garden.placed
    assert loaded.count_flops() == garden.count_flops() > 0


def test_a_model_is_not_run_to_be_loaded(tmp_path: Path) -> None:
    class Silent(Stack):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("nobody asked")

    garden = stack_garden()
    garden.save(tmp_path / "g")
    assert load_garden(tmp_path / "g", model=Silent()).slot_names == garden.slot_names
    with pytest.raises(UsageError, match="give one batch as example_input"):
        Garden(Stack(), ["a"])


# -- what can be wrong ----------------------------------------------------------------------------


def saved(tmp_path: Path, blueprint: str = "norm") -> Path:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING, blueprint)
    garden.save(tmp_path / "g")
    return tmp_path / "g"


@pytest.mark.parametrize("name", [TENSORS_FILE, TREE_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str, damage: str) -> None:
    file = saved(tmp_path) / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 0x40])
        file.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    with pytest.raises(CheckpointError) as error:
        load_garden(tmp_path / "g", model=Stack())
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_folder_that_is_not_there_or_holds_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load_garden(tmp_path / "nothing", model=Stack())
    save_tree(tmp_path / "other", {"garden": {}}, kind="optimizer", version=1)
    with pytest.raises(CheckpointError, match="garden"):
        load_garden(tmp_path / "other", model=Stack())


def test_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    class Wide(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 6)
            self.b = nn.Linear(6, 4)

    with pytest.raises(CheckpointError, match="the model does not match the saved one") as error:
        load_garden(saved(tmp_path), model=Wide())
    assert "\n" not in str(error.value)


def test_a_blueprint_that_is_not_registered_is_named(tmp_path: Path) -> None:
    @register_blueprint("mine", topologies=("vector",))
    class Mine(nn.Module):
        def __init__(self, channels: int, topology: str) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(channels))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight

    try:
        folder = saved(tmp_path, "mine")
        load_garden(folder, model=Stack())
    finally:
        BLUEPRINTS.unregister("mine")
    with pytest.raises(CheckpointError, match="has grown a 'mine', which is not registered here"):
        load_garden(folder, model=Stack())


def test_a_name_that_cannot_be_is_one_line() -> None:
    with pytest.raises(CheckpointError, match="is no name of a file or folder"):
        load_garden("a\0b", model=Stack())
