# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafted tokens: a rule's input and output, and the walk down the tree."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Protocol

from torch import Tensor

from specvla_kernels import accept_tree as walk
from specvla_kernels.accept_tree import accept_tree
from specvla_kernels.compare_drafts import NO_TOKEN, Comparison, Trees
from specvla_ros.models.codecs.codec import ActionIds, TokenDistances

NOT_A_NUMBER = NO_TOKEN  # instead of a token if the target's logits hold a NaN


class AcceptReason(IntEnum):
    """The reason why a token was committed or rejected."""

    TARGET = walk.TARGET  # not drafted: the target's own token
    EXACT = 1  # drafted and the target's own choice
    NEAR = 2  # within the tolerance in bins
    DEFERRED = 3  # the target was uncertain, and the following tokens agree with it
    IRRELEVANT = 4  # among the tokens that depend least on the image
    SHIFTED = 5  # the target's own choice is drafted at another position
    REJECTED = 6


@dataclass(frozen=True)
class Verification:
    """Input to an acceptance rule: the trees of several requests after their forward."""

    trees: Trees  # the drafts, and the target's greedy choice after each node; padded to n nodes
    actions: ActionIds
    max_depth: int
    logits: Tensor  # float32 [rows, vocab], the target's logits for all trees' nodes; see `of_nodes`
    # int64 [requests, n], each node's row of the logits; arbitrary for padding. None: one request, rows in order.
    rows: Tensor | None = None
    # [requests, n, hidden], the target's last hidden states, after the final norm, for rules that need them.
    hidden: Tensor | None = None
    visual: Tensor | None = None  # [requests, image_tokens, hidden], the same for the image's rows
    distances: TokenDistances | None = None  # distances between tokens; None: those of action ids

    @cached_property
    def comparison(self) -> Comparison:
        """Each node compared with the target's own choice."""
        return self.actions.compare(self.trees)

    @cached_property
    def measured(self) -> Comparison:
        """The comparison with the codec's own distances; takes more launches if tokens are not bins."""
        distances = self.distances
        return self.comparison if distances in (None, self.actions) else distances.compare(self.trees)

    @property
    def exact(self) -> Tensor:
        """Bool [requests, n]: True if the node's token is the target's own choice."""
        return self.comparison.exact

    def of_nodes(self, values: Tensor) -> Tensor:
        """Rearranges values per row of the logits by request and node: [rows, …] to [requests, n, …]."""
        return values[None] if self.rows is None else values[self.rows]


@dataclass(frozen=True)
class Acceptance:
    """A rule's decision."""

    # bool [requests, n, n] or [requests, 1, n]; row e, column j: node j may be committed on a path that ends at node e.
    # Only read if j is an ancestor of e, or e itself; not read at the root.
    mask: Tensor
    reasons: Tensor  # int64 [requests, n], the AcceptReason of each accepted node
    # The comparison used by the rule, which is reported; None: `Verification.comparison`.
    comparison: Comparison | None = None


class AcceptanceRule(Protocol):
    """Decides which paths may be committed. It runs on the device and must not read anything back.

    A rule that one kernel can decide declares its bounds in an optional property `within`, a `Within`. This reduces
    verification to one launch, or two for FLy. Tolerances apply to distances in bins, as counted by `ActionIds`;
    `accept` must decide the same for other codecs.
    """

    @property
    def needs_hidden(self) -> bool:
        """True if the rule needs `Verification.hidden`."""

    @property
    def needs_visual(self) -> bool:
        """True if the rule needs `Verification.visual`."""

    def accept(self, verification: Verification) -> Acceptance:
        """Decides which nodes are accepted."""


def accept(rule: AcceptanceRule, verification: Verification) -> Tensor:
    """Commits each request's longest path allowed by the rule; see `accept_tree` for ties and the result.

    The published Spec-VLA code takes the first of the longest paths, even if an exact sibling of its last token exists.
    """
    accepted = rule.accept(verification)
    comparison = accepted.comparison or verification.comparison
    return accept_tree(verification.trees, comparison, accepted.mask, accepted.reasons, verification.max_depth)
