# SPDX-License-Identifier: Apache-2.0
"""OpenVLA's model and its loading: one or two vision transformers, a projector and a Llama decoder."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_kernels.device import has_kernels
from specvla_kernels.fused_linear import linear
from specvla_kernels.graph_capture import side_by_side
from specvla_kernels.layer_products import gelu_product, scaled_sum
from specvla_kernels.layernorm_residual import layernorm_residual
from specvla_kernels.patch_embedding import patch_embedding
from specvla_ros.models.config import VisionTowerConfig
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
from specvla_ros.models.quantization import (
    ROTATED,
    RoundedLinear,
    quantize_layer,
    quantize_products,
    rotate_layer,
    turn_stream,
)
from specvla_ros.models.weights import Progress, Tables, check_weights, load_weights, no_progress, read_tables

_TOWERS = ("featurizer", "fused_featurizer")
_LLM = "language_model."
_LayerNorm = partial(nn.LayerNorm, eps=1e-6)


def _product(x: Tensor, matrix: nn.Linear) -> Tensor:
    return matrix(x) if isinstance(matrix, RoundedLinear) else linear(x, matrix.weight, matrix.bias)


def _gelu(x: Tensor, matrix: nn.Linear) -> Tensor:
    if isinstance(matrix, RoundedLinear):
        return F.gelu(matrix(x))
    return gelu_product(x, matrix.weight, matrix.bias)


class _LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        fused = _product(x, self.qkv).view(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = fused.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return _product(attended.transpose(1, 2).reshape(batch, tokens, dim), self.proj)


class _Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return _product(_gelu(x, self.fc1), self.fc2)


class _Block(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.norm1 = _LayerNorm(dim)
        self.attn = _Attention(dim, config.heads)
        self.ls1 = _LayerScale(dim) if config.layer_scale else nn.Identity()
        self.norm2 = _LayerNorm(dim)
        self.mlp = _Mlp(dim, config.mlp_dim)
        self.ls2 = _LayerScale(dim) if config.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """LayerScale factors, [dim] each, kept separate from the matrices as in checkpoints and training."""
        first, second = (each.scale_factor if isinstance(each, _LayerScale) else None for each in (self.ls1, self.ls2))
        return first, second


class _PatchEmbedding(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.embed_dim, config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTower(nn.Module):
    """A ViT up to its second-to-last block, whose patch features OpenVLA uses. Parameters have the checkpoint's names.

    The last block, the final norm and SigLIP's attention pool are in the checkpoints but never computed: they are
    neither built nor read.
    """

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.embed_dim
        self.patch_embed = _PatchEmbedding(config)
        self.pos_embed = nn.Parameter(torch.empty(1, config.patches, dim))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, config.register_tokens, dim)) if config.register_tokens else None
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth - 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps normalised pixels [3, size, size] to patch features [patches, embed_dim], or a batch of them."""
        if pixels.ndim == 3 and self.blocks and has_kernels(pixels) and not torch.is_grad_enabled():
            return self._fused(pixels)
        images = pixels if pixels.ndim == 4 else pixels[None]
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        x = self.patch_embed(images) + self.pos_embed
        if prefix:
            x = torch.cat((*(token.expand(len(images), -1, -1) for token in prefix), x), dim=1)
        for block in self.blocks:
            x = block(x)
        features = x[:, -self.config.patches :]
        return features if pixels.ndim == 4 else features[0]

    def _fused(self, image: Tensor) -> Tensor:
        """The same for one image [3, size, size] in 7 launches per block, without a backward pass.

        Each norm adds the output before it to the residual; the last matrix adds the final residual.
        """
        proj = self.patch_embed.proj
        x = patch_embedding(image, proj.weight, cast(Tensor, proj.bias), self.pos_embed[0])
        prefix = [token[0] for token in (self.cls_token, self.reg_token) if token is not None]
        if prefix:
            x = torch.cat((*prefix, x))
        blocks = [cast(_Block, block) for block in self.blocks]
        normed: Tensor = blocks[0].norm1(x)
        for block, following in pairwise((*blocks, None)):
            assert block is not None
            scale, mlp_scale = block.scales
            normed, x = _norm_of_sum(block.attn(normed[None])[0], x, scale, block.norm2)
            hidden, last = _gelu(normed, block.mlp.fc1), block.mlp.fc2
            if following is not None:
                normed, x = _norm_of_sum(last(hidden), x, mlp_scale, following.norm1)
        if isinstance(last, RoundedLinear):
            x = x + (last(hidden) if mlp_scale is None else last(hidden) * mlp_scale)
        else:
            x = scaled_sum(hidden, last.weight, last.bias, mlp_scale, x)
        return x[-self.config.patches :]


def _norm_of_sum(x: Tensor, residual: Tensor, scale: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return layernorm_residual(x, residual, scale, norm.weight, norm.bias, norm.eps)


class Projector(nn.Module):
    """The checkpoint's MLP: two layers after one vision tower, three after two (exact GELU between them)."""

    def __init__(self, vision_dim: int, hidden_size: int, *, fused: bool) -> None:
        super().__init__()
        widths = (
            [vision_dim, 4 * vision_dim, hidden_size, hidden_size] if fused else [vision_dim, hidden_size, hidden_size]
        )
        self.depth = len(widths) - 1
        for i in range(self.depth):
            self.add_module(f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1]))

    def forward(self, features: Tensor) -> Tensor:
        *inner, last = (cast(nn.Linear, self.get_submodule(f"fc{i + 1}")) for i in range(self.depth))
        for layer in inner:
            features = _gelu(features, layer)
        return _product(features, last)


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
        """Shape of the pixels of one observation, [3 * towers, size, size]; empty for a model without towers."""
        towers = self.config.towers
        return (3 * len(towers), towers[0].image_size, towers[0].image_size) if self.towers else ()

    def image_embeddings(self, pixel_values: Tensor) -> Tensor:
        """Maps normalised pixels [3 * towers, size, size] to embeddings [image_tokens, hidden]."""
        images = pixel_values.to(self.decoder.device, self.decoder.dtype, non_blocking=True).split(3)
        towers = [partial(tower, image) for tower, image in zip(self.towers, images, strict=True)]
        return self.projector(torch.cat(side_by_side(towers, self.decoder.device), dim=1))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in the checkpoint; fused matrices appear as the slices that have names there.

        Writing to a value writes to the model: loading and saving use this one map.
        """
        parts = {f"vision_backbone.{prefix}": tower for prefix, tower in zip(_TOWERS, self.towers, strict=False)}
        named = {
            f"{prefix}.{name}": parameter.detach()
            for prefix, part in {**parts, "projector": self.projector}.items()
            for name, parameter in part.named_parameters()
        }
        return named | decoder_tensors(self.decoder, _LLM)

    @property
    def unused_tensors(self) -> str:
        """Regular expression of the other names in released files."""
        blocks = "|".join(
            rf"vision_backbone\.{prefix}\.blocks\.{tower.depth - 1}"
            for prefix, tower in zip(_TOWERS, self.config.towers, strict=False)
        )
        return rf"({blocks}|vision_backbone\.(fused_)?featurizer\.(norm|fc_norm|attn_pool|head))\..+|.+\.inv_freq"


def load_model(
    directory: Path,
    config: OpenVLAConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: str = "none",
    quantize_vision: bool = False,
    progress: Progress = no_progress,
) -> OpenVLA:
    """Loads the model of a checkpoint, ready to decode.

    Args:
        dtype: of the unquantised part; the output head may have another, see `head_dtype`.
        quantization: format of the decoder layers' matrices, checked by `check_quantization`.
        quantize_vision: give the towers' blocks and the projector the same format, checked by it too.

    Raises UserError: the weights are incomplete or do not fit the config.
    """
    names = (f"{_LLM}{name}.weight" for name in ("model.embed_tokens", "lm_head"))
    tables = read_tables(directory, *names, tied=config.llama.tie_word_embeddings)
    config = replace(config, llama=replace(config.llama, tie_word_embeddings=tables.tied))
    model = empty_model(partial(OpenVLA, config), dtype, device)
    check_weights(directory, model.checkpoint_tensors(), unused=model.unused_tensors, stored=tables.stored)
    if quantization == "none":
        allocate(model, device)
        load_weights(directory, model.checkpoint_tensors(), progress, stored=tables.stored)
    else:
        _load_quantized(model, directory, device, quantization, progress, tables)
    if quantize_vision:
        for part in (model.towers, model.projector):
            quantize_products(part, quantization)
    return model.eval().requires_grad_(False)


def _load_quantized(
    model: OpenVLA, directory: Path, device: torch.device, quantization: str, progress: Progress, tables: Tables
) -> None:
    """Allocates, reads and quantises layer by layer, for a device that could not hold them unquantised."""
    decoder = model.decoder
    for part in (*model.towers, model.projector, decoder.embed_tokens, decoder.norm, decoder.lm_head):
        part.to_empty(device=device)
    tie_head(decoder)
    turn = turn_stream(decoder) if quantization == ROTATED else None
    around = {name: tensor for name, tensor in model.checkpoint_tensors().items() if not tensor.is_meta}
    load_weights(directory, around, _share(progress, 0, len(decoder.layers) + 1), stored=tables.stored)
    for i, module in enumerate(decoder.layers):
        layer = cast(DecoderLayer, module).to_empty(device=device)
        tensors = layer_tensors(layer, decoder.config, f"{_LLM}model.layers.{i}.")
        load_weights(directory, tensors, _share(progress, i + 1, len(decoder.layers) + 1))
        del tensors  # they hold the unquantised matrices
        if turn is not None:
            rotate_layer(layer, turn)
        quantize_layer(layer, quantization)


def _share(progress: Progress, index: int, parts: int) -> Progress:
    return lambda what, done: progress(what, (index + done) / parts)
