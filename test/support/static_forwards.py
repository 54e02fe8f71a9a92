# SPDX-License-Identifier: Apache-2.0
"""Static forwards on a CPU: what a captured launch would read, and nothing else, decides what they compute."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specvla_kernels import draft_rows, expand_tree, finish_tree, packed_attention, rope_write_kv
from specvla_kernels.attention_plan import AttentionPlan
from specvla_kernels.graph_capture import Result
from specvla_kernels.layout import PackedLayout, Span


def rerun(run: Callable[[], Result]) -> Callable[[], Result]:
    """In place of a capture, where interpreted kernels run: no recording sees those."""
    return run


class _Recording(TorchDispatchMode):
    """Keeps every operation that touches memory, to be done again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The host reads what only a replay knows, or brings in what no replay would bring.
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "lift_fresh")), func
        out = func(*args, **kwargs)
        if func.is_view and _storages(out) <= _storages(args):  # not every reshape is a view
            return out
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        else:
            self.steps.append(lambda: _overwrite(out, func(*args, **kwargs)))
        return out


_recording: list[_Recording] = []


def recorded(run: Callable[[], Result]) -> Callable[[], Result]:
    """In place of a capture: as a GPU does, the same operations on the same memory, and none of the Python around."""
    run()  # a capture too comes behind a run that makes what is kept
    with _Recording() as recording:
        _recording.append(recording)
        result = run()
        _recording.pop()

    def again() -> Result:
        for step in recording.steps:
            step()
        return result

    return again


def _storages(tensors: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tree_leaves(tensors) if isinstance(each, Tensor)}


def _overwrite(old: Any, new: Any) -> None:
    for before, after in zip(tree_leaves(old), tree_leaves(new), strict=True):
        if isinstance(before, Tensor):
            before.copy_(after)


def use_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the attention follow its plan's table as the kernel does, in any dtype."""
    monkeypatch.setattr(packed_attention, "has_kernels", lambda _: True)
    monkeypatch.setattr(packed_attention, "packed_attention_triton", _as_one_step)


@contextmanager
def kernels(wanted: bool):
    """Runs the decoder's and the draft's operators as Triton kernels, or as their references."""
    with pytest.MonkeyPatch.context() as patch:
        for operator in (rope_write_kv, packed_attention, draft_rows, expand_tree, finish_tree):
            patch.setattr(operator, "has_kernels", lambda _: wanted)
        yield patch


def _as_one_step(q: Tensor, k_ring: Tensor, v_ring: Tensor, ancestors: Tensor, plan: AttentionPlan) -> Tensor:
    """`_by_table`, which a recording holds as the one launch that it stands for."""
    if not _recording:
        return _by_table(q, k_ring, v_ring, ancestors, plan)
    with _disable_current_modes():
        out = _by_table(q, k_ring, v_ring, ancestors, plan)
    _recording[-1].steps.append(lambda: out.copy_(_by_table(q, k_ring, v_ring, ancestors, plan)))
    return out


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
