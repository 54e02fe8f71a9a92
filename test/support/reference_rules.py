# SPDX-License-Identifier: Apache-2.0
"""The acceptance rules once more, path by path in plain Python: what the tensor code is held against."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F
from support.verifications import TreeCase

from specvla_kernels.accept_tree import NO_NODE
from specvla_kernels.compare_drafts import NO_TOKEN
from specvla_kernels.layout import Ancestry
from specvla_ros.speculation.accept import NOT_A_NUMBER, AcceptanceRule, AcceptReason, Verification
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.composite import Composite
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.lvspec import LVSpec
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.tree import Tree


@dataclass(frozen=True)
class Committed:
    """The path's nodes, and behind each of them the token, its bins off and its reason."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    bins_off: tuple[int, ...]
    why: tuple[int, ...]


def accept_by_loops(rule: AcceptanceRule, verification: TreeCase) -> Committed:
    """What `accept` commits, by trying every path."""
    tree = verification.tree
    best: tuple[tuple[float, ...], Committed] | None = None
    for end in range(len(tree)):
        path = _path_to(verification, end)
        if not all(bool(tree.valid[node]) for node in path[1:]):
            continue
        reasons = _reasons(rule, verification, path)
        if not all(
            bool(tree.relaxable[path[place]]) or _is_exact(verification, path, place) for place in range(1, len(path))
        ):
            continue
        if AcceptReason.REJECTED in reasons:
            continue
        if any(_wanted(verification, path, place) == NOT_A_NUMBER for place in range(1, len(path))):
            continue
        off = [_bins_off(verification, path, place) for place in range(1, len(path))]
        likelihood = float(tree.log_probs[end])
        merit = (len(path), -sum(off), -math.inf if math.isnan(likelihood) else likelihood, -end)
        tokens = (*(int(tree.tokens[node]) for node in path[1:]), int(verification.choices[end]))
        committed = Committed(
            tuple(path), tokens, (*off, 0), (*(int(each) for each in reasons), int(AcceptReason.TARGET))
        )
        if best is None or merit > best[0]:
            best = (merit, committed)
    assert best is not None  # the root alone is always a path
    return best[1]


def accept_batch_by_loops(rule: AcceptanceRule, verification: Verification) -> torch.Tensor:
    """In place of `accept`: the same for several requests, one by one."""
    return torch.tensor([packed(accept_by_loops(rule, case), verification.max_depth) for case in _cases(verification)])


def packed(found: Committed, max_depth: int) -> list[int]:
    """As `accept_tree` gives it."""
    beyond = max_depth + 1 - len(found.nodes)
    columns = (found.nodes, NO_NODE), (found.tokens, NO_TOKEN), (found.bins_off, 0), (found.why, 0)
    return [number for column, pad in columns for number in (*column, *[pad] * beyond)] + [len(found.nodes)]


def _cases(verification: Verification) -> Iterator[TreeCase]:
    trees = verification.trees
    for i, nodes in enumerate((trees.ancestors != 0).sum(dim=1).tolist()):
        ancestry = Ancestry(*(column[i, :nodes] for column in (trees.parents, trees.depths, trees.ancestors)))
        log_probs, valid, relaxable = (column[i, :nodes] for column in (trees.log_probs, trees.valid, trees.relaxable))
        tree = Tree(trees.tokens[i, :nodes], ancestry, log_probs, valid, relaxable, int(ancestry.depths.max()))
        rest = (trees.choices[i, :nodes], verification.logits, torch.empty(0), verification.actions)
        yield TreeCase(tree, *rest, int(trees.positions[i]))


def _path_to(verification: TreeCase, end: int) -> list[int]:
    path = [end]
    while (parent := int(verification.tree.ancestry.parents[path[0]])) >= 0:
        path.insert(0, parent)
    return path


def _token(verification: TreeCase, path: list[int], place: int) -> int:
    return int(verification.tree.tokens[path[place]])


def _wanted(verification: TreeCase, path: list[int], place: int) -> int:
    return int(verification.choices[path[place - 1]])


def _is_exact(verification: TreeCase, path: list[int], place: int) -> bool:
    return _token(verification, path, place) == _wanted(verification, path, place)


def _is_action(verification: TreeCase, token: int) -> bool:
    return verification.actions.first <= token < verification.actions.stop


def _bins_off(verification: TreeCase, path: list[int], place: int) -> int:
    actions = verification.actions
    token, wanted = _token(verification, path, place), _wanted(verification, path, place)
    are = [_is_action(verification, each) for each in (token, wanted)]
    if all(are):
        values = [min(actions.stop - 1 - each, actions.bins - 1) for each in (token, wanted)]
        return abs(values[0] - values[1])
    return actions.bins if any(are) else int(token != wanted)


def _reasons(rule: AcceptanceRule, verification: TreeCase, path: list[int]) -> list[AcceptReason]:
    places = range(1, len(path))
    if isinstance(rule, LVSpec):
        return _loose(rule, verification, path)
    return [_reason(rule, verification, path, place) for place in places]


def _reason(rule: AcceptanceRule, verification: TreeCase, path: list[int], place: int) -> AcceptReason:
    """Why the token at a place of the path is kept, or REJECTED."""
    if isinstance(rule, Composite):
        return _composite(rule, verification, path, place)
    if _is_exact(verification, path, place):
        return AcceptReason.EXACT
    if isinstance(rule, BinDistance):
        return _near(rule, verification, path, place)
    if isinstance(rule, Fly):
        return _deferred(rule, verification, path, place)
    assert isinstance(rule, Strict)
    return AcceptReason.REJECTED


def _near(rule: BinDistance, verification: TreeCase, path: list[int], place: int) -> AcceptReason:
    token, wanted = _token(verification, path, place), _wanted(verification, path, place)
    if not (_is_action(verification, token) and _is_action(verification, wanted)):
        return AcceptReason.REJECTED
    earlier = sum(_is_action(verification, _token(verification, path, each)) for each in range(1, place))
    dimension = verification.position + earlier
    r = rule.bins[dimension] if dimension < len(rule.bins) else 0
    return AcceptReason.NEAR if _bins_off(verification, path, place) <= r else AcceptReason.REJECTED


def _deferred(rule: Fly, verification: TreeCase, path: list[int], place: int) -> AcceptReason:
    probabilities = verification.logits[path[place - 1]].softmax(-1)
    if rule.entropy == "paper":
        entropy = float(torch.special.entr(probabilities).sum()) / math.log(len(probabilities))
        follow, gate_off = rule.window, False
    else:
        likeliest = probabilities.sort(descending=True).values[:3]
        entropy = float(torch.special.entr(likeliest).sum())
        follow, gate_off = max(0, rule.window - 1), rule.theta <= 0.01
    if not gate_off and not entropy >= rule.theta:
        return AcceptReason.REJECTED
    if place + rule.window > _deepest_behind(verification, path[place]):
        return AcceptReason.REJECTED
    window = range(place + 1, place + 1 + follow)
    agrees = window.stop <= len(path) and all(_is_exact(verification, path, each) for each in window)
    return AcceptReason.DEFERRED if agrees else AcceptReason.REJECTED


def _deepest_behind(verification: TreeCase, node: int) -> int:
    paths = [_path_to(verification, end) for end in range(len(verification.tree)) if verification.tree.valid[end]]
    return max((len(path) - 1 for path in paths if node in path), default=0)


def _loose(rule: LVSpec, verification: TreeCase, path: list[int]) -> list[AcceptReason]:
    """Of the branches through the path's end, the reasons of one that accepts the path; loose anywhere counts first."""
    accepting, loose = [], set()
    for branch in _branches(verification):
        irrelevant = _irrelevant(rule, verification, branch)
        loose |= irrelevant
        if path == branch[: len(path)]:
            places = range(1, len(path))
            accepting.append(all(_is_loose(rule, verification, branch, place, irrelevant) for place in places))
    if not any(accepting):
        return [AcceptReason.REJECTED] * (len(path) - 1)
    kinds = (AcceptReason.SHIFTED, AcceptReason.IRRELEVANT)
    return [
        AcceptReason.EXACT if _is_exact(verification, path, place) else kinds[path[place] in loose]
        for place in range(1, len(path))
    ]


def _branches(verification: TreeCase) -> list[list[int]]:
    """Paths of valid drafts that no other one goes on from."""
    paths = [_path_to(verification, end) for end in range(len(verification.tree))]
    sound = [path for path in paths if all(bool(verification.tree.valid[node]) for node in path[1:])]
    return [path for path in sound if not any(path == other[:-1] for other in sound)]


def _is_loose(rule: LVSpec, verification: TreeCase, branch: list[int], place: int, irrelevant: set[int]) -> bool:
    if _is_exact(verification, branch, place) or branch[place] in irrelevant:
        return True
    near = [k for k in range(1, len(branch)) if rule.shift and abs(k - place) <= rule.shift]
    return _wanted(verification, branch, place) in [_token(verification, branch, k) for k in near]


def _irrelevant(rule: LVSpec, verification: TreeCase, branch: list[int]) -> set[int]:
    assert verification.visual is not None
    relevance: dict[int, float] = {}
    for node in branch[1:]:
        similar = F.cosine_similarity(verification.hidden[node].float()[None], verification.visual.float())
        mean = float(similar.sort(descending=True).values[: rule.top_n].mean())
        if math.isfinite(mean):
            relevance[node] = mean
    ordered = sorted(relevance, key=lambda node: (relevance[node], node))
    return set(ordered[: math.floor(Fraction(str(rule.loose_share)) * (len(branch) - 1))])


def _composite(rule: Composite, verification: TreeCase, path: list[int], place: int) -> AcceptReason:
    token, wanted = _token(verification, path, place), _wanted(verification, path, place)
    are = [_is_action(verification, each) for each in (token, wanted)]
    if any(are) and not all(are):
        return AcceptReason.REJECTED
    if all(are):
        return _reason(rule.action, verification, path, place)
    if any(bool(rule.numbers[max(each, 0)]) for each in (token, wanted)):
        return _reason(Strict(), verification, path, place)
    return _reason(rule.text, verification, path, place)
