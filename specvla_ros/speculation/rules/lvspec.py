# SPDX-License-Identifier: Apache-2.0
"""LVSpec's loose acceptance: strict where a token depends on the image (arXiv 2604.05650)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.rules.registry import RuleContext, rule

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_ros.speculation.accept import Acceptance, Verification


@dataclass(frozen=True)
class LVSpec:
    """Accepts drafts that depend least on the image, and drafts that the target says a few positions away.

    The relevance of a drafted token is the mean of the `top_n` highest cosine similarities between the target's last
    hidden state at it and those of the image's rows. The share `loose_share` of the drafted tokens with the lowest
    relevance is taken whatever the target says; the others must be its own choice, or be its choice at most `shift`
    positions before or after on the same path (position-shift tolerance). The share is one of the tree's nodes, rounded
    up: with another size of the tree the rule is another.

    The paper's code is not public; this is a reading of its text. For text, not for actions: a loose action token has
    no bound.
    """

    loose_share: float = parameter(  # lambda
        0.3,
        "LVSpec: share of the drafted tokens, those that depend least on the image, that are accepted as they are.",
        minimum=0.0,
        maximum=1.0,
        writable=True,
        name="lvspec_loose_share",
    )
    top_n: int = parameter(
        8,
        "LVSpec: image tokens whose similarity is averaged.",
        minimum=1,
        maximum=4096,
        writable=True,
        name="lvspec_top_n",
    )
    shift: int = parameter(
        1,
        "LVSpec: positions by which a drafted token may be off.",
        unit="tokens",
        minimum=0,
        maximum=16,
        writable=True,
        name="lvspec_shift",
    )
    needs_hidden: ClassVar[bool] = True
    needs_visual: ClassVar[bool] = True

    def accept(self, verification: Verification) -> Acceptance:
        """Exact, irrelevant and shifted tokens.

        Raises:
            ValueError: the verification has no states of the image.
        """
        import torch

        from specvla_ros.speculation.accept import Acceptance, AcceptReason

        trees, exact = verification.trees, verification.exact
        loose = self._loose(verification)
        same = trees.tokens[:, None] == verification.comparison.wanted[:, :, None]  # [requests, k, j]
        later, here = trees.depths[:, :, None], trees.depths[:, None]
        close = ((later - here).abs() <= self.shift) & (later > 0)
        shifted = (verification.on_path.to(torch.float32) @ (same & close).to(torch.float32)) > 0  # [requests, e, j]
        reasons = torch.where(loose, int(AcceptReason.IRRELEVANT), int(AcceptReason.SHIFTED))
        return Acceptance((exact | loose)[:, None] | shifted, torch.where(exact, int(AcceptReason.EXACT), reasons))

    def _loose(self, verification: Verification) -> Tensor:
        """Bool [requests, n]: among the least relevant; never where the states are not finite."""
        import torch
        import torch.nn.functional as F

        if verification.hidden is None or verification.visual is None:
            raise ValueError("LVSpec needs the last hidden states of the image's rows")
        states, visual = verification.hidden.float(), verification.visual.float()
        similarity = F.normalize(states, dim=-1) @ F.normalize(visual, dim=-1).mT
        relevance = similarity.topk(min(self.top_n, visual.shape[1]), dim=-1).values.mean(dim=-1)
        trees = verification.trees
        drafted = trees.valid & (trees.parents >= 0) & relevance.isfinite()
        nodes = torch.arange(relevance.shape[1], device=relevance.device)
        this, other = relevance[:, :, None], relevance[:, None]
        lower = (other < this) | ((other == this) & (nodes < nodes[:, None]))
        rank = (lower & drafted[:, None]).sum(dim=2)
        # In float32, 0.3 of 50 nodes is more than 15.
        return drafted & (rank < self.loose_share * drafted.sum(dim=1, keepdim=True).to(torch.float64) - 1e-9)


@rule("lvspec", settings=LVSpec, order=30)
def _lvspec(context: RuleContext) -> LVSpec:
    made: LVSpec = context.own("lvspec")
    return made
