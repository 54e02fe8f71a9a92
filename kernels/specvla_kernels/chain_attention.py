# SPDX-License-Identifier: Apache-2.0
"""Attention of the one long chain of a forward, a prompt or a chunk of it, by flash-attn's varlen kernel.

flash-attn masks causally, and knows no trees: those stay with `packed_attention`, whose plan then has no tiles of the
chain. Its kernel finds a sequence by where it begins and ends (BlockInfo in its block_info.h), so that the chain's rows
may lie anywhere among the packed ones, and its keys in their slot of the KV cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

PACKAGE = "flash-attn"


@dataclass(frozen=True)
class Chain:
    """Where the chain lies, on the device.

    Args:
        ends: int32 [2, 2], first and one past the last: of its packed rows, and of its keys counted through all slots.
        most_rows: of any chain that may stand there.
        most_keys: likewise.
    """

    ends: Tensor
    most_rows: int
    most_keys: int


def attend_chain(q: Tensor, k_cache: Tensor, v_cache: Tensor, chain: Chain) -> Tensor:
    """What `packed_attention` gives for the chain's rows, in float16 or bfloat16; the others are not written.

    Args:
        q: [n_rows, heads, head_dim], rotated.
        k_cache: [slots, slot_rows, kv_heads, head_dim], one layer.
        v_cache: like k_cache.
        chain: which rows; causal, the last row sees the last key.

    Returns:
        [n_rows, heads, head_dim].
    """
    attend = varlen_kernel()
    assert attend is not None
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    of_rows, of_keys = chain.ends.unbind()
    out: Tensor = attend(q, keys, values, of_rows, of_keys, chain.most_rows, chain.most_keys, causal=True)
    return out


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """flash-attn's; None where it is not installed, or cannot be loaded."""
    try:
        kernel: Callable[..., Any] = import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, OSError, AttributeError):  # built for another torch, it fails while it is linked
        return None
    return kernel


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether it is there and computes heads of this kind."""
    return dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256 and varlen_kernel() is not None


def version() -> str:
    """Of flash-attn; empty where it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""
