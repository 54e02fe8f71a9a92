"""Strict acceptance commits what plain greedy decoding would have produced, and nothing else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.acceptance.strict import NOT_A_NUMBER, accept_strict, greedy_choice


@st.composite
def verified_trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Parents, tokens (siblings differ) and the target's choice behind each node, over a small vocabulary."""
    parents, tokens = [-1], [draw(st.integers(0, 4))]
    for _ in range(draw(st.integers(0, 20))):
        parent = draw(st.integers(0, len(parents) - 1))
        token = draw(st.integers(0, 4))
        taken = [t for p, t in zip(parents, tokens, strict=True) if p == parent]
        if token not in taken:
            parents.append(parent)
            tokens.append(token)
    choices = [draw(st.integers(0, 4)) for _ in parents]
    return parents, tokens, choices


@given(verified_trees())
def test_the_path_is_the_longest_that_the_target_itself_would_walk(
    tree: tuple[list[int], list[int], list[int]],
) -> None:
    parents, tokens, choices = tree
    accepted = accept_strict(choices, tokens, parents)

    def agreed(node: int) -> bool:
        return node == 0 or (tokens[node] == choices[parents[node]] and agreed(parents[node]))

    def depth(node: int) -> int:
        return 0 if node == 0 else 1 + depth(parents[node])

    deepest = max((node for node in range(len(parents)) if agreed(node)), key=depth)
    assert len(accepted.path) == depth(deepest) + 1
    assert accepted.path[0] == 0
    assert all(parents[child] == parent for parent, child in zip(accepted.path, accepted.path[1:], strict=False))
    assert accepted.tokens == tuple(choices[node] for node in accepted.path)


def test_a_lone_root_commits_the_targets_choice() -> None:
    accepted = accept_strict([7], [3], [-1])
    assert (accepted.path, accepted.tokens) == ((0,), (7,))


def test_the_lowest_id_wins_a_tie_and_nan_is_told() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [0.0, float("nan"), 9.0, 0.0]])
    assert greedy_choice(logits).tolist() == [1, 0, NOT_A_NUMBER]


@given(st.integers(0, 2**31), st.integers(1, 8))
def test_without_ties_it_is_argmax(seed: int, rows: int) -> None:
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed))
    assert greedy_choice(logits).equal(logits.argmax(dim=-1))
