# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL and Qwen3-VL: transformers' vision tower and our decoder."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from specvla_ros.models.decoder import PackedDecoder, allocate, decoder_tensors, empty_model
from specvla_ros.models.weights import Progress, check_weights, load_weights, read_tables, tensor_names

QWEN_VL_TYPES = ("qwen2_5_vl", "qwen3_vl")

_UNUSED = r".+\.inv_freq"
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
    """Configuration of a Qwen-VL model."""

    model_type: str  # of QWEN_VL_TYPES
    decoder: DecoderShape  # the language model
    vision: Any  # transformers' configuration of the vision tower
    image_id: int  # the token that stands for an image in a prompt


def read_config(directory: Path) -> QwenVLConfig:
    """Reads config.json, flat as on the hub or with `text_config`.

    Raises UserError if it is damaged or not supported, or transformers is not installed.
    """
    check_directory(directory)
    raw = read_checkpoint_json(directory / "config.json")
    check_not_quantised(raw)
    text = raw.inner("text_config", {})
    decoder = read_decoder_shape(text if text.raw else raw, _FAMILIES)
    # The flat and the nested layout have this in different places; transformers reads the outer one.
    decoder = replace(decoder, tie_word_embeddings=raw.flag("tie_word_embeddings", False))
    kind = raw.text("model_type", choices=QWEN_VL_TYPES)
    vision = _vision_config(kind, raw.inner("vision_config").raw, directory / "config.json")
    decoder = replace(decoder, deepstack=len(getattr(vision, "deepstack_visual_indexes", ())))
    if vision.out_hidden_size != decoder.hidden_size:
        raise UserError(
            f"{raw.path}: the vision tower's rows have {vision.out_hidden_size} channels, but the language model "
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
    except Exception as error:  # its checks raise several exceptions, none of its own
        raise UserError(f"{path}: vision_config cannot be read ({error}); compare it with a released one") from None


class QwenVL(nn.Module):
    """The target; `grid` has each image's number of patches, (height, width)."""

    def __init__(self, config: QwenVLConfig, grid: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.visual: nn.Module = _tower_class(config)._from_config(config.vision)
        self.decoder = PackedDecoder(config.decoder)
        self._grid = torch.tensor([(1, *sides) for sides in grid])

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Empty, so that the tower is not captured: it reads its images' sizes back to the host while running."""
        return ()

    def image_embeddings(self, pixel_values: Tensor) -> Tensor:
        """Maps the patches of all images [patches, values] to embeddings [image_tokens, input_size]."""
        pixels = pixel_values.to(self.decoder.device, self.decoder.dtype, non_blocking=True)
        seen = self.visual(pixels, grid_thw=self._grid.to(pixels.device))
        features = seen.deepstack_features if self.decoder.config.deepstack else ()
        return torch.cat([seen.pooler_output, *features], dim=1)


def _tower_class(config: QwenVLConfig) -> Any:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    return Qwen2_5_VisionTransformerPretrainedModel if config.model_type == "qwen2_5_vl" else Qwen3VLVisionModel


def load_model(
    weights: Path,
    config: QwenVLConfig,
    grid: tuple[tuple[int, int], ...],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    prefix: str = "",
) -> QwenVL:
    """Loads a checkpoint's model, ready to decode; UserError if the weights are incomplete or do not fit the config.

    Args:
        weights: the checkpoint's directory, or the file with the weights.
        grid: number of patches of each image, (height, width).
        prefix: of each tensor's name in the files.
    """
    nested = any(name.startswith(f"{prefix}model.language_model.") for name in tensor_names(weights))
    embeddings = f"{prefix}model.{'language_model.' * nested}embed_tokens.weight"
    tables = read_tables(weights, embeddings, f"{prefix}lm_head.weight", tied=config.decoder.tie_word_embeddings)
    config = replace(config, decoder=replace(config.decoder, tie_word_embeddings=tables.tied))
    model = empty_model(partial(QwenVL, config, ()), dtype, device)
    check_weights(weights, _tensors(model, prefix, nested=nested), unused=_UNUSED, stored=tables.stored)
    allocate(model, device)
    _fill_buffers(model.visual, config)
    model._grid = torch.tensor([(1, *sides) for sides in grid])
    load_weights(weights, _tensors(model, prefix, nested=nested), progress, stored=tables.stored)
    return model.eval().requires_grad_(False)


def _tensors(model: QwenVL, prefix: str, *, nested: bool) -> dict[str, Tensor]:
    """Every tensor by its name in the checkpoint, in the hub's flat layout or that of newer transformers."""
    visual = "model.visual" if nested else "visual"
    tensors = {f"{visual}.{name}": parameter.detach() for name, parameter in model.visual.named_parameters()}
    text = decoder_tensors(model.decoder)
    if nested:
        text = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text.items()}
    return {prefix + name: tensor for name, tensor in (tensors | text).items()}


def _fill_buffers(tower: nn.Module, config: QwenVLConfig) -> None:
    """Fills the tower's empty buffers with those of a tower without blocks."""
    shallow = type(config.vision)(**{**config.vision.to_dict(), "depth": 0})
    try:
        whole = dict(type(tower)._from_config(shallow).named_buffers())  # type: ignore[attr-defined]
    except Exception as error:
        raise UserError(
            f"transformers cannot build the vision tower of config.json's vision_config ({error})"
        ) from None
    for name, empty in list(tower.named_buffers()):
        parent, _, own = name.rpartition(".")
        # Float32 for any dtype of the weights, as in transformers.
        tower.get_submodule(parent).register_buffer(own, whole[name].to(empty.device), persistent=False)
