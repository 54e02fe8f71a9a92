"""LVSpec's loose acceptance: strict where a token depends on the image (arXiv 2604.05650)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_ros.speculation.accept import Acceptance, AcceptReason, Verification


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

    Args:
        loose_share: lambda, 0 to 1.
        top_n: image rows whose similarity counts.
        shift: in positions; 0: no tolerance.
    """

    loose_share: float = 0.3
    top_n: int = 8
    shift: int = 1
    needs_hidden: bool = True
    needs_visual: bool = True

    def accept(self, verification: Verification) -> Acceptance:
        """Exact, irrelevant and shifted tokens.

        Raises:
            ValueError: the verification has no states of the image.
        """
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
