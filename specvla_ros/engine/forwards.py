"""The engine's forwards: captured where they can be, as they come elsewhere."""

import logging
from collections.abc import Sequence

import torch

from specvla_ros.engine.buckets import Bucket, ForwardSizes
from specvla_ros.engine.forward_check import check_forward, check_segments, fill_at_random
from specvla_ros.engine.graph_capture import Capturable, Capture, capture_on
from specvla_ros.engine.kv_ring import KVRing
from specvla_ros.engine.packed_forward import packed_forward
from specvla_ros.engine.segment import Segment
from specvla_ros.engine.static_forward import StaticForward
from specvla_ros.models.llama import ForwardResult, LlamaDecoder

_log = logging.getLogger(__name__)


class Forwards:
    """Runs packed forwards over one ring.

    Args:
        decoder: the target.
        ring: keys and values of the requests in flight.
        sizes: of the forwards that will come.
        others: what else is captured when the forwards are; if one of all these fails, none runs captured.

    Attributes:
        status: of the CUDA graphs, for diagnostics; empty where there is no GPU.
        warm: whether it was warmed up, with whatever result.
    """

    def __init__(
        self, decoder: LlamaDecoder, ring: KVRing, sizes: ForwardSizes, others: Sequence[Capturable] = ()
    ) -> None:
        self._decoder = decoder
        self._ring = ring
        self._sizes = sizes
        self._others = others
        self._captured: dict[Bucket, StaticForward] = {}
        self.status = "off: not warmed up" if ring.keys.is_cuda else ""
        self.warm = False

    def __call__(self, segments: Sequence[Segment]) -> ForwardResult:
        """`packed_forward`, by the captured forward of its size if there is one."""
        bucket = self._sizes.bucket([len(each) for each in segments])
        static = self._captured.get(bucket) if bucket else None
        return static(segments) if static else packed_forward(self._decoder, segments, self._ring)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures a forward of every size, and the others, and compares each with the same work without capture.

        No request may be in flight: every slot is written to. Whatever goes wrong is logged and said in `status`, and
        everything then runs without capture.
        """
        self.warm = True
        self._release()
        try:
            capture = capture_on(self._ring.keys)
            if capture is None:
                return
            self._captured = self._capture_all(capture)
            others = sum(each.capture(capture) for each in self._others)
            self.status = f"{len(self._captured) + others} captured"
        except Exception as error:  # the policy runs without graphs too, only slower
            self._release()
            reason = _reason(error)
            self.status = f"off: {reason}"
            _log.warning("decoding without CUDA graphs, so that launches may limit it: %s", reason)

    def _release(self) -> None:
        self._captured = {}
        for each in self._others:
            each.release()

    def _capture_all(self, capture: Capture) -> dict[Bucket, StaticForward]:
        fill_at_random(self._ring)
        captured = {}
        for bucket in reversed(self._sizes.buckets()):  # the largest first: the others then find memory in its pool
            static = StaticForward(self._decoder, self._ring, bucket, segments=self._sizes.segments, capture=capture)
            segments = check_segments(bucket, self._sizes, self._decoder, self._ring)
            check_forward(static, self._decoder, self._ring, segments)
            captured[bucket] = static
        return captured


def _reason(error: BaseException) -> str:
    """What came first, since an error while capturing makes the end of the capture fail too; in one line."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".partition("\n")[0]
