"""Grow inside a LightningModule: python examples/in_lightning.py, with esper-grow[lightning].

Stopped, it goes on with `--resume runs/lightning/epoch=29-step=570.ckpt` as if it had not.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import esper
from esper.integrations.lightning import GrowingCallback


class Digits(LightningModule):
    """As any other, but for the garden around its network."""

    def __init__(self) -> None:
        super().__init__()
        net = nn.Sequential(
            nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 10)
        )
        self.net = esper.Garden(net, slots=["1", "3"], example_input=torch.zeros(2, 64))

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        """Log the loss of a batch."""
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self):
        """Return the optimizer, which seeds will join."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=60, help="epochs to train (default: 60)")
parser.add_argument("--out", default="runs/lightning", help="folder of checkpoints")
parser.add_argument("--resume", help="checkpoint to go on from")
options = parser.parse_args()
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
data, held_out = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])
order = DistributedSampler(data, 1, 0)  # an order that depends on the epoch alone
growing = GrowingCallback()
saving = ModelCheckpoint(options.out, save_top_k=-1)
trainer = Trainer(max_epochs=options.epochs, callbacks=[growing, saving], logger=False)
module, val = Digits(), DataLoader(held_out, 200)
trainer.fit(module, DataLoader(data, 64, sampler=order), val, ckpt_path=options.resume)
print(f"after {growing.gardener.epoch} epochs: {module.net!r}")
