# SPDX-License-Identifier: Apache-2.0
"""A draft of fixed size, on the kernels, grows the trees that any draft grows, whatever its memory held."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draft_heads import random_head
from support.kernels import DEVICE
from support.nightly import examples, nightly_but
from support.no_read_back import no_read_back
from support.static_forwards import kernels, rerun, use_table

from benchmarks.random_policy import random_decoder
from specvla_kernels.graph_capture import Captures, capture_on, paddings
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.models.config import DecoderShape
from specvla_ros.speculation.drafters.eagle.drafter import EagleDrafter
from specvla_ros.speculation.drafters.eagle.tree_growth import WindowMass
from specvla_ros.speculation.drafters.registry import DraftInput, NewRows
from specvla_ros.speculation.settings import DraftSettings

pytest.importorskip("triton")

DECODER = random_decoder(
    DecoderShape(32, 40, 1, 4, 2, 16, vocab_size=50, max_position_embeddings=128), device=str(DEVICE)
)
HEADS = {"levels": random_head(DECODER, seed=1), "parallel": random_head(DECODER, seed=1, parallel_depth=3)}
SLOTS = 3
KINDS = (*HEADS, "parallel of ids", "levels of ids", "levels of windows", "parallel of windows")
WINDOW = WindowMass.from_actions(3, ActionIds(0, 16, 15), 7, DEVICE)
WINDOW.tolerate((1,) * 7)


def drafter(kind: str) -> EagleDrafter:
    chosen = DraftSettings(top_k=3, depth=3, nodes=9)
    arguments: dict[str, Any] = {}
    head, _, few = kind.partition(" of ")
    if few:
        arguments = dict(ids=range(30, 46), window=WINDOW if few == "windows" else None)
    return EagleDrafter(HEADS[head], DECODER, chosen, slots=SLOTS, slot_rows=40, captured_depth=5, **arguments)


def captured(kind: str) -> EagleDrafter:
    made = drafter(kind)
    captures = Captures(capture_on(made._grower.keys) or rerun)
    # What a draft reads is checked here, and its operators where they draft: interpreted, a check takes a second.
    on_gpu = DEVICE.type == "cuda"
    with kernels(on_gpu) as patch, torch.inference_mode():
        if not on_gpu:
            use_table(patch)
        made.capture(captures)
    assert captures.count == SLOTS * 3 + len(set(paddings(1, 40))), captures.failed
    return made


CAPTURED = {kind: captured(kind) for kind in KINDS}


@st.composite
def requests(draw: st.DrawFn) -> list[DraftInput]:
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    made = []
    for slot in draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]:
        rows = draw(st.one_of(st.integers(1, 8), st.just(20)))
        known = draw(st.integers(0, rows - 1))
        hidden = torch.randn(rows, 32, generator=drawn).to(DEVICE)
        tokens = torch.randint(50, (rows,), generator=drawn).to(DEVICE)
        new = NewRows(
            hidden[:known],
            DECODER.embed_tokens(tokens[:known]),
            hidden,
            nodes=tuple(range(known, rows)),
            tokens=tuple(tokens[known:].tolist()),
            embed=DECODER.embed_tokens,
        )
        made.append(DraftInput(slot, rows, new, tokens[-1], max_depth=draw(st.integers(0, 4)), position=1))
    return made


@pytest.mark.parametrize("kind", nightly_but(lambda kind: kind in [*KINDS][:3], KINDS))
@settings(max_examples=examples(8) if DEVICE.type == "cpu" else 200, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=2))
@torch.inference_mode()
def test_static_drafts_are_drafts(kind: str, several: list[list[DraftInput]]) -> None:
    made = CAPTURED[kind]
    for store in (made._grower.keys, made._grower.values):
        store.fill_(torch.nan)
    for inputs in several:
        with kernels(True), no_read_back():
            trees = made.draft(inputs)
        with kernels(False):
            expected = drafter(kind).draft(inputs)
        for tree, other in zip(trees, expected, strict=True):
            torch.testing.assert_close(tree.log_probs, other.log_probs, atol=1e-4, rtol=1e-4)
            assert tree.tokens.equal(other.tokens) and tree.depth == other.depth
            assert tree.ancestry.parents.equal(other.ancestry.parents)
            assert tree.ancestry.ancestors.equal(other.ancestry.ancestors)
