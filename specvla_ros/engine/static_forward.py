"""A packed forward of fixed size on memory that stays where it is, so that it can be captured once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specvla_kernels.attention_plan import AttentionPlan, plan_attention
from specvla_kernels.graph_capture import Capture
from specvla_kernels.layout import PackedLayout, Span
from specvla_ros.engine.buckets import Bucket
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.segment import Segment, spans_of, wanted_rows
from specvla_ros.models.llama import ForwardResult, LlamaDecoder

_TILE_WIDTH = 6  # numbers of a tile in AttentionPlan


@dataclass(frozen=True)
class _Numbers:
    """What the host says of a forward, in one piece of memory, so that one copy sends it.

    Args:
        all: int64 [n], the whole piece.
        positions, kv_rows, ancestors: int64 [rows], as in PackedLayout.
        wanted: int64 [rows], of which the first are read.
        tiles: int32 [tiles, 6], as in AttentionPlan.
    """

    all: Tensor
    positions: Tensor
    kv_rows: Tensor
    ancestors: Tensor
    wanted: Tensor
    tiles: Tensor

    @staticmethod
    def of(memory: Tensor, rows: int) -> "_Numbers":
        width = rows + rows % 2  # 16 bytes: Triton compiles a kernel again for pointers that are less aligned
        table = memory[4 * width :].view(torch.int32).view(-1, _TILE_WIDTH)
        positions, kv_rows, ancestors, wanted = memory[: 4 * width].view(4, width)[:, :rows].unbind()
        return _Numbers(memory, positions, kv_rows, ancestors, wanted, table)

    @staticmethod
    def size(rows: int, tiles: int) -> int:
        return 4 * (rows + rows % 2) + tiles * _TILE_WIDTH // 2


class StaticForward:
    """One bucket's forward: the segments are copied in, the layers run as they were captured, a copy comes out.

    The rows that no segment has are zeros, see nothing, and write their keys and values to the KV cache's sink row.

    Args:
        decoder: whose layers run.
        cache: that they write to; a slot's last row must be left alone.
        bucket: the size.
        segments: of a forward at most.
        capture: makes the layers repeatable.

    Raises:
        Exception: whatever the capture raises.
    """

    def __init__(
        self, decoder: LlamaDecoder, cache: KVCache, bucket: Bucket, *, segments: int, capture: Capture
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._rows = bucket.rows
        config, device = decoder.config, decoder.device
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        plan = _plan(bucket, heads // kv_heads, kv_heads, cache)
        size = _Numbers.size(bucket.rows, _most_tiles(bucket, segments, plan))
        self._numbers = numbers = _Numbers.of(torch.zeros(size, dtype=torch.int64, device=device), bucket.rows)
        self._plan = replace(plan, tiles=numbers.tiles)
        plans = {(heads // kv_heads, kv_heads): self._plan}
        self._layout = PackedLayout((), numbers.positions, numbers.kv_rows, numbers.ancestors, plans)
        self._embeddings = torch.zeros(bucket.rows, config.hidden_size, dtype=decoder.dtype, device=device)
        self._no_embeddings = torch.zeros_like(self._embeddings)
        self._no_numbers = torch.zeros_like(numbers.positions)
        self._send((), ())
        self._replay = capture(self._run)

    def __call__(self, segments: Sequence[Segment]) -> ForwardResult:
        """What `packed_forward` gives, to rounding; nothing is read back.

        Args:
            segments: that fit the bucket; at least one.

        Raises:
            ValueError: they do not fit their slots, or each other, or the bucket.
        """
        spans = spans_of(segments, self._cache.slot_rows - 1)
        n = spans[-1].stop
        if n > self._rows:
            raise ValueError(f"{n} rows do not fit a forward of {self._rows}")
        wanted = self._send(segments, spans)
        self._grow_trees(segments, n)
        self._embed(segments, n)
        hidden = self._replay()[:n].clone()  # the next forward overwrites it, and some of it is kept for longer
        return ForwardResult(self._decoder.logits(hidden[wanted]), hidden)

    def _run(self) -> Tensor:
        return self._decoder.hidden_states(self._embeddings, self._layout, self._cache.keys, self._cache.values)

    def _send(self, segments: Sequence[Segment], spans: Sequence[Span]) -> Tensor:
        """Sends what the host knows; the wanted rows, on the device."""
        # New memory each time: the copy may still be under way when the next forward is packed.
        memory = torch.zeros(len(self._numbers.all), dtype=torch.int64, pin_memory=self._numbers.all.is_cuda)
        host = _Numbers.of(memory, self._rows)
        positions, kv_rows, ancestors = (each.numpy() for each in (host.positions, host.kv_rows, host.ancestors))
        kv_rows[:] = self._cache.sink_row
        for span in spans:
            rows, nodes = slice(span.start, span.stop), np.arange(span.length)
            positions[rows] = span.prefix_len + (0 if span.is_tree else nodes)
            kv_rows[rows] = span.slot * self._cache.slot_rows + span.prefix_len + nodes
            ancestors[rows] = span.is_tree  # enough for a single node
        n = spans[-1].stop if spans else 0
        idle = [Span.idle(n, self._rows - n)] if n < self._rows else []
        host.tiles.copy_(self._plan.table([*spans, *idle]))
        wanted = wanted_rows(segments, spans)
        host.wanted.numpy()[: len(wanted)] = wanted
        self._numbers.all.copy_(memory, non_blocking=True)
        return self._numbers.wanted[: len(wanted)]

    def _grow_trees(self, segments: Sequence[Segment], n: int) -> None:
        """Adds what the device alone knows of trees."""
        if all(each.ancestry is None or len(each) == 1 for each in segments):
            return
        nothing = [self._no_numbers[: len(each)] for each in segments]
        pairs = list(zip(segments, nothing, strict=True))
        depths = torch.cat([zeros if each.ancestry is None else each.ancestry.depths for each, zeros in pairs])
        self._numbers.positions[:n] += depths
        ancestors = [zeros if each.ancestry is None else each.ancestry.ancestors for each, zeros in pairs]
        torch.cat(ancestors, out=self._numbers.ancestors[:n])

    def _embed(self, segments: Sequence[Segment], n: int) -> None:
        """Puts the segments' embeddings in, and zeros behind them."""
        ids = [each.inputs for each in segments if not each.inputs.is_floating_point()]
        embedded = iter(self._decoder.embed_tokens(torch.cat(ids)).split([len(each) for each in ids]) if ids else ())
        parts = [each.inputs if each.inputs.is_floating_point() else next(embedded) for each in segments]
        torch.cat([*parts, self._no_embeddings[: self._rows - n]], out=self._embeddings)


def _plan(bucket: Bucket, group: int, kv_heads: int, cache: KVCache) -> AttentionPlan:
    """Tiles and shares of keys that fit a bucket full of its longest segments; its table is not read."""
    spans = [Span(0, 0, bucket.longest, 0, is_tree=True)] * -(-bucket.rows // bucket.longest)
    return plan_attention(spans, group=group, kv_heads=kv_heads, slot_rows=cache.slot_rows, device=cache.keys.device)


def _most_tiles(bucket: Bucket, segments: int, plan: AttentionPlan) -> int:
    """Tiles that any segments of so many rows make: each begins one, and the rows left over fill others."""
    parts = min(segments + 1, bucket.rows)  # and those that no segment has
    return parts + (bucket.rows - parts) // (plan.block_m // plan.group)
