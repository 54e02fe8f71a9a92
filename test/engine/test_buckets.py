# SPDX-License-Identifier: Apache-2.0
"""Every forward that settings can lead to has a bucket that is captured, not much larger than itself."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specvla_kernels.graph_capture import padded_rows
from specvla_ros.engine.cuda_graphs import Bucket, ForwardSizes
from specvla_ros.engine.request import Request, ScheduledRequest
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.target import PromptLayout
from specvla_ros.speculation.settings import DraftSettings

OPENVLA: Any = SimpleNamespace(image_tokens=256)


def sizes(chosen: EngineSettings, *, image_tokens: int = 256) -> ForwardSizes:
    policy: Any = SimpleNamespace(image_tokens=image_tokens)
    return ForwardSizes.from_settings(policy, chosen)


def shares(length: int, chunks: int) -> list[int]:
    """The rows of a prompt in each forward, as the engine cuts it."""
    nothing: Any = None
    request = Request(nothing, 0, PromptLayout((), length, ()), 0.0, nothing, nothing)
    rows = []
    while request.prefilling:
        rows.append(ScheduledRequest.next_share(request, chunks).prompt_rows)
        request.prefix_len += rows[-1]
    return rows


@settings(max_examples=200, deadline=None)
@given(data=st.data(), mode=st.sampled_from(["ar", "spec", "pipeline", "specpipe"]))
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
    most = nodes if chosen.drafts else 1
    prompt = data.draw(st.integers(image_tokens + 1, image_tokens + chosen.max_text_tokens))
    begins = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(1, most), max_size=chosen.slots - begins, min_size=not begins))
    if begins:
        lengths.append(data.draw(st.sampled_from(shares(prompt, chosen.chunks))))
        if most > 1 and data.draw(st.booleans()):
            lengths.append(data.draw(st.integers(1, most - 1)))

    bucket = known.bucket(lengths)

    assert bucket in known.buckets()
    rows = sum(lengths)
    assert rows <= bucket.rows < 2 * rows and bucket.rows - rows < max(64, rows / 4)
    assert max(lengths) <= bucket.longest <= bucket.rows


def test_buckets_of_the_usual_settings() -> None:
    assert sizes(EngineSettings()).buckets() == (Bucket(1, 1), Bucket(320, 320), Bucket(384, 384))
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
    assert ForwardSizes(slots=2, nodes=4, chunks=(8,)).bucket(lengths) is None


def test_a_bucket_is_its_own() -> None:
    rows = {padded_rows(n) for n in range(1, 5000)}
    assert all(padded_rows(each) == each for each in rows)
