# SPDX-License-Identifier: Apache-2.0
"""Every forward that settings can lead to has a bucket that is captured, not much larger than itself."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_kernels.graph_capture import Captures, padded_rows
from specvla_ros.engine import cuda_graphs as buckets
from specvla_ros.engine import runner
from specvla_ros.engine.batch import ScheduledRequest
from specvla_ros.engine.cuda_graphs import Bucket, ForwardSizes
from specvla_ros.engine.request import Request
from specvla_ros.engine.runner import Graphs
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.settings import DraftSettings

OPENVLA: Any = SimpleNamespace(image_tokens=256, causal_prompt=True)


def sizes(chosen: EngineSettings, *, image_tokens: int = 256) -> ForwardSizes:
    policy: Any = SimpleNamespace(image_tokens=image_tokens, causal_prompt=True)
    return ForwardSizes.from_settings(policy, chosen)


def shares(length: int, chunk_rows: int) -> list[int]:
    """The rows of a prompt in each forward, as the engine cuts it."""
    nothing: Any = None
    request = Request(nothing, 0, PromptLayout((), length, ()), chunk_rows, 0.0, nothing, nothing)
    rows = []
    while request.prefilling:
        rows.append(ScheduledRequest.next_share(request).prompt_rows)
        request.prefix_len += rows[-1]
    return rows


def test_captures_that_a_full_gpu_refuses_tell_how_to_make_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Part:
        def __init__(self, error: str) -> None:
            self._error = error

        def capture(self, captures: Captures) -> None:
            with captures.attempt("forwards of 64 rows"):
                raise RuntimeError(self._error)

        def release(self) -> None:
            pass

    monkeypatch.setattr(runner, "capture_on", lambda _: lambda run: run)
    for error, advised in (("CUDA out of memory. Tried to allocate 2 GiB", True), ("no kernel", False)):
        caplog.clear()
        Graphs(torch.zeros(1), [Part(error)]).warm_up()
        assert error in caplog.text
        for parameter in ("decode.max_in_flight", "model.quantization"):
            assert (parameter in caplog.text) == advised


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), mode=st.sampled_from(["ar", "spec", "pipeline", "specpipe", "auto"]))
def test_a_forward_has_a_captured_bucket_that_is_little_larger(data: st.DataObject, mode: str) -> None:
    nodes = data.draw(st.integers(1, 64))
    chosen = EngineSettings(
        mode,
        max_in_flight=data.draw(st.integers(0, 12)),
        prefill_chunks=data.draw(st.integers(1, 16)),
        max_text_tokens=data.draw(st.integers(1, 150)),
        draft=DraftSettings(nodes=nodes),
    )
    image_tokens = data.draw(st.integers(1, 300))
    known = sizes(chosen, image_tokens=image_tokens)
    if data.draw(st.booleans()):
        measured = data.draw(st.sets(st.integers(5, 90).map(lambda n: 16 * n), min_size=1, max_size=12))
        known = replace(known, measured=tuple(sorted(measured)))
    most = nodes if chosen.drafts else 1
    prompt = data.draw(st.integers(image_tokens + 1, image_tokens + chosen.max_text_tokens))
    begins = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(1, most), max_size=chosen.slots - begins, min_size=not begins))
    if begins:
        lengths.append(
            data.draw(
                st.sampled_from(shares(prompt, known.chunk_rows(prompt, data.draw(st.sampled_from(known.spreads)))))
            )
        )
        if most > 1 and data.draw(st.booleans()):
            lengths.append(data.draw(st.integers(1, most - 1)))

    bucket = known.bucket(lengths)

    assert bucket in known.buckets()
    rows = sum(lengths)
    assert rows <= bucket.rows
    if known.measured:
        assert not [size for size in known.measured if rows > 64 and rows <= size < bucket.rows]
    else:
        assert bucket.rows < 2 * rows and bucket.rows - rows < max(64, rows / 4)
    assert max(lengths) <= bucket.longest <= bucket.rows


@settings(max_examples=examples(200), deadline=None)
@given(
    length=st.integers(1, 900),
    forwards=st.integers(1, 16),
    slots=st.integers(1, 6),
    measured=st.sets(st.integers(5, 90).map(lambda n: 16 * n), max_size=12),
)
def test_a_prompt_comes_whole_and_in_no_more_forwards_than_it_may(
    length: int, forwards: int, slots: int, measured: set[int]
) -> None:
    known = ForwardSizes(slots, 16, prompts=(length,), spreads=(forwards,), measured=tuple(sorted(measured)))
    cut = shares(length, known.chunk_rows(length, forwards))
    assert sum(cut) == length and len(cut) <= forwards
    assert set(cut) <= set(known.chunks)


def test_a_chunk_takes_what_its_forward_would_be_padded_with() -> None:
    """290 rows in two forwards beside three trees of 16 nodes, on a device whose tiles end at 192 and 256 rows."""
    known = ForwardSizes(4, 16, prompts=(290,), spreads=(2,), measured=(192, 256))
    assert shares(290, known.chunk_rows(290, 2)) == [208, 82]
    assert known.bucket([208, 16, 16, 16]) == Bucket(256, 208)


def test_sizes_are_those_that_no_larger_one_is_as_fast_as() -> None:
    times = {80: 1.0, 96: 1.001, 112: 0.999, 128: 1.0, 144: 1.6, 160: 1.4, 176: 1.9, 192: 1.9}
    assert buckets.worth_capturing(times) == (128, 160, 192)
    assert buckets.worth_capturing({}) == ()
    assert [padded_rows(n, (128, 160, 192)) for n in (1, 3, 64, 65, 128, 129, 161, 193, 300)] == [
        1, 4, 64, 128, 128, 160, 192, 256, 320
    ]  # fmt: skip


def test_rows_are_free_up_to_the_first_size_that_takes_longer() -> None:
    assert buckets.free_rows({64: 1.0, 80: 1.05, 96: 1.2, 112: 1.0}) == 80
    assert buckets.free_rows({64: 1.0, 80: 1.0}) == 80
    assert buckets.free_rows({}) == 0


def test_on_a_gpu_the_products_of_each_size_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a device of 128 rows to a tile; a CPU is not asked."""
    timed: list[int] = []

    def seconds(call: partial[Any], _: Any) -> float:
        timed.append(len(call.args[0]))
        return -(-timed[-1] // 128) * 1e-3

    monkeypatch.setattr(buckets, "seconds", seconds)
    monkeypatch.setattr(buckets.torch, "randn", lambda *shape, device: torch.empty(shape))
    decoder: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float32, config=SimpleNamespace(hidden_size=8), products=len
    )
    plain = sizes(EngineSettings("specpipe", prefill_chunks=2, draft=DraftSettings(nodes=16)))
    known = plain.measured_on(decoder)
    assert timed == list(range(64, 257, 16)) and (known.measured, known.free_rows) == ((128, 256), 128)
    decoder.device = torch.device("cpu")
    assert plain.measured_on(decoder) is plain


def test_buckets_of_the_usual_settings() -> None:
    assert sizes(EngineSettings("ar")).buckets() == (Bucket(1, 1), Bucket(320, 320), Bucket(384, 384))
    piped = sizes(EngineSettings("pipeline")).buckets()
    assert [each.rows for each in piped] == [1, 2, 4, 8, 320, 384, 448]
    chunked = sizes(EngineSettings("specpipe", prefill_chunks=2, draft=DraftSettings(nodes=16)))
    assert {each for each in chunked.buckets() if each.longest <= 16} == {
        Bucket(1, 1), Bucket(2, 2), Bucket(4, 4), Bucket(8, 8), Bucket(16, 16), Bucket(32, 16), Bucket(64, 16)
    }  # fmt: skip
    assert [each.rows for each in chunked.buckets() if each.longest > 16] == [128, 192, 256]


def test_the_largest_settings_do_not_capture_for_ever() -> None:
    largest = EngineSettings("specpipe", 64, prefill_chunks=16, max_text_tokens=1000, draft=DraftSettings(nodes=64))
    buckets = sizes(largest).buckets()
    assert buckets[-1].rows > 4000 and len(buckets) <= 64


@pytest.mark.parametrize("lengths", [[9], [2, 2, 2, 2]])
def test_what_settings_cannot_lead_to_has_no_bucket(lengths: list[int]) -> None:
    assert ForwardSizes(slots=2, nodes=4, prompts=(8,)).bucket(lengths) is None


def test_a_bucket_is_its_own() -> None:
    rows = {padded_rows(n) for n in range(1, 5000)}
    assert all(padded_rows(each) == each for each in rows)
