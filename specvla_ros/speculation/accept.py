"""Which drafted tokens a verification commits: what a rule sees, what it answers, and the walk down the tree."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.speculation.tree import Tree

NOT_A_NUMBER = -1
NO_NODE = -1


class AcceptReason(IntEnum):
    """Why a drafted token was taken, or not."""

    TARGET = 0  # the target's own token, not drafted
    EXACT = 1  # drafted, and the target's own choice
    NEAR = 2  # within the bins of tolerance
    DEFERRED = 3  # the target was unsure, and what follows it agrees with
    IRRELEVANT = 4  # among the tokens that depend least on the image
    SHIFTED = 5  # the target's own choice a few places away
    REJECTED = 6


@dataclass(frozen=True)
class Verification:
    """One tree behind its forward.

    Args:
        tree: n nodes, the root first.
        choices: int64 [n], the target's greedy choice behind each node; NOT_A_NUMBER where its logits hold a NaN.
        logits: float32 [n, vocab], the target's.
        hidden: [n, hidden], the target's last hidden states, behind the final norm.
        actions: which ids are actions.
        place: action tokens committed in this answer so far, the root included: the dimension of the next one.
        visual: [image_tokens, hidden], last hidden states of the image's rows; None where no rule asks for them.
    """

    tree: Tree
    choices: Tensor
    logits: Tensor
    hidden: Tensor
    actions: ActionIds
    place: int
    visual: Tensor | None = None

    @cached_property
    def on_path(self) -> Tensor:
        """Bool [n, n]: column j is an ancestor of row e, or e itself."""
        return self.tree.ancestry.matrix()

    @cached_property
    def wanted(self) -> Tensor:
        """int64 [n]: the target's own choice in the place of each node; NOT_A_NUMBER at the root."""
        parents = self.tree.ancestry.parents
        return torch.where(parents >= 0, self.choices[parents.clamp(min=0)], NOT_A_NUMBER)

    @cached_property
    def exact(self) -> Tensor:
        """Bool [n]: the node's token is the target's own choice."""
        return (self.tree.tokens == self.wanted) & (self.tree.ancestry.parents >= 0)

    @cached_property
    def both_actions(self) -> Tensor:
        """Bool [n]: the node's token and the target's choice in its place are action tokens."""
        return self.actions.contain(self.tree.tokens) & self.actions.contain(self.wanted)

    @cached_property
    def bins_off(self) -> Tensor:
        """int64 [n]: bins between the node's token and the target's choice in its place; 0 at the root.

        Where both are text a difference counts 1; where one of them is, as many bins as there are.
        """
        tokens, wanted = self.tree.tokens, self.wanted
        one_is = self.actions.contain(tokens) ^ self.actions.contain(wanted)
        apart = (self.actions.bin_of(tokens) - self.actions.bin_of(wanted)).abs()
        text = torch.where(one_is, self.actions.bins, (tokens != wanted).to(torch.int64))
        off = torch.where(self.both_actions, apart, text)
        return torch.where(self.tree.ancestry.parents >= 0, off, 0)


@dataclass(frozen=True)
class Judgement:
    """A rule's word on each node.

    Args:
        keeps: bool [n, n]; row e, column j: on a path that ends at node e, node j may be committed. Read where j is an
            ancestor of e, or e itself; the root is not asked about.
        why: int64 [n], a `Why` for each node that is kept.
    """

    keeps: Tensor
    why: Tensor


class AcceptanceRule(Protocol):
    """Decides which paths may be committed; runs on the device and never waits for it."""

    @property
    def needs_visual(self) -> bool:
        """Whether `Verification.visual` must be there."""

    def judge(self, verification: Verification) -> Judgement:
        """The rule's word on each node."""


@dataclass(frozen=True)
class Acceptance:
    """What one verification commits: the path's nodes, and the token behind each of them.

    Args:
        nodes: int64 [levels + 1], nodes whose keys and values join the slot's prefix, the root first; then NO_NODE.
        tokens: int64 [levels + 1], the token committed behind each of these nodes: accepted drafts, then the target's
            own choice behind the last node. NOT_A_NUMBER where that is none.
        bins_off: int64 [levels + 1], how far each token is from the target's own choice, in bins.
        why: int64 [levels + 1], a `Why` for each token.
        count: int64 [], nodes on the path, 1 or more; also the number of tokens.
    """

    nodes: Tensor
    tokens: Tensor
    bins_off: Tensor
    why: Tensor
    count: Tensor

    def packed(self) -> Tensor:
        """int64 [4 * (levels + 1) + 1] for one read-back: nodes, tokens, bins_off, why, count."""
        return torch.cat((self.nodes, self.tokens, self.bins_off, self.why, self.count.reshape(1)))


def accept(rule: AcceptanceRule, verification: Verification) -> Acceptance:
    """Commits the longest path that the rule allows.

    Ties go to the path nearest to the target's own choices (sum of bin distances), then to the likelier draft, then to
    the first node. The published Spec-VLA code takes the first of the longest paths, even where an exact sibling of its
    last token exists.

    No path goes past a row of logits with a NaN, whatever the rule: it ends there, with NOT_A_NUMBER as its last token.

    Shapes depend on the tree's shape alone and nothing is read back, so that the step can be part of a CUDA graph.
    """
    tree, on_path = verification.tree, verification.on_path
    depths, is_root = tree.ancestry.depths, tree.ancestry.parents < 0
    judgement = rule.judge(verification)
    # A loose rule would commit what was drafted behind a NaN, and with it hide the NaN from whoever reads the tokens.
    allowed = tree.valid & (tree.relaxable | verification.exact) & (verification.wanted != NOT_A_NUMBER)
    kept = (judgement.keeps & allowed) | is_root
    candidates = (kept | ~on_path).all(dim=1)
    distance = (on_path * verification.bins_off).sum(dim=1)
    likelihood = torch.nan_to_num(tree.log_probs, nan=-torch.inf, neginf=-torch.inf)
    for merit in (depths, -distance, likelihood):
        merit = torch.where(candidates, merit.to(torch.float64), -torch.inf)
        candidates = candidates & (merit == merit.max())
    nodes = torch.arange(len(tree), device=depths.device)
    # Of one element and not none: indexing with a number reads it back.
    end = torch.where(candidates, nodes, len(tree)).amin().reshape(1)
    return _committed(verification, judgement.why, end)


def _committed(verification: Verification, why: Tensor, end: Tensor) -> Acceptance:
    tree = verification.tree
    depths = tree.ancestry.depths
    places = torch.arange(tree.levels + 1, device=depths.device)
    node_ids = torch.arange(len(tree), device=depths.device)
    at = (depths == places[:, None]) & verification.on_path[end]  # [levels + 1, n], one node per place of the path
    nodes = torch.where(at, node_ids, NO_NODE).amax(dim=1)
    behind = torch.cat((nodes[1:], torch.full_like(nodes[:1], NO_NODE)))
    is_last = places == depths[end]
    drafted = behind >= 0
    node = behind.clamp(min=0)
    tokens = torch.where(drafted, tree.tokens[node], NOT_A_NUMBER)
    return Acceptance(
        nodes=nodes,
        tokens=torch.where(is_last, verification.choices[end], tokens),
        bins_off=torch.where(drafted, verification.bins_off[node], 0),
        why=torch.where(drafted, why[node], int(AcceptReason.TARGET)),
        count=depths[end].reshape(()) + 1,
    )
