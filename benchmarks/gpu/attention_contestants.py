# SPDX-License-Identifier: Apache-2.0
"""Alternatives to packed attention: torch's SDPA, FlexAttention and varlen attention, and flash-attn.

Each computes a batch of `kernel_cases.batches` from the same KV cache. One-time preparations are not timed: masks,
block masks, lengths, and the packed keys for the varlen kernels, which do not support slots.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.kernel_cases import Batch, Calls
from specvla_ros.engine.kv_cache import KVCache

SDPA, FLEX, VARLEN, FLASH = "SDPA", "FlexAttention", "torch varlen", "flash-attn"


def contestants(batch: Batch, q: Tensor, cache: KVCache) -> Calls:
    """Returns each contestant's attention of one layer, or why it cannot run here.

    Args:
        batch: its layout defines the attention mask.
        q: [rows, heads, dim].
        cache: a filled cache.
    """
    made: Calls = {}
    for name, make in ((SDPA, _sdpa), (FLEX, _flex), (VARLEN, _varlen), (FLASH, _flash)):
        try:
            made[name] = make(batch, q, cache)
        except Exception as error:  # missing, too old, or no kernels for the device
            made[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return made


def _stored(batch: Batch, cache: KVCache) -> list[tuple[Any, Tensor, Tensor, Tensor | None]]:
    """Each segment with its keys and values [rows, kv_heads, dim] and its mask."""
    keys, values = cache.keys[0], cache.values[0]
    rows = [(span, span.prefix_len + span.length) for span in batch.layout.spans]
    pairs = zip(rows, batch.layout.masks, strict=True)
    return [(span, keys[span.slot, :n], values[span.slot, :n], mask) for (span, n), mask in pairs]


def _sdpa(batch: Batch, q: Tensor, cache: KVCache) -> Callable[[], Tensor]:
    """One call per segment: torch has no kernel for masked segments of different lengths."""
    parts = _stored(batch, cache)

    def call() -> Tensor:
        out = []
        for span, k, v, mask in parts:
            rows, keys, values = (each.transpose(0, 1)[None] for each in (q[span.start : span.stop], k, v))
            causal = mask is None and span.length > 1 and not span.sees_all
            attended = F.scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
            )
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)

    return call


def _flex(batch: Batch, q: Tensor, cache: KVCache) -> Callable[[], Tensor]:
    """One compiled call over all slots of the cache with a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not q.is_cuda:
        return _refuse("compiled on a GPU only")
    k, v = (store[0].flatten(0, 1).transpose(0, 1)[None] for store in (cache.keys, cache.values))
    seen = torch.zeros(len(q), k.shape[2], dtype=torch.bool, device=q.device)
    for span, stored, _, mask in _stored(batch, cache):
        whole = torch.ones(span.length, len(stored), dtype=torch.bool, device=q.device)
        first = span.slot * cache.slot_rows
        visible = mask if mask is not None else whole.tril(len(stored) - span.length)
        seen[span.start : span.stop, first : first + len(stored)] = visible
    rows, keys = seen.shape
    blocks = create_block_mask(lambda _b, _h, row, key: seen[row, key], None, None, rows, keys, device=str(q.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    queries = q.transpose(0, 1)[None]
    return lambda: compiled(queries, k, v, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)


def _refuse(why: str) -> Callable[[], Tensor]:
    raise NotImplementedError(why)


def _lengths(batch: Batch, q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """Packed keys and values, ends of the segments' rows and keys, and the longest of each."""
    parts = _stored(batch, cache)
    if any(mask is not None for *_, mask in parts):
        _refuse("a tree needs a mask, which it does not support")
    k, v = torch.cat([k for _, k, _, _ in parts]), torch.cat([v for *_, v, _ in parts])
    rows, keys = [span.length for span, *_ in parts], [len(k) for _, k, _, _ in parts]
    ends = [torch.tensor([0, *n], device=q.device).cumsum(0).to(torch.int32) for n in (rows, keys)]
    return k, v, ends[0], ends[1], max(rows), max(keys)


def _varlen(batch: Batch, q: Tensor, cache: KVCache) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    if not q.is_cuda:
        return _refuse("runs on a GPU only")
    k, v, q_ends, k_ends, q_most, k_most = _lengths(batch, q, cache)
    attend: Any = varlen_attn
    # A single row sees every key, so causality does not matter, and some versions align it to the first key.
    causal = q_most > 1
    try:
        attend(q, k, v, q_ends, k_ends, q_most, k_most, is_causal=causal)
    except TypeError:  # newer versions take a window
        window = (-1, 0) if causal else (-1, -1)
        return lambda: attend(q, k, v, q_ends, k_ends, q_most, k_most, window_size=window)
    return lambda: attend(q, k, v, q_ends, k_ends, q_most, k_most, is_causal=causal)


def _flash(batch: Batch, q: Tensor, cache: KVCache) -> Callable[[], Tensor]:
    from flash_attn import flash_attn_varlen_func

    if not q.is_cuda:
        return _refuse("runs on a GPU only")
    k, v, q_ends, k_ends, q_most, k_most = _lengths(batch, q, cache)
    return lambda: flash_attn_varlen_func(q, k, v, q_ends, k_ends, q_most, k_most, causal=q_most > 1)
