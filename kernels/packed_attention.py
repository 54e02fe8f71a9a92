"""Attention of a packed batch over the KV ring: causal chains, chunks behind a prefix, and trees."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.layout import PackedLayout


def packed_attention(q: Tensor, k_ring: Tensor, v_ring: Tensor, layout: PackedLayout) -> Tensor:
    """Each row attends to its slot's committed prefix and to its own segment: causally in a chain, ancestors in a tree.

    Segments never see each other. The keys and values of the rows themselves are already in the ring
    (`rope_write_kv`). Softmax in float32, scale 1 / sqrt(head_dim).

    Args:
        q: [n_rows, heads, head_dim], rotated.
        k_ring: [slots, slot_rows, kv_heads, head_dim], one layer; heads is a multiple of kv_heads.
        v_ring: like k_ring.
        layout: of this packed forward.

    Returns:
        [n_rows, heads, head_dim], dtype of q.
    """
    out = torch.empty_like(q)
    grouped = q.shape[1] != k_ring.shape[2]
    for span, mask in zip(layout.spans, layout.masks, strict=True):
        rows = span.prefix_len + span.length
        keys = k_ring[span.slot, :rows].transpose(0, 1)
        values = v_ring[span.slot, :rows].transpose(0, 1)
        queries = q[span.start : span.stop].transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None and span.length > 1,
            enable_gqa=grouped,
        )
        out[span.start : span.stop] = attended[0].transpose(0, 1)
    return out
