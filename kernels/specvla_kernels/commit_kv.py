"""Moves an accepted path's keys and values behind the slot's committed prefix, for all layers at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specvla_kernels.accept_tree import LEAST_PLACES
from specvla_kernels.device import has_kernels, jit, power_of_two, tl, to_device

_BLOCK = 2048  # elements that a program holds, keys or values: 16 per thread


def commit_kv(keys: Tensor, values: Tensor, slot: int, first_row: int, nodes: Sequence[int]) -> None:
    """Row `first_row + nodes[i]` of the slot becomes row `first_row + i`.

    Rotated keys need no new rotation: a node's position is its depth, and so is its place on the path.

    Args:
        keys: [layers, slots, slot_rows, kv_heads, head_dim], written in place.
        values: like keys.
        slot: whose rows move.
        first_row: where the root's keys and values lie.
        nodes: the path, ascending, the root first: nodes[i] >= i.
    """
    moved = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
    if moved == len(nodes):
        return
    sources = to_device([first_row + node for node in nodes[moved:]], keys.device)
    start, stop = first_row + moved, first_row + len(nodes)
    for store in (keys, values):
        # Indexing with a tensor copies before it is written: a destination may be the source of a later row.
        store[:, slot, start:stop] = store[:, slot, sources]


def commit_kv_batch(keys: Tensor, values: Tensor, slots: Tensor, first_rows: Tensor, nodes: Tensor) -> None:
    """`commit_kv` for several requests whose paths only the device knows; nothing is read back.

    Args:
        keys: [layers, slots, slot_rows, kv_heads, head_dim], written in place.
        values: like keys, of the same strides.
        slots: int64 [requests], all different.
        first_rows: int64 [requests], where each root's keys and values lie.
        nodes: int64 [requests, places], each path as in `commit_kv`, then negative numbers (NO_NODE). A request without
            a path moves nothing.
    """
    run = commit_kv_triton if has_kernels(keys) else commit_kv_reference
    run(keys, values, slots, first_rows, nodes)


def commit_kv_reference(keys: Tensor, values: Tensor, slots: Tensor, first_rows: Tensor, nodes: Tensor) -> None:
    """`commit_kv_batch` in PyTorch."""
    places = torch.arange(nodes.shape[1], device=nodes.device)
    # What pads a path copies the root's row onto itself.
    sources = first_rows[:, None] + nodes.clamp(min=0)
    targets = first_rows[:, None] + torch.where(nodes >= 0, places, 0)
    for store in (keys, values):
        store[:, slots[:, None], targets] = store[:, slots[:, None], sources]


def commit_kv_triton(keys: Tensor, values: Tensor, slots: Tensor, first_rows: Tensor, nodes: Tensor) -> None:
    """`commit_kv_batch` as one launch: a program moves some columns of one request's rows in one layer.

    Raises:
        ValueError: keys and values of different strides, or rows that are not contiguous.
    """
    layers, _, _, kv_heads, head_dim = keys.shape
    width = kv_heads * head_dim
    if keys.stride() != values.stride() or keys.stride()[3:] != (head_dim, 1):
        raise ValueError("keys and values need the same strides, and contiguous rows")
    requests, places = nodes.shape
    block_places = power_of_two(places, LEAST_PLACES)
    block_width = min(power_of_two(width), max(64, _BLOCK // block_places))
    _commit_kv[(-(-width // block_width), layers, requests)](
        keys, values, slots.contiguous(), first_rows.contiguous(), nodes, *keys.stride()[:3], *nodes.stride(), places,
        WIDTH=width, BLOCK_PLACES=block_places, BLOCK_WIDTH=block_width, num_warps=4,
    )  # fmt: skip


@jit(do_not_specialize=["request_stride", "places"], do_not_specialize_on_alignment=["slots", "first_rows", "nodes"])
def _commit_kv(  # type: ignore[no-untyped-def]
    keys, values, slots, first_rows, nodes, layer_stride, slot_stride, row_stride, request_stride, place_stride, places,
    WIDTH: tl.constexpr, BLOCK_PLACES: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    layer, request = tl.program_id(1).to(tl.int64), tl.program_id(2)
    place = tl.arange(0, BLOCK_PLACES)
    node = tl.load(nodes + request * request_stride + place * place_stride, place < places, other=-1)
    moves = (node >= 0) & (node != place)
    if tl.sum(moves.to(tl.int32), 0) == 0:
        return  # the likeliest chain lies first in a tree: usually nothing moves
    first = layer * layer_stride + tl.load(slots + request) * slot_stride + tl.load(first_rows + request) * row_stride
    mask = moves[:, None] & (column < WIDTH)[None, :]
    source = first + node[:, None] * row_stride + column[None, :]
    target = first + place[:, None].to(tl.int64) * row_stride + column[None, :]
    moved_keys, moved_values = tl.load(keys + source, mask), tl.load(values + source, mask)
    # One row's destination is another's source. Other programs have other columns; within this one no thread may write
    # before all have read.
    tl.debug_barrier()
    tl.store(keys + target, moved_keys, mask)
    tl.store(values + target, moved_values, mask)
