"""Static forwards on a CPU: what a captured launch would read, and nothing else, decides what they compute."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
from torch import Tensor

from specvla_kernels import packed_attention, rope_write_kv
from specvla_kernels.attention_plan import AttentionPlan
from specvla_kernels.graph_capture import Result
from specvla_kernels.layout import PackedLayout, Span


def rerun(run: Callable[[], Result]) -> Callable[[], Result]:
    """In place of a capture: runs the work again on the same memory, and overwrites the result."""
    result: Any = run()
    memory = result.clone()

    def again() -> Result:
        for old, new in zip(_tensors(memory), _tensors(run()), strict=True):
            old.copy_(new)
        kept: Result = memory
        return kept

    return again


def _tensors(result: Any) -> list[Tensor]:
    """Those that a result consists of."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for field in fields(result) for tensor in _tensors(getattr(result, field.name))]


def use_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the attention follow its plan's table as the kernel does, in any dtype."""
    monkeypatch.setattr(packed_attention, "has_kernels", lambda _: True)
    monkeypatch.setattr(packed_attention, "packed_attention_triton", _by_table)


@contextmanager
def kernels(wanted: bool):
    """Runs the decoder's operators as Triton kernels, or as their references."""
    with pytest.MonkeyPatch.context() as patch:
        for operator in (rope_write_kv, packed_attention):
            patch.setattr(operator, "has_kernels", lambda _: wanted)
        yield patch


def _by_table(q: Tensor, k_ring: Tensor, v_ring: Tensor, ancestors: Tensor, plan: AttentionPlan) -> Tensor:
    reference: Callable[..., Tensor] = packed_attention.packed_attention_reference
    nodes = plan.block_m // plan.group
    spans: dict[int, Span] = {}
    firsts: dict[int, list[int]] = {}
    for slot, prefix_len, start, length, is_tree, first in plan.tiles.tolist():
        if length:
            spans[start] = Span(slot, start, length, prefix_len, bool(is_tree))
            firsts.setdefault(start, []).append(first)
    for start, span in spans.items():
        assert sorted(firsts[start]) == list(range(0, span.length, nodes)), "a segment's tiles are all there, once"
    covered = sorted(row for span in spans.values() for row in range(span.start, span.stop))
    assert covered == list(range(len(q))), "each row belongs to one segment"
    seeing = tuple(span for span in spans.values() if span.prefix_len >= 0)
    attended = reference(q, k_ring, v_ring, PackedLayout(seeing, ancestors, ancestors, ancestors))
    for span in spans.values():
        if span.prefix_len < 0:
            attended[span.start : span.stop] = 0
    return attended
