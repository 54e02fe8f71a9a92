# SPDX-License-Identifier: Apache-2.0
"""What a Qwen2.5-VL or Qwen3-VL checkpoint's config.json says, checked: flat, as on the hub, or with `text_config`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError, missing_package
from specvla_ros.models.config import (
    DECODERS,
    MAX_IDS,
    DecoderShape,
    check_directory,
    check_not_quantised,
    read_checkpoint_json,
    read_decoder_shape,
)

QWEN_VL_TYPES = ("qwen2_5_vl", "qwen3_vl")

# transformers' Qwen2_5_VLTextConfig.
_TEXT = replace(
    DECODERS["qwen2"],
    hidden_size=8192,
    intermediate_size=29568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=152064,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    rope_sections=(16, 24, 24),
)
# And its Qwen3VLTextConfig.
_TEXT_3 = replace(
    DECODERS["qwen3"],
    hidden_size=4096,
    intermediate_size=22016,
    max_position_embeddings=128000,
    rope_theta=5e5,
    rope_sections=(24, 20, 20),
    rope_interleaved=True,
)
_FAMILIES = {"qwen2_5_vl": _TEXT, "qwen2_5_vl_text": _TEXT, "qwen3_vl_text": _TEXT_3}


@dataclass(frozen=True)
class QwenVLConfig:
    """The whole model.

    Args:
        model_type: of QWEN_VL_TYPES.
        decoder: the language model.
        vision: transformers' configuration of the vision tower.
        image_id: the token that stands for a picture in a prompt.
    """

    model_type: str
    decoder: DecoderShape
    vision: Any
    image_id: int


def read_config(directory: Path) -> QwenVLConfig:
    """Reads config.json.

    Raises:
        UserError: it is missing or damaged, describes what is not supported, or transformers is not installed.
    """
    check_directory(directory)
    raw = read_checkpoint_json(directory / "config.json")
    check_not_quantised(raw)
    text = raw.inner("text_config", {})
    decoder = read_decoder_shape(text if text.raw else raw, _FAMILIES)
    # The flat layout and the nested one differ in where this stands; transformers reads the outer one.
    decoder = replace(decoder, tie_word_embeddings=raw.flag("tie_word_embeddings", False))
    kind = raw.text("model_type", choices=QWEN_VL_TYPES)
    vision = _vision_config(kind, raw.inner("vision_config").raw, directory / "config.json")
    decoder = replace(decoder, deepstack=len(getattr(vision, "deepstack_visual_indexes", ())))
    if vision.out_hidden_size != decoder.hidden_size:
        raise UserError(
            f"{raw.path}: the vision tower's rows have {vision.out_hidden_size} channels and the language model "
            f"{decoder.hidden_size}{raw.hint}"
        )
    image_id = raw.whole("image_token_id", 151655, maximum=MAX_IDS)
    return QwenVLConfig(kind, decoder, vision, image_id)


def _vision_config(kind: str, fields: dict[str, Any], path: Path) -> Any:
    try:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    except ModuleNotFoundError as error:
        raise missing_package(error, "requirements/robot-transformers.txt") from None
    try:
        return (Qwen2_5_VLVisionConfig if kind == "qwen2_5_vl" else Qwen3VLVisionConfig)(**fields)
    except Exception as error:  # its checks raise several kinds, none of them its own
        raise UserError(f"{path}: vision_config cannot be read ({error}); compare it with a released one") from None
