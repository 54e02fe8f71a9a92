# SPDX-License-Identifier: Apache-2.0
"""Which drafted tokens a verification commits: a rule's input and output, and the walk down the tree."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Protocol, runtime_checkable

from torch import Tensor

from specvla_kernels import accept_tree as walk
from specvla_kernels.accept_tree import accept_tree
from specvla_kernels.accept_within import Within
from specvla_kernels.compare_drafts import NO_TOKEN, Comparison, Trees
from specvla_ros.models.codecs.codec import ActionIds, TokenDistances

NOT_A_NUMBER = NO_TOKEN  # in place of a token: the target's logits hold a NaN


class AcceptReason(IntEnum):
    """Why a drafted token was taken, or not."""

    TARGET = walk.TARGET  # the target's own token, not drafted
    EXACT = 1  # drafted, and the target's own choice
    NEAR = 2  # within the bins of tolerance
    DEFERRED = 3  # the target was unsure, and what follows it agrees with
    IRRELEVANT = 4  # among the tokens that depend least on the image
    SHIFTED = 5  # the target's own choice is drafted in another place
    REJECTED = 6


@dataclass(frozen=True)
class Verification:
    """The trees of several requests after their forward, as an acceptance rule sees them."""

    trees: Trees  # the drafts, and the target's greedy choice after each node; padded to n nodes
    actions: ActionIds
    max_depth: int
    logits: Tensor  # float32 [rows, vocab], the target's, of all trees' nodes; see `of_nodes`
    # int64 [requests, n], each node's row of the logits; padding has any. None: one request, its rows in order.
    rows: Tensor | None = None
    # [requests, n, hidden], the target's last hidden states, after the final norm, for rules that need them.
    hidden: Tensor | None = None
    visual: Tensor | None = None  # [requests, image_tokens, hidden], those of the image's rows; likewise
    distances: TokenDistances | None = None  # how far apart tokens are; None: as ids of actions are

    @cached_property
    def comparison(self) -> Comparison:
        """Each node beside the target's own choice."""
        return self.actions.compare(self.trees)

    @cached_property
    def measured(self) -> Comparison:
        """The same, with the codec's own distances; more launches where tokens are no bins."""
        distances = self.distances
        return self.comparison if distances in (None, self.actions) else distances.compare(self.trees)

    @property
    def exact(self) -> Tensor:
        """Bool [requests, n]: the node's token is the target's own choice."""
        return self.comparison.exact

    @property
    def on_path(self) -> Tensor:
        """Bool [requests, n, n]: column j is an ancestor of row e, or e itself."""
        return self.trees.on_path

    def of_nodes(self, values: Tensor) -> Tensor:
        """Values of each row of the logits, by request and node: [rows, …] to [requests, n, …]."""
        return values[None] if self.rows is None else values[self.rows]


@dataclass(frozen=True)
class Acceptance:
    """The decision of a rule."""

    # bool [requests, n, n] or [requests, 1, n]; row e, column j: on a path that ends at node e, node j may be
    # committed. Read where j is an ancestor of e, or e itself; not at the root.
    mask: Tensor
    reasons: Tensor  # int64 [requests, n], an AcceptReason for each node that is accepted
    # The comparison that the rule used, which is reported; None: `Verification.comparison`.
    comparison: Comparison | None = None


class AcceptanceRule(Protocol):
    """Decides which paths may be committed; runs on the device and reads nothing back."""

    @property
    def needs_hidden(self) -> bool:
        """Whether `Verification.hidden` must be there."""

    @property
    def needs_visual(self) -> bool:
        """Whether `Verification.visual` must be there."""

    def accept(self, verification: Verification) -> Acceptance:
        """Which nodes are accepted."""


@runtime_checkable
class ByDistance(Protocol):
    """A rule by each token's distance alone may declare which it accepts: its verification is one launch then.

    It takes bins' distances, as `ActionIds` counts them; `accept` says the same for all others.
    """

    @property
    def within(self) -> Within:
        """The bounds of what it accepts."""


def accept(rule: AcceptanceRule, verification: Verification) -> Tensor:
    """Commits the longest path of each request that the rule allows; see `accept_tree` for ties and the result.

    The published Spec-VLA code takes the first of the longest paths, even where an exact sibling of its last token
    exists.
    """
    accepted = rule.accept(verification)
    comparison = accepted.comparison or verification.comparison
    return accept_tree(verification.trees, comparison, accepted.mask, accepted.reasons, verification.max_depth)
