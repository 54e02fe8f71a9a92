# SPDX-License-Identifier: Apache-2.0
"""What an OpenVLA checkpoint's config.json says, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError
from specvla_ros.models.config import LlamaConfig, VisionTowerConfig, check_directory, read_json


@dataclass(frozen=True)
class OpenVLAConfig:
    """The whole policy.

    Args:
        towers: one tower, or two whose features are joined channel by channel (DINOv2 first).
        llama: the language model.
        pad_to_multiple_of: rows that pad the vocabulary; the last 256 ids before them are the action tokens.
        action_bins: bin edges per action dimension.
        norm_stats: the checkpoint's dataset statistics by unnorm_key.
        chat_prompt: True for OpenVLA v0.1, whose prompt is Vicuna's.
        instructions: all that the policy was taught, where config.json lists them (this package's addition).
        action_codec: name of its codec, see `specvla_ros.models.codecs` (this package's addition).
    """

    towers: tuple[VisionTowerConfig, ...]
    llama: LlamaConfig
    pad_to_multiple_of: int
    action_bins: int
    norm_stats: Mapping[str, Any]
    chat_prompt: bool
    instructions: tuple[str, ...] = ()
    action_codec: str = "bins"

    @property
    def token_vocab_size(self) -> int:
        """Ids that are tokens, padding rows not counted; the last of them is the lowest action bin."""
        return self.llama.vocab_size - self.pad_to_multiple_of

    @property
    def image_tokens(self) -> int:
        """Rows that the image takes in the prompt."""
        return self.towers[0].patches


OPENVLA_TYPES = ("openvla", "prismatic")


# Model ids that OpenVLA checkpoints name in `timm_model_ids`: (embed_dim, depth, heads, mlp_dim, patch).
_DINOV2 = {"vit_large_patch14_reg4_dinov2": (1024, 24, 16, 4096, 14)}


_SIGLIP = {
    "vit_base_patch16_siglip_224": (768, 12, 12, 3072, 16),
    "vit_base_patch16_siglip_256": (768, 12, 12, 3072, 16),
    "vit_base_patch16_siglip_384": (768, 12, 12, 3072, 16),
    "vit_so400m_patch14_siglip_224": (1152, 27, 16, 4304, 14),
    "vit_so400m_patch14_siglip_384": (1152, 27, 16, 4304, 14),
}


def read_config(directory: Path) -> OpenVLAConfig:
    """Reads config.json, and dataset_statistics.json of a fine-tuned checkpoint in place of its norm_stats.

    Raises:
        UserError: the directory or a file is missing, or names something this package does not know.
    """
    check_directory(directory)
    path = directory / "config.json"
    raw = read_json(path)
    if raw.get("model_type") not in OPENVLA_TYPES:
        raise UserError(f"{path}: model_type is {raw.get('model_type')!r}, which is no OpenVLA checkpoint's")
    try:
        towers = _towers(raw, path)
        llama = _llama(raw.get("text_config") or {}, path)
        statistics = directory / "dataset_statistics.json"
        return OpenVLAConfig(
            towers=towers,
            llama=llama,
            pad_to_multiple_of=int(raw.get("pad_to_multiple_of", 64)),
            action_bins=int(raw.get("n_action_bins", 256)),
            norm_stats=read_json(statistics) if statistics.exists() else raw.get("norm_stats") or {},
            chat_prompt="vicuna" in str(raw.get("llm_backbone_id", "")),
            instructions=tuple(str(each) for each in raw.get("instructions") or ()),
            action_codec=str(raw.get("action_codec", "bins")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}; compare it with a released checkpoint's") from None


def _towers(raw: dict[str, Any], path: Path) -> tuple[VisionTowerConfig, ...]:
    ids = raw["timm_model_ids"]
    sizes = raw["image_sizes"]
    tiny = raw.get("tiny_timm_model_kwargs")
    expected = 2 if raw.get("use_fused_vision_backbone", len(ids) == 2) else 1
    if not len(ids) == len(sizes) == expected or (tiny is not None and len(tiny) != expected):
        raise UserError(
            f"{path}: timm_model_ids, image_sizes and use_fused_vision_backbone disagree on the number of vision towers"
        )
    overrides = raw.get("timm_override_act_layers") or [None] * expected
    if any(overrides):
        raise UserError(f"{path}: timm_override_act_layers {overrides} is not supported, only exact GELU is")
    towers = tuple(
        _tower(model_id, int(size), tiny[i] if tiny else None, path)
        for i, (model_id, size) in enumerate(zip(ids, sizes, strict=True))
    )
    if len({tower.patches for tower in towers}) != 1:
        raise UserError(f"{path}: the vision towers give {[t.patches for t in towers]} patches, which cannot be joined")
    return towers


def _tower(model_id: str, image_size: int, kwargs: dict[str, Any] | None, path: Path) -> VisionTowerConfig:
    name = model_id.split(".")[0]
    known = _DINOV2 | _SIGLIP
    if kwargs is not None:
        embed_dim = int(kwargs["embed_dim"])
        return VisionTowerConfig(
            embed_dim=embed_dim,
            depth=int(kwargs["depth"]),
            heads=int(kwargs["num_heads"]),
            mlp_dim=int(embed_dim * float(kwargs.get("mlp_ratio", 4.0))),
            patch_size=int(kwargs["patch_size"]),
            class_token=bool(kwargs.get("class_token", True)),
            register_tokens=int(kwargs.get("reg_tokens", 0)),
            layer_scale=kwargs.get("init_values") is not None,
            image_size=image_size,
        )
    if name not in known:
        raise UserError(f"{path}: vision tower '{model_id}' is not supported; known ones: {', '.join(sorted(known))}")
    embed_dim, depth, heads, mlp_dim, patch_size = known[name]
    dino = name in _DINOV2
    return VisionTowerConfig(
        embed_dim, depth, heads, mlp_dim, patch_size, dino, 4 if dino else 0, layer_scale=dino, image_size=image_size
    )


def _llama(text: dict[str, Any], path: Path) -> LlamaConfig:
    if text.get("model_type", "llama") != "llama":
        raise UserError(f"{path}: language model '{text['model_type']}' is not supported, only 'llama' is")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{path}: rope scaling {rope} is not supported, only plain RoPE is")
    for flag in ("attention_bias", "mlp_bias"):
        if text.get(flag):
            raise UserError(f"{path}: text_config.{flag} is not supported")
    if text.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}: activation '{text['hidden_act']}' is not supported, only 'silu' is")
    default = LlamaConfig()
    heads = int(text.get("num_attention_heads", default.num_attention_heads))
    hidden = int(text.get("hidden_size", default.hidden_size))
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=int(text.get("intermediate_size", default.intermediate_size)),
        num_hidden_layers=int(text.get("num_hidden_layers", default.num_hidden_layers)),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        vocab_size=int(text.get("vocab_size", default.vocab_size)),
        rms_norm_eps=float(text.get("rms_norm_eps", default.rms_norm_eps)),
        rope_theta=float(text.get("rope_theta") or rope.get("rope_theta") or default.rope_theta),
        max_position_embeddings=int(text.get("max_position_embeddings", default.max_position_embeddings)),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
    )
