# SPDX-License-Identifier: Apache-2.0
"""Shapes of the parts that families share, and what every checkpoint directory is checked for."""

import re
from dataclasses import dataclass
from pathlib import Path

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import Fields, read_fields

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
MAX_WIDTH = 1 << 17  # of a layer: more than any model has
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class VisionTowerConfig:
    """Shape of one vision transformer.

    Args:
        embed_dim, depth, heads, mlp_dim, patch_size: as in the ViT paper. The tower's output is that of the block
            before the last, so `depth - 1` blocks are computed.
        class_token, register_tokens: prefix tokens in front of the patches (DINOv2); they carry no position.
        layer_scale: whether the blocks scale their residual branches (DINOv2).
        image_size: height and width of the input in pixels.
    """

    embed_dim: int
    depth: int
    heads: int
    mlp_dim: int
    patch_size: int
    class_token: bool
    register_tokens: int
    layer_scale: bool
    image_size: int

    @property
    def patches(self) -> int:
        """Patch tokens per image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of the Llama decoder; names and defaults are transformers'."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    vocab_size: int = 32000
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False


def check_directory(directory: Path) -> None:
    """Tells the usual mistakes apart.

    Raises:
        UserError: the directory is not there, or holds something that is close to a checkpoint.
    """
    if not directory.is_dir():
        if _HUB_ID.fullmatch(str(directory)):
            raise UserError(
                f"'{directory}' is no directory; if it is a Hugging Face hub id, download it first: "
                f"hf download {directory} --local-dir {directory.name}"
            )
        raise UserError(f"checkpoint directory {directory} does not exist; give the folder that holds config.json")
    if (directory / "adapter_config.json").exists() and not (directory / "config.json").exists():
        raise UserError(
            f"{directory} holds an adapter (adapter_config.json), not a whole model: merge it into its base model "
            "(PEFT's merge_and_unload) and give the merged directory"
        )
    heads = sorted(directory.glob("action_head--*.pt"))
    if heads:
        raise UserError(
            f"{directory} is an OpenVLA-OFT checkpoint ({heads[0].name}): its actions come from that head in one "
            "parallel forward and not from tokens, so decoding its tokens would give wrong actions; it is not supported"
        )
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")]):
        try:
            file = path.open("rb")
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); download it again") from None
        with file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UserError(
                    f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in {directory}, or download "
                    "the checkpoint again"
                )


def read_checkpoint_json(path: Path) -> Fields:
    """The object in a JSON file of a checkpoint.

    Raises:
        UserError: the file is missing or is no JSON object.
    """
    missing = f"is {path.parent} a complete OpenVLA checkpoint directory?"
    return read_fields(path, missing=missing, hint="; compare it with a released checkpoint's")
