"""FLy's loose acceptance: where the target is unsure, agreement behind a mismatch excuses it (arXiv 2511.22972)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_ros.speculation.accept import AcceptReason, Judgement, Verification

_CODE_GATE_OFF = 0.01
_CODE_TERMS = 3


@dataclass(frozen=True)
class Fly:
    """Keeps a mismatch where the entropy gate is open and the window behind it agrees with the target.

    The mismatch at place j of K drafted ones is kept if the target's entropy in its place is at least theta, the next
    W tokens of the path are the target's own choices, and j + W <= K; the paper's text, with the entropy divided by
    ln V. On a tree K is the depth of the deepest draft behind the node, and a path may only end where all windows on
    it are complete.

    The published code differs, and is offered as `entropy="code"`: the entropy is that of the three likeliest tokens
    alone, in nats; the window is W - 1 tokens; theta up to 0.01 opens the gate for all. Its entropy is not monotone:
    a distribution flat over 36 tokens or more counts as certain. A theta fits one of the two only.

    The defaults can act within seven tokens: a window of 2 leaves the first four drafts of six to be excused.

    Args:
        theta: entropy from which on the target counts as unsure.
        window: W, in tokens.
        entropy: `paper` or `code`.
    """

    theta: float = 0.3
    window: int = 2
    entropy: str = "paper"
    needs_visual: bool = False

    def judge(self, verification: Verification) -> Judgement:
        """Exact tokens, and mismatches that are excused on the path in question."""
        ancestry, exact = verification.tree.ancestry, verification.exact
        depths, on_path = ancestry.depths, verification.on_path
        follow = self.window if self.entropy == "paper" else self.window - 1
        within = (depths[:, None] > depths) & (depths[:, None] <= depths + follow)  # [k, j]: k lies in j's window
        counts = on_path.to(torch.float32) @ (exact[:, None] & within).to(torch.float32)  # [e, j]
        reach = torch.where(on_path & verification.tree.valid[:, None], depths[:, None], 0).amax(dim=0)
        excused = (counts == follow) & (self._unsure(verification) & (depths + self.window <= reach))
        why = torch.where(exact, int(AcceptReason.EXACT), int(AcceptReason.DEFERRED))
        return Judgement(exact | excused, why)

    def _unsure(self, verification: Verification) -> Tensor:
        """Bool [n]: the gate in each node's place is open; closed where the logits hold a NaN."""
        parents = verification.tree.ancestry.parents.clamp(min=0)
        probabilities = verification.logits.softmax(dim=-1)
        if self.entropy == "paper":
            entropy = torch.special.entr(probabilities).sum(dim=-1) / math.log(probabilities.shape[-1])
        else:
            terms = min(_CODE_TERMS, probabilities.shape[-1])
            entropy = torch.special.entr(probabilities.topk(terms, dim=-1).values).sum(dim=-1)
            if self.theta <= _CODE_GATE_OFF:
                return torch.ones_like(entropy, dtype=torch.bool)
        return (entropy >= self.theta)[parents]
