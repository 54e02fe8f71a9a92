# SPDX-License-Identifier: Apache-2.0
"""Turns a forward's logits into each request's commit: tokens, and keys and values moved to their final rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specvla_kernels.accept_tree import MIN_PATH
from specvla_kernels.accept_within import Within, accept_within
from specvla_kernels.commit_kv import commit_kv
from specvla_kernels.compare_drafts import MIN_NODES, Nodes, PackedTrees
from specvla_kernels.device import blocks, copy_together, to_device
from specvla_kernels.graph_capture import Captures
from specvla_kernels.repetition_penalty import EarlierIds
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.models.codecs.codec import ActionIds, TokenDistances
from specvla_ros.models.generation import NO_RULES, GreedyRules
from specvla_ros.models.target import ForwardResult
from specvla_ros.speculation.accept import AcceptanceRule, Verification, accept
from specvla_ros.speculation.rules.fly import Fly
from specvla_ros.speculation.rules.strict import Strict
from specvla_ros.speculation.tree import Tree


@dataclass(frozen=True)
class VerifyInput:
    """One request's tree in a forward, as known to the host before the forward."""

    tree: Tree  # drafted tokens; its root may be the prompt's last row
    position: int  # position of the answer so far; see `Codec.position`
    slot: int
    root_row: int  # the slot's row of the root
    rule: AcceptanceRule
    # Last hidden states of the image's rows, [n, hidden] per chunk of the prompt; the forward appends its own. Empty if
    # the rule does not need them.
    visual: Sequence[Tensor] = ()
    ids: Sequence[int] = ()  # prompt and answer up to the root


@dataclass(frozen=True)
class Commit:
    """The nodes of one request's path, and the token after each of them."""

    nodes: tuple[int, ...]  # the nodes whose keys and values join the slot's prefix, the root first
    # Accepted drafts, then the target's own choice after the last node; NOT_A_NUMBER if that is NaN.
    tokens: tuple[int, ...]
    bins_off: tuple[int, ...]  # each token's distance in bins from the target's own choice
    why: tuple[int, ...]  # each token's AcceptReason
    tokens_on_device: Tensor  # int64 [n], the tokens on the model's device


@dataclass(frozen=True)
class Group:
    """The requests of a forward that share a rule."""

    parts: tuple[int, ...]  # their indices among the requests of the forward
    rule: AcceptanceRule
    max_depth: int  # maximum over their trees


class GroupNumbers(NamedTuple):
    """A group's numbers on the device, int64."""

    positions: Tensor  # [requests]
    slots: Tensor  # [requests], all different
    root_rows: Tensor  # [requests]
    rows: Tensor  # [requests, n], each node's row among all trees' nodes; padding: the row after the last


@dataclass(frozen=True)
class ExtraInputs:
    """Inputs that a captured forward sends with its own, in the same copy and the same launch."""

    numbers: Sequence[int] = ()  # from the host
    destinations: Sequence[Tensor] = ()  # on the device, see `copy_together`
    sources: Sequence[Tensor] = ()

    @staticmethod
    def max_numbers(slots: int, nodes: int, slot_rows: int) -> int:
        """Max numbers for trees with so many nodes in total, and a penalty for the ids of all slots' rows."""
        return slots * (3 + slot_rows) + 4 * nodes

    def send(self, device: torch.device) -> Tensor:
        """Sends them alone, and returns the numbers, int64."""
        copy_together(self.destinations, self.sources)
        return to_device(self.numbers, device)


NO_EXTRA_INPUTS = ExtraInputs()


@dataclass(frozen=True)
class Prepared:
    """A verification's inputs before the forward."""

    groups: Sequence[Group]
    nodes: Nodes  # of all trees; packed ones are filled by `extra`
    sizes: Sequence[int]  # of the parts of its numbers: each group's, and those of a penalty
    extra: ExtraInputs


class Verifier:
    """Chooses each request's commit and moves its keys and values, with one read-back for all of them.

    Args:
        rule: the acceptance rule of new requests; requests in flight keep theirs when it is set.
        max_nodes, max_depth: maxima of a tree.
        generation: processing of logits before the argmax.
        vocab_size: size of the logits.
        distances: distances between tokens; None: those of action ids.
    """

    def __init__(
        self,
        rule: AcceptanceRule,
        actions: ActionIds,
        cache: KVCache,
        *,
        max_nodes: int,
        max_depth: int,
        generation: GreedyRules = NO_RULES,
        vocab_size: int = 0,
        distances: TokenDistances | None = None,
    ) -> None:
        self.rule = rule
        self._actions, self._distances, self._cache = actions, distances, cache
        self._generation, self._vocab_size = generation, vocab_size
        self._max_nodes, self._max_depth = max_nodes, max_depth

    def prepare(self, parts: Sequence[VerifyInput]) -> Prepared:
        """Prepares the inputs before the forward, which may send them along with its own.

        The requests, at least one, must have different slots and the order of their logits.
        """
        starts = [*accumulate((len(part.tree) for part in parts), initial=0)]
        by_rule: dict[int, list[int]] = {}
        for index, part in enumerate(parts):
            by_rule.setdefault(id(part.rule), []).append(index)
        numbers = [_numbers(parts, indices, starts) for indices in by_rule.values()]
        if self._generation.penalises:
            numbers += EarlierIds.numbers([part.ids for part in parts], [len(part.tree) for part in parts])
        groups = [_group(parts, indices) for indices in by_rule.values()]
        nodes, destinations, sources = _side_by_side([part.tree for part in parts])
        return Prepared(groups, nodes, [*map(len, numbers)], ExtraInputs([*chain(*numbers)], destinations, sources))

    def verify(
        self, result: ForwardResult, hidden: Sequence[Tensor], parts: Sequence[VerifyInput], prepared: Prepared
    ) -> list[Commit]:
        """Chooses every request's path and moves its keys and values.

        `result` has logits and choices for the nodes of all trees, in request order; `hidden` has the last hidden
        states of each request's tree, [nodes, hidden].
        """
        groups, nodes = prepared.groups, prepared.nodes
        sent = prepared.extra.send(self._cache.keys.device) if result.sent is None else result.sent
        uploaded = sent.split([*prepared.sizes])
        numbers_of = [_numbers_of(group, each) for group, each in zip(groups, uploaded, strict=False)]
        choices, logits = result.choices, result.logits
        if self._generation.changes_choices or choices is None:
            of_penalty = uploaded[len(groups) :]
            earlier = EarlierIds(of_penalty[0], of_penalty[1].view(3, -1)) if of_penalty else None
            choices = self._generation.choose(logits, nodes.tokens, nodes.ancestors, earlier)
        paths = list(self._paths(nodes, logits, choices, hidden, parts, groups, numbers_of))
        for group, where, path in zip(groups, numbers_of, paths, strict=True):
            taken = path[:, : group.max_depth + 1]
            commit_kv(self._cache.keys, self._cache.values, where.slots, where.root_rows, taken)
        flat = [path.flatten() for path in paths]
        numbers = iter((flat[0] if len(flat) == 1 else torch.cat(flat)).tolist())  # the tick's one read-back
        commits: dict[int, Commit] = {}
        for group, path in zip(groups, paths, strict=True):
            width = group.max_depth + 1
            for index, on_device in zip(group.parts, path, strict=True):
                *columns, count = islice(numbers, len(on_device))
                chosen, tokens, off, why = (tuple(columns[i * width : i * width + count]) for i in range(4))
                commits[index] = Commit(chosen, tokens, off, why, on_device[width : width + count])
        return [commits[index] for index in range(len(parts))]

    def capture(self, captures: Captures) -> None:
        """See Capturable: compiles the operators for every possible tree size; the result serves every rule.

        A compilation within a tick would take as long as many ticks. Nothing is captured and no row moves.
        """
        device = self._cache.keys.device
        first = torch.zeros(1, dtype=torch.int64, device=device)
        root, ids = Nodes(*Tree.from_root(first).columns), self._actions
        logits = torch.zeros(1, max(1, self._vocab_size), device=device)
        earlier = EarlierIds(first, first.repeat(3, 1)) if self._generation.penalises else None
        self._generation.choose(logits, first, first, earlier)
        strict = Strict().within
        rules = strict, replace(strict, tolerances=first), Fly().within, Fly(entropy="code").within
        for n in blocks(MIN_NODES, self._max_nodes):
            rows = torch.arange(n, device=device)[None]
            packed = PackedTrees(root, choices=first, positions=first, rows=rows)
            alone = PackedTrees(Nodes(*(column.repeat(n) for column in root)), first.repeat(n), first, rows=None)
            trees = packed.padded()
            if self._distances is not None:
                self._distances.compare(trees)  # uploads its tables
            for length in blocks(MIN_PATH, self._max_depth + 1):
                for each, within in product((packed, alone), rules):
                    accept_within(each, within, (ids.first, ids.stop, ids.bins), length - 1, logits)
                path = accept(Strict(), Verification(trees, ids, length - 1, torch.empty(0)))
                commit_kv(self._cache.keys, self._cache.values, first, first, path[:, :length])

    def release(self) -> None:
        """See Capturable: compiled operators are kept."""

    def _paths(
        self,
        nodes: Nodes,
        logits: Tensor,
        choices: Tensor,
        hidden: Sequence[Tensor],
        parts: Sequence[VerifyInput],
        groups: Sequence[Group],
        numbers: Sequence[GroupNumbers],
    ) -> Iterator[Tensor]:
        for group, where in zip(groups, numbers, strict=True):
            rows = None if len(parts) == 1 else where.rows
            trees = PackedTrees(nodes, choices, where.positions, rows)
            rule, ids = group.rule, self._actions
            within = _within(rule)
            if within is not None and (within.tolerances is None or self._distances in (None, ids)):
                yield accept_within(trees, within, (ids.first, ids.stop, ids.bins), group.max_depth, logits)
                continue
            verification = Verification(
                trees=trees.padded(),
                actions=ids,
                max_depth=group.max_depth,
                logits=logits,
                rows=None if rows is None else rows.clamp(max=len(logits) - 1),
                hidden=_padded_rows([hidden[index] for index in group.parts]) if rule.needs_hidden else None,
                visual=_padded_rows([_whole(parts[index].visual) for index in group.parts])
                if rule.needs_visual
                else None,
                distances=self._distances,
            )
            yield accept(rule, verification)


def _within(rule: AcceptanceRule) -> Within | None:
    """The bounds of a rule that one kernel can decide, see AcceptanceRule; None: it has none."""
    within: Within | None = getattr(rule, "within", None)
    return within


def _numbers(parts: Sequence[VerifyInput], indices: Sequence[int], starts: Sequence[int]) -> list[int]:
    """The numbers of a group's tensors, in their order; `starts`: each part's first row, and the row after the last."""
    mine = [parts[index] for index in indices]
    numbers = [*(part.position for part in mine), *(part.slot for part in mine), *(part.root_row for part in mine)]
    n = max(len(part.tree) for part in mine)
    for index, part in zip(indices, mine, strict=True):
        rows = range(starts[index], starts[index] + len(part.tree))
        numbers += [*rows, *[starts[-1]] * (n - len(rows))]
    return numbers


def _group(parts: Sequence[VerifyInput], indices: Sequence[int]) -> Group:
    return Group(tuple(indices), parts[indices[0]].rule, max(parts[index].tree.depth for index in indices))


def _numbers_of(group: Group, uploaded: Tensor) -> GroupNumbers:
    requests = len(group.parts)
    positions, slots, root_rows = uploaded[: 3 * requests].view(3, requests)
    return GroupNumbers(positions, slots, root_rows, uploaded[3 * requests :].view(requests, -1))


def _side_by_side(trees: Sequence[Tree]) -> tuple[Nodes, list[Tensor], list[Tensor]]:
    """All trees' nodes, and the copies that fill them: destinations and sources."""
    found = [Nodes(*tree.columns) for tree in trees]
    if len(found) == 1:
        return found[0], [], []
    sizes = [len(tree) for tree in trees]
    packed = Nodes(*(column.new_empty(sum(sizes)) for column in found[0]))
    places = [place for column in packed for place in column.split(sizes)]
    return packed, places, [column for columns in zip(*found, strict=True) for column in columns]


def _padded_rows(states: Sequence[Tensor]) -> Tensor:
    """Stacks the requests' states [n, hidden] to [requests, n, hidden], padded with zeros."""
    return states[0][None] if len(states) == 1 else pad_sequence([*states], batch_first=True)


def _whole(chunks: Sequence[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat([*chunks])
