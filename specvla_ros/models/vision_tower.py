# SPDX-License-Identifier: Apache-2.0
"""One vision transformer: DINOv2 with registers, or SigLIP."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.proj(attended.transpose(1, 2).reshape(batch, tokens, dim))


class _Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


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


class _PatchEmbedding(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.embed_dim, config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTower(nn.Module):
    """A ViT up to the block before its last, whose patch features OpenVLA uses.

    The last block, the final norm and SigLIP's attention pool are in the checkpoints but never computed: they are
    neither built nor read. Parameter names are the checkpoint's.
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
        images = pixels if pixels.ndim == 4 else pixels[None]
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        x = self.patch_embed(images) + self.pos_embed
        if prefix:
            x = torch.cat((*(token.expand(len(images), -1, -1) for token in prefix), x), dim=1)
        for block in self.blocks:
            x = block(x)
        features = x[:, -self.config.patches :]
        return features if pixels.ndim == 4 else features[0]
