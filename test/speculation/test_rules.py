# SPDX-License-Identifier: Apache-2.0
"""Every rule: the tensor code equals the loops, and what it commits is what the rule promises."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reference_rules import Committed, accept_by_loops
from support.verifications import ACTIONS, VOCAB, TreeCase, make_tree, one_hot, verifications, verify_tree
from torch.utils._python_dispatch import TorchDispatchMode

from specvla_kernels.accept_tree import NO_NODE
from specvla_kernels.greedy_choice import greedy_choice
from specvla_ros.speculation.accept import NOT_A_NUMBER, AcceptanceRule, AcceptReason, accept
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.composite import Composite
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.lvspec import LVSpec
from specvla_ros.speculation.rules.strict import Strict

NUMBERS = torch.arange(VOCAB) < 4
RULES: list[AcceptanceRule] = [
    Strict(),
    BinDistance((1, 2, 0, 3, 1, 2, 0)),
    BinDistance((6,) * 7),
    Fly(0.3, 2),
    Fly(0.0, 1),
    Fly(0.3, 0),
    Fly(0.3, 6),
    Fly(0.6, 0, "code"),
    Fly(0.6, 2, "code"),
    Fly(0.005, 3, "code"),
    LVSpec(0.4, 3, 1),
    LVSpec(0.0, 2, 2),
    LVSpec(0.7, 3),
    Composite(BinDistance((2,) * 7), Fly(0.2, 2), NUMBERS),
]


def committed(rule: AcceptanceRule, verification: TreeCase) -> Committed:
    (row,) = accept(rule, verification.verification())
    count, width = int(row[-1]), verification.tree.depth + 1
    assert len(row) == 4 * width + 1
    assert (row[count:width] == NO_NODE).all()
    return Committed(*(tuple(part[:count].tolist()) for part in row[:-1].split(width)))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(st.data())
def test_tensors_say_what_the_loops_say(rule: AcceptanceRule, data: st.DataObject) -> None:
    verification = data.draw(st.one_of(verifications(), verifications(chain=True)))
    assert committed(rule, verification) == accept_by_loops(rule, verification)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(verifications())
def test_what_is_committed_is_a_path_and_no_padding(rule: AcceptanceRule, verification: TreeCase) -> None:
    found = committed(rule, verification)
    parents = verification.tree.ancestry.parents
    assert found.nodes[0] == 0
    assert all(parents[child] == parent for parent, child in pairwise(found.nodes))
    assert all(verification.tree.valid[node] for node in found.nodes)
    assert found.tokens[:-1] == tuple(verification.tree.tokens[list(found.nodes[1:])].tolist())
    assert found.tokens[-1] == verification.choices[found.nodes[-1]]
    assert AcceptReason.REJECTED not in found.why


@given(verifications())
def test_strict_commits_the_targets_own_tokens_only(verification: TreeCase) -> None:
    found = committed(Strict(), verification)
    assert found.tokens == tuple(verification.choices[list(found.nodes)].tolist())
    assert set(found.bins_off) == {0}


@given(verifications(), st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_relaxed_is_bounded_per_dimension(verification: TreeCase, bins: list[int]) -> None:
    found = committed(BinDistance(tuple(bins)), verification)
    dimension = verification.position
    for node, token, off in zip(found.nodes, found.tokens[:-1], found.bins_off, strict=False):
        wanted = int(verification.choices[node])
        if token != wanted:
            assert ACTIONS.first <= token < ACTIONS.stop and ACTIONS.first <= wanted < ACTIONS.stop
            apart = abs(min(ACTIONS.stop - 1 - token, 6) - min(ACTIONS.stop - 1 - wanted, 6))
            assert off == apart <= (bins[dimension] if dimension < len(bins) else 0)
        dimension += ACTIONS.first <= token < ACTIONS.stop


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(verifications(), st.data())
def test_what_may_not_be_relaxed_is_exact(rule: AcceptanceRule, verification: TreeCase, data: st.DataObject) -> None:
    n = len(verification.tree)
    relaxable = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    verification = replace(verification, tree=replace(verification.tree, relaxable=torch.tensor(relaxable)))
    found = committed(rule, verification)
    assert found == accept_by_loops(rule, verification)
    for (parent, node), token in zip(pairwise(found.nodes), found.tokens, strict=False):
        assert relaxable[node] or token == verification.choices[parent]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(verifications())
def test_a_choice_that_is_not_a_number_ends_the_path_and_is_told(rule: AcceptanceRule, verification: TreeCase) -> None:
    found = committed(rule, verification)
    assert all(verification.choices[node] != NOT_A_NUMBER for node in found.nodes[:-1])
    assert NOT_A_NUMBER not in found.tokens[:-1]


@pytest.mark.parametrize(
    "rule", [Strict(), Fly(0.005, 1, "code"), LVSpec(1.0, 2, 0), LVSpec(0.0, 2, 1), BinDistance((6,) * 7)], ids=repr
)
def test_no_rule_steps_over_a_nan(rule: AcceptanceRule) -> None:
    logits = one_hot([5, 6, 7, 8], VOCAB)
    logits[0, 0] = float("nan")
    generator = torch.Generator().manual_seed(0)
    hidden, visual = torch.randn(4, 6, generator=generator), torch.randn(5, 6, generator=generator)
    for first in (9, 6, NOT_A_NUMBER):
        tree = make_tree([4, first, 6, 7], [-1, 0, 1, 2])
        verification = verify_tree(tree, logits, hidden=hidden, visual=visual)
        assert committed(rule, verification).tokens == (NOT_A_NUMBER,)


def test_the_nearest_of_two_equally_long_paths_wins_then_the_likelier() -> None:
    tree = make_tree([15, 17, 15, 17], [-1, 0, 0, 0], log_probs=[0, -0.1, -3, -0.05])
    logits = one_hot([16, 16, 16, 16], VOCAB)
    assert committed(BinDistance((3,) * 7), verify_tree(tree, logits)).nodes == (0, 3)
    tree = make_tree([15, 17, 16], [-1, 0, 0], log_probs=[0, -0.1, -3])
    assert committed(BinDistance((3,) * 7), verify_tree(tree, one_hot([16] * 3, VOCAB))).nodes == (0, 2)


def test_the_two_ids_that_decode_alike_are_no_distance_apart() -> None:
    tree = make_tree([15, 12], [-1, 0])
    found = committed(BinDistance((0,) * 7), verify_tree(tree, one_hot([13, 13], VOCAB)))
    assert (found.tokens, found.bins_off) == ((12, 13), (0, 0))
    assert committed(Strict(), verify_tree(tree, one_hot([13, 13], VOCAB))).tokens == (13,)


def test_ids_outside_the_actions_are_never_near() -> None:
    for token, wanted in ((20, 19), (19, 20), (11, 12), (12, 11)):
        tree = make_tree([15, token], [-1, 0])
        assert committed(BinDistance((6,) * 7), verify_tree(tree, one_hot([wanted] * 2, VOCAB))).nodes == (0,)


def test_the_lowest_id_wins_a_tie_and_nan_is_told() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [0.0, float("nan"), 9.0, 0.0]])
    assert greedy_choice(logits).tolist() == [1, 0, NOT_A_NUMBER]


@given(st.integers(0, 2**31), st.integers(1, 8))
def test_without_ties_the_choice_is_argmax(seed: int, rows: int) -> None:
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed))
    assert greedy_choice(logits).equal(logits.argmax(dim=-1))


def test_the_messages_codes_are_the_reasons() -> None:
    message = Path(__file__).resolve().parents[2] / "msg" / "DecodeStats.msg"
    codes = re.findall(r"^uint8 (\w+)=(\d+)", message.read_text(), flags=re.MULTILINE)
    assert {name: int(code) for name, code in codes} == {
        each.name: int(each) for each in AcceptReason if each is not AcceptReason.REJECTED
    }
    assert max(AcceptReason) == AcceptReason.REJECTED and len(set(AcceptReason)) == 7


def test_only_who_looks_at_the_image_asks_for_its_states() -> None:
    lvspec, others = LVSpec(), (Strict(), BinDistance((1,)), Fly())
    assert (lvspec.needs_hidden, lvspec.needs_visual) == (True, True)
    assert not any(rule.needs_hidden or rule.needs_visual for rule in others)
    pairs: list[tuple[AcceptanceRule, AcceptanceRule, bool]] = [
        (Strict(), lvspec, True),
        (lvspec, Fly(), True),
        (Strict(), Fly(), False),
    ]
    for action, text, needs in pairs:
        made = Composite(action, text, NUMBERS)
        assert made.needs_hidden == made.needs_visual == needs


def test_lvspec_without_the_image_is_refused() -> None:
    verification = verify_tree(make_tree([15, 16], [-1, 0]), one_hot([16, 16], VOCAB))
    with pytest.raises(ValueError, match="needs the last hidden states"):
        accept(LVSpec(), verification.verification())


class _NoReadBack(TorchDispatchMode):
    """Fails on whatever would make the host wait for the device, or give a tensor a shape that depends on data.

    A copy from the host counts too: from pageable memory it waits, and a CUDA graph cannot hold it.
    """

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in self.forbidden), func
        if func is torch.ops.aten._to_copy.default:
            assert (kwargs or {}).get("device") in (None, args[0].device), "a copy between devices"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_read_back() -> Iterator[None]:
    with _NoReadBack():
        yield


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_nothing_is_read_back(rule: AcceptanceRule) -> None:
    tree = make_tree([15, 16, 17, 3], [-1, 0, 1, 0])
    generator = torch.Generator().manual_seed(0)
    verification = verify_tree(
        tree,
        torch.randn(4, VOCAB, generator=generator),
        hidden=torch.randn(4, 6, generator=generator),
        visual=torch.randn(5, 6, generator=generator),
    )
    batch = verification.verification()
    with no_read_back():
        accept(rule, batch)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_shapes_alone_are_enough(rule: AcceptanceRule) -> None:
    """On the meta device, where no tensor has values, so that none can be asked for."""
    verification = _on_meta(verify_tree(make_tree([15, 16, 17, 3], [-1, 0, 1, 0]), torch.zeros(4, VOCAB)))
    rule = _on_meta(rule)
    batch = replace(verification, visual=torch.empty(5, 4, device="meta")).verification()
    with no_read_back():
        packed = accept(rule, batch)
    assert packed.shape == (1, 4 * 3 + 1)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if value == "cpu":  # where a rule keeps its tables
        return "meta"
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _on_meta(getattr(value, each.name)) for each in fields(value) if each.init})
    return value
