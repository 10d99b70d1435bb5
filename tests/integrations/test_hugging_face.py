from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import esper
from esper.leyline.errors import UsageError
from tests.integrations.programs import ROOT, check_same, run_program

transformers = pytest.importorskip(
    "transformers", reason="needs the extra esper-grow[transformers]"
)
pytestmark = [
    pytest.mark.integrations,
    # What the Trainer and what it stands on have to say about themselves.
    pytest.mark.filterwarnings("ignore"),
]

from esper.growth.depth.stacks import find  # noqa: E402
from esper.integrations.hugging_face import DeepenCallback  # noqa: E402

TOKENS = torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": TOKENS}
PAIR = {"input_ids": TOKENS, "labels": TOKENS}
PICTURES = {"pixel_values": IMAGES}
SMALL = {
    **{"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4},
    **{"num_attention_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}
SEEN = {"image_size": 32, "hidden_dropout_prob": 0.0}

MODELS: dict[str, Any] = {
    "GPT2LMHeadModel": ({"vocab_size": 20, "n_embd": 8, "n_layer": 4, "n_head": 2}, TEXT),
    "LlamaForCausalLM": (SMALL, TEXT),
    "Gemma2ForCausalLM": ({**SMALL, "num_key_value_heads": 1, "head_dim": 8}, TEXT),
    "MixtralForCausalLM": ({**SMALL, "num_key_value_heads": 1, "num_local_experts": 2}, TEXT),
    "BertForMaskedLM": (SMALL, TEXT),
    "T5ForConditionalGeneration": (
        {
            **{"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2},
            **{"num_layers": 5, "num_decoder_layers": 4, "decoder_start_token_id": 0},
        },
        PAIR,
    ),
    "BartForConditionalGeneration": (
        {
            **{"vocab_size": 20, "d_model": 16, "encoder_layers": 4, "decoder_layers": 4},
            **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
            **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32},
            **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
            **{"decoder_start_token_id": 0, "forced_eos_token_id": 1},
        },
        PAIR,
    ),
    "ViTForImageClassification": (
        {
            **{"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32},
            **{"num_hidden_layers": 4, "num_attention_heads": 2},
        },
        PICTURES,
    ),
    "SwinForImageClassification": (
        {
            **{"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4},
            **{"depths": [2, 4], "num_heads": [2, 2]},
        },
        PICTURES,
    ),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [8, 16], "depths": [2, 4], "num_stages": 2},
        PICTURES,
    ),
    "ResNetForImageClassification": (
        {"hidden_sizes": [8, 16], "depths": [2, 4], "embedding_size": 8, "layer_type": "basic"},
        PICTURES,
    ),
}
STACKS = {
    "GPT2LMHeadModel": {"transformer.h": 4},
    "T5ForConditionalGeneration": {"encoder.block": 4, "decoder.block": 3},
    "BartForConditionalGeneration": {"model.encoder.layers": 4, "model.decoder.layers": 4},
    # The first block of the second stage has a stride.
    "ResNetForImageClassification": {
        "resnet.encoder.stages.0.layers": 2,
        "resnet.encoder.stages.1.layers": 3,
    },
}


def make(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**MODELS[name][0], **options}))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("name", MODELS)
def test_a_save_in_mid_training_is_the_smaller_network(name: str, tmp_path: Path) -> None:
    model, batch = make(name), MODELS[name][1]
    keys, config = list(model.state_dict()), copy.deepcopy(model.config.to_dict())
    depth = esper.Deepen(model, sgd(model), example=batch)
    assert depth.blocks == STACKS.get(name, depth.blocks)
    assert depth.awake != depth.blocks
    with depth.export():
        model.save_pretrained(tmp_path)
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    small = type(model).from_pretrained(tmp_path)
    assert len(list(small.parameters())) < len(list(model.parameters()))
    with torch.no_grad():
        expected, found = (one.eval()(**batch).logits for one in (model, small))
    assert torch.equal(expected, found)


@pytest.mark.filterwarnings("error::esper.EsperWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_model_does_not_look_trained_and_a_trained_one_does(name: str) -> None:
    model, batch = make(name), MODELS[name][1]
    optimizer = sgd(model)
    depth = esper.Deepen(model, optimizer, total_steps=100)
    model(**batch).logits.square().mean().backward()
    optimizer.step()
    depth.step()
    trained = make(name)
    trained(**batch).logits.square().mean().backward()
    sgd(trained).step()
    model = make(name)
    model.load_state_dict(trained.state_dict())
    depth = esper.Deepen(model, sgd(model), total_steps=100, example=batch)
    with pytest.warns(esper.EsperWarning, match="they look trained"):
        depth.step()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_grown_model_is_saved_as_deep_as_it_is(name: str, tmp_path: Path) -> None:
    model = make(name)
    asked = {"start": 1, "at": {0.5: 2}}
    grown = esper.grow(model, train=[PAIR] * 4, val=[PAIR], epochs=3, deepen=asked, keep="last")
    assert grown.model is model
    assert model.config.num_hidden_layers == 2
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(**TEXT).logits, model(**TEXT).logits)


def test_blocks_that_alternate_keep_their_period() -> None:
    for name, period in (("Gemma2ForCausalLM", 2), ("SwinForImageClassification", 2)):
        stacks = find(make(name), (), MODELS[name][1]).stacks.values()
        assert [stack.period for stack in stacks] == [period]


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_text_is_generated_while_blocks_sleep(name: str) -> None:
    model = make(name)
    depth = esper.Deepen(model, sgd(model), example=TEXT)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    found = model.eval().generate(TOKENS, **options)
    with depth.export():
        assert torch.equal(model.generate(TOKENS, **options), found)


def test_a_shallow_checkpoint_is_deepened_further(tmp_path: Path) -> None:
    small = make("LlamaForCausalLM", num_hidden_layers=3)
    small.save_pretrained(tmp_path)
    model = make("LlamaForCausalLM", num_hidden_layers=12)
    depth = esper.Deepen(model, sgd(model), start=3, example=TEXT)
    with depth.export():
        model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        expected, found = (one.eval()(**TEXT).logits for one in (small, model))
    assert torch.equal(expected, found)
    assert depth.blocks == {"model.layers": 12}


# -- the Trainer ----------------------------------------------------------------------------------


def sentences(count: int) -> list[dict[str, Tensor]]:
    rows = torch.randint(20, (count, 9), generator=torch.Generator().manual_seed(count))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(model: Any, callback: DeepenCallback, folder: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder),
        **{
            "save_strategy": "steps",
            "save_steps": 10,
            "max_steps": 40,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=sentences(64),
        eval_dataset=sentences(8),
        callbacks=[callback],
    )


# Checkpoints in mid-training are complete.
@pytest.mark.filterwarnings("error::esper.EsperWarning")
def test_a_trainer_deepens_and_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = DeepenCallback()
    model = make("GPT2LMHeadModel")
    trainer_of(model, whole, tmp_path / "whole").train()
    depth = whole.depth
    assert [(event["step"], event["awake"]["transformer.h"]) for event in depth.history] == [
        (8, 2),
        (16, 4),
    ]
    plain = make("GPT2LMHeadModel")
    counted = esper.Deepen(plain, sgd(plain), start=1, example=sentences_batch(4))
    assert depth.history[0]["flops"] == 8 * 2 * counted._compute.per_step({"transformer.h": 1})
    resumed = DeepenCallback()
    trainer = trainer_of(make("GPT2LMHeadModel"), resumed, tmp_path / "resumed")
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    assert resumed.depth.state_dict() == depth.state_dict()
    ends = [tmp_path / part / "checkpoint-40" for part in ("whole", "resumed")]
    check_same(*(safetensors.torch.load_file(end / "model.safetensors") for end in ends))
    check_same(*(torch.load(end / "optimizer.pt", weights_only=True) for end in ends))


def sentences_batch(count: int) -> dict[str, Tensor]:
    rows = torch.stack([row["input_ids"] for row in sentences(64)[:count]])
    return {"input_ids": rows, "labels": rows}


def test_controllers_see_the_losses_that_are_logged(tmp_path: Path) -> None:
    callback = DeepenCallback(controller="plateau")
    options = {"max_steps": 200, "gradient_accumulation_steps": 1, "learning_rate": 0.0}
    trainer_of(make("GPT2LMHeadModel"), callback, tmp_path, save_strategy="no", **options).train()
    # Nothing is learned without a learning rate.
    assert [event["step"] for event in callback.depth.history] == [20, 40]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_activation_checkpointing(is_reentrant: bool, tmp_path: Path) -> None:
    losses = []
    for is_checkpointed in (False, True):
        callback = DeepenCallback()
        trainer = trainer_of(
            make("LlamaForCausalLM"),
            callback,
            tmp_path,
            save_strategy="no",
            max_steps=10,
            gradient_checkpointing=is_checkpointed,
            gradient_checkpointing_kwargs={"use_reentrant": is_reentrant},
        )
        trainer.train()
        assert callback.depth.is_finished
        losses.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 10}, "load_best"),
        ({"restore_callback_states_from_checkpoint": True}, "DeepenCallback restores itself"),
        ({"optim": "adamw_torch", "learning_rate": 0.1, "stacks": ["h"]}, "'h' cannot be deepened"),
    ],
    ids=["best", "restore", "stacks"],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    stacks = {"stacks": options.pop("stacks")} if "stacks" in options else {}
    callback = DeepenCallback(**stacks)
    with pytest.raises(UsageError, match=r"before trainer\.train\(\)"):
        callback.depth  # noqa: B018
    trainer = trainer_of(make("GPT2LMHeadModel"), callback, tmp_path, **options)
    with pytest.raises(UsageError, match=problem):
        trainer.train()


DISTRIBUTED = """
import os, sys, torch
from pathlib import Path
from tests.integrations.test_hugging_face import *
out = Path(sys.argv[1])
callback, model = DeepenCallback(), make("GPT2LMHeadModel")
trainer_of(model, callback, out, save_strategy="no", max_steps=10).train()
assert callback.depth.is_finished
try:
    callback = DeepenCallback()
    trainer_of(make("GPT2LMHeadModel"), callback, out, ddp_find_unused_parameters=False).train()
except UsageError as error:
    assert "ddp_find_unused_parameters=True" in str(error)
else:
    raise AssertionError("was not refused")
torch.save(model.state_dict(), out / f"{os.environ['RANK']}.pt")
"""


def test_two_processes_deepen_the_same_network(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{DISTRIBUTED}")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run_program([*launch, str(program), str(tmp_path)])
    check_same(*(torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)))


# -- accelerate -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::esper.EsperWarning")
def test_a_loop_with_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def run(stop: int, *, resume: bool = False) -> Any:
        # It is one for all of a process, and a Trainer may have made it.
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
        model = make("GPT2LMHeadModel")
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        depth = esper.Deepen(model, optimizer, total_steps=10, batches_per_step=2)
        accelerator.register_for_checkpointing(depth)
        first = 0
        if resume:
            accelerator.load_state(str(tmp_path / "state"))
            first = 12
        for number in range(first, 20):
            rows = torch.stack([row["input_ids"] for row in sentences(4 + number)])
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=rows, labels=rows).loss)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    depth.step()
            if number == stop:
                accelerator.save_state(str(tmp_path / "state"))
        return accelerator.unwrap_model(model), depth

    model, depth = run(stop=11)
    again, other = run(stop=-1, resume=True)
    assert depth.history == other.history
    assert [event["step"] for event in depth.history] == [2, 4]
    check_same(dict(model.state_dict()), dict(again.state_dict()))
