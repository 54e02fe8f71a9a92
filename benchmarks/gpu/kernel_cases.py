# SPDX-License-Identifier: Apache-2.0
"""The cases timed by kernels.py: each kernel and stage on packed batches, with its bytes and operations.

A stage's bytes exclude its activations, as in `specvla plan`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.random_policy import PROMPT, tree_parents
from specvla_kernels import device as kernel_device
from specvla_kernels.accept_tree import NO_NODE, accept_tree
from specvla_kernels.commit_kv import commit_kv
from specvla_kernels.compare_drafts import Comparison, Trees, compare_drafts
from specvla_kernels.device import has_kernels
from specvla_kernels.gated_unit import gated_unit, gated_unit_reference
from specvla_kernels.graph_capture import randomize
from specvla_kernels.int8_linear import int8_linear
from specvla_kernels.layout import Ancestry, PackedLayout
from specvla_kernels.packed_attention import packed_attention
from specvla_kernels.rmsnorm_residual import RowNorm, rmsnorm_residual, rmsnorm_residual_reference
from specvla_kernels.rope_write_kv import rope_write_kv
from specvla_ros.engine.batch import PackedBatch, Segment, pack
from specvla_ros.engine.kv_cache import KVCache, new_cache
from specvla_ros.lab.planning.cost import Part
from specvla_ros.lab.planning.device import Arithmetic
from specvla_ros.models.decoder import DecoderLayer, PackedDecoder
from specvla_ros.speculation.drafters.eagle.head import EagleHead

TRITON, PYTORCH, COMPILED, UNQUANTISED = "Triton", "PyTorch", "torch.compile", "unquantised"
Calls = dict[str, Callable[[], object] | str]  # contestants, or the reason why one cannot run here

DECODES, LARGE_TREE, TREES, TREE = 7, 50, 3, 16
_SLOTS = DECODES
_SLOT_ROWS = 368  # the prompt, an answer and the largest tree, in whole blocks of 16
_PATH = (0, 2, 4, 6)  # committed nodes: the first one stays, three move
_COMMITS = 4  # requests
_DEPTH = 7
_ACCEPTED = ((4, 16), (1, 50))  # trees and nodes per tree


@dataclass(frozen=True)
class Case:
    """A row of the tables.

    Args:
        parts: bytes and operations of its sequential steps.
        calls: the contestants, or the reason why one cannot run here.
    """

    name: str
    batch: str
    rows: int
    parts: tuple[Part, ...]
    calls: Calls


def _with_and_without_kernels(call: Callable[[], object], x: Tensor) -> Calls:
    """A call on the Triton kernels, where they run, and on their PyTorch references."""

    def on_references() -> object:
        found, kernel_device.HAS_TRITON = kernel_device.HAS_TRITON, False
        try:
            return call()
        finally:
            kernel_device.HAS_TRITON = found

    return {TRITON: call if has_kernels(x) else _why_no_kernels(x), PYTORCH: on_references}


def _why_no_kernels(x: Tensor) -> str:
    return "Triton is missing or the dtype has no kernels" if x.is_cuda else "Triton kernels run on a GPU only"


def _compiled(call: Callable[..., object], *operands: object) -> Callable[[], object] | str:
    """A reference under torch.compile."""
    if not any(isinstance(operand, Tensor) and operand.is_cuda for operand in operands):
        return "compiled on a GPU only"
    fused = torch.compile(call, dynamic=False)
    return lambda: fused(*operands)


@dataclass(frozen=True)
class Batch:
    """A packed batch, ready for a forward.

    Args:
        packed: embeddings, layout, rows with logits.
        pairs: number of pairs of a row and a row that it attends to.
        key_rows: rows of the KV cache that are read, each counted once.
    """

    name: str
    packed: PackedBatch
    pairs: int
    key_rows: int

    @property
    def layout(self) -> PackedLayout:
        """The layout of the segments."""
        return self.packed.layout

    @property
    def rows(self) -> int:
        """Number of rows of the packed batch."""
        return self.packed.embeddings.shape[0]


def filled_cache(decoder: PackedDecoder) -> KVCache:
    """Returns a KV cache with room for every batch, filled with random keys and values."""
    cache = new_cache(decoder, slots=_SLOTS, slot_rows=_SLOT_ROWS)
    randomize(cache.keys, cache.values)
    return cache


def batches(decoder: PackedDecoder) -> list[Batch]:
    """Returns the batches: a prompt, plain decode steps, a large tree, and a prompt together with small trees."""
    prompt = torch.randn(PROMPT, decoder.config.input_size, device=decoder.device, dtype=decoder.dtype)
    whole = Segment(0, 0, prompt)
    small = [_tree(decoder, slot, TREE) for slot in range(1, TREES + 1)]
    segments = {
        f"prompt of {PROMPT}": [whole],
        f"{DECODES} x 1 node": [_tree(decoder, slot, 1) for slot in range(DECODES)],
        f"tree of {LARGE_TREE}": [_tree(decoder, 0, LARGE_TREE)],
        f"{PROMPT} + {TREES} x {TREE} nodes": [whole, *small],
    }
    return [_batch(decoder, name, chosen) for name, chosen in segments.items()]


def _tree(decoder: PackedDecoder, slot: int, nodes: int) -> Segment:
    tokens = torch.randint(0, decoder.config.vocab_size, (nodes,), device=decoder.device)
    return Segment(slot, PROMPT, tokens, Ancestry.from_parents(tree_parents(nodes), decoder.device), wanted=nodes)


def _batch(decoder: PackedDecoder, name: str, segments: list[Segment]) -> Batch:
    return Batch(
        name,
        pack(segments, _SLOT_ROWS, decoder.embed_tokens),
        pairs=sum(
            len(segment) * segment.prefix_len + _pairs_within(segment.ancestry, len(segment)) for segment in segments
        ),
        key_rows=sum(segment.prefix_len + len(segment) for segment in segments),
    )


def _pairs_within(ancestry: Ancestry | None, rows: int) -> int:
    """Pairs among a segment's own rows; its trees are those of `tree_parents`, with depths known to the host."""
    if ancestry is None:
        return rows * (rows + 1) // 2
    depths: list[int] = []
    for parent in tree_parents(rows):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return sum(depths) + rows


def kernel_cases(decoder: PackedDecoder, batch: Batch, cache: KVCache) -> Iterator[Case]:
    """Yields the kernels of one layer."""
    yield _rope(decoder, batch, cache)
    yield _attention(decoder, batch, cache)
    yield _norm(decoder, batch)
    yield _gate(decoder, batch)
    yield _int8(decoder, batch)


def forward_cases(decoder: PackedDecoder, cache: KVCache) -> Iterator[Case]:
    """Yields the kernels that run once after a forward."""
    yield _commit(cache)
    for trees, nodes in _ACCEPTED:
        yield from _accept(decoder, trees, nodes)


def first_layer(decoder: PackedDecoder) -> DecoderLayer:
    """Returns the first layer; all layers have the same shapes."""
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    return layer


def _random(decoder: PackedDecoder, *shape: int) -> Tensor:
    return torch.randn(shape, device=decoder.device, dtype=decoder.dtype)


def _part(name: str, rows: int, tensors: list[Tensor], operations: float, read_bytes: float = 0.0) -> Part:
    """Work that reads or writes each tensor once, plus `read_bytes`."""
    return Part(name, read_bytes + sum(tensor.nbytes for tensor in tensors), operations, rows)


def _rope(decoder: PackedDecoder, batch: Batch, cache: KVCache) -> Case:
    config = decoder.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = _random(decoder, batch.rows, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = decoder.rotation(batch.layout.positions)
    rows = batch.layout.kv_rows

    def call() -> Tensor:
        return rope_write_kv(q, k, v, cos, sin, rows, cache.keys[0], cache.values[0])

    operations = 3.0 * (q.numel() + k.numel())
    part = _part("rope_write_kv", batch.rows, [qkv, qkv, cos, sin, rows], operations)
    return Case("rope_write_kv", batch.name, batch.rows, (part,), _with_and_without_kernels(call, q))


def _attention(decoder: PackedDecoder, batch: Batch, cache: KVCache) -> Case:
    config = decoder.config
    q = _random(decoder, batch.rows, config.num_attention_heads, config.head_dim)

    def call() -> Tensor:
        return packed_attention(q, cache.keys[0], cache.values[0], batch.layout)

    row_bytes = 2 * cache.keys[0, 0, 0].nbytes
    operations = 4.0 * batch.pairs * config.num_attention_heads * config.head_dim
    part = _part("packed_attention", batch.rows, [q, q], operations, read_bytes=float(batch.key_rows * row_bytes))
    return Case("packed_attention", batch.name, batch.rows, (part,), _with_and_without_kernels(call, q))


def _norm(decoder: PackedDecoder, batch: Batch) -> Case:
    x, residual = (_random(decoder, batch.rows, decoder.config.hidden_size) for _ in range(2))
    norm = RowNorm(decoder.norm.weight, decoder.config.rms_norm_eps)
    part = _part("rmsnorm_residual", batch.rows, [x, residual, x, x, norm.weight], 5.0 * x.numel())
    calls = _with_and_without_kernels(lambda: rmsnorm_residual(x, residual, norm), x)
    calls[COMPILED] = _compiled(rmsnorm_residual_reference, x, residual, norm)
    return Case("rmsnorm_residual", batch.name, batch.rows, (part,), calls)


def _gate(decoder: PackedDecoder, batch: Batch) -> Case:
    gate_up = _random(decoder, batch.rows, 2 * decoder.config.intermediate_size)
    out = gate_up[:, ::2]  # same size as the result
    part = _part("swiglu", batch.rows, [gate_up, out], 5.0 * out.numel())
    calls = _with_and_without_kernels(lambda: gated_unit(gate_up), gate_up)
    calls[COMPILED] = _compiled(gated_unit_reference, gate_up)
    return Case("swiglu", batch.name, batch.rows, (part,), calls)


def _int8(decoder: PackedDecoder, batch: Batch) -> Case:
    """The gate and up product, the largest of a layer."""
    matrix = first_layer(decoder).gate_up.weight
    weight = torch.randint(-127, 128, matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.rand(len(weight), device=matrix.device)
    x = _random(decoder, batch.rows, matrix.shape[1])
    operations = 2.0 * batch.rows * matrix.numel()
    written = float(batch.rows * len(weight) * x.itemsize)
    part = _part("int8_linear", batch.rows, [weight, scales, x], operations, written)
    part = Part(part.name, part.bytes, part.operations, part.rows, Arithmetic.INT8)
    calls = _with_and_without_kernels(lambda: int8_linear(x, weight, scales), x)
    calls[UNQUANTISED] = lambda: F.linear(x, matrix)
    return Case("int8_linear", batch.name, batch.rows, (part,), calls)


def _commit(cache: KVCache) -> Case:
    """Commits several requests' paths in all layers."""
    device = cache.keys.device
    slots = torch.arange(_COMMITS, device=device)
    first_rows = torch.full_like(slots, PROMPT)
    path = [*_PATH, *[NO_NODE] * (_DEPTH + 1 - len(_PATH))]
    nodes = torch.tensor([path] * _COMMITS, device=device)
    moved = 2 * cache.keys[:, 0, 0].nbytes * (len(_PATH) - 1) * _COMMITS  # keys and values
    part = _part("commit_kv", _COMMITS, [slots, first_rows, nodes], 0.0, read_bytes=2.0 * moved)

    def call() -> None:
        commit_kv(cache.keys, cache.values, slots, first_rows, nodes)

    name = f"{_COMMITS} paths of {len(_PATH)}"
    return Case("commit_kv", name, _COMMITS * len(_PATH), (part,), _with_and_without_kernels(call, cache.keys))


def _accept(decoder: PackedDecoder, requests: int, nodes: int) -> Iterator[Case]:
    """Comparison with the target, and the walk with a mask that accepts every node."""
    stop = decoder.config.vocab_size - 64
    ancestry = Ancestry.from_parents(tree_parents(nodes), decoder.device)
    drafted, chosen = (torch.randint(stop - 256, stop, (requests, nodes), device=decoder.device) for _ in range(2))
    yes = torch.ones(requests, nodes, dtype=torch.bool, device=decoder.device)
    trees = Trees(
        tokens=drafted,
        parents=ancestry.parents.repeat(requests, 1),
        depths=ancestry.depths.repeat(requests, 1),
        ancestors=ancestry.ancestors.repeat(requests, 1),
        log_probs=torch.randn(requests, nodes, device=decoder.device),
        valid=yes,
        relaxable=yes,
        choices=chosen,
        positions=torch.ones(requests, dtype=torch.int64, device=decoder.device),
    )

    def compare() -> Comparison:
        return compare_drafts(trees, stop - 256, stop, 255)

    comparison, mask = compare(), yes[:, None]

    def accept() -> Tensor:
        return accept_tree(trees, comparison, mask, trees.depths, _DEPTH)

    size, rows = f"{requests} x {nodes} nodes", requests * nodes
    read = [trees.tokens, trees.parents, trees.ancestors, trees.choices, trees.positions]
    part = _part("compare_drafts", rows, [*read, *vars(comparison).values()], 0.0)
    yield Case("compare_drafts", size, rows, (part,), _with_and_without_kernels(compare, trees.log_probs))
    walked = [trees.tokens, trees.depths, trees.ancestors, trees.log_probs, trees.valid, trees.relaxable, trees.choices]
    compared = [comparison.wanted, comparison.exact, comparison.distances, mask, trees.depths]
    part = _part("accept_tree", rows, [*walked, *compared, accept()], 0.0)
    yield Case("accept_tree", size, rows, (part,), _with_and_without_kernels(accept, trees.log_probs))


def stage_cases(decoder: PackedDecoder, draft_head: EagleHead, batch: Batch, cache: KVCache) -> Iterator[Case]:
    """Yields both halves of a layer, the output head, the draft head, and the target's whole forward."""
    layer, layout = first_layer(decoder), batch.layout
    x, keys, values = batch.packed.embeddings, cache.keys, cache.values
    rotation = decoder.rotation(layout.positions)
    wanted = x[batch.packed.wanted_rows]
    following = x.flip(0)

    def case(name: str, call: Callable[[], object], *parts: Part) -> Case:
        return Case(name, batch.name, batch.rows, parts, _with_and_without_kernels(call, x))

    first = _matrices([layer.qkv, layer.out], batch.rows)
    second = _matrices([layer.gate_up, layer.down], batch.rows)
    attended = _attended(decoder, batch, cache)
    head = _matrices([decoder.lm_head], len(wanted))
    drafting = _matrices(
        [draft_head.fc, draft_head.layer.qkv, draft_head.layer.out, draft_head.layer.gate_up, draft_head.layer.down],
        batch.rows,
    )
    layers = [_times(part, len(decoder.layers)) for part in (first, attended, second)]
    yield case(
        "attention half, one layer", lambda: layer.attention(x, *rotation, layout, keys[0], values[0]), first, attended
    )
    yield case("MLP half, one layer", lambda: layer.mlp(x), second)
    yield case("output head", lambda: decoder.logits(wanted), head)
    yield case(
        "draft head, one forward",
        lambda: draft_head(draft_head.fuse(following, x), layout, rotation, keys[0], values[0]),
        drafting,
        attended,
    )
    yield case(
        "whole forward", lambda: decoder(x, layout, batch.packed.wanted_rows, keys, values).logits, *layers, head
    )


def _matrices(modules: list[nn.Linear], rows: int) -> Part:
    values = sum(module.weight.numel() for module in modules)
    return Part("matrices", float(sum(module.weight.nbytes for module in modules)), 2.0 * values * rows, rows)


def _attended(decoder: PackedDecoder, batch: Batch, cache: KVCache) -> Part:
    """Attention of one layer: reads every key and value row once and writes those of the batch once."""
    config = decoder.config
    row: Tensor = cache.keys[0, 0, 0]
    operations = 4.0 * batch.pairs * config.num_attention_heads * config.head_dim
    return Part("attention", 2.0 * row.nbytes * (batch.key_rows + batch.rows), operations, batch.rows)


def _times(part: Part, count: int) -> Part:
    return replace(part, bytes=part.bytes * count, operations=part.operations * count)
