# SPDX-License-Identifier: Apache-2.0
"""The repetition penalty over a tree: the ids of prompt, answer and the node's own path, and no others."""

import json
from pathlib import Path

import pytest
import torch

from specvla_kernels.repetition_penalty import EarlierIds
from specvla_ros.errors import UserError
from specvla_ros.models.generation import GreedyRules, read_end_ids
from specvla_ros.speculation.tree import Branches, Tree, with_branches

VOCAB = 12


def applied(logits: torch.Tensor, tree: Tree, before: list[int]) -> torch.Tensor:
    ids, of_nodes = map(torch.tensor, EarlierIds.numbers([before], [len(tree)]))
    earlier = EarlierIds(ids, of_nodes.view(3, -1))
    GreedyRules(repetition_penalty=2.0).choose(logits, tree.tokens, tree.ancestry.ancestors, earlier)
    return logits


def penalised(before: list[int], root: int, chains: list[tuple[int, ...]]) -> dict[tuple[int, ...], set[int]]:
    """The ids whose logits the penalty changes after each node, by the node's path."""
    branches = Branches.from_chains(chains, max_depth=4, max_nodes=8)
    (tree,) = with_branches([root], [None], [[branches]], torch.device("cpu"))
    changed = applied(torch.ones(len(tree), VOCAB), tree, before) != 1
    tokens, parents = tree.tokens.tolist(), tree.ancestry.parents.tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[parents[node]], tokens[node]))
    return {path: set(row.nonzero().flatten().tolist()) for path, row in zip(paths, changed, strict=True)}


def test_each_node_counts_its_own_path() -> None:
    found = penalised([1, 2], 2, [(3, 4), (5,)])
    assert found == {(): {1, 2}, (3,): {1, 2, 3}, (3, 4): {1, 2, 3, 4}, (5,): {1, 2, 5}}


def test_the_root_behind_a_prompt_stands_for_no_id() -> None:
    """Nothing is committed yet: the ids before are the prompt's, and the root's token is none of them."""
    assert penalised([1, 2], 9, [(3, 4)]) == {(): {1, 2}, (3,): {1, 2, 3}, (3, 4): {1, 2, 3, 4}}


def test_what_is_positive_is_divided_and_what_is_negative_multiplied() -> None:
    logits = torch.tensor([[4.0, -4.0, 0.0, 4.0]])
    tree = Tree.from_root(torch.tensor(0))
    assert applied(logits, tree, [0, 1, 2]).tolist() == [[2.0, -8.0, 0.0, 4.0]]


def test_the_ends_of_an_answer_are_the_generations_else_the_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_end_ids(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_end_ids(tmp_path) == {3, 4}
    (tmp_path / "generation_config.json").write_text(json.dumps({}))
    assert read_end_ids(tmp_path) == {7}
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="eos_token_id"):
        read_end_ids(tmp_path)
