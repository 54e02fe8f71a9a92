# SPDX-License-Identifier: Apache-2.0
"""Attention of a packed batch over the KV cache: causal chains, chunks after a prefix, and trees."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.attention_plan import AttentionPlan, attend_chain
from specvla_kernels.device import has_kernels, jit, power_of_two, tl
from specvla_kernels.layout import PackedLayout

# Maximum keys per step, and maximum bytes of them, by rows of a tile. With a head of 128 in bf16, 64 rows and 64 keys
# spill registers on sm_87 and sm_120; 16 rows and 64 keys hide more of a decode step's reads. The queries and two
# stages of keys and values fit the 99 KiB of sm_120 in every dtype; float32 with a head of 128 spills and is slow.
_STEPS = {16: (64, 16 << 10), 32: (64, 16 << 10), 64: (32, 8 << 10)}
# The result of a larger tile, 64 rows with a head of 256 (Gemma), fills the registers of 4 warps: on sm_120 they spill
# where shares of keys are merged. It has 8 warps. 32 rows in float32 spill there with 64 keys.
_LARGEST_RESULT = 64 * 128
_FEWER_KEYS = (32, 16 << 10)


def packed_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: PackedLayout) -> Tensor:
    """Each row attends to its slot's committed prefix and to its own segment: causally in a chain, ancestors in a tree.

    In a chain of a prefix language model each row attends to the whole chain (`Span.sees_all`). The keys and values of
    the rows themselves are already in the KV cache (`rope_write_kv`). Softmax in float32, scale 1 / sqrt(head_dim).
    Rows that no segment has written are not read.

    The kernel is FlashAttention-2's (arXiv 2307.08691) online softmax. If a forward has few tiles, their keys are split
    as in Flash-Decoding, and merged by a tile's last program to finish (as in Stream-K, arXiv 2301.03598).

    Args:
        q: [n_rows, heads, head_dim], rotated; the result has its shape and dtype.
        k_cache, v_cache: [slots, slot_rows, kv_heads, head_dim], one layer; heads is a multiple of kv_heads.
    """
    if has_kernels(q):
        plan = layout.attention_plan(q.shape[1], k_cache.shape[2], k_cache.shape[1])
        out = None if plan.chain is None else attend_chain(q, k_cache, v_cache, plan.chain)
        return packed_attention_triton(q, k_cache, v_cache, layout.ancestors, plan, out)
    return packed_attention_reference(q, k_cache, v_cache, layout)


def packed_attention_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: PackedLayout) -> Tensor:
    """`packed_attention` in PyTorch."""
    grouped = q.shape[1] != k_cache.shape[2]
    alone = len(layout.spans) == 1 and layout.spans[0].length == q.shape[0]
    out = q if alone else torch.empty_like(q)
    for span, mask in zip(layout.spans, layout.masks, strict=True):
        slot, rows = slice(span.slot, span.slot + 1), span.prefix_len + span.length
        attended = F.scaled_dot_product_attention(
            q[None, span.start : span.stop].transpose(1, 2),
            k_cache[slot, :rows].transpose(1, 2),
            v_cache[slot, :rows].transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and span.length > 1 and not span.sees_all,
            enable_gqa=grouped,
        )
        attended = attended.transpose(1, 2)[0]
        if alone:
            return attended
        out[span.start : span.stop] = attended
    return out


def packed_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, ancestors: Tensor, plan: AttentionPlan, out: Tensor | None = None
) -> Tensor:
    """`packed_attention` as one launch; if `out` is given, writes only the rows that have tiles."""
    (n_rows, heads, dim), kv_heads = q.shape, k_cache.shape[2]
    n_tiles, splits, block_d = len(plan.tiles), plan.splits, power_of_two(dim, 16)
    out = q.new_empty(n_rows, heads, dim) if out is None else out
    partial = sums = arrivals = out  # not read unless keys are split
    if splits > 1:
        arrivals = plan.arrivals
        partial = q.new_empty(n_tiles, kv_heads, splits, plan.block_m, block_d, dtype=torch.float32)
        sums = q.new_empty(n_tiles, kv_heads, splits, plan.block_m, dtype=torch.float32)
    is_wide = plan.block_m * block_d > _LARGEST_RESULT
    has_fewer_keys = is_wide or (plan.block_m == 32 and q.itemsize == 4)
    most_keys, most_bytes = _FEWER_KEYS if has_fewer_keys else _STEPS[plan.block_m]
    block_n = max(16, min(most_keys, most_bytes // (block_d * q.itemsize)))
    _packed_attention[(n_tiles, kv_heads, splits)](
        q, k_cache, v_cache, ancestors, plan.tiles, out, partial, sums, arrivals, math.log2(math.e) / math.sqrt(dim),
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_M=plan.block_m, BLOCK_D=block_d, BLOCK_N=block_n,
        SPLIT=splits > 1, WIDEN=q.device.type == "cpu",
        num_warps=8 if is_wide else 4, num_stages=2,
    )  # fmt: skip
    return out


@jit
def _packed_attention(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, ancestors, tiles, out, partial, sums, arrivals, scale,
    q_row_stride, q_head_stride, k_slot_stride, k_row_stride, k_head_stride,
    v_slot_stride, v_row_stride, v_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot, prefix_len, start, length, is_tree, first = _tile(tiles, tile)
    if length == 0:
        return
    node, head, is_row = _tile_queries(first, length, kv_head, HEADS // KV_HEADS, BLOCK_M)
    row = (start + node).to(tl.int64)
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    is_d = d < HEAD_DIM
    queries = tl.load(
        q + row[:, None] * q_row_stride + head[:, None] * q_head_stride + d[None, :],
        is_row[:, None] & is_d[None, :], other=0.0,
    )  # fmt: skip
    nodes = tl.load(ancestors + row, is_row, other=0)
    low, high = nodes.to(tl.int32), (nodes >> 32).to(tl.int32)  # a tile of int64 would take too many registers

    # A chain's tile sees no key after its last row; a tree's nodes are in any order.
    stop = tl.where(is_tree != 0, length, tl.minimum(first + BLOCK_M // (HEADS // KV_HEADS), length))
    n_keys = prefix_len + stop
    share = tl.cdiv(tl.cdiv(n_keys, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, n_keys)
    seen_by_all = prefix_len + tl.where(is_tree != 0, 0, first + 1)
    whole = tl.maximum(0, tl.minimum(end, seen_by_all) - begin) // BLOCK_N * BLOCK_N
    masked_begin = begin + whole

    k_base = k_cache + slot * k_slot_stride + kv_head.to(tl.int64) * k_head_stride + d[None, :]
    v_base = v_cache + slot * v_slot_stride + kv_head.to(tl.int64) * v_head_stride + d[None, :]
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for key_begin in range(begin, masked_begin, BLOCK_N):
        key = (key_begin + n).to(tl.int64)[:, None]
        if BLOCK_D == HEAD_DIM:
            keys, values = tl.load(k_base + key * k_row_stride), tl.load(v_base + key * v_row_stride)
        else:
            keys = tl.load(k_base + key * k_row_stride, is_d[None, :], other=0.0)
            values = tl.load(v_base + key * v_row_stride, is_d[None, :], other=0.0)
        scores = _dot(queries, tl.trans(keys), WIDEN) * scale
        peak, total, result = _attend(scores, values, peak, total, result, WIDEN)
    for key_begin in range(masked_begin, end, BLOCK_N):
        key = key_begin + n
        # Values are masked in addition to scores: rows never written may be NaN, and 0 x NaN is NaN.
        mask = (key < end)[:, None] & is_d[None, :]
        keys = tl.load(k_base + key.to(tl.int64)[:, None] * k_row_stride, mask, other=0.0)
        values = tl.load(v_base + key.to(tl.int64)[:, None] * v_row_stride, mask, other=0.0)
        scores = _dot(queries, tl.trans(keys), WIDEN) * scale
        key_node = key - prefix_len
        word = tl.where((key_node < 32)[None, :], low[:, None], high[:, None])
        is_ancestor = (word >> (key_node & 31)[None, :]) & 1
        among = tl.where(is_tree != 0, is_ancestor == 1, key_node[None, :] <= node[:, None])
        seen = ((key_node < 0)[None, :] | among) & (key < end)[None, :]
        peak, total, result = _attend(tl.where(seen, scores, float("-inf")), values, peak, total, result, WIDEN)

    something = tl.where(total == 0.0, 1.0, total)  # a share without a visible key gives 0, not 0 / 0
    result = result / something[:, None]
    if SPLIT:
        m = tl.arange(0, BLOCK_M)
        tile_head = tile * KV_HEADS + kv_head
        first_place = tile_head * tl.num_programs(2) * BLOCK_M + m
        place = first_place + split * BLOCK_M
        tl.store(partial + place[:, None] * BLOCK_D + d[None, :], result)
        tl.store(sums + place, tl.where(total == 0.0, float("-inf"), peak + tl.log2(something)))
        tl.debug_barrier()  # all threads have written before one of them counts the arrival
        if tl.atomic_add(arrivals + tile_head, 1, sem="acq_rel", scope="gpu") == tl.num_programs(2) - 1:
            tl.store(arrivals + tile_head, 0)  # for the next launch: all have arrived
            merged = _merged(partial, sums, first_place, BLOCK_M, BLOCK_D)
            target = out + (row[:, None] * HEADS + head[:, None]) * HEAD_DIM + d[None, :]
            tl.store(target, merged, is_row[:, None] & is_d[None, :])
    else:
        target = out + (row[:, None] * HEADS + head[:, None]) * HEAD_DIM + d[None, :]
        tl.store(target, result, is_row[:, None] & is_d[None, :])


@jit
def _attend(scores, values, peak, total, result, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of the online softmax, in powers of two."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing visible yet: 2^-inf, not -inf + inf
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    weighted = _dot(weights.to(values.dtype), values, WIDEN)
    return new_peak, total * shrink + tl.sum(weights, 1), result * shrink[:, None] + weighted


@jit
def _dot(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product in float32; widens in Triton's interpreter, which multiplies the bits of bfloat16 as integers."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:  # noqa: RET505 (the compiler must not see both)
        return tl.dot(a, b, input_precision="ieee")


@jit
def _tile(tiles, tile):  # type: ignore[no-untyped-def]
    entry = tiles + tile * 6
    slot = tl.load(entry).to(tl.int64)
    return slot, tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)


@jit
def _tile_queries(first, length, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.arange(0, BLOCK_M)
    node = first + m // GROUP
    return node, kv_head * GROUP + m % GROUP, (m < BLOCK_M // GROUP * GROUP) & (node < length)


@jit
def _merged(partial, sums, place, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Merges the shares' results, each weighted by the sum of its weights; `place` is the first share's rows."""
    d = tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for split in range(tl.num_programs(2)):
        there = place + split * BLOCK_M
        # Read from the cache that all multiprocessors share.
        log_sum = tl.load(sums + there, cache_modifier=".cg")
        part = tl.load(partial + there[:, None] * BLOCK_D + d[None, :], cache_modifier=".cg")
        new_peak = tl.maximum(peak, log_sum)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink, weight = tl.exp2(peak - base), tl.exp2(log_sum - base)
        result = result * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        peak = new_peak
    return result / tl.where(total == 0.0, 1.0, total)[:, None]
