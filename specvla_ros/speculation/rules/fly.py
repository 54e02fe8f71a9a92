# SPDX-License-Identifier: Apache-2.0
"""FLy's loose acceptance: excuses a mismatch if the target is uncertain and later tokens agree (arXiv 2511.22972)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.rules.registry import RuleContext, rule

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_ros.speculation.accept import Acceptance, Verification

ENTROPIES = ("paper", "code")
_CODE_GATE_OFF = 0.01
_CODE_TERMS = 3


@dataclass(frozen=True)
class Fly:
    """Accepts a mismatch if the entropy gate is open and the window after it agrees with the target.

    As in the paper's text, the mismatch at position j of K drafted tokens is accepted if the target's entropy there,
    divided by ln V, is at least theta, the next W tokens of the path are the target's own choices, and j + W <= K. On a
    tree, K is the depth of the deepest draft below the node, and a path may end only where all windows on it are
    complete. W = 0 leaves only the entropy gate.

    The published code differs and is available as `entropy="code"`: entropy in nats over the three most likely tokens
    only, a window of W - 1 tokens, and a theta of at most 0.01 opens the gate always. Its entropy is not monotone: a
    distribution flat over 36 or more tokens counts as certain. A theta is only valid for one of the two variants.

    The defaults take effect within seven tokens: with a window of 2, the first four of six drafts can be excused.
    """

    theta: float = parameter(
        0.3,
        "FLy: min entropy at which a mismatch may be deferred.",
        minimum=0.0,
        maximum=10.0,
        writable=True,
        name="fly_theta",
    )
    window: int = parameter(
        2,
        "FLy: number of tokens after a mismatch that must agree; 0: only the entropy decides.",
        unit="tokens",
        minimum=0,
        maximum=32,
        writable=True,
        name="fly_window",
    )
    entropy: str = parameter(
        "paper",
        "FLy: entropy as defined in its paper, or as computed by its code.",
        choices=ENTROPIES,
        writable=True,
        name="fly_entropy",
    )
    needs_hidden: ClassVar[bool] = False
    needs_visual: ClassVar[bool] = False

    def accept(self, verification: Verification) -> Acceptance:
        import torch

        from specvla_ros.speculation.accept import Acceptance, AcceptReason

        exact, depths, on_path = verification.exact, verification.trees.depths, verification.on_path
        follow = self.window if self.entropy == "paper" else max(0, self.window - 1)
        later, here = depths[:, :, None], depths[:, None]
        within = (later > here) & (later <= here + follow)  # [requests, k, j]: k lies in j's window
        counts = on_path.to(torch.float32) @ (exact[:, :, None] & within).to(torch.float32)  # [requests, e, j]
        reach = torch.where(on_path & verification.trees.valid[:, :, None], later, 0).amax(dim=1)
        excused = (counts == follow) & (self._unsure(verification) & (depths + self.window <= reach))[:, None]
        reasons = torch.where(exact, int(AcceptReason.EXACT), int(AcceptReason.DEFERRED))
        return Acceptance(exact[:, None] | excused, reasons)

    def _unsure(self, verification: Verification) -> Tensor:
        """Bool [requests, n]: True if the gate at the node's position is open; closed if the logits hold a NaN."""
        import torch

        probabilities = verification.logits.softmax(dim=-1)
        if self.entropy == "paper":
            entropy = torch.special.entr(probabilities).sum(dim=-1) / math.log(probabilities.shape[-1])
        else:
            terms = min(_CODE_TERMS, probabilities.shape[-1])
            entropy = torch.special.entr(probabilities.topk(terms, dim=-1).values).sum(dim=-1)
            if self.theta <= _CODE_GATE_OFF:
                return torch.ones_like(verification.exact)
        parents = verification.trees.parents.clamp(min=0)
        return verification.of_nodes(entropy >= self.theta).gather(1, parents)


@rule("fly", settings=Fly, order=20)
def _fly(context: RuleContext) -> Fly:
    return context.own("fly")
