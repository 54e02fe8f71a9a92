"""The engine's forwards: captured where they can be, as they come elsewhere."""

from collections.abc import Sequence

from specvla_kernels.graph_capture import Capture, randomize
from specvla_ros.engine.buckets import Bucket, ForwardSizes
from specvla_ros.engine.forward_check import check_forward, check_segments
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.packed_forward import packed_forward
from specvla_ros.engine.segment import Segment
from specvla_ros.engine.static_forward import StaticForward
from specvla_ros.models.llama import ForwardResult, LlamaDecoder


class Forwards:
    """Runs packed forwards over one KV cache.

    Args:
        decoder: the target.
        cache: keys and values of the requests in flight.
        sizes: of the forwards that will come.
    """

    def __init__(self, decoder: LlamaDecoder, cache: KVCache, sizes: ForwardSizes) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sizes = sizes
        self._captured: dict[Bucket, StaticForward] = {}

    def __call__(self, segments: Sequence[Segment]) -> ForwardResult:
        """`packed_forward`, by the captured forward of its size if there is one."""
        bucket = self._sizes.bucket([len(each) for each in segments])
        static = self._captured.get(bucket) if bucket else None
        return static(segments) if static else packed_forward(self._decoder, segments, self._cache)

    def capture(self, capture: Capture) -> int:
        """See Capturable: a forward of every size. Every slot is written to."""
        randomize(self._cache.keys, self._cache.values)
        for bucket in reversed(self._sizes.buckets()):  # the largest first: the others then find memory in its pool
            static = StaticForward(self._decoder, self._cache, bucket, segments=self._sizes.segments, capture=capture)
            segments = check_segments(bucket, self._sizes, self._decoder, self._cache)
            check_forward(static, self._decoder, self._cache, segments)
            self._captured[bucket] = static
        return len(self._captured)

    def release(self) -> None:
        """See Capturable."""
        self._captured = {}
