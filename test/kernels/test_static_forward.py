# SPDX-License-Identifier: Apache-2.0
"""The forward that is captured, on the kernels, gives what any packed forward gives, whatever its memory held."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, poisoned_empty
from support.nightly import examples
from support.no_read_back import no_read_back
from support.static_forwards import flash_attention, kernels, rerun

from benchmarks.random_policy import random_decoder
from specvla_kernels import attention_plan
from specvla_kernels.graph_capture import Capture, Result
from specvla_kernels.greedy_choice import greedy_choice
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.cuda_graphs import Bucket, ForwardSizes, StaticForward, logits_memory
from specvla_ros.engine.kv_cache import KVCache, new_cache
from specvla_ros.engine.runner import Forwards, Graphs
from specvla_ros.engine.verifier import ExtraInputs
from specvla_ros.models.config import DecoderShape

pytest.importorskip("triton")

DECODER = random_decoder(
    DecoderShape(32, 40, 2, 4, 2, 16, vocab_size=50, max_position_embeddings=128), device=str(DEVICE)
)
SLOTS, SLOT_ROWS, NODES = 3, 64, 12
SIZES = ForwardSizes(SLOTS, NODES, prompts=(5, 20, 33))


@st.composite
def forwards(draw: st.DrawFn) -> list[Segment]:
    """A prompt's chunk or its end with a tree behind it, or none, and trees of other requests, in any order."""
    tokens = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    slots = draw(st.permutations(range(SLOTS)))
    trees = draw(st.integers(0, SLOTS - 1))
    parts: list[list[Segment]] = [[tree(draw, tokens, slot, NODES)] for slot in slots[:trees]]
    if not trees or draw(st.booleans()):
        n, prefix_len = draw(st.sampled_from(SIZES.chunks)), draw(st.sampled_from([0, 1, 17]))
        ids = torch.randint(50, (n,), generator=tokens).to(DEVICE)
        chunk = Segment(
            slots[-1],
            prefix_len,
            DECODER.embed_tokens(ids),
            wanted=draw(st.integers(0, 1)),
            sees_all=draw(st.booleans()),
        )
        behind = [tree(draw, tokens, slots[-1], NODES - 1, prefix_len + n)] if chunk.wanted else []
        parts.append([chunk, *behind[: draw(st.integers(0, 1))]])
    return [segment for part in draw(st.permutations(parts)) for segment in part]


def tree(draw: st.DrawFn, tokens: torch.Generator, slot: int, most: int, prefix_len: int | None = None) -> Segment:
    n = draw(st.one_of(st.just(1), st.integers(1, most)))
    prefix_len = draw(st.sampled_from([0, 3, 40])) if prefix_len is None else prefix_len
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, n))]
    ids = torch.randint(50, (n,), generator=tokens).to(DEVICE)
    return Segment(slot, prefix_len, ids, Ancestry.from_parents(parents, DEVICE), wanted=draw(st.integers(0, n)))


def ring_before(segments: list[Segment]) -> KVCache:
    """NaN but for what is committed."""
    cache = new_cache(DECODER, slots=SLOTS, slot_rows=SLOT_ROWS)
    for seed, store in enumerate((cache.keys, cache.values)):
        committed = torch.randn(store.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        store.fill_(torch.nan)
        for segment in segments:
            rows = slice(0, segment.prefix_len)
            store[:, segment.slot, rows] = committed[:, segment.slot, rows]
    return cache


def static_forward(cache: KVCache, bucket: Bucket, capture: Capture, *, flash: bool = False) -> StaticForward:
    logits = logits_memory(DECODER, SIZES)
    return StaticForward(DECODER, cache, bucket, segments=SIZES.segments, logits=logits, capture=capture, flash=flash)


def poison(static: StaticForward) -> None:
    static._embeddings.fill_(torch.nan)
    static._numbers.all.fill_(1 << 40)  # no row, no position


@settings(max_examples=examples(12), deadline=None)
@given(several=st.lists(forwards(), min_size=2, max_size=2), programs=st.sampled_from([1, 40]))
@torch.inference_mode()
def test_forwards_of_a_bucket_are_packed_forwards(several: list[list[Segment]], programs: int) -> None:
    cache = ring_before([])
    bucket = max(filter(None, (SIZES.bucket([len(each) for each in segments]) for segments in several)))
    with kernels(True) as patch:
        patch.setattr(attention_plan, "_programs_of", lambda _: programs)
        patch.setattr(torch.Tensor, "new_empty", poisoned_empty)
        whole: list[Any] = []

        def keep(run: Callable[[], Result]) -> Callable[[], Result]:
            def again() -> Result:
                result = run()
                whole.append(result)
                return result

            return again

        static = static_forward(cache, bucket, keep)
        for segments in several:
            expected_cache = ring_before(segments)
            with kernels(False):
                expected = packed_forward(DECODER, segments, expected_cache)
            cache.keys.copy_(ring_before(segments).keys)
            cache.values.copy_(ring_before(segments).values)
            poison(static)

            value = torch.arange(len(segments) + 2, device=DEVICE)
            place = torch.zeros_like(value)
            along = [*range(7, 7 + len(segments[0]))]

            result = static(segments, ExtraInputs(along, [place], [value]))

            torch.testing.assert_close(result.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=1e-4)
            assert result.choices is not None and result.choices.equal(greedy_choice(result.logits))
            assert result.sent is not None and result.sent.tolist() == along and place.equal(value)
            assert whole[-1][0].isfinite().all(), "rows that no segment has are finite too"
            for store, wanted in ((cache.keys, expected_cache.keys), (cache.values, expected_cache.values)):
                store.flatten(1, 2)[:, cache.sink_row] = torch.nan  # the one row that a packed forward leaves alone
                torch.testing.assert_close(store, wanted, atol=1e-4, rtol=1e-4, equal_nan=True)


@settings(max_examples=examples(12), deadline=None)
@given(several=st.lists(forwards(), min_size=1, max_size=2))
@torch.inference_mode()
def test_forwards_whose_chain_flash_attn_computes_are_packed_forwards(several: list[list[Segment]]) -> None:
    """By what flash-attn's documentation says of it: it is not there without a GPU."""
    whole = [[replace(each, sees_all=False) for each in segments] for segments in several]
    whole = [segments for segments in whole if max(map(len, segments)) > NODES]
    cache = ring_before([])
    with kernels(True) as patch:
        patch.setattr(attention_plan, "varlen_kernel", lambda: flash_attention)
        for segments in whole:
            bucket = SIZES.bucket([len(each) for each in segments])
            assert bucket is not None
            static = static_forward(cache, bucket, rerun, flash=True)
            with kernels(False):
                expected = packed_forward(DECODER, segments, ring_before(segments))
            cache.keys.copy_(ring_before(segments).keys)
            cache.values.copy_(ring_before(segments).values)
            poison(static)
            result = static(segments)
            torch.testing.assert_close(result.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_nothing_is_read_back() -> None:
    bucket = SIZES.bucket([9])
    assert bucket is not None
    with kernels(True):
        static = static_forward(ring_before([]), bucket, rerun)
    held = torch.zeros(bucket.rows, 32, device=DEVICE), torch.zeros(SIZES.wanted, dtype=torch.int64, device=DEVICE)
    static.replay = lambda: held
    with no_read_back():
        result = static([Segment(0, 0, torch.arange(9, device=DEVICE), wanted=2)])
    assert result.hidden.shape == (9, 32) and result.logits.shape == (2, 50) and result.choices is not None
    assert result.choices.shape == (2,)


@torch.inference_mode()
def test_what_does_not_fit_is_refused() -> None:
    bucket = SIZES.bucket([4])
    assert bucket is not None
    with kernels(True):
        static = static_forward(ring_before([]), bucket, rerun)
    with pytest.raises(ValueError, match="5 rows, 1 of them wanted, do not fit a forward of 4 and 4"):
        static([Segment(0, 0, torch.arange(5, device=DEVICE))])
    with pytest.raises(ValueError, match="60 committed rows and 4 nodes do not fit a slot of 63 rows"):
        static([Segment(0, 60, torch.arange(4, device=DEVICE))])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures CUDA graphs")
@settings(max_examples=examples(15), deadline=None)
@given(several=st.lists(forwards(), min_size=2, max_size=4))
@torch.inference_mode()
def test_captured_forwards_are_packed_forwards(several: list[list[Segment]]) -> None:
    cache = ring_before([])
    captured = Forwards(DECODER, cache, SIZES)
    graphs = Graphs(cache.keys, (captured,))
    graphs.warm_up()
    assert graphs.status == f"{len(SIZES.buckets())} captured"
    for segments in several:
        before = ring_before(segments)
        cache.keys.copy_(before.keys)
        cache.values.copy_(before.values)
        expected = packed_forward(DECODER, segments, before)
        result = captured(segments)
        torch.testing.assert_close(result.hidden, expected.hidden, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(result.logits, expected.logits, atol=1e-3, rtol=1e-3)
