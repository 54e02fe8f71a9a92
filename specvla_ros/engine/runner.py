# SPDX-License-Identifier: Apache-2.0
"""Runs a tick's model work: vision for the starting request, then one packed forward of the batch.

Sizes captured as CUDA graphs are replayed, small trees on a CPU run compiled layers, and all others run eagerly: no
caller sees which.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specvla_kernels.attention_plan import flash_takes, flash_version
from specvla_kernels.device import to_device
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
from specvla_ros.engine.kv_cache import KVCache, memory_advice
from specvla_ros.engine.prepared_images import prepared_images
from specvla_ros.engine.request import Request
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.verifier import NO_EXTRA_INPUTS, ExtraInputs
from specvla_ros.engine.vision import SideStream, StageClock, Vision, keep_for_current_stream
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.target import Decoder, ForwardResult, Target
from specvla_ros.models.weights import Progress, no_progress

_log = logging.getLogger(__name__)
_CHECKED_AHEAD = 8  # times: work that interferes need not do so each time


class Runner:
    """The target's part of a tick. `others` are captured along with vision and forwards."""

    def __init__(self, target: Target, cache: KVCache, settings: EngineSettings, others: Sequence[Capturable]) -> None:
        if target.decoder.device.type == "cuda":
            # Split-K sums would be added in the product's dtype, and more ties would break differently.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._target, self._cache = target, cache
        self._clock = StageClock(target.decoder.device)
        self.vision, self.side = Vision(target.model), SideStream(target.decoder.device)
        sizes = ForwardSizes.from_settings(target, settings)
        self.forwards = Forwards(target.decoder, cache, sizes, causal=target.causal_prompt)
        self.graphs = Graphs(cache.keys, (self.forwards, *others), beside=(self.vision,))
        self.compiled = ""  # how the decoder's layers are compiled, for diagnostics; empty: they need not be

    def compile_layers(self, progress: Progress = no_progress) -> None:
        """On a CPU, compiles the decoder's layers for small trees; without a compiler they run as they are."""
        decoder = self._target.decoder
        if decoder.device.type != "cpu" or not isinstance(decoder, PackedDecoder):
            return
        if os.environ.get("TORCH_COMPILE_DISABLE", "0") not in ("", "0"):
            self.compiled = "off: TORCH_COMPILE_DISABLE is set"
            return
        progress("warming up: compiling the decoder's layers for this processor; their next start is faster", 1.0)
        try:
            decoder.compile_layers()
        except Exception as error:  # any: they run without too, only slower
            self.compiled = f"off: {error}"
            _log.warning("decoding without compiled layers, up to twice as slow with small policies: %s", error)
            return
        if decoder.compiled is not None:
            took = f", compiled in {decoder.compiled.compile_s:.0f} s" if decoder.compiled.compile_s else ""
            self.compiled = f"for trees of up to {decoder.compiled.most_rows} nodes{took}"

    def embed(self, request: Request) -> None:
        """Computes a request's prompt embeddings; raises ValueError if their number differs from the layout."""
        self.side.join()  # a dropped request's images may still be there
        self._embed(request)

    def embed_ahead(self, request: Request) -> None:
        """Does the same beside the forward that was given to the device last; its prompt waits for it."""
        with self.side.beside():
            self._embed(request)
        keep_for_current_stream(request.prompt)

    def _embed(self, request: Request) -> None:
        images, request.images = request.images, None
        self._clock.start()
        prepared = (images.pixels(),) if images is not None else ()
        embed = self._target.prompt_embeddings
        request.prompt = embed(request.observation, request.layout.ids, self.vision, *prepared)
        if request.tokens:
            given = to_device(request.tokens, request.prompt.device)
            answer = self._target.decoder.embed_tokens(given).to(request.prompt.dtype)
            request.prompt = torch.cat((request.prompt, answer))
        self._clock.stop()
        if len(request.prompt) != request.layout.rows:
            raise ValueError(f"a prompt laid out with {request.layout.rows} rows has {len(request.prompt)} embeddings")

    def run(self, batch: Batch, extra: ExtraInputs = NO_EXTRA_INPUTS) -> ForwardResult:
        """Computes a non-empty batch whose prompts are embedded, and sets the hidden states of its shares.

        Returns logits and choices for the nodes of all verified trees, in share order. The next run overwrites all
        results.
        """
        if batch.ahead:
            self.side.begin()
        elif any(share.request.ahead and share.prompt_rows for share in batch.shares):
            self.side.join()
        segments = [share.segments() for share in batch.shares]
        result = self.forwards([segment for mine in segments for segment in mine], extra)
        start = 0
        for share, mine in zip(batch.shares, segments, strict=True):
            share.states, share.rows = result.hidden, range(start, start + sum(map(len, mine)))
            start = share.rows.stop
            if share.request.rule.needs_visual:
                share.keep_visual()
            if self._target.head is not None and share.ends_prompt:
                share.request.actions = self._target.head(share.hidden[: share.prompt_rows])
        return result

    @torch.inference_mode()
    def ahead_fault(self) -> str:
        """Compares a prompt computed beside a forward, and the forward, with each of them alone; empty if equal.

        Overwrites the KV cache.
        """
        blank, sizes = self._target.blank_observation(), self.forwards.sizes
        black = blank.of_cameras(self._target.cameras)
        noise = {name: _noise(black[name], seed) for seed, name in enumerate(black)}
        seen = replace(blank, images=noise)
        images, ids = prepared_images(self._target, seen), self._target.prompt_layout(seen).ids
        prepared = (images.pixels(),) if images is not None else ()
        embed = partial(self._target.prompt_embeddings, seen, ids, self.vision, *prepared)
        trees = max(bucket for bucket in sizes.buckets() if bucket.longest <= sizes.nodes)
        segments = check_segments(trees, sizes, self._target.decoder, self._cache)
        randomize(self._cache.keys, self._cache.values)
        prompt, hidden = embed().clone(), self.forwards(segments).hidden.clone()
        try:
            for _ in range(_CHECKED_AHEAD):
                self.side.begin()
                forward = self.forwards(segments)
                with self.side.beside():
                    beside = embed()
                self.side.join()
                check_rows(keep_for_current_stream(beside), prompt, what="a prompt computed beside a forward")
                check_rows(forward.hidden, hidden, what="a forward beside the vision towers")
        except RuntimeError as error:
            return (str(error).splitlines() or [""])[0]
        return ""

    def vision_s(self) -> float:
        """Vision tower time in seconds since the last call. Call after a read-back."""
        return self._clock.read_s()


class Graphs:
    """Captures an engine's work as CUDA graphs and reports the result.

    Args:
        parts: work that runs one at a time and shares the memory of its intermediate results.
        beside: work that may run beside these, with memory of its own.

    Attributes:
        status: for diagnostics; empty without a GPU.
        warm: whether a warm-up was run, successful or not.
    """

    def __init__(self, store: Tensor, parts: Sequence[Capturable], beside: Sequence[Capturable] = ()) -> None:
        self._store = store
        self._groups = (parts, beside)
        self.status = "off: not warmed up" if store.is_cuda else ""
        self.warm = False

    @torch.inference_mode()
    def warm_up(self, progress: Progress = no_progress) -> None:
        """Captures every part and compares it with the same work run eagerly.

        No request may be in flight, since every slot is overwritten. A part that cannot be captured or differs is
        logged, reported in `status` and run eagerly; the others stay captured. `progress` gets each captured work.
        """
        self.warm = True
        for each in chain(*self._groups):
            each.release()
        try:
            capture, own = capture_on(self._store), capture_on(self._store)
        except RuntimeError as error:
            self.status = f"off: {error}"
            _log.warning("decoding without CUDA graphs, so launches may limit the speed: %s", error)
            return
        if capture is None or own is None:
            return
        captures = Captures(
            capture, lambda what: progress(f"warming up: {captures.count} CUDA graphs captured, now {what}", 1.0)
        )
        for how, parts in zip((capture, own), self._groups, strict=True):
            captures.capture = how
            for each in parts:
                with captures.group(type(each).__name__.lower()):
                    each.capture(captures)
        self.status = captures.summary()
        if captures.failed:
            problem = f"{self.status}{memory_advice(self.status)}"
            _log.warning("decoding partly without CUDA graphs, so launches may limit the speed: %s", problem)


def _noise(like: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, like.shape, dtype=np.uint8)


class Forwards:
    """Runs packed forwards over one KV cache; `causal`: each row of a prompt sees only earlier ones."""

    def __init__(self, decoder: Decoder, cache: KVCache, sizes: ForwardSizes, *, causal: bool = True) -> None:
        self._decoder = decoder
        self._cache = cache
        self.sizes = sizes
        self._causal = causal
        self._captured: dict[Bucket, StaticForward] = {}
        self._flash: dict[Bucket, str] = {}  # result of trying flash-attn

    def __call__(self, segments: Sequence[Segment], extra: ExtraInputs = NO_EXTRA_INPUTS) -> ForwardResult:
        """Runs `packed_forward`, by a captured forward of its size if one exists, which then sends `extra` too."""
        bucket = self.sizes.bucket([len(each) for each in segments])
        static = self._captured.get(bucket) if bucket else None
        return static(segments, extra) if static else packed_forward(self._decoder, segments, self._cache)

    def capture(self, captures: Captures) -> None:
        """See Capturable: captures a forward of every size. Overwrites every slot."""
        randomize(self._cache.keys, self._cache.values)
        self.sizes = self.sizes.measured_on(self._decoder)
        logits = logits_memory(self._decoder, self.sizes)
        for bucket in reversed(self.sizes.buckets()):  # largest first, so that the others reuse its memory pool
            with captures.attempt(f"forwards of {bucket.rows} rows"):
                self._captured[bucket] = self._fastest(bucket, logits, captures.capture)

    def _fastest(self, bucket: Bucket, logits: Tensor, capture: Capture) -> StaticForward:
        """The forward with our attention, or flash-attn's for the chain if installed, equal and measured faster."""
        ours = self._checked(bucket, logits, capture)
        decoder, head_dim = self._decoder, self._decoder.config.head_dim
        if not self._causal or bucket.longest <= self.sizes.nodes or not flash_takes(decoder.dtype, head_dim):
            return ours
        try:
            theirs = self._checked(bucket, logits, capture, flash=True)
        except Exception as error:  # e.g. a version with another API, or a device without kernels
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
        """The use of flash-attn, for diagnostics; empty if it is not installed or not needed."""
        said = Counter(self._flash.values())
        counts = ", ".join(f"{what} in {n} sizes of forward" for what, n in said.items())
        return f"flash-attn {flash_version()}, used where it is faster: {counts}" if counts else ""

    def release(self) -> None:
        self._captured, self._flash = {}, {}
