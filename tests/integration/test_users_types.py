"""What a PyTorch user brings on the first day is grown as it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline.errors import EsperError, EsperWarning, UsageError
from esper.leyline.stages import SeedStage
from esper.nissa.schema import EpochRow
from tests.plots import EAGER, GROW_ONE, Script, same

FEATURES = 6


def data(count: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def loaders(*tensors: Tensor, size: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=size)


def net(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, outputs))


def grow(model: nn.Module, train: Any, val: Any, slots: Any = ("0",), **options: Any) -> Any:
    script = Script(GROW_ONE)
    options = {"epochs": 5, "config": esper.GrowthConfig(garden=EAGER), **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Nothing grew", category=EsperWarning)
        warnings.filterwarnings("ignore", message="Nothing that grew", category=EsperWarning)
        warnings.filterwarnings("ignore", message=".*too few to grow", category=EsperWarning)
        warnings.filterwarnings("ignore", message=".*still being blended", category=EsperWarning)
        return esper.grow(model, list(slots), train=train, val=val, controller=script, **options)


# ------------------------------------------------------------------------------------- criteria


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy, None])
def test_a_criterion_trains_as_the_name_does(loss: Any) -> None:
    x, y = data()
    batches = loaders(x, y)
    told = grow(net(), batches, batches, loss="classification")
    mine = grow(net(), batches, batches, loss=loss)
    assert same(told.model.state_dict(), mine.model.state_dict())
    assert [r.val_score for r in told.history] == [r.val_score for r in mine.history]


def test_numbers_and_many_labels_grow() -> None:
    x, _ = data()
    numbers, many = x[:, :1] * 2, (x[:, :3] > 0).float()
    grown = grow(net(1), loaders(x, numbers), loaders(x, numbers), loss=nn.MSELoss())
    assert grown.summary.val_score < 0
    grown = grow(net(3), loaders(x, many), loaders(x, many), loss=nn.BCEWithLogitsLoss())
    assert 0 < grown.summary.val_score <= 100


# --------------------------------------------------------------------------- batches and outputs


class TwoTowers(nn.Module):
    """Two inputs, one of them optional in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(FEATURES, 8)
        self.right = nn.Linear(3, 8)
        self.both = nn.ReLU()
        self.head = nn.Linear(8, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(self.both(self.left(left) + self.right(right)))


class Speaking(nn.Module):
    """As models of Hugging Face are: dicts in, an object with loss and logits out."""

    class Output(dict[str, Any]):
        @property
        def loss(self) -> Tensor | None:
            return self.get("loss")

        @property
        def logits(self) -> Tensor:
            return self["logits"]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        hidden = self.layer(self.embed(input_ids), src_mask=mask, is_causal=True)
        found = self.Output(logits=self.head(hidden))
        if labels is not None:
            scores, wanted = found["logits"][:, :-1], labels[:, 1:]
            found["loss"] = nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())
        return found


def test_a_model_of_several_inputs_takes_them_from_the_batch() -> None:
    x, y = data()
    grown = grow(TwoTowers(), loaders(x, x[:, :3], y), loaders(x, x[:, :3], y), ["both"])
    assert len(grown.history) == 5
    named = [{"left": left, "right": right, "y": y} for left, right, y in loaders(x, x[:, :3], y)]
    again = grow(TwoTowers(), named, named, ["both"])
    assert len(again.history) == 5


def spoken(count: int = 12) -> list[dict[str, Tensor]]:
    tokens = torch.randint(11, (count, 7), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, 5:] = -100
    parts = zip(tokens.split(4), labels.split(4), strict=True)
    return [
        {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": other}
        for one, other in parts
    ]


def test_a_model_with_a_loss_of_its_own_trains_on_it_and_is_measured_by_sample() -> None:
    torch.manual_seed(0)
    model = Speaking()
    batches = spoken()
    with torch.no_grad():
        expected = torch.stack([model(**batch).loss for batch in batches]).mean()
    grown = grow(model, batches, batches, ["layer"], optimizer=lambda p: SGD(p, 0.0))
    # Every sample has as many words that count: the mean of their losses is the model's own.
    assert grown.history[0].val_loss == pytest.approx(float(expected), rel=1e-4)
    assert grown.history[0].train_loss == pytest.approx(float(expected), rel=1e-4)


def test_a_loss_of_its_own_that_cannot_be_taken_apart_is_refused() -> None:
    class Odd(Speaking):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            if "loss" in found:
                found["loss"] = found["loss"] * 3 + 1
            return found

        forward.__signature__ = __import__("inspect").signature(Speaking.forward)  # type: ignore[attr-defined]

    with pytest.raises(UsageError, match="cannot be computed for each sample"):
        grow(Odd(), spoken(), spoken(), ["layer"])
    with pytest.raises(UsageError, match="dicts with labels"):
        grow(net(), loaders(*data()), loaders(*data()), loss="model")


# ------------------------------------------------------------------------ optimizers, schedules


def test_an_optimizer_may_be_an_instance_and_its_twin_has_its_own() -> None:
    x, y = data()
    batches = loaders(x, y)
    config = esper.GrowthConfig(garden=EAGER, epochs=5, twin=True)
    factory = grow(net(), batches, batches, optimizer=lambda p: AdamW(p, 0.01), config=config)
    model = net()
    optimizer = AdamW(model.parameters(), 0.01)
    instance = grow(model, batches, batches, optimizer=optimizer, config=config)
    assert same(factory.model.state_dict(), instance.model.state_dict())
    assert same(factory.twin.state_dict(), instance.twin.state_dict())
    # It goes on being the user's own: the seed has joined it.
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in instance.model.parameters()} == held


@pytest.mark.parametrize("every", ["epoch", "batch"])
def test_a_schedule_moves_on_by_epochs_or_by_batches(every: Any) -> None:
    x, y = data()
    batches = loaders(x, y)
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    steps = 5 if every == "epoch" else 15
    schedule = CosineAnnealingLR(optimizer, steps)
    grow(model, batches, batches, optimizer=optimizer, scheduler=schedule, scheduler_every=every)
    assert schedule.last_epoch == steps
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_a_one_cycle_schedule_runs_beside_a_twin() -> None:
    x, y = data()
    batches = loaders(x, y)
    config = esper.GrowthConfig(garden=EAGER, epochs=5, twin=True)
    grown = grow(
        net(),
        batches,
        batches,
        config=config,
        optimizer=lambda p: SGD(p, 0.1, momentum=0.9),
        scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=15),
        scheduler_every="batch",
    )
    assert grown.twin is not None


# ------------------------------------------------------------------------------- a frozen model


def test_a_frozen_model_is_grown_by_adapters_alone() -> None:
    x, y = data()
    # A score that any change of an output shows in: a seed without effect would be dropped.
    batches = loaders(x, nn.functional.one_hot(y, 2).float())
    model = net()
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    how = {"optimizer": lambda p: SGD(p, 0.1), "keep": "last", "loss": "regression"}
    grown = grow(model, batches, batches, **how)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert same(after, before)
    slot = grown.model.slots["0"]
    assert (slot.stage, slot.alpha) == (SeedStage.HOLDING, 1.0)
    assert grown.summary.parameters_before == 0
    assert grown.summary.parameters_after == slot.parameters > 0
    moved = [p for p in grown.model.slot_parameters("0") if p.abs().sum() > 0]
    assert moved


def test_to_leave_out_what_is_frozen_is_answered_with_what_to_do() -> None:
    x, y = data()
    model = net()
    model.requires_grad_(False)
    with pytest.raises(UsageError, match=r"all frozen \(pass them on"):
        grow(
            model,
            loaders(x, y),
            loaders(x, y),
            optimizer=lambda p: SGD([each for each in p if each.requires_grad], 0.1),
        )


def test_statistics_that_move_in_a_frozen_model_are_told() -> None:
    x, y = data()
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.requires_grad_(False)
    with pytest.warns(EsperWarning, match="running statistics still change"):
        grow(model, loaders(x, y), loaders(x, y), optimizer=lambda p: SGD(p, 0.1))


# --------------------------------------------------------------------------- decisions in one pass


def test_decisions_follow_steps_in_a_single_pass() -> None:
    x, y = data(48)
    batches = loaders(x, y, size=4)
    grown = grow(net(), batches, batches, decide_every=3, epochs=4)
    assert len(grown.history) == 4

    def stream() -> Iterator[Any]:
        yield from batches

    again = grow(net(), stream(), batches, decide_every=3, epochs=4)
    assert same(grown.model.state_dict(), again.model.state_dict())


def test_by_default_one_pass_is_taken_and_a_stream_may_end_early() -> None:
    x, y = data(48)
    batches = loaders(x, y, size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        grown = esper.grow(net(), ["0"], train=batches, val=batches, decide_every=3)
    assert len(grown.history) == 4
    with pytest.warns(EsperWarning) as said:
        short = grow(net(), iter(list(batches)), batches, decide_every=3, epochs=9, config=None)
    assert any("ended after 4 of 9 decisions (3 steps each)" in str(one.message) for one in said)
    assert len(short.history) == 4
    with pytest.raises(UsageError, match="train has no length"):
        esper.grow(net(), ["0"], train=iter([]), val=batches, decide_every=3)


# ----------------------------------------------------------------------------- what is wrong


def many(kind: type) -> DataLoader[Any]:
    x, _ = data()
    labels = x[:, :2] > 0
    return loaders(x, labels.float() if kind is float else labels.long())


def too_short(optimizer: Any) -> OneCycleLR:
    return OneCycleLR(optimizer, 0.1, total_steps=5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": 3}, "the model must be a torch.nn.Module, got int; give the network itself"),
        ({"model": nn.Linear}, "got the class Linear; write Linear(...)"),
        ({"on_epoch": 3}, "on_epoch must be a function of an EpochRecord, got 3; write on_epoch="),
        ({"slots": None}, "slots must be a list of submodule names, got NoneType"),
        ({"train": 3}, "train must be an iterable of batches"),
        ({"val": None}, "val must be an iterable of batches"),
        ({"val": []}, "the validation set is empty"),
        ({"train": []}, "the training set is empty"),
        ({"train": TensorDataset(*data())}, "of single samples; wrap it in a DataLoader"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss"),
        ({"loss": nn.MSELoss()}, "the same shape"),
        ({"loss": "multilabel"}, "'multilabel' needs a target for each output"),
        ({"val": many(float)}, "loss='multilabel'"),
        ({"val": many(int), "loss": nn.BCEWithLogitsLoss()}, "targets are torch.int64"),
        ({"optimizer": "adam"}, "got 'adam'; write optimizer=torch.optim.AdamW(model.parameters()"),
        ({"optimizer": lambda p: None}, "got NoneType; write optimizer=lambda parameters: torch"),
        ({"optimizer": lambda p: SGD(p, lr=-1)}, "the optimizer cannot be made"),
        ({"optimizer": SGD([nn.Parameter(torch.zeros(1))], 0.1)}, "that are not the model's"),
        ({"scheduler": 3}, "got 3; write scheduler=lambda optimizer: CosineAnnealingLR("),
        ({"scheduler": lambda o: None}, "got NoneType; write scheduler=lambda optimizer: Cosine"),
        ({"scheduler_every": "batch"}, "needs a scheduler"),
        ({"scheduler_every": "step"}, "unknown scheduler_every 'step'"),
        (
            {"scheduler": too_short, "scheduler_every": "batch"},
            "write total_steps=27",
        ),
        ({"sinks": ["wandb"]}, "out="),
        ({"device": "gpu"}, "no device is called 'gpu'; use 'auto', 'cpu', 'cuda'"),
        ({"device": 3.5}, "no device is called 3.5"),
        ({"epochs": "ten"}, "epochs"),
        ({"epochs": 0}, "epochs"),
        ({"controller": 3}, "a controller must be a name or an object"),
        ({"controller": "heuristics"}, "did you mean 'heuristic'?"),
        ({"axes": "XYZ"}, "axes cannot be 'XYZ'"),
        ({"max_seeds": -1}, "max_seeds"),
        ({"decide_every": -2}, "decide_every"),
    ],
)
def test_each_mistake_is_one_line(change: dict[str, Any], words: str) -> None:
    batches = loaders(*data())
    options: dict[str, Any] = {
        "model": net(),
        "slots": ["0"],
        "train": batches,
        "val": batches,
        "epochs": 9,
        "controller": "wait",
        **change,
    }
    model, slots = options.pop("model"), options.pop("slots")
    with pytest.raises(EsperError) as error:
        esper.grow(model, slots, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_is_shown_by_sinks_of_its_owner(tmp_path: Path) -> None:
    class Noting:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def start(self, context: Any) -> None: ...

        def write(self, records: Any) -> None:
            self.steps += [record.step for record in records if isinstance(record, EpochRow)]

        def mark(self) -> dict[str, Any]:
            return {}

        def close(self, status: str) -> None: ...

    x, y = data()
    sink = Noting()
    grow(net(), loaders(x, y), loaders(x, y), out=tmp_path / "run", sinks=[sink])
    assert sink.steps == [1, 2, 3, 4, 5]
    with pytest.raises(UsageError, match="sink"):
        grow(net(), loaders(x, y), loaders(x, y), out=tmp_path / "other", sinks=["nowhere"])
    assert not (tmp_path / "other").exists()


def test_a_device_may_be_a_name() -> None:
    x, y = data()
    for device in ("cpu", torch.device("cpu"), "auto" if not torch.cuda.is_available() else "cpu"):
        assert grow(net(), loaders(x, y), loaders(x, y), device=device).history
