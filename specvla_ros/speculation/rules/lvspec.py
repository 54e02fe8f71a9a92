# SPDX-License-Identifier: Apache-2.0
"""LVSpec's loose acceptance: strict only for tokens that depend on the image (arXiv 2604.05650)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.rules.registry import RuleContext, rule

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_ros.speculation.accept import Acceptance, Verification

_WHOLE_BRANCH = 63  # no branch is longer
_ROUNDING = 1e-9  # 0.58 * 50 is less than 29 in floating point


@dataclass(frozen=True)
class LVSpec:
    """Accepts drafts that depend least on the image, and drafts if the target's choice is drafted elsewhere.

    Each branch of the tree, a path from the root to a leaf with K drafted tokens, is judged separately (appendix E),
    and the longest accepted path of all branches is committed. A drafted token of a branch is accepted if it is the
    target's own choice; or is among the floor(lambda K) tokens of lowest relevance (eq. 9); or if the target's choice
    at its position is drafted earlier or later in the branch (position-shift tolerance, eq. 11). The relevance of a
    drafted token is the mean of the N highest cosine similarities between the target's last hidden state at the token
    and those of the image's rows (eq. 6 to 8).

    The defaults are the paper's. `shift` limits the distance of the target's choice; the paper has no limit. For text
    only: the error of a loose action token is unbounded. Implemented from the paper's text, without the published code.
    """

    loose_share: float = parameter(
        0.7,
        "LVSpec: share of a branch's drafted tokens, those that depend least on the image, that are always accepted "
        "(lambda).",
        minimum=0.0,
        maximum=1.0,
        writable=True,
        name="lvspec_loose_share",
    )
    top_n: int = parameter(
        10,
        "LVSpec: number of image tokens whose similarity is averaged (N).",
        minimum=1,
        maximum=4096,
        writable=True,
        name="lvspec_top_n",
    )
    shift: int = parameter(
        _WHOLE_BRANCH,
        "LVSpec: max position shift at which the target's token may be drafted elsewhere; 0: no shift tolerance.",
        unit="tokens",
        minimum=0,
        maximum=_WHOLE_BRANCH,
        writable=True,
        name="lvspec_shift",
    )
    needs_hidden: ClassVar[bool] = True
    needs_visual: ClassVar[bool] = True

    def accept(self, verification: Verification) -> Acceptance:
        """Accepts whole paths: those whose tokens are all accepted by one branch."""
        import torch

        from specvla_ros.speculation.accept import Acceptance, AcceptReason

        trees, exact, on_path = verification.trees, verification.exact, verification.trees.on_path
        drafted = trees.valid & (trees.parents >= 0)
        on_branch = _branches(on_path, drafted | (trees.parents < 0)) & drafted[:, None]  # [requests, branch, j]
        loose = on_branch & self._loose(verification, on_branch)
        stands = trees.tokens[:, :, None] == verification.comparison.wanted[:, None]  # [requests, k, j]
        near = (trees.depths[:, :, None] - trees.depths[:, None]).abs() <= self.shift
        shifted = _count(on_branch, stands & near) > 0 if self.shift else torch.zeros_like(loose)
        refused = on_branch & ~(exact[:, None] | loose | shifted)
        whole = on_branch & (_count(refused, on_path.mT) == 0)  # [requests, branch, e]: up to e all are accepted
        reasons = torch.where(loose.any(dim=1), int(AcceptReason.IRRELEVANT), int(AcceptReason.SHIFTED))
        mask = whole.any(dim=1)[:, :, None].expand_as(on_path)
        return Acceptance(mask, torch.where(exact, int(AcceptReason.EXACT), reasons))

    def _loose(self, verification: Verification, on_branch: Tensor) -> Tensor:
        """Bool [requests, branch, j]: True for the branch's least relevant tokens; False for non-finite states."""
        import torch
        import torch.nn.functional as F

        if verification.hidden is None or verification.visual is None:
            raise ValueError("LVSpec needs the last hidden states of the image's rows")
        states, visual = verification.hidden.float(), verification.visual.float()
        similarity = F.normalize(states, dim=-1) @ F.normalize(visual, dim=-1).mT
        relevance = similarity.topk(min(self.top_n, visual.shape[1]), dim=-1).values.mean(dim=-1)
        known = relevance.isfinite()
        nodes = torch.arange(relevance.shape[1], device=relevance.device)
        other, this = relevance[:, :, None], relevance[:, None]
        lower = (other < this) | ((other == this) & (nodes[:, None] < nodes))  # [requests, k, j]
        rank = _count(on_branch, lower & known[:, :, None])
        share = (self.loose_share * on_branch.sum(dim=2, keepdim=True).to(torch.float64) + _ROUNDING).floor()
        return known[:, None] & (rank < share)


def _branches(on_path: Tensor, sound: Tensor) -> Tensor:
    """Bool [requests, branch, j]: the nodes of each branch, in the row of its leaf; all other rows are empty.

    `sound`: bool [requests, n], the root and the drafted nodes that may be accepted; branches end before other nodes.
    """
    reached = _count(on_path, ~sound[:, :, None]).squeeze(2) == 0
    below = _count(on_path.mT, reached[:, :, None]).squeeze(2)  # the node itself included
    return on_path & (reached & (below == 1))[:, :, None]


def _count(these: Tensor, those: Tensor) -> Tensor:
    """Counts the k in both: bool [requests, i, k] and [requests, k, j] to float32 [requests, i, j]."""
    return these.float() @ those.float()


@rule("lvspec", settings=LVSpec, order=30)
def _lvspec(context: RuleContext) -> LVSpec:
    return context.own("lvspec")
