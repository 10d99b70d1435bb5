"""Grow a model of Hugging Face in its Trainer: needs esper-grow[transformers].

Stopped, it goes on with `--resume runs/trainer/checkpoint-380` as if it had not.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import esper
from esper.integrations.hugging_face import GrowingCallback

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", default="runs/trainer", help="folder of checkpoints")
parser.add_argument("--resume", help="checkpoint to go on from")
parser.add_argument("--evaluations", type=int, default=40, help="one follows every 19 steps")
options = parser.parse_args()
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
data = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, digits.target, strict=True)]
model = ViTForImageClassification(
    ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=8, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=8, num_labels=10,
    )
)  # fmt: skip
example = {"pixel_values": images[:4]}
slots = esper.suggest_slots(model, example)
garden = esper.Garden(model, slots, example)
growing = GrowingCallback(garden, horizon=options.evaluations, controller="heuristic")
trainer = Trainer(
    growing.model,
    TrainingArguments(
        options.out, max_steps=19 * options.evaluations, eval_strategy="steps", eval_steps=19,
        save_steps=19, per_device_train_batch_size=64, per_device_eval_batch_size=200,
        report_to="none", use_cpu=True,
    ),
    train_dataset=data[:1200],
    eval_dataset=data[1200:],
    callbacks=[growing],
    # Seeds join it by themselves; its state is saved by name.
    optimizers=(growing.optimizer(torch.optim.AdamW, lr=3e-3), None),
)  # fmt: skip
trainer.train(resume_from_checkpoint=options.resume)
print(f"after {growing.gardener.epoch} evaluations: {growing.gardener.garden!r}")
