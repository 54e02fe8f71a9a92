# SPDX-License-Identifier: Apache-2.0
"""The levels of draft trees and what is kept of them: kernel and reference agree, whatever their memory held."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES, poisoned
from support.nightly import examples

from specvla_kernels import expand_tree
from specvla_kernels.draft_rows import (
    DraftRows,
    DraftSlots,
    beam_rows_reference,
    beam_rows_triton,
    chain_rows_reference,
    chain_rows_triton,
    newest_rows,
)
from specvla_kernels.expand_tree import (
    Beam,
    Candidates,
    Considered,
    Window,
    best_of,
    expand_tree_reference,
    expand_tree_triton,
)
from specvla_kernels.finish_tree import GrownTrees, finish_tree_reference, finish_tree_triton

pytest.importorskip("triton")

_SEED = st.integers(0, 10**6)


def memory(trees: int, n: int) -> Considered:
    whole = torch.full((2, trees, n), -(1 << 40), device=DEVICE)
    return Considered(whole[0], poisoned(trees, n, dtype=torch.float32), whole[1])


def numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """With ties, and now and then something that is no number, or infinite."""
    made = torch.randint(-8, 9, shape, generator=generator) / 2
    for value in (torch.nan, torch.inf, -torch.inf, -torch.inf):
        if int(torch.randint(3, (), generator=generator)) == 0:
            made[torch.rand(shape, generator=generator) < 0.02] = value
    return made.to(DEVICE)


def candidates(generator: torch.Generator, kind: str, shape: tuple[int, int, int], k: int) -> Candidates:
    """What children are chosen from, of each kind that a draft has."""
    trees, width, columns = shape
    dimensions = torch.randint(-3, 6, (trees,), generator=generator).to(DEVICE)
    rows = numbers(generator, *shape)
    if kind == "top k":
        return Candidates(dimensions, rows, first_id=30)
    if kind == "one row for all":
        return Candidates(dimensions, rows[:, :1].expand(-1, width, -1), first_id=30)
    chosen = torch.randint(99, (trees, width, k), generator=generator).to(DEVICE), numbers(generator, trees, width, k)
    if kind == "chosen":
        return Candidates(dimensions, chosen=chosen)
    shared = int(torch.randint(2, (), generator=generator)) if columns > k else 0
    window = Window(columns - shared, torch.randint(0, 4, (5,), generator=generator).to(DEVICE))
    if kind == "window":
        return Candidates(dimensions, rows, first_id=30, window=window)
    whole = torch.cat((rows, numbers(generator, trees, width, 3)), dim=2).log_softmax(-1)
    return Candidates(dimensions, whole[..., :columns], 30, normalised=True, window=window, chosen=chosen)


@pytest.mark.parametrize("kind", ["top k", "one row for all", "chosen", "window", "window or text"])
@settings(max_examples=examples(25) if DEVICE.type == "cpu" else 200, deadline=None)
@given(seed=_SEED, trees=st.integers(1, 3), k=st.integers(1, 5), levels=st.integers(1, 4), more=st.integers(0, 9))
def test_levels_and_trees(kind: str, seed: int, trees: int, k: int, levels: int, more: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    max_depths = torch.randint(0, levels + 2, (trees,), generator=generator).to(DEVICE)
    capacity = k + (levels - 1) * k * k
    by_kernel, expected = memory(trees, capacity + 1), memory(trees, capacity + 1)
    beam: Beam | None = None
    offset = 0
    for level in range(levels):
        width = 1 if beam is None else k
        drawn = candidates(generator, kind, (trees, width, k + more), k)
        sizes = dict(k=k, level=level, offset=offset)
        last = level + 1 == levels
        found = expand_tree_triton(drawn, beam, by_kernel, max_depths, **sizes, last=last)
        expand_tree_reference(drawn, beam, expected, max_depths, **sizes, last=True)
        assert by_kernel.tokens.equal(expected.tokens) and by_kernel.parents.equal(expected.parents)
        torch.testing.assert_close(by_kernel.scores, expected.scores, atol=1e-5, rtol=1e-5, equal_nan=True)
        if last:
            assert found is None
        else:  # rounding may decide which of two is better: the kernel's own scores say
            same_beam(found, best_of(by_kernel, beam, k=k, offset=offset, width=width))
        beam, offset = found, offset + width * k
    assert by_kernel.scores[:, -1].isnan().all(), "nothing is written beyond"
    same_trees(by_kernel.first(capacity), generator, k, levels)


def same_beam(found: Beam | None, expected: Beam) -> None:
    assert found is not None
    for name in ("tokens", "parents", "scores", "numbers", "ancestors"):
        assert getattr(found, name).equal(getattr(expected, name)), name


def same_trees(considered: Considered, generator: torch.Generator, k: int, levels: int) -> None:
    trees = len(considered.tokens)
    max_nodes = int(torch.randint(1, 65, (), generator=generator))
    nodes = torch.randint(1, max_nodes + 1, (trees,), generator=generator).to(DEVICE)
    roots = torch.randint(99, (trees,), generator=generator).to(DEVICE)
    arguments: dict[str, Any] = dict(k=k, levels=levels, max_nodes=max_nodes)
    expected = finish_tree_reference(considered, roots, nodes, **arguments)
    for finish in (finish_tree_triton, finish_tree_reference):
        found = GrownTrees(*(torch.full_like(each, 7) for each in expected))
        finish(considered, roots, nodes, **arguments, out=found)
        for ours, other in zip(found, expected, strict=True):
            assert ours.equal(other)


@settings(max_examples=examples(10) if DEVICE.type == "cpu" else 200, deadline=None)
@given(seed=_SEED, shape=st.sampled_from([(8, 5), (16, 5), (64, 2), (1, 63), (21, 4)]), ties=st.booleans())
def test_trees_of_the_largest_sizes(seed: int, shape: tuple[int, int], ties: bool) -> None:
    """Made without a head: level by level, scores below their parents'."""
    k, levels = shape
    generator = torch.Generator().manual_seed(seed)
    considered = memory(2, k + (levels - 1) * k * k)
    beam, offset = None, 0
    for level in range(levels):
        width = 1 if level == 0 else k
        scores = -torch.rand(2, width, k, generator=generator).to(DEVICE)
        scores = (scores * 2).round() / 2 if ties else scores
        drawn = Candidates(considered.tokens[:, 0], chosen=(torch.randint(99, (2, width, k)).to(DEVICE), scores))
        depths = torch.full((2,), levels, device=DEVICE)
        beam = expand_tree_reference(drawn, beam, considered, depths, k=k, level=level, offset=offset)
        offset += width * k
    same_trees(considered, generator, k, levels)


def test_a_beam_of_64_nodes() -> None:
    generator = torch.Generator().manual_seed(5)
    by_kernel, depths = memory(2, 64 + 64 * 64), torch.tensor([2, 1], device=DEVICE)
    drawn = candidates(generator, "window", (2, 1, 70), 64)
    beam = expand_tree_triton(drawn, None, by_kernel, depths, k=64, level=0, offset=0)
    assert beam is not None
    drawn = replace(candidates(generator, "top k", (2, 64, 70), 64), first_id=0)
    found = expand_tree_triton(drawn, beam, by_kernel, depths, k=64, level=1, offset=64)
    assert found is not None
    expected = best_of(by_kernel, beam, k=64, offset=64, width=64)
    assert found.tokens.equal(expected.tokens) and found.scores.equal(expected.scores)
    same_trees(by_kernel, generator, 64, 2)


@pytest.mark.parametrize("kind", ["top k", "window"])
def test_rows_that_are_too_long_for_the_kernel_grow_the_same_tree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a policy with more than 1024 bins or codes."""
    monkeypatch.setattr(expand_tree, "has_kernels", lambda _: True)
    drawn = candidates(torch.Generator().manual_seed(3), kind, (2, 1, 1500), 4)
    found, expected = memory(2, 5), memory(2, 5)
    depths = torch.tensor([2, 1], device=DEVICE)
    beam = expand_tree.expand_tree(drawn, None, found, depths, k=4, level=0, offset=0)
    same_beam(beam, expand_tree_reference(drawn, None, expected, depths, k=4, level=0, offset=0))  # type: ignore[arg-type]


def test_rows_that_are_too_long_are_refused() -> None:
    drawn = Candidates(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 1025))
    with pytest.raises(ValueError, match="1025 ids exceed the kernel's 1024"):
        expand_tree_triton(drawn, None, memory(1, 3), torch.ones(1, dtype=torch.int64), k=3, level=0, offset=0)


@settings(max_examples=examples(8) if DEVICE.type == "cpu" else 200, deadline=None)
@given(
    seed=_SEED,
    requests=st.integers(1, 3),
    k=st.integers(1, 4),
    beams=st.integers(1, 3),
    size=st.sampled_from([8, 24, 1030]),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_of_the_next_forward(seed: int, requests: int, k: int, beams: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    angles = torch.randn(2, 64, 6, generator=generator).to(DEVICE)
    rows, prefix_lens = whole(1, 6, requests), whole(6, 30, requests)
    scale = float(torch.tensor(1.7, dtype=dtype)) if seed % 2 else 1.0
    tables = (*angles, real(20, size), scale)
    where = DraftSlots(whole(0, 4, requests), prefix_lens, rows, whole(0, 4, requests), 80, *tables)
    tiles = [whole(0, 9, 2 * requests, 6).to(torch.int32)] * 2
    tiles[1] = tiles[1].clone()
    following, hidden = real(requests, 5, size), real(requests, 5, size)
    masks = seed % 4
    made = chain_rows_triton(where, following, hidden, tiles[0], masks=masks)
    same_rows(made, chain_rows_reference(where, following, hidden, tiles[1], masks=masks), ends=True)
    assert tiles[0].equal(tiles[1])

    width = 1 if beams == 1 else k
    beam = Beam(
        whole(0, 20, requests, k),
        whole(0, width, requests, k),
        real(requests, k),
        whole(0, 9, requests, k),
        whole(0, 1 << 40, requests, beams * k),
    )
    states = real(requests, width + 2, size)[:, -width:]  # the rest of a forward lies before
    before = None if beams == 1 else real(requests, (beams - 1) * k, 2 * size)
    arguments = (where, beam, states, before)
    expected = beam_rows_reference(*arguments, tiles[1])
    same_rows(beam_rows_triton(*arguments, tiles[0]), expected, ends=False)
    assert tiles[0].equal(tiles[1])

    newest = newest_rows(where, beam, states, tiles[1])
    for name in ("inputs", "positions", "kv_rows", "ancestors", "cos", "sin"):
        both, alone = (getattr(each, name).reshape(requests, -1) for each in (expected, newest))
        assert both[:, -alone.shape[1] :].equal(alone), name


def same_rows(found: DraftRows, expected: DraftRows, *, ends: bool) -> None:
    # Triton's interpreter cuts what a scaled embedding has too many bits of, where a GPU rounds.
    torch.testing.assert_close(found.inputs, expected.inputs, atol=0.0, rtol=2.0**-7)
    for field in fields(DraftRows):
        if field.name != "inputs" and (field.name != "ends" or ends):
            assert getattr(found, field.name).equal(getattr(expected, field.name)), field.name
