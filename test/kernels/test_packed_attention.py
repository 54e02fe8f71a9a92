# SPDX-License-Identifier: Apache-2.0
"""The kernel against the reference in float64: any mix of segments, over a KV cache whose unwritten rows are NaN."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES, TOLERANCES, poisoned
from support.nightly import examples

from specvla_kernels import attention_plan
from specvla_kernels.attention_plan import AttentionPlan, plan_attention
from specvla_kernels.layout import Ancestry, PackedLayout, Span, pack_layout
from specvla_kernels.packed_attention import packed_attention_reference, packed_attention_triton

pytest.importorskip("triton")

SLOTS, SLOT_ROWS = 3, 150
Parts = list[tuple[Span, Ancestry | None]]


@st.composite
def segments(draw: st.DrawFn) -> Parts:
    """One to three slots, each with a chain, a tree, or a chain and the tree that begins where it ends.

    A chain is causal, or its rows see all of it.
    """
    parts: Parts = []
    start = 0
    for slot in draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]:
        kinds = draw(st.sampled_from([("chain",), ("all",), ("tree",), ("chain", "tree"), ("all", "tree")]))
        prefix_len = draw(st.sampled_from([0, 1, 63, 64, 65, 70]))
        for kind in kinds:
            most = min(SLOT_ROWS - prefix_len, 64) if kind == "tree" else SLOT_ROWS - prefix_len - 1
            length = draw(st.one_of(st.sampled_from([1, min(16, most), most]), st.integers(1, min(40, most))))
            parents = [draw(st.integers(-1, node - 1)) for node in range(length)] if kind == "tree" else []
            ancestry = Ancestry.from_parents(parents, DEVICE) if parents else None
            parts.append((Span(slot, start, length, prefix_len, kind == "tree", sees_all=kind == "all"), ancestry))
            start, prefix_len = start + length, prefix_len + length
    return parts


def caches(layout: PackedLayout, kv_heads: int, head_dim: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Keys and values of float64 that fit every dtype; rows that nothing has written are NaN."""
    made = []
    for _ in range(2):
        cache = poisoned(SLOTS, SLOT_ROWS, kv_heads, head_dim, dtype=torch.float64)
        for span in layout.spans:
            rows = span.prefix_len + span.length
            cache[span.slot, :rows] = torch.randn(rows, kv_heads, head_dim, generator=generator).bfloat16().to(cache)
        made.append(cache)
    return made


def plan_of(spans: Sequence[Span], *, group: int, kv_heads: int, programs: int) -> AttentionPlan:
    """As on a device that runs so many programs at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "_programs_of", lambda _: programs)
        return plan_attention(spans, group=group, kv_heads=kv_heads, slot_rows=SLOT_ROWS, device=DEVICE)


@settings(max_examples=examples(60), deadline=None)
@given(
    parts=segments(),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 8]),
    head_dim=st.sampled_from([32, 64, 80, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    programs=st.sampled_from([1, 16, 100]),
    surplus=st.integers(0, 2),
)
def test_the_kernel_is_the_reference(
    parts: Parts, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, programs: int, surplus: int
) -> None:
    generator = torch.Generator().manual_seed(len(parts) + head_dim)
    layout = pack_layout(parts, SLOT_ROWS, DEVICE)
    keys, values = caches(layout, kv_heads, head_dim, generator)
    n_rows = layout.spans[-1].stop
    q = torch.randn(n_rows, kv_heads * group, head_dim, generator=generator).bfloat16().to(DEVICE, torch.float64)
    plan = plan_of(layout.spans, group=group, kv_heads=kv_heads, programs=programs)
    plan = replace(plan, tiles=torch.cat((plan.tiles, plan.tiles.new_zeros(surplus, 6))))

    out = packed_attention_triton(q.to(dtype), keys.to(dtype), values.to(dtype), layout.ancestors, plan)

    expected = packed_attention_reference(q, keys, values, layout)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **TOLERANCES[dtype])
    assert not plan.arrivals.any(), "the next layer's launch counts from zero"


def test_a_plan_takes_the_next_forward_of_its_bucket() -> None:
    """What a captured launch does: the table's contents change, its place and the launch do not."""
    generator = torch.Generator().manual_seed(0)
    tree = Ancestry.from_parents([-1, 0, 0, 1, 1], DEVICE)
    first = pack_layout([(Span(0, 0, 5, 40, True), tree), (Span(1, 5, 5, 60, True), tree)], SLOT_ROWS, DEVICE)
    then = pack_layout([(Span(2, 0, 5, 130, True), tree)], SLOT_ROWS, DEVICE)
    plan = plan_of(first.spans, group=2, kv_heads=2, programs=16)
    table = plan.tiles
    assert plan.splits > 1
    for layout in (first, then):
        plan.tiles.copy_(plan.table(layout.spans))
        keys, values = caches(layout, 2, 16, generator)
        q = torch.randn(layout.spans[-1].stop, 4, 16, generator=generator, dtype=torch.float64).to(DEVICE)
        out = packed_attention_triton(q.float(), keys.float(), values.float(), layout.ancestors, plan)
        torch.testing.assert_close(out.double(), packed_attention_reference(q, keys, values, layout), atol=1e-4, rtol=0)
    assert plan.tiles is table
    with pytest.raises(ValueError, match="3 tiles do not fit a plan of 2"):
        plan.table((Span(0, 0, 24, 0, False),))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's numpy
def test_a_nan_in_a_query_reaches_its_own_row_only() -> None:
    layout = pack_layout([(Span(0, 0, 3, 70, False), None)], SLOT_ROWS, DEVICE)
    keys, values = (cache.float() for cache in caches(layout, 1, 16, torch.Generator().manual_seed(0)))
    q = torch.ones(3, 1, 16, device=DEVICE)
    q[1, 0, 3] = float("nan")
    for programs in (1, 4):
        plan = plan_of(layout.spans, group=1, kv_heads=1, programs=programs)
        out = packed_attention_triton(q, keys, values, layout.ancestors, plan)
        assert out.isnan().all(dim=-1).flatten().tolist() == [False, True, False]
        assert out[[0, 2]].isfinite().all()


def test_layers_share_a_plan() -> None:
    layout = pack_layout([(Span(0, 0, 3, 70, False), None)], SLOT_ROWS, DEVICE)
    assert layout.attention_plan(8, 2, SLOT_ROWS) is layout.attention_plan(8, 2, SLOT_ROWS)
    assert layout.attention_plan(8, 4, SLOT_ROWS) is not layout.attention_plan(8, 2, SLOT_ROWS)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures a CUDA graph")
def test_a_captured_launch_takes_the_next_forward() -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [Ancestry.from_parents(parents, DEVICE) for parents in ([-1, 0, 0, 1, 1], [-1, 0, 1, 2, 3])]
    first = pack_layout([(Span(0, 0, 5, 40, True), trees[0]), (Span(1, 5, 5, 60, True), trees[1])], SLOT_ROWS, DEVICE)
    then = pack_layout([(Span(2, 0, 5, 130, True), trees[1]), (Span(0, 5, 5, 1, True), trees[0])], SLOT_ROWS, DEVICE)
    plan = plan_attention(first.spans, group=2, kv_heads=2, slot_rows=SLOT_ROWS, device=DEVICE)
    assert plan.splits > 1
    q, ancestors = torch.zeros(10, 4, 64, device=DEVICE), first.ancestors.clone()
    keys, values = (torch.zeros(SLOTS, SLOT_ROWS, 2, 64, device=DEVICE) for _ in range(2))
    packed_attention_triton(q, keys, values, ancestors, plan)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed_attention_triton(q, keys, values, ancestors, plan)
    for layout in (first, then):
        q.copy_(torch.randn(q.shape, generator=generator))
        for cache, contents in zip((keys, values), caches(layout, 2, 64, generator), strict=True):
            cache.copy_(contents)
        ancestors.copy_(layout.ancestors)
        plan.tiles.copy_(plan.table(layout.spans))
        graph.replay()
        expected = packed_attention_reference(q.double(), keys.double(), values.double(), layout)
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
