# SPDX-License-Identifier: Apache-2.0
"""Static forwards on a CPU: what a captured launch would read, and nothing else, decides what they compute."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specvla_kernels import (
    draft_rows,
    expand_tree,
    finish_tree,
    gather_rows,
    grow_tree,
    packed_attention,
    rope_write_kv,
)
from specvla_kernels.attention_plan import AttentionPlan
from specvla_kernels.graph_capture import Capture, Result
from specvla_kernels.layout import PackedLayout, Span
from specvla_ros.speculation.drafters.eagle import tree_growth


def rerun(run: Callable[[], Result]) -> Callable[[], Result]:
    """In place of a capture, where interpreted kernels run: no recording sees those."""
    return run


class _Recording(TorchDispatchMode):
    """Keeps every operation that touches memory, to be done again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []
        self.made: list[Tensor] = []  # what a GPU would allocate of the graphs' own memory

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
            self.made += [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        return out


_recording: list[_Recording] = []


def recorded(run: Callable[[], Result]) -> Callable[[], Result]:
    """In place of a capture: as a GPU does, the same operations on the same memory, and none of the Python around."""
    return pooled()(run)


def pooled() -> Capture:
    """Captures that share the memory of what is in between, as on a GPU.

    A graph finds memory there that an earlier one has done with: whenever the earlier one runs again, nothing is left
    of what the later one has computed.
    """
    graphs: list[list[Tensor]] = []

    def capture(run: Callable[[], Result]) -> Callable[[], Result]:
        run()  # a capture too comes behind a run that makes what is kept
        with _Recording() as recording:
            _recording.append(recording)
            result = run()
            _recording.pop()
        graphs.append(recording.made)
        number = len(graphs)

        def again() -> Result:
            for later in graphs[number:]:
                for each in later:
                    each.fill_(torch.nan if each.is_floating_point() else 1)
            for step in recording.steps:
                step()
            return result

        return again

    return capture


def _storages(tensors: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tree_leaves(tensors) if isinstance(each, Tensor)}


def _overwrite(old: Any, new: Any) -> None:
    for before, after in zip(tree_leaves(old), tree_leaves(new), strict=True):
        if isinstance(before, Tensor):
            before.copy_(after)


def use_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the attention follow its plan's table as the kernel does, in any dtype, and drafts all their beams."""
    monkeypatch.setattr(packed_attention, "has_kernels", lambda _: True)
    monkeypatch.setattr(tree_growth, "beam_rows", draft_rows.beam_rows_reference)
    monkeypatch.setattr(packed_attention, "packed_attention_triton", _as_one_step)


@contextmanager
def kernels(wanted: bool):
    """Runs the decoder's and the draft's operators as Triton kernels, or as their references."""
    with pytest.MonkeyPatch.context() as patch:
        replaced = draft_rows, expand_tree, finish_tree, gather_rows, grow_tree, packed_attention, rope_write_kv
        for operator in replaced:
            patch.setattr(operator, "has_kernels", lambda _: wanted)
        yield patch


def _as_one_step(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, ancestors: Tensor, plan: AttentionPlan, out: Tensor | None = None
) -> Tensor:
    """`_by_table`, which a recording holds as the one launch that it stands for."""
    return _one_step(lambda: _by_table(q, k_cache, v_cache, ancestors, plan, out))


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
) -> Tensor:
    """What flash-attn's documentation says of `flash_attn_varlen_func`: causal from the last row and key on."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and causal
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0

    def attended() -> Tensor:
        out = torch.full_like(q, torch.nan)  # it leaves what no sequence has as it was
        (first, stop), (k_first, k_stop) = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        rows, keys = stop - first, k_stop - k_first
        assert rows <= max_seqlen_q and keys <= max_seqlen_k
        if rows:
            own, ks, vs = (each[None].transpose(1, 2) for each in (q[first:stop], k[k_first:k_stop], v[k_first:k_stop]))
            seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
            found = F.scaled_dot_product_attention(own, ks, vs, attn_mask=seen, enable_gqa=True)
            out[first:stop] = found[0].transpose(0, 1)
        return out

    return _one_step(attended)


def _one_step(compute: Callable[[], Tensor]) -> Tensor:
    if not _recording:
        return compute()
    with _disable_current_modes():
        out = compute()
    _recording[-1].steps.append(lambda: out.copy_(compute()))
    return out


def _by_table(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, ancestors: Tensor, plan: AttentionPlan, out: Tensor | None
) -> Tensor:
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
    covered = [row for span in spans.values() for row in range(span.start, span.stop)]
    covered += range(*plan.chain.ends[0].tolist()) if plan.chain is not None else ()
    assert sorted(covered) == list(range(len(q))), "each row belongs to one segment"
    seeing = tuple(span for span in spans.values() if span.prefix_len >= 0)
    attended = reference(q, k_cache, v_cache, PackedLayout(seeing, ancestors, ancestors, ancestors))
    for span in spans.values():
        if span.prefix_len < 0:
            attended[span.start : span.stop] = 0
    if plan.chain is not None:
        assert out is not None
        rows = slice(*plan.chain.ends[0].tolist())
        attended[rows] = out[rows]
    return attended
