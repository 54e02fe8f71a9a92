# SPDX-License-Identifier: Apache-2.0
"""The untrained nano policy: OpenVLA's architecture and files, small enough for two CPU cores."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

from specvla_ros.lab.files import write_json
from specvla_ros.lab.plans import NanoShape
from specvla_ros.lab.training.artifacts import save_weights
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.models.families.openvla.model import OpenVLA

_PAD_ROWS = 64
_BINS = 256


def write_nano(
    directory: Path, shape: NanoShape, instructions: Sequence[str], norm_stats: Mapping[str, Any], *, seed: int
) -> None:
    """Writes an untrained policy of OpenVLA's architecture and files, small enough to train on two CPU cores.

    `instructions` are all that it will be trained on, in lower case; their words are the vocabulary.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _word_tokenizer(instructions)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = _nano_config(shape, tokenizer.get_vocab_size() + _BINS + _PAD_ROWS, norm_stats)
    write_json(directory / "config.json", config | {"instructions": list(instructions)})
    write_json(directory / "preprocessor_config.json", _preprocessor_config(shape))
    model = OpenVLA(read_config(directory))
    _initialise(model, torch.Generator().manual_seed(seed))
    save_weights(directory / "model.safetensors", model.checkpoint_tensors())


def teach_instructions(directory: Path, instructions: Sequence[str], *, seed: int) -> None:
    """Replaces the instructions of such a policy; their new words get untrained rows before the action tokens."""
    tokenizer, config = (json.loads((directory / name).read_text()) for name in ("tokenizer.json", "config.json"))
    vocab = tokenizer["model"]["vocab"]
    known, new = len(vocab), sorted(_words(instructions) - set(vocab))
    vocab |= {word: known + i for i, word in enumerate(new)}
    config["text_config"]["vocab_size"] += len(new)
    weights, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        rows = weights[name]
        fresh = torch.randn(len(new), rows.shape[1], generator=generator) * rows[:known].float().std()
        weights[name] = torch.cat((rows[:known], fresh.to(rows.dtype), rows[known:]))
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "config.json", config | {"instructions": list(instructions)})
    save_weights(directory / "model.safetensors", weights)


def _words(texts: Sequence[str]) -> set[str]:
    return {word for text in texts for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text)}


def _word_tokenizer(instructions: Sequence[str]) -> Tokenizer:
    """Tokens are whole words and punctuation marks, so that an instruction takes few rows."""
    words = _words(["In: What action should the robot take to ?\nOut:", *instructions])
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "▁", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _nano_config(shape: NanoShape, vocab: int, norm_stats: Mapping[str, Any]) -> dict[str, Any]:
    vision = {
        "embed_dim": shape.vision_dim,
        "depth": shape.vision_depth,
        "num_heads": shape.vision_dim // shape.head_dim,
        "patch_size": shape.patch_size,
        "class_token": False,
        "mlp_ratio": 3.0,
    }
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "vision_backbone_id": "siglip-vit-so400m",
        "llm_backbone_id": "llama2-7b-pure",
        "use_fused_vision_backbone": False,
        "timm_model_ids": ["vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None],
        "tiny_timm_model_kwargs": [vision],
        "image_sizes": [shape.image_size],
        "image_resize_strategy": "resize-naive",
        "n_action_bins": _BINS,
        "pad_to_multiple_of": _PAD_ROWS,
        "text_config": {
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": int(2.5 * shape.hidden_size),
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.hidden_size // shape.head_dim,
            "vocab_size": vocab,
            "max_position_embeddings": 512,
        },
        "norm_stats": dict(norm_stats),
    }


def _preprocessor_config(shape: NanoShape) -> dict[str, Any]:
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": False,
        "input_sizes": [[3, shape.image_size, shape.image_size]],
        "interpolations": ["bicubic"],
        "means": [[0.5] * 3],
        "stds": [[0.5] * 3],
        "tvf_letterbox_fill": None,
    }


@torch.no_grad()
def _initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Normal with std 1 / sqrt(inputs), smaller for matrices that end a residual branch; norms 1, biases 0.

    Llama's 0.02 suits its 4096 inputs; with a few hundred inputs, attention would learn nothing for thousands of steps.
    Patches start with sines of their position (Beyer et al. 2022, arXiv 2205.01580), so that it need not be learned.
    """
    blocks = sum(".qkv.weight" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if name.endswith("pos_embed"):
            parameter.copy_(_positions_in_two_dimensions(parameter.shape[1], parameter.shape[2]))
            continue
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        scale = parameter[0].numel() ** -0.5
        if "embed_tokens" in name:
            scale = 0.5
        elif any(part in name for part in (".out.", ".down.", "attn.proj.", "mlp.fc2.")):
            scale /= (2 * blocks) ** 0.5
        parameter.normal_(0.0, scale, generator=generator)


def _positions_in_two_dimensions(patches: int, dim: int) -> Tensor:
    """Sines and cosines of row and column, a quarter of the channels each: [1, patches, dim]."""
    side = round(patches**0.5)
    frequencies = 1.0 / 100.0 ** (torch.arange(dim // 4) / (dim // 4))
    angles = torch.arange(side)[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), dim=1)  # [side, dim / 2]
    rows, columns = waves.repeat_interleave(side, 0), waves.repeat(side, 1)
    return torch.cat((rows, columns), dim=1)[None]
