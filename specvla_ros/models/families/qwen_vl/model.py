# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL and Qwen3-VL: transformers' vision tower and our decoder."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specvla_ros.errors import UserError
from specvla_ros.models.decoder import PackedDecoder, allocate, decoder_tensors, empty_model
from specvla_ros.models.families.qwen_vl.config import QwenVLConfig
from specvla_ros.models.weights import Progress, check_weights, load_weights, tensor_names

_UNUSED = r"(.+\.)?lm_head\.weight|.+\.inv_freq"


class QwenVL(nn.Module):
    """The target: pictures of fixed sizes, and the language model.

    Args:
        config: of the checkpoint.
        grid: patches of each picture, (height, width).
    """

    def __init__(self, config: QwenVLConfig, grid: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.visual: nn.Module = _tower_class(config)._from_config(config.vision)
        self.decoder = PackedDecoder(config.decoder)
        self._grid = torch.tensor([(1, *sides) for sides in grid])

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """None that could be captured: the tower reads its pictures' sizes back while it runs."""
        return ()

    def image_embeddings(self, pixel_values: Tensor) -> Tensor:
        """Patches of all pictures [patches, values] to embeddings [image_tokens, input_size]."""
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
    progress: Progress | None,
    prefix: str = "",
) -> QwenVL:
    """The model of a checkpoint, ready to decode.

    Args:
        weights: its directory, or the file that holds them.
        grid: patches of each picture, (height, width).
        prefix: of each tensor's name in the files.

    Raises:
        UserError: the weights are incomplete or do not fit the config.
    """
    model = empty_model(partial(QwenVL, config, ()), dtype, device)
    nested = any(name.startswith(f"{prefix}model.language_model.") for name in tensor_names(weights))
    check_weights(weights, _tensors(model, prefix, nested=nested), unused=_UNUSED)
    allocate(model, device)
    _fill_buffers(model.visual, config)
    model._grid = torch.tensor([(1, *sides) for sides in grid])
    load_weights(weights, _tensors(model, prefix, nested=nested), progress)
    return model.eval().requires_grad_(False)


def _tensors(model: QwenVL, prefix: str, *, nested: bool) -> dict[str, Tensor]:
    """Every tensor by its name in the checkpoint: the hub's flat layout, or that of newer transformers."""
    visual = "model.visual" if nested else "visual"
    tensors = {f"{visual}.{name}": parameter.detach() for name, parameter in model.visual.named_parameters()}
    text = decoder_tensors(model.decoder)
    if nested:
        text = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text.items()}
    return {prefix + name: tensor for name, tensor in (tensors | text).items()}


def _fill_buffers(tower: nn.Module, config: QwenVLConfig) -> None:
    """Computes what the tower keeps beside its weights, from a tower without blocks: its own came up empty."""
    shallow = type(config.vision)(**{**config.vision.to_dict(), "depth": 0})
    try:
        whole = dict(type(tower)._from_config(shallow).named_buffers())  # type: ignore[attr-defined]
    except Exception as error:
        raise UserError(f"transformers cannot make this checkpoint's vision tower ({error})") from None
    for name, empty in list(tower.named_buffers()):
        parent, _, own = name.rpartition(".")
        # Float32 whatever the weights' dtype, as transformers leaves them.
        tower.get_submodule(parent).register_buffer(own, whole[name].to(empty.device), persistent=False)
