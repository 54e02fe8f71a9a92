# SPDX-License-Identifier: Apache-2.0
"""Recorded decisions of the published code of Spec-VLA, EAGLE and FLy."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.nightly import nightly_but
from support.paths import ORACLES, needs
from support.verifications import TreeCase, make_tree, one_hot, verify_tree

from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.speculation.accept import AcceptanceRule, accept
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.strict import Strict

TREES, FLY = ORACLES / "eagle2_tree", ORACLES / "fly_verify"
# The peers measure on raw ids, whatever they stand for.
ALL_IDS = ActionIds(first=0, stop=32064, bins=32064)


def parents_of(rows: list[list[int]], n: int) -> list[int]:
    parents = [-1] * n
    for row in rows:
        path = [node for node in row if node >= 0]
        for parent, node in pairwise(path):
            parents[node] = parent
    return parents


def tokens_of(rule: AcceptanceRule, case: TreeCase) -> list[int]:
    (row,) = accept(rule, case.verification()).tolist()
    width = case.tree.depth + 1
    return row[width : width + row[-1]]


def committed(case: dict, actions: ActionIds) -> list[int]:
    tree = make_tree(case["draft_tokens"], parents_of(case["retrieve_indices"], len(case["draft_tokens"])))
    rule = Strict() if case["r"] is None else BinDistance((case["r"],) * 64)
    return tokens_of(rule, verify_tree(tree, one_hot(case["target_argmax"], 32064), actions=actions))


def path_tokens(case: dict, row: list[int]) -> list[int]:
    return [case["draft_tokens"][node] for node in row if node >= 0]


def longest_rows(case: dict) -> set[tuple[int, ...]]:
    """Token paths that tie for the longest under the peers' rule, padding not counted."""
    r = case["r"] or 0
    found: dict[int, set[tuple[int, ...]]] = {}
    for row in case["retrieve_indices"]:
        path = [node for node in row if node >= 0]
        length = 0
        for parent, node in pairwise(path):
            if abs(case["draft_tokens"][node] - case["target_argmax"][parent]) > r:
                break
            length += 1
        found.setdefault(length, set()).add(tuple(path[: length + 1]))
    return found[max(found)]


@needs(TREES)
def test_the_accept_length_is_the_peers_and_so_are_the_tokens_where_nothing_ties() -> None:
    cases = json.loads((TREES / "acceptance.json").read_text())
    padded = told_apart = 0
    for case in cases:
        ours = committed(case, ALL_IDS)
        longest = longest_rows(case)
        real = len(next(iter(longest))) - 1
        assert len(ours) - 1 == real
        if case["accept_length"] != real:  # the peers' -1 padding was "accepted": |-1 - argmax| <= r
            assert case["accept_length"] > real and min(case["target_argmax"]) <= 2
            padded += 1
        elif len(longest) == 1:
            told_apart += 1
            assert ours == [*case["committed_tokens"][1:], case["next_root"]]
    assert told_apart > 300 and 0 < padded < 20


@needs(TREES)
def test_named_cases_differ_where_the_published_code_is_wrong() -> None:
    cases = {case.get("name", case.get("tree")): case for case in json.loads((TREES / "acceptance.json").read_text())}
    nearest = cases["first_leaf_not_nearest"]
    off = [abs(token - nearest["target_argmax"][0]) for token in nearest["draft_tokens"][1:]]
    first, _ = committed(nearest, ALL_IDS)[0], None
    assert abs(first - nearest["target_argmax"][0]) == min(off), "ours takes the nearest sibling, theirs the first"
    strangers = cases["non_action_tokens"]
    actions = ActionIds(31744, 32000, 255)
    assert len(committed(strangers, actions)) < len(strangers["committed_tokens"]) + 1


@needs(FLY)
@pytest.mark.parametrize("entropy", nightly_but(lambda entropy: entropy == "paper", ["code", "paper"]))
def test_fly_decides_as_recorded(entropy: str) -> None:
    cases = json.loads((FLY / "cases.json").read_text())
    logits = np.load(FLY / "target_logits.npz")
    key = "code_output" if entropy == "code" else "paper_text_output"
    loosened = 0
    for case in cases:
        rows = torch.from_numpy(logits[f"c{case['i']:04d}_target_logits"])
        n = case["K"] + 1
        tree = make_tree([0, *case["draft"]], list(range(-1, n - 1)))
        nothing = ActionIds(first=0, stop=0, bins=1)
        tokens = tokens_of(Fly(case["theta"], case["W"], entropy), verify_tree(tree, rows, actions=nothing))
        assert tokens == case[key], case["i"]
        loosened += case[key] != case["strict_output"]
    assert loosened > 100
