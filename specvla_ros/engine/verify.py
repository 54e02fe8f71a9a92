"""From a forward's logits to what each request commits, with one read-back for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_ros.speculation.accept import AcceptanceRule, ActionIds, Verification, accept
from specvla_ros.speculation.rules.strict import greedy_choice
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
