# SPDX-License-Identifier: Apache-2.0
"""Trees grown in one launch are those that grow level by level: the same tokens, parents and log-probabilities."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, poisoned
from support.nightly import examples
from torch import Tensor

from specvla_kernels import expand_tree, finish_tree
from specvla_kernels.expand_tree import Beam, Candidates, Considered, Window
from specvla_kernels.finish_tree import GrownTrees
from specvla_kernels.grow_tree import PathLogits, grow_tree_reference, grow_tree_triton

pytest.importorskip("triton")

FIRST = 30  # of the ids
KINDS = torch.int64, torch.float32, torch.int64  # of what is considered
RUNS = {
    "kernel": (grow_tree_triton, expand_tree.expand_tree_triton, finish_tree.finish_tree_triton),
    "reference": (grow_tree_reference, expand_tree.expand_tree_reference, finish_tree.finish_tree_reference),
}


def terms(generator: torch.Generator, *shape: int) -> Tensor:
    """Exact in any order of their sum, with ties, and now and then something that is no number, or infinite."""
    made = torch.randint(-4, 5, shape, generator=generator) / 2
    for value in (torch.nan, torch.inf, -torch.inf):
        if int(torch.randint(4, (), generator=generator)) == 0:
            made[torch.rand(shape, generator=generator) < 0.01] = value
    return made.to(DEVICE)


def path_logits(seed: int, trees: int, levels: int, ids: int, *, window: bool) -> PathLogits:
    generator = torch.Generator().manual_seed(seed)
    dimensions = torch.randint(-1, 6, (trees,), generator=generator).to(DEVICE)
    bins = Window(ids - seed % 2, torch.randint(0, 4, (5,), generator=generator).to(DEVICE)) if window else None
    states, tokens = terms(generator, trees, levels, levels, ids), terms(generator, levels, ids, ids)
    return PathLogits(states, tokens, dimensions, FIRST, bins)


def level_by_level(
    logits: PathLogits,
    roots: Tensor,
    max_depths: Tensor,
    nodes: Tensor,
    *,
    k: int,
    max_nodes: int,
    expand: Callable[..., Beam | None],
    finish: Callable[..., GrownTrees],
) -> GrownTrees:
    """Each node's logits are summed along its own path."""
    trees, levels = logits.states.shape[:2]
    n = k + (levels - 1) * k * k
    considered = Considered(*(torch.zeros(trees, n, dtype=kind, device=DEVICE) for kind in KINDS))
    paths: list[list[list[int]]] = [[[]] for _ in range(trees)]  # from the newest token up
    offset = 0
    beam: Beam | None = None
    for level in range(levels):
        rows = torch.stack([torch.stack([_sum(logits, tree, path) for path in paths[tree]]) for tree in range(trees)])
        candidates = Candidates(logits.dimensions, rows, FIRST, window=logits.window)
        last = level + 1 == levels
        beam = expand(candidates, beam, considered, max_depths, k=k, level=level, offset=offset, last=last)
        offset += rows.shape[1] * k
        if beam is not None:
            chosen = zip(beam.tokens.tolist(), beam.parents.tolist(), strict=True)
            paths = [
                [[token, *paths[tree][parent]] for token, parent in zip(*each, strict=True)]
                for tree, each in enumerate(chosen)
            ]
    return finish(considered, roots, nodes, k=k, levels=levels, max_nodes=max_nodes)


def _sum(logits: PathLogits, tree: int, path: list[int]) -> Tensor:
    level = len(path)
    of_states = [logits.states[tree, i, level - i] for i in range(level + 1)]
    of_tokens = [logits.tokens[j, token - FIRST] for j, token in enumerate(path)]
    return torch.stack(of_states + of_tokens).sum(dim=0)


@pytest.mark.parametrize("window", [False, True], ids=["top k", "window"])
@pytest.mark.parametrize("run", [*RUNS])
@settings(max_examples=examples(20) if DEVICE.type == "cpu" else 200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    trees=st.integers(1, 3),
    k=st.integers(1, 5),
    levels=st.integers(1, 4),
    more=st.integers(1, 9),
    max_nodes=st.integers(1, 64),
)
def test_a_tree_of_one_launch_is_that_of_its_levels(
    run: str, window: bool, seed: int, trees: int, k: int, levels: int, more: int, max_nodes: int
) -> None:
    grow, expand, finish = RUNS[run]
    logits = path_logits(seed, trees, levels, k + more, window=window)
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randint(99, (trees,), generator=generator).to(DEVICE)
    max_depths = torch.randint(0, levels + 2, (trees,), generator=generator).to(DEVICE)
    nodes = torch.randint(1, max_nodes + 1, (trees,), generator=generator).to(DEVICE)
    given: tuple[Any, ...] = logits, roots, max_depths, nodes
    expected = level_by_level(*given, k=k, max_nodes=max_nodes, expand=expand, finish=finish)
    size = expected.valid.shape[1]
    out = GrownTrees(
        torch.full((4, trees, size), -7, device=DEVICE),
        poisoned(trees, size, dtype=torch.float32),
        torch.zeros(trees, size, dtype=torch.bool, device=DEVICE),
    )
    found = grow(*given, k=k, max_nodes=max_nodes, out=out)
    for ours, other in zip(found, expected, strict=True):
        assert ours.equal(other)


@pytest.mark.parametrize(("k", "levels"), [(8, 5), (21, 4), (1, 9)])
def test_kernel_and_reference_grow_large_trees_alike(k: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(k)
    states, tokens = (
        torch.randn(shape, generator=generator).to(DEVICE) for shape in ((2, *[levels] * 2, 40), (levels, 40, 40))
    )
    logits = PathLogits(states, tokens, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    whole = torch.tensor([levels, levels - 1], device=DEVICE)
    found, expected = (
        grow(logits, whole, whole, whole * 0 + 50, k=k, max_nodes=50)
        for grow in (grow_tree_triton, grow_tree_reference)
    )
    assert found.numbers.equal(expected.numbers)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)


def test_more_ids_than_fit_are_refused() -> None:
    whole = torch.ones(1, dtype=torch.int64, device=DEVICE)
    logits = PathLogits(torch.zeros(1, 1, 1, 1025, device=DEVICE), torch.zeros(0, 1025, 1025, device=DEVICE), whole)
    with pytest.raises(ValueError, match="1025 ids exceed the kernel's 1024"):
        grow_tree_triton(logits, whole, whole, whole, k=3, max_nodes=9)
