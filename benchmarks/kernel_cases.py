"""Each kernel's operands on a packed batch, in a decoder's shapes, with its bytes and operations."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from packed_batches import Batch
from shapes import PROMPT, tree_parents
from timed_case import COMPILED, UNQUANTISED, Case, compiled, with_and_without_kernels
from torch import Tensor

from specvla_kernels.accept_tree import NO_NODE, accept_tree
from specvla_kernels.commit_kv import commit_kv
from specvla_kernels.compare_drafts import Comparison, Trees, compare_drafts
from specvla_kernels.int8_linear import int8_linear
from specvla_kernels.layout import Ancestry
from specvla_kernels.packed_attention import packed_attention
from specvla_kernels.rmsnorm_residual import rmsnorm_residual, rmsnorm_residual_reference
from specvla_kernels.rope_write_kv import rope_write_kv
from specvla_kernels.swiglu import swiglu, swiglu_reference
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.models.llama import LlamaDecoder
from specvla_ros.planning.cost import Part
from specvla_ros.planning.device import Arithmetic

_PATH = (0, 2, 4, 6)  # nodes that are committed: the first one stays, three move
_COMMITS = 4  # requests
_LEVELS = 7
_ACCEPTED = ((4, 16), (1, 50))  # trees, and nodes of each


def kernel_cases(decoder: LlamaDecoder, batch: Batch, cache: KVCache) -> Iterator[Case]:
    """What is done once in a layer, in one layer."""
    yield _rope(decoder, batch, cache)
    yield _attention(decoder, batch, cache)
    yield _norm(decoder, batch)
    yield _gate(decoder, batch)
    yield _int8(decoder, batch)


def forward_cases(decoder: LlamaDecoder, cache: KVCache) -> Iterator[Case]:
    """What is done once behind a forward."""
    yield _commit(cache)
    for trees, nodes in _ACCEPTED:
        yield from _accept(decoder, trees, nodes)


def _random(decoder: LlamaDecoder, *shape: int) -> Tensor:
    return torch.randn(shape, device=decoder.device, dtype=decoder.dtype)


def _part(name: str, rows: int, tensors: list[Tensor], operations: float, read_bytes: float = 0.0) -> Part:
    """What reads or writes each tensor once, and `read_bytes` of others."""
    return Part(name, read_bytes + sum(each.nbytes for each in tensors), operations, rows)


def _rope(decoder: LlamaDecoder, batch: Batch, cache: KVCache) -> Case:
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
    return Case("rope_write_kv", batch.name, batch.rows, (part,), with_and_without_kernels(call, q))


def _attention(decoder: LlamaDecoder, batch: Batch, cache: KVCache) -> Case:
    config = decoder.config
    q = _random(decoder, batch.rows, config.num_attention_heads, config.head_dim)

    def call() -> Tensor:
        return packed_attention(q, cache.keys[0], cache.values[0], batch.layout)

    row_bytes = 2 * cache.keys[0, 0, 0].nbytes
    operations = 4.0 * batch.pairs * config.num_attention_heads * config.head_dim
    part = _part("packed_attention", batch.rows, [q, q], operations, read_bytes=float(batch.key_rows * row_bytes))
    return Case("packed_attention", batch.name, batch.rows, (part,), with_and_without_kernels(call, q))


def _norm(decoder: LlamaDecoder, batch: Batch) -> Case:
    x, residual = (_random(decoder, batch.rows, decoder.config.hidden_size) for _ in range(2))
    weight, eps = decoder.norm.weight, decoder.config.rms_norm_eps
    part = _part("rmsnorm_residual", batch.rows, [x, residual, x, x, weight], 5.0 * x.numel())
    calls = with_and_without_kernels(lambda: rmsnorm_residual(x, residual, weight, eps), x)
    calls[COMPILED] = compiled(rmsnorm_residual_reference, x, residual, weight, eps)
    return Case("rmsnorm_residual", batch.name, batch.rows, (part,), calls)


def _gate(decoder: LlamaDecoder, batch: Batch) -> Case:
    gate_up = _random(decoder, batch.rows, 2 * decoder.config.intermediate_size)
    out = gate_up[:, ::2]  # as large as the result
    part = _part("swiglu", batch.rows, [gate_up, out], 5.0 * out.numel())
    calls = with_and_without_kernels(lambda: swiglu(gate_up), gate_up)
    calls[COMPILED] = compiled(swiglu_reference, gate_up)
    return Case("swiglu", batch.name, batch.rows, (part,), calls)


def _int8(decoder: LlamaDecoder, batch: Batch) -> Case:
    """The product with gate and up, the largest of a layer."""
    matrix = decoder.layers[0].gate_up.weight
    weight = torch.randint(-127, 128, matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.rand(len(weight), device=matrix.device)
    x = _random(decoder, batch.rows, matrix.shape[1])
    operations = 2.0 * batch.rows * matrix.numel()
    written = float(batch.rows * len(weight) * x.itemsize)
    part = _part("int8_linear", batch.rows, [weight, scales, x], operations, written)
    part = Part(part.name, part.bytes, part.operations, part.rows, Arithmetic.INT8)
    calls = with_and_without_kernels(lambda: int8_linear(x, weight, scales), x)
    calls[UNQUANTISED] = lambda: F.linear(x, matrix)
    return Case("int8_linear", batch.name, batch.rows, (part,), calls)


def _commit(cache: KVCache) -> Case:
    """Several requests' paths, in all layers."""
    device = cache.keys.device
    slots = torch.arange(_COMMITS, device=device)
    first_rows = torch.full_like(slots, PROMPT)
    path = [*_PATH, *[NO_NODE] * (_LEVELS + 1 - len(_PATH))]
    nodes = torch.tensor([path] * _COMMITS, device=device)
    moved = 2 * cache.keys[:, 0, 0].nbytes * (len(_PATH) - 1) * _COMMITS  # keys and values
    part = _part("commit_kv", _COMMITS, [slots, first_rows, nodes], 0.0, read_bytes=2.0 * moved)

    def call() -> None:
        commit_kv(cache.keys, cache.values, slots, first_rows, nodes)

    name = f"{_COMMITS} paths of {len(_PATH)}"
    return Case("commit_kv", name, _COMMITS * len(_PATH), (part,), with_and_without_kernels(call, cache.keys))


def _accept(decoder: LlamaDecoder, requests: int, nodes: int) -> Iterator[Case]:
    """The comparison with the target, and the walk under a mask that accepts every node."""
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
        return accept_tree(trees, comparison, mask, trees.depths, _LEVELS)

    size, rows = f"{requests} x {nodes} nodes", requests * nodes
    read = [trees.tokens, trees.parents, trees.ancestors, trees.choices, trees.positions]
    part = _part("compare_drafts", rows, [*read, *vars(comparison).values()], 0.0)
    yield Case("compare_drafts", size, rows, (part,), with_and_without_kernels(compare, trees.log_probs))
    walked = [trees.tokens, trees.depths, trees.ancestors, trees.log_probs, trees.valid, trees.relaxable, trees.choices]
    compared = [comparison.wanted, comparison.exact, comparison.distances, mask, trees.depths]
    part = _part("accept_tree", rows, [*walked, *compared, accept()], 0.0)
    yield Case("accept_tree", size, rows, (part,), with_and_without_kernels(accept, trees.log_probs))
