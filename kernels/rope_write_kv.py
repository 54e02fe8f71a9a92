"""RoPE on queries and keys, and keys and values into the KV ring, in one pass."""

import torch
from torch import Tensor


def rope_write_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv_rows: Tensor, k_ring: Tensor, v_ring: Tensor
) -> Tensor:
    """Rotates q and k by position (RoFormer eq. 34, Llama's half-split layout) and writes k and v to the ring.

    Args:
        q: [n_rows, heads, head_dim].
        k: [n_rows, kv_heads, head_dim].
        v: [n_rows, kv_heads, head_dim].
        cos: float32 [n_rows, head_dim / 2], of each row's position.
        sin: like cos.
        kv_rows: int64 [n_rows], destination rows, all different.
        k_ring: [slots, slot_rows, kv_heads, head_dim], one layer's keys, written in place.
        v_ring: like k_ring, for the values.

    Returns:
        The rotated q, dtype of q. The rotation is computed in float32, or in float64 for float64.
    """
    cos, sin = cos[:, None], sin[:, None]
    k_ring.flatten(0, 1).index_copy_(0, kv_rows, _rotate(k, cos, sin))
    v_ring.flatten(0, 1).index_copy_(0, kv_rows, v)
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    rotated = x.new_empty(x.shape)
    half = first.shape[-1]
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half:] = second * cos + first * sin
    return rotated
