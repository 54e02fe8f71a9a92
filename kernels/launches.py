"""Launches of every kernel, over tensors without memory: what `make kernels` compiles.

The product makes them all but those of the norm and the gate, which wait for a measurement on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specvla_kernels.accept_tree import Tolerance, Trees, accept_tree_triton
from specvla_kernels.attention_plan import plan_attention
from specvla_kernels.commit_kv import commit_kv_triton
from specvla_kernels.int8_linear import round_rows_triton, scale_sums_triton
from specvla_kernels.layout import Span
from specvla_kernels.packed_attention import packed_attention_triton
from specvla_kernels.rmsnorm_residual import rmsnorm_residual_triton
from specvla_kernels.rope_write_kv import rope_write_kv_triton
from specvla_kernels.swiglu import swiglu_triton

_META = torch.device("meta")
_SLOT_ROWS = 320  # a prompt of 290, an answer and 16 nodes


@dataclass(frozen=True)
class _Shape:
    """What of a decoder decides its kernels."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    hidden: int = 4096
    intermediate: int = 11008

    def rows(self, n_rows: int, heads: int) -> Tensor:
        return torch.empty(n_rows, heads, self.head_dim, dtype=self.dtype, device=_META)

    def ring(self) -> Tensor:
        return torch.empty(4, _SLOT_ROWS, self.kv_heads, self.head_dim, dtype=self.dtype, device=_META)


_SHAPES = {
    "openvla bf16": _Shape(32, 32, 128, torch.bfloat16),
    "openvla fp16": _Shape(32, 32, 128, torch.float16),
    "gqa-8 bf16": _Shape(32, 4, 128, torch.bfloat16),
    "nano bf16": _Shape(6, 6, 32, torch.bfloat16, 192, 480),
    "nano fp32": _Shape(6, 6, 32, torch.float32, 192, 480),
}


def _whole(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=_META)


def _rope(shape: _Shape) -> None:
    n_rows = 300
    qkv = shape.rows(n_rows, shape.heads + 2 * shape.kv_heads)
    q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    angles = torch.empty(n_rows, shape.head_dim // 2, device=_META)
    rope_write_kv_triton(q, k, v, angles, angles, _whole(n_rows), shape.ring(), shape.ring())


def _attention(shape: _Shape, length: int, programs: int) -> None:
    spans = (Span(0, 0, length, 1, True),)
    plan = plan_attention(
        spans,
        group=shape.heads // shape.kv_heads,
        kv_heads=shape.kv_heads,
        slot_rows=_SLOT_ROWS,
        device=_META,
        programs=programs,
    )
    packed_attention_triton(shape.rows(length, shape.heads), shape.ring(), shape.ring(), _whole(length), plan)


def _commit(shape: _Shape, places: int) -> None:
    rings = torch.empty(2, 32, *shape.ring().shape, dtype=shape.dtype, device=_META)
    commit_kv_triton(rings[0], rings[1], _whole(4), _whole(4), _whole(4, places))


def _pointwise(shape: _Shape) -> None:
    x = torch.empty(300, shape.hidden, dtype=shape.dtype, device=_META)
    rmsnorm_residual_triton(x, x, x[0], 1e-6)
    swiglu_triton(torch.empty(300, 2 * shape.intermediate, dtype=shape.dtype, device=_META))


def _int8(shape: _Shape) -> None:
    x = torch.empty(300, shape.intermediate, dtype=shape.dtype, device=_META)
    _, steps = round_rows_triton(x, 300)
    sums = torch.empty(300, 2 * shape.intermediate, dtype=torch.int32, device=_META)
    scale_sums_triton(sums, steps, torch.empty(sums.shape[1], device=_META), shape.dtype)


def _accept(n: int, levels: int, dimensions: int = 7) -> None:
    whole, flags = _whole(4, n), torch.empty(4, n, dtype=torch.bool, device=_META)
    log_probs = torch.empty(4, n, device=_META)
    trees = Trees(whole, whole, whole, whole, log_probs, flags, flags, whole, _whole(4))
    accept_tree_triton(trees, Tolerance(_whole(dimensions + 1), 31744, 32000, 255), levels)


LAUNCHES: dict[str, Callable[[], None]] = {
    "accept_tree, one node": partial(_accept, 1, 0),
    "accept_tree, 16 nodes": partial(_accept, 16, 7),
    "accept_tree, 64 nodes": partial(_accept, 64, 7),
    "accept_tree, a chain of 64": partial(_accept, 64, 63),
}
for _name, _shape in _SHAPES.items():
    LAUNCHES[f"rope_write_kv, {_name}"] = partial(_rope, _shape)
    LAUNCHES[f"packed_attention, {_name}, prefill"] = partial(_attention, _shape, 290, 1)
    LAUNCHES[f"packed_attention, {_name}, 16 nodes"] = partial(_attention, _shape, 16, 264)
    LAUNCHES[f"packed_attention, {_name}, one node"] = partial(_attention, _shape, 1, 264)
    LAUNCHES[f"packed_attention, {_name}, 16 nodes, few processors"] = partial(_attention, _shape, 16, 1)
    LAUNCHES[f"norm and gate, {_name}"] = partial(_pointwise, _shape)
    LAUNCHES[f"int8, {_name}"] = partial(_int8, _shape)
    LAUNCHES[f"commit_kv, {_name}, action"] = partial(_commit, _shape, 8)
    LAUNCHES[f"commit_kv, {_name}, text"] = partial(_commit, _shape, 64)
