# SPDX-License-Identifier: Apache-2.0
"""Attention of the one long chain of a forward, a prompt or a chunk of it, by flash-attn's varlen kernel.

flash-attn masks causally and knows no trees: those stay with `packed_attention`, whose plan then has no tiles of the
chain. Its kernel takes where a sequence begins and ends (BlockInfo in block_info.h), so the chain's rows may lie
anywhere among the packed ones.
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
    """Where the chain lies, on the device, and bounds of its rows and keys."""

    # int32 [2, 2], first and one past the last: of its packed rows, and of its keys counted through all slots.
    ends: Tensor
    most_rows: int
    most_keys: int


def attend_chain(q: Tensor, k_cache: Tensor, v_cache: Tensor, chain: Chain) -> Tensor:
    """`packed_attention` of the chain's rows alone, in float16 or bfloat16; the last row sees the last key.

    Shapes as there; other rows of the result are not written.
    """
    attend = varlen_kernel()
    assert attend is not None
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    return attend(q, keys, values, *chain.ends.unbind(), chain.most_rows, chain.most_keys, causal=True)


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """flash-attn's kernel; None where it is not installed or cannot be loaded."""
    try:
        return import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, OSError, AttributeError):  # built for another torch, it fails while it is linked
        return None


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash-attn is there and computes heads of this kind."""
    return dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256 and varlen_kernel() is not None


def version() -> str:
    """The version of flash-attn; empty where it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""
