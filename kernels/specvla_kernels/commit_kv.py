# SPDX-License-Identifier: Apache-2.0
"""Moves an accepted path's keys and values after the slot's committed prefix, for all layers at once."""

import torch
from torch import Tensor

from specvla_kernels.accept_tree import MIN_PATH
from specvla_kernels.device import has_kernels, jit, power_of_two, tl

_BLOCK = 2048  # elements that a program holds, keys or values: 16 per thread


def commit_kv(keys: Tensor, values: Tensor, slots: Tensor, first_rows: Tensor, nodes: Tensor) -> None:
    """Moves each request's path: row `first_row + nodes[i]` of its slot becomes row `first_row + i`.

    Rotated keys need no new rotation: a node's position is its depth, and so is its index on the path.

    Args:
        keys, values: [layers, slots, slot_rows, kv_heads, head_dim] of the same strides, written in place.
        slots, first_rows: int64 [requests], all different slots, and the row of each root's keys and values.
        nodes: int64 [requests, n], each path, ascending, the root first: nodes[i] >= i; then negative numbers
            (NO_NODE). A request without a path moves nothing.
    """
    run = commit_kv_triton if has_kernels(keys) else commit_kv_reference
    run(keys, values, slots, first_rows, nodes)


def commit_kv_reference(keys: Tensor, values: Tensor, slots: Tensor, first_rows: Tensor, nodes: Tensor) -> None:
    """`commit_kv` in PyTorch."""
    if nodes.shape[1] == 1:  # roots, which stay where they are
        return
    steps = torch.arange(nodes.shape[1], device=nodes.device)
    # The moving nodes, usually none, are read back, which does not wait on a CPU.
    request, step = ((nodes >= 0) & (nodes != steps)).nonzero(as_tuple=True)
    if not len(step):
        return
    slot, first = slots[request], first_rows[request]
    for store in (keys, values):
        store[:, slot, first + step] = store[:, slot, first + nodes[request, step]]


def commit_kv_triton(keys: Tensor, values: Tensor, slots: Tensor, first_rows: Tensor, nodes: Tensor) -> None:
    """`commit_kv` as one launch: a program moves some columns of one request's rows in one layer.

    Raises ValueError for keys and values of different strides, or rows that are not contiguous.
    """
    layers, _, _, kv_heads, head_dim = keys.shape
    width = kv_heads * head_dim
    if keys.stride() != values.stride() or keys.stride()[3:] != (head_dim, 1):
        raise ValueError("keys and values need the same strides, and contiguous rows")
    requests, steps = nodes.shape
    block_steps = power_of_two(steps, MIN_PATH)
    block_width = min(power_of_two(width), max(64, _BLOCK // block_steps))
    _commit_kv[(-(-width // block_width), layers, requests)](
        keys, values, slots.contiguous(), first_rows.contiguous(), nodes, *keys.stride()[:3], *nodes.stride(), steps,
        WIDTH=width, BLOCK_PLACES=block_steps, BLOCK_WIDTH=block_width, num_warps=4,
    )  # fmt: skip


@jit(do_not_specialize=["request_stride", "steps"], do_not_specialize_on_alignment=["slots", "first_rows", "nodes"])
def _commit_kv(  # type: ignore[no-untyped-def]
    keys, values, slots, first_rows, nodes, layer_stride, slot_stride, row_stride, request_stride, step_stride, steps,
    WIDTH: tl.constexpr, BLOCK_PLACES: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    layer, request = tl.program_id(1).to(tl.int64), tl.program_id(2)
    step = tl.arange(0, BLOCK_PLACES)
    node = tl.load(nodes + request * request_stride + step * step_stride, step < steps, other=-1)
    moves = (node >= 0) & (node != step)
    if tl.sum(moves.to(tl.int32), 0) == 0:
        return  # the likeliest chain comes first in a tree: usually nothing moves
    first = layer * layer_stride + tl.load(slots + request) * slot_stride + tl.load(first_rows + request) * row_stride
    mask = moves[:, None] & (column < WIDTH)[None, :]
    source = first + node[:, None] * row_stride + column[None, :]
    target = first + step[:, None].to(tl.int64) * row_stride + column[None, :]
    moved_keys, moved_values = tl.load(keys + source, mask), tl.load(values + source, mask)
    # One row's destination is another's source. Other programs have other columns; within this one no thread may write
    # before all have read.
    tl.debug_barrier()
    tl.store(keys + target, moved_keys, mask)
    tl.store(values + target, moved_values, mask)
