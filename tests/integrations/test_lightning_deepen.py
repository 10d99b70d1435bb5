from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from esper.leyline.errors import UsageError
from tests.growth.depth.models import make_gpt, tokens
from tests.integrations.programs import ROOT, check_same, run_program

pytest.importorskip("lightning", reason="needs the extra esper-grow[lightning]")
pytestmark = [
    pytest.mark.integrations,
    # What Lightning and its callbacks have to say about a run of this size.
    pytest.mark.filterwarnings("ignore"),
]

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from esper.integrations.lightning import DeepenCallback  # noqa: E402

STEPS = 20


class Sentences(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index >= len(self):
            raise IndexError
        return tokens(index, 1)[0]


class Net(LightningModule):
    """A language model that Lightning trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_gpt(4)

    def forward(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("val_loss", self(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def fit(deepening: DeepenCallback, resume: Path | None = None, **options: Any) -> Net:
    module = Net()
    trainer = Trainer(
        **{
            "max_steps": STEPS,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 1,
            "callbacks": [deepening],
            **options,
        }
    )
    loaders = [DataLoader(Sentences(), 4) for _ in range(2)]
    trainer.fit(module, *loaders, ckpt_path=None if resume is None else str(resume))
    return module


# Checkpoints in mid-training are complete.
@pytest.mark.filterwarnings("error::esper.EsperWarning")
def test_a_trainer_deepens_and_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(folder: str, resume: Path | None = None) -> DeepenCallback:
        saving = ModelCheckpoint(tmp_path / folder, save_top_k=-1, every_n_epochs=1)
        deepening = DeepenCallback()
        # Saving is named first; Lightning puts it last.
        fit(deepening, resume, callbacks=[saving, deepening], enable_checkpointing=True)
        return deepening

    whole = run("whole")
    assert [event["step"] for event in whole.depth.history] == [4, 8]
    assert whole.depth.blocks == whole.depth.awake == {"net.blocks": 4}
    # Two steps an epoch: saved between the two growths.
    middle = tmp_path / "whole" / "epoch=2-step=6.ckpt"
    resumed = run("resumed", middle)
    assert resumed.depth.state_dict() == whole.depth.state_dict()
    one, other = (
        torch.load(tmp_path / folder / "epoch=9-step=20.ckpt", weights_only=True)
        for folder in ("whole", "resumed")
    )
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        check_same(one[part], other[part], part)


def test_batches_that_only_accumulate_are_no_steps() -> None:
    deepening = DeepenCallback(controller="slope")
    fit(deepening, max_steps=100, accumulate_grad_batches=2)
    assert deepening.depth.state_dict()["step"] == 100
    assert deepening.depth.is_finished
    once = DeepenCallback(at={}, start=1)
    fit(once, max_steps=3)
    # Twice the batches in a step.
    first = deepening.depth.history[0]
    assert first["flops"] / first["step"] == pytest.approx(2 * once.depth.flops / 3)


def test_what_cannot_be_is_refused() -> None:
    deepening = DeepenCallback(stacks=["net.layers"])
    with pytest.raises(UsageError, match=r"before trainer\.fit"):
        deepening.depth  # noqa: B018
    with pytest.raises(UsageError, match=r"'net\.layers' cannot be deepened"):
        fit(deepening)


DISTRIBUTED = """
import sys, torch
from tests.integrations.test_lightning_deepen import *
def refused():
    try:
        fit(DeepenCallback(), strategy="ddp", devices=2)
    except UsageError as error:
        assert "find_unused_parameters=True" in str(error)
    else:
        raise AssertionError("was not refused")
for name, strategy, options in (
    ("unused", "ddp_find_unused_parameters_true", {}),
    ("example", "ddp", {"example": tokens(0)}),
):
    deepening = DeepenCallback(**options)
    module = fit(deepening, devices=2, use_distributed_sampler=False, strategy=strategy)
    assert deepening.depth.awake == deepening.depth.blocks
    torch.save(module.state_dict(), f"{sys.argv[1]}/{name}{module.global_rank}.pt")
refused()
"""


def test_two_processes_deepen_the_same_network(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{DISTRIBUTED}")
    run_program([str(program), str(tmp_path)])
    # Every process sees all data here, so that both are what one alone would be.
    alone = fit(DeepenCallback()).state_dict()
    for name in ("unused", "example"):
        one, other = (
            torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for rank in (0, 1)
        )
        check_same(one, other)
        for key, value in one.items():
            torch.testing.assert_close(value, alone[key], rtol=0, atol=1e-4, msg=key)
