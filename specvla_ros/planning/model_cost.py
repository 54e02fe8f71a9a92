"""What a checkpoint's shapes imply: values that are read and operations that are done, before any device is named."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from specvla_ros.models.config import LlamaConfig, OpenVLAConfig, VisionTowerConfig
from specvla_ros.planning.device_limits import Arithmetic

# BOS, "In: What action should the robot take to …?\nOut:" with an instruction of about ten words, and the space token:
# with OpenVLA-7B's 256 patches a prompt of 290 rows.
_TEXT_TOKENS = 34
_ACTION_TOKENS = 7  # where the checkpoint's statistics do not say


class WeightFormat(str, Enum):
    """How the decoder's matrices are stored; output head, vision towers and keys and values stay in the dtype."""

    NONE = "none"
    INT4 = "int4"
    W8A8 = "w8a8"
    FP8 = "fp8"

    @property
    def arithmetic(self) -> Arithmetic:
        """What their products are computed in."""
        return {"w8a8": Arithmetic.INT8, "fp8": Arithmetic.FP8}.get(self.value, Arithmetic.DENSE)

    def value_bytes(self, dtype_bytes: int) -> float:
        """Bytes per weight; int4 has a 16-bit scale and a 16-bit zero point per group of 128."""
        return {"int4": 4.25 / 8, "w8a8": 1.0, "fp8": 1.0}.get(self.value, float(dtype_bytes))


@dataclass(frozen=True)
class ModelCost:
    """Counts of a checkpoint. Biases and norms are left out: together less than a thousandth.

    Args:
        decoder_values: in the matrices of the decoder's layers, all read by every forward.
        head_values: in the output head, all read by every forward that ends in logits.
        embedding_values: in the input embeddings; a lookup, so they only take memory (none where tied to the head).
        vision_values: in towers and projector, for one image.
        vision_operations: the same, multiplications and additions counted apart.
        kv_values: keys and values of one token, all layers.
        pair_operations: of attention for one pair of query and key, all layers and heads.
        draft_values: in an EAGLE head for this decoder: its fusion and its one layer.
        draft_kv_values: keys and values of one token in that layer.
        prompt_rows: of a prompt: the image's patches and about 34 text tokens.
        action_tokens: of an answer.
    """

    decoder_values: int
    head_values: int
    embedding_values: int
    vision_values: int
    vision_operations: int
    kv_values: int
    pair_operations: int
    draft_values: int
    draft_kv_values: int
    prompt_rows: int
    action_tokens: int

    def memory_bytes(self, weights: WeightFormat, dtype_bytes: int, *, draft: bool) -> float:
        """Of all weights, the draft head's too if asked for."""
        plain = self.head_values + self.embedding_values + self.vision_values + (self.draft_values if draft else 0)
        return self.decoder_values * weights.value_bytes(dtype_bytes) + plain * dtype_bytes


def model_cost(config: OpenVLAConfig) -> ModelCost:
    """Counts from the shapes that config.json names."""
    llama = config.llama
    layer = _layer_values(llama)
    width = sum(tower.embed_dim for tower in config.towers)
    projector = _projector_values(width, llama.hidden_size, fused=len(config.towers) > 1)
    kv_values = 2 * llama.num_key_value_heads * llama.head_dim
    return ModelCost(
        decoder_values=llama.num_hidden_layers * layer,
        head_values=llama.vocab_size * llama.hidden_size,
        embedding_values=0 if llama.tie_word_embeddings else llama.vocab_size * llama.hidden_size,
        vision_values=sum(_tower_values(tower) for tower in config.towers) + projector,
        vision_operations=sum(_tower_operations(tower) for tower in config.towers)
        + 2 * projector * config.image_tokens,
        kv_values=llama.num_hidden_layers * kv_values,
        pair_operations=llama.num_hidden_layers * 4 * llama.num_attention_heads * llama.head_dim,
        draft_values=2 * llama.hidden_size**2 + layer,
        draft_kv_values=kv_values,
        prompt_rows=config.image_tokens + _TEXT_TOKENS,
        action_tokens=_action_tokens(config.norm_stats),
    )


def _action_tokens(norm_stats: Mapping[str, Any]) -> int:
    """Numbers of an action by the first dataset's statistics."""
    for statistics in norm_stats.values():
        try:
            return len(statistics["action"]["q01"])
        except (KeyError, TypeError):
            continue
    return _ACTION_TOKENS


def _layer_values(llama: LlamaConfig) -> int:
    heads = 2 * llama.num_attention_heads + 2 * llama.num_key_value_heads  # query and output, key and value
    return llama.hidden_size * (heads * llama.head_dim + 3 * llama.intermediate_size)


def _projector_values(width: int, hidden: int, *, fused: bool) -> int:
    """See models/projector.py: three matrices behind two towers, two behind one."""
    first = 4 * width * width + 4 * width * hidden if fused else width * hidden
    return first + hidden * hidden


def _tower_values(tower: VisionTowerConfig) -> int:
    """Patch embedding and all blocks but the last, which OpenVLA does not compute."""
    block = 4 * tower.embed_dim**2 + 2 * tower.embed_dim * tower.mlp_dim
    return 3 * tower.patch_size**2 * tower.embed_dim + (tower.depth - 1) * block


def _tower_operations(tower: VisionTowerConfig) -> int:
    tokens = tower.patches + tower.register_tokens + int(tower.class_token)
    attention = 4 * tokens**2 * tower.embed_dim * (tower.depth - 1)
    return 2 * _tower_values(tower) * tokens + attention
