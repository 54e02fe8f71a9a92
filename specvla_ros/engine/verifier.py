"""From a forward's logits to what each request commits, with one read-back for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specvla_kernels.accept_tree import LEAST_NODES, LEAST_PLACES, Tolerance, Trees, accept_tree
from specvla_kernels.commit_kv import commit_kv, commit_kv_batch
from specvla_kernels.device import blocks, has_kernels, to_device
from specvla_kernels.graph_capture import Capture
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.speculation.accept import AcceptanceRule, Verification, accept
from specvla_ros.speculation.rules.bin_distance import BinDistance
from specvla_ros.speculation.rules.strict import Strict, greedy_choice
from specvla_ros.speculation.tree import Tree


@dataclass(frozen=True)
class ToVerify:
    """One request's part of a forward.

    Args:
        tree: that was in it; its root may be the prompt's last row.
        hidden: [n, hidden], the last hidden states of its nodes.
        place: action tokens committed so far.
        visual: [image_tokens, hidden]; None where the rule needs none.
    """

    tree: Tree
    hidden: Tensor
    place: int
    visual: Tensor | None


@dataclass(frozen=True)
class VerifyInput:
    """What the host knows of a request's tree before its forward."""

    tree: Tree
    position: int
    slot: int
    root_row: int
    visual: Sequence[Tensor]


@dataclass(frozen=True)
class Commit:
    """What one request commits, on the host; see `Acceptance`.

    Args:
        nodes_on_device: int64 [n], the nodes where the model is.
        tokens_on_device: int64 [n], the tokens there.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    bins_off: tuple[int, ...]
    why: tuple[int, ...]
    nodes_on_device: Tensor
    tokens_on_device: Tensor


def verify(logits: Tensor, parts: Sequence[ToVerify], rule: AcceptanceRule, actions: ActionIds) -> list[Commit]:
    """Judges every request's tree.

    Args:
        logits: float32 [nodes of all trees, vocab], requests in order.
    """
    choices = greedy_choice(logits)
    accepted = []
    start = 0
    for part in parts:
        rows = slice(start, start + len(part.tree))
        verification = Verification(
            part.tree, choices[rows], logits[rows], part.hidden, actions, part.place, part.visual
        )
        accepted.append(accept(rule, verification))
        start = rows.stop
    numbers = torch.cat([each.packed() for each in accepted]).tolist()  # the tick's one read-back
    commits = []
    for part, acceptance in zip(parts, accepted, strict=True):
        width = part.tree.levels + 1
        mine, numbers = numbers[: 4 * width + 1], numbers[4 * width + 1 :]
        count = mine[-1]
        nodes, tokens, bins_off, why = (tuple(mine[i * width : i * width + count]) for i in range(4))
        on_device = acceptance.nodes[:count], acceptance.tokens[:count]
        commits.append(Commit(nodes, tokens, bins_off, why, *on_device))
    return commits


def tolerance_of(rule: AcceptanceRule, actions: ActionIds, device: torch.device) -> Tolerance | None:
    """What the acceptance kernel needs of a rule; None for rules that it does not know."""
    if not isinstance(rule, Strict | BinDistance):
        return None
    bins = rule.bins if isinstance(rule, BinDistance) else None
    return Tolerance.from_bins(bins, actions.first, actions.stop, actions.bins, device)


@dataclass(frozen=True)
class Uploaded:
    """What the host knows of the trees before their forward; sent ahead, since a copy behind it would wait for it.

    Args:
        places: int64 [requests], action tokens committed so far.
        slots: int64 [requests], all different.
        first_rows: int64 [requests], the slots' rows of the roots.
    """

    places: Tensor
    slots: Tensor
    first_rows: Tensor

    @staticmethod
    def from_requests(
        places: Sequence[int], slots: Sequence[int], first_rows: Sequence[int], device: torch.device
    ) -> "Uploaded":
        """In one copy."""
        return Uploaded(*to_device((places, slots, first_rows), device).unbind())


def verify_on_device(
    logits: Tensor, trees: Sequence[Tree], uploaded: Uploaded, tolerance: Tolerance, cache: KVCache
) -> list[Commit]:
    """Chooses every request's path and moves its keys and values.

    Args:
        logits: float32 [nodes of all trees, vocab], requests in order.
        trees: that were in the forward.
        uploaded: for the same requests.
        tolerance: of the rule.
        cache: whose rows move.
    """
    levels = max(tree.levels for tree in trees)
    choices = greedy_choice(logits).split([len(tree) for tree in trees])
    packed = accept_tree(_padded(trees, choices, uploaded.places), tolerance, levels)
    width = levels + 1
    commit_kv_batch(cache.keys, cache.values, uploaded.slots, uploaded.first_rows, packed[:, :width])
    commits = []
    for row, numbers in zip(packed, packed.tolist(), strict=True):  # the tick's one read-back
        count = numbers[-1]
        nodes, tokens, bins_off, why = (tuple(numbers[i * width : i * width + count]) for i in range(4))
        commits.append(Commit(nodes, tokens, bins_off, why, row[:count], row[width : width + count]))
    return commits


@dataclass(frozen=True)
class VerificationKernels:
    """Compiled with what is captured (see Capturable): met in a tick, that would take as long as many ticks.

    Args:
        actions: ids of action tokens.
        cache: whose rows are moved.
        nodes: of a tree at most.
        levels: no tree is deeper than this.
    """

    actions: ActionIds
    cache: KVCache
    nodes: int
    levels: int

    def capture(self, capture: Capture) -> int:
        """Runs both once for every size that they are compiled for, which serves every rule; nothing moves."""
        device, actions = self.cache.keys.device, self.actions
        tolerance = Tolerance.from_bins(None, actions.first, actions.stop, actions.bins, device)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        for nodes in blocks(LEAST_NODES, self.nodes):
            for places in blocks(LEAST_PLACES, self.levels + 1):
                packed = accept_tree(_roots(nodes, device), tolerance, places - 1)
                commit_kv_batch(self.cache.keys, self.cache.values, first, first, packed[:, :places])
        return 0

    def release(self) -> None:
        """What is compiled stays."""


def _roots(nodes: int, device: torch.device) -> Trees:
    """A tree of which only the root counts."""
    zeros = torch.zeros(1, nodes, dtype=torch.int64, device=device)
    parents, depths = zeros.clone(), zeros + 1
    parents[:, 0], depths[:, 0] = -1, 0
    log_probs, nothing = zeros.to(torch.float32), zeros > 0
    return Trees(zeros, parents, depths, zeros + 1, log_probs, nothing, nothing, zeros, zeros[:, 0])


def _padded(trees: Sequence[Tree], choices: Sequence[Tensor], places: Tensor) -> Trees:
    def together(parts: Sequence[Tensor]) -> Tensor:
        return parts[0][None] if len(parts) == 1 else pad_sequence(list(parts), batch_first=True)

    return Trees(
        tokens=together([tree.tokens for tree in trees]),
        parents=together([tree.ancestry.parents for tree in trees]),
        depths=together([tree.ancestry.depths for tree in trees]),
        ancestors=together([tree.ancestry.ancestors for tree in trees]),
        log_probs=together([tree.log_probs for tree in trees]),
        valid=together([tree.valid for tree in trees]),
        relaxable=together([tree.relaxable for tree in trees]),
        choices=together(choices),
        places=places,
    )


class Verifier:
    """Chooses what each request commits and moves its keys and values.

    Args:
        rule: which drafts are accepted.
        actions: ids of action tokens.
        cache: keys and values of the requests.
        max_nodes: of a tree, the root included.
        max_depth: of a tree.
    """

    def __init__(
        self, rule: AcceptanceRule, actions: ActionIds, cache: KVCache, *, max_nodes: int, max_depth: int
    ) -> None:
        self._actions = actions
        self._cache = cache
        self._kernels = VerificationKernels(actions, cache, max_nodes, max_depth)
        self.set_rule(rule)

    def set_rule(self, rule: AcceptanceRule) -> None:
        """Takes another rule."""
        self.rule = rule
        self.tolerance = None
        if has_kernels(self._cache.keys):
            self.tolerance = tolerance_of(rule, self._actions, self._cache.keys.device)

    def prepare(self, parts: Sequence[VerifyInput]) -> Uploaded | None:
        """Sends ahead what the kernels need; a copy after the forward would wait for it."""
        if self.tolerance is None or not parts:
            return None
        return Uploaded.from_requests(
            [part.position for part in parts],
            [part.slot for part in parts],
            [part.root_row for part in parts],
            self._cache.keys.device,
        )

    def verify(
        self, logits: Tensor, hidden: Sequence[Tensor], parts: Sequence[VerifyInput], uploaded: Uploaded | None
    ) -> list[Commit]:
        """What each request commits.

        Args:
            logits: float32 [nodes of all trees, vocab], requests in order.
            hidden: of each request's tree, [nodes, hidden].
            parts: of the requests.
            uploaded: what `prepare` gave before the forward.
        """
        if not parts:
            return []
        if uploaded is not None and self.tolerance is not None:
            return verify_on_device(logits, [part.tree for part in parts], uploaded, self.tolerance, self._cache)
        inputs = [
            ToVerify(part.tree, states, part.position, torch.cat(list(part.visual)) if part.visual else None)
            for part, states in zip(parts, hidden, strict=True)
        ]
        commits = verify(logits, inputs, self.rule, self._actions)
        for part, commit in zip(parts, commits, strict=True):
            commit_kv(self._cache.keys, self._cache.values, part.slot, part.root_row, commit.nodes)
        return commits

    def capture(self, capture: Capture) -> int:
        """See Capturable."""
        return self._kernels.capture(capture)

    def release(self) -> None:
        """See Capturable."""
