"""Whether a captured forward gives what the same forward gives without capture."""

import torch

from specvla_kernels.graph_capture import check_rows
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.buckets import Bucket, ForwardSizes
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.packed_forward import packed_forward
from specvla_ros.engine.segment import Segment
from specvla_ros.engine.static_forward import StaticForward
from specvla_ros.models.llama import LlamaDecoder


def check_forward(static: StaticForward, decoder: LlamaDecoder, cache: KVCache, segments: list[Segment]) -> None:
    """Compares the hidden states of one forward; waits for the device.

    Args:
        static: the captured forward.
        decoder: whose layers it runs.
        cache: filled at random, and in no request's use.
        segments: of the forward.

    Raises:
        RuntimeError: they are not finite, or differ.
    """
    expected = packed_forward(decoder, segments, cache).hidden
    what = f"a captured forward of {len(expected)} rows"
    check_rows(static(segments).hidden, expected, what=what)


def check_segments(bucket: Bucket, sizes: ForwardSizes, decoder: LlamaDecoder, cache: KVCache) -> list[Segment]:
    """Segments that leave as little as they can of a bucket, yet a row if it has several.

    The first is a chain where the bucket is for prompts, the others are trees; tokens are random.
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
