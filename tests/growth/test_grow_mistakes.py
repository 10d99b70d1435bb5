"""What `esper.grow` says about training that goes wrong, and about arguments that do not fit."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.config import GrowthConfig
from esper.leyline.errors import ConfigError, EsperWarning, NonFiniteError, SlotError, UsageError

IN_A_ROW = r"^epoch \d+: the validation loss was not finite in 3 epochs in a row; lower the"


def batches(samples: int = 64, bad: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 16 of a small task; the sample `bad` is NaN."""
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long()
    if bad is not None:
        inputs[bad] = math.nan
    return list(zip(inputs.split(16), targets.split(16), strict=True))


class Net(nn.Module):
    """Two layers with BatchNorm between them."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.second(F.relu(self.first(x))))
        return self.factor * self.head(hidden)


class TurnsNaN:
    """A loss that is NaN from one training step until another."""

    def __init__(self, first: int, last: float = math.inf) -> None:
        self.first, self.last, self.steps = first, last, 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.steps += torch.is_grad_enabled()
        loss = F.cross_entropy(outputs, targets)
        return loss * math.nan if self.first <= self.steps < self.last else loss


def grow(model: nn.Module | None = None, **options: Any) -> Any:
    model = model or Net()
    given = {"slots": ["first", "second"], "train": batches(), "val": batches(), "epochs": 14}
    return esper.grow(model, **{**given, **options})


# ---- Losses that are not finite


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Net(), {"train": batches(bad=7)}),
        (Net(math.nan), {}),
        (Net(), {"loss": TurnsNaN(4 * 8)}),
        (Net(), {"loss": TurnsNaN(4 * 8), "controller": "trial"}),
    ],
    ids=["sample", "output", "loss", "loss-trial"],
)
def test_a_loss_that_stays_nan_ends_the_run_with_advice(
    model: nn.Module, options: dict[str, Any]
) -> None:
    with pytest.raises(NonFiniteError, match=IN_A_ROW):
        grow(model, **options)


def test_a_loss_that_is_nan_for_an_epoch_does_not_end_the_run() -> None:
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always", EsperWarning)
        grown = grow(loss=TurnsNaN(4 * 8, 4 * 8 + 1))
    assert len(grown.history) == 14
    assert grown.history[7].rollback == "not_finite"
    assert math.isfinite(grown.summary.val_score)
    assert any("rolled back to epoch 5" in str(one.message) for one in issued)


@pytest.mark.filterwarnings("ignore")
def test_a_run_without_a_finite_loss_has_no_network_to_return() -> None:
    with pytest.raises(NonFiniteError, match="was not finite in any epoch; lower the learning"):
        grow(epochs=2, loss=TurnsNaN(0))


# ---- Schedules that are stepped at another pace than they were made for


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=14 * 4),
        lambda optimizer: CosineAnnealingLR(optimizer, 14 * 4),
    ],
)
def test_a_schedule_with_a_step_for_each_batch_is_refused_once_an_epoch(schedule: Any) -> None:
    words = "LR has 56 steps, but is stepped 14 times, once an epoch; write scheduler_every='b"
    with pytest.raises(UsageError, match=words):
        grow(scheduler=schedule)
    grow(scheduler=schedule, scheduler_every="batch", controller="wait")


def test_a_cycle_that_does_not_end_is_a_warning() -> None:
    with pytest.warns(EsperWarning, match="OneCycleLR has 30 steps, .*; write total_steps=14, or"):
        grow(scheduler=lambda of: OneCycleLR(of, 0.1, total_steps=30), controller="wait")


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=14),
        lambda optimizer: CosineAnnealingLR(optimizer, 14),
        lambda optimizer: CosineAnnealingLR(optimizer, 20),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    ],
)
def test_schedules_that_may_be_meant_are_left_alone(schedule: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        grow(scheduler=schedule, controller="wait")


# ---- Models whose forward takes one dict


class Table(nn.Module):
    """Reads a dict of numbers and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(3, 4), nn.Linear(10, 8), nn.Linear(8, 2)

    def forward(self, row: dict[str, Tensor]) -> Tensor:
        hidden = torch.cat([row["numbers"], self.embed(row["kind"])], 1)
        scores: Tensor = self.head(F.relu(self.body(hidden)))
        return scores


def table() -> list[tuple[dict[str, Tensor], Tensor]]:
    return [({"numbers": x, "kind": y + 1}, y) for x, y in batches()]


@pytest.mark.filterwarnings("ignore:Nothing grew", "ignore:A static", "ignore:The")
def test_a_dict_is_the_one_argument_of_a_model_that_has_only_one() -> None:
    labelled = [{**inputs, "labels": y} for inputs, y in table()]
    for each in (table(), labelled):
        model = Table()
        assert "body" in list(esper.suggest_slots(model, each[0]))
        (check,) = esper.check_slots(model, ["body"], table()[0][0])
        assert check.problem is None
        grown = grow(model, slots=["body"], train=each, val=each, controller="random", twin=True)
        assert len(grown.history) == 14
        assert grown.bake()(table()[0][0]).shape == (16, 2)
    assert esper.count_flops(Table(), table()[0][0]).total > 0


def test_slots_are_suggested_for_a_batch_with_targets() -> None:
    found = esper.suggest_slots(Net(), batches()[0])
    assert list(found) == list(esper.suggest_slots(Net(), batches()[0][0]))


# ---- Optimizers that lack a part of the model


@pytest.mark.parametrize("is_made", [True, False])
def test_an_optimizer_of_some_parameters_is_a_warning(is_made: bool) -> None:
    model = Net()
    part = list(model.head.parameters())
    optimizer = SGD(part, 0.1) if is_made else lambda parameters: SGD(part, 0.1)
    words = "lacks 6 of the model's 8 trainable parameters, such as 'first.weight', which will not"
    with pytest.warns(EsperWarning, match=words) as issued:
        grow(model, optimizer=optimizer, epochs=2, controller="wait")
    assert sum("lacks" in str(one.message) for one in issued) == 1


def test_an_optimizer_may_lack_what_is_frozen() -> None:
    model = Net()
    model.first.requires_grad_(False)
    rest = [one for one in model.parameters() if one.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        grow(model, optimizer=SGD(rest, 0.1), epochs=12, controller="wait")


# ---- Arguments of another type


def test_settings_that_are_no_configuration_say_what_to_write() -> None:
    words = r"config must be a GrowthConfig, got dict; write config=GrowthConfig\(epochs=3\)$"
    with pytest.raises(ConfigError, match=words):
        grow(config={"epochs": 3})
    words = r"config must be a GardenConfig, got dict; write config=GardenConfig\(seed=1\)$"
    with pytest.raises(ConfigError, match=words):
        esper.Garden(Net(), ["first"], batches()[0][0], config={"seed": 1})  # type: ignore[arg-type]
    garden = esper.Garden(Net(), ["first"], batches()[0][0])
    with pytest.raises(ConfigError, match=r"GardenerConfig, got int; .*GardenerConfig\(\.\.\.\)$"):
        esper.Gardener(garden, config=3)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_paths_that_are_no_path_say_what_to_write(tmp_path: Path) -> None:
    grown = grow(epochs=2, controller="wait")
    for name, example in (
        ("plot", "growth.svg"),
        ("export", "grown.pt2"),
        ("report", "report.html"),
        ("save", "grown"),
    ):
        with pytest.raises(UsageError, match=f"a path is a string such as '{example}', got 5"):
            getattr(grown, name)(5)
    with pytest.raises(UsageError, match="a path is a string such as 'runs/mine', got 5"):
        grow(out=5)
    with pytest.raises(UsageError, match="a path is a string such as 'grown', got 5"):
        esper.load_garden(5, model=Net())  # type: ignore[arg-type]
    assert grown.plot(tmp_path / "growth.svg").svg


# ---- Models of which nothing trains


def test_a_frozen_model_that_only_waits_is_a_warning() -> None:
    model = Net()
    model.norm = nn.Identity()  # type: ignore[assignment]
    model.requires_grad_(False)
    with pytest.warns(EsperWarning, match="^nothing trains: .*; write controller='trial', or mod"):
        grow(model, controller="wait")
    model.head.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EsperWarning)
        grow(model, controller="wait")


# ---- Slots at which a seed would change nothing


class LastState(nn.Module):
    """Uses the last state of a recurrent network."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=batch_first), nn.Linear(8, 2)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., None] if self.lstm.batch_first else x.T[..., None]
        _, (state, _) = self.lstm(x)
        self.unused(state[-1])
        scores: Tensor = self.head(state[-1])
        return scores


@pytest.mark.parametrize(
    ("batch_first", "last"), [(True, r"out\[:, -1\]$"), (False, r"out\[-1\]$")]
)
def test_a_recurrent_network_of_which_only_the_state_is_used(batch_first: bool, last: str) -> None:
    model = LastState(batch_first=batch_first)
    words = (
        rf"uses the last state of 'lstm' at most, .*; write out, _ = self.lstm\(x\) and use {last}"
    )
    with pytest.raises(SlotError, match=f"no slot can be suggested for this LastState: .*{words}"):
        esper.suggest_slots(model, batches()[0][0])
    with pytest.raises(SlotError, match=f"^a seed would change nothing: .*{words}"):
        grow(model, slots=["lstm"])


def test_an_output_that_is_not_used_is_no_slot() -> None:
    with pytest.raises(SlotError, match="change nothing: no gradient reaches 'unused': its output"):
        grow(LastState(), slots=["unused"])


# ---- Networks that do not learn


@pytest.mark.parametrize("controller", ["wait", "trial"])
def test_a_network_that_does_not_learn_is_named_once_and_early(controller: str) -> None:
    epochs: list[int] = []
    model = Net()
    model.head.requires_grad_(False).weight.zero_()
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always", EsperWarning)
        grown = grow(
            model,
            epochs=30,
            controller=controller,
            optimizer=lambda parameters: SGD(parameters, 0.0),
            on_epoch=lambda record: epochs.append(len(issued)),
        )
    said = [str(one.message) for one in issued]
    assert said[0].startswith("The network has learned nothing in 5 epochs: its best validation")
    assert epochs[3:5] == [0, 1]
    assert not any("did not learn" in line or "slots" in line for line in said)
    assert grown.why[0].startswith("The network did not learn: its best validation loss in 30")
    assert not any(line.startswith("To change that") for line in grown.why)


def test_a_frozen_network_that_does_not_learn_is_named_at_the_end() -> None:
    model = Net()
    model.norm = nn.Identity()  # type: ignore[assignment]
    model.requires_grad_(False).head.weight.zero_()
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always", EsperWarning)
        grow(model, epochs=12, controller="trial")
    said = [str(one.message) for one in issued]
    assert not any("has learned nothing" in line for line in said)
    assert said[-1].startswith("The network did not learn: its best validation loss in 12 epochs")


# ---- A network that holds what was pruned later


def test_a_result_with_a_seed_that_was_pruned_later_says_so(tmp_path: Path) -> None:
    (tmp_path / "prune.yaml").write_text(
        "- {epoch: 1, op: germinate, slot: first, blueprint: mlp_small}\n"
        "- {epoch: 8, op: prune, slot: first}\n"
    )
    with pytest.warns(EsperWarning, match="^The returned network is that of epoch 8, the best"):
        grown = grow(
            controller=f"schedule:{tmp_path / 'prune.yaml'}",
            config=GrowthConfig(garden={"lifecycle": {"immediate": "all"}}),
            loss="classification",
            # From epoch 9 on the network unlearns.
            scheduler=lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 if epoch < 8 else -1),
        )
    assert grown.summary.kept_epoch == 8
    assert grown.model.slots["first"].blueprint == "mlp_small"
    (why,) = grown.why
    assert "the mlp_small at first (" in why
    assert "was pruned at epoch 8; keep='last' returns that of epoch 14 without it (" in why
    assert "grew mlp_small at first (pruned at epoch 8), epoch 8 of 14" in str(grown)


# ---- The twin and random numbers


def shuffled_run(*, twin: bool, own: bool, **options: Any) -> list[float]:
    torch.manual_seed(0)
    parts = [torch.cat(each) for each in zip(*batches(96), strict=True)]
    draws = torch.Generator().manual_seed(1) if own else None
    data = TensorDataset(*parts)
    grown = grow(
        Net(),
        train=DataLoader(data, 16, shuffle=True, generator=draws),
        val=DataLoader(data, 32, generator=draws),
        controller="random",
        twin=twin,
        **options,
    )
    return [record.val_loss for record in grown.history]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"budget": "1x"}], ids=["epochs", "budget"])
@pytest.mark.parametrize("own", [False, True], ids=["global", "own"])
def test_a_twin_does_not_change_the_order_of_shuffled_batches(
    own: bool, options: dict[str, Any]
) -> None:
    assert shuffled_run(twin=True, own=own, **options) == shuffled_run(
        twin=False, own=own, **options
    )
