# SPDX-License-Identifier: Apache-2.0
"""Applies RoPE to queries and keys, and writes keys and values to the KV cache, in one pass."""

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl

_BLOCK = 512  # elements of half a head per program: 8 per thread and operand, which 16-bit dtypes read at once


def rope_write_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv_rows: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Rotates q and k by position (RoFormer eq. 34, Llama's half-split layout) and writes k and v to the KV cache.

    Returns the rotated q, dtype of q. The rotation is computed in float32, or in float64 for float64.

    Args:
        q, k, v: [n_rows, heads or kv_heads, head_dim].
        cos, sin: float32 [n_rows, head_dim / 2], of each row's position.
        kv_rows: int64 [n_rows], destination rows, all different.
        k_cache, v_cache: [slots, slot_rows, kv_heads, head_dim], one layer's, written in place.
    """
    run = rope_write_kv_triton if has_kernels(q) else rope_write_kv_reference
    return run(q, k, v, cos, sin, kv_rows, k_cache, v_cache)


def rope_write_kv_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv_rows: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """`rope_write_kv` in PyTorch; rotates queries and keys together, since on a CPU dispatch takes most of the time."""
    cos, sin = cos[:, None], sin[:, None]
    both = torch.cat((q, k), dim=1)
    first, second = both.to(torch.promote_types(q.dtype, torch.float32)).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(q.dtype)
    q, k = rotated.split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    k_cache.flatten(0, 1).index_copy_(0, kv_rows, k)
    v_cache.flatten(0, 1).index_copy_(0, kv_rows, v)
    return q


def rope_write_kv_triton(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv_rows: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """`rope_write_kv` as one launch: a program rotates some heads of one row."""
    (n_rows, heads, dim), kv_heads = q.shape, k.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block_half = power_of_two(dim // 2)
    block_heads = min(power_of_two(max(heads, kv_heads)), max(1, _BLOCK // block_half))
    q_blocks, kv_blocks = -(-heads // block_heads), -(-kv_heads // block_heads)
    _rope_write_kv[(n_rows, q_blocks + kv_blocks)](
        q, k, v, cos.contiguous(), sin.contiguous(), kv_rows, k_cache, v_cache, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_cache.stride(1), k_cache.stride(2), v_cache.stride(1), v_cache.stride(2),
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK_HALF=block_half, BLOCK_HEADS=block_heads, num_warps=2,
    )  # fmt: skip
    return out


@jit
def _rope_write_kv(  # type: ignore[no-untyped-def]
    q, k, v, cos, sin, kv_rows, k_cache, v_cache, out,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    k_cache_row_stride, k_cache_head_stride, v_cache_row_stride, v_cache_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    turn_cos = tl.load(cos + row * HALF + pair, is_pair, other=0.0)
    turn_sin = tl.load(sin + row * HALF + pair, is_pair, other=0.0)
    if block < q_blocks:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        mask = (head < HEADS) & is_pair
        source = q + row * q_row_stride + head * q_head_stride + pair
        first = tl.load(source, mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask, other=0.0).to(tl.float32)
        target = out + (row * HEADS + head) * (2 * HALF) + pair
        tl.store(target, first * turn_cos - second * turn_sin, mask)
        tl.store(target + HALF, second * turn_cos + first * turn_sin, mask)
    else:
        head = (block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        mask = (head < KV_HEADS) & is_pair
        cache_row = tl.load(kv_rows + row)
        source = k + row * k_row_stride + head * k_head_stride + pair
        first = tl.load(source, mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask, other=0.0).to(tl.float32)
        target = k_cache + cache_row * k_cache_row_stride + head * k_cache_head_stride + pair
        tl.store(target, first * turn_cos - second * turn_sin, mask)
        tl.store(target + HALF, second * turn_cos + first * turn_sin, mask)
        source = v + row * v_row_stride + head * v_head_stride + pair
        target = v_cache + cache_row * v_cache_row_stride + head * v_cache_head_stride + pair
        tl.store(target, tl.load(source, mask), mask)
        tl.store(target + HALF, tl.load(source + HALF, mask), mask)
