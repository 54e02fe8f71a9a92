# SPDX-License-Identifier: Apache-2.0
"""Small random language models, as Hugging Face directories."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from specvla_ros.lab.training.artifacts import save_weights
from specvla_ros.models.config import DECODERS
from specvla_ros.models.decoder import PackedDecoder, decoder_tensors

_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def write_text_model(directory: Path, *, family: str = "llama", positions: int = 256, end: int = 7) -> Path:
    """One of 50 words, two layers and tied embeddings; returns its directory.

    Args:
        directory: made if it is missing.
        family: `model_type` of its config.json.
        positions: most that it can count.
        end: the token that ends an answer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shape = replace(
        DECODERS[family],
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=50,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    decoder = PackedDecoder(shape)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_weights(directory / "model.safetensors", decoder_tensors(decoder))
    names = (*_NAMES, "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings")
    config = {"model_type": family, "eos_token_id": end, **{name: getattr(shape, name) for name in names}}
    (directory / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(shape.vocab_size)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory
