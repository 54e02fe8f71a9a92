# SPDX-License-Identifier: Apache-2.0
"""A small OpenVLA checkpoint with random weights: the real format and the real path, but actions that mean nothing."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from specvla_ros.lab.training.artifacts import save_weights
from specvla_ros.models.families.openvla.config import read_config
from specvla_ros.models.families.openvla.model import OpenVLA

_PAD_ROWS = 64
_BINS = 256
# Single characters are the whole vocabulary, so that any instruction can be read.
_CHARACTERS = "▁\nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-_/"


def write_random_checkpoint(
    directory: Path, *, seed: int = 0, hidden_size: int = 96, layers: int = 4, text: float = 0.0
) -> None:
    """Writes config.json, model.safetensors, preprocessor_config.json and tokenizer.json.

    The output head is zero outside the action tokens, so that every answer is an action, unless text is asked for: then
    an action has two dimensions, and words come before it.

    Args:
        directory: made if it is missing.
        seed: of the weights.
        hidden_size: of the language model, a multiple of 32.
        layers: of the language model.
        text: how large the output head's rows of characters are beside those of actions.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _character_tokenizer()
    vocab = tokenizer.get_vocab_size() + _BINS
    _write_json(directory / "config.json", _config(vocab, hidden_size, layers, dims=2 if text else 7))
    _write_json(directory / "preprocessor_config.json", _preprocessor_config())
    tokenizer.save(str(directory / "tokenizer.json"))
    model = OpenVLA(read_config(directory))
    tensors = model.checkpoint_tensors()
    _randomise(tensors, torch.Generator().manual_seed(seed))
    head = tensors["language_model.lm_head.weight"]
    head[: vocab - _BINS] *= text
    head[vocab:] = 0.0
    save_weights(directory / "model.safetensors", tensors)


def _config(vocab: int, hidden_size: int, layers: int, dims: int) -> dict[str, object]:
    # BridgeData's ranges, rounded: metres and radians per 0.2 s.
    bounds = (0.029, 0.042, 0.040, 0.082, 0.093, 0.207)
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "llm_backbone_id": "llama2-7b-pure",
        "use_fused_vision_backbone": True,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None, None],
        "tiny_timm_model_kwargs": [
            dict(embed_dim=48, depth=3, num_heads=3, patch_size=14, reg_tokens=4, init_values=1e-5),
            dict(embed_dim=48, depth=3, num_heads=3, patch_size=14, class_token=False, mlp_ratio=3.7362),
        ],
        "image_sizes": [224, 224],
        "image_resize_strategy": "resize-naive",
        "n_action_bins": _BINS,
        "pad_to_multiple_of": _PAD_ROWS,
        "text_config": {
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden_size // 32,
            "vocab_size": vocab + _PAD_ROWS,
        },
        "norm_stats": {
            "bridge_orig": {
                "action": {
                    "q01": [*(-b for b in bounds), 0.0][-dims:],
                    "q99": [*bounds, 1.0][-dims:],
                    "mask": ([True] * 6 + [False])[-dims:],
                }
            }
        },
    }


def _preprocessor_config() -> dict[str, object]:
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": True,
        "input_sizes": [[3, 224, 224]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
        "stds": [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
        "tvf_letterbox_fill": None,
    }


def _character_tokenizer() -> Tokenizer:
    special = ["<unk>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*special, *_CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Replace("▁", " ")
    return tokenizer


def _randomise(tensors: dict[str, Tensor], generator: torch.Generator) -> None:
    for name, tensor in tensors.items():
        if "norm" in name and name.endswith("weight"):
            tensor.fill_(1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        elif "scale_factor" in name:
            tensor.fill_(0.5)
        else:
            scale = 1.0 if "embed" in name or "token" in name else _fan_in(tensor) ** -0.5
            tensor.normal_(0.0, 1.5 * scale, generator=generator)


def _fan_in(tensor: Tensor) -> int:
    return tensor[0].numel()


def _write_json(path: Path, value: dict[str, object] | Sequence[object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
