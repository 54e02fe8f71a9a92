"""The engine's one primitive: a list of segments through the target in one pass."""

from collections.abc import Sequence

from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.segment import Segment, pack
from specvla_ros.models.llama import ForwardResult, LlamaDecoder


def packed_forward(decoder: LlamaDecoder, segments: Sequence[Segment], cache: KVCache) -> ForwardResult:
    """Runs any mix of prefills, chunks, decode steps and trees; writes their keys and values to the KV cache.

    Each segment gets what it would get alone, to rounding.

    Returns:
        Logits of each segment's last `wanted` nodes, and hidden states of all nodes, segments in order.
    """
    batch = pack(segments, cache.slot_rows, decoder.embed_tokens)
    return decoder(batch.embeddings, batch.layout, batch.wanted_rows, cache.keys, cache.values)


def new_cache(decoder: LlamaDecoder, *, slots: int, slot_rows: int) -> KVCache:
    """A KV cache that fits the decoder.

    Args:
        slots: requests in flight at most.
        slot_rows: rows of one request: prompt, action tokens and drafted nodes.
    """
    config = decoder.config
    return KVCache(
        layers=config.num_hidden_layers,
        slots=slots,
        slot_rows=slot_rows,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
    )
