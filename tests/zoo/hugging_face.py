"""Networks of the `transformers` library, as small as their configurations allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.plain import WORDS, numbers, words
from tests.zoo.specimen import Specimen


def text() -> dict[str, Tensor]:
    tokens = words(4, 9)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def text_pair() -> dict[str, Tensor]:
    return {"input_ids": words(4, 9), "decoder_input_ids": words(4, 7)}


def image(size: int, channels: int = 3) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": numbers(4, channels, size, size)}


ENCODER = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "num_labels": 3,
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "use_cache": False}
DECODER.pop("num_labels")
SEEING = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 3,
}


def _one(
    name: str, kind: str, config: str, options: dict[str, Any], example: Callable[[], Any]
) -> Specimen:
    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**options))
        return made

    return Specimen(name, make, example)


HUGGING_FACE = (
    _one("BERT", "BertForSequenceClassification", "BertConfig", ENCODER, text),
    _one("RoBERTa", "RobertaForTokenClassification", "RobertaConfig", ENCODER, text),
    _one(
        "DistilBERT",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
        text,
    ),
    _one(
        "ALBERT",
        "AlbertForSequenceClassification",
        "AlbertConfig",
        {**ENCODER, "embedding_size": 8},
        text,
    ),
    _one(
        "ELECTRA",
        "ElectraForSequenceClassification",
        "ElectraConfig",
        {**ENCODER, "embedding_size": 8},
        text,
    ),
    _one(
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": WORDS,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "use_cache": False,
        },
        text,
    ),
    _one("LLaMA", "LlamaForCausalLM", "LlamaConfig", DECODER, text),
    _one("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", DECODER, text),
    _one("Gemma", "GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}, text),
    _one(
        "Mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1},
        text,
    ),
    _one(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "use_cache": False,
        },
        lambda: {"input_ids": words(4, 9)},
    ),
    _one(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "use_cache": False,
        },
        text_pair,
    ),
    _one(
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 32,
            "use_cache": False,
        },
        text_pair,
    ),
    _one("ViT", "ViTForImageClassification", "ViTConfig", SEEING, image(16)),
    _one("DeiT", "DeiTForImageClassification", "DeiTConfig", SEEING, image(16)),
    _one(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 2,
            "num_labels": 3,
        },
        image(16),
    ),
    _one(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 3,
        },
        image(16),
    ),
    _one(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"patch_size": 2, "hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2},
        image(16),
    ),
    _one(
        "ResNet",
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
        image(32),
    ),
    _one(
        "MobileNetV2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"depth_multiplier": 0.25, "num_labels": 3},
        image(32),
    ),
    _one(
        "CLIP",
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        {**SEEING, "projection_dim": 8},
        image(16),
    ),
    _one(
        "Wav2Vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **ENCODER,
            "conv_dim": (8, 8),
            "conv_stride": (4, 2),
            "conv_kernel": (8, 4),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
        },
        lambda: {"input_values": numbers(4, 400)},
    ),
    _one(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": WORDS,
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "use_cache": False,
        },
        lambda: {"input_features": numbers(4, 8, 32), "decoder_input_ids": words(4, 7)},
    ),
    _one(
        "PatchTST",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "prediction_length": 4,
            "d_model": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 32,
        },
        lambda: {"past_values": numbers(4, 32, 2)},
    ),
)
