# SPDX-License-Identifier: Apache-2.0
"""A table on the device of what each program of the attention kernel computes, so that a launch fits a CUDA graph.

flash-attn masks causally and knows no trees: it computes the one long chain of a forward at most, a prompt or a chunk
of it, whose plan then has no tiles of the chain. Its varlen kernel takes where a sequence begins and ends (BlockInfo in
block_info.h), so the chain's rows may lie anywhere among the packed ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from specvla_kernels.device import power_of_two, to_device

_SMALLEST_TILE, _LARGEST_TILE = 16, 64  # an MMA's rows; what keeps a head of 128 in registers
_KEYS_PER_SPLIT = 64  # one block of keys: fewer would leave programs idle
_MOST_SPLITS = 16
_NO_WORK = (0,) * 6
_PROGRAMS_PER_PROCESSOR = 2  # resident ones that hide each other's waits


@dataclass(frozen=True)
class Span:
    """Where one segment lies in the packed batch, `length` rows from `start`, and in its KV slot."""

    slot: int
    start: int
    length: int
    # Committed rows of the slot; node j writes its keys and values to row `prefix_len + j`. `-length` for rows that see
    # nothing; see `idle`.
    prefix_len: int
    is_tree: bool  # True: node i sees the prefix and the nodes in `ancestors[start + i]`. False: a chain, causal
    sees_all: bool = False  # of a chain: every row sees all of it, as the prompts of prefix language models do

    @staticmethod
    def idle(start: int, length: int) -> "Span":
        """Rows that no segment has: the attention kernel finds no key before `prefix_len + length` = 0 and gives 0."""
        return Span(0, start, length, -length, is_tree=True)

    @property
    def stop(self) -> int:
        return self.start + self.length

    def first_kv_row(self, slot_rows: int) -> int:
        """The row of node 0's keys and values, counted through all slots."""
        return self.slot * slot_rows + self.prefix_len


@dataclass(frozen=True)
class Chain:
    """Where the chain lies, on the device, and bounds of its rows and keys."""

    # int32 [2, 2], first and one past the last: of its packed rows, and of its keys counted through all slots.
    ends: Tensor
    most_rows: int
    most_keys: int


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of one packed forward, cut into tiles of queries; all layers share it.

    A tile is some nodes of one segment times the query heads that share a key head. The table alone says what a launch
    does, its shape how large the launch is: a new table in the same memory serves a captured launch's next forward.
    """

    # int32 [n_tiles, 6], per tile: the segment's slot, prefix_len, start (packed row), length (rows), whether its rows'
    # ancestors are read (1: a tree, or rows that see all) or it is causal (0), and the tile's first node. A length of
    # 0: no work.
    tiles: Tensor
    group: int  # query heads per key head
    kv_heads: int
    block_m: int  # rows of a tile, a power of two: nodes times `group`, and what is left over is idle
    splits: int  # equal shares of each tile's keys, merged by log-sum-exp
    chain: Chain | None = None  # the chain without tiles, which flash-attn computes

    @cached_property
    def arrivals(self) -> Tensor:
        """int32 [n_tiles * kv_heads], finished shares of each tile; 0 before and after each launch.

        The layers of one forward run in order on one stream and share it; forwards do not.
        """
        return torch.zeros(len(self.tiles) * self.kv_heads, dtype=torch.int32, device=self.tiles.device)

    def table(self, spans: Sequence[Span]) -> Tensor:
        """`tiles` for another forward of the same bucket, on the host; raises ValueError where it has too few tiles."""
        rows = _tile_rows(spans, self.block_m // self.group)
        surplus = len(self.tiles) - len(rows)
        if surplus < 0:
            raise ValueError(f"{len(rows)} tiles do not fit a plan of {len(self.tiles)}")
        return torch.tensor(rows + [_NO_WORK] * surplus, dtype=torch.int32)


def plan_attention(
    spans: Sequence[Span], *, group: int, kv_heads: int, slot_rows: int, device: torch.device
) -> AttentionPlan:
    """Cuts a packed forward into tiles, and their keys into as many shares as fill the device.

    Nothing but the table depends on prefix lengths, so segments of the same lengths always make the same launch. For a
    bucket, the spans are the longest that it holds. Raises ValueError where no tile holds `group`, the query heads per
    key head.
    """
    if group > _LARGEST_TILE:
        raise ValueError(f"{group} query heads share a key head, a tile holds {_LARGEST_TILE}")
    longest = max(span.length for span in spans) * group
    block_m = max(_SMALLEST_TILE, min(_LARGEST_TILE, power_of_two(longest)), power_of_two(group))
    rows = _tile_rows(spans, block_m // group)
    splits = min(_programs_of(device) // (len(rows) * kv_heads), -(-slot_rows // _KEYS_PER_SPLIT), _MOST_SPLITS)
    tiles = to_device(rows, device, torch.int32)
    return AttentionPlan(tiles, group=group, kv_heads=kv_heads, block_m=block_m, splits=max(1, splits))


def _tile_rows(spans: Sequence[Span], nodes: int) -> list[tuple[int, ...]]:
    return [
        (span.slot, span.prefix_len, span.start, span.length, int(span.is_tree or span.sees_all), first)
        for span in spans
        for first in range(0, span.length, nodes)
    ]


def _programs_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


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


def flash_takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash-attn is there and computes heads of this kind."""
    return dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256 and varlen_kernel() is not None


def flash_version() -> str:
    """The version of flash-attn; empty where it is not installed."""
    try:
        return metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return ""
