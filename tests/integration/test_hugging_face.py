"""Models of Hugging Face, where it is installed, grow on their own batches and losses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import esper
from esper.leyline.errors import EsperWarning, SlotError
from tests.plots import EAGER, GROW_ONE, Script, raise_seed, shake

transformers = pytest.importorskip(
    "transformers", reason="needs the extra esper-grow[transformers]"
)
pytestmark = pytest.mark.integrations


def bert(**options: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        **options,
    )
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def batches(labels: str) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    result = []
    for _ in range(3):
        tokens = torch.randint(50, (4, 9), generator=draw)
        targets = {
            "classes": torch.randint(3, (4,), generator=draw),
            "numbers": torch.randn(4, generator=draw),
            "many": torch.randint(2, (4, 3), generator=draw).float(),
            "tokens": tokens,
        }
        result.append(
            {
                "input_ids": tokens,
                "attention_mask": torch.ones_like(tokens),
                "labels": targets[labels],
            }
        )
    return result


CASES = [
    (lambda: bert(num_labels=3), "classes", "bert.encoder.layer.*"),
    (lambda: bert(num_labels=1), "numbers", "bert.encoder.layer.*"),
    (
        lambda: bert(num_labels=3, problem_type="multi_label_classification"),
        "many",
        "bert.encoder.layer.*",
    ),
    (gpt2, "tokens", "transformer.h.*"),
]


@pytest.mark.parametrize(("make", "labels", "slots"), CASES, ids=[case[1] for case in CASES])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_model_grows_on_its_own_loss(make: Any, labels: str, slots: str) -> None:
    model, data = make(), batches(labels)
    model.eval()
    with torch.no_grad():
        expected = torch.stack([model(**batch).loss for batch in data]).mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        grown = esper.grow(
            model,
            [slots],
            train=data,
            val=data,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0),
            controller=Script(GROW_ONE),
            config=esper.GrowthConfig(garden=EAGER, epochs=5),
        )
    assert grown.history[0].val_loss == pytest.approx(float(expected), rel=1e-3)
    assert {view.axes for view in grown.model.slots.values()} == {"BTC"}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_grown_model_is_not_saved_without_its_seeds(tmp_path: Path) -> None:
    model, batch = bert(num_labels=3), batches("classes")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        garden = esper.Garden(model, ["bert.encoder.layer.0"], batch, axes="BTC", config=EAGER)
    raise_seed(garden, "bert.encoder.layer.0", blueprint="lora")
    shake(garden)
    with pytest.raises(SlotError, match=r"save the garden .* or a plain copy \(garden\.bake\(\)\)"):
        model.save_pretrained(tmp_path / "inner")
    assert not (tmp_path / "inner" / "model.safetensors").exists()
    # The plain copy is what it was: of the host's class, with everything in its weights.
    baked: Any = garden.bake()
    torch.testing.assert_close(
        baked.eval()(**batch).logits, garden.eval()(**batch).logits, rtol=0, atol=1e-6
    )
    baked.save_pretrained(tmp_path / "baked")
    saved = safetensors.torch.load_file(tmp_path / "baked" / "model.safetensors")
    assert saved.keys() == baked.state_dict().keys()
    assert any(".grown." in name for name in saved)
