# SPDX-License-Identifier: Apache-2.0
"""The work of each program of the attention kernel as a table on the device, so that a launch fits a CUDA graph.

flash-attn has causal masks but no trees: it computes at most one long chain of a forward, a prompt or a chunk of it,
for which the plan then has no tiles. Its varlen kernel takes the begin and end of a sequence (BlockInfo in
block_info.h), so the chain's rows may be anywhere among the packed ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from specvla_kernels.device import multiprocessors, power_of_two, to_device

_SMALLEST_TILE, _LARGEST_TILE = 16, 64  # rows of an MMA; the most that keep a head of 128 in registers
_KEYS_PER_SPLIT = 64  # one block of keys: fewer would leave programs idle
_MOST_SPLITS = 16
_NO_WORK = (0,) * 6
_PROGRAMS_PER_PROCESSOR = 2  # resident ones that hide each other's waits


@dataclass(frozen=True)
class Span:
    """Location of one segment in the packed batch, `length` rows from `start`, and in its KV slot."""

    slot: int
    start: int
    length: int
    # Committed rows of the slot; node j writes its keys and values to row `prefix_len + j`. `-length` for rows that
    # attend to nothing; see `idle`.
    prefix_len: int
    is_tree: bool  # True: node i sees the prefix and the nodes in `ancestors[start + i]`. False: a causal chain
    sees_all: bool = False  # for a chain: every row sees all of it, as in prompts of prefix language models
    # For a tree, without kernels: the last rows of the prefix that hold earlier nodes of it. Ancestors count from them.
    earlier: int = 0

    @staticmethod
    def idle(start: int, length: int) -> "Span":
        """Rows outside any segment: the attention kernel finds no key before `prefix_len + length` = 0 and gives 0."""
        return Span(0, start, length, -length, is_tree=True)

    @property
    def stop(self) -> int:
        return self.start + self.length

    def first_kv_row(self, slot_rows: int) -> int:
        """The row of node 0's keys and values, counted through all slots."""
        return self.slot * slot_rows + self.prefix_len


@dataclass(frozen=True)
class Chain:
    """Location of the chain, on the device, and bounds of its rows and keys."""

    # int32 [2, 2], first and one past the last: of its packed rows, and of its keys counted through all slots.
    ends: Tensor
    most_rows: int
    most_keys: int


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of one packed forward, split into tiles of queries; all layers share it.

    A tile is some nodes of one segment times the query heads that share a key head. The table's values define a
    launch's work, its shape the launch's size: a new table in the same memory serves a captured launch's next forward.
    """

    # int32 [n_tiles, 6], per tile: the segment's slot, prefix_len, start (packed row), length (rows), 1 if its rows'
    # ancestors are read (a tree, or rows that see all) or 0 if it is causal, and the tile's first node. A length of 0:
    # no work.
    tiles: Tensor
    group: int  # query heads per key head
    kv_heads: int
    block_m: int  # rows of a tile, a power of two: nodes times `group`; the remaining rows are idle
    splits: int  # equal shares of each tile's keys, merged by log-sum-exp
    chain: Chain | None = None  # the chain without tiles, which flash-attn computes

    @cached_property
    def arrivals(self) -> Tensor:
        """Number of finished shares of each tile, int32 [n_tiles * kv_heads]; 0 before and after each launch.

        Shared by the layers of one forward, which run in order on one stream, but not between forwards.
        """
        return torch.zeros(len(self.tiles) * self.kv_heads, dtype=torch.int32, device=self.tiles.device)

    def table(self, spans: Sequence[Span]) -> Tensor:
        """`tiles` for another forward of the same bucket, on the host; raises ValueError if it has too few tiles."""
        rows = _tile_rows(spans, self.block_m // self.group)
        surplus = len(self.tiles) - len(rows)
        if surplus < 0:
            raise ValueError(f"{len(rows)} tiles do not fit a plan of {len(self.tiles)}")
        return torch.tensor(rows + [_NO_WORK] * surplus, dtype=torch.int32)


def plan_attention(
    spans: Sequence[Span], *, group: int, kv_heads: int, slot_rows: int, device: torch.device
) -> AttentionPlan:
    """Splits a packed forward into tiles, and their keys into enough shares to fill the device.

    Only the table depends on prefix lengths, so segments of the same lengths always make the same launch. For a bucket,
    the spans are the longest that it allows. Raises ValueError if `group`, the query heads per key head, does not fit a
    tile.
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
    return _PROGRAMS_PER_PROCESSOR * multiprocessors(device) if device.type == "cuda" else 1


def attend_chain(q: Tensor, k_cache: Tensor, v_cache: Tensor, chain: Chain) -> Tensor:
    """`packed_attention` of only the chain's rows, in float16 or bfloat16; the last row sees the last key.

    Shapes as in `packed_attention`; other rows of the result are not written.
    """
    attend = varlen_kernel()
    assert attend is not None
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    return attend(q, keys, values, *chain.ends.unbind(), chain.most_rows, chain.most_keys, causal=True)


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """flash-attn's kernel; None if it is not installed or cannot be loaded."""
    try:
        return import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, OSError, AttributeError):  # a build for another torch fails to link
        return None


def flash_takes(dtype: torch.dtype, head_dim: int) -> bool:
    """True if flash-attn is installed and supports heads of this kind."""
    return dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256 and varlen_kernel() is not None


def flash_version() -> str:
    """The version of flash-attn; empty if it is not installed."""
    try:
        return metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return ""
