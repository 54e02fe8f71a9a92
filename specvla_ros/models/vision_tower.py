# SPDX-License-Identifier: Apache-2.0
"""One vision transformer: DINOv2 with registers, or SigLIP."""

from functools import partial
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvla_kernels.device import has_kernels
from specvla_kernels.layer_products import gelu_product, scaled_sum
from specvla_kernels.layernorm_residual import layernorm_residual
from specvla_kernels.linear import linear
from specvla_kernels.patch_embedding import patch_embedding
from specvla_ros.models.config import VisionTowerConfig

_LayerNorm = partial(nn.LayerNorm, eps=1e-6)


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
        q, k, v = (
            linear(x, self.qkv.weight, self.qkv.bias)
            .view(batch, tokens, 3, self.heads, dim // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return linear(attended.transpose(1, 2).reshape(batch, tokens, dim), self.proj.weight, self.proj.bias)


class _Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return linear(gelu_product(x, self.fc1.weight, self.fc1.bias), self.fc2.weight, self.fc2.bias)


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
        """Of LayerScale, [dim] each; they stay beside the matrices, as checkpoints and training have them."""
        first, second = (each.scale_factor if isinstance(each, _LayerScale) else None for each in (self.ls1, self.ls2))
        return first, second


class _PatchEmbedding(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.embed_dim, config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTower(nn.Module):
    """A ViT up to the block before its last, whose patch features OpenVLA uses. Parameter names are the checkpoint's.

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
        """Normalised pixels [3, size, size] to patch features [patches, embed_dim]; or a batch of both."""
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
        """The same for one image [3, size, size] in 7 launches per block, which have no backward pass.

        Each norm adds what comes before it, and the last matrix what is left.
        """
        x = patch_embedding(image, self.patch_embed.proj.weight, _bias(self.patch_embed.proj), self.pos_embed[0])
        prefix = [token[0] for token in (self.cls_token, self.reg_token) if token is not None]
        if prefix:
            x = torch.cat((*prefix, x))
        blocks = [cast(_Block, block) for block in self.blocks]
        normed: Tensor = blocks[0].norm1(x)
        for block, following in pairwise((*blocks, None)):
            assert block is not None
            scale, mlp_scale = block.scales
            normed, x = _norm_of_sum(block.attn(normed[None])[0], x, scale, block.norm2)
            fc1, fc2 = block.mlp.fc1, block.mlp.fc2
            hidden = gelu_product(normed, fc1.weight, fc1.bias)
            if following is not None:
                normed, x = _norm_of_sum(fc2(hidden), x, mlp_scale, following.norm1)
        return scaled_sum(hidden, fc2.weight, fc2.bias, mlp_scale, x)[-self.config.patches :]


def _norm_of_sum(x: Tensor, residual: Tensor, scale: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return layernorm_residual(x, residual, scale, norm.weight, norm.bias, norm.eps)


def _bias(convolution: nn.Conv2d) -> Tensor:
    assert convolution.bias is not None
    return convolution.bias
