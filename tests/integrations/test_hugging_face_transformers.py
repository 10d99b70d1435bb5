from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from esper.kasmina.garden import Garden
from esper.leyline.errors import EsperWarning, SlotError, UsageError
from tests.integrations.programs import ROOT, check_same, run_example, run_program
from tests.plots import EAGER, GROW_ONE, Script, raise_seed, shake

transformers = pytest.importorskip(
    "transformers", reason="needs the extra esper-grow[transformers]"
)
pytestmark = [
    pytest.mark.integrations,
    # What the Trainer and what it stands on have to say about themselves.
    pytest.mark.filterwarnings("ignore"),
]

from esper.integrations.hugging_face import GrowingCallback, growing_model  # noqa: E402


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    said = run_example("in_trainer.py", "--evaluations=12", f"--out={whole}")
    middle = whole / "checkpoint-133"
    # It was stopped while a seed was growing, of which the optimizer knows.
    state = torch.load(middle / "optimizer.pt", weights_only=True)
    assert any(name.startswith("seedbed.") for name in state["parameter_names"][0])
    again = run_example(
        "in_trainer.py", "--evaluations=12", f"--out={resumed}", f"--resume={middle}"
    )
    assert again == said
    assert said.startswith("after 12 evaluations: Garden(")
    ends = [folder / "checkpoint-228" for folder in (whole, resumed)]
    check_same(*(safetensors.torch.load_file(end / "model.safetensors") for end in ends))
    one, other = (torch.load(end / "optimizer.pt", weights_only=True) for end in ends)
    assert len(one["gardener"]["history"]) == 12
    check_same(one, other)


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=20,
            n_embd=8,
            n_layer=2,
            n_head=2,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def sentences(count: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(count)
    rows = torch.randint(20, (count, 9), generator=draw)
    # One column too many, which the Trainer drops because the model does not take it.
    return [{"input_ids": row, "labels": row, "note": torch.tensor(1)} for row in rows]


def garden_of(model: Any) -> Garden:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        return Garden(
            model,
            ["transformer.h.*"],
            {"input_ids": torch.ones(2, 9).long()},
            axes="BTC",
            config=EAGER,
        )


def trainer_of(growing: GrowingCallback, folder: Path, **options: Any) -> Any:
    made = {
        "model": growing.model,
        "optimizers": (growing.optimizer(torch.optim.AdamW, lr=0.01), None),
        **{name: options.pop(name) for name in ("model", "optimizers") if name in options},
    }
    arguments = transformers.TrainingArguments(
        str(folder),
        **{
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "num_train_epochs": 6,
            "per_device_train_batch_size": 8,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    return transformers.Trainer(
        args=arguments,
        train_dataset=sentences(32),
        eval_dataset=sentences(16),
        callbacks=[growing],
        **made,
    )


def test_growth_decides_whenever_the_trainer_evaluates(tmp_path: Path) -> None:
    growing = GrowingCallback(garden_of(gpt2()), 6, Script(GROW_ONE))
    trainer = trainer_of(growing, tmp_path)
    assert trainer.label_names == ["labels"]
    trainer.train()
    trainer.evaluate()
    garden = growing.gardener.garden
    assert [record.epoch for record in growing.history] == [1, 2, 3, 4, 5, 6]
    assert garden.slots["transformer.h.0"].alpha > 0
    losses = [record.train_loss for record in growing.history]
    assert losses[0] is not None
    assert losses[-1] < losses[0]
    # What a controller judges by was found out.
    signals = growing.gardener.signals()
    assert int(signals.train_samples) == int(signals.samples_per_epoch) == 32
    chance = pytest.approx(math.log(20))
    assert (int(signals.num_classes), float(signals.chance_loss)) == (20, chance)
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    # The Trainer divides by all nine tokens, of which the first is none to predict.
    assert logged[0] == pytest.approx(growing.history[0].val_loss * 8 / 9, rel=1e-4)
    # What the Trainer saved is all of it, tied weights too, and loads where it has not grown.
    trainer.save_model(str(tmp_path / "end"))
    saved = safetensors.torch.load_file(tmp_path / "end" / "model.safetensors")
    fresh = growing_model(garden_of(gpt2()))
    fresh.load_state_dict(saved)
    batch = {"input_ids": torch.stack([row["input_ids"] for row in sentences(5)])}
    expected = growing.model.eval()(**batch).logits
    assert torch.equal(fresh.eval()(**batch).logits, expected)
    head = fresh.garden.model.lm_head.weight
    assert head is fresh.garden.model.transformer.wte.weight


def test_the_host_is_not_saved_without_its_seeds(tmp_path: Path) -> None:
    garden = garden_of(gpt2())
    growing = GrowingCallback(garden, 6)
    growing.model.save_pretrained(tmp_path / "un-grown")
    raise_seed(garden, "transformer.h.0", blueprint="mlp_small")
    shake(garden)
    with pytest.raises(SlotError, match=r"save the garden .* or a plain copy \(garden\.bake\(\)\)"):
        growing.model.save_pretrained(tmp_path / "grown")
    assert not (tmp_path / "grown" / "model.safetensors").exists()


def test_the_trainer_takes_it_for_a_model_of_the_hosts_kind() -> None:
    model = gpt2()
    growing = growing_model(garden_of(model))
    assert type(growing).__name__ == "GrowingGPT2LMHeadModel"
    assert growing.config is model.config
    assert growing.main_input_name == "input_ids"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        growing.nothing_like_it  # noqa: B018


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"eval_strategy": "no"}, "eval_strategy='epoch'"),
        ({"optimizers": (None, None)}, r"optimizers=\(growing\.optimizer\(torch\.optim\.AdamW"),
        ({"model": "another"}, r"growing\.model"),
    ],
    ids=["evaluation", "optimizer", "model"],
)
def test_what_cannot_grow_is_refused(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    growing = GrowingCallback(garden_of(gpt2()), 6)
    if "model" in options:
        other = gpt2()
        options = {"model": other, "optimizers": (torch.optim.AdamW(other.parameters()), None)}
    trainer = trainer_of(growing, tmp_path, **options)
    with pytest.raises(UsageError, match=problem):
        trainer.train()


def test_a_run_that_is_shorter_than_its_horizon_is_said(tmp_path: Path) -> None:
    growing = GrowingCallback(garden_of(gpt2()), 9, "wait")
    with pytest.warns(EsperWarning, match="evaluate 2 times, fewer than the horizon of 9"):
        trainer_of(growing, tmp_path, num_train_epochs=2).train()


DISTRIBUTED = """
import os, sys, torch
from pathlib import Path
from tests.integrations.test_hugging_face_transformers import *
growing = GrowingCallback(garden_of(gpt2()), 6, Script(GROW_ONE))
trainer_of(growing, Path(sys.argv[1]), save_strategy="no").train()
torch.save(growing.gardener.garden.state_dict(), f"{sys.argv[1]}/{os.environ['RANK']}.pt")
"""


def test_two_processes_grow_the_same_network(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{DISTRIBUTED}")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run_program([*launch, str(program), str(tmp_path)])
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert any("seedbed.slots.0.seed" in name for name in one)
    check_same(one, other)
