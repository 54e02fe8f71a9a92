"""The packed batches that kernels and stages are timed on, over a KV cache that has what they attend to."""

from dataclasses import dataclass

import torch
from shapes import PROMPT, tree_parents

from specvla_kernels.graph_capture import randomize
from specvla_kernels.layout import Ancestry, PackedLayout
from specvla_ros.engine.batch import PackedBatch, Segment, pack
from specvla_ros.engine.kv_cache import KVCache, new_cache
from specvla_ros.models.llama import LlamaDecoder

DECODES, LARGE_TREE, TREES, TREE = 7, 50, 3, 16
_SLOTS = DECODES
_SLOT_ROWS = 368  # the prompt, an answer and the largest tree, in whole blocks of 16


@dataclass(frozen=True)
class Batch:
    """One packed batch, ready for a forward.

    Args:
        name: for tables.
        packed: embeddings, layout, wanted rows.
        pairs: of a row and a row that it attends to.
        key_rows: rows of the KV cache that are read, each once.
    """

    name: str
    packed: PackedBatch
    pairs: int
    key_rows: int

    @property
    def layout(self) -> PackedLayout:
        """Where the segments lie."""
        return self.packed.layout

    @property
    def rows(self) -> int:
        """Of the packed batch."""
        return self.packed.embeddings.shape[0]


def filled_ring(decoder: LlamaDecoder) -> KVCache:
    """A KV cache with room for every batch; all rows hold random keys and values."""
    cache = new_cache(decoder, slots=_SLOTS, slot_rows=_SLOT_ROWS)
    randomize(cache.keys, cache.values)
    return cache


def batches(decoder: LlamaDecoder) -> list[Batch]:
    """A prompt alone, plain decode steps, a large tree, and a prompt with small trees beside it."""
    prompt = torch.randn(PROMPT, decoder.config.hidden_size, device=decoder.device, dtype=decoder.dtype)
    whole = Segment(0, 0, prompt)
    small = [_tree(decoder, slot, TREE) for slot in range(1, TREES + 1)]
    segments = {
        f"prompt of {PROMPT}": [whole],
        f"{DECODES} x 1 node": [_tree(decoder, slot, 1) for slot in range(DECODES)],
        f"tree of {LARGE_TREE}": [_tree(decoder, 0, LARGE_TREE)],
        f"{PROMPT} + {TREES} x {TREE} nodes": [whole, *small],
    }
    return [_batch(decoder, name, each) for name, each in segments.items()]


def _tree(decoder: LlamaDecoder, slot: int, nodes: int) -> Segment:
    tokens = torch.randint(0, decoder.config.vocab_size, (nodes,), device=decoder.device)
    return Segment(slot, PROMPT, tokens, Ancestry.from_parents(tree_parents(nodes), decoder.device), wanted=nodes)


def _batch(decoder: LlamaDecoder, name: str, segments: list[Segment]) -> Batch:
    return Batch(
        name,
        pack(segments, _SLOT_ROWS, decoder.embed_tokens),
        pairs=sum(len(each) * each.prefix_len + _pairs_within(each.ancestry, len(each)) for each in segments),
        key_rows=sum(each.prefix_len + len(each) for each in segments),
    )


def _pairs_within(ancestry: Ancestry | None, rows: int) -> int:
    return rows * (rows + 1) // 2 if ancestry is None else int(ancestry.matrix().sum())
