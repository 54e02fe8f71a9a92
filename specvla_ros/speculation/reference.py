# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in one plain function: the engine's work for one request, without batching or device code.

Tests compare the engine with it forward by forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A drafted token."""

    token: int
    parent: int  # index of an earlier node that it follows; -1: the root, the answer's last token
    log_prob: float = 0.0  # the draft's log-probability of the path to this node


@dataclass(frozen=True)
class Path:
    """Accepted nodes from the root down; `distance` is the sum of their distances to the target's own choices."""

    nodes: tuple[int, ...] = ()
    distance: int = 0
    log_prob: float = 0.0


def decode(
    draft: Callable[[Sequence[int]], Sequence[Node]],
    target: Callable[[Sequence[int], Sequence[Node]], Sequence[int]],
    rule: Callable[[int, int, int], int | None],
    length: int,
) -> list[list[int]]:
    """Decodes one answer.

    Each turn drafts a tree of possible next tokens and evaluates all of them in one forward of the target. Every node
    attends to the prompt, the answer and its own ancestors, so the target's choice after a node is the one it would
    make if the node's path were its answer. A node is accepted if its parent is accepted and the rule accepts its token
    in place of the target's choice after the parent. The longest accepted path is committed, followed by the target's
    own next choice at no extra cost. With `strict` the result is the target's greedy answer.

    Ties between equally long paths: nearest to the target's choices, then most likely draft, then first.

    Args:
        draft: maps the answer so far to a tree; with empty trees this is plain decoding.
        target: maps the answer so far and a tree to the target's choices, after the root and after each node.
        rule: maps a drafted token, the target's choice there and the position in the answer to their distance; None:
            not accepted.

    Returns:
        The tokens committed by each forward; the last forward's are cut at the answer's end.
    """
    answer: list[int] = []
    commits: list[list[int]] = []
    while len(answer) < length:
        nodes = draft(answer)
        choices = target(answer, nodes)  # the one forward; choices[i + 1] comes after node i, choices[0] after the root

        accepted = {-1: Path()}  # by node; the root always is
        for index, node in enumerate(nodes):
            parent = accepted.get(node.parent)
            if parent is None:
                continue
            distance = rule(node.token, choices[node.parent + 1], len(answer) + len(parent.nodes))
            if distance is not None:
                accepted[index] = Path((*parent.nodes, index), parent.distance + distance, node.log_prob)

        end, path = max(accepted.items(), key=lambda at: (len(at[1].nodes), -at[1].distance, at[1].log_prob))
        tokens = [*(nodes[index].token for index in path.nodes), choices[end + 1]]
        commits.append(tokens[: length - len(answer)])
        answer += commits[-1]
    return commits


def strict(token: int, wanted: int, position: int) -> int | None:
    """Accepts only the target's own choice."""
    return 0 if token == wanted else None


def bin_distance(bins: Sequence[int], bin_of: Callable[[int], int | None]) -> Callable[[int, int, int], int | None]:
    """Accepts action tokens within a number of bins of the target's choice (Spec-VLA).

    Args:
        bins: tolerance at each position.
        bin_of: bin of an action token; None for text.
    """

    def rule(token: int, wanted: int, position: int) -> int | None:
        one, other = bin_of(token), bin_of(wanted)
        if one is None or other is None:
            return strict(token, wanted, position)
        return abs(one - other) if abs(one - other) <= bins[position] else None

    return rule
