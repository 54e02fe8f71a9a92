"""The walk on the device is the engine's own: kernel, reference and `accept` agree on every tree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE
from support.verifications import ACTIONS, make_tree, one_hot, verifications, verify_tree

from specvla_kernels import accept_tree as kernels
from specvla_kernels.accept_tree import Tolerance, Trees, accept_tree_reference, accept_tree_triton
from specvla_kernels.device import HAS_TRITON
from specvla_ros.speculation.accept import NO_NODE, NOT_A_NUMBER, AcceptReason, Verification, accept
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.strict import Strict

TOLERANCES = (None, (0,), (1, 1, 1), (3, 0, 2, 1, 5, 1, 0))


def batch(parts: list[Verification]) -> Trees:
    """Trees side by side, padded as the engine pads them."""
    n = max(len(part.tree) for part in parts)

    def padded(tensors: list[torch.Tensor], value: float | bool) -> torch.Tensor:
        return torch.stack(
            [torch.cat((each, each.new_full((n - len(each),), value))) for each in tensors]  # type: ignore[arg-type]
        ).to(DEVICE)

    trees = [part.tree for part in parts]
    return Trees(
        tokens=padded([tree.tokens for tree in trees], 13),
        parents=padded([tree.ancestry.parents for tree in trees], 0),
        depths=padded([tree.ancestry.depths for tree in trees], 9),
        ancestors=padded([tree.ancestry.ancestors for tree in trees], 0),
        log_probs=padded([tree.log_probs for tree in trees], float("nan")),
        valid=padded([tree.valid for tree in trees], False),
        relaxable=padded([tree.relaxable for tree in trees], True),
        choices=padded([part.choices for part in parts], 13),
        places=torch.tensor([part.place for part in parts], device=DEVICE),
    )


def check(parts: list[Verification], bins: tuple[int, ...] | None) -> None:
    tolerance = Tolerance.from_bins(bins, ACTIONS.first, ACTIONS.stop, ACTIONS.bins, DEVICE)
    levels = max(part.tree.levels for part in parts)
    rule = Strict() if bins is None else BinDistance(bins)
    expected = []
    for part in parts:
        beyond = levels - part.tree.levels
        accepted = accept(rule, part)
        columns = (accepted.nodes, NO_NODE), (accepted.tokens, NOT_A_NUMBER), (accepted.bins_off, 0), (accepted.why, 0)
        expected.append(
            torch.cat([*(torch.cat((x, x.new_full((beyond,), pad))) for x, pad in columns), accepted.count.reshape(1)])
        )
    trees = batch(parts)
    for run in (accept_tree_reference, *((accept_tree_triton,) if HAS_TRITON else ())):
        assert run(trees, tolerance, levels).tolist() == torch.stack(expected).tolist()


@settings(max_examples=120, deadline=None)
@given(st.lists(verifications(), min_size=1, max_size=3), st.sampled_from(TOLERANCES))
def test_batches_of_small_trees(parts: list[Verification], bins: tuple[int, ...] | None) -> None:
    check(parts, bins)


@settings(max_examples=60, deadline=None)
@given(
    n=st.one_of(st.sampled_from([1, 2, 63, 64]), st.integers(1, 64)),
    reach=st.integers(1, 8),
    bins=st.sampled_from(TOLERANCES),
    seed=st.integers(0, 10_000),
)
def test_large_trees_with_ties(n: int, reach: int, bins: tuple[int, ...] | None, seed: int) -> None:
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
    check([verify_tree(tree, logits, place=1 + draw(6))], bins)


def test_the_numbers_are_the_engines() -> None:
    assert (kernels.TARGET, kernels.EXACT, kernels.NEAR) == (AcceptReason.TARGET, AcceptReason.EXACT, AcceptReason.NEAR)
    assert kernels.NO_NODE == NO_NODE == NOT_A_NUMBER


@pytest.mark.parametrize("bins", [None, (3,) * 7])
def test_two_ids_of_one_bin_are_near_but_not_the_same(bins: tuple[int, ...] | None) -> None:
    tree = make_tree([12, ACTIONS.first + 1], [-1, 0])
    check([verify_tree(tree, one_hot([ACTIONS.first, ACTIONS.first], 24))], bins)
