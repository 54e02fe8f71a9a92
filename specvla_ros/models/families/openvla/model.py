# SPDX-License-Identifier: Apache-2.0
"""OpenVLA: two vision towers, a projector and a Llama decoder."""

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from specvla_kernels.graph_capture import side_by_side
from specvla_kernels.layer_products import gelu_product
from specvla_kernels.linear import linear
from specvla_ros.models.decoder import PackedDecoder, decoder_tensors
from specvla_ros.models.families.openvla.config import OpenVLAConfig
from specvla_ros.models.vision_tower import VisionTower

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

    def prompt_embeddings(self, image: Tensor, prompt_ids: Tensor) -> Tensor:
        """The prompt as the decoder reads it: BOS, the image, the rest of the text.

        Args:
            image: its embeddings [image_tokens, hidden].
            prompt_ids: int64 [n], BOS first.

        Returns:
            [n + image_tokens, hidden].
        """
        text = self.decoder.embed_tokens(prompt_ids)
        return torch.cat((text[:1], image, text[1:]))

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
