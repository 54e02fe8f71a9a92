"""Picks tree, chunks and requests in flight for a device, and says why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specvla_ros.planning.acceptance_lengths import TREE_DEPTH, AcceptanceLengths
from specvla_ros.planning.device_limits import DeviceLimits
from specvla_ros.planning.forward_cost import ridge_rows
from specvla_ros.planning.mode_limits import ModeLimit, mode_limit
from specvla_ros.planning.model_cost import ModelCost, WeightFormat
from specvla_ros.planning.tick_loop import chunk_rows

_TREES = (8, 16, 24, 32, 48, 64)
_PACKED_NODES = 16
_MOST_CHUNKS = 3  # chunks of fewer rows lose more in the matrix products than they win (as Sarathi reports of 64 rows)
_TILES = (64, 128, 192, 256, 320, 384)
_TOP_K = 8


@dataclass(frozen=True)
class Profile:
    """Parameters for the policy node.

    Args:
        mode: `decode.mode`.
        nodes, depth, top_k: `draft.nodes`, `draft.depth`, `draft.top_k`.
        max_in_flight: `decode.max_in_flight`.
        prefill_chunks: `decode.prefill_chunks`.
        chunk_rows: of the longest chunk, such that it fills tiles of the matrix products together with the trees.
        limit: what the mode reaches with these parameters.
        reasons: in words, by what they explain.
    """

    mode: str
    nodes: int
    depth: int
    top_k: int
    max_in_flight: int
    prefill_chunks: int
    chunk_rows: int
    limit: ModeLimit
    reasons: Mapping[str, str]

    def as_yaml(self) -> str:
        """A ROS 2 parameter file."""
        lines = [
            "/**:",
            "  ros__parameters:",
            "    decode:",
            f"      mode: {self.mode}",
            f"      max_in_flight: {self.max_in_flight}",
            f"      prefill_chunks: {self.prefill_chunks}",
            "    draft:",
            f"      nodes: {self.nodes}",
            f"      depth: {self.depth}",
            f"      top_k: {self.top_k}",
        ]
        return "\n".join(lines) + "\n"


def choose(
    model: ModelCost,
    device: DeviceLimits,
    weights: WeightFormat,
    limits: Sequence[ModeLimit],
    lengths: AcceptanceLengths,
) -> Profile:
    """The profile whose actions answer the freshest images, of the modes that find room (of all, if none does)."""
    ridge = ridge_rows(model, device, weights)
    asked = math.ceil(model.prompt_rows / ridge)
    chunks = min(asked, _MOST_CHUNKS)
    able = [each for each in limits if each.mode.chunks in (1, chunks)]
    fitting = [each for each in able if each.fits(device)]
    best = min(fitting or able, key=lambda each: each.oldest_image_s)
    chunks_used = best.mode.chunks
    drafts = best.mode.nodes > 1
    verifications = lengths.verifications(model.action_tokens - 1) if drafts else model.action_tokens - 1
    in_flight = math.ceil((chunks_used + verifications) / chunks_used) if best.mode.pipelined else 1
    nodes = _nodes(ridge / in_flight, packed=best.mode.pipelined) if drafts else 1
    # A tree is no deeper than the tokens that may be missing when it is drafted, the target's own one not counted.
    depth = max(1, min(TREE_DEPTH, model.action_tokens - 2)) if drafts else 1
    trees = math.ceil(verifications / chunks_used) if best.mode.pipelined else 0
    longest = chunk_rows(model.prompt_rows, chunks_used)[0]
    filled = _fill_tiles(longest, trees * nodes, most=model.prompt_rows) if chunks_used > 1 else longest
    mode = replace(best.mode, nodes=nodes, max_in_flight=in_flight)
    limit = mode_limit(mode, model, device, weights, lengths)
    needed = (limit.kv_bytes + limit.weight_bytes) / 1e9
    reasons = {
        "decode.mode": f"{best.mode.name} acts on the freshest images: at most {best.oldest_image_s * 1e3:.0f} ms old "
        "when the next action comes (latency and period, derated)",
        "decode.prefill_chunks": _chunk_reason(model, ridge, asked, chunks_used),
        "chunk length": f"{filled} rows beside {trees} x {nodes} nodes: {filled + trees * nodes}, whole tiles"
        if chunks_used > 1
        else "the whole prompt",
        "decode.max_in_flight": f"{chunks_used} forward(s) for the prompt and {verifications:.1f} behind it, "
        f"a new frame every {chunks_used}"
        if best.mode.pipelined
        else "one request at a time",
        "draft.nodes": _node_reason(ridge, in_flight, nodes, packed=best.mode.pipelined) if drafts else "no tree",
        "memory": f"{needed:.3g} of {device.memory_gb:.0f} GB for weights, keys and values"
        + ("" if fitting else ": IT DOES NOT FIT; try --weights int4"),
        "expect": f"{limit.derated_rate_hz:.3g} actions/s, {limit.derated_latency_s * 1e3:.0f} ms (derated)",
    }
    return Profile(
        mode=best.mode.decode_mode,
        nodes=nodes,
        depth=depth,
        top_k=max(1, min(_TOP_K, nodes // depth)),
        max_in_flight=in_flight,
        prefill_chunks=chunks_used,
        chunk_rows=filled,
        limit=limit,
        reasons=reasons,
    )


def _nodes(free_rows: float, *, packed: bool) -> int:
    """The largest tree that is free where there is no prompt; beside a prompt each node costs, so no more than 16."""
    most = _PACKED_NODES if packed else _TREES[-1]
    return max((size for size in _TREES if size <= min(free_rows, most)), default=_TREES[0])


def _fill_tiles(chunk: int, nodes: int, *, most: int) -> int:
    """The longest chunk that takes no more tiles than this one, beside so many nodes."""
    tile = min((size for size in _TILES if size >= chunk + nodes), default=chunk + nodes)
    return min(tile - nodes, most)


def _chunk_reason(model: ModelCost, ridge: float, asked: int, chunks: int) -> str:
    crossing = f"a prompt of {model.prompt_rows} rows, computing and reading balance at {ridge:.0f}"
    if chunks == 1:
        return f"whole ({crossing})"
    if asked > chunks:
        return f"{crossing}: {asked} chunks, but products of fewer than {model.prompt_rows // chunks} rows waste tiles"
    return crossing


def _node_reason(ridge: float, in_flight: int, nodes: int, *, packed: bool) -> str:
    free = f"{nodes} nodes for each of {in_flight} in flight, {ridge:.0f} rows are free in a forward without a prompt"
    return f"{free}; beside a prompt every node costs, and beyond {_PACKED_NODES} more than it wins" if packed else free
