# SPDX-License-Identifier: Apache-2.0
"""Acceptance and commit: compiled before the first tick, for whatever tree may come, and of few launches."""

import pytest
import torch
from support.launches import Launches
from support.static_forwards import recorded
from support.verifications import ACTIONS, VOCAB, make_tree

from specvla_kernels import accept_tree, accept_within, compare_drafts
from specvla_kernels.accept_tree import MIN_PATH
from specvla_kernels.accept_within import Within, accept_within_reference
from specvla_kernels.commit_kv import commit_kv_reference
from specvla_kernels.compare_drafts import MIN_NODES, PackedTrees
from specvla_kernels.device import blocks, power_of_two
from specvla_kernels.graph_capture import Captures
from specvla_kernels.uncertainty import uncertainty_reference
from specvla_ros.engine import verifier
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.verifier import ExtraInputs, Verifier, VerifyInput
from specvla_ros.models import generation
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.models.generation import GreedyRules
from specvla_ros.models.target import ForwardResult
from specvla_ros.speculation.accept import AcceptanceRule
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.strict import Strict


@pytest.mark.parametrize(("nodes", "max_depth"), [(1, 7), (16, 7), (50, 7), (50, 14), (48, 200), (64, 63)])
def test_every_size_that_a_tree_may_have_is_compiled_and_nothing_moves(
    nodes: int, max_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: set[int] = set()
    accepted: set[tuple[int, int]] = set()
    moved: set[int] = set()
    walk, comparison = accept_tree.accept_tree_reference, compare_drafts.compare_drafts_reference

    def compare(trees, *ids):
        compared.add(trees.tokens.shape[1])
        return comparison(trees, *ids)

    def accept(trees, comparison, mask, reasons, max_depth):
        accepted.add((trees.tokens.shape[1], max_depth + 1))
        return walk(trees, comparison, mask, reasons, max_depth)

    def commit(keys, values, slots, first_rows, path):
        moved.add(path.shape[1])
        commit_kv_reference(keys, values, slots, first_rows, path)

    monkeypatch.setattr(accept_tree, "accept_tree_reference", accept)
    monkeypatch.setattr(compare_drafts, "compare_drafts_reference", compare)
    monkeypatch.setattr(verifier, "commit_kv", commit)
    cache = KVCache((2, 2, 80, 1, 2), dtype=torch.float32, device=torch.device("cpu"))
    for store in (cache.keys, cache.values):
        store.normal_()
    before = cache.keys.clone(), cache.values.clone()

    made = Verifier(Strict(), ActionIds(10, 26, 15), cache, max_nodes=nodes, max_depth=max_depth)
    captures = Captures(recorded)
    made.capture(captures)
    assert not captures.count and not captures.failed

    assert cache.keys.equal(before[0]) and cache.values.equal(before[1])
    lengths = {max(MIN_PATH, power_of_two(depth + 1)) for depth in range(max_depth + 1)}
    sizes = {max(MIN_NODES, power_of_two(n)) for n in range(1, nodes + 1)}
    assert accepted == {(n, length) for n in sizes for length in lengths}
    assert compared == sizes and moved == lengths


def test_every_variant_of_the_walk_is_compiled_before_a_rule_or_a_second_robot_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: set[tuple[int | bool, ...]] = set()

    def accept(
        trees: PackedTrees,
        within: Within,
        ids: tuple[int, int, int],
        max_depth: int,
        unsure: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sizes = power_of_two(trees.max_nodes, MIN_NODES), power_of_two(max_depth + 1, MIN_PATH)
        met.add((trees.rows is not None, within.tolerances is not None, unsure is not None, *sizes))
        return accept_within_reference(trees, within, ids, max_depth, unsure)

    def entropy(logits: torch.Tensor, terms: int) -> torch.Tensor:
        met.add((terms,))
        return uncertainty_reference(logits, terms)

    monkeypatch.setattr(accept_within, "has_kernels", lambda _: True)
    monkeypatch.setattr(accept_within, "accept_within_triton", accept)
    monkeypatch.setattr(accept_within, "uncertainty", entropy)
    cache = KVCache((1, 4, 40, 1, 2), dtype=torch.float32, device=torch.device("cpu"))
    made = Verifier(Strict(), ACTIONS, cache, max_nodes=20, max_depth=7)
    made.capture(Captures(recorded))
    compiled = met.copy()
    for rule in (Strict(), BinDistance((5,) * 6 + (0,)), Fly(), Fly(window=0), Fly(0.005, 3, "code")):
        for requests, nodes in ((1, 1), (1, 8), (1, 20), (3, 1), (3, 20)):
            tree = make_tree([13] * nodes, [-1, *[0] * (nodes - 1)])
            parts = [VerifyInput(tree, 1, slot, 20, rule) for slot in range(requests)]
            logits, hidden = torch.zeros(nodes * requests, VOCAB), [torch.zeros(nodes, 4)] * requests
            made.verify(ForwardResult(logits, hidden[0]), hidden, parts, made.prepare(parts))
    assert met == compiled and len(compiled) == 2 + 12


def test_a_forward_has_room_for_what_any_verification_sends_along() -> None:
    slots, nodes, slot_rows = 3, 20, 40
    cache = KVCache((1, slots, slot_rows, 1, 2), dtype=torch.float32, device=torch.device("cpu"))
    rules = GreedyRules(repetition_penalty=1.1)
    made = Verifier(Strict(), ACTIONS, cache, max_nodes=nodes, max_depth=7, generation=rules)
    tree = make_tree([13] * nodes, [-1, *[0] * (nodes - 1)])
    rules_of: tuple[list[AcceptanceRule], ...] = [Strict()] * slots, [Strict(), Fly(), BinDistance((5,))]
    for apart in rules_of:  # of one rule, and each of its own
        parts = [VerifyInput(tree, 1, slot, 20, rule, ids=range(slot_rows)) for slot, rule in enumerate(apart)]
        numbers = made.prepare(parts).extra.numbers
        assert len(numbers) == ExtraInputs.max_numbers(slots, slots * nodes, slot_rows)


def test_blocks_reach_from_the_least_to_what_holds_the_most() -> None:
    assert blocks(16, 1) == blocks(16, 16) == [16]
    assert blocks(16, 17) == [16, 32]
    assert blocks(8, 64) == [8, 16, 32, 64]


@pytest.mark.parametrize(
    ("rule", "requests", "most"),
    [
        (Strict(), 1, 3),
        (Strict(), 4, 6),
        (BinDistance((5,) * 6 + (0,)), 1, 3),
        (BinDistance((5,) * 6 + (0,)), 4, 6),
    ],
)
def test_a_verification_is_a_known_number_of_launches(
    rule: AcceptanceRule, requests: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCache((1, 4, 40, 1, 2), dtype=torch.float32, device=torch.device("cpu"))
    made = Verifier(rule, ACTIONS, cache, max_nodes=16, max_depth=7)
    tree = make_tree([13] * 8, range(-1, 7))
    parts = [VerifyInput(tree, 1, slot, 20, rule) for slot in range(requests)]
    path = torch.ones(requests, 4 * 8 + 1, dtype=torch.int64)
    choices = torch.zeros(8 * requests, dtype=torch.int64)
    for module, operator, result in (
        (generation, "greedy_choice", choices),
        (verifier, "accept_within", path),
        (verifier, "commit_kv", None),
    ):
        monkeypatch.setattr(module, operator, lambda *_, result=result: result)
    logits, hidden = torch.zeros(8 * requests, VOCAB), [torch.zeros(8, 4)] * requests
    with Launches() as launches:
        commits = made.verify(ForwardResult(logits, hidden[0]), hidden, parts, made.prepare(parts))
    assert len(commits) == requests
    ours = 3  # choices, comparison with walk, and commit
    assert launches.counted.total() + ours <= most, launches.counted
