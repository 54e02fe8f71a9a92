# SPDX-License-Identifier: Apache-2.0
"""Runs a tick: vision for the request that begins, then one packed forward of the batch; captured or eager.

Sizes that were captured as CUDA graphs are replayed, all others run eagerly; nobody else knows which.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from specvla_kernels.attention_plan import flash_takes, flash_version
from specvla_kernels.graph_capture import Capturable, Capture, Captures, capture_on, check_rows, randomize
from specvla_kernels.product_contest import seconds
from specvla_ros.engine.batch import Batch, Segment, packed_forward
from specvla_ros.engine.cuda_graphs import (
    Bucket,
    ForwardSizes,
    StaticForward,
    check_forward,
    check_segments,
    logits_memory,
)
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.request import Request
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.target import Decoder, ForwardResult, Target, VisionModel

_log = logging.getLogger(__name__)


class Runner:
    """The target's side of a tick. `others` are captured beside vision and forwards."""

    def __init__(self, target: Target, cache: KVCache, settings: EngineSettings, others: Sequence[Capturable]) -> None:
        if target.decoder.device.type == "cuda":
            # Sums that are split among programs would be added in the product's dtype: more ties would fall otherwise.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._target = target
        self._clock = StageClock(target.decoder.device)
        self.vision = Vision(target.model)
        sizes = ForwardSizes.from_settings(target, settings)
        self.forwards = Forwards(target.decoder, cache, sizes, causal=target.causal_prompt)
        self.graphs = Graphs(cache.keys, (self.forwards, self.vision, *others))

    def embed(self, request: Request) -> None:
        """Computes a request's prompt, images and words; raises ValueError if its rows are not those laid out."""
        pictures, request.pictures = request.pictures, None
        self._clock.start()
        prepared = (pictures.pixels(),) if pictures is not None else ()
        embed = self._target.prompt_embeddings
        request.prompt = embed(request.observation, request.layout.ids, self.vision, *prepared)
        self._clock.stop()
        if len(request.prompt) != request.layout.rows:
            raise ValueError(f"a prompt of {request.layout.rows} rows has {len(request.prompt)} embeddings")

    def run(self, batch: Batch) -> ForwardResult:
        """Computes a batch whose prompts are embedded; its shares, at least one, get their hidden states.

        Returns logits and choices of the nodes of all verified trees, shares in order; the next run overwrites all of
        them.
        """
        segments = [share.segments() for share in batch.shares]
        result = self.forwards([segment for mine in segments for segment in mine])
        start = 0
        for share, mine in zip(batch.shares, segments, strict=True):
            share.states, share.rows = result.hidden, range(start, start + sum(map(len, mine)))
            start = share.rows.stop
            if share.request.rule.needs_visual:
                share.keep_visual()
            if self._target.head is not None and share.ends_prompt:
                share.request.actions = self._target.head(share.hidden[: share.prompt_rows])
        return result

    def vision_s(self) -> float:
        """Seconds of the vision tower since the last call. Call after a read-back."""
        return self._clock.read_s()


class Graphs:
    """Captures an engine's work and says how that went.

    Attributes:
        status: for diagnostics; empty where there is no GPU.
        warm: whether it was warmed up, with whatever result.
    """

    def __init__(self, store: Tensor, parts: Sequence[Capturable]) -> None:
        self._store = store
        self._parts = parts
        self.status = "off: not warmed up" if store.is_cuda else ""
        self.warm = False

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures every part and compares it with the same work without capture.

        No request may be in flight: every slot is written to. A part that cannot be captured, or differs, is logged and
        said in `status`, and runs eagerly; the others stay captured.
        """
        self.warm = True
        for each in self._parts:
            each.release()
        try:
            capture = capture_on(self._store)
        except RuntimeError as error:
            self.status = f"off: {error}"
            _log.warning("decoding without CUDA graphs, so that launches may limit it: %s", error)
            return
        if capture is None:
            return
        captures = Captures(capture)
        for each in self._parts:
            with captures.group(type(each).__name__.lower()):
                each.capture(captures)
        self.status = captures.summary()
        if captures.failed:
            _log.warning("decoding partly without CUDA graphs, so that launches may limit it: %s", self.status)


class Forwards:
    """Runs packed forwards over one KV cache; `causal`: each row of a prompt sees only earlier ones."""

    def __init__(self, decoder: Decoder, cache: KVCache, sizes: ForwardSizes, *, causal: bool = True) -> None:
        self._decoder = decoder
        self._cache = cache
        self.sizes = sizes
        self._causal = causal
        self._captured: dict[Bucket, StaticForward] = {}
        self._flash: dict[Bucket, str] = {}  # how flash-attn did

    def __call__(self, segments: Sequence[Segment]) -> ForwardResult:
        """`packed_forward`, by the captured forward of its size if there is one."""
        bucket = self.sizes.bucket([len(each) for each in segments])
        static = self._captured.get(bucket) if bucket else None
        return static(segments) if static else packed_forward(self._decoder, segments, self._cache)

    def capture(self, captures: Captures) -> None:
        """See Capturable: a forward of every size. Every slot is written to."""
        randomize(self._cache.keys, self._cache.values)
        self.sizes = self.sizes.measured_on(self._decoder)
        logits = logits_memory(self._decoder, self.sizes)
        for bucket in reversed(self.sizes.buckets()):  # the largest first: the others then find memory in its pool
            with captures.attempt(f"forwards of {bucket.rows} rows"):
                self._captured[bucket] = self._fastest(bucket, logits, captures.capture)

    def _fastest(self, bucket: Bucket, logits: Tensor, capture: Capture) -> StaticForward:
        """With our attention, or flash-attn's for the chain where that is installed, equal and measured faster."""
        ours = self._checked(bucket, logits, capture)
        decoder, head_dim = self._decoder, self._decoder.config.head_dim
        if not self._causal or bucket.longest <= self.sizes.nodes or not flash_takes(decoder.dtype, head_dim):
            return ours
        try:
            theirs = self._checked(bucket, logits, capture, flash=True)
        except Exception as error:  # of a version that calls it otherwise, a device that it has no kernels for
            self._flash[bucket] = f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return ours
        faster = seconds(theirs.replay, decoder.device) < seconds(ours.replay, decoder.device)
        self._flash[bucket] = "faster" if faster else "slower"
        return theirs if faster else ours

    def _checked(self, bucket: Bucket, logits: Tensor, capture: Capture, *, flash: bool = False) -> StaticForward:
        most, cache = self.sizes.segments, self._cache
        static = StaticForward(self._decoder, cache, bucket, segments=most, logits=logits, capture=capture, flash=flash)
        check_forward(static, self._decoder, cache, check_segments(bucket, self.sizes, self._decoder, cache))
        return static

    @property
    def attention(self) -> str:
        """For diagnostics: where flash-attn is used; empty where it is not installed or not needed."""
        said = Counter(self._flash.values())
        counts = ", ".join(f"{what} in {n} sizes of forward" for what, n in said.items())
        return f"flash-attn {flash_version()}, used where it is faster: {counts}" if counts else ""

    def release(self) -> None:
        self._captured, self._flash = {}, {}


class Vision:
    """Runs a model's vision towers and projector."""

    def __init__(self, model: VisionModel) -> None:
        self._model = model
        self._captured: StaticVision | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        return (self._captured or self._model.image_embeddings)(pixels)

    def capture(self, captures: Captures) -> None:
        """See Capturable; a model without towers has nothing to capture."""
        if not self._model.pixel_shape:
            return
        with captures.attempt("vision"):
            static = StaticVision(self._model, captures.capture)
            pixels = torch.randn(self._model.pixel_shape, generator=torch.Generator().manual_seed(0))
            check_rows(static(pixels), self._model.image_embeddings(pixels), what="the captured vision")
            self._captured = static

    def release(self) -> None:
        self._captured = None


class StaticVision:
    """The embeddings of an image: its pixels are copied in, and the towers run as they were captured."""

    def __init__(self, model: VisionModel, capture: Capture) -> None:
        self._model = model
        decoder = model.decoder
        # NaN shows in a result that does not come from pixels copied in later.
        self._pixels = torch.full(model.pixel_shape, torch.nan, dtype=decoder.dtype, device=decoder.device)
        self._replay = capture(self._run)

    def __call__(self, pixels: Tensor) -> Tensor:
        """`VisionModel.image_embeddings`, [image_tokens, hidden]; the host does not wait, the next image overwrites it.

        The pixels, [3 * towers, size, size], normalised, are in the host's memory; best pinned and in the decoder's
        dtype.
        """
        if self._pixels.is_cuda and (pixels.dtype != self._pixels.dtype or not pixels.is_pinned()):
            # New memory each time: the copy may still be under way when the next image comes.
            pixels = torch.empty(pixels.shape, dtype=self._pixels.dtype, pin_memory=True).copy_(pixels)
        self._pixels.copy_(pixels, non_blocking=True)
        return self._replay()

    def _run(self) -> Tensor:
        return self._model.image_embeddings(self._pixels)


class StageClock:
    """Times work on the model's device.

    On CUDA it records events and reads them after the tick's one read-back, when they have passed anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._started = 0.0
        self._elapsed_s = 0.0
        self._measured = False

    def start(self) -> None:
        self._started, self._measured = time.perf_counter(), False
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        self._measured = True
        self._elapsed_s = time.perf_counter() - self._started
        if self._events is not None:
            self._events[1].record()

    def read_s(self) -> float:
        """Seconds between start and stop, once; 0 when nothing was timed since. Call after a read-back."""
        if not self._measured:
            return 0.0
        self._measured = False
        if self._events is not None:
            return self._events[0].elapsed_time(self._events[1]) * 1e-3
        return self._elapsed_s
