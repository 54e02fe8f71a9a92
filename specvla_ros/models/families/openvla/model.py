# SPDX-License-Identifier: Apache-2.0
"""OpenVLA: two vision towers, a projector and a Llama decoder; and how they are read from a checkpoint."""

from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from specvla_kernels.graph_capture import side_by_side
from specvla_kernels.layer_products import gelu_product
from specvla_kernels.linear import linear
from specvla_ros.models.decoder import (
    DecoderLayer,
    PackedDecoder,
    allocate,
    decoder_tensors,
    empty_model,
    layer_tensors,
    tie_head,
)
from specvla_ros.models.families.openvla.config import OpenVLAConfig
from specvla_ros.models.memory import check_memory
from specvla_ros.models.quantization import ROTATED, quantize_layer, rotate_layer, turn_stream
from specvla_ros.models.vision_tower import VisionTower
from specvla_ros.models.weights import Progress, check_weights, load_weights

_TOWERS = ("featurizer", "fused_featurizer")


class Projector(nn.Module):
    """The MLP of the checkpoint: two layers after one vision tower, three after two (exact GELU between them).

    Args:
        vision_dim: channels of the joined vision features.
        hidden_size: of the language model.
        fused: two towers.
    """

    def __init__(self, vision_dim: int, hidden_size: int, *, fused: bool) -> None:
        super().__init__()
        widths = (
            [vision_dim, 4 * vision_dim, hidden_size, hidden_size] if fused else [vision_dim, hidden_size, hidden_size]
        )
        self.depth = len(widths) - 1
        for i in range(self.depth):
            self.add_module(f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1]))

    def forward(self, features: Tensor) -> Tensor:
        """[patches, vision_dim] to [patches, hidden_size]."""
        *inner, last = (cast(nn.Linear, self.get_submodule(f"fc{i + 1}")) for i in range(self.depth))
        for layer in inner:
            features = gelu_product(features, layer.weight, layer.bias)
        return linear(features, last.weight, last.bias)


class OpenVLA(nn.Module):
    """The target: the full policy that decides every token."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        self.config = config
        self.towers = nn.ModuleList(VisionTower(tower) for tower in config.towers)
        vision_dim = sum(tower.embed_dim for tower in config.towers)
        self.projector = Projector(vision_dim, config.llama.hidden_size, fused=len(config.towers) > 1)
        self.decoder = PackedDecoder(config.llama)

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """[3 * towers, size, size]; empty for a model without towers."""
        towers = self.config.towers
        return (3 * len(towers), towers[0].image_size, towers[0].image_size) if self.towers else ()

    def image_embeddings(self, pixel_values: Tensor) -> Tensor:
        """Normalised pixels [3 * towers, size, size] to embeddings [image_tokens, hidden]."""
        images = pixel_values.to(self.decoder.device, self.decoder.dtype, non_blocking=True).split(3)
        towers = [partial(tower, image) for tower, image in zip(self.towers, images, strict=True)]
        return self.projector(torch.cat(side_by_side(towers, self.decoder.device), dim=1))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in the checkpoint; fused matrices as the slices that the names stand for.

        Writing into a value writes into the model: loading and saving are this one map.
        """
        tensors: dict[str, Tensor] = {}
        for prefix, tower in zip(_TOWERS, self.towers, strict=False):
            tensors |= _named(f"vision_backbone.{prefix}", tower)
        tensors |= _named("projector", self.projector)
        return tensors | decoder_tensors(self.decoder, "language_model.")

    @property
    def unused_tensors(self) -> str:
        """Regular expression of the names that released files hold beside those of `checkpoint_tensors`."""
        blocks = "|".join(
            rf"vision_backbone\.{prefix}\.blocks\.{tower.depth - 1}"
            for prefix, tower in zip(_TOWERS, self.config.towers, strict=False)
        )
        return rf"({blocks}|vision_backbone\.(fused_)?featurizer\.(norm|fc_norm|attn_pool|head))\..+|.+\.inv_freq"


def _named(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": parameter.detach() for name, parameter in module.named_parameters()}


def load_model(
    directory: Path,
    config: OpenVLAConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: str = "none",
    progress: Progress | None = None,
) -> OpenVLA:
    """The model of a checkpoint, ready to decode.

    Args:
        dtype: of what is not quantised; the output head may be of another, see `head_dtype`.
        quantization: of the decoder layers' matrices, one that `check_quantization` let pass.

    Raises:
        UserError: the device's memory is too small, or the weights are incomplete or do not fit the config.
    """
    model = empty_model(partial(OpenVLA, config), dtype, device)
    check_weights(directory, model.checkpoint_tensors(), unused=model.unused_tensors)
    check_memory(model, device, quantization)
    if quantization == "none":
        allocate(model, device)
        load_weights(directory, model.checkpoint_tensors(), progress)
    else:
        _load_quantized(model, directory, device, quantization, progress)
    return model.eval().requires_grad_(False)


def _load_quantized(
    model: OpenVLA, directory: Path, device: torch.device, quantization: str, progress: Progress | None
) -> None:
    """Allocates, reads and quantises one layer after the other, for a device that could not hold them unquantised."""
    decoder = model.decoder
    for part in (*model.towers, model.projector, decoder.embed_tokens, decoder.norm, decoder.lm_head):
        part.to_empty(device=device)
    tie_head(decoder)
    turn = turn_stream(decoder) if quantization == ROTATED else None
    around = {name: tensor for name, tensor in model.checkpoint_tensors().items() if not tensor.is_meta}
    load_weights(directory, around, _share(progress, 0, len(decoder.layers) + 1))
    for i, module in enumerate(decoder.layers):
        layer = cast(DecoderLayer, module).to_empty(device=device)
        tensors = layer_tensors(layer, decoder.config, f"language_model.model.layers.{i}.")
        load_weights(directory, tensors, _share(progress, i + 1, len(decoder.layers) + 1))
        del tensors  # they hold the unquantised matrices
        if turn is not None:
            rotate_layer(layer, turn)
        quantize_layer(layer, quantization)


def _share(progress: Progress | None, index: int, parts: int) -> Progress | None:
    """Reports one of several parts as its share of the whole."""
    if progress is None:
        return None
    return lambda what, done: progress(what, (index + done) / parts)
