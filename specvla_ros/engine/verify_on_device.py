"""Acceptance and commit without the host: two launches for all requests, and one read-back of what they did."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specvla_kernels.accept_tree import Tolerance, Trees, accept_tree
from specvla_kernels.commit_kv import commit_kv_batch
from specvla_kernels.jit import power_of_two
from specvla_kernels.send import send
from specvla_ros.acceptance.bin_distance import BinDistance
from specvla_ros.acceptance.strict import Strict, greedy_choice
from specvla_ros.acceptance.verification import AcceptanceRule, ActionIds
from specvla_ros.drafting.tree import Tree
from specvla_ros.engine.kv_ring import KVRing
from specvla_ros.engine.verify import Commit


def tolerance_of(rule: AcceptanceRule, actions: ActionIds, device: torch.device) -> Tolerance | None:
    """What the acceptance kernel needs of a rule; None for rules that it does not know."""
    if not isinstance(rule, Strict | BinDistance):
        return None
    bins = rule.bins if isinstance(rule, BinDistance) else None
    return Tolerance.of(bins, actions.first, actions.stop, actions.bins, device)


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
    def of(places: Sequence[int], slots: Sequence[int], first_rows: Sequence[int], device: torch.device) -> "Uploaded":
        """In one copy."""
        return Uploaded(*send((places, slots, first_rows), device).unbind())


def verify_on_device(
    logits: Tensor, trees: Sequence[Tree], uploaded: Uploaded, tolerance: Tolerance, ring: KVRing
) -> list[Commit]:
    """Chooses every request's path and moves its keys and values.

    Args:
        logits: float32 [nodes of all trees, vocab], requests in order.
        trees: that were in the forward.
        uploaded: for the same requests.
        tolerance: of the rule.
        ring: whose rows move.
    """
    levels = max(tree.levels for tree in trees)
    choices = greedy_choice(logits).split([len(tree) for tree in trees])
    packed = accept_tree(_padded(trees, choices, uploaded.places), tolerance, levels)
    width = levels + 1
    commit_kv_batch(ring.keys, ring.values, uploaded.slots, uploaded.first_rows, packed[:, :width])
    commits = []
    for row, numbers in zip(packed, packed.tolist(), strict=True):  # the tick's one read-back
        count = numbers[-1]
        nodes, tokens, bins_off, why = (tuple(numbers[i * width : i * width + count]) for i in range(4))
        commits.append(Commit(nodes, tokens, bins_off, why, row[:count], row[width : width + count]))
    return commits


def compile_verification(tolerance: Tolerance, ring: KVRing, *, nodes: int, levels: int) -> None:
    """Has the kernels compiled for every size of tree: met in a tick, that would take as long as many ticks.

    Args:
        tolerance: of any rule.
        ring: whose rows could move; none does.
        nodes: of a tree at most.
        levels: no tree is deeper than this.
    """
    device = ring.keys.device
    none = torch.zeros(1, dtype=torch.int64, device=device)
    for n in sorted({min(power_of_two(each), nodes) for each in range(1, nodes + 1)}):
        parents = torch.zeros(1, n, dtype=torch.int64, device=device)
        parents[:, 0] = -1
        zeros, nothing = torch.zeros_like(parents), torch.zeros(1, n, dtype=torch.bool, device=device)
        log_probs = torch.zeros(1, n, device=device)
        trees = Trees(zeros, parents, zeros, zeros + 1, log_probs, nothing, nothing, zeros, none)
        packed = accept_tree(trees, tolerance, min(levels, n - 1))
        commit_kv_batch(ring.keys, ring.values, none, none, packed[:, : min(levels, n - 1) + 1])


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
