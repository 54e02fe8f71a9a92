"""Moves an accepted path's keys and values behind the slot's committed prefix, for all layers at once."""

from collections.abc import Sequence

from torch import Tensor


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
    sources = [first_row + node for node in nodes[moved:]]
    start, stop = first_row + moved, first_row + len(nodes)
    for store in (keys, values):
        # Indexing with a list copies before it is written: a destination may be the source of a later row.
        store[:, slot, start:stop] = store[:, slot, sources]
