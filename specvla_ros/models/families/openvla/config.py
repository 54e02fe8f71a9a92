# SPDX-License-Identifier: Apache-2.0
"""Reads and checks an OpenVLA checkpoint's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError
from specvla_ros.models.config import (
    DECODERS,
    MAX_IDS,
    MAX_LAYERS,
    MAX_WIDTH,
    DecoderShape,
    VisionTowerConfig,
    check_directory,
    check_not_quantised,
    read_checkpoint_json,
    read_decoder_shape,
)
from specvla_ros.models.observation import ONLY_CAMERA
from specvla_ros.settings.json_file import Fields, shown


@dataclass(frozen=True)
class OpenVLAConfig:
    """Configuration of the whole policy. `instructions` to `state_names` are this package's additions."""

    towers: tuple[VisionTowerConfig, ...]  # one, or two whose channels are concatenated (DINOv2 first)
    llama: DecoderShape  # the language model
    pad_to_multiple_of: int  # rows that pad the vocabulary; the last 256 ids before them are the action tokens
    action_bins: int  # bin edges per action dimension
    norm_stats: Mapping[str, Any]  # the checkpoint's dataset statistics by unnorm_key
    vicuna: bool  # the language model is Vicuna, as in OpenVLA v0.1 and ECoT, which have other prompts
    instructions: tuple[str, ...] = ()  # all that the policy was trained on; empty: any is accepted
    action_codec: str = "bins"  # name of its codec, see `specvla_ros.models.codecs`
    cameras: tuple[str, ...] = (ONLY_CAMERA,)  # in prompt order (not OFT's)
    state_dims: int = 0  # number of robot state values in the prompt, as bins
    state_names: tuple[str, ...] = ()  # of these values, in order; empty: unknown

    @property
    def token_vocab_size(self) -> int:
        """Number of token ids without padding rows; the last id is the lowest action bin."""
        return self.llama.vocab_size - self.pad_to_multiple_of

    @property
    def image_tokens(self) -> int:
        """Prompt rows per image."""
        return self.towers[0].patches


# Model ids that OpenVLA checkpoints name in `timm_model_ids`: (embed_dim, depth, heads, mlp_dim, patch).
_DINOV2 = {"vit_large_patch14_reg4_dinov2": (1024, 24, 16, 4096, 14)}
_SIGLIP = {
    "vit_base_patch16_siglip_224": (768, 12, 12, 3072, 16),
    "vit_base_patch16_siglip_256": (768, 12, 12, 3072, 16),
    "vit_base_patch16_siglip_384": (768, 12, 12, 3072, 16),
    "vit_so400m_patch14_siglip_224": (1152, 27, 16, 4304, 14),
    "vit_so400m_patch14_siglip_384": (1152, 27, 16, 4304, 14),
}
OPENVLA_TYPES = ("openvla", "prismatic")  # model_type of its config.json
_MAX_PIXELS = 4096  # more than any model has, see config.py


def is_oft(directory: Path) -> bool:
    """True for an OpenVLA-OFT checkpoint, whose head gives the actions in one forward."""
    return any(directory.glob("action_head--*.pt"))


def read_config(directory: Path) -> OpenVLAConfig:
    """Reads config.json; a fine-tuned checkpoint's dataset_statistics.json replaces its norm_stats.

    Raises UserError if the directory or a file is missing, or has an unsupported value.
    """
    check_directory(directory)
    raw = read_checkpoint_json(directory / "config.json")
    raw.text("model_type", choices=OPENVLA_TYPES)
    check_not_quantised(raw)
    statistics = directory / "dataset_statistics.json"
    fine_tuned = read_checkpoint_json(statistics).raw if statistics.exists() else None
    config = OpenVLAConfig(
        towers=_towers(raw),
        llama=read_decoder_shape(raw.inner("text_config", {}), families={"llama": DECODERS["llama"]}),
        pad_to_multiple_of=raw.whole("pad_to_multiple_of", 64, maximum=MAX_IDS),
        action_bins=raw.whole("n_action_bins", 256, minimum=2, maximum=1 << 16),
        norm_stats=raw.inner("norm_stats", {}).raw if fine_tuned is None else fine_tuned,
        vicuna="vicuna" in raw.text("llm_backbone_id", ""),
        instructions=tuple(raw.list_of("instructions", str, "a list of strings", ())),
        action_codec=raw.text("action_codec", "bins"),
        cameras=tuple(raw.list_of("cameras", str, "a list of names", (ONLY_CAMERA,))),
        state_dims=raw.whole("state_dims", 0, maximum=1024),
        state_names=tuple(raw.list_of("state_names", str, "a list of names", ())),
    )
    if not config.cameras or len({*config.cameras} - {""}) != len(config.cameras):
        raise raw.wrong("cameras", "a list of distinct names")
    if config.state_names and len({*config.state_names}) != config.state_dims:
        raise raw.wrong("state_names", f"a list of {config.state_dims} distinct names, as state_dims says")
    if config.token_vocab_size <= config.action_bins:
        raise UserError(
            f"{raw.path}: text_config.vocab_size {config.llama.vocab_size} leaves no text token besides "
            f"{config.pad_to_multiple_of} rows of padding and {config.action_bins} action tokens{raw.hint}"
        )
    return config


def prismatic_towers(raw: Fields) -> tuple[VisionTowerConfig, ...]:
    """DINOv2 and SigLIP at 224 pixels, as in native Prismatic checkpoints, or tiny ones given by config.json."""
    ids = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    return _towers(replace(raw, raw=raw.raw | {"timm_model_ids": ids, "image_sizes": [224, 224]}))


def _towers(raw: Fields) -> tuple[VisionTowerConfig, ...]:
    ids = raw.list_of("timm_model_ids", str, "a list of names of vision towers")
    sizes = raw.list_of("image_sizes", int, "a list of sizes in pixels")
    tiny = raw.list_of("tiny_timm_model_kwargs", dict, "a list of objects", None)
    expected = 2 if raw.flag("use_fused_vision_backbone", len(ids) == 2) else 1
    if not len(ids) == len(sizes) == expected or (tiny is not None and len(tiny) != expected):
        raise UserError(
            f"{raw.path}: timm_model_ids, image_sizes and use_fused_vision_backbone disagree on the number of vision "
            "towers"
        )
    overrides = raw.list_of("timm_override_act_layers", object, "a list", ())
    if any(each is not None for each in overrides):
        raise UserError(f"{raw.path}: timm_override_act_layers {shown(overrides)} is not supported, only exact GELU is")
    towers = []
    for i, (model_id, size) in enumerate(zip(ids, sizes, strict=True)):
        if not 1 <= size <= _MAX_PIXELS:
            raise raw.wrong("image_sizes", f"a list of sizes from 1 to {_MAX_PIXELS} pixels")
        kwargs = None if tiny is None else Fields(tiny[i], raw.path, f"tiny_timm_model_kwargs[{i}].", raw.hint)
        towers.append(_tower(model_id, size, kwargs, raw.path))
    if len({tower.patches for tower in towers}) != 1 or not towers[0].patches:
        raise UserError(
            f"{raw.path}: the vision towers give {[t.patches for t in towers]} patches, which cannot be joined"
        )
    return tuple(towers)


def _tower(model_id: str, image_size: int, kwargs: Fields | None, path: Path) -> VisionTowerConfig:
    name = model_id.split(".")[0]
    known = _DINOV2 | _SIGLIP
    if kwargs is not None:
        embed_dim = kwargs.whole("embed_dim", minimum=1, maximum=MAX_WIDTH)
        heads = kwargs.whole("num_heads", minimum=1, maximum=embed_dim)
        if embed_dim % heads:
            raise kwargs.wrong("num_heads", f"a divisor of embed_dim, {embed_dim}")
        return VisionTowerConfig(
            embed_dim=embed_dim,
            depth=kwargs.whole("depth", minimum=2, maximum=MAX_LAYERS),
            heads=heads,
            mlp_dim=int(embed_dim * kwargs.number("mlp_ratio", 4.0, above=0.0, maximum=64.0)),
            patch_size=kwargs.whole("patch_size", minimum=1, maximum=image_size),
            class_token=kwargs.flag("class_token", True),
            register_tokens=kwargs.whole("reg_tokens", 0, maximum=MAX_LAYERS),
            layer_scale=kwargs.number("init_values", None) is not None,
            image_size=image_size,
        )
    if name not in known:
        raise UserError(
            f"{path}: vision tower {shown(model_id)} is not supported; known ones: {', '.join(sorted(known))}"
        )
    embed_dim, depth, heads, mlp_dim, patch_size = known[name]
    dino = name in _DINOV2
    return VisionTowerConfig(
        embed_dim, depth, heads, mlp_dim, patch_size, dino, 4 if dino else 0, layer_scale=dino, image_size=image_size
    )
