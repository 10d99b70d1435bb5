from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import esper
from esper.leyline.errors import UsageError
from tests.integrations.programs import ROOT, check_same, run_example, run_program
from tests.plots import EAGER, GROW_ONE, Script, make_batches, make_net

pytest.importorskip("lightning", reason="needs the extra esper-grow[lightning]")
pytestmark = [
    pytest.mark.integrations,
    # What Lightning and its callbacks have to say about a run of this size.
    pytest.mark.filterwarnings("ignore"),
]

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from esper.integrations.lightning import GrowingCallback  # noqa: E402

EPOCHS, MIDDLE = 20, "epoch=12-step=247.ckpt"
LAST = "epoch=19-step=380.ckpt"


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    said = run_example("in_lightning.py", f"--epochs={EPOCHS}", f"--out={whole}")
    middle = torch.load(whole / MIDDLE, weights_only=True)
    # It was stopped while a seed was growing, of which the optimizer knows.
    (state,) = middle["optimizer_states"]
    (names,) = state["parameter_names"]
    assert names[-1].startswith("seedbed.")
    again = run_example(
        "in_lightning.py", f"--epochs={EPOCHS}", f"--out={resumed}", f"--resume={whole / MIDDLE}"
    )
    assert again == said
    assert said.startswith(f"after {EPOCHS} epochs: Garden(")
    one, other = (torch.load(folder / LAST, weights_only=True) for folder in (whole, resumed))
    assert len(one["optimizer_states"][0]["gardener"]["history"]) == EPOCHS
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        check_same(one[part], other[part], part)


class Net(LightningModule):
    """A garden, and something beside it that learns too."""

    def __init__(self, *, is_grown: bool = True) -> None:
        super().__init__()
        net = make_net()
        example = torch.zeros(2, 4)
        self.net = esper.Garden(net, ["stem", "body"], example, config=EAGER) if is_grown else net
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def samples(seed: int) -> list[tuple[Tensor, Tensor]]:
    return [pair for batch in make_batches(4, seed=seed) for pair in zip(*batch, strict=True)]


def fit(module: LightningModule, growing: GrowingCallback, **options: Any) -> Trainer:
    val = options.pop("val", DataLoader(samples(9), 32))  # type: ignore[arg-type]
    trainer = Trainer(
        **{
            "max_epochs": 6,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 1,
            **options,
        }
    )
    trainer.fit(module, DataLoader(samples(5), 16), val)  # type: ignore[arg-type]
    return trainer


def test_growth_decides_whenever_the_trainer_validates() -> None:
    module, growing = Net(), GrowingCallback(Script(GROW_ONE))
    fit(module, growing, callbacks=[growing])
    assert growing.gardener.horizon == 6
    assert [record.epoch for record in growing.history] == [1, 2, 3, 4, 5, 6]
    assert all(record.train_loss is not None for record in growing.history)
    assert module.net.slots["stem"].blueprint == "mlp_small"
    assert module.net.slots["stem"].alpha > 0
    # What a controller judges by was found out.
    signals = growing.gardener.signals()
    assert int(signals.train_samples) == int(signals.samples_per_epoch) == len(samples(5))
    assert (int(signals.num_classes), float(signals.chance_loss)) == (3, pytest.approx(math.log(3)))
    # The new seed trains as the rest does, and is in the optimizer.
    assert all(part.training for part in module.net.modules())
    assert growing.gardener.carried is not None
    (group,) = growing.gardener.carried.optimizer.param_groups
    assert len(group["params"]) == len(list(module.parameters()))


def test_it_may_validate_within_an_epoch() -> None:
    module, growing = Net(), GrowingCallback(Script(GROW_ONE))
    fit(module, growing, callbacks=[growing], max_epochs=3, val_check_interval=0.5)
    assert growing.gardener.horizon == 6
    assert len(growing.history) == 6
    assert int(growing.gardener.signals().samples_per_epoch) == len(samples(5)) // 2


def test_a_checkpoint_saved_when_validation_ends_holds_the_decision(tmp_path: Path) -> None:
    module, growing = Net(), GrowingCallback(Script(GROW_ONE))
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, save_on_train_epoch_end=False)
    callbacks = [saving, growing]
    fit(module, growing, callbacks=callbacks, enable_checkpointing=True)
    saved = torch.load(tmp_path / "epoch=2-step=12.ckpt", weights_only=True)
    assert len(saved["optimizer_states"][0]["gardener"]["history"]) == 3
    # A fresh module takes it as it is.
    fresh = Net()
    fresh.load_state_dict(saved["state_dict"])
    assert fresh.net.slots["stem"].blueprint == "mlp_small"


def test_validating_by_hand_decides_nothing() -> None:
    module, growing = Net(), GrowingCallback(Script(GROW_ONE))
    trainer = fit(module, growing, callbacks=[growing], max_epochs=2)
    trainer.validate(module, DataLoader(samples(9), 32), verbose=False)  # type: ignore[arg-type]
    assert len(growing.history) == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"is_grown": False}, r"holds 0 gardens.*self\.net = esper\.Garden"),
        ({"val": None}, "never validates"),
        ({"val": [DataLoader([1]), DataLoader([1])]}, "has 2 validation loaders"),  # type: ignore[arg-type]
        ({"max_epochs": -1, "max_steps": -1, "max_time": "00:00:01:00"}, r"horizon=N"),
    ],
    ids=["garden", "validation", "loaders", "horizon"],
)
def test_what_cannot_grow_is_refused(options: dict[str, Any], problem: str) -> None:
    growing = GrowingCallback()
    with pytest.raises(UsageError, match=r"before trainer\.fit"):
        growing.history  # noqa: B018
    module = Net(is_grown=options.pop("is_grown", True))
    options = {"num_sanity_val_steps": 0, **options}
    if isinstance(options.get("val"), list):
        options["val"] = [DataLoader(samples(9), 32)] * 2  # type: ignore[arg-type]
        module.validation_step = lambda batch, _, dataloader_idx: None  # type: ignore[method-assign, misc]
    with pytest.raises(UsageError, match=problem):
        fit(module, growing, callbacks=[growing], **options)


def test_a_wrong_argument_is_refused_when_the_callback_is_made() -> None:
    with pytest.raises(TypeError, match="max_grow"):
        GrowingCallback(max_grow=2.0)  # type: ignore[call-arg]


DISTRIBUTED = """
import sys, torch
from tests.integrations.test_lightning import *
module, growing = Net(), GrowingCallback(Script(GROW_ONE))
fit(module, growing, callbacks=[growing], strategy="ddp", devices=2)
torch.save(module.state_dict(), f"{sys.argv[1]}/{module.global_rank}.pt")
"""


def test_two_processes_grow_the_same_network(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{DISTRIBUTED}")
    run_program([str(program), str(tmp_path)])
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert any("seedbed.slots.0.seed" in name for name in one)
    check_same(one, other)
