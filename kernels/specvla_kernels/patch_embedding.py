# SPDX-License-Identifier: Apache-2.0
"""The patches of an image as rows of a vision transformer, in one launch."""

import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, tl
from specvla_kernels.fused_linear import dot

_TILE = 32, 32, 64  # patches, columns, depth: 256 patches of 1024 columns are 256 programs


def patch_embedding(image: Tensor, weight: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
    """Each patch's product with the weight, plus bias [dim] and position [patches, dim]: [patches, dim].

    The image is [3, size, size], the weight [dim, 3, patch, patch], both contiguous; whole patches, row by row.
    """
    run = patch_embedding_triton if has_kernels(image) else patch_embedding_reference
    return run(image, weight, bias, positions)


def patch_embedding_reference(image: Tensor, weight: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
    """`patch_embedding` in PyTorch."""
    patches = F.conv2d(image[None], weight, bias, stride=weight.shape[-1])[0]
    return patches.flatten(1).T + positions


def patch_embedding_triton(image: Tensor, weight: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
    """`patch_embedding` as one launch, which gathers the patches while it multiplies."""
    size, patch, dim = image.shape[-1], weight.shape[-1], len(weight)
    side = size // patch
    block_m, block_n, block_k = _TILE
    out = image.new_empty(side * side, dim)
    _patch_embedding[(-(-side * side // block_m), -(-dim // block_n))](
        image, weight, bias, positions, out, positions.stride(0),
        SIZE=size, PATCH=patch, SIDE=side, DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        WIDEN=image.device.type == "cpu", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@jit
def _patch_embedding(  # type: ignore[no-untyped-def]
    image, weight, bias, positions, out, position_stride,
    SIZE: tl.constexpr, PATCH: tl.constexpr, SIDE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < SIDE * SIDE, column < DIM
    depth: tl.constexpr = 3 * PATCH * PATCH
    corner = (row // SIDE) * (PATCH * SIZE) + row % SIDE * PATCH
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        colour, y, x = k // (PATCH * PATCH), k // PATCH % PATCH, k % PATCH
        pixel = image + corner[:, None] + (colour * (SIZE * SIZE) + y * SIZE + x)[None, :]
        pixels = tl.load(pixel, is_row[:, None] & (k < depth)[None, :], other=0.0)
        matrix = tl.load(weight + column[:, None] * depth + k[None, :], is_column[:, None] & (k < depth)[None, :], 0.0)
        result = dot(pixels, tl.trans(matrix), result, WIDEN)
    result += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    inside = is_row[:, None] & is_column[None, :]
    result += tl.load(positions + row[:, None] * position_stride + column[None, :], inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * DIM + column[None, :], result, inside)
