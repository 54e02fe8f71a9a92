# SPDX-License-Identifier: Apache-2.0
"""The comparison and the walk: kernel, reference and the loops agree on every batch of trees and every rule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE
from support.nightly import examples
from support.reference_rules import accept_by_loops, packed
from support.verifications import ACTIONS, VOCAB, TreeCase, make_tree, one_hot, verifications, verify_tree

from specvla_kernels.accept_tree import accept_tree_reference, accept_tree_triton
from specvla_kernels.accept_within import accept_within_reference, accept_within_triton
from specvla_kernels.compare_drafts import (
    Comparison,
    Nodes,
    PackedTrees,
    Trees,
    compare_drafts_reference,
    compare_drafts_triton,
)
from specvla_kernels.device import HAS_TRITON
from specvla_kernels.uncertainty import uncertainty_reference
from specvla_ros.speculation.accept import AcceptanceRule, Verification
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.composite import Composite
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.lvspec import LVSpec
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.tree import Tree

TOLERANCES = (Strict(), *(BinDistance(bins, DEVICE) for bins in ((0,), (1, 1, 1), (3, 0, 2, 1, 5, 1, 0))))
DEFERRED = Fly(0.3, 2), Fly(0.0, 0), Fly(0.3, 1), Fly(0.005, 3, "code"), Fly(0.4, 2, "code")
LOOSE = (
    *DEFERRED,
    LVSpec(0.4, 3, 1),
    Composite(BinDistance((2,) * 7, DEVICE), Fly(0.2, 2), (torch.arange(VOCAB) < 4).to(DEVICE)),
)


def batch(parts: list[TreeCase]) -> Verification:
    """Trees side by side; what pads them is not to be looked at."""
    n = max(len(part.tree) for part in parts)

    def padded(tensors: list[torch.Tensor], value: float | bool) -> torch.Tensor:
        return torch.stack([torch.cat((x, x.new_full((n - len(x), *x.shape[1:]), value))) for x in tensors]).to(DEVICE)

    trees = [part.tree for part in parts]
    start = 0
    rows = []
    for tree in trees:
        rows.append(torch.arange(start, start + len(tree)))
        start += len(tree)
    assert all(part.visual is not None for part in parts) or all(part.visual is None for part in parts)
    return Verification(
        Trees(
            tokens=padded([tree.tokens for tree in trees], 13),
            parents=padded([tree.ancestry.parents for tree in trees], 0),
            depths=padded([tree.ancestry.depths for tree in trees], 9),
            ancestors=padded([tree.ancestry.ancestors for tree in trees], 0),
            log_probs=padded([tree.log_probs for tree in trees], float("nan")),
            valid=padded([tree.valid for tree in trees], False),
            relaxable=padded([tree.relaxable for tree in trees], True),
            choices=padded([part.choices for part in parts], 13),
            positions=torch.tensor([part.position for part in parts], device=DEVICE),
        ),
        ACTIONS,
        max(tree.depth for tree in trees),
        logits=torch.cat([part.logits for part in parts]).to(DEVICE),
        rows=padded(rows, 0),
        hidden=padded([part.hidden for part in parts], float("nan")),
        visual=torch.stack([part.visual for part in parts if part.visual is not None]).to(DEVICE)
        if parts[0].visual is not None
        else None,
    )


def check(parts: list[TreeCase], rule: AcceptanceRule) -> None:
    verification = batch(parts)
    expected = [packed(accept_by_loops(rule, part), verification.max_depth) for part in parts]
    trees, accepted = verification.trees, rule.accept(verification)
    ids = ACTIONS.first, ACTIONS.stop, ACTIONS.bins
    walked = (accepted.mask, accepted.reasons, verification.max_depth)
    comparison = compare_drafts_reference(trees, *ids)
    assert accept_tree_reference(trees, comparison, *walked).tolist() == expected
    if HAS_TRITON:
        by_kernel = compare_drafts_triton(trees, *ids)
        for mine, other in zip(of_drafts(by_kernel, parts), of_drafts(comparison, parts), strict=True):
            assert mine.equal(other)
        assert accept_tree_triton(trees, by_kernel, *walked).tolist() == expected
    within = getattr(rule, "within", None)
    if within is not None:
        for lie in (side_by_side(parts), *(side_by_side(parts[:1], alone=True),) * (len(parts) == 1)):
            unsure = None
            if within.deferral is not None:
                logits = torch.cat([part.logits for part in reversed(parts)]).to(DEVICE)
                unsure = uncertainty_reference(logits, within.deferral.terms)
            where = lie, within, ids, verification.max_depth, unsure
            assert accept_within_reference(*where).tolist() == expected
            assert not HAS_TRITON or accept_within_triton(*where).tolist() == expected


def side_by_side(parts: list[TreeCase], *, alone: bool = False) -> PackedTrees:
    """Trees as they lie in a forward, last request first."""
    places, start = {}, 0
    for i in reversed(range(len(parts))):
        places[i] = range(start, start + len(parts[i].tree))
        start += len(parts[i].tree)
    n = max(map(len, places.values()))
    rows = torch.tensor([[*places[i], *[start] * (n - len(places[i]))] for i in range(len(parts))]).to(DEVICE)
    order = [parts[i] for i in reversed(range(len(parts)))]
    columns = [(p.tree.tokens, *ancestry_of(p.tree), p.tree.log_probs, p.tree.valid, p.tree.relaxable) for p in order]
    return PackedTrees(
        Nodes(*(torch.cat(column).to(DEVICE) for column in zip(*columns, strict=True))),
        torch.cat([p.choices for p in order]).to(DEVICE),
        positions=torch.tensor([p.position for p in parts], device=DEVICE),
        rows=None if alone else rows,
    )


def ancestry_of(tree: Tree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tree.ancestry.parents, tree.ancestry.depths, tree.ancestry.ancestors


def of_drafts(comparison: Comparison, parts: list[TreeCase]) -> list[torch.Tensor]:
    """Without what is said of padding."""
    columns = (comparison.wanted, comparison.exact, comparison.distances, comparison.dimensions)
    return [column[i, : len(part.tree)] for i, part in enumerate(parts) for column in columns]


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(verifications(), min_size=1, max_size=3), st.sampled_from((*TOLERANCES, *LOOSE)))
def test_batches_of_small_trees(parts: list[TreeCase], rule: AcceptanceRule) -> None:
    check(parts, rule)


@settings(max_examples=examples(60), deadline=None)
@given(
    n=st.one_of(st.sampled_from([1, 2, 63, 64]), st.integers(1, 64)),
    reach=st.integers(1, 8),
    rule=st.sampled_from((*TOLERANCES, *DEFERRED)),
    seed=st.integers(0, 10_000),
)
def test_large_trees_with_ties(n: int, reach: int, rule: AcceptanceRule, seed: int) -> None:
    """Deep and wide ones up to 64 nodes, whose drafts mostly are what the target wants or near it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    parents = [-1, *(max(0, node - 1 - draw(reach)) for node in range(1, n))]
    choices = [ACTIONS.first + draw(8) for _ in range(n)]
    tokens = [12, *(choices[parent] + (draw(10) == 0) * (draw(7) - 3) for parent in parents[1:])]
    log_probs = [[0.0, -1.0, -1.0, -2.0, float("-inf"), float("nan"), float("inf")][draw(7)] for _ in range(n)]
    valid = [True, *(draw(20) > 0 for _ in range(n - 1))]
    relaxable = [draw(4) > 0 for _ in range(n)]
    tree = make_tree(tokens, parents, log_probs=log_probs, valid=valid, relaxable=relaxable)
    logits = one_hot(choices, 24)
    if draw(4) == 0:
        logits[draw(n), 3] = float("nan")
    check([verify_tree(tree, logits, position=1 + draw(6))], rule)


@pytest.mark.parametrize("rule", [Strict(), BinDistance((3,) * 7, DEVICE)], ids=repr)
def test_two_ids_of_one_bin_are_near_but_not_the_same(rule: AcceptanceRule) -> None:
    tree = make_tree([12, ACTIONS.first + 1], [-1, 0])
    check([verify_tree(tree, one_hot([ACTIONS.first, ACTIONS.first], 24))], rule)
