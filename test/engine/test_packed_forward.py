# SPDX-License-Identifier: Apache-2.0
"""Packing any mix of segments gives each segment what it gets alone; trees and chunks give what a plain chain gives."""

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from benchmarks.random_policy import random_decoder
from specvla_kernels.layout import Ancestry
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.models.config import DecoderShape

SLOT_ROWS = 112
TOLERANCE: dict[str, Any] = dict(atol=1e-9, rtol=1e-9)  # the models are float64


@st.composite
def decoders(draw: st.DrawFn) -> tuple[DecoderShape, int]:
    kv_heads = draw(st.sampled_from([1, 2]))
    group = draw(st.sampled_from([1, 2, 4]))
    config = DecoderShape(
        hidden_size=draw(st.sampled_from([16, 40])),
        intermediate_size=draw(st.sampled_from([24, 56])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 20])),
        vocab_size=97,
        max_position_embeddings=256,
    )
    return config, draw(st.integers(0, 2**31))


@st.composite
def parent_lists(draw: st.DrawFn) -> tuple[int, ...]:
    n = draw(st.one_of(st.just(1), st.integers(2, 20), st.just(64)))
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, n)))


@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[int, tuple[int, ...] | None, int]]:
    """Prefix length, parents (None: a chain) and nodes of each segment."""
    result: list[tuple[int, tuple[int, ...] | None, int]] = []
    for _ in range(draw(st.integers(1, 4))):
        prefix = draw(st.integers(0, 40))
        if draw(st.booleans()):
            parents = draw(parent_lists())
            result.append((prefix, parents, len(parents)))
        else:
            result.append((prefix, None, draw(st.integers(1, 70))))
    return result


def history(decoder, generator: torch.Generator, n: int) -> torch.Tensor:
    return torch.randint(decoder.config.vocab_size, (n,), generator=generator)


def full_recompute(decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits at the last of a plain chain of tokens, in a KV cache of its own."""
    cache = new_cache(decoder, slots=1, slot_rows=len(tokens))
    return packed_forward(decoder, [Segment(0, 0, tokens)], cache).logits[0]


@settings(max_examples=examples(40), deadline=None)
@given(decoders(), shapes(), st.data())
def test_a_segment_gets_in_a_pack_what_it_gets_alone(model, plan, data) -> None:
    config, seed = model
    decoder = random_decoder(config, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    slots = data.draw(st.permutations(range(len(plan) + 1)))[: len(plan)]
    packed_ring = new_cache(decoder, slots=len(plan) + 1, slot_rows=SLOT_ROWS)
    lone_ring = new_cache(decoder, slots=len(plan) + 1, slot_rows=SLOT_ROWS)
    for cache in (packed_ring, lone_ring):  # what is not committed must never be seen
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    segments = []
    for (prefix, parents, nodes), slot in zip(plan, slots, strict=True):
        if prefix:
            before = Segment(slot, 0, history(decoder, generator, prefix), wanted=0)
            for cache in (packed_ring, lone_ring):
                packed_forward(decoder, [before], cache)
        tokens = history(decoder, generator, nodes)
        as_embeddings = data.draw(st.booleans())
        inputs = decoder.embed_tokens(tokens) if as_embeddings else tokens
        wanted = nodes if parents is not None else data.draw(st.integers(0, nodes))
        segments.append(
            Segment(slot, prefix, inputs, None if parents is None else Ancestry.from_parents(parents), wanted)
        )

    packed = packed_forward(decoder, segments, packed_ring)
    alone = [packed_forward(decoder, [segment], lone_ring) for segment in segments]

    torch.testing.assert_close(packed.logits, torch.cat([a.logits for a in alone]), **TOLERANCE)
    torch.testing.assert_close(packed.hidden, torch.cat([a.hidden for a in alone]), **TOLERANCE)
    for segment in segments:
        written = slice(0, segment.prefix_len + len(segment))
        for one, other in ((packed_ring.keys, lone_ring.keys), (packed_ring.values, lone_ring.values)):
            torch.testing.assert_close(one[:, segment.slot, written], other[:, segment.slot, written], **TOLERANCE)


@settings(max_examples=examples(25), deadline=None)
@given(decoders(), st.integers(0, 30), parent_lists())
def test_each_node_of_a_tree_gets_what_its_own_path_gets_as_a_chain(model, prefix, parents) -> None:
    config, seed = model
    decoder = random_decoder(config, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    before = history(decoder, generator, prefix)
    tokens = history(decoder, generator, len(parents))
    cache = new_cache(decoder, slots=2, slot_rows=SLOT_ROWS)
    if prefix:
        packed_forward(decoder, [Segment(1, 0, before, wanted=0)], cache)

    logits = packed_forward(
        decoder, [Segment(1, prefix, tokens, Ancestry.from_parents(parents), len(parents))], cache
    ).logits

    for node in {0, len(parents) // 2, len(parents) - 1}:
        path = []
        at = node
        while at >= 0:
            path.append(at)
            at = parents[at]
        chain = torch.cat((before, tokens[path[::-1]]))
        torch.testing.assert_close(logits[node], full_recompute(decoder, chain), **TOLERANCE)


@settings(max_examples=examples(25), deadline=None)
@given(decoders(), st.integers(1, 100), st.data())
def test_a_prefill_in_chunks_equals_a_whole_one(model, length, data) -> None:
    config, seed = model
    decoder = random_decoder(config, seed=seed, dtype=torch.float64)
    tokens = history(decoder, torch.Generator().manual_seed(seed), length)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    cache = new_cache(decoder, slots=1, slot_rows=SLOT_ROWS)

    for begin, end in pairwise(cuts):
        logits = packed_forward(decoder, [Segment(0, begin, tokens[begin:end])], cache).logits

    torch.testing.assert_close(logits[0], full_recompute(decoder, tokens), **TOLERANCE)
