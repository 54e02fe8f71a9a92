# SPDX-License-Identifier: Apache-2.0
"""Small random language models, as Hugging Face directories."""

import json
from pathlib import Path

import torch

from specvla_ros.models.config import LlamaConfig
from specvla_ros.models.llama import LlamaDecoder, llama_tensors
from specvla_ros.models.weights import save_weights

_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def write_text_model(directory: Path, *, positions: int = 256, end: int = 7) -> Path:
    """One of 50 words, two layers and tied embeddings; returns its directory.

    Args:
        directory: made if it is missing.
        positions: most that it can count.
        end: the token that ends an answer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shape = LlamaConfig(24, 40, 2, 4, 2, 6, vocab_size=50, max_position_embeddings=positions, tie_word_embeddings=True)
    torch.manual_seed(1)
    decoder = LlamaDecoder(shape)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_weights(directory / "model.safetensors", llama_tensors(decoder))
    names = (*_NAMES, "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings")
    config = {"model_type": "llama", "eos_token_id": end, **{name: getattr(shape, name) for name in names}}
    (directory / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(shape.vocab_size)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory
