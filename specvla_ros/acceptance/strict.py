"""Strict acceptance: a drafted token is committed only if it is the target's own choice, so nothing is lost."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_A_NUMBER = -1


@dataclass(frozen=True)
class Acceptance:
    """What one verification commits.

    Args:
        path: nodes whose keys and values join the slot's prefix, the root first.
        tokens: tokens committed: the accepted drafts, then the target's own choice behind the last node of the path.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def greedy_choice(logits: Tensor) -> Tensor:
    """The target's most likely token at each node; the lowest id wins a tie, on every device.

    Args:
        logits: float32 [n, vocab].

    Returns:
        int64 [n]; NOT_A_NUMBER for a row with a NaN.
    """
    best = logits.amax(dim=-1, keepdim=True)
    vocab = logits.shape[-1]
    ids = torch.arange(vocab, device=logits.device)
    choice = torch.where(logits == best, ids, vocab).amin(dim=-1)
    return torch.where(choice == vocab, NOT_A_NUMBER, choice)


def accept_strict(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Acceptance:
    """Walks from the root along the children that the target would have chosen itself.

    Args:
        choices: the target's choice behind each node.
        tokens: each node's token; the root's is committed already.
        parents: each node's parent, -1 for the root (node 0).
    """
    node = 0
    path = [node]
    children = {(parent, token): child for child, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    while (node, choices[node]) in children:
        node = children[node, choices[node]]
        path.append(node)
    return Acceptance(tuple(path), (*(tokens[i] for i in path[1:]), choices[node]))
