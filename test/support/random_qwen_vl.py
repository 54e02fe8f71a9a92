# SPDX-License-Identifier: Apache-2.0
"""Small random Qwen2.5-VL checkpoints with NORA's, VLA-0's or StarVLA's files, written by transformers' own class."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from specvla_ros.lab.training.artifacts import fit_fast_tokenizer, save_fast_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{%- set n = namespace(images=0) -%}"
    "{%- if messages[0].role != 'system' -%}<|im_start|>system\nBe brief.<|im_end|>\n{%- endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{%- set n.images = n.images + 1 -%}"
    "{%- if add_vision_id -%}Picture {{ n.images }}: {% endif -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
FAST_IDS = 64


@dataclass(frozen=True)
class Shape:
    """Of a random model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    sections: tuple[int, int, int]
    vision_depth: int
    vision_hidden: int
    full_attention: tuple[int, ...]
    tied: bool


SHAPES = (
    Shape(48, 2, 4, 2, (2, 2, 2), 3, 32, (1,), tied=True),
    Shape(64, 3, 4, 1, (2, 3, 3), 2, 48, (0, 1), tied=False),
    Shape(40, 2, 5, 5, (1, 1, 2), 4, 32, (3,), tied=True),
)


def write_tokenizer(directory: Path, actions: int) -> Tokenizer:
    """Byte-level, a token per byte, special tokens behind them and then so many action tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(f"<robot_action_{i}>", special=False) for i in range(actions)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return tokenizer


def write_qwen_vl(directory: Path, shape: Shape, *, seed: int, actions: int = 0, penalty: float = 1.05) -> Path:
    """A Qwen2.5-VL without a policy's own files; returns its directory.

    Args:
        directory: made if it is missing.
        shape: of the model.
        seed: of its weights.
        actions: `<robot_action_…>` tokens in the vocabulary.
        penalty: `repetition_penalty` of its generation_config.json.
    """
    tokenizer = write_tokenizer(directory, actions)
    ids: dict[str, Any] = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    vocab = tokenizer.get_vocab_size() + 5  # padding rows
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": shape.hidden,
            "intermediate_size": 2 * shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "vocab_size": vocab,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(shape.sections)},
            "tie_word_embeddings": shape.tied,
        },
        vision_config={
            "depth": shape.vision_depth,
            "hidden_size": shape.vision_hidden,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": shape.hidden,
            "fullatt_block_indexes": list(shape.full_attention),
            "window_size": 112,
        },
        image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        video_token_id=vocab - 1,
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(seed)
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "repetition_penalty": penalty, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    pixels = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    return directory


def add_fast_tokenizer(directory: Path, *, horizon: int = 1, ids: int = FAST_IDS, scale: float = 10.0) -> None:
    """Of as many ids as the vocabulary has action tokens."""
    generator = np.random.default_rng(0)
    chunks = [generator.uniform(-1, 1, (horizon, 7)) for _ in range(300)]
    tokenizer = fit_fast_tokenizer(chunks, vocab_size=ids, scale=scale)
    save_fast_tokenizer(tokenizer, directory / "action_tokenizer")


def add_nora(directory: Path, *, ids: int = FAST_IDS, scale: float = 10.0) -> Path:
    """NORA's statistics and FAST tokenizer."""
    add_fast_tokenizer(directory, ids=ids, scale=scale)
    action = {"q01": [-1.0] * 6 + [0.0], "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    (directory / "norm_stats.json").write_text(json.dumps({"bridge": {"action": action}}))
    return directory


def add_vla0(directory: Path, *, dims: int = 7, config: str = "") -> Path:
    """VLA-0's statistics; the text of its config.yaml where one is given."""
    statistics = {"out_ori_act": {"min": [-0.5] * dims, "max": [1.0] * dims}}
    (directory / "dataset_stats.json").write_text(json.dumps(statistics))
    if config:
        (directory / "config.yaml").write_text(config)
    return directory


def add_starvla(run: Path, *, horizon: int) -> Path:
    """A training run of StarVLA's QwenFast on LIBERO's data around the model in its folder vlm/."""
    weights = load_file(run / "vlm" / "model.safetensors")
    (run / "checkpoints").mkdir()
    prefixed = {f"qwen_vl_interface.model.{name}": tensor for name, tensor in weights.items()}
    save_file(prefixed, run / "checkpoints" / "steps_1.safetensors")
    add_fast_tokenizer(run, horizon=horizon, scale=5.0)
    config = {
        "framework": {"name": "QwenFast", "action_model": {"future_action_window_size": horizon - 1}},
        "datasets": {"vla_data": {"data_mix": "libero_all"}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    action = {"min": [-1.0] * 7, "max": [1.0] * 7}
    (run / "dataset_statistics.json").write_text(json.dumps({"franka": {"action": action}}))
    return run
