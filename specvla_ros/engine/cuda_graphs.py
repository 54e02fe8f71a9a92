# SPDX-License-Identifier: Apache-2.0
"""Forwards of fixed size on static memory, so that CUDA graphs can capture them.

Buckets are few enough that all can be captured, and close enough to the actual sizes to waste little. Each captured
forward is compared with the same work run eagerly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from specvla_kernels.attention_plan import AttentionPlan, Chain, plan_attention
from specvla_kernels.device import copy_together
from specvla_kernels.graph_capture import TILE_ROWS, Capture, check_rows, padded_rows, paddings
from specvla_kernels.greedy_choice import greedy_choice
from specvla_kernels.layout import Ancestry, PackedLayout, Span
from specvla_kernels.product_contest import seconds
from specvla_ros.engine.batch import Segment, first_positions, packed_forward, spans_of, wanted_rows
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.verifier import NO_EXTRA_INPUTS, ExtraInputs
from specvla_ros.models.target import Decoder, ForwardResult, Target

_STEP = 16  # rows of the smallest tile of a matrix product
_AS_FAST = 0.99
FREE = 1.1  # rows are free while a product takes at most so many times what it takes with the fewest
_TILE_WIDTH = 6  # numbers per tile in AttentionPlan
_CHAIN_WIDTH = 4  # numbers in a Chain's ends
_COLUMNS = 5  # columns of HostInputs besides the positions


@dataclass(frozen=True, order=True)
class Bucket:
    """Size to which a forward is padded."""

    rows: int  # rows of the forward, including padding
    longest: int  # max rows of a segment; determines the attention's tiles


@dataclass(frozen=True)
class ForwardSizes:
    """The forward sizes that an engine's settings can lead to."""

    slots: int  # max requests in flight; at most one of them has prompt rows in a forward
    nodes: int  # max nodes of a tree including the root, also of a tree verified with its prompt
    prompts: tuple[int, ...]  # possible prompt lengths in rows, at least one
    spreads: tuple[int, ...] = (1,)  # numbers of forwards over which a prompt may be spread
    measured: tuple[int, ...] = ()  # sizes measured on the device, see `measured_on`; empty: sizes follow a fixed rule
    free_rows: int = 0  # rows that take hardly longer than one on the device, as measured; 0: not measured

    @staticmethod
    def from_settings(policy: Target, settings: EngineSettings) -> "ForwardSizes":
        """Sizes for a policy whose prompts may have any length that fits a slot."""
        given = settings.max_reasoning_tokens if settings.think_every_s else 0
        if settings.commit != "none":
            given = policy.codec.max_tokens
        prompts = range(policy.image_tokens + 1, policy.image_tokens + settings.max_text_tokens + given + 1)
        spreads = settings.spreads if policy.causal_prompt else (1,)
        return ForwardSizes(settings.slots, settings.tree_nodes, tuple(prompts), spreads)

    def measured_on(self, decoder: Decoder) -> "ForwardSizes":
        """Adds sizes at which the device's matrix products fill their tiles, and free rows; unchanged on a CPU."""
        if decoder.device.type != "cuda":
            return self
        most = max(bucket.rows for bucket in replace(self, measured=()).buckets())
        # From one tile on: below, reading the weights dominates.
        tried = range(TILE_ROWS, most + 1, _STEP)
        x = torch.randn(most, decoder.config.hidden_size, device=decoder.device).to(decoder.dtype)
        times = {rows: seconds(partial(decoder.products, x[:rows]), decoder.device) for rows in tried}
        above = {rows: taken for rows, taken in times.items() if rows > TILE_ROWS}
        return replace(self, measured=worth_capturing(above), free_rows=free_rows(times))

    @property
    def segments(self) -> int:
        """Max segments in a forward: a tree per request, and the end of the newest prompt before its tree."""
        return self.slots + 1

    @property
    def wanted(self) -> int:
        """Max rows of a forward that need logits: all nodes of all trees."""
        return self.slots * self.nodes

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Possible numbers of prompt rows in a forward, ascending."""
        found = set()
        for length in self.prompts:
            for spread in self.spreads:
                rows = self.chunk_rows(length, spread)
                found |= {rows, length % rows or rows}
        return tuple(sorted(found))

    def chunk_rows(self, length: int, spread: int) -> int:
        """Rows of each chunk but the last when a prompt is spread over `spread` forwards.

        With measured sizes, a chunk is extended into the padding that its forward would have with the others' trees.
        """
        rows = even_rows(length, spread)
        if self.measured:
            rows = min(length, padded_rows(rows + self._others, self.measured) - self._others)
        return rows

    def bucket(self, lengths: Sequence[int]) -> Bucket | None:
        """The bucket for segments of these lengths; None if the settings cannot lead to them."""
        longest = self._longest(max(lengths))
        if len(lengths) > self.segments or not longest:
            return None
        rows = padded_rows(sum(lengths), self.measured)
        return Bucket(rows, min(longest, rows))

    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that these settings can lead to, ascending."""
        others, measured = self._others, self.measured
        ranges = [(1, others + self.nodes, self.nodes)]
        ranges += [(rows, rows + others + self.nodes - 1, self._longest(rows)) for rows in self.chunks]
        found = {
            Bucket(rows, min(longest, rows)) for low, high, longest in ranges for rows in paddings(low, high, measured)
        }
        return tuple(sorted(found))

    @property
    def _others(self) -> int:
        """Max rows of the other requests' trees in a forward with a prompt."""
        return (self.slots - 1) * self.nodes

    def _longest(self, length: int) -> int:
        """The segment length that attention is tiled for, given the longest segment; 0 if it exceeds every limit."""
        return next((limit for limit in (self.nodes, self.chunks[-1]) if length <= limit), 0)


def even_rows(length: int, forwards: int) -> int:
    """Rows of each chunk but the last when a prompt is spread evenly."""
    return -(-length // forwards)


def worth_capturing(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes worth capturing, ascending: each is faster than every larger one."""
    found: list[int] = []
    least = float("inf")
    for rows in sorted(seconds, reverse=True):
        if seconds[rows] < _AS_FAST * least:
            found.append(rows)
        least = min(least, seconds[rows])
    return tuple(reversed(found))


def free_rows(seconds: Mapping[int, float]) -> int:
    """The number of rows up to which every size is free beside the smallest; 0 without any."""
    free = 0
    for rows in sorted(seconds):
        if seconds[rows] > FREE * seconds[min(seconds)]:
            break
        free = rows
    return free


@dataclass(frozen=True)
class HostInputs:
    """A forward's inputs from the host, in one contiguous tensor `all`, so that one copy uploads them."""

    all: Tensor
    positions: Tensor  # int64 [rows], or [axes, rows] for several per row, as in PackedLayout
    kv_rows: Tensor  # int64 [rows], as in PackedLayout
    ancestors: Tensor  # int64 [rows], as in PackedLayout
    wanted: Tensor  # int64 [rows], only the first ones are read
    ids: Tensor  # int64 [rows], tokens; -1 where the row's embedding is given instead
    depths: Tensor  # int64 [rows], added to the positions
    chain: Tensor  # int32 [2, 2], as in Chain
    tiles: Tensor  # int32 [tiles, 6], as in AttentionPlan

    @staticmethod
    def in_memory(memory: Tensor, rows: int, axes: int) -> "HostInputs":
        width = rows + rows % 2  # 16-byte alignment: Triton recompiles a kernel for less aligned pointers
        columns = axes + _COLUMNS
        chain, table = memory[columns * width :].view(torch.int32).tensor_split([_CHAIN_WIDTH])
        numbers = memory[: columns * width].view(columns, width)[:, :rows]
        positions = numbers[:axes] if axes > 1 else numbers[0]
        kv_rows, ancestors, wanted, ids, depths = numbers[axes:].unbind()
        tiles = table.view(-1, _TILE_WIDTH)
        return HostInputs(memory, positions, kv_rows, ancestors, wanted, ids, depths, chain.view(2, 2), tiles)

    @staticmethod
    def size(rows: int, tiles: int, axes: int) -> int:
        return (axes + _COLUMNS) * (rows + rows % 2) + (_CHAIN_WIDTH + tiles * _TILE_WIDTH) // 2


def logits_memory(decoder: Decoder, sizes: ForwardSizes) -> Tensor:
    """Memory for logits, [n, vocab], shared by all forwards because its size grows with the vocabulary."""
    hidden = torch.zeros(sizes.wanted, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
    return decoder.logits(hidden)


class StaticForward:
    """One bucket's forward: segments are copied in, then the captured layers, logits and choices are replayed.

    Padding rows hold some token, attend to nothing, and write their keys and values to the KV cache's sink row.

    Args:
        cache: keys and values; a slot's last row is reserved.
        segments: max number of segments in one forward.
        logits: [n, vocab], memory for at most n wanted rows, shared with other buckets.
        flash: flash-attn computes the longest segment, which is a causal chain.

    Attributes:
        replay: runs the last forward again.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        bucket: Bucket,
        *,
        segments: int,
        logits: Tensor,
        capture: Capture,
        flash: bool = False,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._logits = logits[: bucket.rows]
        self._rows = bucket.rows
        config, device = decoder.config, decoder.device
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        plan = _plan(bucket, heads // kv_heads, kv_heads, cache)
        self._axes = config.rope_axes
        size = HostInputs.size(bucket.rows, _most_tiles(bucket, segments, plan), self._axes)
        # After the forward's own numbers is room for the extra ones.
        room = ExtraInputs.max_numbers(segments, len(logits), cache.slot_rows)
        self._memory = torch.zeros(size + room, dtype=torch.int64, device=device)
        self._numbers = numbers = HostInputs.in_memory(self._memory[:size], bucket.rows, self._axes)
        chain = Chain(numbers.chain, bucket.longest, cache.slot_rows) if flash else None
        self._plan = replace(plan, tiles=numbers.tiles, chain=chain)
        plans = {(heads // kv_heads, kv_heads): self._plan}
        self._layout = PackedLayout((), numbers.positions, numbers.kv_rows, numbers.ancestors, plans)
        self._embeddings = torch.zeros(bucket.rows, config.input_size, dtype=decoder.dtype, device=device)
        self._send((), (), ())
        self.replay = capture(self._run)

    def __call__(self, segments: Sequence[Segment], extra: ExtraInputs = NO_EXTRA_INPUTS) -> ForwardResult:
        """`packed_forward`, up to rounding; nothing is read back, and the next forward overwrites the result.

        Raises ValueError if the segments do not fit their slots, each other or the bucket.
        """
        spans = spans_of(segments, self._cache.slot_rows - 1)
        n, wanted = spans[-1].stop, sum(segment.wanted for segment in segments)
        if n > self._rows or wanted > len(self._logits):
            raise ValueError(
                f"{n} rows, {wanted} of them wanted, do not fit a forward of {self._rows} and {len(self._logits)}"
            )
        sent = self._send(segments, spans, extra.numbers)
        self._fill(segments, spans, extra)
        hidden, choices = self.replay()
        return ForwardResult(self._logits[:wanted], hidden[:n], choices[:wanted], sent)

    def _run(self) -> tuple[Tensor, Tensor]:
        """Hidden states of all rows, and choices for as many rows as `logits` holds."""
        numbers, decoder = self._numbers, self._decoder
        words = decoder.embed_tokens(numbers.ids.clamp(min=0))
        embeddings = torch.where((numbers.ids >= 0)[:, None], words, self._embeddings)
        layout = replace(self._layout, positions=numbers.positions + numbers.depths)
        hidden = decoder.hidden_states(embeddings, layout, self._cache.keys, self._cache.values)
        logits = self._logits.copy_(decoder.logits(hidden[numbers.wanted[: len(self._logits)]]))
        return hidden, greedy_choice(logits)

    def _send(self, segments: Sequence[Segment], spans: Sequence[Span], extra: Sequence[int]) -> Tensor:
        """Uploads the host's inputs, and returns the extra numbers, int64."""
        size = len(self._numbers.all)
        # New memory each time: the copy may still be running when the next forward is packed.
        memory = torch.zeros(size + len(extra), dtype=torch.int64, pin_memory=self._memory.is_cuda)
        memory.numpy()[size:] = extra
        host = HostInputs.in_memory(memory[:size], self._rows, self._axes)
        positions, kv_rows, ancestors = (each.numpy() for each in (host.positions, host.kv_rows, host.ancestors))
        kv_rows[:], ids = self._cache.sink_row, host.ids.numpy()
        for segment, span in zip(segments, spans, strict=True):
            rows, nodes = slice(span.start, span.stop), np.arange(span.length)
            positions[..., rows] = first_positions(segment, span, self._axes)
            kv_rows[rows] = span.first_kv_row(self._cache.slot_rows) + nodes
            ancestors[rows] = -1 if span.sees_all else span.is_tree  # sufficient for a tree's single node
            ids[rows] = -int(segment.inputs.is_floating_point())
        n = spans[-1].stop if spans else 0
        idle = [Span.idle(n, self._rows - n)] if n < self._rows else []
        tiled = [*spans, *idle]
        if self._plan.chain is not None and spans:
            longest = max(spans, key=lambda span: span.length)
            tiled.remove(longest)
            first = longest.first_kv_row(self._cache.slot_rows)
            ends = [longest.start, longest.stop], [first - longest.prefix_len, first + longest.length]
            host.chain.copy_(torch.tensor(ends, dtype=torch.int32))
        host.tiles.copy_(self._plan.table(tiled))
        wanted = wanted_rows(segments, spans)
        host.wanted.numpy()[: len(wanted)] = wanted
        there = self._memory[: len(memory)]
        there.copy_(memory, non_blocking=True)
        return there[size:]

    def _fill(self, segments: Sequence[Segment], spans: Sequence[Span], extra: ExtraInputs) -> None:
        """Copies the inputs that are on the device, in one launch: embeddings, tokens and ancestry."""
        numbers = self._numbers
        destinations, sources = [*extra.destinations], [*extra.sources]
        for segment, span in zip(segments, spans, strict=True):
            rows = slice(span.start, span.stop)
            destinations.append((self._embeddings if segment.inputs.is_floating_point() else numbers.ids)[rows])
            sources.append(segment.inputs)
            if segment.ancestry is not None and len(segment) > 1:
                destinations += [numbers.depths[rows], numbers.ancestors[rows]]
                sources += [segment.ancestry.depths, segment.ancestry.ancestors]
        copy_together(destinations, sources)


def _plan(bucket: Bucket, group: int, kv_heads: int, cache: KVCache) -> AttentionPlan:
    """A plan with tiles and key splits for a bucket full of its longest segments; its table is not read."""
    spans = [Span(0, 0, bucket.longest, 0, is_tree=True)] * -(-bucket.rows // bucket.longest)
    return plan_attention(spans, group=group, kv_heads=kv_heads, slot_rows=cache.slot_rows, device=cache.keys.device)


def _most_tiles(bucket: Bucket, segments: int, plan: AttentionPlan) -> int:
    """Max tiles over all segmentations of the bucket: one per segment, and those filled by the remaining rows."""
    parts = min(segments + 1, bucket.rows)  # plus one for the padding
    return parts + (bucket.rows - parts) // (plan.block_m // plan.group)


def check_forward(static: StaticForward, decoder: Decoder, cache: KVCache, segments: list[Segment]) -> None:
    """Compares one captured forward with the eager one; waits for the device.

    The KV cache must hold random values and no request. Raises RuntimeError if the results differ or are not finite.
    """
    expected = packed_forward(decoder, segments, cache).hidden
    what = f"a captured forward of {len(expected)} rows"
    found = static(segments)
    check_rows(found.hidden, expected, what=what)
    logits = decoder.logits(found.hidden[wanted_rows(segments, spans_of(segments, cache.slot_rows))])
    check_rows(found.logits, logits, what=f"logits of {what}", dtype=decoder.dtype)


def check_segments(bucket: Bucket, sizes: ForwardSizes, decoder: Decoder, cache: KVCache) -> list[Segment]:
    """Segments that fill as much of a bucket as possible, except one row if it has several.

    The first is a chain if the bucket is for prompts, the others are trees; tokens are random.
    """
    generator = torch.Generator().manual_seed(bucket.rows)
    left = max(1, bucket.rows - 1)
    segments = []
    for slot in range(sizes.slots):
        is_tree = slot > 0 or bucket.longest <= sizes.nodes
        n = min(left, sizes.nodes if is_tree else bucket.longest)
        if n == 0:
            break
        left -= n
        tokens = torch.randint(decoder.config.vocab_size, (n,), generator=generator).to(decoder.device)
        ancestry = Ancestry.from_parents([(node - 1) // 2 for node in range(n)], decoder.device) if is_tree else None
        inputs = tokens if is_tree else decoder.embed_tokens(tokens)
        segments.append(Segment(slot, (cache.slot_rows - 1 - n) // 2, inputs, ancestry))
    return segments
