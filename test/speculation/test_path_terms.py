# SPDX-License-Identifier: Apache-2.0
"""A tree that a parallel head grows from few ids in one launch is the tree that it grows level by level, exactly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draft_heads import random_head
from support.kernels import DEVICE
from support.nightly import examples

from benchmarks.random_policy import random_decoder
from specvla_kernels import grow_tree
from specvla_kernels.finish_tree import GrownTrees
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.models.config import DecoderShape
from specvla_ros.speculation.drafters.eagle import path_terms
from specvla_ros.speculation.drafters.eagle.path_terms import PathTerms
from specvla_ros.speculation.drafters.eagle.tree_growth import DraftStart, TreeGrower, WindowMass

IDS, DEPTH, K, NODES = range(30, 46), 4, 3, 12
SHAPE = DecoderShape(8, 16, 1, 2, 1, 8, vocab_size=50, max_position_embeddings=64)


def whole_numbers(seed: int) -> tuple[Any, Any]:
    """A decoder and a head whose logits are exact in any order of their sums, with ties, and not far apart."""
    decoder = random_decoder(SHAPE, seed=seed, dtype=torch.float64)
    head = random_head(decoder, seed=seed, parallel_depth=DEPTH)
    generator = torch.Generator().manual_seed(seed)
    weights = [decoder.embed_tokens.weight, decoder.lm_head.weight, *head.branch.parameters()]
    for weight in weights:
        weight.data.copy_(torch.randint(-1, 2, weight.shape, generator=generator))
    decoder.lm_head.weight.data /= 64
    return decoder, head


def window_of(chosen: bool) -> WindowMass | None:
    if not chosen:
        return None
    made = WindowMass.from_actions(K, ActionIds(1, 16, 15), 7, torch.device("cpu"))
    made.tolerate((1,) * 7)
    return made


def grown(grower: TreeGrower, seed: int, depths: list[int]) -> GrownTrees:
    trees, generator = len(depths), torch.Generator().manual_seed(seed)
    states = torch.randint(-1, 2, (trees, max(depths), SHAPE.hidden_size), generator=generator).double()
    roots = torch.randint(50, (trees,), generator=generator)
    some, limits = torch.zeros(trees, dtype=torch.int64), torch.randint(1, NODES + 1, (trees,), generator=generator)
    start: DraftStart = grower.start(torch.stack((some, some, some, torch.tensor(depths), limits, some + 1, roots)))
    return grower.grow(start, states, max(depths))


@pytest.mark.parametrize("window", [False, True], ids=["top k", "window"])
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), depths=st.lists(st.integers(1, DEPTH), min_size=1, max_size=3))
@torch.inference_mode()
def test_trees_of_few_ids_are_those_that_grow_level_by_level(window: bool, seed: int, depths: list[int]) -> None:
    decoder, head = whole_numbers(seed)
    sizes: dict[str, Any] = dict(k=K, nodes=NODES, slots=1, slot_rows=8, window=window_of(window), ids=IDS)
    at_once = TreeGrower(head, decoder, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_terms, "_MAX_TERMS", 0)
        by_level = TreeGrower(head, decoder, **sizes)
    assert at_once._terms is not None and by_level._terms is None
    for ours, other in zip(grown(at_once, seed, depths), grown(by_level, seed, depths), strict=True):
        assert ours.equal(other)


@pytest.mark.parametrize(
    ("ids", "depth", "fits"),
    [(range(1024), 8, True), (range(1024), 9, False), (range(1025), 2, False), (range(9), 1, False), (None, 5, False)],
)
def test_many_ids_and_any_id_grow_level_by_level(ids: range | None, depth: int, fits: bool) -> None:
    shape = DecoderShape(8, 16, 1, 2, 1, 8, vocab_size=1100, max_position_embeddings=64)
    decoder = random_decoder(shape, seed=0)
    head = random_head(decoder, parallel_depth=depth)
    assert (PathTerms.from_head(head, decoder, ids, None) is not None) == fits


def turns() -> Callable[[Any], bool]:
    """Whether kernels run: first the reference does, then the kernel."""
    kernels = iter((False, True) * path_terms._DRAWS)
    return lambda _: next(kernels)


@pytest.fixture
def terms(monkeypatch: pytest.MonkeyPatch) -> PathTerms:
    """On which the kernel runs, wherever it is interpreted or native."""
    pytest.importorskip("triton")
    decoder = random_decoder(SHAPE, seed=0, device=str(DEVICE))
    made = PathTerms.from_head(random_head(decoder, parallel_depth=DEPTH), decoder, IDS, None)
    assert made is not None
    monkeypatch.setattr(path_terms, "has_kernels", lambda _: True)
    monkeypatch.setattr(grow_tree, "has_kernels", turns())
    return made


@torch.inference_mode()
def test_the_kernel_is_checked_before_drafts_are_captured(terms: PathTerms, monkeypatch: pytest.MonkeyPatch) -> None:
    terms.check(2, DEPTH, k=K, max_nodes=NODES)
    right = grow_tree.grow_tree_triton

    def wrong(*given: Any, **sizes: Any) -> GrownTrees:
        made = right(*given, **sizes)
        made.numbers[0, 1, -1] += 1
        return made

    monkeypatch.setattr(grow_tree, "grow_tree_triton", wrong)
    monkeypatch.setattr(grow_tree, "has_kernels", turns())
    with pytest.raises(RuntimeError, match="trees of 4 levels from one forward differ from the reference's"):
        terms.check(2, DEPTH, k=K, max_nodes=NODES)
